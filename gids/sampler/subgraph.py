"""Bidirectional subgraphs: the sampled edges of all layers, each once, and their reverses.

Called by Neighbor. The rules are those of PyG's SamplerOutput.to_bidirectional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gids.sampler.minibatch import Block
from gids.sampler.topology import Topology
from gids.store.names import Relation, describe_type


def reverse_of(
    relation: Relation, relations: Sequence[Relation] | Mapping[Relation, object]
) -> Relation | None:
    """The relation that holds the reverses: rev_NAME, NAME of rev_NAME, or itself within a node type."""
    src, name, dst = relation
    for other in ((dst, f"rev_{name}", src), (dst, name.removeprefix("rev_"), src)):
        if other in relations and other != relation:
            return other
    return relation if src == dst else None


def bidirectional_layer(
    topology: Topology, layers: Sequence[Sequence[Block]], node_counts: Sequence[int]
) -> list[Block]:
    """The blocks of a bidirectional subgraph, by relation: edges in the order of (destination, source).

    layers: the sampled blocks, by relation. node_counts: by type. If edges are equal, one is kept,
    preferably a relation's own. An edge and its reverse have the same id.
    """
    edges = {}
    for r, relation in enumerate(topology.relations):
        pairs = [layer[r].coo() for layer in layers]
        positions = torch.cat([layer[r].positions for layer in layers])
        edges[relation] = torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs]), positions
    graphs = dict(zip(topology.relations, topology.graphs, strict=True))
    blocks = []
    for relation, (from_type, to_type) in zip(topology.relations, topology.ends, strict=True):
        src, dst, positions = edges[relation]
        reverse = reverse_of(relation, edges)
        assert reverse is not None, "check_reverses was called"
        back, forth, of_reverse = edges[reverse]
        src, dst = torch.cat([src, forth]), torch.cat([dst, back])
        positions = torch.cat([positions, -1 - of_reverse])
        kept = _first_of_equals(src, dst)
        counts = torch.bincount(dst[kept], minlength=node_counts[to_type])
        blocks.append(
            Block(
                torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
                src[kept],
                positions[kept],
                node_counts[from_type],
                graphs[relation],
                reverse=graphs[reverse],
            )
        )
    return blocks


def check_reverses(topology: Topology) -> None:
    """Raise ValueError for a relation that has no relation for its reverses."""
    for relation in topology.relations:
        if reverse_of(relation, topology.relations) is None:
            src, name, dst = relation
            raise ValueError(
                f"subgraph='bidirectional' needs a relation for the reverses of {describe_type(relation)}, "
                f"{describe_type((dst, f'rev_{name}', src))}: convert the dataset with --reverse-edges"
            )


def check_ids_of_reverses(topology: Topology, relation: Relation) -> None:
    """Raise ValueError if the edges of a relation and of that of its reverses cannot have the same ids.

    A table of the relation has rows for both then.
    """
    counts = {g.relation: g.num_edges for g in topology.graphs}
    reverse = reverse_of(relation, counts)
    if reverse is not None and counts[reverse] != counts[relation]:
        raise ValueError(
            f"{describe_type(relation)} has {counts[relation]} edges, and {describe_type(reverse)} has "
            f"{counts[reverse]}: edges with features must have the ids of their reverses in a bidirectional "
            "subgraph; leave the table out of tables="
        )


def _first_of_equals(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """Positions of the edges to keep: the first of equal ones, in the order of (destination, source)."""
    keys, order = (dst << 32 | src).sort(stable=True)  # local ids are below 2^32
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    return order[first]
