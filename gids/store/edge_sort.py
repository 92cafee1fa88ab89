"""Sorts any number of edges by destination in bounded memory. Called by DatasetWriter.

What fits is sorted in memory by counting. What does not is split by destination over scratch files, and each
file is sorted in the same way; one destination's edges are only copied. The sort is stable: edges of one
destination keep their order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from gids import _core
from gids.store.rows import FileRows, blocks
from gids.store.topology import EdgePieces, Edges

EDGE_BYTES = 24  # source, destination, id
_HELD_BYTES = 2 * EDGE_BYTES  # per edge sorted in memory: as read and sorted
_BINS = 1 << 16
_PARTS = 64  # scratch files per split


class EdgeSorter:
    """Sorts into two sinks, called in destination order.

    emit_degrees(int64[k]): the in-degrees of the next k destinations. emit_edges(sources, ids): their edges.
    scratch: a directory for the files of a split, 24 bytes per edge and split.
    """

    def __init__(
        self,
        scratch: Path,
        memory_bytes: int,
        emit_degrees: Callable[[np.ndarray], None],
        emit_edges: Callable[[np.ndarray, np.ndarray], None],
    ) -> None:
        self._scratch, self._memory_bytes = scratch, memory_bytes
        self._emit_degrees, self._emit_edges = emit_degrees, emit_edges
        self._piece_bytes = max(8, min(8 << 20, memory_bytes // 32))

    def sort(self, pieces: EdgePieces, edge_count: int, first: int, last: int) -> None:
        """Sort edge_count edges whose destinations are all in [first, last)."""
        if self._cost(edge_count, last - first) <= self._memory_bytes:
            self._sort_in_memory(pieces, edge_count, first, last)
        elif last - first == 1:
            for sources, _, ids in pieces(self._piece_bytes):
                self._emit_edges(sources, ids)
            self._emit_degrees(np.array([edge_count]))
        else:
            self._split(pieces, first, last)

    @staticmethod
    def _cost(edge_count: int, node_count: int) -> int:
        return edge_count * _HELD_BYTES + node_count * 16

    def _sort_in_memory(self, pieces: EdgePieces, edge_count: int, first: int, last: int) -> None:
        read = np.empty((3, edge_count), np.int64)
        at = 0
        for piece in pieces(self._piece_bytes):
            for column, values in zip(read, piece, strict=True):
                column[at : at + len(values)] = values
            at += len(piece[0])
        assert at == edge_count, f"{at} edges came, {edge_count} were announced"
        offsets = np.empty(last - first + 1, np.int64)
        sources, ids = np.empty(edge_count, np.int64), np.empty(edge_count, np.int64)
        bad = _core.sort_edges(read[0], read[1], read[2], first, offsets, sources, ids)
        assert bad is None, f"destination {read[1, bad or 0]} is not in [{first}, {last})"
        self._emit_degrees(np.diff(offsets))
        self._emit_edges(sources, ids)

    def _split(self, pieces: EdgePieces, first: int, last: int) -> None:
        width = -(-(last - first) // _BINS)
        counts = np.zeros(-(-(last - first) // width), np.int64)
        for _, destinations, _ in pieces(self._piece_bytes):
            counts += np.bincount((destinations - first) // width, minlength=len(counts))
        starts = self._part_starts(counts, width)
        part_of_bin = np.repeat(np.arange(len(starts), dtype=np.uint8), np.diff([*starts, len(counts)]))
        paths = [self._scratch / f"edges-{first}-{last}-{part}" for part in range(len(starts))]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in paths]
            for piece in pieces(self._piece_bytes):
                parts = part_of_bin[(piece[1] - first) // width]
                order = np.argsort(parts, kind="stable")
                records = np.stack(piece, axis=1)[order]
                ends = np.cumsum(np.bincount(parts, minlength=len(starts)))
                for part, record in enumerate(np.split(records, ends[:-1])):
                    files[part].write(record.tobytes())
        bounds = [*(first + start * width for start in starts), last]
        for part, path in enumerate(paths):
            edge_count = path.stat().st_size // EDGE_BYTES
            self.sort(_read_edges(path, edge_count), edge_count, bounds[part], bounds[part + 1])
            path.unlink()

    def _part_starts(self, counts: np.ndarray, width: int) -> list[int]:
        """The first bin of each part, so that a part fits in memory where that takes no more than _PARTS."""
        costs = self._cost(1, 0) * counts + self._cost(0, width)
        most = max(self._memory_bytes, -(-2 * int(costs.sum()) // (_PARTS - 1)))
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
