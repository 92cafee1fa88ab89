"""Labels, masks and splits of nodes, and times of nodes and edges. Called by run.py and the readers.

Labels become whole numbers, -1 for none; masks become splits (node ids); other labels get a random split.
Times stay tables, so that models can read them; a copy sorts the edges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from gids.convert.source import Mask, Source, described
from gids.convert.stream_rows import BLOCK_BYTES, column_of, derived, saved
from gids.errors import FormatError
from gids.store.dtypes import UINT64, is_whole
from gids.store.names import SPLITS, describe_type
from gids.store.rows import Rows, as_int64, as_rows, blocks

_MAX_TIME = float(1 << 53)  # beyond it, float64 has no odd numbers


def normalised(labels: Rows, *, are_classes: bool = False) -> Rows:
    """Labels that are classes, as int64 in their shape with -1 for negatives and NaN. Returns other labels
    unchanged.

    Labels of shape (n,) or (n, 1) are classes if their type is whole, if they are whole floats from -1 on of
    which one or more is NaN or -1, or if the format says so (are_classes). Raises FormatError for a fraction
    among classes.
    """
    if labels.shape[1:] not in ((), (1,)) or labels.dtype.is_complex:
        return labels
    if labels.dtype.is_floating_point and not are_classes and not _are_classes_with_gaps(labels):
        return labels
    return derived(labels, _classes, torch.int64, labels.shape)


def _classes(values: torch.Tensor, first: int) -> torch.Tensor:
    if values.dtype.is_floating_point:
        values = values.to(torch.float64)
        whole = (values == values.floor()) & (values.abs() < 2.0**63)
        wrong = torch.nonzero(~(whole | torch.isnan(values)))
        if len(wrong):
            row = int(wrong[0][0])
            raise FormatError(f"label {first + row} is {float(values[row])}; a class must be a whole number")
        values = torch.nan_to_num(values, nan=-1.0)
    return as_int64(values, "a label", first).clamp(min=-1)


def _are_classes_with_gaps(labels: Rows) -> bool:
    """Whether one value or more is NaN or -1, and all others are whole and 0 or more."""
    has_gaps = False
    for _, block in blocks(labels, BLOCK_BYTES):
        values = torch.nan_to_num(block, nan=-1.0, posinf=0.5, neginf=0.5)  # 0.5: no class
        if bool(((values != values.floor()) | (values < -1)).any()):
            return False
        has_gaps |= bool((values == -1).any())
    return has_gaps


def masks_to_splits(source: Source, scratch: Path, column: int | None = None) -> None:
    """Turn the source's masks into splits, whose ids are written to scratch.

    column: the column to take of masks of shape (nodes, splits). Raises FormatError for values other than 0
    and 1, and if a column is missing or not needed.
    """
    masks = [(ntype, *item) for ntype, by_split in source.masks.items() for item in by_split.items()]
    if column is not None and not any(len(m.rows.shape) == 2 and m.rows.shape[1] > 1 for *_, m in masks):
        raise FormatError("--split-column has no effect: the source has no masks of shape (nodes, splits)")
    for number, (ntype, split, mask) in enumerate(masks):
        if split in source.splits.setdefault(ntype, {}):
            raise FormatError(f"{mask.what} is a second {split} split of {ntype!r} nodes: keep one")
        ids = _ones(_one_column(mask, column), mask.what)
        source.splits[ntype][split] = saved(scratch / f"split-{number}", ids)


def _one_column(mask: Mask, column: int | None) -> Rows:
    shape = mask.rows.shape
    if len(shape) == 1:
        return mask.rows
    if len(shape) != 2 or not shape[1]:
        raise FormatError(f"{mask.what} has shape {shape}; a mask must have one dimension")
    if shape[1] > 1 and (column is None or not 0 <= column < shape[1]):
        raise FormatError(
            f"{mask.what} has shape {shape}: choose one of its {shape[1]} splits with --split-column, 0 to "
            f"{shape[1] - 1}{'' if column is None else f' (got {column})'}"
        )
    return column_of(mask.rows, column if column is not None and shape[1] > 1 else 0)


def _ones(mask: Rows, what: str) -> Iterator[np.ndarray]:
    """The positions at which a mask is 1, in pieces."""
    for start, block in blocks(mask, BLOCK_BYTES):
        block = as_int64(block, what, start) if is_whole(block.dtype) else block
        wrong = torch.nonzero((block != 0) & (block != 1))
        if len(wrong):
            row = int(wrong[0])
            raise FormatError(
                f"{what} is {block[row].item()} at node {start + row}; a mask must be bool, or 0 and 1 "
                "(put node ids into an array train_idx, val_idx or test_idx)"
            )
        yield (start + torch.nonzero(block)[:, 0]).numpy()


def random_split(labels: Rows, fractions: Sequence[float], seed: int) -> dict[str, Rows]:
    """Split the nodes that have a label at random. Each part is sorted.

    fractions: of train, val and test; their sum is at most 1. A whole number below 0, or NaN, means no label.
    The result depends on labels, fractions and seed only, not on the machine.
    """
    if len(fractions) != len(SPLITS) or not all(f >= 0 for f in fractions) or sum(fractions) > 1 + 1e-9:
        raise FormatError(f"--split needs three fractions with a sum of at most 1 (got {list(fractions)})")
    parts = [torch.empty(0, dtype=torch.int64)]
    for start, block in blocks(labels, BLOCK_BYTES):
        has = ~torch.isnan(block) if block.dtype.is_floating_point else block.to(torch.int64) >= 0
        parts.append(start + torch.nonzero(has.view(len(has), -1).any(dim=1))[:, 0])
    labelled = torch.cat(parts).numpy()
    # The raw bits of a generator are the same in all NumPy versions; permutation() may change.
    order = np.argsort(np.random.PCG64(seed).random_raw(len(labelled)), kind="stable")
    ends = np.round(np.cumsum(fractions) * len(labelled)).astype(np.int64)
    drawn = np.split(labelled[order], ends)[: len(SPLITS)]
    return {split: as_rows(np.sort(ids)) for split, ids in zip(SPLITS, drawn, strict=True)}


def find_times(source: Source, keys: Collection[str]) -> None:
    """Take the tables with these keys as times of their nodes or edges, if they are whole numbers, one each.

    Others stay tables only, and a note tells why. Reads tables of floating numbers.
    """
    for table in source.tables:
        if table.key not in keys:
            continue
        times = _whole_times(table.rows)
        if isinstance(times, str):
            source.notes.append(f"table {table.name} is not used as times: {times}")
        elif isinstance(table.type, str):
            source.node_times[table.type] = times
        elif table.type in source.graphs:
            source.edge_times[table.type] = times


def _whole_times(rows: Rows) -> Rows | str:
    """Whole numbers in one dimension, or why they are not."""
    if len(rows.shape) == 2 and rows.shape[1] == 1:
        rows = column_of(rows, 0)
    if len(rows.shape) != 1 or rows.dtype in (torch.bool, UINT64) or rows.dtype.is_complex:
        return f"{described(rows)} is not one whole number for each"
    if not rows.dtype.is_floating_point:
        return rows
    for _, block in blocks(rows, BLOCK_BYTES):
        wide = block.double()
        if not bool((wide.frac() == 0).all()) or not bool((wide.abs() < _MAX_TIME).all()):  # NaN is no number
            return "some of its values are not whole numbers: multiply and round them"
    return derived(rows, lambda block, _: block, torch.int64)


def describe_times(source: Source) -> str:
    """What the times do, for the user; "" without times."""
    kinds = [f"{t!r} nodes" for t in source.node_times]
    kinds += [f"edges of {describe_type(r)}" for r in source.edge_times]
    effect = "have times: the in-edges of every node are sorted by them (--no-times keeps their order)"
    return f"{', '.join(kinds)} {effect}" if kinds else ""
