"""Streams over the edges of a stored topology, with the part of each edge. Called by the other files here.

An edge is held by the owner of its destination.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_BLOCK_NODES = 1 << 18


def edge_blocks(
    indptr: np.ndarray, owners: np.ndarray, block_edges: int, first: int = 0
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (first position, last position, the part of each edge between them) of all edges from `first` on.

    indptr: int64[n + 1]; owners: uint8 or uint16[n]. At most block_edges a block, however large a degree is.
    """
    for start in range(0, len(owners), _BLOCK_NODES):
        bounds = np.asarray(indptr[start : start + _BLOCK_NODES + 1])
        if bounds[-1] <= first:
            continue
        of = np.asarray(owners[start : start + _BLOCK_NODES])
        for begin in range(max(first, int(bounds[0])), int(bounds[-1]), block_edges):
            end = min(begin + block_edges, int(bounds[-1]))
            low = int(np.searchsorted(bounds, begin, side="right")) - 1
            high = int(np.searchsorted(bounds, end, side="left"))
            counts = np.diff(np.clip(bounds[low : high + 1], begin, end))
            yield begin, end, np.repeat(of[low:high], counts)


def by_part(owners: np.ndarray, parts: range) -> tuple[np.ndarray, np.ndarray]:
    """(order, ends): order[ends[i]:ends[i + 1]] are the positions of owners that are parts[i], ascending."""
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=parts.stop))
    return order, np.concatenate([[0], ends])[parts.start : parts.stop + 1]
