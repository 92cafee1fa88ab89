"""A trace: the pages that each minibatch of a run read, and when its steps entered, were planned and retired.

A trace is an .npz file, which ``numpy.load`` reads too. Its members:

    gids-trace.json   {"version": 2, "gids", "tables": [{"name", "page_count", "page_bytes", "rows_per_page",
                      "lines", "heat", "rows"}], "policy", "window_batches", "planned_batches", "device"};
                      "gids" is its version; lines and the last four are null unless a run was recorded
    heat-T            uint8[page_count] of table number T; absent if its "heat" is false
    pages-C-T         uint32 or uint64[n]: the pages of table T that the minibatches of chunk C read, each
                      once per minibatch, in order of first use
    counts            int64[minibatches, tables]: how many of these pages each minibatch has
    chunks            int64[chunks]: the first minibatch of each chunk
    events            uint8[n]: ENTER, PLAN and RETIRE in the order of the run; only ENTER if it was sampled
    end.json          {"counters": {table: {"hits", ...}}}; {} for a sampled trace

Minibatches are numbered from 0 and enter, are planned and retire in that order. end.json is written last: a
file without it is incomplete. A chunk has about a million pages, so reader and writer need little memory.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import gids
from gids.closing import Closing
from gids.errors import FormatError, MissingError

VERSION = 2
ENTER, PLAN, RETIRE = 1, 2, 3
_HEADER, _END = "gids-trace.json", "end.json"
_CHUNK_PAGES = 1 << 20
_WIDE = 1 << 32  # tables with more pages have page numbers of 8 bytes

Pages = npt.NDArray[np.int64]


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
        with open(self.path, "rb") as file:
            if _HEADER.encode() not in file.read(64):
                raise FormatError(
                    f"{self.path} is not a trace of gids, or one of gids before 0.4: record it again"
                )
        try:
            self._zip = zipfile.ZipFile(self.path)
        except zipfile.BadZipFile:
            raise self._incomplete() from None
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def pages(self, batch: int, table: int = 0) -> Pages:
        """The distinct pages of a table that a minibatch reads: int64[n], a copy."""
        chunk = int(np.searchsorted(self._chunks, batch, "right")) - 1
        if self._loaded[table][0] != chunk:
            self._loaded[table] = chunk, self._load_chunk(chunk, table)
        ends, first = self._ends[table], self._ends[table][self._chunks[chunk]]
        pages = self._loaded[table][1][ends[batch] - first : ends[batch + 1] - first]
        return pages.astype(np.int64)

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
        self._zip.close()

    def _read(self) -> None:
        if _END not in self._zip.namelist():
            raise self._incomplete()
        header = self._json(_HEADER)
        if (number := header.get("version")) != VERSION:
            raise FormatError(
                f"{self.path} is a trace of version {number}; this gids reads version {VERSION}"
            )
        try:
            self.tables = [self._table(number, entry) for number, entry in enumerate(header["tables"])]
            self.policy: str | None = header["policy"]
            self.window_batches = _number(header["window_batches"])
            self.planned_batches = _number(header["planned_batches"])
            self.device: str | None = header["device"]
            self.gids_version: str = header["gids"]
            self.counters: Mapping[str, Mapping[str, int]] = self._json(_END)["counters"]
            counts = self._integers("counts", dimensions=2)
            if counts.shape[1] != len(self.tables):
                raise ValueError(f"counts of {counts.shape[1]} tables, and there are {len(self.tables)}")
        except (KeyError, TypeError, ValueError) as error:
            raise self._damage(error) from None
        self.batch_count = len(counts)
        self.events: npt.NDArray[np.uint8] = self._integers("events").astype(np.uint8)
        self._chunks = self._integers("chunks")
        starts = [*self._chunks.tolist(), self.batch_count]
        if starts[0] != 0 or (any(a >= b for a, b in itertools.pairwise(starts)) and self.batch_count):
            raise self._damage(f"chunks begin with minibatches {starts[:4]}")
        self._ends = [np.concatenate([[0], np.cumsum(column)]) for column in counts.T]
        self._loaded: list[tuple[int, npt.NDArray[Any]]] = [(-1, np.empty(0, np.int64)) for _ in self.tables]

    def _load_chunk(self, chunk: int, table: int) -> npt.NDArray[Any]:
        pages, page_count = self._integers(f"pages-{chunk}-{table}"), self.tables[table].page_count
        if len(pages) and int(pages.max()) >= page_count:
            raise self._damage(
                f"page {pages.max()} of table {self.tables[table].name!r}, which has {page_count} pages"
            )
        first, *after = [*self._chunks.tolist(), self.batch_count][chunk:]
        expected = int(self._ends[table][after[0]] - self._ends[table][first])
        if len(pages) != expected:
            raise self._damage(f"chunk {chunk} has {len(pages)} pages, and its minibatches read {expected}")
        return pages

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
        """An array of whole numbers from 0. Raises FormatError."""
        array = self._array(name)
        if array.ndim != dimensions or array.dtype.kind not in "iu" or (array.size and array.min() < 0):
            raise self._damage(f"{name} is {array.dtype}{list(array.shape)}, or has numbers below 0")
        return array

    def _array(self, name: str) -> npt.NDArray[Any]:
        data = io.BytesIO(self._member(f"{name}.npy"))
        try:
            array: npt.NDArray[Any] = np.lib.format.read_array(data, allow_pickle=False)
        except Exception as error:  # of a hostile header
            raise self._damage(error) from None
        return array

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads(self._member(name)))
        except (TypeError, ValueError) as error:
            raise self._damage(error) from None

    def _member(self, name: str) -> bytes:
        """The bytes of a member, whose checksum is right."""
        try:
            return self._zip.read(name)
        except Exception as error:  # zipfile raises nine kinds for flipped bits
            raise self._damage(error) from None

    def _damage(self, cause: object) -> FormatError:
        return FormatError(f"{self.path} is damaged: {cause}")

    def _incomplete(self) -> FormatError:
        return FormatError(
            f"{self.path} is incomplete: the recorded run was killed, or the file was not copied completely"
        )


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
        """The rows of each minibatch, as a gids.convert.table_orders.ReadRows returns them."""
        if table not in [t.name for t in self.tables]:
            return None
        number = self.table_number(table)
        recorded = self.tables[number].page_count
        if recorded != row_count:
            raise FormatError(
                f"{self.path} was recorded with {recorded} rows of {table!r}, not {row_count}: it "
                "is from another dataset"
            )
        return lambda: (self.pages(batch, number) for batch in range(self.batch_count))


class TraceWriter:
    """Writes a trace file, minibatch by minibatch. The file is complete after finish().

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
        self._types = [np.uint64 if t.page_count > _WIDE else np.uint32 for t in tables]
        self._zip = zipfile.ZipFile(path, "w")
        self._counts: list[list[int]] = []
        self._events = bytearray()
        self._chunks: list[int] = []
        self._buffer: list[list[npt.NDArray[Any]]] = []  # the minibatches of a chunk, by table
        self._buffered_pages = 0
        header = {
            "version": VERSION,
            "gids": gids.__version__,
            "tables": [vars(t) | {"heat": t.heat is not None} for t in tables],
            "policy": policy,
            "window_batches": window_batches,
            "planned_batches": planned_batches,
            "device": device,
        }
        self._zip.writestr(_HEADER, json.dumps(header))
        for number, table in enumerate(tables):
            if table.heat is not None:
                self._add(f"heat-{number}", table.heat)

    def enter(self, pages: Sequence[Pages]) -> None:
        """Add a minibatch. pages: per table int64[n], distinct pages in the order of first use."""
        if not self._buffer:
            self._chunks.append(len(self._counts))
        self._events.append(ENTER)
        self._counts.append([len(of_table) for of_table in pages])
        self._buffer.append([ids.astype(kind) for ids, kind in zip(pages, self._types, strict=True)])
        self._buffered_pages += sum(self._counts[-1])
        if self._buffered_pages >= _CHUNK_PAGES:
            self._write_chunk()

    def plan(self) -> None:
        """The next minibatch was planned."""
        self._events.append(PLAN)

    def retire(self) -> None:
        """The next minibatch was retired, planned or not."""
        self._events.append(RETIRE)

    def finish(self, counters: Mapping[str, Mapping[str, int]] | None = None) -> None:
        """Write the rest and close. counters: of each table's cache in the run."""
        self._write_chunk()
        self._add("counts", np.array(self._counts, np.int64).reshape(-1, len(self._types)))
        self._add("chunks", np.array(self._chunks, np.int64))
        self._add("events", np.frombuffer(bytes(self._events), np.uint8))
        self._zip.writestr(_END, json.dumps({"counters": counters or {}}))
        self._zip.close()

    def abandon(self) -> None:
        """Close the file without its end, so that it is incomplete. Does nothing after finish()."""
        self._zip.close()

    def _write_chunk(self) -> None:
        for table, pages in enumerate(zip(*self._buffer, strict=True)):
            self._add(f"pages-{len(self._chunks) - 1}-{table}", np.concatenate(pages))
        self._buffer, self._buffered_pages = [], 0

    def _add(self, name: str, array: npt.NDArray[Any]) -> None:
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
