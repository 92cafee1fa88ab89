"""Compares the tables of a dataset with its source. Called by `gids verify --against`.

Values that were rounded to fewer bits must be what the conversion makes of the source's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import torch

from gids.convert.source import Source, TableSource
from gids.errors import FormatError
from gids.store.dtypes import equal_values
from gids.store.feature_store import FeatureStore
from gids.store.files import array_rows
from gids.store.ids import ID_ROLES
from gids.store.rows import Rows, blocks, read_range
from gids.store.table import Table
from gids.write.narrow import (
    Narrowing,
    Tally,
    column_scales,
    describe_rounding,
    first_place,
    narrowed,
    quantized,
)

_BLOCK_BYTES = 4 << 20


def compare(
    store: FeatureStore, source: Source, *, on_bytes: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[bool, str]]:
    """Compare each table with the one of the same name in the source, and report tables that only one has.

    Compares the ids of nodes too. Yields (whether it is a fault, a sentence) per table, and per node type
    with ids. on_bytes(n): progress, in bytes of the dataset's rows. Raises StorageError.
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
    tally, wrong_count, first = Tally(), 0, ""
    try:
        narrowing = Narrowing.of(rows.dtype, table.stored_dtype, table.scale)
        if narrowing is not None:
            columns = next(column_scales(rows, lambda _: None)) if table.scale == "column" else None
            if columns is not None and not np.array_equal(columns, cast(np.ndarray, table.column_scales())):
                return True, f"{table.name!r}: the scales of columns do not fit the source"
            is_scaled = table.scale is not None
            rows = quantized(rows, columns, tally) if is_scaled else narrowed(rows, table.dtype, tally)
        width = max(table.row_bytes, math.prod(table.shape) * source.rows.dtype.itemsize, 1)
        for start, stored in table.scan(max(1, _BLOCK_BYTES // width)):
            expected = read_range(rows, start, start + len(stored))
            if table.scale is not None:
                expected = table.decode(expected.numpy())
            wrong = ~(equal_values(expected, stored) | (torch.isnan(expected) & torch.isnan(stored)))
            if bool(wrong.any()) and not first:
                where, was = first_place(expected, wrong, start)
                first = f"{where} is {first_place(stored, wrong, start)[1]}, in the source {was}"
            wrong_count += int(wrong.sum())
            on_bytes(len(stored) * table.row_bytes)
    except FormatError as error:  # the source has values that the type of the table cannot hold
        return True, f"{table.name!r}: {error}"
    if wrong_count:
        rounded = "" if narrowing is None else ", rounded as in the dataset"
        return True, f"{table.name!r}: {first}{rounded}; {wrong_count} values differ"
    return False, f"{table.name}: {'equal' if narrowing is None else describe_rounding(narrowing, tally)}"
