"""A HopMinibatch as PyG's Data or HeteroData. Made by gids.pyg's loaders; knows no stores."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling

from gids.pyg.hops import HopMinibatch
from gids.pyg.stores import LABEL
from gids.sampler import Minibatch
from gids.store.names import Relation, describe_type

_OWN = frozenset(
    (
        "edge_index",
        "n_id",
        "e_id",
        "batch",
        "num_sampled_nodes",
        "num_sampled_edges",
        "input_id",
        "batch_size",
    )
)
"""Attributes of minibatches besides features and labels."""

_OF_NODES: tuple[str, ...] = ("input_id", "seed_time")
_OF_EDGES: tuple[str, ...] = ("input_id", "edge_label_index", "edge_label", "edge_label_time")
_OF_TRIPLETS: tuple[str, ...] = ("input_id", "src_index", "dst_pos_index", "dst_neg_index", "seed_time")
"""Attributes that the metadata of PyG's node_sample and edge_sample become."""


class MinibatchData:
    """Makes Data with the attributes of torch_geometric.loader's filter_fn.

    attributes: type and attribute name of each table. of_edges: the seeds are edges. input_type: type of the
    seeds, for HeteroData; None makes Data. negatives: of seed edges. labelled: node types with labels. made:
    a class in place of Data or HeteroData. Raises ValueError if two attributes have one name, or one has the
    name of an attribute that every minibatch has.
    """

    def __init__(
        self,
        attributes: Mapping[str, tuple[str | Relation, str]],
        *,
        of_edges: bool,
        input_type: str | Relation | None,
        negatives: NegativeSampling | None,
        labelled: Collection[str],
        made: type | None,
    ) -> None:
        given = list(attributes.values())
        self._seed_names = _OF_NODES if not of_edges else _OF_EDGES
        if negatives is not None and negatives.is_triplet():
            self._seed_names = _OF_TRIPLETS
        for type_, name in given:
            if given.count((type_, name)) > 1:
                raise ValueError(
                    f"two tables would have the name {name!r} of {describe_type(type_)}: give names, "
                    "tables={'a': …, 'b': …}"
                )
            if name in _OWN or name in self._seed_names or (name == LABEL and type_ in labelled):
                raise ValueError(
                    f"a table would have the name {name!r} of {describe_type(type_)}, which minibatches have "
                    "already: give another name, tables={'a': …}"
                )
        self._attributes = attributes
        self._input_type = input_type
        self._made = made or (Data if input_type is None else HeteroData)

    def of(self, minibatch: Minibatch) -> Data | HeteroData:
        """The minibatch as Data. Everything but input_id is on the minibatch's device."""
        assert isinstance(minibatch, HopMinibatch)
        data = self._made()
        if self._input_type is None:
            self._fill(data, minibatch)
        else:
            self._fill_types(data, minibatch, self._input_type)
        return data

    def _seeds(self, minibatch: HopMinibatch) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The attributes of seeds."""
        nodes = minibatch.input_nodes
        device = next(iter(nodes.values())).device if isinstance(nodes, dict) else nodes.device
        for name, value in zip(self._seed_names, minibatch.metadata, strict=False):
            yield name, value if value is None or name == "input_id" else value.to(device)

    def _fill(self, data: Data, minibatch: HopMinibatch) -> None:
        (edges,) = minibatch.edges.values()
        for table, (type_, name) in self._attributes.items():
            if isinstance(type_, str):
                data[name] = minibatch.features[table]
        data.edge_index = edges.index
        for table, (type_, name) in self._attributes.items():
            if not isinstance(type_, str) and edges.ids is not None:
                data[name] = minibatch.features[table]
        if isinstance(minibatch.labels, torch.Tensor):
            data[LABEL] = minibatch.labels
        data.n_id = minibatch.input_nodes
        data.e_id = edges.ids
        data.batch = minibatch.batch
        if minibatch.nodes_per_hop is not None:
            (data.num_sampled_nodes,) = minibatch.nodes_per_hop.values()
        data.num_sampled_edges = edges.per_hop
        for name, value in self._seeds(minibatch):
            data[name] = value
        if self._seed_names is _OF_NODES:
            data.batch_size = len(minibatch.metadata[0])

    def _fill_types(self, data: HeteroData, minibatch: HopMinibatch, input_type: str | Relation) -> None:
        assert isinstance(minibatch.input_nodes, dict)
        for table, (type_, name) in self._attributes.items():
            if isinstance(type_, str) or minibatch.edges[type_].ids is not None:
                data[type_][name] = minibatch.features[table]
        for ntype, values in (minibatch.labels or {}).items():  # type: ignore[union-attr]
            data[ntype][LABEL] = values
        for relation, edges in minibatch.edges.items():
            data[relation].edge_index = edges.index
        for ntype, nodes in minibatch.input_nodes.items():
            data[ntype].n_id = nodes
        for relation, edges in minibatch.edges.items():
            data[relation].e_id = edges.ids
        data.set_value_dict("batch", minibatch.batch)
        data.set_value_dict("num_sampled_nodes", minibatch.nodes_per_hop)
        data.set_value_dict("num_sampled_edges", {r: e.per_hop for r, e in minibatch.edges.items()})
        for name, value in self._seeds(minibatch):
            for type_ in self._types_with(name, input_type):
                data[type_][name] = value
        if self._seed_names is _OF_NODES:
            data[input_type].batch_size = len(minibatch.metadata[0])

    def _types_with(self, name: str, input_type: str | Relation) -> list[str | Relation]:
        """The types that have an attribute of the seeds, as in PyG."""
        if name == "input_id" or self._seed_names is not _OF_TRIPLETS or isinstance(input_type, str):
            return [input_type]
        src, _, dst = input_type
        with_name: dict[str, list[str | Relation]] = {"src_index": [src], "seed_time": [src, dst]}
        return with_name.get(name, [dst])
