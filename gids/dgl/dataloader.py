"""dgl.dataloading.DataLoader with features from a dataset on disk. Users make it, or call enable().

Only ``__init__`` and ``__iter__`` differ from DGL's. DGL samples, in this thread or in workers; gids.loader
reads and caches. FrameworkEpoch replaces DGL's own prefetching iterator, which fails if sampling takes 30 s.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any, cast

import dgl
import torch
from dgl.dataloading import dataloader as stock
from dgl.utils import recursive_apply, recursive_apply_pair
from torch import Tensor

from gids.closing import Closing
from gids.dgl.minibatch import OwnColumns, SampledMinibatch, fill, own_columns, restore_columns
from gids.dgl.tables import ServedTables
from gids.loader import FeatureLoader
from gids.loader.facts import seeds_of
from gids.loader.framework_epoch import FrameworkEpoch, guard_workers
from gids.loader.options import OPTIONS, TUNING, check_names
from gids.loader.source import Dataset, Source, as_source
from gids.store import FeatureStore, Table

_OWN = ("gids", "gids_feats", "gids_dtype", "gids_device", "gids_minibatch_rows")
_NOT_OF_NODES = (
    dgl.dataloading.EdgePredictionSampler,
    dgl.dataloading.SAINTSampler,
    dgl.dataloading.ClusterGCNSampler,
)
"""Samplers whose indices are no nodes."""
# Saved before ``enable()`` can replace them.
_stock_init = dgl.dataloading.DataLoader.__init__
_stock_iter = dgl.dataloading.DataLoader.__iter__


class DataLoader(dgl.dataloading.DataLoader):  # type: ignore[misc]  # DGL has no types
    """``dgl.dataloading.DataLoader`` with one more argument, ``gids``: gids.open(...) of the dataset that
    holds the features; or, for default options, its path or a FeatureStore, or a list of these with the same
    nodes and edges, the graph's own dataset first. All other arguments and the minibatches are DGL's.

    indices: as in DGL; for samplers of nodes also the name of a split, such as ``"train"``, alone or by node
    type: ``{"paper": "train"}``, ``("paper", "train")``.

    A column that the sampler asks for (``prefetch_node_feats``, ``prefetch_edge_feats``, and so on) is read
    from the dataset if it is there, else from the graph as in DGL: the rows of the sampled graph's dgl.NID or
    dgl.EID. ``blocks[0].srcdata["feat"]`` has the stored dtype and shape, on ``device``. With ``gids=None``
    this is DGL's loader.

    gids_feats: tables that minibatches get although the sampler does not ask for them: names, or Tables of
    any store. They are in the first block's ``srcdata`` (edge tables: in every block's ``edata``), or in a
    subgraph's ``ndata`` (``edata``). gids_dtype, gids_minibatch_rows: dtype and minibatch_rows of
    gids.FeatureLoader. gids_device: where the cache and the features are (default: ``device``).

    The iterator blocks while a minibatch is sampled and its rows are read. Each ``for`` is one epoch. The
    cache stays warm between epochs. The loader holds engine and cache until ``close()``, or until it is
    garbage-collected.

    Raises KeyError for a feature that neither dataset nor graph has, and for a split that the dataset does
    not have; ValueError for a split where the sampler takes no nodes, for a table whose row count is not the
    graph's, for a graph whose nodes or edges were reordered (dgl.reorder_graph), or for a device that this
    DGL does not support. While iterating: StorageError; ValueError for a minibatch that asks for
    nothing, or whose ids are not those of the graph; and the sampler's errors.
    """

    feature_loader: FeatureLoader | None = None

    def __init__(
        self,
        graph: Any,
        indices: Any,
        graph_sampler: Any,
        device: Any = None,
        use_ddp: bool = False,
        ddp_seed: int = 0,
        batch_size: int | None = 1,
        drop_last: bool = False,
        shuffle: bool = False,
        use_prefetch_thread: bool | None = None,
        use_alternate_streams: bool | None = None,
        pin_prefetcher: bool | None = None,
        use_uva: bool = False,
        gpu_cache: Any = None,
        *,
        gids: Source | Dataset | Sequence[Dataset] | None = None,
        gids_feats: str | Sequence[str | Table] | None = None,
        gids_dtype: torch.dtype | None = None,
        gids_device: str | torch.device | None = None,
        gids_minibatch_rows: int | Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        not_dgls = [name for name in kwargs if name in (*OPTIONS, *TUNING) or "gids" in name]
        check_names("gids.dgl.DataLoader", not_dgls, _OWN)
        if gids is None and gids_feats is not None:
            raise ValueError("gids_feats names tables of a dataset, but gids=None: give gids=PATH")
        source = None
        if gids is not None:
            _check_graph_and_device(graph, device, use_uva)
            self._opened = ExitStack()
            source = as_source(gids, self._opened)
            source.refuse_parts("gids.dgl.DataLoader")
            indices = _with_splits(indices, source.store, graph, graph_sampler)
        _stock_init(
            self,
            graph,
            indices,
            graph_sampler,
            *(device, use_ddp, ddp_seed, batch_size, drop_last, shuffle, use_prefetch_thread),
            *(use_alternate_streams, pin_prefetcher, use_uva, gpu_cache),
            **kwargs,
        )
        # Named like the arguments, because PyTorch Lightning makes a new loader from its attributes.
        self.gids = gids
        self.gids_feats = gids_feats
        self.gids_dtype = gids_dtype
        self.gids_device = gids_device
        self.gids_minibatch_rows = gids_minibatch_rows
        if source is None:
            return
        feats = [gids_feats] if isinstance(gids_feats, str) else gids_feats or []
        self.served_tables = ServedTables(source, graph, graph_sampler, feats)
        self.feature_loader = source.feature_loader(
            self,
            self.served_tables.tables,
            dtype=gids_dtype,
            device=self.device if gids_device is None else gids_device,
            minibatch_rows=gids_minibatch_rows,
        )
        self._epochs: weakref.WeakSet[FrameworkEpoch[Any]] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Any]:
        if self.feature_loader is None:
            return cast(Iterator[Any], _stock_iter(self))
        self.feature_loader.check_user(self)
        if self.shuffle:
            self.dataset.shuffle()
        epoch = FrameworkEpoch(
            self.feature_loader,
            _sampled(self, own := own_columns(self.graph)),
            attrgetter("ids"),
            partial(_finished, self, own),
            bytes_of=attrgetter("nbytes"),
            in_workers=self.num_workers > 0,
        )
        self._epochs.add(epoch)
        return epoch

    def stats(self) -> dict[str, Any]:
        """FeatureLoader.stats(): counters, times and memory. Empty with ``gids=None``."""
        return self.feature_loader.stats() if self.feature_loader is not None else {}

    def close(self) -> None:
        """End the open epochs, release engine and cache. Iterating afterwards raises. Idempotent."""
        if self.feature_loader is not None:
            for epoch in list(self._epochs):
                epoch.close()
            self.feature_loader.leave(self)
            self._opened.close()

    __enter__, __exit__ = Closing.__enter__, Closing.__exit__


def _finished(loader: Any, own: OwnColumns, sampled: SampledMinibatch, rows: Mapping[str, Tensor]) -> Any:
    """DGL fetches the other lazy columns, such as labels, and moves the graphs to the device."""
    restore_columns(sampled.batch, own)
    batch, columns, _ = stock._prefetch(sampled.batch, loader, None)
    batch = recursive_apply_pair(batch, columns, stock._assign_for)
    fill(batch, rows, loader.device)
    return batch


def _sampled(loader: Any, own: OwnColumns) -> Iterator[SampledMinibatch]:
    """PyTorch's iterator, which does not hold the loader."""
    graph, tables = loader.graph, loader.served_tables

    def without_served_columns(batch: Any) -> SampledMinibatch:
        batch = recursive_apply(batch, stock.restore_parent_storage_columns, graph)
        return SampledMinibatch(batch, tables, graph, own)

    if loader.num_workers:
        guard_workers(loader)
    return map(without_served_columns, torch.utils.data.DataLoader.__iter__(loader))


def enable() -> None:
    """Let ``dgl.dataloading.DataLoader`` itself take ``gids=`` and its companions (see DataLoader).

    The class stays the same object, so earlier imports, subclasses and isinstance keep working. Without
    ``gids=`` it behaves as before. Idempotent.
    """
    for name in ("__init__", "__iter__", "stats", "close", "feature_loader", "__enter__", "__exit__"):
        setattr(dgl.dataloading.DataLoader, name, vars(DataLoader)[name])


def _with_splits(indices: Any, store: FeatureStore, graph: Any, sampler: Any) -> Any:
    """The indices with the node ids of the splits that they name.

    Raises MissingError for a split that does not exist, ValueError if the sampler's indices are no nodes.
    """
    values = indices.values() if isinstance(indices, Mapping) else indices
    if not isinstance(indices, Mapping | list | tuple):
        values = (indices,)
    if isinstance(sampler, _NOT_OF_NODES) and any(isinstance(value, str) for value in values):
        raise ValueError(
            f"indices={indices!r} names nodes, but {type(sampler).__name__} takes others: give numbers, such "
            "as edge ids, as to DGL's own loader"
        )
    return seeds_of(store, indices, by_type=len(graph.ntypes) > 1)


def _check_graph_and_device(graph: Any, device: Any, use_uva: bool) -> None:
    if not isinstance(graph, dgl.DGLGraph):
        raise TypeError(f"gids= needs a dgl.DGLGraph, not {type(graph).__name__}")
    on_cuda = use_uva or (device is not None and torch.device(device).type == "cuda")
    if on_cuda and dgl.get_global_func("device_api.cuda", allow_missing=True) is None:
        raise ValueError(
            f"device='cuda' and use_uva=True: this DGL ({dgl.__version__}) is a CPU-only build, as PyPI's. "
            "Install a CUDA build of DGL (https://www.dgl.ai/pages/start.html); or use gids.NodeLoader(..., "
            "device='cuda') without DGL; or load on the CPU and move the model's inputs"
        )
