"""Recognises the times of nodes and edges among the arrays of a source. Called by the readers and run.py.

Times stay tables, so that models can read them. This module copies them to sort the edges.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from gids.convert.edges import BLOCK_BYTES, column_of
from gids.convert.source import Source
from gids.store.names import describe_type
from gids.store.rows import GeneratedRows, Rows, blocks, read_range

_LIMIT = float(1 << 53)  # beyond it, float64 has no odd numbers


def find_times(source: Source, keys: Collection[str]) -> None:
    """Take the tables with these keys as times of their nodes or edges, if they are whole numbers, one each.

    Others stay tables only, and a note tells why. Reads tables of floating numbers.
    """
    for table in source.tables:
        if table.key not in keys:
            continue
        found = _whole(table.rows)
        if isinstance(found, str):
            source.notes.append(f"table {table.name} is not used as times: {found}")
        elif isinstance(table.type, str):
            source.node_times[table.type] = found
        elif table.type in source.graphs:
            source.edge_times[table.type] = found


def _whole(rows: Rows) -> Rows | str:
    """Whole numbers in one dimension, or why they are not."""
    if len(rows.shape) == 2 and rows.shape[1] == 1:
        rows = column_of(rows, 0)
    if len(rows.shape) != 1 or rows.dtype in (torch.bool, torch.uint64) or rows.dtype.is_complex:
        of_type = str(rows.dtype).removeprefix("torch.")
        return f"{of_type}{list(rows.shape)} is not one whole number for each"
    if not rows.dtype.is_floating_point:
        return rows
    for _, block in blocks(rows, BLOCK_BYTES):
        wide = block.double()
        if not bool((wide.frac() == 0).all()) or not bool((wide.abs() < _LIMIT).all()):  # NaN is no number
            return "some of its values are not whole numbers: multiply and round them"

    def fill(start: int, out: torch.Tensor) -> None:
        out.copy_(read_range(rows, start, start + len(out)))

    return GeneratedRows(rows.shape, torch.int64, fill)


def describe_times(source: Source) -> list[str]:
    """What the times do, for the user."""
    kinds = [f"{t!r} nodes" for t in source.node_times]
    kinds += [f"edges of {describe_type(r)}" for r in source.edge_times]
    if not kinds:
        return []
    return [
        f"{', '.join(kinds)} have times: the in-edges of every node are sorted by them (--no-times keeps "
        "their order)"
    ]
