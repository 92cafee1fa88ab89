"""Labels, masks and splits of nodes. Called by run.py and the readers.

Labels become whole numbers, -1 for none; masks become splits (node ids); other labels get a random split.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from gids.convert.edges import BLOCK_BYTES, column_of
from gids.convert.source import Mask, Source
from gids.errors import FormatError
from gids.store.array_checks import as_int64
from gids.store.names import SPLITS
from gids.store.rows import GeneratedRows, Rows, TensorRows, blocks, read_range


def normalised(labels: Rows, *, are_classes: bool = False) -> Rows:
    """Labels that are classes, as int64[n] with -1 for negatives and NaN. Returns other labels unchanged.

    Labels of shape (n,) or (n, 1) are classes if their type is whole, if they are whole floats from -1 on of
    which one or more is NaN or -1, or if the format says so (are_classes). Raises FormatError for a fraction
    among classes.
    """
    if len(labels.shape) == 2 and labels.shape[1] == 1:
        labels = column_of(labels, 0)
    if len(labels.shape) != 1 or labels.dtype.is_complex:
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
    """Whether one value or more is NaN or -1, and all others are whole and 0 or more."""
    gaps = False
    for _, block in blocks(labels, BLOCK_BYTES):
        missing = torch.isnan(block)
        values = block[~missing]
        if bool(((values != values.floor()) | (values < -1) | torch.isinf(values)).any()):
            return False
        gaps = gaps or bool(missing.any()) or bool((values == -1).any())
    return gaps


def masks_to_splits(source: Source, column: int | None = None) -> None:
    """Turn the source's masks into splits. Reads a mask now to count, and again for its ids.

    column: the column to take of masks of shape (nodes, splits). Raises FormatError for values other than 0
    and 1, and if a column is missing or not needed.
    """
    is_column_used = False
    for ntype, masks in source.masks.items():
        for split, mask in masks.items():
            if split in source.splits.setdefault(ntype, {}):
                raise FormatError(f"{mask.what} is a second {split} split of {ntype!r} nodes: keep one")
            is_column_used |= len(mask.rows.shape) == 2 and mask.rows.shape[1] > 1
            source.splits[ntype][split] = _ones(_one_column(mask, column), mask.what)
    if column is not None and not is_column_used:
        raise FormatError("--split-column has no effect: the source has no masks of shape (nodes, splits)")


def _one_column(mask: Mask, column: int | None) -> Rows:
    shape = mask.rows.shape
    if len(shape) == 1:
        return mask.rows
    if len(shape) != 2 or not shape[1]:
        raise FormatError(f"{mask.what} has shape {shape}; a mask must have one dimension")
    if shape[1] == 1:
        return column_of(mask.rows, 0)
    if column is None or not 0 <= column < shape[1]:
        choice = "" if column is None else f", not column {column}"
        raise FormatError(
            f"{mask.what} has shape {shape}: choose one of its {shape[1]} splits{choice} with "
            f"--split-column, 0 to {shape[1] - 1}"
        )
    return column_of(mask.rows, column)


def _ones(mask: Rows, what: str) -> Rows:
    """The positions at which a mask is 1, int64. Holds only a count per block."""
    starts, counts = [], []
    for start, block in blocks(mask, BLOCK_BYTES):
        wrong = torch.nonzero((block != 0) & (block != 1))
        if len(wrong):
            row = int(wrong[0])
            raise FormatError(
                f"{what} is {block[row].item()} at node {start + row}; a mask must be bool, or 0 and 1 "
                "(put node ids into an array train_idx, val_idx or test_idx)"
            )
        starts.append(start)
        counts.append(int((block != 0).sum()))
    starts.append(mask.shape[0])
    ends = list(accumulate(counts))

    def fill(start: int, out: torch.Tensor) -> None:
        done = 0
        while done < len(out):
            index = bisect_right(ends, start + done)
            block = read_range(mask, starts[index], starts[index + 1])
            ones = torch.nonzero(block != 0)[start + done - ends[index] + counts[index] :, 0]
            part = out[done : done + len(ones)]
            part.copy_(ones[: len(part)] + starts[index])
            done += len(part)

    return GeneratedRows((ends[-1] if ends else 0,), torch.int64, fill)


def random_split(labels: Rows, fractions: Sequence[float], seed: int) -> dict[str, Rows]:
    """Split the nodes that have a label at random. Each part is sorted.

    fractions: of train, val and test; their sum is at most 1. A whole number below 0, or NaN, means no label.
    The result depends on labels, fractions and seed only, not on the machine.
    """
    if len(fractions) != len(SPLITS) or not all(f >= 0 for f in fractions) or sum(fractions) > 1 + 1e-9:
        raise FormatError(f"--split needs three fractions with a sum of at most 1 (got {list(fractions)})")
    found = [torch.empty(0, dtype=torch.int64)]
    for start, block in blocks(labels, BLOCK_BYTES):
        has = ~torch.isnan(block) if block.dtype.is_floating_point else block.to(torch.int64) >= 0
        found.append(start + torch.nonzero(has.view(len(has), -1).any(dim=1))[:, 0])
    labelled = torch.cat(found)
    # The raw bits of a generator are the same in all NumPy versions; permutation() may change.
    order = np.argsort(np.random.PCG64(seed).random_raw(len(labelled)), kind="stable")
    ends = np.round(np.cumsum(fractions) * len(labelled)).astype(np.int64)
    parts = np.split(labelled.numpy()[order], ends)[: len(SPLITS)]
    return {
        split: TensorRows(torch.from_numpy(np.sort(part))) for split, part in zip(SPLITS, parts, strict=True)
    }
