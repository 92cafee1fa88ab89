"""Checks of whole arrays: ids, indptr, row orders, checksums. Called by `verify` and by the writers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import torch

from gids import _core
from gids.errors import FormatError
from gids.store.dtypes import UINT64, is_whole
from gids.store.rows import Rows, blocks
from gids.stored_file import AnyFile, open_descriptor

_NO_COUNTS = np.empty(0, np.uint32)


def check_ids(values: np.ndarray, limit: int, what: str, start: int) -> np.ndarray:
    """Return values (int64[n], from position start of `what`); FormatError unless all are in [0, limit)."""
    bad = _core.count_sources(values, limit, 0, _NO_COUNTS)
    if bad is not None:
        must = f"it must be from 0 to {limit - 1}" if limit else "there are no nodes"
        raise FormatError(f"{what}[{start + bad}] is {values[bad]}; {must}")
    return values


def as_int64(values: torch.Tensor, what: str, start: int) -> torch.Tensor:
    """Integers (from position start of `what`) as int64. Raises FormatError for 2^63 or more."""
    whole = values.to(torch.int64)
    if values.dtype == UINT64 and bool((whole < 0).any()):
        row = int(torch.nonzero((whole < 0).reshape(-1))[0])
        value = int(values.reshape(-1)[row].item())
        raise FormatError(f"{what} is {value} near position {start + row}; it must be less than 2^63")
    return whole


def check_whole(rows: Rows, what: str) -> None:
    if not is_whole(rows.dtype):
        name = str(rows.dtype).removeprefix("torch.")
        raise FormatError(f"{what} is {name}; it must be whole numbers, int32 or int64")
    if len(rows.shape) != 1:
        raise FormatError(f"{what} has shape {rows.shape}; it must have one dimension")


def checked_ids(rows: Rows, limit: int, what: str, block_bytes: int) -> Iterator[np.ndarray]:
    """Yield an array of ids in [0, limit) in pieces, int64. Raises FormatError."""
    check_whole(rows, what)
    for start, block in blocks(rows, block_bytes):
        yield check_ids(as_int64(block, what, start).numpy(), limit, what, start)


def checked_indptr(rows: Rows, edge_count: int, block_bytes: int) -> Iterator[np.ndarray]:
    """Yield an indptr in pieces, int64. Raises FormatError unless it rises from 0 to edge_count."""
    check_whole(rows, "indptr")
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


MARK_ROWS = 64 << 20


def checked_order(order: Rows, block_bytes: int) -> Iterator[np.ndarray]:
    """Yield an order of rows in pieces. Raises FormatError, at the end at the latest, unless it has each
    position once. Memory: 64 MB and a block; more than 64 M rows are read several times."""
    count = order.shape[0]
    for first in range(0, max(1, count), MARK_ROWS):
        marks = np.zeros(min(MARK_ROWS, count - first), np.uint8)
        for start, block in blocks(order, block_bytes):
            values = block.numpy()
            bad = _core.mark_positions(values, count, first, marks)
            if bad is not None:
                raise FormatError(
                    f"order[{start + bad}] is {values[bad]}; each of 0 to {count - 1} must occur once"
                )
            if first == 0:
                yield values


def file_crc32c(path: AnyFile, *, crc: int = 0) -> int:
    """CRC32C of a whole file, which is then dropped from the page cache. crc: of the bytes before it."""
    buffer = np.empty(8 << 20, np.uint8)
    with open(open_descriptor(path), "rb", buffering=0) as file:
        while count := file.readinto(buffer.data):
            crc = _core.crc32c_extend(crc, buffer[:count])
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return crc
