"""Lookahead as a stage of GraphBolt's data pipe: ``datapipe.gids_fetch(store, node_feature_keys=[…])``.

It stands where ``fetch_feature`` does, after sampling, which stays where GraphBolt does it. Reading, caching
and their order belong to gids.loader.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from dgl import graphbolt as gb
from torch.utils.data import IterDataPipe, functional_datapipe
from torch.utils.data.graph import traverse_dps

from gids.dgl.headroom import Headroom, raise_descriptor_limit
from gids.graphbolt.columns import Keys, MinibatchColumns, nbytes_of
from gids.loader import FeatureLoader
from gids.store import FeatureStore

_END = object()


@functional_datapipe("gids_fetch")
class LookaheadFetcher(IterDataPipe[Any]):
    """Minibatches of ``datapipe`` with features from a dataset, sampled ahead and read ahead.

    Functional name: ``gids_fetch``.

    datapipe: yields sampled ``gb.MiniBatch``. store: the dataset's path, or an open gids.FeatureStore.
    node_feature_keys, edge_feature_keys: as of ``fetch_feature``: names, or, of a heterogeneous graph, lists
    of names by type ("source:relation:destination" of edges). window_batches: minibatches sampled ahead of
    the one handed over, 0 to 23. memory_bytes and options: of gids.FeatureLoader.

    ``node_features`` and ``edge_features`` get what ``fetch_feature`` would set, of the stored dtype, in the
    order of the ids, on the FeatureLoader's device (the CPU, unless options say otherwise); features that
    earlier stages fetched stay. Minibatches keep their order. Each ``iter`` is one epoch; the cache stays
    warm between epochs, and a new epoch ends one that was left. Sampling for the window takes place in the
    pipe's thread, or in the workers of ``gb.DataLoader(datapipe, num_workers=…)``.

    Raises KeyError for a feature that the store does not have, and what gids.FeatureLoader raises; while
    iterating StorageError, which belongs to one minibatch: of this pipe the next one can be asked for, while
    ``gb.DataLoader`` ends the epoch.
    """

    def __init__(
        self,
        datapipe: Any,
        store: FeatureStore | str | os.PathLike[str],
        node_feature_keys: Keys = None,
        edge_feature_keys: Keys = None,
        *,
        window_batches: int = 16,
        memory_bytes: int | None = None,
        **options: Any,
    ) -> None:
        opened = store if isinstance(store, FeatureStore) else FeatureStore(store)
        self._columns = MinibatchColumns(opened, node_feature_keys, edge_feature_keys)
        if not _has_fetcher(traverse_dps(datapipe)):
            # gb.DataLoader cuts the pipe before its own fetcher: what is upstream can run in workers.
            datapipe = gb.FeatureFetcher(datapipe, None)
        self.datapipe = datapipe
        self.feature_loader = FeatureLoader(
            opened, self._columns.tables, window_batches=window_batches, memory_bytes=memory_bytes, **options
        )
        self._stream: weakref.ref[Any] | None = None  # weak: a loop that is left drops it, which ends it

    def __iter__(self) -> Iterator[Any]:
        left = self._stream() if self._stream is not None else None
        if left is not None:
            left.close()  # or the new epoch would have no window
        headroom = None
        if _has_workers(traverse_dps(self.datapipe)):
            raise_descriptor_limit()
            headroom = Headroom()
        source = _Source(iter(self.datapipe))
        stream = self.feature_loader.attach(source, self._ids_of, bytes_of=nbytes_of)
        self._stream = weakref.ref(stream)
        return _Epoch(self._columns, source, stream, headroom)

    def _ids_of(self, minibatch: Any) -> dict[str, torch.Tensor]:
        ids = self._columns.ids(minibatch)
        if self.feature_loader.device.type == "cpu":
            return {table: rows.cpu() for table, rows in ids.items()}
        return ids

    def stats(self) -> dict[str, Any]:
        """The FeatureLoader's counts, times and memory by purpose."""
        return self.feature_loader.stats()

    def close(self) -> None:
        """End the epoch, release engine and cache. Iterating afterwards raises. May be called again."""
        self.feature_loader.close()


class _Epoch:
    """One pass. After an error in one minibatch the next can be asked for."""

    def __init__(
        self, columns: MinibatchColumns, source: _Source, stream: Any, headroom: Headroom | None
    ) -> None:
        self._columns, self._source, self._stream, self._headroom = columns, source, stream, headroom
        self._handed_out = 0

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        self._handed_out += 1
        item: Any = next(self._stream, _END)
        if item is _END:
            raise StopIteration
        minibatch, rows = item
        if self._headroom is not None:
            limit = self._headroom.window_limit(self._source.sampled - self._handed_out)
            if limit is not None:
                self._stream.limit_window(*limit)
        self._columns.fill(minibatch, rows)
        return minibatch

    def close(self) -> None:
        self._stream.close()


class _Source:
    """The sampled minibatches of one epoch, counted.

    Workers stop when the last reference to their iterator goes, and an exception keeps the frames that it
    passed through: hence ``next`` with a default.
    """

    def __init__(self, minibatches: Iterator[Any]) -> None:
        self._minibatches = minibatches
        self.sampled = 0

    def __iter__(self) -> _Source:
        return self

    def __next__(self) -> Any:
        minibatch = next(self._minibatches, _END)
        if minibatch is _END:
            self.close()
            raise StopIteration
        self.sampled += 1
        return minibatch

    def close(self) -> None:
        """Called by the stream, too, when it ends."""
        self._minibatches = iter(())


def _has_fetcher(graph: Any) -> bool:
    return any(type(pipe) is gb.FeatureFetcher or _has_fetcher(above) for pipe, above in graph.values())


def _has_workers(graph: Any) -> bool:
    """Whether gb.DataLoader put a loader with workers into the pipe."""
    return any(
        getattr(getattr(pipe, "dataloader", None), "num_workers", 0) > 0 or _has_workers(above)
        for pipe, above in graph.values()
    )
