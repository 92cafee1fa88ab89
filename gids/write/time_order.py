"""Sorts the in-edges of every node by time, behind EdgeSorter. Called by GraphWriter and DatasetWriter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.dtypes import is_whole
from gids.store.rows import Rows, blocks

_BLOCK_BYTES = 8 << 20

TimesOf = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""The times of edges with these sources and ids, int64 each."""


class TimeOrder:
    """Takes edges in destination order, as EdgeSorter emits them, and passes them on in the order of time.

    Edges of one destination with equal times keep their order. emit_edges(sources, ids, times). Holds the
    edges of whole destinations: what EdgeSorter emits at once, or all edges of one node.
    """

    def __init__(
        self,
        times_of: TimesOf,
        emit_degrees: Callable[[np.ndarray], None],
        emit_edges: Callable[[np.ndarray, np.ndarray, np.ndarray], None],
    ) -> None:
        self._times_of, self._emit_degrees, self._emit_edges = times_of, emit_degrees, emit_edges
        self._degrees: list[np.ndarray] = []
        self._edges: list[tuple[np.ndarray, np.ndarray]] = []
        self._missing = 0  # edges of these destinations that are still to come; negative: degrees are

    def add_degrees(self, degrees: np.ndarray) -> None:
        self._degrees.append(degrees)
        self._missing += int(degrees.sum())
        self._pass_on()

    def add_edges(self, sources: np.ndarray, ids: np.ndarray) -> None:
        self._edges.append((sources, ids))
        self._missing -= len(ids)
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass everything on if the edges that are held are those of whole destinations."""
        if self._missing or not self._degrees:
            return
        degrees = np.concatenate(self._degrees)
        self._emit_degrees(degrees)
        if self._edges:
            sources, ids = (np.concatenate(parts) for parts in zip(*self._edges, strict=True))
            times = self._times_of(sources, ids)
            order = np.lexsort([times, np.repeat(np.arange(len(degrees)), degrees)])
            self._emit_edges(sources[order], ids[order], times[order])
        self._degrees, self._edges = [], []


def scratch_times(times: Rows, path: Path) -> np.ndarray:
    """The times in a scratch file, int64[n], memory-mapped, to be read in any order."""
    with open(path, "wb") as file:
        for _, block in blocks(times, _BLOCK_BYTES):
            file.write(np.ascontiguousarray(block.numpy(), np.int64).data)
    count = times.shape[0]
    return np.memmap(path, np.int64, "r", shape=(count,)) if count else np.empty(0, np.int64)


def time_range(times: Rows) -> tuple[int, int]:
    """The least and the latest time; (0, 0) of none."""
    ends = [(int(block.numpy().min()), int(block.numpy().max())) for _, block in blocks(times, _BLOCK_BYTES)]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (0, 0)


def time_dtype(times: Rows) -> str:
    """The type that times are stored in: int32 if they fit."""
    low, high = time_range(times)
    return "int32" if low >= -(1 << 31) and high < 1 << 31 else "int64"


def check_times(times: Rows, count: int, owner: str) -> None:
    """Raise FormatError unless these are whole numbers, one for each of `count` nodes or edges."""
    if times.shape != (count,) or not is_whole(times.dtype) or times.dtype == torch.uint64:
        described = f"{str(times.dtype).removeprefix('torch.')}{list(times.shape)}"
        raise FormatError(f"times of {owner} are {described}; they must be whole numbers, int64[{count}]")
