"""dgl.dataloading.DataLoader whose features come from a store. The user's entry to everything below it.

Only ``__init__`` and ``__iter__`` differ from DGL's. Sampling stays where DGL does it (this thread, or the
workers); reading, caching and their order belong to gids.loader.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import dgl
import torch
from dgl.dataloading.dataloader import DDPTensorizedDataset, TensorizedDataset

from gids import dgl_finder
from gids.dgl.epoch import Epoch
from gids.dgl.tables import ServedTables
from gids.loader import FeatureLoader
from gids.loader.headroom import raise_descriptor_limit
from gids.store import FeatureStore, Table, open_store

Dataset = str | os.PathLike[str] | FeatureStore

# Kept from before ``enable()`` can replace them.
stock_init = dgl.dataloading.DataLoader.__init__
stock_iter = dgl.dataloading.DataLoader.__iter__


def _reduced(dataset: Any) -> tuple[Any, ...]:
    return dgl_finder.rebuilt, dataset.__reduce_ex__(2)[:3]


# A spawned worker unpickles the dataset first: so it imports gids before DGL, whatever the script imports.
for _dataset in (TensorizedDataset, DDPTensorizedDataset):
    ForkingPickler.register(_dataset, _reduced)


class DataLoader(dgl.dataloading.DataLoader):  # type: ignore[misc]  # DGL has no types
    """``dgl.dataloading.DataLoader`` plus ``gids``: a dataset directory, or an open FeatureStore, that holds
    features which the graph does not; or a list of these, about the same nodes and edges, the graph's own
    dataset first. Every other argument, and what is yielded, is DGL's.

    A column that the sampler asks for (``prefetch_node_feats``, ``prefetch_edge_feats``, and so on) is read
    from the store if that has it, else taken from the graph as DGL does: ``blocks[0].srcdata["feat"]`` has
    the store's dtype and shape, on ``device``. With ``gids=None`` this is DGL's loader.

    gids_window: minibatches sampled ahead of the one handed over, 0 to 23.
    gids_memory_bytes: limit of the memory that all of this takes, on ``device``; None: half of what is
    available there.
    gids_feats: tables that minibatches get though the sampler does not ask for them, in the first block's
    ``srcdata`` (edge tables: every block's ``edata``), or in a subgraph's ``ndata`` (``edata``): names, or
    Tables of any store. Of a column that two stores have it says which is meant.
    gids_policy, gids_engine, gids_options: as in gids.FeatureLoader (gids_options: its other arguments).
    With ``device="cuda"`` (a CUDA build of DGL) the cache is in GPU memory; gids_options={"device": "cpu"}
    keeps it in host memory.

    Iterating blocks while a minibatch is sampled and its rows are read. Each ``for`` is one epoch; the cache
    stays warm between epochs, and a second iterator beside a live one reads through it. The loader holds
    engine and cache until ``close()`` or its end.

    Raises KeyError for a feature that neither store nor graph has, ValueError for a table whose row count is
    not the graph's, for a column that two stores have, or for a device that this DGL does not support; while
    iterating StorageError, which belongs to one minibatch: the next one can be asked for.
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
        gids: Dataset | Sequence[Dataset] | None = None,
        gids_window: int = 16,
        gids_memory_bytes: int | None = None,
        gids_feats: str | Sequence[str | Table] | None = None,
        gids_policy: str = "lookahead",
        gids_engine: str = "auto",
        gids_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if gids is None and gids_feats is not None:
            raise ValueError("gids_feats names tables of a store, but gids=None: give gids=PATH")
        if gids is not None:
            _check_graph_and_device(graph, device, use_uva)
        stock_init(
            self,
            graph,
            indices,
            graph_sampler,
            device=device,
            use_ddp=use_ddp,
            ddp_seed=ddp_seed,
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            use_prefetch_thread=use_prefetch_thread,
            use_alternate_streams=use_alternate_streams,
            pin_prefetcher=pin_prefetcher,
            use_uva=use_uva,
            gpu_cache=gpu_cache,
            **kwargs,
        )
        # Under the arguments' names, because PyTorch Lightning makes a loader anew from its attributes.
        self.gids = gids
        self.gids_window = gids_window
        self.gids_memory_bytes = gids_memory_bytes
        self.gids_feats = gids_feats
        self.gids_policy = gids_policy
        self.gids_engine = gids_engine
        self.gids_options = gids_options
        if gids is None:
            return
        self._opened = ExitStack()
        datasets = [gids] if isinstance(gids, str | os.PathLike | FeatureStore) else list(gids)
        if not datasets:
            raise ValueError("gids=[] has no dataset: give the path of one, or gids=None")
        stores = [open_store(dataset, self._opened) for dataset in datasets]
        self.served_tables = ServedTables(
            stores, graph, graph_sampler, [gids_feats] if isinstance(gids_feats, str) else gids_feats or []
        )
        if self.num_workers > 0:
            raise_descriptor_limit()
        self.feature_loader = FeatureLoader(
            stores[0],
            self.served_tables.tables,
            window_batches=gids_window,
            memory_bytes=gids_memory_bytes,
            policy=gids_policy,
            engine=gids_engine,
            **{"device": self.device, **(gids_options or {})},
        )

    def __iter__(self) -> Iterator[Any]:
        if self.feature_loader is None:
            return cast(Iterator[Any], stock_iter(self))
        if self.shuffle:
            self.dataset.shuffle()
        return Epoch(self, self.feature_loader)

    def stats(self) -> dict[str, Any]:
        """The FeatureLoader's counts, times and memory by purpose; empty with ``gids=None``."""
        return self.feature_loader.stats() if self.feature_loader is not None else {}

    def close(self) -> None:
        """Stop reading and release engine and cache. Iterating afterwards raises. May be called again."""
        if self.feature_loader is not None:
            self.feature_loader.close()
            self._opened.close()


def _check_graph_and_device(graph: Any, device: Any, use_uva: bool) -> None:
    if not isinstance(graph, dgl.DGLGraph):
        raise TypeError(f"gids= needs a dgl.DGLGraph, not {type(graph).__name__}")
    on_cuda = device is not None and torch.device(device).type == "cuda"
    if (on_cuda or use_uva) and not _dgl_has_cuda():
        raise ValueError(
            f"{'use_uva=True' if use_uva else f'device={str(device)!r}'}: this DGL ({dgl.__version__}) is a "
            "CPU-only build, as PyPI's are, and its graphs cannot move to CUDA. Install a CUDA build of DGL "
            "(https://www.dgl.ai/pages/start.html); or take gids.NodeLoader(store, seeds, fanouts, "
            "device='cuda'), which samples and loads on the GPU without DGL; or load on the CPU and move "
            "what the model takes: blocks[0].srcdata['feat'].to('cuda') and block.edges()"
        )


def _dgl_has_cuda() -> bool:
    return dgl.get_global_func("device_api.cuda", allow_missing=True) is not None
