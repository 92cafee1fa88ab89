"""Sizes of minibatches, by which memory is shared out, and the warning about a larger minibatch.

Called by FeatureLoader. Knows numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gids.cache.live_batches import Sizes
from gids.cuda import on_host
from gids.errors import MissingError
from gids.sizes import format_bytes
from gids.store.table import positions_of

if TYPE_CHECKING:
    from gids.store import Table

Rows = dict[str, int]
"""Number of rows by table."""


def check_minibatch_rows(given: int | Mapping[str, int] | None, tables: Iterable[str]) -> Rows | None:
    """FeatureLoader's minibatch_rows, by table.

    Raises KeyError for a table that it does not load, TypeError and ValueError for other values.
    """
    if given is None:
        return None
    names = list(tables)
    by_table = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
    for name, count in by_table.items():
        if name not in names:
            raise MissingError(
                f"minibatch_rows names {name!r}, and the tables are {', '.join(map(repr, names))}"
            )
        if isinstance(count, bool) or not isinstance(count, Integral):
            raise TypeError(f"minibatch_rows={given!r}: give a number of rows, or a number by table")
        if count < 0:
            raise ValueError(f"minibatch_rows={given!r}: a number of rows must be 0 or more")
    return {name: int(by_table.get(name, 0)) for name in names}


def rows_read(ids: Mapping[str, Any], tables: Iterable[str]) -> Rows:
    """Number of rows that a minibatch reads, by table. Ids need not be checked yet."""
    return {name: math.prod(np.shape(ids.get(name, ()))) for name in tables}


def page_bytes_read(ids: Mapping[str, Any], tables: Iterable[Table]) -> int:
    """Bytes of the pages that hold a minibatch's rows, each page once. Called for the first minibatch only.

    Ids need not be checked yet.
    """
    total, copies = 0, on_host(ids)
    for table in tables:
        of_table = copies.get(table.name)
        if not isinstance(of_table, torch.Tensor) or of_table.dtype != torch.int64 or of_table.is_meta:
            continue  # none, or refused when the minibatch enters the cache
        rows = of_table.numpy().ravel()
        if table.order is not None:
            rows = positions_of(rows, table.order)
        total += table.page_bytes * len(np.unique(rows // table.rows_per_page))
    return total


def usual_sizes(first: Sizes, *, given: Rows | None, growth: float, seen: Rows) -> Sizes:
    """Expected sizes of minibatches, known at the first one.

    first: its sizes. given: rows of the largest, by the user; then no room is left for larger ones. growth:
    size of the others, relative to the first. seen: rows of the largest minibatch of earlier epochs.
    """
    if given is None:
        usual = first.grown(growth)
        return replace(usual, rows={name: max(n, seen.get(name, 0)) for name, n in usual.rows.items()})
    rows = {name: max(n, given[name]) for name, n in first.rows.items()}
    times = sum(rows.values()) / max(1, sum(first.rows.values()))
    return replace(first.grown(times), rows=rows, growths=(1.0,))


def too_large(rows: Rows, excess_bytes: int) -> str:
    """The warning about a minibatch that is larger than expected."""
    wanted = {name: n for name, n in rows.items() if n}
    option = next(iter(wanted.values())) if len(rows) == 1 else wanted
    return (
        f"a minibatch reads {sum(rows.values()):,} rows, more than expected: the loader may use "
        f"{format_bytes(excess_bytes)} more than its memory budget. Give the rows of the largest minibatch, "
        f"minibatch_rows={option}: then the cache leaves room for them"
    )
