"""What a model needs to know of a dataset: its sizes and types. Source answers with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from gids.errors import MissingError
from gids.store import FeatureStore, Table
from gids.store.ids import NodeIds
from gids.store.names import Relation, describe_type

T = TypeVar("T")
_USUAL = "x", "feat"
_IN_MEMORY = "x", "y", "edge_index", "edge_attr"
"""Attributes of PyG's Data that a script may look for."""


def seeds_of(store: FeatureStore, seeds: Any, *, by_type: bool) -> Any:
    """Seeds with the ids of the splits that they name.

    seeds: the name of a split ("train"); (node type, seeds), as in PyG, or a mapping from node types to
    seeds, which become a mapping. All else stays as it is. by_type: the dataset has several node types or
    relations; a split is then that of each node type that has it. Raises MissingError for a split that does
    not exist.
    """
    if isinstance(seeds, str):
        having = [ntype for ntype in store.node_types if seeds in store.splits.get(ntype, ())]
        if by_type and having:
            return {ntype: store.split(seeds, ntype) for ntype in having}
        return store.split(seeds)
    is_pair = isinstance(seeds, tuple | list) and len(seeds) == 2 and isinstance(seeds[0], str)
    if is_pair and (isinstance(seeds, tuple) or seeds[0] in store.node_types):  # else a list of texts
        seeds = {seeds[0]: seeds[1]}
    if isinstance(seeds, Mapping):
        return {t: store.split(ids, t) if isinstance(ids, str) else ids for t, ids in seeds.items()}
    return seeds


class DatasetFacts:
    """Sizes and types of the first dataset of a source, and the tables of all of its datasets.

    Attributes: store (the first dataset's); stores. A property of nodes is a number if the dataset
    has one node type, else a dictionary by node type.
    """

    store: FeatureStore
    stores: Sequence[FeatureStore]

    @property
    def num_nodes(self) -> int | dict[str, int]:
        """The number of nodes."""
        return self._by_type(self.store.num_nodes)

    @property
    def num_features(self) -> int | dict[str, int]:
        """The number of values of a row of the input features.

        They are in the table with the key "x", else "feat", of the first dataset that has it, or in the only
        table. Raises MissingError, a KeyError, if the only node type has no such table; of several types,
        those without one are left out.
        """
        return self._by_type(lambda ntype: math.prod(self._features(ntype).shape))

    @property
    def num_classes(self) -> int | dict[str, int]:
        """The number of classes: the highest label plus 1; of labels with several columns, their number.

        Each access reads all labels. Raises MissingError, a KeyError, if the only node type has no labels (of
        several types, those without labels are left out), ValueError for labels that are no classes.
        """
        return self._by_type(self._classes)

    @property
    def node_types(self) -> list[str]:
        """The names of the node types."""
        return list(self.store.node_types)

    @property
    def edge_types(self) -> list[Relation]:
        """The relations: (source type, relation, destination type)."""
        return list(self.store.relations)

    def metadata(self) -> tuple[list[str], list[Relation]]:
        """(node types, edge types), as PyG's heterogeneous models take them."""
        return self.node_types, self.edge_types

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables by name. If several datasets have a name, the first dataset's table."""
        return {name: table for store in reversed(self.stores) for name, table in store.tables.items()}

    def table(self, name: str | None = None) -> Table:
        """A table by its name or key, or the only table of nodes; as FeatureStore.table.

        Looked up in one dataset after the other.
        """
        named = [store for store in self.stores if name in store.tables]
        matching = [
            store
            for store in self.stores
            if any(t.key == name or (name is None and t.kind == "node") for t in store.tables.values())
        ]
        return (named or matching or self.stores)[0].table(name)

    @property
    def labels(self) -> Mapping[str, torch.Tensor]:
        """The labels by node type, on the CPU."""
        return self.store.labels

    def ids(self, ntype: str | None = None) -> NodeIds:
        """The ids that the source of the dataset gave the nodes of a type, as FeatureStore.ids."""
        return self.store.ids(ntype)

    def split(self, name: str, ntype: str | None = None) -> torch.Tensor:
        """The ids of a split, as FeatureStore.split."""
        return self.store.split(name, ntype)

    def __getattr__(self, name: str) -> Any:
        if name in _IN_MEMORY:
            raise AttributeError(
                f"a gids source has no {name!r}: its features stay on disk. Loaders read those of a "
                "minibatch; gids.inference.layerwise() computes the outputs of all nodes"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _by_type(self, value: Callable[[str], T]) -> T | dict[str, T]:
        if len(self.store.node_types) == 1:
            return value(next(iter(self.store.node_types)))
        values = {}
        for ntype in self.store.node_types:
            try:
                values[ntype] = value(ntype)
            except MissingError:
                continue
        return values

    def _features(self, ntype: str) -> Table:
        tables = [t for store in self.stores for t in store.tables.values() if t.type == ntype]
        usual = [t for key in _USUAL for t in tables if t.key == key]
        if usual or len(tables) == 1:
            return (usual or tables)[0]
        names = ", ".join(repr(t.name) for t in tables) or "none"
        raise MissingError(
            f"which table has the features of {describe_type(ntype)} nodes? None has the key 'feat' or 'x' "
            f"(tables: {names}): ask source.table(NAME).shape"
        )

    def _classes(self, ntype: str) -> int:
        if ntype not in self.store.labels:
            raise MissingError(f"{self.store.name} has no labels of {describe_type(ntype)} nodes")
        labels = self.store.labels[ntype]
        columns = math.prod(labels.shape[1:])
        if columns > 1:
            return columns
        if labels.is_floating_point():
            labels = labels[~labels.isnan()]  # nodes without a label
            if bool((labels != labels.floor()).any() | labels.isinf().any()):
                raise ValueError(f"labels of {describe_type(ntype)} nodes are fractions, and no classes")
        return int(labels.max()) + 1 if labels.numel() else 0
