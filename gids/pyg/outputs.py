"""A HopMinibatch in PyG's classes: as a sampler's output, and back; and as Data or HeteroData with its rows.

Called by samplers and by gids.pyg's loaders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, NegativeSampling, NodeSamplerInput, SamplerOutput

from gids.pyg.hops import HopEdges, HopMinibatch
from gids.pyg.inputs import Inputs
from gids.pyg.stores import LABEL
from gids.sampler import Minibatch, Topology
from gids.store.names import Relation, describe_type

Output: TypeAlias = SamplerOutput | HeteroSamplerOutput
K = TypeVar("K")
_OWN = {"edge_index", "n_id", "num_nodes", "e_id", "batch", "num_sampled_nodes", "num_sampled_edges"}
"""Attributes of minibatches besides features, labels and those of seeds."""

_OF_NODES: tuple[str, ...] = ("input_id", "seed_time", "batch_size")
_OF_EDGES: tuple[str, ...] = ("input_id", "edge_label_index", "edge_label", "edge_label_time")
_OF_TRIPLETS: tuple[str, ...] = ("input_id", "src_index", "dst_pos_index", "dst_neg_index", "seed_time")
"""Attributes that the metadata of PyG's node_sample and edge_sample become."""


def output_of(drawn: HopMinibatch) -> Output:
    """The same minibatch as PyG's samplers return it."""
    edges, nodes = drawn.edges, drawn.input_nodes
    if isinstance(nodes, torch.Tensor):
        (hops,) = edges.values()
        return SamplerOutput(
            node=nodes,
            row=hops.index[0],
            col=hops.index[1],
            edge=hops.ids,
            batch=drawn.batch,
            num_sampled_nodes=_only(drawn.nodes_per_hop),
            num_sampled_edges=hops.per_hop,
            metadata=drawn.metadata,
        )
    return HeteroSamplerOutput(
        node=dict(nodes),
        row={r: e.index[0] for r, e in edges.items()},
        col={r: e.index[1] for r, e in edges.items()},
        edge={r: e.ids for r, e in edges.items()},
        batch=drawn.batch,
        num_sampled_nodes=drawn.nodes_per_hop,
        num_sampled_edges={r: e.per_hop for r, e in edges.items()},
        metadata=drawn.metadata,
    )


def bidirectional(output: Output) -> Output:
    """The output with the reverses of its edges. On the CPU: on a GPU, PyG keeps any of parallel edges."""
    nodes = output.node if isinstance(output, SamplerOutput) else next(iter(output.node.values()))
    return _edges_to(nodes.device, _edges_to(torch.device("cpu"), output).to_bidirectional())


def _edges_to(device: torch.device, output: Output) -> Output:
    def moved(ids: Any) -> Any:
        if isinstance(ids, dict):
            return {relation: moved(of_one) for relation, of_one in ids.items()}
        return ids if ids is None else ids.to(device)

    return replace(output, **{name: moved(getattr(output, name)) for name in ("row", "col", "edge")})


def minibatch_of(
    output: Output, topology: Topology, permutation: Any, device: torch.device, *, epoch: int, step: int
) -> HopMinibatch:
    """A HopMinibatch of an output, on a device. permutation: the sampler's edge_permutation.

    Raises TypeError for an output that is not of the topology's kind.
    """
    homogeneous = topology.homogeneous
    if isinstance(output, HeteroSamplerOutput) is homogeneous:
        kind = "SamplerOutput" if homogeneous else "HeteroSamplerOutput"
        raise TypeError(f"the sampler returned a {type(output).__name__}; this loader needs a {kind}")
    none = torch.empty(0, dtype=torch.int64)

    def by_type(values: Any) -> dict[str, Any]:
        return {topology.node_types[0]: values} if homogeneous else values

    def part(values: Any, relation: Relation, default: Any) -> Any:
        return values if homogeneous or values is None else values.get(relation, default)

    edges = {}
    for relation in topology.relations:
        row, col = (part(ends, relation, none) for ends in (output.row, output.col))
        ids, permuted = part(output.edge, relation, none), part(permutation, relation, None)
        if ids is not None:
            ids = ids.to(torch.int64)
            ids = (ids if permuted is None else permuted[ids]).to(device)
        per_hop = part(output.num_sampled_edges, relation, None)
        index = torch.stack([row, col]).to(device, torch.int64)
        edges[relation] = HopEdges(index, ids, None if per_hop is None else list(per_hop))
    sampled = by_type(output.node)
    nodes = {t: sampled.get(t, none).to(device) for t in topology.node_types}
    batch = None
    if output.batch is not None:
        batch = {t: trees.to(device) for t, trees in by_type(output.batch).items()}
    per_hop = output.num_sampled_nodes
    return HopMinibatch(
        none.to(device) if homogeneous else {},
        _only(nodes) if homogeneous else nodes,
        [],
        epoch,
        step,
        batch=_only(batch) if homogeneous else batch,
        edges=edges,
        nodes_per_hop=None if per_hop is None else {t: list(n) for t, n in by_type(per_hop).items()},
        metadata=tuple(output.metadata or ()),
    )


def _only(values: dict[K, Any] | None) -> Any:
    return None if values is None else next(iter(values.values()))


def seed_attributes(inputs: Inputs, negatives: NegativeSampling | None) -> dict[str, tuple[Any, ...]]:
    """The attributes that seeds give to minibatches, and the types that have them, as in PyG. None: Data."""
    kind = inputs.input_type
    if isinstance(inputs, NodeSamplerInput):
        return dict.fromkeys(_OF_NODES, (kind,))
    if negatives is None or not negatives.is_triplet():
        return dict.fromkeys(_OF_EDGES, (kind,))
    if kind is None:
        return dict.fromkeys(_OF_TRIPLETS, (None,))
    src, _, dst = kind
    return dict(zip(_OF_TRIPLETS, ((kind,), (src,), (dst,), (dst,), (src, dst)), strict=True))


def is_of_seeds(attributes: Mapping[str, tuple[Any, ...]], type_: str | Relation, name: str) -> bool:
    """Whether the seeds give this attribute to this type, in place of a table's. attributes: of the seeds."""
    types = attributes.get(name, ())
    return type_ in types or None in types


class MinibatchData:
    """Makes Data with the attributes of torch_geometric.loader's filter_fn.

    attributes: type and attribute name of each table. inputs: the seeds; without a type they make Data, else
    HeteroData. negatives: of seed edges. labelled: node types with labels. made: a class in place of Data or
    HeteroData. Raises ValueError if two attributes have one name, or one has the name of an attribute that
    every minibatch has.
    """

    def __init__(
        self,
        attributes: Mapping[str, tuple[str | Relation, str]],
        inputs: Inputs,
        *,
        negatives: NegativeSampling | None,
        labelled: Collection[str],
        made: type | None,
    ) -> None:
        names = list(attributes.values())
        self._of_seeds = seed_attributes(inputs, negatives)
        for type_, name in names:
            if names.count((type_, name)) > 1:
                raise ValueError(
                    f"two tables would have the name {name!r} of {describe_type(type_)}: give names, "
                    "tables={'a': …, 'b': …}"
                )
            of_seeds = is_of_seeds(self._of_seeds, type_, name)
            if name in _OWN or of_seeds or (name == LABEL and type_ in labelled):
                raise ValueError(
                    f"a table would have the name {name!r} of {describe_type(type_)}, which minibatches have "
                    "already: give another name, tables={'a': …}"
                )
        self._attributes, self._with_rows = attributes, {type_ for type_, _ in names}
        self._input_type: str | Relation | None = inputs.input_type
        self._made = made or (Data if inputs.input_type is None else HeteroData)

    def make(self, minibatch: Minibatch) -> Data | HeteroData:
        """The minibatch as Data. Everything but input_id is on the minibatch's device."""
        assert isinstance(minibatch, HopMinibatch)
        data, edges = self._made(), minibatch.edges

        def storage(type_: str | Relation | None) -> Any:
            return data if self._input_type is None else data[type_]

        for table, (type_, name) in self._attributes.items():
            if isinstance(type_, str) or edges[type_].ids is not None:
                storage(type_)[name] = minibatch.features[table]
        for ntype, labels in minibatch.by_type(minibatch.labels).items():
            storage(ntype)[LABEL] = labels
        nodes = minibatch.by_type(minibatch.input_nodes)
        for ntype, ids in nodes.items():
            storage(ntype).n_id = ids
            if ntype not in self._with_rows:
                storage(ntype).num_nodes = len(ids)
        for relation, sampled in edges.items():
            edge_storage = storage(relation)
            edge_storage.edge_index, edge_storage.e_id = sampled.index, sampled.ids
            edge_storage.num_sampled_edges = sampled.per_hop
        for ntype, trees in minibatch.by_type(minibatch.batch).items():
            storage(ntype).batch = trees
        for ntype, counts in (minibatch.nodes_per_hop or {}).items():
            storage(ntype).num_sampled_nodes = counts
        device = next(iter(nodes.values())).device
        for (name, types), value in zip(self._of_seeds.items(), minibatch.metadata, strict=False):
            for seed_type in types:
                storage(seed_type)[name] = value if value is None or name == "input_id" else value.to(device)
        if "batch_size" in self._of_seeds:
            storage(self._input_type).batch_size = len(minibatch.metadata[0])
        return data
