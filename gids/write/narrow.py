"""Casts rows to the type of a table: exactly, or floating rows to fewer bits (a shorter type, or int8 with a
scale), and measures the errors of that. Called by the writers and by `gids verify --against`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.dtypes import RELATIVE_BOUND, dtype_name, equal_values, pack_rows, scales_of, stored_row_bytes
from gids.store.rows import GeneratedRows, Rows, blocks, read_range

_PIECE_BYTES = 1 << 20  # of the source per conversion step, so that temporaries are small
_COMPARED_VALUES = 1 << 17  # at a time after a cast, so that temporaries are small
_WIDER_FLOATS = torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Narrowing:
    """A cast of a floating dtype to a shorter one, or to int8 with a scale ("row" or "column")."""

    source: torch.dtype
    dtype: torch.dtype
    scale: str | None = None

    @classmethod
    def of(cls, source: torch.dtype, dtype: torch.dtype, scale: str | None) -> Narrowing | None:
        """The narrowing of a cast; None if no value is rounded. Raises FormatError for an invalid scale."""
        if scale is not None and (dtype != torch.int8 or not source.is_floating_point):
            raise FormatError(
                f"a scale is for floating values stored as int8, not for {dtype_name(source)} stored as "
                f"{dtype_name(dtype)}"
            )
        if scale is not None:
            return cls(source, dtype, scale)
        if not source.is_floating_point or not dtype.is_floating_point:
            return None
        old, new = torch.finfo(source), torch.finfo(dtype)
        is_exact = new.eps <= old.eps and new.max >= old.max and new.tiny * new.eps <= old.tiny * old.eps
        return None if is_exact else cls(source, dtype)

    def bound(self, largest: float) -> float:
        """The bound on the error of values up to a magnitude."""
        if self.scale is not None:
            return float(scales_of(torch.tensor(largest))) * RELATIVE_BOUND
        return largest * self._relative + self._absolute

    @property
    def _relative(self) -> float:
        return torch.finfo(self.dtype).eps / 2

    @property
    def _absolute(self) -> float:
        """Half of the smallest subnormal step."""
        return torch.finfo(self.dtype).tiny * torch.finfo(self.dtype).eps / 2


class Tally:
    """The largest error and magnitude so far. Any thread may add. before: the result of to_json."""

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.error = before["error"] if before else 0.0
        self.largest = before["largest"] if before else 0.0
        self._lock = threading.Lock()

    def add(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        """Add values and the values that were stored. Ignores values that are not finite."""
        if not values.numel():
            return
        wide = torch.float64 if torch.float64 in (values.dtype, stored.dtype) else torch.float32
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
    """A sentence with both types, the largest error and its bound."""
    kind = dtype_name(narrowing.dtype) + (f" with a scale per {narrowing.scale}" if narrowing.scale else "")
    return (
        f"{dtype_name(narrowing.source)} stored as {kind}, largest error {tally.error:.3g} "
        f"(bound {narrowing.bound(tally.largest):.3g}, of values up to {tally.largest:.3g})"
    )


def cast_exactly(values: torch.Tensor, out: torch.Tensor) -> None:
    """Cast values into out. Raises FormatError if a fraction is lost or a whole number is another one in out.

    Does not check the rounding to a shorter floating type; refuse_overflow does.
    """
    if values.is_complex():
        raise FormatError(f"tables cannot hold {values.dtype}: store the real and imaginary parts as columns")
    if values.dtype.is_floating_point and not out.dtype.is_floating_point:
        cost = "round them to 0 and 1" if out.dtype == torch.bool else "cut their fractions"
        raise FormatError(
            f"casting {values.dtype} features to {out.dtype} would {cost}; "
            "int8 with a scale rounds them instead"
        )
    out.copy_(values)
    if values.dtype.is_floating_point:
        return
    flat_values, flat_out = values.reshape(-1), out.view(-1)
    for start in range(0, len(flat_out), _COMPARED_VALUES):
        piece = flat_values[start : start + _COMPARED_VALUES]
        lost = ~equal_values(piece, flat_out[start : start + _COMPARED_VALUES])
        if bool(lost.any()):
            number = int(piece[int(lost.to(torch.uint8).argmax())].item())
            raise FormatError(f"{number} is not exact in {out.dtype}; keep {values.dtype}")


def narrowed(rows: Rows, dtype: torch.dtype, tally: Tally) -> Rows:
    """Rows in a shorter floating type. Raises FormatError, with row and column, for a value out of range."""

    def fill(start: int, out: torch.Tensor) -> None:
        for at, values in pieces(rows, start, len(out)):
            part = out[at - start : at - start + len(values)]
            part.copy_(values)
            refuse_overflow(values, part, at)
            tally.add(values, part)

    return GeneratedRows(rows.shape, dtype, fill)


def quantized(rows: Rows, columns: np.ndarray | None, tally: Tally) -> Rows:
    """Rows as int8 with a scale, encoded as in a page: uint8[row_count, row_bytes].

    columns: float32[*shape of a row], or None for a scale per row. Raises FormatError, with row and column,
    if a value is not finite.
    """
    flat_columns = None if columns is None else torch.from_numpy(columns.reshape(-1))

    def fill(start: int, out: torch.Tensor) -> None:
        data = out.numpy()
        for at, values in pieces(rows, start, len(out)):
            flat = finite_float32(values, at).reshape(len(values), -1)
            stored = pack_rows(flat, flat_columns, data[at - start : at - start + len(values)])
            tally.add(values.reshape(stored.shape), stored)

    row_bytes = stored_row_bytes(tuple(rows.shape[1:]), 1, "row" if columns is None else "column")
    return GeneratedRows((rows.shape[0], row_bytes), torch.uint8, fill)


def column_scales(rows: Rows, on_rows: Callable[[int], None]) -> Iterator[np.ndarray]:
    """Yield the scales of the columns, float32[width], once. Reads all rows.

    on_rows(n): progress. Raises FormatError if a value is not finite.
    """
    maxima = torch.zeros(math.prod(rows.shape[1:]))
    for start, block in blocks(rows, _PIECE_BYTES):
        largest = finite_float32(block, start).reshape(len(block), -1).abs().amax(0)
        maxima = torch.maximum(maxima, largest)
        on_rows(len(block))
    yield scales_of(maxima).numpy()


def pieces(rows: Rows, start: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, rows) of rows start … start + count in pieces of about a MiB.

    Reads them all at once, because threads must not alternate between distant pieces of a stream.
    """
    step = max(1, _PIECE_BYTES // max(1, math.prod(rows.shape[1:]) * rows.dtype.itemsize))
    values = read_range(rows, start, start + count)
    for at in range(0, count, step):
        yield start + at, values[at : at + step]


def finite_float32(values: torch.Tensor, start: int) -> torch.Tensor:
    """The values as float32. Raises FormatError if one is not finite. start: number of the first row."""
    narrow = values.to(torch.float32)
    wrong = ~torch.isfinite(narrow)
    if bool(wrong.any()):
        where, value = first_place(values, wrong, start)
        raise FormatError(
            f"{where} is {value}, which int8 with a scale cannot hold: make it finite, or store another type"
        )
    return narrow


def refuse_overflow(values: torch.Tensor, stored: torch.Tensor, start: int) -> None:
    """Raise FormatError, with row and column, if a finite value became infinite. start: the first row."""
    if not stored.dtype.is_floating_point or not values.dtype.is_floating_point:
        return
    lost = torch.isinf(stored) & ~torch.isinf(values)
    if bool(lost.any()):
        where, value = first_place(values, lost, start)
        most = torch.finfo(stored.dtype).max
        fits = [kind for kind in _WIDER_FLOATS if abs(value) <= torch.finfo(kind).max > most]
        cure = " or ".join(map(dtype_name, fits[:2]))
        raise FormatError(
            f"{where}: {value} does not fit in {stored.dtype}, whose largest value is {most:g}: use {cure}"
        )


def first_place(values: torch.Tensor, wrong: torch.Tensor, start: int) -> tuple[str, int | float]:
    """The row and column of the first wrong value, as text, and the value."""
    position = np.unravel_index(int(np.flatnonzero(wrong.numpy())[0]), values.shape)
    row, *columns = (int(i) for i in position)
    column = f", column {', '.join(map(str, columns))}" if columns else ""
    return f"row {start + row}{column}", values[position].item()
