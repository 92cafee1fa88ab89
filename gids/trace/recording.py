"""A trace of the pages that a loader's cache reads: ``with record(loader, "run.trace"): train(loader)``.

Recording changes no rows. It writes 4 bytes per page of each minibatch, and again at its end. Pages are never
in memory all at once: the writer collects them in temporary files, and the reader maps them.

A trace is an .npz file, which ``numpy.load`` reads too. Its arrays:

    about     text, JSON: {"version": 3, "gids", "tables": [{"name", "page_count", "page_bytes",
              "rows_per_page", "lines", "heat", "rows"}], "policy", "window_batches", "planned_batches",
              "device", "counters": {table: {"hits", ...}}}; "gids" is its version; unless a run was recorded,
              lines and the last five are null or empty
    counts    int64[minibatches, tables]: how many pages each minibatch has
    events    uint8[n]: ENTER, PLAN and RETIRE in the order of the run; only ENTER if it was sampled
    heat-T    uint8[page_count] of table number T; absent if its "heat" is false
    pages-T   uint32 or uint64[n]: the pages of table T that the minibatches read, each once per minibatch, in
              order of first use

Minibatches are numbered from 0 and enter, are planned and retire in that order.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import struct
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

import gids
from gids import _core
from gids.closing import Closing
from gids.cuda import on_host
from gids.errors import FormatError, MissingError
from gids.loader import FeatureLoader, Observer
from gids.store.files import MappedArray
from gids.store.table import Table, positions_of

if TYPE_CHECKING:
    from gids.loader.readers import Cache, Ids

_COUNTERS = ("steps", "pages", "hits", "misses", "loads", "bypasses", "evictions", "failures")
_NO_IDS = torch.empty(0, dtype=torch.int64)

VERSION = 3
ENTER, PLAN, RETIRE = 1, 2, 3
_WIDE = 1 << 32  # tables with more pages have page numbers of 8 bytes

Pages = npt.NDArray[np.int64]

log = logging.getLogger("gids")


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


@dataclass(frozen=True)
class TracedTable:
    """A table of a trace. lines: of the cache in the recorded run; None for a sampled trace.

    heat: uint8[page_count], or None. rows: the trace has ids of rows instead of pages.
    """

    name: str
    page_count: int
    page_bytes: int
    rows_per_page: int
    lines: int | None
    heat: npt.NDArray[np.uint8] | None
    rows: bool = False


def _number(value: object) -> int | None:
    """A whole number from 0, or None. Raises ValueError."""
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"{value!r} is not a whole number")
    return value


class Trace(Closing):
    """An open trace file.

    Attributes: path; tables; batch_count; events (uint8[n]: ENTER, PLAN and RETIRE in the order of the run; a
    sampled trace has only ENTER); policy, window_batches, planned_batches, device ("cpu" or "cuda") of the
    recorded run, or None; gids_version, which wrote the file; counters (table -> the counters of its cache in
    the recorded run; {} for a sampled trace).

    Raises FormatError if the file is not a trace, has another version, is incomplete or damaged; OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = open(self.path, "rb")  # noqa: SIM115 - see close
        weakref.finalize(self, self._file.close)  # if it is never closed
        try:
            self._read()
        except Exception as error:
            self._file.close()
            if isinstance(error, FormatError):
                raise
            raise self._damage(error) from None

    def pages(self, batch: int, table: int = 0) -> Pages:
        """The distinct pages of a table that a minibatch reads: int64[n], a copy."""
        if table not in self._pages:
            try:
                self._pages[table] = self._mapped(table)
            except Exception as error:
                raise self._damage(error) from None
        first, last = self._ends[table][batch : batch + 2]
        return self._pages[table][first:last].astype(np.int64)

    def batches(self, table: int = 0) -> TableBatches:
        """The pages of a table, by minibatch."""
        return TableBatches(self, table)

    def page_counts(self, table: int = 0) -> Pages:
        """The number of pages of a table per minibatch: int64[batch_count]."""
        return np.diff(self._ends[table])

    def table_number(self, name: str | None) -> int:
        """The index of a table; None: of the largest one. Raises MissingError."""
        names = [t.name for t in self.tables]
        if name is None:
            sizes = [t.page_count * t.page_bytes for t in self.tables]
            return sizes.index(max(sizes))
        if name not in names:
            raise MissingError(f"no table {name!r} in {self.path} (has {', '.join(map(repr, names))})")
        return names.index(name)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _read(self) -> None:
        try:
            self._zip = zipfile.ZipFile(self._file)
            self._zip.getinfo("about.npy")
        except Exception:  # zipfile raises nine kinds for flipped bits
            raise FormatError(
                f"{self.path} is not a complete trace of this gids: record it again (the run was killed, the "
                "file was not copied completely, or another version of gids wrote it)"
            ) from None
        about = dict(json.loads(self._array("about").item()))
        if (number := about.get("version")) != VERSION:
            raise FormatError(
                f"{self.path} is a trace of version {number}; this gids reads version {VERSION}"
            )
        self.tables = [self._table(number, entry) for number, entry in enumerate(about["tables"])]
        self.policy: str | None = about["policy"]
        self.window_batches = _number(about["window_batches"])
        self.planned_batches = _number(about["planned_batches"])
        self.device: str | None = about["device"]
        self.gids_version: str = about["gids"]
        self.counters: Mapping[str, Mapping[str, int]] = dict(about["counters"])
        counts = self._integers("counts", dimensions=2)
        if counts.shape[1] != len(self.tables):
            raise ValueError(f"counts of {counts.shape[1]} tables, and there are {len(self.tables)}")
        self.batch_count = len(counts)
        self.events: npt.NDArray[np.uint8] = self._integers("events").astype(np.uint8)
        self._ends = [np.concatenate([[0], np.cumsum(column)]) for column in counts.T]
        self._pages: dict[int, npt.NDArray[Any]] = {}  # by table, from the first use on

    def _table(self, number: int, entry: dict[str, Any]) -> TracedTable:
        heat = self._integers(f"heat-{number}").astype(np.uint8) if entry["heat"] else None
        traced = TracedTable(**entry | {"heat": heat})
        counts = (traced.page_count, traced.page_bytes, traced.rows_per_page)
        if not isinstance(traced.name, str) or None in map(_number, counts):
            raise ValueError(f"table {number} is {entry}")
        _number(traced.lines)
        if heat is not None and len(heat) != traced.page_count:
            raise ValueError(f"table {number} has {traced.page_count} pages, and heat of {len(heat)}")
        return traced

    def _integers(self, name: str, *, dimensions: int = 1) -> npt.NDArray[Any]:
        """An array of whole numbers from 0. Raises ValueError."""
        array = self._array(name)
        if array.ndim != dimensions or array.dtype.kind not in "iu" or (array.size and array.min() < 0):
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, or has numbers below 0")
        return array

    def _array(self, name: str) -> npt.NDArray[Any]:
        data = io.BytesIO(self._zip.read(f"{name}.npy"))
        array: npt.NDArray[Any] = np.lib.format.read_array(data, allow_pickle=False)
        return array

    def _mapped(self, table: int) -> npt.NDArray[Any]:
        """The pages of a table in the file, whose checksum is right."""
        info = self._zip.getinfo(f"pages-{table}.npy")
        with self._zip.open(info) as member:
            np.lib.format.read_magic(member)
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            header_bytes = member.tell()
            while member.read(1 << 20):  # raises an error at the end if the checksum is wrong
                pass
        count, traced = int(self._ends[table][-1]), self.tables[table]
        if shape != (count,) or dtype.kind != "u" or info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"pages-{table} is {dtype}{list(shape)}, and its minibatches read {count} pages")
        if not count:
            return np.empty(0, dtype)
        self._file.seek(info.header_offset + 26)  # the lengths of the two fields that follow the 30 bytes
        offset = info.header_offset + 30 + sum(struct.unpack("<HH", self._file.read(4))) + header_bytes
        pages = MappedArray.of(self._file.fileno(), self.path, dtype, offset, shape)
        if (largest := int(pages.max())) >= traced.page_count:
            raise ValueError(f"page {largest} of table {traced.name!r}, which has {traced.page_count} pages")
        return pages

    def _damage(self, cause: object) -> FormatError:
        return FormatError(f"{self.path} is damaged: {cause}")


class TableBatches(Sequence[Pages]):
    """Trace.pages() of each minibatch. Made by Trace.batches()."""

    def __init__(self, trace: Trace, table: int) -> None:
        self.path, self._trace, self._table = trace.path, trace, table

    def __len__(self) -> int:
        return self._trace.batch_count

    def __getitem__(self, batch: Any) -> Any:
        return self._trace.pages(range(len(self))[batch], self._table)


class RowTrace(Trace):
    """A trace of rows, for `gids convert --order trace:FILE`. Raises FormatError for a trace of pages."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if not all(t.rows for t in self.tables):
            self.close()
            raise FormatError(
                f"{path} is a trace of pages, and an order needs a trace of rows: record one with `gids "
                "bench hit-ratio --record FILE --rows` or gids.trace.record(loader, FILE, rows=True)"
            )

    def minibatches(self, table: str, row_count: int) -> Callable[[], Iterable[Pages]] | None:
        """The rows of each minibatch, as a gids.convert.options.ReadRows returns them."""
        if table not in [t.name for t in self.tables]:
            return None
        number = self.table_number(table)
        recorded = self.tables[number].page_count
        if recorded != row_count:
            raise FormatError(
                f"{self.path} was recorded with {recorded} rows of {table!r}, not {row_count}: it "
                "is from another dataset"
            )
        return lambda: self.batches(number)


class TraceWriter:
    """Writes a trace file, minibatch by minibatch, when finish() is called. Until then the pages are in
    temporary files in its directory, which end with the process.

    policy, window_batches, planned_batches, device: of the recorded run; None for a sampled trace.
    Raises OSError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tables: Sequence[TracedTable],
        *,
        policy: str | None = None,
        window_batches: int | None = None,
        planned_batches: int | None = None,
        device: str | None = None,
    ) -> None:
        self._path, self._tables = Path(path), tables
        self._types = [np.uint64 if t.page_count > _WIDE else np.uint32 for t in tables]
        self._about = {"policy": policy, "window_batches": window_batches, "planned_batches": planned_batches}
        self._about["device"] = device
        self._counts: list[list[int]] = []
        self._events = bytearray()
        with contextlib.ExitStack() as on_error:
            folder = self._path.absolute().parent
            self._files = [on_error.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in tables]
            self._open = on_error.pop_all()

    def enter(self, pages: Sequence[Pages]) -> None:
        """Add a minibatch. pages: per table int64[n], distinct pages in the order of first use."""
        self._events.append(ENTER)
        self._counts.append([len(of_table) for of_table in pages])
        for file, numbers, kind in zip(self._files, pages, self._types, strict=True):
            file.write(numbers.astype(kind).data)

    def plan(self) -> None:
        """The next minibatch was planned."""
        self._events.append(PLAN)

    def retire(self) -> None:
        """The next minibatch was retired, planned or not."""
        self._events.append(RETIRE)

    def finish(self, counters: Mapping[str, Mapping[str, int]] | None = None) -> None:
        """Write the file. counters: of each table's cache in the run."""
        tables = [vars(table) | {"heat": table.heat is not None} for table in self._tables]
        about = {"version": VERSION, "gids": gids.__version__, "tables": tables, **self._about}
        arrays: dict[str, npt.NDArray[Any]] = {
            "about": np.array(json.dumps(about | {"counters": counters or {}}).encode()),
            "counts": np.array(self._counts, np.int64).reshape(-1, len(tables)),
            "events": np.frombuffer(self._events, np.uint8),
        }
        with self._open:
            for number, (file, kind) in enumerate(zip(self._files, self._types, strict=True)):
                is_empty = not file.tell()
                file.flush()
                arrays[f"pages-{number}"] = np.empty(0, kind) if is_empty else np.memmap(file, kind, "r")
                if (heat := self._tables[number].heat) is not None:
                    arrays[f"heat-{number}"] = heat
            with open(self._path, "wb") as trace:
                np.savez(trace, **arrays)  # type: ignore[arg-type]

    def abandon(self) -> None:
        """Write no file."""
        self._open.close()
