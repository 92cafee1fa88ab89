"""Normalises labels: whole numbers, -1 for none. Called by run.py and the readers."""

from __future__ import annotations

import torch

from gids.convert.edges import BLOCK_BYTES
from gids.errors import FormatError
from gids.store.array_checks import as_int64
from gids.store.rows import GeneratedRows, Rows, blocks, read_range


def normalised(labels: Rows, *, are_classes: bool = False) -> Rows:
    """Labels that are classes, as int64[n] with -1 for negatives and NaN. Returns other labels unchanged.

    Labels of shape (n,) or (n, 1) are classes if their type is whole, if their values are whole or NaN with
    at least one NaN, or if the format says so (are_classes). Raises FormatError for a fraction among classes.
    """
    if len(labels.shape) == 2 and labels.shape[1] == 1:
        labels = _flat(labels)
    if len(labels.shape) != 1:
        return labels
    if labels.dtype.is_floating_point and not are_classes and not _are_classes_with_gaps(labels):
        return labels
    source = labels

    def fill(start: int, out: torch.Tensor) -> None:
        values = read_range(source, start, start + len(out))
        if values.dtype.is_floating_point:
            values = values.to(torch.float64)
            whole = (values == values.floor()) & (values.abs() < 2.0**63)
            wrong = torch.nonzero(~(whole | torch.isnan(values)))
            if len(wrong):
                raise FormatError(
                    f"label {start + int(wrong[0])} is {float(values[wrong[0]])}; "
                    "a class must be a whole number"
                )
            values = torch.nan_to_num(values, nan=-1.0)
        out.copy_(as_int64(values, "a label", start).clamp_(min=-1))

    return GeneratedRows(labels.shape, torch.int64, fill)


def _are_classes_with_gaps(labels: Rows) -> bool:
    """Whether there is a NaN, and all other values are whole and -1 or more."""
    gaps = False
    for _, block in blocks(labels, BLOCK_BYTES):
        missing = torch.isnan(block)
        values = block[~missing]
        if bool(((values != values.floor()) | (values < -1) | torch.isinf(values)).any()):
            return False
        gaps = gaps or bool(missing.any())
    return gaps


def _flat(labels: Rows) -> Rows:
    def fill(start: int, out: torch.Tensor) -> None:
        labels.read_into(start, out.view(-1, 1))

    return GeneratedRows(labels.shape[:1], labels.dtype, fill)
