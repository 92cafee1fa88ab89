"""A HopMinibatch as Data or HeteroData with its rows. Called by gids.pyg's loaders."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, NegativeSampling, NodeSamplerInput, SamplerOutput

from gids.cuda import on_host
from gids.pyg.hops import HopEdges, HopMinibatch
from gids.pyg.inputs import Inputs
from gids.pyg.stores import LABEL
from gids.sampler import Minibatch
from gids.store.names import Relation, describe_type

_OWN = {"edge_index", "num_nodes", "num_sampled_nodes", "num_sampled_edges"}
"""Attributes of minibatches besides features, labels and those of seeds. As in PyG, tables may be called n_id
and e_id, whose rows then take the place of the ids, and batch, unless subgraphs are disjoint."""

_OF_NODES: tuple[str, ...] = ("input_id", "seed_time", "batch_size")
_OF_EDGES: tuple[str, ...] = ("input_id", "edge_label_index", "edge_label", "edge_label_time")
_OF_TRIPLETS: tuple[str, ...] = ("input_id", "src_index", "dst_pos_index", "dst_neg_index", "seed_time")
"""Attributes that the metadata of PyG's node_sample and edge_sample become."""


def bidirectional(drawn: HopMinibatch) -> HopMinibatch:
    """The minibatch with the reverses of its edges, which PyG adds. On the CPU: on a GPU, PyG keeps any of
    parallel edges."""
    rows: dict[Relation, Any] = {}
    columns: dict[Relation, Any] = {}
    ids: dict[Relation, Any] = {}
    for relation, edges in drawn.edges.items():
        rows[relation], columns[relation] = on_host(edges.index)
        ids[relation] = None if edges.ids is None else on_host(edges.ids)
    nodes = drawn.input_nodes
    if isinstance(nodes, torch.Tensor):
        [only] = drawn.edges
        one = SamplerOutput(nodes, rows[only], columns[only], ids[only]).to_bidirectional()
        rows, columns, ids = {only: one.row}, {only: one.col}, {only: one.edge}
    else:
        several = HeteroSamplerOutput(nodes, rows, columns, ids).to_bidirectional()
        rows, columns, ids = several.row, several.col, several.edge
    device = next(iter(drawn.edges.values())).index.device
    both = {}
    for relation in drawn.edges:
        index, of_edges = torch.stack([rows[relation], columns[relation]]), ids[relation]
        both[relation] = HopEdges(index.to(device), None if of_edges is None else of_edges.to(device), None)
    return replace(drawn, edges=both, nodes_per_hop=None)


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
    HeteroData. negatives: of seed edges. labelled: node types with labels. Raises ValueError if two
    attributes have one name, or one has the name of an attribute that every minibatch has.
    """

    def __init__(
        self,
        attributes: Mapping[str, tuple[str | Relation, str]],
        inputs: Inputs,
        *,
        negatives: NegativeSampling | None,
        labelled: Collection[str],
    ) -> None:
        self._names = names = list(attributes.values())
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

    def make(self, minibatch: Minibatch) -> Data | HeteroData:
        """The minibatch as Data. Everything but input_id is on the minibatch's device."""
        assert isinstance(minibatch, HopMinibatch)
        data, edges = (Data() if self._input_type is None else HeteroData()), minibatch.edges

        def storage(type_: str | Relation | None) -> Any:
            return data if self._input_type is None else data[type_]

        for table, (type_, name) in self._attributes.items():
            if isinstance(type_, str) or edges[type_].ids is not None:
                storage(type_)[name] = minibatch.features[table]
        for ntype, labels in minibatch.by_type(minibatch.labels).items():
            storage(ntype)[LABEL] = labels
        nodes = minibatch.by_type(minibatch.input_nodes)
        for ntype, ids in nodes.items():
            if (ntype, "n_id") not in self._names:
                storage(ntype).n_id = ids
            if ntype not in self._with_rows:
                storage(ntype).num_nodes = len(ids)
        for relation, sampled in edges.items():
            edge_storage = storage(relation)
            edge_storage.edge_index = sampled.index
            if (relation, "e_id") not in self._names:
                edge_storage.e_id = sampled.ids
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
