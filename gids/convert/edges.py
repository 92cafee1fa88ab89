"""Makes edges from the array shapes that formats use, and adds reverse edges and self-loops.

Called by the readers and run.py. Holds counts only; edges are streamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from gids.convert.source import InEdges, Source, described
from gids.convert.source_files import shown
from gids.convert.stream_rows import BLOCK_BYTES
from gids.errors import FormatError
from gids.store.dtypes import is_whole
from gids.store.geometry import MAX_ROWS
from gids.store.names import Relation, describe_type
from gids.store.rows import ColumnRows, GeneratedRows, Rows, TensorRows, as_int64, blocks, check_ids
from gids.write.edges import Edges, EdgeSource, edge_list, in_edges

_SOURCES = ("src", "source", "src_id", "u", "from")
_DESTINATIONS = ("dst", "destination", "target", "dst_id", "v", "to")


def edge_rows(rows: Rows, what: str, *, num_src: int, num_dst: int) -> EdgeSource:
    """Edges of an integer array of shape (2, E), sources first. The id of an edge is its position."""
    if len(rows.shape) != 2 or rows.shape[0] != 2 or not is_whole(rows.dtype):
        raise FormatError(f"{what} is {described(rows)}; edges must be whole numbers of shape (2, E)")
    if isinstance(rows, ColumnRows):  # an array of shape (2, E) in Fortran order is (E, 2) in C order
        pairs = rows.elements.reshaped((rows.shape[1], 2))
        return edge_pairs(pairs, what, num_src=num_src, num_dst=num_dst)
    if isinstance(rows, TensorRows):
        return edge_list(*rows.values, num_src=num_src, num_dst=num_dst)
    if (row := getattr(rows, "row", None)) is None:
        raise FormatError(f"{what} is a sparse matrix; save a dense array of shape (2, E)")
    return edge_list(row(0), row(1), num_src=num_src, num_dst=num_dst)


def edge_pairs(pairs: Rows, what: str, *, num_src: int, num_dst: int) -> EdgeSource:
    """Edges of an integer array of shape (E, 2), source first. The id of an edge is its position."""
    if len(pairs.shape) != 2 or pairs.shape[1] != 2 or not is_whole(pairs.dtype):
        raise FormatError(f"{what} is {described(pairs)}; edges must be whole numbers of shape (E, 2)")

    def pieces(block_bytes: int) -> Iterator[Edges]:
        for first, block in blocks(pairs, 2 * block_bytes):
            columns = as_int64(block, "an edge", first).numpy().T
            sources = check_ids(np.ascontiguousarray(columns[0]), num_src, "source", first)
            destinations = check_ids(np.ascontiguousarray(columns[1]), num_dst, "destination", first)
            yield sources, destinations, np.arange(first, first + len(sources), dtype=np.int64)

    return EdgeSource(pairs.shape[0], num_src, num_dst, pieces)


def is_edge_array(rows: Rows) -> bool:
    """Whether an array has the type and shape of edges, (2, E) or (E, 2)."""
    return len(rows.shape) == 2 and 2 in rows.shape and is_whole(rows.dtype)


def largest_id(rows: Rows) -> int:
    """The largest id in an array of edges; -1 for no edges. Raises FormatError for an invalid id."""
    largest = -1
    for start, block in blocks(rows, BLOCK_BYTES):
        ids = as_int64(block, "the end of an edge", start).numpy().reshape(-1)
        largest = max(largest, int(check_ids(ids, MAX_ROWS, "the end of an edge", start).max(initial=-1)))
    return largest


def count_by_edges(source: Source, ends: Iterable[tuple[str, Rows]], cure: str = "") -> None:
    """Set the number of nodes of types that nothing else counts: their largest id in an edge plus 1.

    ends: (node type, ids of it in edges). cure: end of the note about it.
    """
    counts: dict[str, int] = {}
    for ntype, ids in ends:
        if ntype not in source.nodes:
            counts[ntype] = max(counts.get(ntype, 0), 1 + largest_id(ids))
    for ntype, count in counts.items():
        source.add_nodes(ntype, count, "the edges")
        source.notes.append(
            f"{ntype!r} nodes have no features and no count: assuming {count} nodes (the largest id plus "
            f"1){cure}"
        )


def add_weights(source: Source, relation: Relation, weights: Rows) -> None:
    """Add the values of an adjacency matrix as table `weight`, unless all are 1. In the order of edge ids."""
    if any(bool((block != 1).any()) for _, block in blocks(weights, BLOCK_BYTES)):
        source.add_edge_table(relation, "weight", weights)


def end_columns(
    names: Sequence[str], what: str, chosen: Sequence[str | None] = (None, None), cure: str = ""
) -> tuple[int, int]:
    """The positions of the columns of sources and destinations. what: has these columns, in messages. cure:
    their end.

    chosen: their names. Raises FormatError unless exactly one column has this name, or, if it is None, a name
    of sources or of destinations in any case.
    """
    ends = []
    for column, usual in zip(chosen, (_SOURCES, _DESTINATIONS), strict=True):
        free = [name.casefold() if name not in chosen else None for name in names]
        wanted = [name == column for name in names] if column is not None else [n in usual for n in free]
        if sum(wanted) != 1:
            raise FormatError(
                f"{what} have the columns {', '.join(names)}; exactly one must "
                f"be named {' or '.join(usual) if column is None else shown(column)}{cure}"
            )
        ends.append(wanted.index(True))
    return ends[0], ends[1]


def have_ends(names: Sequence[str]) -> bool:
    """Whether there is exactly one column of sources and one of destinations."""
    try:
        end_columns(names, "")
    except FormatError:
        return False
    return True


def is_end(name: str) -> bool:
    """Whether a column has a name of sources or of destinations, in any case."""
    return name.casefold() in (*_SOURCES, *_DESTINATIONS)


def as_edges(topology: InEdges | EdgeSource, num_src: int, num_dst: int) -> EdgeSource:
    """The edges of a relation in either form."""
    if isinstance(topology, EdgeSource):
        return topology
    if topology.indptr.shape != (num_dst + 1,):
        raise FormatError(f"indptr has {topology.indptr.shape[0]} entries for {num_dst} destinations")
    return in_edges(topology.indptr, topology.indices, topology.edge_ids, num_src=num_src, num_dst=num_dst)


def add_reverse_edges(source: Source) -> None:
    """Make relations within a type symmetric, and add a relation rev_RELATION for all others.

    Within a type, the reverse of edge e of E has the id E + e, and tables of edges have their rows twice.
    rev_RELATION has the ids and tables of RELATION.
    """
    for relation in list(source.graphs):
        src, name, dst = relation
        edges = as_edges(source.graphs[relation], **source.ends(relation))
        if src == dst:
            source.graphs[relation] = _reversed(edges, keeps=True)
            source.tables = [
                replace(t, rows=_twice(t.rows)) if t.type == relation else t for t in source.tables
            ]
            if relation in source.edge_times:
                source.edge_times[relation] = _twice(source.edge_times[relation])
            continue
        reverse: Relation = (dst, f"rev_{name}", src)
        if reverse in source.graphs:
            raise FormatError(
                f"--reverse-edges cannot add {describe_type(reverse)}: the source has it already"
            )
        source.graphs[reverse] = _reversed(edges)
        source.tables += [replace(t, type=reverse) for t in source.tables if t.type == relation]
        if relation in source.edge_times:
            source.edge_times[reverse] = source.edge_times[relation]


def _reversed(edges: EdgeSource, *, keeps: bool = False) -> EdgeSource:
    """The reverse of every edge. keeps: behind the edges themselves, which are within a type."""

    def pieces(block_bytes: int) -> Iterator[Edges]:
        if keeps:
            yield from edges.pieces(block_bytes)
        for sources, destinations, ids in edges.pieces(block_bytes):
            yield destinations, sources, ids + edges.count * keeps

    return EdgeSource(edges.count * (1 + keeps), edges.num_dst, edges.num_src, pieces)


def _twice(rows: Rows) -> Rows:
    count = rows.shape[0]

    def fill(start: int, out: torch.Tensor) -> None:
        before = max(0, min(len(out), count - start))
        if before:
            rows.read_into(start, out[:before])
        if before < len(out):
            rows.read_into(start + before - count, out[before:])

    return GeneratedRows((2 * count, *rows.shape[1:]), rows.dtype, fill)


def add_self_loops(source: Source) -> None:
    """Give every node exactly one edge to itself in every relation within its type, as the last edge.

    Existing self-loops are removed, so ids are not kept. Raises FormatError if the edges have tables.
    """
    for relation in list(source.graphs):
        src, _, dst = relation
        if src != dst:
            continue
        refuse_tables(source, relation, "--self-loops changes edges")
        if relation in source.edge_times:
            raise FormatError(
                f"--self-loops changes edges, and {describe_type(relation)} has times of edges: "
                "give --no-times"
            )
        source.graphs[relation] = _with_loops(as_edges(source.graphs[relation], **source.ends(relation)))


def _with_loops(edges: EdgeSource) -> EdgeSource:
    loops = sum(int((s == d).sum()) for s, d, _ in edges.pieces(BLOCK_BYTES))
    others = edges.count - loops

    def pieces(block_bytes: int) -> Iterator[Edges]:
        first = 0
        for sources, destinations, _ in edges.pieces(block_bytes):
            kept = sources != destinations
            count = int(kept.sum())
            yield sources[kept], destinations[kept], np.arange(first, first + count)
            first += count
        step = max(1, block_bytes // 8)
        for start in range(0, edges.num_dst, step):
            nodes = np.arange(start, min(start + step, edges.num_dst))
            yield nodes, nodes, nodes + others

    return EdgeSource(others + edges.num_dst, edges.num_src, edges.num_dst, pieces)


def refuse_tables(source: Source, relation: Relation, why: str) -> None:
    """Raise FormatError if a relation's edges have features."""
    for table in source.tables:
        if table.type == relation:
            raise FormatError(
                f"{why}, so table {table.key!r} of {describe_type(relation)} would not fit them; "
                "leave out the option or the table"
            )
