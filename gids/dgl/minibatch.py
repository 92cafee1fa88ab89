"""A minibatch of DGL's samplers, and the rows that it asks for. Made and filled by the DataLoader.

A sampler marks a column to fetch with a LazyFeature in a sampled graph's frame. The rows are those of dgl.NID
or dgl.EID, as in DGL's own prefetch. Marks of columns that the dataset has are replaced by Rows when a
minibatch is sampled, so that DGL's own prefetch reads the others (labels, other columns of the graph); and by
the rows when it is handed out. A minibatch is any nesting of tuples, lists and mappings with DGLGraphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from dgl import DGLGraph, LazyFeature
from dgl.frame import Column
from dgl.utils import recursive_apply
from torch import Tensor

from gids.dgl.order import check_sampled_ids, ids_of
from gids.dgl.tables import ServedTables
from gids.store import Table

Place = tuple[str, Any, str]
"""(kind, type, key) of a column."""
OwnColumns = Mapping[Place, Column]  # those of the loader's graph when an epoch began


@dataclass(frozen=True, slots=True)
class Rows:
    """Takes a column's place in a frame until the rows are read: a part of those that the minibatch reads."""

    table: str
    start: int
    stop: int

    def to(self, *_: object, **__: object) -> Rows:
        """Called when DGL moves the graph."""
        return self


class SampledMinibatch:
    """A minibatch whose rows are not read yet. graph: the loader's. own: its columns.

    Attributes: ``batch``; ``ids``, the rows to read of each table (int64, on DGL's device, may repeat).

    Raises ValueError if nothing is asked for, or if dgl.NID or dgl.EID are not ids of the loader's graph;
    KeyError for a column that does not exist, or a sampled graph without dgl.NID or dgl.EID.
    """

    def __init__(self, batch: Any, tables: ServedTables, graph: Any, own: OwnColumns) -> None:
        self.batch, self._own = batch, own
        parts: dict[str, list[Tensor]] = {}
        by_default: dict[Any, set[Any]] = {}  # sampled graph -> types of tables
        for sampled, frame, key, table, ids in list(_asked(_graphs_in(batch), tables)):
            if ids is None:
                ids = ids_of(table.kind, table.type, frame)
                by_default.setdefault(sampled, set()).add(table.type)
            earlier = parts.setdefault(table.name, [])
            start = sum(map(len, earlier))
            earlier.append(ids.to(dtype=torch.int64).contiguous())
            frame._columns[key] = Rows(table.name, start, start + len(ids))
        if not parts and not tables.always:
            raise tables.nothing_asked()
        for sampled, types in by_default.items():
            check_sampled_ids(sampled, graph, types)
        self.ids = {name: ids[0] if len(ids) == 1 else torch.cat(ids) for name, ids in parts.items()}

    def __getstate__(self) -> dict[str, Any]:
        """For packs. Training may write to the graph's columns until DGL slices them: their memory stays
        out, until restore_columns."""
        for place, column in _columns_of(_graphs_in(self.batch)):
            own = self._own.get(place)
            if own is not None and column is not own and column.storage is own.storage:
                column.storage = None
        return {"batch": self.batch, "ids": self.ids}

    @property
    def nbytes(self) -> int:
        """Approximate memory of the sampled graphs: ends and ids of edges, and ids of columns."""
        graphs = _graphs_in(self.batch)
        return sum(4 * 8 * graph.num_edges() + 2 * 8 * graph.num_nodes() for graph in graphs)


def restore_columns(batch: Any, own: OwnColumns) -> None:
    """Give parts of the graph's columns, which packs left out, their memory back."""
    for place, column in _columns_of(_graphs_in(batch)):
        if column.storage is None:
            column.storage = own[place].storage


def fill(batch: Any, rows: Mapping[str, Tensor], device: torch.device) -> None:
    """Put the rows of each table into a SampledMinibatch's batch, after DGL's prefetch."""
    for graph in _graphs_in(batch):
        for _, _, frame in _frames_of(graph):
            for key, part in list(frame._columns.items()):
                if isinstance(part, Rows):
                    frame[key] = rows[part.table][part.start : part.stop].to(device, non_blocking=True)


def own_columns(graph: Any) -> OwnColumns:
    """The columns of the loader's graph, but those that are themselves parts: these lose their memory when
    they are read."""
    return {place: column for place, column in _columns_of([graph]) if column.index is None}


def _graphs_in(batch: Any) -> list[Any]:
    """The graphs of a minibatch, in the order in which DGL visits them."""
    graphs: list[Any] = []
    recursive_apply(batch, lambda item: graphs.append(item) if isinstance(item, DGLGraph) else None)
    return graphs


def _asked(graphs: list[Any], tables: ServedTables) -> Iterator[tuple[Any, Any, str, Table, Tensor | None]]:
    """(graph, frame, key, table, ids) of the marked columns that the dataset has, and of tables of gids_feats
    that are not marked. ids: None for dgl.NID or dgl.EID."""
    marked = set()
    for graph in graphs:
        for kind, type_, frame in _frames_of(graph):
            for key, lazy in list(frame._columns.items()):  # not frame.items(), which evaluates columns
                if isinstance(lazy, LazyFeature):
                    table = tables.find(kind, type_, lazy.name or key)
                    if table is not None:
                        marked.add(table.name)
                        yield graph, frame, key, table, lazy.id_
    for table in tables.always:
        if table.name not in marked:
            yield from ((*place, table.key, table, None) for place in _default_places(graphs, table))


def _default_places(graphs: list[Any], table: Table) -> Iterator[tuple[Any, Any]]:
    """(graph, frame) of those that DGL's samplers mark: sources of the first block, edges of all blocks;
    without blocks, of all graphs."""
    blocks = [graph for graph in graphs if graph.is_block]
    for graph in (blocks[:1] if table.kind == "node" else blocks) or graphs:
        if table.kind == "edge":
            types, frames = graph.canonical_etypes, graph._edge_frames
        else:
            types, frames = graph.srctypes if graph.is_block else graph.ntypes, graph._node_frames
        if table.type in types:
            yield graph, frames[types.index(table.type)]


def _frames_of(graph: Any) -> Iterator[tuple[str, Any, Any]]:
    """(kind, type, frame) of each frame. In a block, those of source nodes come first."""
    yield from (("node", *pair) for pair in zip(graph.ntypes, graph._node_frames, strict=True))
    yield from (("edge", *pair) for pair in zip(graph.canonical_etypes, graph._edge_frames, strict=True))


def _columns_of(graphs: list[Any]) -> Iterator[tuple[Place, Any]]:
    """The columns that graphs have in memory."""
    for graph in graphs:
        for kind, type_, frame in _frames_of(graph):
            for key, column in frame._columns.items():
                if isinstance(column, Column):
                    yield (kind, type_, key), column
