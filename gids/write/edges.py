"""Sources of edges for DatasetWriter, as streams of bounded pieces, and EdgeSorter, which sorts any number of
edges by destination in bounded memory. Ids are checked before use.

Edges that fit in memory are sorted by counting. Others are split by destination into scratch files, and each
file is sorted in the same way, several at once. The edges of one destination are only copied. The sort is
stable: edges of one destination keep their order, unless they are sorted by source too. In that case the
edges of one destination that do not fit in memory are split by source.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gids import _core
from gids.errors import FormatError
from gids.store.rows import (
    FileRows,
    Rows,
    Values,
    as_int64,
    as_rows,
    blocks,
    check_ids,
    check_whole,
    checked_ids,
    checked_indptr,
    in_order,
    read_range,
)

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


EDGE_BYTES = 24  # source, destination, id
_HELD_BYTES = 64  # per edge sorted in memory: 24 as read, 16 sorted, 24 while the sinks write them
_BINS = 1 << 16
_PARTS = 64  # scratch files per split
_SOURCE, _DESTINATION = 0, 1  # the sort key: its position in Edges
_NONE = np.empty(0, np.int64)


class EdgeSorter:
    """Sorts edges and passes them on in destination order.

    emit(degrees, sources, ids): the in-degrees of the next destinations, and the edges of these. The edges of
    a destination with very many come in several calls, and its degree with the last one; the others have no
    degrees. scratch: a directory for the files of a split, 24 bytes per edge and split. workers: number of
    threads. num_src: number of source nodes, to sort the edges of one destination by source; None: keep their
    order. dedup: keep only the first of equal edges (needs num_src).
    """

    def __init__(
        self,
        scratch: Path,
        memory_bytes: int,
        emit: Callable[[np.ndarray, np.ndarray, np.ndarray], None],
        *,
        workers: int = 1,
        num_src: int | None = None,
        dedup: bool = False,
    ) -> None:
        assert num_src is not None or not dedup, "equal edges are found when sorted by source"
        self._scratch, self._memory_bytes, self._emit_edges = scratch, memory_bytes, emit
        self._workers, self._num_src, self._dedup = workers, num_src, dedup
        # Every worker and the writer hold a piece as read, as records and in order.
        self._piece_bytes = max(8, min(8 << 20, memory_bytes // (16 * (workers + 1))))
        self._part_bytes = memory_bytes // (workers + 1) if workers > 1 else memory_bytes
        self._hub_degree = 0

    def sort(self, pieces: EdgePieces, edge_count: int, first: int, last: int) -> None:
        """Sort edge_count edges (dedup: or fewer) whose destinations are all in [first, last)."""
        with ThreadPoolExecutor(self._workers, "gids-edges") as pool:
            self._sort(pool, pieces, edge_count, first, last, _DESTINATION)

    def _sort(
        self, pool: ThreadPoolExecutor, pieces: EdgePieces, edge_count: int, first: int, last: int, key: int
    ) -> None:
        if self._cost(edge_count, last - first) <= self._memory_bytes:
            self._emit(key, *self._sort_in_memory(pieces, edge_count, first, last, key))
        elif last - first > 1:
            self._split(pool, pieces, first, last, key)
        elif key == _DESTINATION and self._num_src is not None:
            self._hub_degree = 0
            self._sort(pool, pieces, edge_count, 0, self._num_src, _SOURCE)
            self._emit_edges(np.array([self._hub_degree]), _NONE, _NONE)
        else:
            self._copy(pieces, key)

    @staticmethod
    def _cost(edge_count: int, node_count: int) -> int:
        return edge_count * _HELD_BYTES + node_count * 16

    def _emit(self, key: int, degrees: np.ndarray, sources: np.ndarray, ids: np.ndarray) -> None:
        """Emit sorted edges: of many destinations, or of one, sorted by source."""
        if key == _SOURCE:
            self._hub_degree += len(sources)
        self._emit_edges(degrees if key == _DESTINATION else _NONE, sources, ids)

    def _copy(self, pieces: EdgePieces, key: int) -> None:
        """Emit edges of one destination (and of one source, if that is the key)."""
        degree = 0
        for sources, _, ids in pieces(self._piece_bytes):
            kept = 1 - degree if self._dedup else len(sources)
            self._emit(key, _NONE, sources[:kept], ids[:kept])
            degree += len(sources[:kept])
        if key == _DESTINATION:
            self._emit(key, np.array([degree]), _NONE, _NONE)

    def _sort_in_memory(
        self, pieces: EdgePieces, edge_count: int, first: int, last: int, key: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sort edges by key. Returns (number of edges per key, sources, ids)."""
        read = np.empty((3, edge_count), np.int64)
        at = 0
        for piece in pieces(self._piece_bytes):
            for column, values in zip(read, piece, strict=True):
                column[at : at + len(values)] = values
            at += len(piece[0])
        assert at == edge_count or (self._dedup and at < edge_count), f"{at} edges instead of {edge_count}"
        offsets = np.empty(last - first + 1, np.int64)
        others, ids = np.empty(at, np.int64), np.empty(at, np.int64)
        bad = _core.sort_edges(read[1 - key, :at], read[key, :at], read[2, :at], first, offsets, others, ids)
        assert bad is None, f"{read[key, bad or 0]} is not in [{first}, {last})"
        if key == _SOURCE:
            return self._one_destination(first, last, offsets, ids)
        if self._num_src is None:
            return np.diff(offsets), others, ids
        _core.sort_neighbors(offsets, others, ids)
        return self._without_repeats(offsets, others, ids) if self._dedup else (np.diff(offsets), others, ids)

    def _one_destination(
        self, first: int, last: int, offsets: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        counts = np.diff(offsets)
        if self._dedup:
            ids = ids[offsets[:-1][counts > 0]]
            counts = np.minimum(counts, 1)
        return counts, np.repeat(np.arange(first, last), counts), ids

    @staticmethod
    def _without_repeats(
        offsets: np.ndarray, sources: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        kept = np.ones(len(sources), bool)
        kept[1:] = sources[1:] != sources[:-1]
        starts = offsets[:-1]
        kept[starts[starts < len(sources)]] = True
        before = np.concatenate([[0], np.cumsum(kept)])
        return np.diff(before[offsets]), sources[kept], ids[kept]

    def _split(self, pool: ThreadPoolExecutor, pieces: EdgePieces, first: int, last: int, key: int) -> None:
        width = -(-(last - first) // _BINS)
        counts = np.zeros(-(-(last - first) // width), np.int64)
        for piece in pieces(self._piece_bytes):
            counts += np.bincount((piece[key] - first) // width, minlength=len(counts))
        starts = self._part_starts(counts, width)
        part_of_bin = np.repeat(np.arange(len(starts), dtype=np.uint8), np.diff([*starts, len(counts)]))
        paths = [self._scratch / f"edges-{key}-{first}-{last}-{part}" for part in range(len(starts))]

        def grouped(piece: Edges) -> list[np.ndarray]:
            """The records of the piece, grouped by part."""
            parts = part_of_bin[(piece[key] - first) // width]
            records = np.stack(piece, axis=1)[np.argsort(parts, kind="stable")]
            ends = np.cumsum(np.bincount(parts, minlength=len(starts)))
            return np.split(records, ends[:-1])

        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in paths]
            for records in in_order(pool, grouped, pieces(self._piece_bytes), self._workers):
                for file, record in zip(files, records, strict=True):
                    file.write(record.data)
        bounds = [*(first + start * width for start in starts), last]
        self._sort_parts(pool, paths, bounds, key)

    def _sort_parts(self, pool: ThreadPoolExecutor, paths: list[Path], bounds: list[int], key: int) -> None:
        """Sort the files in order: those that fit in memory several at once, the others one by one."""

        def work(part: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
            count = paths[part].stat().st_size // EDGE_BYTES
            if self._cost(count, bounds[part + 1] - bounds[part]) > self._part_bytes:
                return None
            pieces = _read_edges(paths[part], count)
            return self._sort_in_memory(pieces, count, bounds[part], bounds[part + 1], key)

        for part, sorted_part in enumerate(in_order(pool, work, range(len(paths)), self._workers)):
            if sorted_part is None:
                count = paths[part].stat().st_size // EDGE_BYTES
                self._sort(pool, _read_edges(paths[part], count), count, bounds[part], bounds[part + 1], key)
            else:
                self._emit(key, *sorted_part)
                sorted_part = None  # free it while waiting for the next
            paths[part].unlink()

    def _part_starts(self, counts: np.ndarray, width: int) -> list[int]:
        """The first bin of each part. A part fits in memory unless that takes more than _PARTS."""
        costs = self._cost(1, 0) * counts + self._cost(0, width)
        most = max(self._part_bytes, -(-2 * int(costs.sum()) // (_PARTS - 1)))
        starts, held = [0], 0
        for index, cost in enumerate(costs.tolist()):
            if held and held + cost > most:
                starts.append(index)
                held = 0
            held += cost
        return starts


def _read_edges(path: Path, edge_count: int) -> EdgePieces:
    def pieces(block_bytes: int) -> Iterator[Edges]:
        rows = FileRows(path, (edge_count, 3), torch.int64)
        for _, block in blocks(rows, 3 * block_bytes):
            sources, destinations, ids = block.numpy().T
            yield sources, destinations, ids

    return pieces
