"""Adds reverse edges and self-loops to a graph. Called by run.py. Holds counts only; edges are streamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from gids.convert.edges import BLOCK_BYTES
from gids.convert.source import InEdges, Source
from gids.errors import FormatError
from gids.store.names import Relation, describe_type
from gids.store.rows import GeneratedRows, Rows
from gids.write.edges import Edges, EdgeSource, in_edges


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
            source.graphs[relation] = _with_reverse(edges)
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


def _reversed(edges: EdgeSource) -> EdgeSource:
    def pieces(block_bytes: int) -> Iterator[Edges]:
        for sources, destinations, ids in edges.pieces(block_bytes):
            yield destinations, sources, ids

    return EdgeSource(edges.count, edges.num_dst, edges.num_src, pieces)


def _with_reverse(edges: EdgeSource) -> EdgeSource:
    def pieces(block_bytes: int) -> Iterator[Edges]:
        yield from edges.pieces(block_bytes)
        for sources, destinations, ids in edges.pieces(block_bytes):
            yield destinations, sources, ids + edges.count

    return EdgeSource(2 * edges.count, edges.num_src, edges.num_dst, pieces)


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
