"""A trace: the pages that each minibatch of a run read, and when its steps entered, were planned and retired.

Has the layout of the file and its reader; trace_writer.py writes it. The file is memory-mapped: an open trace
needs memory for its minibatches (about 50 B each), not for their pages. All numbers are little-endian:

    0   8 B   magic "GIDSTRCE"
    8   u32   version, 1
    12  u32   bytes of JSON that follow at 16; padded with spaces to a multiple of 8
    16  ...   JSON {"tables": [{"name", "page_count", "page_bytes", "rows_per_page", "lines", "heat",
              "rows"}], "policy", "window_batches", "planned_batches", "device", "gids"}; "gids" is its
              version; lines and the four before "gids" are null unless a run was recorded
        ...   for each table whose "heat" is true: u8[page_count], padded to a multiple of 8
        ...   records, to the end of the file: a header of 16 B, then its data, padded in the same way

    record  u8 kind, u8 bytes of a page number (4 or 8), u16 table, u32 count, u64 minibatch
    ENTER   count page numbers follow: the minibatch's pages of a table, each once, in order of first use
    PLAN, RETIRE   nothing follows
    END     count bytes of JSON follow: {"batches", "pages", "counters": {table: {"hits", ...}}}, to the end
            of the file

Minibatches are numbered from 0 and enter, are planned and retire in that order. A file without END is
incomplete.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.closing import Closing
from gids.errors import FormatError, MissingError

MAGIC = b"GIDSTRCE"
VERSION = 1
PREFIX = struct.Struct("<8sII")
RECORD = struct.Struct("<BBHIQ")
ENTER, PLAN, RETIRE, END = 1, 2, 3, 4
PAGES_MAX = 1 << 34  # of a table, as in the page table
_JSON_BYTES_MAX = 1 << 20

Pages = npt.NDArray[np.int64]
_T = TypeVar("_T")


@dataclass(frozen=True)
class TracedTable:
    """A table of a trace. lines: of the cache in the recorded run; None for a sampled trace.

    of_rows: the trace has ids of rows instead of pages.
    """

    name: str
    page_count: int
    page_bytes: int
    rows_per_page: int
    lines: int | None
    heat: npt.NDArray[np.uint8] | None
    of_rows: bool = False


def padded(size: int) -> int:
    return -(-size // 8) * 8


class Trace(Closing):
    """An open trace file.

    Attributes: path; tables; batch_count; events (uint8[n]: ENTER, PLAN and RETIRE in the order of the run; a
    sampled trace has only ENTER); policy, window_batches, planned_batches, device ("cpu" or "cuda") of the
    recorded run, or None; gids_version, which wrote the file (None: before 0.3); counters (table -> the
    counters of its cache in the recorded run; {} for a sampled trace).

    Raises FormatError if the file is not a trace, has another version, or is incomplete; OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < PREFIX.size:
                raise self._fault(f"has {size} bytes; a trace has at least {PREFIX.size}")
            self._map = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        self._size = size
        try:
            records = self._read_header()
            self._read_records(records)
        except BaseException:
            self.close()
            raise

    def pages(self, batch: int, table: int = 0) -> Pages:
        """The distinct pages of a table that a minibatch reads: int64[n], a copy."""
        place, count, width = self._index[batch * len(self.tables) + table].tolist()
        raw = np.frombuffer(self._map, "<u4" if width == 4 else "<u8", count, place)
        pages = raw.astype(np.int64)
        if count and not 0 <= int(pages.min()) <= int(pages.max()) < self.tables[table].page_count:
            raise self._fault(
                f"has page {int(pages.max())} of table {self.tables[table].name!r} in minibatch {batch}; the "
                f"table has {self.tables[table].page_count} pages: the file is damaged"
            )
        return pages

    def page_counts(self, table: int = 0) -> Pages:
        """The number of pages of a table per minibatch: int64[batch_count]."""
        return self._index[table :: len(self.tables), 1].copy()

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
        """Unmap the file; arrays that still use it keep the map. Idempotent."""
        with suppress(BufferError):  # a table's heat is still in use
            self._map.close()

    def _fault(self, what: str) -> FormatError:
        return FormatError(f"{self.path} {what}")

    def _read_header(self) -> int:
        """Read the tables and the recorded run. Returns where the records begin."""
        magic, version, json_bytes = PREFIX.unpack_from(self._map, 0)
        if magic != MAGIC:
            raise self._fault("is not a trace of gids: it does not begin with GIDSTRCE")
        if version != VERSION:
            raise self._fault(f"is a trace of version {version}; this gids reads version {VERSION}")
        if json_bytes > min(_JSON_BYTES_MAX, self._size - PREFIX.size):
            raise self._fault("ends inside its header: it was not copied or written completely")
        header = self._json(PREFIX.size, json_bytes, "header")
        place = PREFIX.size + padded(json_bytes)
        try:
            self.tables: list[TracedTable] = []
            for entry in header["tables"]:
                heat = None
                if entry["heat"]:
                    if place + entry["page_count"] > self._size:
                        raise self._fault("ends inside its header: it was not copied or written completely")
                    heat = np.frombuffer(self._map, np.uint8, entry["page_count"], place)
                    place += padded(len(heat))
                self.tables.append(_table(entry, heat))
            self.policy = _of_type(str, header["policy"])
            self.window_batches = _of_type(int, header["window_batches"])
            self.planned_batches = _of_type(int, header["planned_batches"])
            self.device = _of_type(str, header["device"])
            self.gids_version = _of_type(str, header.get("gids"))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, FormatError):
                raise
            raise self._fault(f"has a damaged header: {error!r}") from None
        if not self.tables or len({t.name for t in self.tables}) != len(self.tables):
            raise self._fault("has a damaged header: it has no table, or one table twice")
        return place

    def _read_records(self, place: int) -> None:
        index = array("q")  # place, count and width of each minibatch's pages
        events = bytearray()
        seen = {ENTER: 0, PLAN: 0, RETIRE: 0}  # number of each
        entering = 0  # tables of the minibatch that is entering
        while True:
            if place + RECORD.size > self._size:
                raise self._fault(
                    f"ends after {seen[ENTER]} minibatches, without the end mark: the recorded run was "
                    "killed, or the file was not copied completely"
                )
            kind, width, table, count, batch = RECORD.unpack_from(self._map, place)
            begin, place = place, place + RECORD.size
            if kind == END:
                break
            if (
                kind not in seen
                or batch != seen[kind]
                or table != (entering if kind == ENTER else 0)
                or (kind != ENTER and (count or entering or batch >= seen[ENTER]))
                or (kind == ENTER and width not in (4, 8))
            ):
                raise self._fault(f"has a damaged record at byte {begin}")
            if kind == ENTER:
                index.extend((place, count, width))
                place += padded(count * width)
                entering += 1
                if place <= self._size and entering < len(self.tables):
                    continue
                entering = 0
            if place <= self._size:
                seen[kind] += 1
                seen[PLAN] = max(seen[PLAN], seen[RETIRE])  # cancelled before it was planned
                events.append(kind)
        if entering or place + count > self._size:
            raise self._fault(f"has a damaged end mark at byte {begin}")
        if place + count < self._size:
            raise self._fault(f"has {self._size - place - count} bytes after its end mark: it is damaged")
        end = self._json(place, count, "end mark")
        self._index = np.array(index, np.int64).reshape(-1, 3)
        if end.get("batches") != seen[ENTER] or end.get("pages") != int(self._index[:, 1].sum()):
            raise self._fault(
                f"has {seen[ENTER]} minibatches, but {end.get('batches')} in its end mark, or other pages: "
                "it is damaged"
            )
        self.batch_count: int = seen[ENTER]
        self.events: npt.NDArray[np.uint8] = np.frombuffer(bytes(events), np.uint8)
        self.counters: Mapping[str, Mapping[str, int]] = end.get("counters", {})
        if not isinstance(self.counters, dict) or not all(
            isinstance(c, dict) for c in self.counters.values()
        ):
            raise self._fault("has a damaged end mark: its counters are not valid")

    def _json(self, place: int, size: int, what: str) -> dict[str, Any]:
        try:
            found = json.loads(self._map[place : place + size])
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._fault(f"has a damaged {what}: it is not a JSON object")
        return found


def _table(entry: Mapping[str, Any], heat: npt.NDArray[np.uint8] | None) -> TracedTable:
    table = TracedTable(
        name=str(entry["name"]),
        page_count=int(entry["page_count"]),
        page_bytes=int(entry["page_bytes"]),
        rows_per_page=int(entry["rows_per_page"]),
        lines=_of_type(int, entry["lines"]),
        heat=heat,
        of_rows=bool(entry.get("rows", False)),
    )
    sizes = table.page_bytes > 0 and table.rows_per_page > 0
    if not (sizes and 0 <= (table.lines or 0) <= _core.MAX_LINES and 0 <= table.page_count <= PAGES_MAX):
        raise ValueError(f"table {table.name!r} has impossible sizes")
    return table


def _of_type(kind: type[_T], value: object) -> _T | None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
