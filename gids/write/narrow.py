"""Rows stored in fewer bits than they have: what is refused, what the rounding costs, and what it may cost.

Called by the writer and `gids verify`. A narrowing is of floating values: to a shorter floating type, or to
int8 with a scale.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.dtypes import dtype_name
from gids.store.quantize import RELATIVE_BOUND, pack_rows, scales_of, stored_row_bytes
from gids.store.rows import Rows, read_range

_PIECE_BYTES = 1 << 20  # of the source are converted at a time, so that a thread's temporaries stay small


@dataclass(frozen=True)
class Narrowing:
    """From a floating dtype to a narrower one; of int8, with a scale per "row" or "column"."""

    source: torch.dtype
    dtype: torch.dtype
    scale: str | None = None

    @classmethod
    def of(cls, source: torch.dtype, dtype: torch.dtype, scale: str | None) -> Narrowing | None:
        """The narrowing of a cast, None when no value is rounded. FormatError for a misplaced scale."""
        if scale is not None and (dtype != torch.int8 or not source.is_floating_point):
            raise FormatError(
                f"a scale is for floating values stored as int8, not for {dtype_name(source)} stored as "
                f"{dtype_name(dtype)}"
            )
        if scale is not None:
            return cls(source, dtype, scale)
        if not source.is_floating_point or not dtype.is_floating_point:
            return None
        return None if torch.promote_types(source, dtype) == dtype else cls(source, dtype)

    def bound(self, largest: float) -> float:
        """The largest error of values up to a magnitude."""
        if self.scale is not None:
            return float(scales_of(torch.tensor(largest))) * RELATIVE_BOUND
        return largest * self._relative + self._absolute

    def bounds(self, values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """The largest error of each value, float64. scales: those stored, of the values' steps."""
        if scales is not None:
            return scales.to(torch.float64) * RELATIVE_BOUND
        return values.to(torch.float64).abs() * self._relative + self._absolute

    @property
    def _relative(self) -> float:
        return torch.finfo(self.dtype).eps / 2

    @property
    def _absolute(self) -> float:
        """Half of the smallest step, of the smallest values."""
        return torch.finfo(self.dtype).tiny * torch.finfo(self.dtype).eps / 2


class Tally:
    """The largest error and magnitude so far, from any thread. before: as to_json gave them."""

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.error = before["error"] if before else 0.0
        self.largest = before["largest"] if before else 0.0
        self._lock = threading.Lock()

    def add(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        """values, and what they became. Those that are not finite stay as they are, and are left out."""
        if not values.numel():
            return
        wide = torch.promote_types(values.dtype, stored.dtype)
        values, stored = values.to(wide), stored.to(wide)
        finite = torch.isfinite(values)
        zero = torch.zeros((), dtype=wide)
        error = float(torch.where(finite, (values - stored).abs(), zero).amax())
        largest = float(torch.where(finite, values.abs(), zero).amax())
        with self._lock:
            self.error, self.largest = max(self.error, error), max(self.largest, largest)

    def to_json(self) -> dict[str, float]:
        return {"error": self.error, "largest": self.largest}


def describe_rounding(narrowing: Narrowing, tally: Tally) -> str:
    """A sentence: what became what, the largest error that it made, and the bound that it keeps."""
    kind = dtype_name(narrowing.dtype) + (f" with a scale per {narrowing.scale}" if narrowing.scale else "")
    return (
        f"{dtype_name(narrowing.source)} stored as {kind}, largest error {tally.error:.3g} "
        f"(bound {narrowing.bound(tally.largest):.3g}, of values up to {tally.largest:.3g})"
    )


class NarrowedRows:
    """Rows in a shorter floating type. Raises FormatError, with row and column, for one out of its range."""

    def __init__(self, rows: Rows, dtype: torch.dtype, tally: Tally) -> None:
        self._rows, self._tally = rows, tally
        self.shape = rows.shape
        self.dtype: torch.dtype = dtype

    def read_into(self, start: int, out: torch.Tensor) -> None:
        for at, values in pieces(self._rows, start, len(out)):
            part = out[at - start : at - start + len(values)]
            part.copy_(values)
            refuse_overflow(values, part, at)
            self._tally.add(values, part)


class QuantizedRows:
    """Rows as int8 with a scale, as the bytes that they have in a page: uint8[row_count, row_bytes].

    columns: float32[*shape of a row], or None for a scale per row. Raises FormatError, with row and column,
    for a value that is not finite.
    """

    def __init__(self, rows: Rows, columns: torch.Tensor | None, tally: Tally) -> None:
        self._rows, self._tally = rows, tally
        self._columns = None if columns is None else columns.reshape(-1)
        scale = "row" if columns is None else "column"
        self.shape = (rows.shape[0], stored_row_bytes(tuple(rows.shape[1:]), 1, scale))
        self.dtype: torch.dtype = torch.uint8

    def read_into(self, start: int, out: torch.Tensor) -> None:
        data = out.numpy()
        for at, values in pieces(self._rows, start, len(out)):
            flat = finite_float32(values, at).reshape(len(values), -1)
            stored = pack_rows(flat, self._columns, data[at - start : at - start + len(values)])
            self._tally.add(values.reshape(stored.shape), stored)


def pieces(rows: Rows, start: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) of rows start … start + count, about a MiB each.

    They are read at once: of a stream, threads must not ask for pieces of distant blocks in turn.
    """
    step = max(1, _PIECE_BYTES // max(1, math.prod(rows.shape[1:]) * rows.dtype.itemsize))
    values = read_range(rows, start, start + count)
    for at in range(0, count, step):
        yield start + at, values[at : at + step]


def finite_float32(values: torch.Tensor, start: int) -> torch.Tensor:
    """The values as float32. FormatError for one that is not finite; start: the first row's number."""
    narrow = values.to(torch.float32)
    wrong = ~torch.isfinite(narrow)
    if bool(wrong.any()):
        where, found = first_place(values, wrong, start)
        raise FormatError(
            f"{where} is {found}, which int8 with a scale cannot hold: make it finite, or store another type"
        )
    return narrow


def refuse_overflow(values: torch.Tensor, stored: torch.Tensor, start: int) -> None:
    """FormatError, with row and column, for a value beyond a shorter floating type. start: the first row."""
    if not stored.dtype.is_floating_point or not values.dtype.is_floating_point:
        return
    lost = torch.isinf(stored) & ~torch.isinf(values)
    if bool(lost.any()):
        where, found = first_place(values, lost, start)
        most = torch.finfo(stored.dtype).max
        cure = "bfloat16 and float32 reach 3e38" if abs(found) < 3e38 else "only float64 holds it"
        raise FormatError(f"{where}: {found} does not fit in {stored.dtype}, which ends at {most:g}; {cure}")


def first_place(values: torch.Tensor, wrong: torch.Tensor, start: int) -> tuple[str, float]:
    """Where the first such value is, in words, and the value."""
    position = np.unravel_index(int(np.flatnonzero(wrong.numpy())[0]), values.shape)
    row, *columns = (int(i) for i in position)
    column = f", column {', '.join(map(str, columns))}" if columns else ""
    return f"row {start + row}{column}", float(values[position])
