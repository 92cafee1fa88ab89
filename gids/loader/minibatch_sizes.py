"""How large minibatches are: what memory is shared out by, and what is said of one that is larger.

Called by FeatureLoader. Knows numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import numpy as np

from gids.cache.budget import GROWTH
from gids.errors import MissingError
from gids.sizes import format_bytes

Rows = dict[str, int]
"""Rows of each table."""


def check_minibatch_rows(given: int | Mapping[str, int] | None, tables: Iterable[str]) -> Rows | None:
    """What FeatureLoader takes as minibatch_rows, for each of its tables.

    Raises KeyError for a table that it does not load, TypeError and ValueError for what is no number of rows.
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
            raise TypeError(f"minibatch_rows={given!r}; give a number of rows, or one by table")
        if count < 0:
            raise ValueError(f"minibatch_rows={given!r}; numbers of rows are not negative")
    return {name: int(by_table.get(name, 0)) for name in names}


def rows_read(ids: Mapping[str, Any], tables: Iterable[str]) -> Rows:
    """How many rows a minibatch reads; ids need not be checked yet."""
    return {name: math.prod(np.shape(ids.get(name, ()))) for name in tables}


def largest_expected(
    first: Rows, minibatch_bytes: int, *, given: Rows | None, growth: float
) -> tuple[Rows, int]:
    """(rows, bytes of the sampled minibatch itself) of the largest minibatch, by what is known at the first.

    first, minibatch_bytes: of the first minibatch. given: rows of the largest, as the user says. growth: how
    many times as large as the first the others are.
    """
    if given is None:
        times = GROWTH * growth
        return {name: int(times * n) for name, n in first.items()}, int(times * minibatch_bytes)
    rows = {name: max(n, given[name]) for name, n in first.items()}
    times = sum(rows.values()) / max(1, sum(first.values()))
    return rows, int(times * minibatch_bytes)


def too_large(rows: Rows, excess_bytes: int) -> str:
    """The warning about a minibatch that memory was not shared out for."""
    wanted = {name: n for name, n in rows.items() if n}
    option = next(iter(wanted.values())) if len(rows) == 1 else wanted
    return (
        f"a minibatch reads {sum(rows.values()):,} rows, more than memory was shared out for: with such ones "
        f"the loader may take {format_bytes(excess_bytes)} more than memory_bytes. Tell it the rows of the "
        f"largest, minibatch_rows={option}, and the cache leaves room for them"
    )
