"""A HopMinibatch as PyG's Data or HeteroData. Called by NeighborLoader; knows no stores and no loaders."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch_geometric.data import Data, HeteroData

from gids.pyg.attributes import LABEL
from gids.pyg.hops import HopMinibatch
from gids.sampler import Minibatch
from gids.store.names import Relation, describe_type

_OWN = frozenset(
    ("edge_index", "n_id", "e_id", "num_sampled_nodes", "num_sampled_edges", "input_id", "batch_size")
)
"""Attributes of minibatches besides features and labels."""


class MinibatchData:
    """Makes Data with the attributes of torch_geometric.loader.NodeLoader.filter_fn.

    attributes: type and attribute name of each table. input_type: node type of the seeds, for HeteroData;
    None makes Data. labelled: node types with labels. Raises ValueError if two attributes have one name, or
    one has the name of an attribute that every minibatch has.
    """

    def __init__(
        self,
        attributes: Mapping[str, tuple[str | Relation, str]],
        *,
        input_type: str | None,
        labelled: Collection[str],
    ) -> None:
        given = list(attributes.values())
        for type_, name in given:
            if given.count((type_, name)) > 1:
                raise ValueError(
                    f"two tables would have the name {name!r} of {describe_type(type_)}: give names, "
                    "tables={'a': …, 'b': …}"
                )
            if name in _OWN or (name == LABEL and type_ in labelled):
                raise ValueError(
                    f"a table would have the name {name!r} of {describe_type(type_)}, which minibatches have "
                    "already: give another name, tables={'a': …}"
                )
        self._attributes = attributes
        self._input_type = input_type

    def of(self, minibatch: Minibatch, input_id: torch.Tensor) -> Data | HeteroData:
        """The minibatch as Data. Everything but input_id is on the minibatch's device."""
        assert isinstance(minibatch, HopMinibatch)
        return (
            self._homogeneous(minibatch, input_id)
            if self._input_type is None
            else self._of_types(minibatch, input_id, self._input_type)
        )

    def _homogeneous(self, minibatch: HopMinibatch, input_id: torch.Tensor) -> Data:
        (edges,) = minibatch.edges.values()
        data = Data()
        for table, (type_, name) in self._attributes.items():
            if isinstance(type_, str):
                data[name] = minibatch.features[table]
        data.edge_index = edges.index
        for table, (type_, name) in self._attributes.items():
            if not isinstance(type_, str):
                data[name] = minibatch.features[table]
        if isinstance(minibatch.labels, torch.Tensor):
            data[LABEL] = minibatch.labels
        data.n_id = minibatch.input_nodes
        data.e_id = edges.ids
        (data.num_sampled_nodes,) = minibatch.nodes_per_hop.values()
        data.num_sampled_edges = edges.per_hop
        data.input_id = input_id
        data.batch_size = len(input_id)
        return data

    def _of_types(self, minibatch: HopMinibatch, input_id: torch.Tensor, input_type: str) -> HeteroData:
        data = HeteroData()
        assert isinstance(minibatch.input_nodes, dict)
        for table, (type_, name) in self._attributes.items():
            data[type_][name] = minibatch.features[table]
        for ntype, values in (minibatch.labels or {}).items():  # type: ignore[union-attr]
            data[ntype][LABEL] = values
        for relation, edges in minibatch.edges.items():
            data[relation].edge_index = edges.index
        for ntype, nodes in minibatch.input_nodes.items():
            data[ntype].n_id = nodes
        for relation, edges in minibatch.edges.items():
            data[relation].e_id = edges.ids
        data.set_value_dict("num_sampled_nodes", minibatch.nodes_per_hop)
        data.set_value_dict("num_sampled_edges", {r: e.per_hop for r, e in minibatch.edges.items()})
        data[input_type].input_id = input_id
        data[input_type].batch_size = len(input_id)
        return data
