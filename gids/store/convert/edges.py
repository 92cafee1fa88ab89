"""Edges of a source in the shapes that formats have them. Called by the readers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.convert.packed_rows import PackedRows
from gids.store.dtypes import is_whole
from gids.store.rows import ColumnRows, FileRows, GeneratedRows, Rows, TensorRows, blocks, read_range
from gids.store.topology import Edges, EdgeSource, check_ids, edge_list


def edge_array(rows: Rows, what: str, *, num_src: int, num_dst: int) -> EdgeSource:
    """Edges of an integer array of shape (2, E), sources first, or (E, 2). An edge's id is its position.

    With two edges, (2, E) is meant: formats that have only pairs call edge_pairs.
    """
    if len(rows.shape) != 2 or 2 not in rows.shape or not is_whole(rows.dtype):
        raise FormatError(f"{what} is {_described(rows)}; edges are whole numbers of shape (2, E) or (E, 2)")
    if rows.shape[0] == 2:
        sources, destinations = two_rows(rows, what)
        return edge_list(sources, destinations, num_src=num_src, num_dst=num_dst)
    return edge_pairs(rows, num_src=num_src, num_dst=num_dst)


def edge_pairs(pairs: Rows, *, num_src: int, num_dst: int) -> EdgeSource:
    """Edges of an array of shape (E, 2), source first. An edge's id is its position."""
    if len(pairs.shape) != 2 or pairs.shape[1] != 2 or not is_whole(pairs.dtype):
        raise FormatError(f"edges are {_described(pairs)}; they must be whole numbers of shape (E, 2)")

    def pieces(block_bytes: int) -> Iterator[Edges]:
        for first, block in blocks(pairs, 2 * block_bytes):
            columns = block.to(torch.int64).numpy().T
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

    def fill(start: int, out: torch.Tensor) -> None:
        out.copy_(read_range(rows, start, start + len(out))[:, index])

    return GeneratedRows(rows.shape[:1], rows.dtype, fill)


def most_id(rows: Rows) -> int:
    """The largest number in an array of edges; -1 when there is none."""
    return max(
        (int(block.to(torch.int64).max()) for _, block in blocks(rows, 8 << 20) if block.numel()), default=-1
    )


def _described(rows: Rows) -> str:
    return f"{str(rows.dtype).removeprefix('torch.')}{list(rows.shape)}"
