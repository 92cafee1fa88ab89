"""Turns masks of a source into splits (node ids). Called by run.py when all numbers of nodes are known."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import torch

from gids.convert.edges import BLOCK_BYTES, column_of
from gids.convert.source import Mask, Source
from gids.errors import FormatError
from gids.store.rows import GeneratedRows, Rows, blocks, read_range


def count_masked(source: Source) -> None:
    """Set the numbers of nodes from masks. Raises FormatError for a mask of another length."""
    for ntype, masks in source.masks.items():
        for mask in masks.values():
            source.add_nodes(ntype, mask.rows.shape[0] if mask.rows.shape else 0, mask.what)


def masks_to_splits(source: Source, column: int | None = None) -> None:
    """Turn the source's masks into splits. Reads a mask now to count, and again for its ids.

    column: the column to take of masks of shape (nodes, splits). Raises FormatError for values other than 0
    and 1, and if a column is missing or not needed.
    """
    wide = False
    for ntype, masks in source.masks.items():
        for split, mask in masks.items():
            wide = wide or _is_wide(mask)
            if split in source.splits.setdefault(ntype, {}):
                raise FormatError(f"{mask.what} is a second {split} split of {ntype!r} nodes: keep one")
            source.splits[ntype][split] = _ones(_one_column(mask, column), mask.what)
    if column is not None and not wide:
        raise FormatError("--split-column has no effect: the source has no masks of shape (nodes, splits)")


def _is_wide(mask: Mask) -> bool:
    return len(mask.rows.shape) == 2 and mask.rows.shape[1] > 1


def _one_column(mask: Mask, column: int | None) -> Rows:
    shape = mask.rows.shape
    if len(shape) == 1:
        return mask.rows
    if len(shape) != 2 or not shape[1]:
        raise FormatError(f"{mask.what} has shape {shape}; a mask must have one dimension")
    if shape[1] == 1:
        return column_of(mask.rows, 0)
    if column is None or not 0 <= column < shape[1]:
        asked = "" if column is None else f", not column {column}"
        raise FormatError(
            f"{mask.what} has shape {shape}: choose one of its {shape[1]} splits{asked} with --split-column, "
            f"0 to {shape[1] - 1}"
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
