"""Sources of edges for DatasetWriter, as streams of bounded pieces. Ids are checked before use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gids import _core
from gids.errors import FormatError
from gids.store.array_checks import as_int64, check_ids, check_whole, checked_ids, checked_indptr
from gids.store.rows import Rows, Values, as_rows, blocks, read_range

Edges = tuple[np.ndarray, np.ndarray, np.ndarray]  # sources, destinations, ids: int64[n] each
EdgePieces = Callable[[int], Iterator[Edges]]  # argument: maximum bytes of one array of a piece


@dataclass(frozen=True)
class EdgeSource:
    """Edges in any order: their number, the numbers of nodes, and pieces with checked ids."""

    count: int
    num_src: int
    num_dst: int
    pieces: EdgePieces


def edge_list(sources: Values, destinations: Values, *, num_src: int, num_dst: int) -> EdgeSource:
    """Edges from two arrays (COO), int[count]. The id of an edge is its position."""
    src_rows, dst_rows = as_rows(sources), as_rows(destinations)
    if src_rows.shape != dst_rows.shape or len(src_rows.shape) != 1:
        raise FormatError(
            f"sources have shape {src_rows.shape}, destinations {dst_rows.shape}; both must be int[count]"
        )

    def pieces(block_bytes: int) -> Iterator[Edges]:
        first = 0
        pairs = zip(
            checked_ids(src_rows, num_src, "source", block_bytes),
            checked_ids(dst_rows, num_dst, "destination", block_bytes),
            strict=True,
        )
        for src, dst in pairs:
            yield src, dst, np.arange(first, first + len(src), dtype=np.int64)
            first += len(src)

    return EdgeSource(src_rows.shape[0], num_src, num_dst, pieces)


def out_edges(indptr: Values, indices: Values, *, num_dst: int) -> EdgeSource:
    """Edges from a CSR matrix: row u lists the destinations of u. The id of an edge is its position."""
    pointers, columns = as_rows(indptr), as_rows(indices)
    check_whole(columns, "indices")

    def pieces(block_bytes: int) -> Iterator[Edges]:
        step = max(1, block_bytes // 8)
        source = 0
        before = np.empty(0, np.int64)
        for piece in checked_indptr(pointers, columns.shape[0], block_bytes):
            bounds = np.concatenate([before, piece])
            for first in range(int(bounds[0]), int(bounds[-1]), step):
                last = min(first + step, int(bounds[-1]))
                dst = as_int64(read_range(columns, first, last), "indices", first).numpy()
                ids = np.arange(first, last, dtype=np.int64)
                src = source + np.searchsorted(bounds, ids, side="right") - 1
                yield src, check_ids(dst, num_dst, "indices", first), ids
            source += len(bounds) - 1
            before = bounds[-1:]

    return EdgeSource(columns.shape[0], pointers.shape[0] - 1, num_dst, pieces)


def in_edges(
    indptr: Values, indices: Values, edge_ids: Values | None, *, num_src: int, num_dst: int
) -> EdgeSource:
    """Edges from a topology that is sorted by destination (CSC), to sort again or to extend."""
    turned = out_edges(indptr, indices, num_dst=num_src)
    ids_of = None if edge_ids is None else as_rows(edge_ids)
    if ids_of is not None:
        check_whole(ids_of, "edge_ids")
        if ids_of.shape != (turned.count,):
            raise FormatError(f"there are {turned.count} edges but {ids_of.shape[0]} edge_ids")

    def pieces(block_bytes: int) -> Iterator[Edges]:
        for destinations, sources, positions in turned.pieces(block_bytes):
            ids = positions
            if ids_of is not None:
                first = int(positions[0])
                read = as_int64(read_range(ids_of, first, first + len(positions)), "edge_ids", first)
                ids = check_ids(read.numpy(), turned.count, "edge_ids", first)
            yield sources, destinations, ids

    return EdgeSource(turned.count, num_src, num_dst, pieces)


def out_degrees(indices: Sequence[Rows], num_src: int, memory_bytes: int) -> Iterator[np.ndarray]:
    """Yield how often each node occurs in these arrays, at most 2^32 - 1, as uint32 pieces.

    Makes one pass over the arrays per piece of memory_bytes / 2.
    """
    step = max(1, memory_bytes // 8)
    for first in range(0, num_src, step):
        counts = np.zeros(min(step, num_src - first), np.uint32)
        for rows in indices:
            for start, block in blocks(rows, min(8 << 20, memory_bytes // 4)):
                bad = _core.count_sources(block.numpy(), num_src, first, counts)
                if bad is not None:
                    raise FormatError(
                        f"indices[{start + bad}] is {int(block[bad])}; it must be below {num_src}"
                    )
        yield counts
