"""Checks the limits of datasets on a source, before anything is written. Called by run.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gids.convert.damage import shortened
from gids.convert.source import InEdges, Source, TableSource
from gids.errors import FormatError
from gids.store.geometry import MAX_PAGE_BYTES
from gids.store.names import check_name, describe_type
from gids.store.rows import Rows

MAX_TABLES = 10_000  # a manifest of 16 MiB has room for about twice as many
MAX_DIMENSIONS = 8  # of a table's row, as in a manifest


def check_source(source: Source) -> None:
    """Raise FormatError for names, shapes and numbers of tables that a dataset cannot have."""
    for relation in source.graphs:
        for part in relation:
            check_name(part, "a name of a relation")
        _check_in_edges(source, relation)
    if len(source.tables) > MAX_TABLES:
        raise FormatError(
            f"the source has {len(source.tables)} tables; the limit is {MAX_TABLES}: "
            "put features that are read together into one array"
        )
    for what, rows in _read_by_blocks(source):
        if math.prod(rows.shape[1:]) * rows.dtype.itemsize > MAX_PAGE_BYTES:
            raise FormatError(
                f"{what} have shape {rows.shape}; a row may have at most {MAX_PAGE_BYTES} bytes"
            )
    names = set()
    for table in source.tables:
        _check_table(table)
        if table.name in names:
            raise FormatError(f"the source has two tables {table.name!r}")
        names.add(table.name)


def _read_by_blocks(source: Source) -> Iterator[tuple[str, Rows]]:
    """Labels and masks. The writer checks the size of the rows of tables."""
    for ntype, rows in source.labels.items():
        yield f"the labels of {ntype!r}", rows
    for masks in source.masks.values():
        for mask in masks.values():
            yield f"the values of {mask.what}", mask.rows


def _check_table(table: TableSource) -> None:
    for part in (table.type,) if isinstance(table.type, str) else table.type:
        check_name(part, "a node type or relation")
    check_name(table.key, "the name of a table")
    shape = table.rows.shape
    if not shape:
        raise FormatError(f"table {table.name!r} is a single number; its first dimension must be rows")
    if len(shape) - 1 > MAX_DIMENSIONS:
        raise FormatError(
            f"table {table.name!r} has rows of {len(shape) - 1} dimensions; the limit is {MAX_DIMENSIONS}"
        )


def _check_in_edges(source: Source, relation: tuple[str, str, str]) -> None:
    topology = source.graphs[relation]
    if not isinstance(topology, InEdges):
        return
    parts = {"indptr": topology.indptr, "indices": topology.indices, "edge_ids": topology.edge_ids}
    for what, rows in parts.items():
        if rows is not None and len(rows.shape) != 1:
            raise FormatError(
                f"{what} of {shortened(describe_type(relation))} has shape {rows.shape}; "
                "it must have one dimension"
            )
    if not topology.indptr.shape[0]:
        raise FormatError(f"indptr of {describe_type(relation)} is empty; it must begin with 0")
