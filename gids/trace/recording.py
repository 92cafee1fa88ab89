"""Records what a FeatureLoader's cache is asked for: ``with record(loader, "run.trace"): train(loader)``.

It stands between the stream and the cache and writes down every step as it passes. Rows and timing are as
without it, but for the writing: 4 B per page of each minibatch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.store.table import positions_of
from gids.trace.trace_file import Pages, TracedTable
from gids.trace.trace_writer import TraceWriter

if TYPE_CHECKING:
    from gids.cache.live_batches import Sizes
    from gids.loader import FeatureLoader
    from gids.loader.placement import Heats, Placement, Plan
    from gids.loader.stream import Cache, Features, Ids
    from gids.store import Table

_COUNTERS = ("steps", "pages", "hits", "misses", "loads", "bypasses", "evictions", "failures")
log = logging.getLogger("gids")
_NO_IDS = torch.empty(0, dtype=torch.int64)


class HasFeatureLoader(Protocol):
    """gids.NodeLoader, gids.dgl.DataLoader."""

    @property
    def feature_loader(self) -> FeatureLoader | None: ...


@contextmanager
def record(
    loader: FeatureLoader | HasFeatureLoader, path: str | os.PathLike[str], *, rows: bool = False
) -> Iterator[None]:
    """Write to path, while the block runs, what a loader's cache is asked for; gids.trace.Trace reads it.

    loader: a gids.FeatureLoader, gids.NodeLoader or gids.dgl.DataLoader that has not handed out anything yet,
    so that the trace begins with an empty cache. rows: write down ids of rows, in place of pages and of what
    the cache did with them: what `gids convert --order trace:FILE` takes. Any number of epochs; streams that
    read through (a validation in mid-epoch) leave no mark and are not recorded. When the block ends by an
    exception, the trace holds what happened before; without a minibatch there is no file. An OSError while
    writing is logged, and ends the recording. Raises ValueError for a loader that has a cache already, or
    loads no features; OSError for the path.
    """
    from gids.loader import FeatureLoader

    features = loader if isinstance(loader, FeatureLoader) else loader.feature_loader
    if features is None:
        raise ValueError("this loader loads no features: there is nothing to record")
    if features._cache is not None:
        raise ValueError("this loader has a cache already: begin to record before its first minibatch")
    with open(path, "wb"):  # where nothing can be written, that is said now and not at the first minibatch
        pass
    tap = _Tap(features, path, rows)
    placement = features._placement
    features._placement = tap
    try:
        yield
    finally:
        features._placement = placement
        tap.finish()


class _Tap:
    """A loader's placement, which taps the cache that it builds. A Placement."""

    def __init__(self, loader: FeatureLoader, path: str | os.PathLike[str], rows: bool) -> None:
        self._placement: Placement = loader._placement
        self._tables: list[Table] = loader.tables
        self._policy: str = loader._policy
        self._device: str = loader.device.type
        self._path, self._rows = path, rows
        self._writer: TraceWriter | None = None
        self._cache: TappedCache | None = None
        self.least_planned = self._placement.least_planned
        self.memory_bytes = self._placement.memory_bytes

    def build(self, sizes: Sizes, heats: Heats) -> tuple[Cache, Plan]:
        cache, plan = self._placement.build(sizes, heats)
        if self._rows:
            tables = [
                TracedTable(t.name, t.row_count, t.row_bytes, 1, None, None, of_rows=True)
                for t in self._tables
            ]
            self._writer = TraceWriter(self._path, tables)
        else:
            stats = cache.stats()
            tables = [
                TracedTable(
                    t.name,
                    t.page_count,
                    t.page_bytes,
                    t.rows_per_page,
                    stats[t.name].get("lines"),
                    heats.get(t.name),
                )
                for t in self._tables
            ]
            self._writer = TraceWriter(
                self._path,
                tables,
                policy=self._policy,
                window_batches=plan.sizes.window_batches,
                planned_batches=min(sizes.planned_batches, plan.sizes.planned_batches),
                device=self._device,
            )
        orders = [None if self._rows else t.order for t in self._tables]
        self._cache = TappedCache(cache, tables, orders, self._writer)
        return self._cache, plan

    def share(self, sizes: Sizes, memory_bytes: int) -> Plan:
        return self._placement.share(sizes, memory_bytes)

    def excess_bytes(self, sizes: Sizes) -> int:
        return self._placement.excess_bytes(sizes)

    def memory(self, cache: Cache | None, held_bytes: int) -> dict[str, int]:
        return self._placement.memory(cache, held_bytes)

    def finish(self) -> None:
        if self._cache is not None:
            self._cache.end()
        elif os.path.isfile(self._path):
            os.unlink(self._path)


class TappedCache:
    """A cache that writes down what it is asked for, until end(). Passes everything on. A Cache.

    orders: where each table's rows lie, when not where their ids say.
    """

    def __init__(
        self,
        cache: Cache,
        tables: Sequence[TracedTable],
        orders: Sequence[npt.NDArray[Any] | None],
        writer: TraceWriter,
    ) -> None:
        self._cache = cache
        self._tables, self._orders = tables, orders
        self._rows_only = any(t.of_rows for t in tables)
        self._writer: TraceWriter | None = writer
        self._marks = [np.full(t.page_count, 0, np.uint32) for t in tables]
        self._mark = 0

    @property
    def next_step(self) -> int:
        return self._cache.next_step

    @next_step.setter
    def next_step(self, step: int) -> None:
        self._cache.next_step = step

    def enter(self, step: int, ids: Ids) -> None:
        self._cache.enter(step, ids)  # checks the ids
        self._write(lambda writer: writer.enter(self._pages(ids)))

    def plan(self, step: int) -> None:
        self._cache.plan(step)
        self._write_done(TraceWriter.plan)

    def retire(self, step: int) -> None:
        self._cache.retire(step)
        self._write_done(TraceWriter.retire)

    def cancel(self) -> None:
        self._cache.cancel()
        self._write_done(TraceWriter.retire_all)

    def gather(self, step: int) -> tuple[Features, Exception | None]:
        return self._cache.gather(step)

    def read_through(self, ids: Ids) -> tuple[Features, Exception | None]:
        return self._cache.read_through(ids)

    def page_words(self, table: str) -> npt.NDArray[np.uint64]:
        return self._cache.page_words(table)

    def stats(self) -> dict[str, dict[str, Any]]:
        return self._cache.stats()

    def memory(self) -> dict[str, int]:
        return self._cache.memory()

    def close(self) -> None:
        self.end()
        self._cache.close()

    def end(self) -> None:
        """Write the end of the trace; from here on nothing is written down. Idempotent."""
        counters = {} if self._rows_only else _counters(self._cache.stats())
        self._write(lambda writer: writer.finish(counters))
        self._writer = None
        self._marks = []

    def _write_done(self, write: Callable[[TraceWriter], None]) -> None:
        """What the cache has done; a trace of rows does not say it."""
        if not self._rows_only:
            self._write(write)

    def _write(self, write: Callable[[TraceWriter], None]) -> None:
        """A full disk ends the recording, and not the training."""
        if self._writer is None:
            return
        try:
            write(self._writer)
        except OSError as error:
            log.error("the trace of this run ends here, incomplete: %s", error)
            with suppress(OSError):  # what is still in its buffer fails likewise
                self._writer.abandon()
            self._writer = None

    def _pages(self, ids: Ids) -> list[Pages]:
        self._mark += 1
        if self._mark == 1 << 32:
            self._mark = 1
            for marks in self._marks:
                marks[:] = 0
        result = []
        for table, order, marks in zip(self._tables, self._orders, self._marks, strict=True):
            rows = np.ascontiguousarray(ids.get(table.name, _NO_IDS).cpu().numpy())
            if order is not None:
                rows = positions_of(rows, order)
            pages = np.empty(len(rows), np.int64)
            count = _core.unique_pages(rows, table.rows_per_page, marks, self._mark, pages)
            result.append(pages[:count])
        return result


def _counters(stats: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    return {name: {key: int(s[key]) for key in _COUNTERS if key in s} for name, s in stats.items()}
