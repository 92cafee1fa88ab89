"""Compares the tables of a dataset with its source. Called by `gids verify --against`.

Values that were rounded to fewer bits may differ by the error of the rounding. All others must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from gids.convert.source import Source, TableSource
from gids.errors import FormatError
from gids.store.dtypes import equal_values, scales_of
from gids.store.feature_store import FeatureStore
from gids.store.files import array_rows
from gids.store.ids import ID_ROLES
from gids.store.rows import Rows, blocks, read_range
from gids.store.table import Table
from gids.write.narrow import Narrowing, Tally, describe_rounding, first_place

_BLOCK_BYTES = 4 << 20


def compare(
    store: FeatureStore, source: Source, *, on_bytes: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[bool, str]]:
    """Compare each table with the one of the same name in the source, and report tables that only one has.

    Compares the ids of nodes too. Yields (whether it is a fault, a sentence) per table, and per node type
    with ids. on_bytes(n): progress, in bytes of the dataset's rows. Raises StorageError, and FormatError for
    a damaged source.
    """
    sources = {t.name: t for t in source.tables}
    for name in sources:
        if name not in store.tables:
            yield True, f"table {name!r} of the source is not in {store.name}"
    for name, table in store.tables.items():
        if name not in sources:
            yield True, f"table {name!r} of {store.name} is not in the source"
        else:
            yield _compare_table(table, sources[name], on_bytes)
    for nodes in store.manifest.nodes:
        stored = {role: nodes.arrays[role] for role in ID_ROLES if role in nodes.arrays}
        expected = source.ids.get(nodes.type, {})
        if stored or expected:
            same = stored.keys() == expected.keys() and all(
                _are_equal(expected[role], array_rows(store.locate.array(entry), entry))
                for role, entry in stored.items()
            )
            yield not same, f"ids of {nodes.type!r} nodes: {'equal' if same else 'not those of the source'}"


def _are_equal(expected: Rows, rows: Rows) -> bool:
    return (expected.shape, expected.dtype) == (rows.shape, rows.dtype) and all(
        torch.equal(block, read_range(rows, start, start + len(block)))
        for start, block in blocks(expected, _BLOCK_BYTES)
    )


def _compare_table(table: Table, source: TableSource, on_bytes: Callable[[int], None]) -> tuple[bool, str]:
    rows, shape = source.rows, (table.row_count, *table.shape)
    if table.columns and source.columns and table.columns != source.columns:
        return True, f"{table.name!r} has the columns {table.columns}, in the source {source.columns}"
    if tuple(rows.shape) != shape:
        return True, f"{table.name!r} has shape {list(shape)}, in the source {list(rows.shape)}"
    try:
        narrowing = Narrowing.of(rows.dtype, table.stored_dtype, table.scale)
    except FormatError as error:  # a scale for a table that is not floating in the source
        return True, f"{table.name!r}: {error}"
    tally, wrong_count, first = Tally(), 0, ""
    maxima = torch.zeros(math.prod(table.shape))
    width = max(table.row_bytes, math.prod(table.shape) * rows.dtype.itemsize, 1)
    for start, stored in table.scan(max(1, _BLOCK_BYTES // width)):
        expected = read_range(rows, start, start + len(stored))
        bounds = None
        if narrowing is not None:
            magnitudes = torch.where(torch.isfinite(expected), expected, 0).to(torch.float32).abs()
            maxima = torch.maximum(maxima, magnitudes.reshape(len(stored), -1).amax(0))
            bounds = _bounds(narrowing, table, expected, magnitudes)
        wrong = _differ(expected, stored, bounds)
        if bool(wrong.any()) and not first:
            where, was = first_place(expected, wrong, start)
            _, now = first_place(stored, wrong, start)
            first = f"{where} is {now}, in the source {was}"
        wrong_count += int(wrong.sum())
        if narrowing is not None:
            tally.add(expected, stored)
        on_bytes(len(stored) * table.row_bytes)
    columns = table.column_scales()
    if columns is not None and not torch.equal(torch.from_numpy(columns), scales_of(maxima)):
        return True, f"{table.name!r}: the scales of columns do not fit the source"
    if wrong_count:
        limit = "" if narrowing is None else ", more than the error of rounding"
        return True, f"{table.name!r}: {first}{limit}; {wrong_count} values differ"
    return False, f"{table.name}: {'equal' if narrowing is None else describe_rounding(narrowing, tally)}"


def _bounds(
    narrowing: Narrowing, table: Table, expected: torch.Tensor, magnitudes: torch.Tensor
) -> torch.Tensor:
    """The error allowed for each value. A scale per row is computed from the source, not read."""
    columns = table.column_scales()
    if columns is not None:
        return narrowing.bounds(expected, torch.from_numpy(columns).view(table.shape))
    if table.scale is None:
        return narrowing.bounds(expected, None)
    scales = scales_of(magnitudes.reshape(len(expected), -1).amax(1))
    return narrowing.bounds(expected, scales.view(-1, *[1] * len(table.shape)))


def _differ(expected: torch.Tensor, rows: torch.Tensor, bounds: torch.Tensor | None) -> torch.Tensor:
    """A mask of the values that differ, or differ by more than bounds."""
    same = equal_values(expected, rows) | (torch.isnan(expected) & torch.isnan(rows))
    if bounds is None:
        return ~same
    error = (expected.to(torch.float64) - rows.to(torch.float64)).abs()
    return ~same & ~(error <= bounds)  # with an infinity or NaN, error is NaN
