"""Masks of a source become splits: node ids. Called by run.py, once all counts are known."""

from __future__ import annotations

import torch

from gids.errors import FormatError
from gids.store.convert.edges import column_of
from gids.store.convert.source import Mask, Source
from gids.store.rows import Rows, TensorRows, blocks

_BLOCK_BYTES = 8 << 20


def masks_to_splits(source: Source, column: int | None = None) -> None:
    """Turn the source's masks into splits.

    column: which one, of masks of shape (nodes, splits). Raises FormatError for a mask of another length than
    there are nodes, one with values other than 0 and 1, and for a column that is missing or not asked for.
    """
    wide = False
    for ntype, masks in source.masks.items():
        for split, mask in masks.items():
            source.add_nodes(ntype, mask.rows.shape[0] if mask.rows.shape else 0, mask.what)
            wide = wide or _is_wide(mask)
            ids = TensorRows(_ones(_one_column(mask, column), mask.what))
            if split in source.splits.setdefault(ntype, {}):
                raise FormatError(f"{mask.what} is a second {split} split of {ntype!r} nodes")
            source.splits[ntype][split] = ids
    if column is not None and not wide:
        raise FormatError("--split-column is for masks of shape (nodes, splits), and the source has none")


def _is_wide(mask: Mask) -> bool:
    return len(mask.rows.shape) == 2 and mask.rows.shape[1] > 1


def _one_column(mask: Mask, column: int | None) -> Rows:
    shape = mask.rows.shape
    if len(shape) == 1:
        return mask.rows
    if len(shape) != 2 or not shape[1]:
        raise FormatError(f"{mask.what} has shape {shape}; a mask has one dimension")
    if shape[1] == 1:
        return column_of(mask.rows, 0)
    if column is None or not 0 <= column < shape[1]:
        asked = "" if column is None else f", not column {column}"
        raise FormatError(
            f"{mask.what} has shape {shape}, {shape[1]} splits{asked}: --split-column K takes one of them, "
            f"0 to {shape[1] - 1}"
        )
    return column_of(mask.rows, column)


def _ones(mask: Rows, what: str) -> torch.Tensor:
    """The positions at which a mask is 1, int64."""
    found = []
    for start, block in blocks(mask, _BLOCK_BYTES):
        wrong = torch.nonzero((block != 0) & (block != 1))
        if len(wrong):
            row = int(wrong[0])
            raise FormatError(
                f"{what} is {block[row].item()} at node {start + row}; a mask has True and False, or 1 and 0 "
                "(node ids go in an array train_idx, val_idx or test_idx)"
            )
        found.append(start + torch.nonzero(block)[:, 0])
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
