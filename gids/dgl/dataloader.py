"""dgl.dataloading.DataLoader with features from a dataset on disk. Users make it, or call enable().

Only ``__init__`` and ``__iter__`` differ from DGL's. DGL samples, in this thread or in workers; gids.loader
reads and caches. FrameworkEpoch replaces DGL's own prefetching iterator, which fails if sampling takes 30 s.

DGL's samplers mark a column to fetch with a LazyFeature in a sampled graph's frame. The columns that the
dataset has are removed when a minibatch is sampled, so that DGL's own prefetch reads the others (labels,
other columns of the graph), and filled when it is handed out. A minibatch is any nesting of tuples, lists
and mappings with DGLGraphs.

A column that nothing marks has the rows that DGL would slice out of the loader's graph. dgl.NID and dgl.EID
may be others: if a graph is sampled from a sampled graph, or made by to_block, they are ids in that one.
"""

from __future__ import annotations

import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any, cast

import dgl
import torch
from dgl import EID, NID, DGLGraph, LazyFeature
from dgl.dataloading import dataloader as stock
from dgl.frame import Column as FrameColumn
from dgl.utils import recursive_apply, recursive_apply_pair
from torch import Tensor

from gids.closing import Closing
from gids.dgl.tables import ServedTables
from gids.errors import MissingError
from gids.loader import FeatureLoader
from gids.loader.framework_epoch import FrameworkEpoch, guard_workers
from gids.loader.learned import Learned
from gids.loader.options import check_names
from gids.loader.source import Dataset, Source, as_source
from gids.store import Table

_OWN = ("gids", "gids_feats", "gids_dtype", "gids_device", "gids_minibatch_rows")
_NOT_DGL = {"memory", "memory_bytes", "window", "window_batches", "cache", "cache_bytes", "policy", "engine"}
"""Options of gids.open() that users may give here. DGL would pass them on to torch."""
_ADDED = ("stats", "close", "feature_loader", "__enter__", "__exit__")
"""What enable() adds to DGL's class."""
_ROWS = "_gids_rows"
"""A column of the rows in the loader's graph, where they are not dgl.NID or dgl.EID."""
_FIRST = 1 << 40
"""What the column has for row 0 while the graph is sampled. What DGL adds has other numbers."""

# Saved before ``enable()`` can replace them.
_stock_init = dgl.dataloading.DataLoader.__init__
_stock_iter = dgl.dataloading.DataLoader.__iter__


class _Numbers(Tensor):
    """_FIRST, _FIRST + 1, …: int64[n]. DGL slices it without its memory."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.index_select and len(args) == 3:
                return args[2] + _FIRST
            if func.__name__ != "__get__":  # not shape, dtype and device
                args, kwargs = recursive_apply((args, kwargs or {}), _with_memory)
            return func(*args, **(kwargs or {}))


def _with_memory(value: Any) -> Any:
    if not isinstance(value, _Numbers):
        return value
    return torch.arange(_FIRST, _FIRST + value.shape[0], device=value.device)


class KeepingRows:
    """A sampler's sample() that keeps the rows of unmarked columns. Pickled for workers.

    The sampler gets a graph with one more column, which DGL slices like the others. If the sampler sets one
    of the others, the loader's graph gets it, too.
    """

    def __init__(self, sample: Callable[..., Any], tables: Sequence[Table]) -> None:
        self._sample, self._asked = sample, {(table.kind, table.type) for table in tables}

    def __call__(self, graph: Any, items: Any) -> Any:
        graph = copy(graph)
        graph._node_frames = [copy(frame) for frame in graph._node_frames]
        graph._edge_frames = [copy(frame) for frame in graph._edge_frames]
        counts, frames = {}, list(_frames_of(graph))
        for kind, _, type_, frame in frames:
            frame._columns = ChainMap(frame._columns, {})
            if (kind, type_) in self._asked:
                counts[kind, type_] = frame.num_rows
                numbers = torch.tensor(_FIRST, device=graph.device).expand(frame.num_rows)
                frame._columns.maps[1][_ROWS] = FrameColumn(numbers.as_subclass(_Numbers))
        batch = self._sample(graph, items)
        for *_, frame in frames:  # it may be in the minibatch, of which DGL changes the columns
            frame._columns = {key: copy(column) for key, column in frame._columns.items()}
        columns = [(*f, f[-1]._columns.pop(_ROWS, None)) for g in _graphs_in(batch) for f in _frames_of(g)]
        asked = [id(f) for kind, type_ in self._asked for *_, f in _asked_frames(batch, kind, type_)]
        for kind, _, type_, frame, column in columns:
            if column is None or id(frame) not in asked:
                continue
            rows = column.data - _FIRST
            if len(rows) and not 0 <= rows.min() <= rows.max() < counts[kind, type_]:
                raise MissingError(
                    f"a sampled graph has {kind}s of type {type_!r} that the loader's graph does not have, "
                    "which have no rows in gids_feats: let the sampler add none (dgl.add_self_loop adds "
                    "edges); add them to the minibatch"
                )
            ids = frame.get(NID if kind == "node" else EID)
            if ids is None or not torch.equal(ids.long(), rows.to(ids.device)):
                frame._columns[_ROWS] = FrameColumn(rows)
        return batch


@dataclass(frozen=True, slots=True)
class Column:
    """The location of a column, without its frame: moving a graph to a device makes new frames."""

    leaf: int  # the graph's position among the minibatch's graphs
    kind: str  # "node" or "edge"
    type_index: int  # the frame's position in its graph
    key: str
    table: str
    start: int  # the column's part of the rows that the minibatch reads from the table
    stop: int


class SampledMinibatch:
    """A minibatch of the sampler, without the columns that the dataset has. graph: the loader's. storages:
    of its columns, before this was sampled.

    Other columns are parts of the graph's, which DGL slices when they are first read. Training may write to
    the graph's until then, so pickle, which packs use, leaves their memory out. Columns that the sampler set
    belong to this minibatch only.

    Attributes: ``batch``; ``ids``, the rows to read of each table (int64, on DGL's device, may repeat).
    """

    def __init__(
        self, batch: Any, tables: ServedTables, graph: Any, storages: Mapping[tuple[str, Any, str], Tensor]
    ) -> None:
        self.batch = batch
        self._columns: list[Column] = []
        self._ids: dict[str, list[Tensor]] = {}
        self._take_lazy_columns(tables)
        for table in tables.always:
            if table.name not in self._ids:
                self._ask(table)
        for part in _graphs_in(self.batch) if tables.always else ():
            for *_, frame in _frames_of(part):
                frame._columns.pop(_ROWS, None)
        self.ids = {
            name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in self._ids.items()
        }
        columns = {place: column for place, column, _ in _columns_of(graph)}
        self._slices = [
            (frame, place)
            for part in _graphs_in(self.batch)
            for place, column, frame in _columns_of(part)
            if (own := columns.get(place)) is not None
            and column is not own
            and column.storage is own.storage is storages.get(place)
            and column.deferred_dtype is None
        ]

    def __getstate__(self) -> dict[str, Any]:
        for frame, (_, _, key) in self._slices:
            frame._columns[key].storage = None
        return vars(self)

    def complete(self, graph: Any) -> None:
        """Give the parts of the graph's columns their memory back, and drop those that it has no more."""
        columns = {place: column for place, column, _ in _columns_of(graph)}
        for frame, place in self._slices:
            column = frame._columns.get(place[2])
            if column is None or column.storage is not None:
                continue
            if place in columns:
                column.storage = columns[place].data
            else:
                del frame._columns[place[2]]

    def _take_lazy_columns(self, tables: ServedTables) -> None:
        for leaf, graph in enumerate(_graphs_in(self.batch)):
            for kind, index, type_, frame in _frames_of(graph):
                for key in list(frame.keys()):
                    lazy = frame._columns[key]  # not frame[key], which would evaluate other columns
                    if not isinstance(lazy, LazyFeature):
                        continue
                    table = tables.find(kind, type_, lazy.name or key)
                    if table is not None:
                        del frame._columns[key]
                        self._add(leaf, kind, index, frame, key, table, lazy.id_)

    def _ask(self, table: Table) -> None:
        for leaf, index, frame in _asked_frames(self.batch, table.kind, table.type):
            column = frame._columns.get(_ROWS)
            ids = None if column is None else column.data
            self._add(leaf, table.kind, index, frame, table.key, table, ids)

    def _add(
        self, leaf: int, kind: str, index: int, frame: Any, key: str, table: Table, ids: Tensor | None
    ) -> None:
        if ids is None:
            ids = frame.get(NID if kind == "node" else EID)
        if ids is None:
            raise MissingError(
                f"a sampled graph has no dgl.{'NID' if kind == 'node' else 'EID'} of {kind} type "
                f"{table.type!r}, so its rows of {table.name!r} are unknown: let the sampler keep it"
            )
        ids = ids.to(dtype=torch.int64).contiguous()
        parts = self._ids.setdefault(table.name, [])
        start = sum(len(part) for part in parts)
        parts.append(ids)
        self._columns.append(Column(leaf, kind, index, key, table.name, start, start + len(ids)))

    def fill(self, batch: Any, rows: Mapping[str, Tensor], device: torch.device) -> None:
        """Fill the columns of ``batch``, this one after DGL's prefetch. rows: by table, as in ``ids``."""
        graphs = list(_graphs_in(batch))
        for column in self._columns:
            graph = graphs[column.leaf]
            frames = graph._node_frames if column.kind == "node" else graph._edge_frames
            values = rows[column.table][column.start : column.stop]
            frames[column.type_index][column.key] = values.to(device, non_blocking=True)

    @property
    def nbytes(self) -> int:
        """Approximate memory of the sampled graphs: ends and ids of edges, and ids of columns."""
        total = 0
        for graph in _graphs_in(self.batch):
            total += 4 * 8 * graph.num_edges() + 2 * 8 * graph.num_nodes()
        return total


def _graphs_in(batch: Any) -> list[Any]:
    """The graphs of a minibatch, in the order in which DGL visits them."""
    graphs: list[Any] = []
    recursive_apply(batch, lambda item: graphs.append(item) if isinstance(item, DGLGraph) else None)
    return graphs


def _asked_frames(batch: Any, kind: str, type_: Any) -> Iterator[tuple[int, int, Any]]:
    """(graph, position, frame) of those that DGL's samplers mark: sources of the first block, edges of all
    blocks; without blocks, of all graphs."""
    graphs = list(enumerate(_graphs_in(batch)))
    blocks = [(leaf, graph) for leaf, graph in graphs if graph.is_block]
    for leaf, graph in (blocks[:1] if kind == "node" else blocks) or graphs:
        for of_kind, index, of_type, frame in _frames_of(graph):
            is_destination = kind == "node" and graph.is_block and index >= len(graph.srctypes)
            if (of_kind, of_type) == (kind, type_) and not is_destination:
                yield leaf, index, frame


def _frames_of(graph: Any) -> Iterator[tuple[str, int, Any, Any]]:
    """(kind, position, type, frame) of each frame. In a block, the frames of source nodes come first."""
    for kind, types, frames in (
        ("node", graph.ntypes, graph._node_frames),
        ("edge", graph.canonical_etypes, graph._edge_frames),
    ):
        for index, (type_, frame) in enumerate(zip(types, frames, strict=True)):
            yield kind, index, type_, frame


def _columns_of(graph: Any) -> Iterator[tuple[tuple[str, Any, str], Any, Any]]:
    """((kind, type, key), column, frame) of each column that the graph has in memory."""
    for kind, _, type_, frame in _frames_of(graph):
        for key, column in frame._columns.items():
            if not isinstance(column, LazyFeature):
                yield (kind, type_, key), column, frame


def _storages(graph: Any) -> dict[tuple[str, Any, str], Tensor]:
    """The memory of columns, but of those that are themselves parts, which they lose when they are read."""
    return {place: column.storage for place, column, _ in _columns_of(graph) if column.index is None}


def _reduced(dataset: Any) -> tuple[Any, ...]:
    return _remade, dataset.__reduce_ex__(2)[:3]


def _remade(make: Callable[..., Any], arguments: tuple[Any, ...], state: dict[str, Any]) -> Any:
    """Remake a dataset of DGL. Its name is unpickled first, which imports gids.dgl before DGL."""
    dataset = make(*arguments)
    vars(dataset).update(state)
    return dataset


# A spawned worker unpickles the dataset first.
for _dataset in (stock.TensorizedDataset, stock.DDPTensorizedDataset):
    ForkingPickler.register(_dataset, _reduced)


class DataLoader(dgl.dataloading.DataLoader):  # type: ignore[misc]  # DGL has no types
    """``dgl.dataloading.DataLoader`` with one more argument, ``gids``: gids.open(...) of the dataset that
    holds the features; or, for default options, its path or a FeatureStore, or a list of these with the same
    nodes and edges, the graph's own dataset first. All other arguments and the minibatches are DGL's.

    A column that the sampler asks for (``prefetch_node_feats``, ``prefetch_edge_feats``, and so on) is read
    from the dataset if it is there, else from the graph as in DGL. ``blocks[0].srcdata["feat"]`` has the
    stored dtype and shape, on ``device``. With ``gids=None`` this is DGL's loader.

    gids_feats: tables that minibatches get although the sampler does not ask for them: names, or Tables of
    any store. They are in the first block's ``srcdata`` (edge tables: in every block's ``edata``), or in a
    subgraph's ``ndata`` (``edata``). If two stores have a column, gids_feats chooses one. gids_dtype,
    gids_minibatch_rows: dtype and minibatch_rows of gids.FeatureLoader. gids_device: where the cache and the
    features are (default: ``device``). With ``device="cuda"`` (a CUDA build of DGL) the cache is in GPU
    memory; ``gids_device="cpu"`` keeps it in host memory.

    The iterator blocks while a minibatch is sampled and its rows are read. Each ``for`` is one epoch. The
    cache stays warm between epochs; while one iterator is open, a second one reads through the cache. The
    loader holds engine and cache until ``close()``, or until it is garbage-collected.

    Raises KeyError for a feature that neither dataset nor graph has, ValueError for a table whose row count
    is not the graph's, for a graph whose nodes or edges were reordered (dgl.reorder_graph), for a column that
    two datasets have, or for a device that this DGL does not support. While iterating: StorageError and the
    sampler's errors concern one minibatch, and the next one is unaffected.
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
        check_names(
            "gids.dgl.DataLoader", [name for name in kwargs if name in _NOT_DGL or "gids" in name], _OWN
        )
        if gids is None and gids_feats is not None:
            raise ValueError("gids_feats names tables of a dataset, but gids=None: give gids=PATH")
        if gids is not None:
            _check_graph_and_device(graph, device, use_uva)
        _stock_init(
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
        # Named like the arguments, because PyTorch Lightning makes a new loader from its attributes.
        self.gids = gids
        self.gids_feats = gids_feats
        self.gids_dtype = gids_dtype
        self.gids_device = gids_device
        self.gids_minibatch_rows = gids_minibatch_rows
        if gids is None:
            return
        self._opened = ExitStack()
        source = as_source(gids, self._opened)
        source.refuse_parts("gids.dgl.DataLoader")
        self.served_tables = ServedTables(
            source.stores,
            graph,
            graph_sampler,
            [gids_feats] if isinstance(gids_feats, str) else gids_feats or [],
        )
        if always := self.served_tables.always:
            self.collate_fn.sample_func = KeepingRows(self.collate_fn.sample_func, always)
        self.feature_loader = source.feature_loader(
            self,
            self.served_tables.tables,
            dtype=gids_dtype,
            device=self.device if gids_device is None else gids_device,
            minibatch_rows=gids_minibatch_rows,
        )
        self.learned = Learned()
        self._epochs: weakref.WeakSet[FrameworkEpoch[Any]] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Any]:
        if self.feature_loader is None:
            return cast(Iterator[Any], _stock_iter(self))
        self.feature_loader.check_user(self)
        if self.shuffle:
            self.dataset.shuffle()
        with suppress(TypeError):  # a dataset of somebody else may have no length
            self.learned.longest = max(self.learned.longest, len(self))
        epoch = FrameworkEpoch(
            self.feature_loader,
            _sampled(self),
            attrgetter("ids"),
            partial(_finished, self),
            bytes_of=attrgetter("nbytes"),
            in_workers=self.num_workers > 0,
            learned=self.learned,
        )
        self._epochs.add(epoch)
        return epoch

    def stats(self) -> dict[str, Any]:
        """FeatureLoader.stats() of this loader: counters, times and memory. Empty with ``gids=None``."""
        return self.feature_loader.stats_of(self.learned) if self.feature_loader is not None else {}

    def close(self) -> None:
        """End the open epochs, release engine and cache. Iterating afterwards raises. Idempotent."""
        if self.feature_loader is not None:
            for epoch in list(self._epochs):
                epoch.close()
            self.feature_loader.leave(self)
            self._opened.close()

    __enter__, __exit__ = Closing.__enter__, Closing.__exit__


def _finished(loader: Any, minibatch: SampledMinibatch, rows: Mapping[str, torch.Tensor]) -> Any:
    """DGL fetches the other lazy columns, such as labels, and moves the graphs to the device."""
    minibatch.complete(loader.graph)
    batch, columns, _ = stock._prefetch(minibatch.batch, loader, None)
    batch = recursive_apply_pair(batch, columns, stock._assign_for)
    minibatch.fill(batch, rows, loader.device)
    return batch


def _sampled(loader: Any) -> Iterator[SampledMinibatch]:
    """PyTorch's iterator, which does not hold the loader. A generator would end at the first error."""
    graph, tables = loader.graph, loader.served_tables

    def without_served_columns(storages: Any, batch: Any) -> SampledMinibatch:
        restored = recursive_apply(batch, stock.restore_parent_storage_columns, graph)
        return SampledMinibatch(restored, tables, graph, storages)

    if loader.num_workers:
        guard_workers(loader)
    before = iter(partial(_storages, graph), None)
    return map(without_served_columns, before, torch.utils.data.DataLoader.__iter__(loader))


def enable() -> None:
    """Let ``dgl.dataloading.DataLoader`` itself take ``gids=`` and its companions (see DataLoader).

    The class stays the same object, so earlier imports, subclasses and isinstance keep working. Without
    ``gids=`` it behaves as before. Idempotent.
    """
    for name in ("__init__", "__iter__", *_ADDED):
        setattr(dgl.dataloading.DataLoader, name, vars(DataLoader)[name])


def disable() -> None:
    """Undo ``enable()``. Loaders that DGL's own class made with ``gids=`` cannot be iterated any more."""
    dgls = dgl.dataloading.DataLoader
    dgls.__init__, dgls.__iter__ = _stock_init, _stock_iter
    for name in _ADDED:
        if name in vars(dgls):
            delattr(dgls, name)


def _check_graph_and_device(graph: Any, device: Any, use_uva: bool) -> None:
    if not isinstance(graph, dgl.DGLGraph):
        raise TypeError(f"gids= needs a dgl.DGLGraph, not {type(graph).__name__}")
    on_cuda = device is not None and torch.device(device).type == "cuda"
    if (on_cuda or use_uva) and dgl.get_global_func("device_api.cuda", allow_missing=True) is None:
        raise ValueError(
            f"{'use_uva=True' if use_uva else f'device={str(device)!r}'}: this DGL ({dgl.__version__}) is a "
            "CPU-only build, as PyPI's are, and its graphs cannot move to CUDA. Install a CUDA build of DGL "
            "(https://www.dgl.ai/pages/start.html); or use gids.NodeLoader(source, seeds, fanouts, "
            "device='cuda'), which samples and loads on the GPU without DGL; or load on the CPU and move "
            "the model's inputs: blocks[0].srcdata['feat'].to('cuda') and block.edges()"
        )
