"""A HopMinibatch as PyG's Data or HeteroData. Made by gids.pyg's loaders; knows no stores."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling, NodeSamplerInput

from gids.pyg.hops import HopMinibatch
from gids.pyg.inputs import Inputs
from gids.pyg.stores import LABEL
from gids.sampler import Minibatch
from gids.store.names import Relation, describe_type

_OWN = {"edge_index", "n_id", "num_nodes", "e_id", "batch", "num_sampled_nodes", "num_sampled_edges"}
"""Attributes of minibatches besides features, labels and those of seeds."""

_OF_NODES: tuple[str, ...] = ("input_id", "seed_time", "batch_size")
_OF_EDGES: tuple[str, ...] = ("input_id", "edge_label_index", "edge_label", "edge_label_time")
_OF_TRIPLETS: tuple[str, ...] = ("input_id", "src_index", "dst_pos_index", "dst_neg_index", "seed_time")
"""Attributes that the metadata of PyG's node_sample and edge_sample become."""


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
        self._seed_names = _OF_NODES if isinstance(inputs, NodeSamplerInput) else _OF_EDGES
        if negatives is not None and negatives.is_triplet():
            self._seed_names = _OF_TRIPLETS
        for type_, name in names:
            if names.count((type_, name)) > 1:
                raise ValueError(
                    f"two tables would have the name {name!r} of {describe_type(type_)}: give names, "
                    "tables={'a': …, 'b': …}"
                )
            if name in _OWN or name in self._seed_names or (name == LABEL and type_ in labelled):
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

        def storage(type_: str | Relation) -> Any:
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
        for name, value in zip(self._seed_names, minibatch.metadata, strict=False):
            for type_ in self._types_with(name):
                storage(type_)[name] = value if value is None or name == "input_id" else value.to(device)
        if self._seed_names is _OF_NODES:
            storage(self._input_type or "").batch_size = len(minibatch.metadata[0])
        return data

    def _types_with(self, name: str) -> list[str | Relation]:
        """The types that have an attribute of the seeds, as in PyG."""
        kind = self._input_type
        if not isinstance(kind, tuple) or name == "input_id" or self._seed_names is not _OF_TRIPLETS:
            return [kind or ""]
        src, _, dst = kind
        with_name: dict[str, list[str | Relation]] = {"src_index": [src], "seed_time": [src, dst]}
        return with_name.get(name, [dst])
