"""Traces of sampling: the pages of a table that training would read. Called by trace_source.py."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.bench.minibatches import endless, input_nodes
from gids.bench.session import Session
from gids.cache import page_heat
from gids.store.table import positions_of
from gids.trace.trace_file import TracedTable
from gids.trace.trace_writer import TraceWriter

if TYPE_CHECKING:
    from gids.sampler import Sampler
    from gids.store import FeatureStore, Table


_LEAST_BATCHES = 64  # enough to fill windows


def sample_trace(
    store: FeatureStore,
    table: Table,
    path: str | os.PathLike[str],
    *,
    sampler: Sampler,
    batch_size: int,
    batches: int,
    seeds: str = "train",
    heat: str = "auto",
    order: npt.NDArray[Any] | None = None,
    rows: bool = False,
    seed: int = 0,
    most_seconds: float = float("inf"),
    most_pages: float = float("inf"),
    session: Session,
) -> int:
    """Write a trace of `batches` minibatches, as gids.NodeLoader samples them.

    table: of nodes. heat: the name of a stored method, "auto" for the best one, or "none". order: positions
    of the rows, as Table.order. rows: write ids of rows instead of pages. Stops early after most_seconds, or
    after most_pages and _LEAST_BATCHES. Returns the number of minibatches. Raises ValueError, KeyError for
    arguments and FormatError for a dataset without topology.
    """
    if not isinstance(table.type, str):
        raise ValueError(
            f"table {table.name!r} has rows of edges, and samplers read nodes: give another --table"
        )
    methods = store.heat_methods(table.type) if heat == "auto" else [] if heat == "none" else [heat]
    order = None if rows else order
    per_page = 1 if rows else table.rows_per_page
    traced = TracedTable(
        name=table.name,
        page_count=table.row_count if rows else table.page_count,
        page_bytes=table.row_bytes if rows else table.page_bytes,
        rows_per_page=per_page,
        lines=None,
        heat=page_heat(store.heat(methods[0], table.type), per_page, order) if methods else None,
        of_rows=rows,
    )
    minibatches = endless(store, sampler, seeds=seeds, batch_size=batch_size, seed=seed)
    marks = np.zeros(traced.page_count, np.uint32)
    stop_at = session.left_s() - most_seconds
    writer = TraceWriter(path, [traced])
    count = total = 0
    try:
        for minibatch in minibatches:
            enough = session.left_s() < stop_at or (total > most_pages and count >= _LEAST_BATCHES)
            if count == batches or (count and enough):
                break
            count += 1
            ids = input_nodes(minibatch, table.type).numpy()
            if order is not None:
                ids = positions_of(ids, order)
            pages = np.empty(len(ids), np.int64)
            found = _core.unique_pages(ids, per_page, marks, count, pages)
            writer.enter([pages[:found]])
            total += found
        writer.finish()
    finally:
        writer.abandon()
    return count
