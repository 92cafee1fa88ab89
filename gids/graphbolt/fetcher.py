"""Lookahead as a stage of GraphBolt's data pipe: ``datapipe.gids_fetch(source, node_feature_keys=[…])``.

It takes the place of ``fetch_feature``, after GraphBolt's sampling. gids.loader reads and caches. The columns
of a minibatch say which tables and rows it asks for.

GraphBolt names a feature by (domain, type, name): domain is "node" or "edge"; type is a node type, or an edge
type as "source:relation:destination", and None in a homogeneous graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from dgl import graphbolt as gb
from torch.utils.data import IterDataPipe, functional_datapipe
from torch.utils.data.graph import traverse_dps

from gids.closing import Closing
from gids.errors import MissingError
from gids.loader.framework_epoch import FrameworkEpoch, guard_workers
from gids.loader.options import explain_names
from gids.loader.source import Dataset, Source, as_source
from gids.store import FeatureStore, Table

Keys = Sequence[str] | Mapping[str, Sequence[str]] | None
_SEPARATOR = ":"


@functional_datapipe("gids_fetch")
class LookaheadFetcher(Closing, IterDataPipe[Any]):
    """Minibatches of ``datapipe`` with features from a dataset, sampled ahead and read ahead.

    Functional name: ``gids_fetch``.

    datapipe: yields sampled ``gb.MiniBatch``. source: gids.open(...), or for default options the dataset's
    path or a gids.FeatureStore. node_feature_keys, edge_feature_keys: as in ``fetch_feature``: names, or, in
    a heterogeneous graph, lists of names by type ("source:relation:destination" for edges). dtype, device,
    minibatch_rows: as in gids.FeatureLoader.

    ``node_features`` and ``edge_features`` are set as by ``fetch_feature``, in the order of the ids, on
    ``device``. Features that earlier stages fetched stay. Minibatches keep their order. Each ``iter`` is one
    epoch; the cache stays warm between epochs, and a new epoch ends an open one. Sampling takes place in the
    pipe's thread, or in the workers of ``gb.DataLoader(datapipe, num_workers=…)``.

    Raises KeyError for a feature that the dataset does not have, and the errors of gids.FeatureLoader. While
    iterating, an error is raised when its minibatch is due, and ends the epoch.
    """

    @explain_names("gids.graphbolt.LookaheadFetcher")
    def __init__(
        self,
        datapipe: Any,
        source: Source | Dataset,
        node_feature_keys: Keys = None,
        edge_feature_keys: Keys = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        minibatch_rows: int | Mapping[str, int] | None = None,
    ) -> None:
        self._opened = ExitStack()
        opened = as_source(source, self._opened)
        opened.refuse_parts("gids.graphbolt.LookaheadFetcher")
        self._columns = MinibatchColumns(opened.store, node_feature_keys, edge_feature_keys)
        if not _has_fetcher(traverse_dps(datapipe)):
            # gb.DataLoader cuts the pipe before its own fetcher: the part upstream can run in workers.
            datapipe = gb.FeatureFetcher(datapipe, None)
        self.datapipe = datapipe
        self.feature_loader = opened.feature_loader(
            self, self._columns.tables, dtype=dtype, device=device, minibatch_rows=minibatch_rows
        )
        # Weak: a loop that is left drops it, which ends it.
        self._epoch: Callable[[], FrameworkEpoch[Any] | None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        self.feature_loader.check_user(self)
        if (left := self._epoch()) is not None:
            left.close()  # or the new epoch would have no window
        loaders = list(_loaders_with_workers(traverse_dps(self.datapipe)))
        for loader in loaders:
            guard_workers(loader)
        epoch = FrameworkEpoch(
            self.feature_loader,
            iter(self.datapipe),
            self._columns.ids,
            self._columns.fill,
            bytes_of=nbytes_of,
            in_workers=bool(loaders),
        )
        self._epoch = weakref.ref(epoch)
        return epoch

    def stats(self) -> dict[str, Any]:
        """FeatureLoader.stats(): counters, times and memory by purpose."""
        return self.feature_loader.stats()

    def close(self) -> None:
        """End the epoch, release engine and cache. Iterating afterwards raises. Idempotent."""
        if (epoch := self._epoch()) is not None:
            epoch.close()
        self.feature_loader.leave(self)
        self._opened.close()


def _has_fetcher(graph: Any) -> bool:
    return any(type(pipe) is gb.FeatureFetcher or _has_fetcher(above) for pipe, above in graph.values())


def _loaders_with_workers(graph: Any) -> Iterator[Any]:
    """The loaders with workers that gb.DataLoader put into the pipe."""
    for pipe, above in graph.values():
        loader = getattr(pipe, "dataloader", None)
        if getattr(loader, "num_workers", 0) > 0:
            yield loader
        yield from _loaders_with_workers(above)


def table_of(store: FeatureStore, domain: str, type_name: str | None, feature_name: str) -> Table:
    """The table with this name in GraphBolt. Raises KeyError with the known names."""
    type_: Any = type_name
    if type_name is None:  # of a homogeneous graph
        types: list[Any] = list(dict.fromkeys(t.type for t in store.tables.values() if t.kind == domain))
        type_ = types[0] if len(types) == 1 else None
    elif domain == "edge":
        type_ = tuple(type_name.split(_SEPARATOR))
    table = store.find_table(domain, type_, feature_name)
    if table is None:
        known = ", ".join(map(repr, keys_of(store))) or "none"
        raise MissingError(
            f"{store.name} has no feature {(domain, type_name, feature_name)!r} (it has {known})"
        )
    return table


def keys_of(store: FeatureStore) -> list[tuple[str, str | None, str]]:
    """GraphBolt's names of the tables. The type is None in a homogeneous dataset."""
    homogeneous = len(store.node_types) == 1 and len(store.relations) <= 1
    keys = []
    for table in store.tables.values():
        type_name = table.type if isinstance(table.type, str) else _SEPARATOR.join(table.type)
        keys.append((table.kind, None if homogeneous else type_name, table.key))
    return keys


@dataclass(frozen=True, slots=True)
class _Column:
    table: str
    type_name: str | None
    key: str | tuple[str, str]  # in the minibatch's features


class MinibatchColumns:
    """The features that minibatches get. Raises KeyError for one that the dataset does not have, ValueError
    if nothing is asked for.
    """

    def __init__(self, store: FeatureStore, node_feature_keys: Keys, edge_feature_keys: Keys) -> None:
        if not node_feature_keys and not edge_feature_keys:
            raise ValueError("give node_feature_keys or edge_feature_keys: names of features to fetch")
        self._nodes = list(_columns(store, "node", node_feature_keys))
        self._edges = list(_columns(store, "edge", edge_feature_keys))

    @property
    def tables(self) -> list[str]:
        """Names of the tables with these features."""
        return [column.table for column in (*self._nodes, *self._edges)]

    def ids(self, minibatch: Any) -> dict[str, torch.Tensor]:
        """Rows of each table that a minibatch asks for: int64[n], on GraphBolt's device, may repeat."""
        rows = {}
        for column in self._nodes:
            ids = _of_type(minibatch.node_ids(), column.type_name)
            if ids is not None:
                rows[column.table] = ids.to(torch.int64)
        for column in self._edges:
            parts = [ids for ids in self._edge_ids(minibatch, column) if ids is not None]
            if parts:
                rows[column.table] = torch.cat(parts).to(torch.int64)
        return rows

    def fill(self, minibatch: Any, rows: Mapping[str, torch.Tensor]) -> Any:
        """The minibatch, with the features. rows: of each table, in the order of ``ids``."""
        nodes = dict(minibatch.node_features or {})
        for column in self._nodes:
            if column.table in rows:
                nodes[column.key] = rows[column.table]
        minibatch.set_node_features(nodes)
        layers = [dict(features) for features in minibatch.edge_features or ()]
        layers = layers or [{} for _ in range(minibatch.num_layers())]
        for column in self._edges:
            start = 0
            for layer, ids in zip(layers, self._edge_ids(minibatch, column), strict=True):
                if ids is not None:
                    layer[column.key] = rows[column.table][start : start + len(ids)]
                    start += len(ids)
        minibatch.set_edge_features(layers)
        return minibatch

    def _edge_ids(self, minibatch: Any, column: _Column) -> list[torch.Tensor | None]:
        """The edge ids of each layer; None for a layer without edges of the column's type."""
        every = []
        for layer in range(minibatch.num_layers()):
            ids = minibatch.edge_ids(layer)
            if ids is None:
                raise ValueError(
                    f"layer {layer} of a sampled minibatch has no edge ids, so its rows of {column.table!r} "
                    "are unknown: let the sampler keep original_edge_ids"
                )
            if isinstance(ids, Mapping):  # by "a:b:c" or (a, b, c)
                ids = {k if isinstance(k, str) else _SEPARATOR.join(k): v for k, v in ids.items()}
            every.append(_of_type(ids, column.type_name))
        return every


def nbytes_of(item: Any) -> int:
    """Memory of all tensors in a sampled minibatch."""
    if isinstance(item, torch.Tensor):
        if item.layout is torch.strided:
            return item.nbytes
        return item._nnz() * (item.element_size() + 16)  # a value and its indices, about
    if isinstance(item, Mapping):
        return sum(map(nbytes_of, item.values()))
    if isinstance(item, list | tuple):
        return sum(map(nbytes_of, item))
    return sum(map(nbytes_of, vars(item).values())) if hasattr(item, "__dict__") else 0


def _columns(store: FeatureStore, domain: str, keys: Keys) -> Iterator[_Column]:
    if isinstance(keys, str):
        raise TypeError(f"{domain}_feature_keys={keys!r}: give a list, [{keys!r}]")
    by_type: Mapping[Any, Sequence[str]] = keys if isinstance(keys, Mapping) else {None: keys or ()}
    for type_name, names in by_type.items():
        for name in names:
            key = name if type_name is None else (type_name, name)
            yield _Column(table_of(store, domain, type_name, name).name, type_name, key)


def _of_type(ids: Any, type_name: str | None) -> torch.Tensor | None:
    if isinstance(ids, Mapping) != (type_name is not None):
        graph, keys = ("a heterogeneous", "by type") if type_name is None else ("a homogeneous", "a list")
        raise ValueError(
            f"the minibatch is of {graph} graph: give node_feature_keys and edge_feature_keys as {keys}"
        )
    return ids.get(type_name) if isinstance(ids, Mapping) else ids
