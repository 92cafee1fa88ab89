"""int8 with a scale: encode and decode such rows. See docs/internals/format.md. Called by the writer, Table
and `gids verify`.

A value x with scale s is stored as the integer round(x / s), -127 to 127, and read as that times s, a
float32. The scale of a row (or column) is its largest |x| / 127. Native code decodes when it gathers, with
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.geometry import Geometry, align_up, table_page_bytes

SCALES = ("row", "column")
STEPS = 127
SCALE_BYTES = 4
RELATIVE_BOUND = 0.5 + 2.0**-15
"""The largest error, as a multiple of the scale: one half, and the rounding of float32."""

_LEAST = torch.finfo(torch.float32).tiny  # a smaller scale loses precision or becomes 0


def check_scale(scale: object, where: str) -> str:
    """Return ``scale`` if it is one of SCALES; else raise FormatError."""
    if scale not in SCALES:
        raise FormatError(f"{where} is {scale!r}; it must be {' or '.join(map(repr, SCALES))}")
    return str(scale)


def stored_row_bytes(shape: tuple[int, ...], itemsize: int, scale: str | None) -> int:
    """Bytes of a row. With a scale per row they are a multiple of 4, and the scale is at the end."""
    values = math.prod(shape)
    if scale == "row" and values:
        return align_up(values, SCALE_BYTES) + SCALE_BYTES
    return values * itemsize


def stored_geometry(
    shape: Sequence[int], itemsize: int, scale: str | None, *, page_bytes: int, shard_count: int
) -> Geometry:
    """The layout of values[shape]. Raises FormatError."""
    row_bytes = stored_row_bytes(tuple(shape[1:]), itemsize, scale)
    return Geometry(shape[0], row_bytes, table_page_bytes(row_bytes, page_bytes), shard_count)


def scales_of(maxima: torch.Tensor) -> torch.Tensor:
    """The scale for each largest magnitude: 0 for 0, else 1/127 of it. float32, same shape."""
    scales = maxima / STEPS
    scales = torch.where((maxima > 0) & (scales < _LEAST), torch.full_like(scales, _LEAST), scales)
    # 127 times the scale of the largest float32 may round to infinity.
    return torch.where(torch.isinf(scales * STEPS), torch.nextafter(scales, torch.zeros(())), scales)


def pack_rows(values: torch.Tensor, columns: torch.Tensor | None, out: np.ndarray) -> torch.Tensor:
    """Encode finite float32[n, width] to rows uint8[n, row_bytes]; return the decoded values.

    columns: float32[width], the scales of the columns; None: one scale per row.
    """
    width = values.shape[1]
    scales = scales_of(values.abs().amax(1, keepdim=True)) if columns is None else columns
    steps = torch.where(scales > 0, values / scales, torch.zeros(()))
    steps = steps.round_().clamp_(-STEPS, STEPS).to(torch.int8)
    out[:, :width] = steps.numpy().view(np.uint8)
    if columns is None:
        out[:, width:-SCALE_BYTES] = 0
        out[:, -SCALE_BYTES:] = scales.numpy().view(np.uint8)
    return steps.to(torch.float32).mul_(scales)


def unpack_rows(
    data: np.ndarray, shape: tuple[int, ...], scale: str, columns: np.ndarray | None
) -> torch.Tensor:
    """Decode rows uint8[n, row_bytes] to float32[n, *shape]."""
    steps, scales = split_rows(data, shape, scale)
    if scales is None:
        assert columns is not None
        scales = torch.from_numpy(columns).view(shape)
    return steps.to(torch.float32).mul_(scales)


def split_rows(
    data: np.ndarray, shape: tuple[int, ...], scale: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(int8[n, *shape], the float32 scales of the rows, or None if columns have the scales)."""
    width = math.prod(shape)
    steps = np.ascontiguousarray(data[:, :width]).view(np.int8).reshape(len(data), *shape)
    if scale == "column":
        return torch.from_numpy(steps), None
    scales = np.ascontiguousarray(data[:, -SCALE_BYTES:]).view(np.float32)
    return torch.from_numpy(steps), torch.from_numpy(scales).view(-1, *[1] * len(shape))


def check_scales(scales: np.ndarray, where: str) -> None:
    """Raise FormatError if a scale in float32[n] is negative or not finite."""
    wrong = np.flatnonzero(~(np.isfinite(scales) & (scales >= 0)))
    if len(wrong):
        raise FormatError(
            f"{where}: scale[{wrong[0]}] is {scales[wrong[0]]}; it must be finite and 0 or more"
        )
