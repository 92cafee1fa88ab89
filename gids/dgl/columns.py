"""Lazy columns of a sampled minibatch: removed when it is sampled, filled when it is handed out.

DGL's samplers mark a column to fetch with a LazyFeature in a sampled graph's frame. The columns that the
dataset has are removed, so that DGL's own prefetch reads the others (labels, other columns of the graph).
A minibatch is any nesting of tuples, lists and mappings with DGLGraphs. Called by the DataLoader.

A column that nothing marks has the rows that DGL would slice out of the loader's graph. dgl.NID and dgl.EID
may be others: if a graph is sampled from a sampled graph, or made by to_block, they are ids in that one.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from dgl import EID, NID, DGLGraph, LazyFeature
from dgl.frame import Column as FrameColumn
from dgl.utils import recursive_apply
from torch import Tensor

from gids.dgl.tables import ServedTables
from gids.errors import MissingError
from gids.store import Table

_ROWS = "_gids_rows"
"""A column of the rows in the loader's graph, where they are not dgl.NID or dgl.EID."""
_FIRST = 1 << 40
"""What the column has for row 0 while the graph is sampled. What DGL adds has other numbers."""


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
    """A minibatch of the sampler, without the columns that the dataset has.

    Attributes: ``batch``; ``ids``, the rows to read of each table (int64, on DGL's device, may repeat).
    """

    def __init__(self, batch: Any, tables: ServedTables) -> None:
        self.batch = batch
        self._columns: list[Column] = []
        self._ids: dict[str, list[Tensor]] = {}
        self._take_lazy_columns(tables)
        for table in tables.always:
            if table.name not in self._ids:
                self._ask(table)
        for graph in _graphs_in(self.batch) if tables.always else ():
            for *_, frame in _frames_of(graph):
                frame._columns.pop(_ROWS, None)
        self.ids = {
            name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in self._ids.items()
        }

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
