"""Edges of a source in the shapes that formats have them. Called by the readers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from gids.convert.packed_rows import PackedRows
from gids.errors import FormatError
from gids.store.array_checks import as_int64, check_ids
from gids.store.dtypes import is_whole
from gids.store.rows import ColumnRows, FileRows, GeneratedRows, Rows, TensorRows, blocks, read_range
from gids.write.edges import Edges, EdgeSource, edge_list

_BLOCK_BYTES = 8 << 20


def edge_array(rows: Rows, what: str, *, num_src: int, num_dst: int) -> EdgeSource:
    """Edges of an integer array of shape (2, E), sources first, or (E, 2). An edge's id is its position.

    With two edges, (2, E) is meant: formats that have only pairs call edge_pairs.
    """
    check_edge_array(rows, what)
    if rows.shape[0] == 2:
        sources, destinations = two_rows(rows, what)
        return edge_list(sources, destinations, num_src=num_src, num_dst=num_dst)
    return edge_pairs(rows, num_src=num_src, num_dst=num_dst)


def check_edge_array(rows: Rows, what: str) -> None:
    """Raise FormatError unless an array can be edges, by its shape and type."""
    if len(rows.shape) != 2 or 2 not in rows.shape or not is_whole(rows.dtype):
        raise FormatError(f"{what} is {_described(rows)}; edges are whole numbers of shape (2, E) or (E, 2)")


def edge_pairs(pairs: Rows, *, num_src: int, num_dst: int) -> EdgeSource:
    """Edges of an array of shape (E, 2), source first. An edge's id is its position."""
    if len(pairs.shape) != 2 or pairs.shape[1] != 2 or not is_whole(pairs.dtype):
        raise FormatError(f"edges are {_described(pairs)}; they must be whole numbers of shape (E, 2)")

    def pieces(block_bytes: int) -> Iterator[Edges]:
        for first, block in blocks(pairs, 2 * block_bytes):
            columns = as_int64(block, "an edge", first).numpy().T
            sources = check_ids(np.ascontiguousarray(columns[0]), num_src, "source", first)
            destinations = check_ids(np.ascontiguousarray(columns[1]), num_dst, "destination", first)
            yield sources, destinations, np.arange(first, first + len(sources), dtype=np.int64)

    return EdgeSource(pairs.shape[0], num_src, num_dst, pieces)


def two_rows(pair: Rows, what: str) -> tuple[Rows, Rows]:
    """The two rows of an array of shape (2, n), in either order of elements."""
    if len(pair.shape) != 2 or pair.shape[0] != 2:
        raise FormatError(f"{what} has shape {pair.shape}; it must be (2, number of edges)")
    if isinstance(pair, (FileRows, PackedRows)):
        return pair.row(0), pair.row(1)
    if isinstance(pair, TensorRows):
        return TensorRows(pair.values[0]), TensorRows(pair.values[1])
    assert isinstance(pair, ColumnRows)
    pairs = pair.elements.reshaped((pair.shape[1], 2))
    return column_of(pairs, 0), column_of(pairs, 1)


def column_of(rows: Rows, index: int) -> Rows:
    """One column of rows in two dimensions."""

    step = max(1, _BLOCK_BYTES // max(1, rows.shape[1] * rows.dtype.itemsize))

    def fill(start: int, out: torch.Tensor) -> None:
        for first in range(0, len(out), step):
            part = out[first : first + step]
            part.copy_(read_range(rows, start + first, start + first + len(part))[:, index])

    return GeneratedRows(rows.shape[:1], rows.dtype, fill)


def most_id(rows: Rows) -> int:
    """The largest id in an array of edges; -1 when there is none. Raises FormatError for what is no id."""
    if rows.dtype.is_floating_point:
        raise FormatError(f"edges are {_described(rows)}; they must be whole numbers")
    most = -1
    for start, block in blocks(rows, _BLOCK_BYTES):
        if block.numel():
            values = as_int64(block, "the end of an edge", start)
            if int(values.min()) < 0:
                raise FormatError(f"the end of an edge is {int(values.min())}; it must be 0 or more")
            most = max(most, int(values.max()))
    return most


def _described(rows: Rows) -> str:
    return f"{str(rows.dtype).removeprefix('torch.')}{list(rows.shape)}"
