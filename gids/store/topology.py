"""Edges on their way into a dataset: check in-edges, list edges, count sources. Called by DatasetWriter.

Everything is a stream of bounded pieces; ids are checked before they index anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gids import _core
from gids.errors import FormatError
from gids.store.dtypes import is_whole
from gids.store.rows import Rows, Values, as_rows, blocks, read_range

Edges = tuple[np.ndarray, np.ndarray, np.ndarray]  # sources, destinations, ids: int64[n] each
EdgePieces = Callable[[int], Iterator[Edges]]  # takes the bytes that one array of a piece may have


@dataclass(frozen=True)
class EdgeSource:
    """Edges in any order: how many, between how many nodes, and pieces of them with checked ids."""

    count: int
    num_src: int
    num_dst: int
    pieces: EdgePieces


_NO_COUNTS = np.empty(0, np.uint32)


def check_ids(values: np.ndarray, limit: int, what: str, start: int) -> np.ndarray:
    """values (int64[n], at position start of `what`) if all are in [0, limit); else raises FormatError."""
    bad = _core.count_sources(values, limit, 0, _NO_COUNTS)
    if bad is not None:
        must = f"it must be from 0 to {limit - 1}" if limit else "there are no nodes to name"
        raise FormatError(f"{what}[{start + bad}] is {values[bad]}; {must}")
    return values


def as_int64(values: torch.Tensor, what: str, start: int) -> torch.Tensor:
    """Whole numbers (at position start of `what`) as int64. Raises FormatError for one of 2^63 or more."""
    found = values.to(torch.int64)
    if values.dtype == torch.uint64 and bool((found < 0).any()):
        row = int(torch.nonzero((found < 0).reshape(-1))[0])
        value = int(values.reshape(-1)[row].item())
        raise FormatError(
            f"{what} is {value} near position {start + row}; the largest that can be is 2^63 - 1"
        )
    return found


def _check_whole(rows: Rows, what: str) -> None:
    if not is_whole(rows.dtype) or rows.dtype.is_complex:
        name = str(rows.dtype).removeprefix("torch.")
        raise FormatError(f"{what} is {name}; it must be whole numbers, int32 or int64")
    if len(rows.shape) != 1:
        raise FormatError(f"{what} has shape {rows.shape}; it must have one dimension")


def checked_ids(rows: Rows, limit: int, what: str, block_bytes: int) -> Iterator[np.ndarray]:
    """The pieces, int64, of an array of ids in [0, limit). Raises FormatError."""
    _check_whole(rows, what)
    for start, block in blocks(rows, block_bytes):
        yield check_ids(as_int64(block, what, start).numpy(), limit, what, start)


def checked_indptr(rows: Rows, edge_count: int, block_bytes: int) -> Iterator[np.ndarray]:
    """The pieces, int64, of an indptr that runs from 0 to edge_count and never falls. Raises FormatError."""
    _check_whole(rows, "indptr")
    last = 0
    for start, block in blocks(rows, block_bytes):
        values = as_int64(block, "indptr", start).numpy()
        if start == 0 and values[0] != 0:
            raise FormatError(f"indptr[0] is {values[0]}; it must be 0")
        falls = np.flatnonzero(np.diff(values, prepend=last) < 0)
        if len(falls):
            raise FormatError(
                f"indptr[{start + falls[0]}] is {values[falls[0]]}, less than the entry before it"
            )
        last = int(values[-1])
        yield values
    if last != edge_count:
        raise FormatError(f"indptr ends at {last}, but there are {edge_count} indices")


def edge_list(sources: Values, destinations: Values, *, num_src: int, num_dst: int) -> EdgeSource:
    """The edges of two arrays (COO), int[count]; the id of an edge is its position."""
    src_rows, dst_rows = as_rows(sources), as_rows(destinations)
    if src_rows.shape != dst_rows.shape or len(src_rows.shape) != 1:
        raise FormatError(
            f"sources are {src_rows.shape}, destinations {dst_rows.shape}; both must be int[count]"
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
    """The edges of a CSR matrix, whose row u lists the destinations of u; an edge's id is its position."""
    pointers, columns = as_rows(indptr), as_rows(indices)
    _check_whole(columns, "indices")

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
    """The edges of topology that is sorted by destination (CSC), to be sorted anew or added to."""
    turned = out_edges(indptr, indices, num_dst=num_src)
    ids_of = None if edge_ids is None else as_rows(edge_ids)
    if ids_of is not None:
        _check_whole(ids_of, "edge_ids")
        if ids_of.shape != (turned.count,):
            raise FormatError(f"there are {turned.count} edges, but {ids_of.shape[0]} edge_ids")

    def pieces(block_bytes: int) -> Iterator[Edges]:
        for destinations, sources, positions in turned.pieces(block_bytes):
            ids = positions
            if ids_of is not None:
                first = int(positions[0])
                found = as_int64(read_range(ids_of, first, first + len(positions)), "edge_ids", first)
                ids = check_ids(found.numpy(), turned.count, "edge_ids", first)
            yield sources, destinations, ids

    return EdgeSource(turned.count, num_src, num_dst, pieces)


def out_degrees(indices: Sequence[Rows], num_src: int, memory_bytes: int) -> Iterator[np.ndarray]:
    """uint32 pieces of: how often each node occurs in all of these arrays, at most 2^32 - 1.

    One pass over the arrays for each piece of memory_bytes / 2.
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
