"""Records the pages that a FeatureLoader's cache reads: ``with record(loader, "run.trace"): train(loader)``.

Recording changes no rows. It writes 4 bytes per page of each minibatch, and again at its end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cuda import on_host
from gids.loader import FeatureLoader, Observer
from gids.store.table import Table, positions_of
from gids.trace.trace_file import Pages, TracedTable, TraceWriter

if TYPE_CHECKING:
    from gids.loader.readers import Cache, Ids

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
    """Record the pages that a loader's cache reads, while the block runs, to path. gids.trace.Trace reads it.

    loader: a gids.FeatureLoader, gids.NodeLoader or gids.dgl.DataLoader before its first minibatch, so that
    the trace starts with an empty cache. rows: record ids of rows instead of pages, for
    `gids convert --order trace:FILE`. Records any number of epochs, but not streams that read through the
    cache (a validation in mid-epoch). Pages are recorded until another loader takes the memory of the cache,
    which is logged. While pages are recorded, reads="auto" reads at random. After an exception the trace
    holds what happened before it; without a minibatch no file is written. An OSError while writing is
    logged and ends the recording. Raises ValueError if the loader has a cache already, loads no features,
    or reads by packs only, which have no pages to record; OSError if path cannot be written.
    """
    features = loader if isinstance(loader, FeatureLoader) else loader.feature_loader
    if features is None:
        raise ValueError("this loader loads no features, so there is nothing to record")
    if features.stats()["tables"]:
        raise ValueError("this loader has a cache already: start recording before its first minibatch")
    if not rows and features.source.options.reads == "pack":
        raise ValueError("packs have no cache to record: give gids.open() reads='random' or 'auto'")
    path = os.path.abspath(path)
    with open(path, "ab"):  # raises now, not at the first minibatch
        pass
    recorder = _Recorder(features, path, rows)
    try:
        with features.observe(recorder):
            yield
    finally:
        recorder.finish()


class TouchedPages:
    """Turns ids of rows into the distinct pages that hold them, with a mark of 4 B per page.

    positions: of each row in the table; None: in the order of the ids.
    """

    def __init__(self, page_count: int, rows_per_page: int, positions: npt.NDArray[Any] | None) -> None:
        self._rows_per_page, self._positions = rows_per_page, positions
        self._marks = np.zeros(page_count, np.uint32)
        self._mark = 0  # of the last minibatch

    def of(self, ids: npt.NDArray[np.int64]) -> Pages:
        """The pages of these rows, in the order of first use: int64[n]."""
        self._mark += 1
        rows = ids if self._positions is None else positions_of(ids, self._positions)
        pages = np.empty(len(rows), np.int64)
        count = _core.unique_pages(
            np.ascontiguousarray(rows), self._rows_per_page, self._marks, self._mark, pages
        )
        return pages[:count]


class _Recorder(Observer):
    """Writes a trace of a loader's cache, or of the rows that it loads."""

    def __init__(self, loader: FeatureLoader, path: str | os.PathLike[str], rows: bool) -> None:
        self._loader = loader
        self._path, self.of_cache = path, not rows
        self._touched: dict[str, TouchedPages] = {}  # by table
        self._writer: TraceWriter | None = None

    def cache_opened(self, cache: Cache) -> None:
        if not self.of_cache:
            return
        if self._touched:  # a trace is of one cache
            if self._writer is not None:
                log.warning(
                    "recording stopped: another loader of this source took the memory of the cache. Give "
                    "it a source of its own: gids.open(PATH, memory=...)"
                )
                self.finish()
            return
        stats, caches = self._loader.stats(), cache.stats()
        self._begin(
            lambda t: TracedTable(
                t.name,
                t.page_count,
                t.page_bytes,
                t.rows_per_page,
                caches[t.name].get("lines"),
                self._loader.table_heat(t),
            ),
            policy=stats["policy"],
            window_batches=stats["window"],
            planned_batches=stats["planned"],
            device=self._loader.device.type,
        )

    def _begin(self, trace: Callable[[Table], TracedTable], **about_cache: Any) -> None:
        tables = self._loader.tables
        traced = [trace(table) for table in tables]
        self._writer = TraceWriter(self._path, traced, **about_cache)
        for entry, table in zip(traced, tables, strict=True):
            positions = table.order if self.of_cache else None
            self._touched[entry.name] = TouchedPages(entry.page_count, entry.rows_per_page, positions)

    def entered(self, step: int, ids: Ids) -> None:
        if not self.of_cache and not self._touched:
            self._begin(lambda t: TracedTable(t.name, t.row_count, t.row_bytes, 1, None, None, rows=True))
        if self._writer is not None:
            copies = on_host(ids)
            pages = [t.of(copies.get(name, _NO_IDS).numpy()) for name, t in self._touched.items()]
            self._write(TraceWriter.enter, pages)

    def planned(self, step: int) -> None:
        if self.of_cache:
            self._write(TraceWriter.plan)

    def retired(self, step: int) -> None:
        if self.of_cache:
            self._write(TraceWriter.retire)

    def finish(self) -> None:
        """Write the trace; without a minibatch, remove the file."""
        if self._touched:
            tables = self._loader.stats()["tables"] if self.of_cache else {}
            counters = {t: {key: int(s[key]) for key in _COUNTERS if key in s} for t, s in tables.items()}
            self._write(TraceWriter.finish, counters)
            self._writer = None
        elif os.path.isfile(self._path) and not os.path.getsize(self._path):
            os.unlink(self._path)

    def _write(self, method: Callable[..., None], *arguments: Any) -> None:
        """A full disk ends the recording, but not the training."""
        if self._writer is None:
            return
        try:
            method(self._writer, *arguments)
        except OSError as error:
            log.error("recording stopped, and the trace is incomplete: %s", error)
            with suppress(OSError):  # writing the buffer fails too
                self._writer.abandon()
            self._writer = None
