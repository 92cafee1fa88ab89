"""Lookahead as a stage of GraphBolt's data pipe: ``datapipe.gids_fetch(source, node_feature_keys=[…])``.

It takes the place of ``fetch_feature``, after GraphBolt's sampling. gids.loader reads and caches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from dgl import graphbolt as gb
from torch.utils.data import IterDataPipe, functional_datapipe
from torch.utils.data.graph import traverse_dps

from gids.closing import Closing
from gids.graphbolt.columns import Keys, MinibatchColumns, nbytes_of
from gids.loader.framework_epoch import FrameworkEpoch, guard_workers
from gids.loader.learned import Learned
from gids.loader.options import explain_names
from gids.loader.source import Dataset, Source, as_source


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
    iterating: StorageError concerns one minibatch; this pipe continues with the next one, and
    ``gb.DataLoader`` ends the epoch.
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
        self._learned = Learned()
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
            learned=self._learned,
        )
        self._epoch = weakref.ref(epoch)
        return epoch

    def stats(self) -> dict[str, Any]:
        """FeatureLoader.stats(): counters, times and memory by purpose."""
        return self.feature_loader.stats_of(self._learned)

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
