"""Writes a trace file (trace_file.py has its layout), minibatch by minibatch, in bounded memory.

Called by recording.py and by gids.bench.sampled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, BinaryIO

import numpy as np

from gids.trace.trace_file import (
    END,
    ENTER,
    MAGIC,
    PLAN,
    PREFIX,
    RECORD,
    RETIRE,
    VERSION,
    Pages,
    TracedTable,
    padded,
)

_WIDE = 1 << 32  # tables with more pages have page numbers of 8 bytes
_BUFFER_BYTES = 1 << 20


class TraceWriter:
    """Writes a trace file. The file is complete after finish().

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
        self._tables = list(tables)
        self._file: BinaryIO = open(path, "wb", buffering=_BUFFER_BYTES)  # noqa: SIM115  (closed by close)
        self._entered = self._planned = self._retired = self._pages = 0
        header = {
            "tables": [
                {
                    "name": t.name,
                    "page_count": t.page_count,
                    "page_bytes": t.page_bytes,
                    "rows_per_page": t.rows_per_page,
                    "lines": t.lines,
                    "rows": t.of_rows,
                    "heat": t.heat is not None,
                }
                for t in tables
            ],
            "policy": policy,
            "window_batches": window_batches,
            "planned_batches": planned_batches,
            "device": device,
            "gids": version("gids"),
        }
        text = json.dumps(header).encode()
        text = text.ljust(padded(len(text)))
        self._file.write(PREFIX.pack(MAGIC, VERSION, len(text)) + text)
        for table in tables:
            if table.heat is not None:
                self._write_padded(table.heat)

    def enter(self, pages: Sequence[Pages]) -> None:
        """Add a minibatch. pages: per table int64[n], distinct pages in the order of first use."""
        for number, (table, wanted) in enumerate(zip(self._tables, pages, strict=True)):
            width = 8 if table.page_count > _WIDE else 4
            self._file.write(RECORD.pack(ENTER, width, number, len(wanted), self._entered))
            self._write_padded(wanted.astype("<u8" if width == 8 else "<u4"))
            self._pages += len(wanted)
        self._entered += 1

    def plan(self) -> None:
        """The next minibatch was planned."""
        self._file.write(RECORD.pack(PLAN, 0, 0, 0, self._planned))
        self._planned += 1

    def retire(self) -> None:
        """The next minibatch was retired, planned or not."""
        self._file.write(RECORD.pack(RETIRE, 0, 0, 0, self._retired))
        self._retired += 1
        if self._planned < self._retired:  # cancelled before it was planned
            self._planned = self._retired

    def finish(self, counters: Mapping[str, Mapping[str, int]] | None = None) -> None:
        """Write the end mark and close. counters: of each table's cache in the run."""
        if self._file.closed:
            return
        end: dict[str, Any] = {"batches": self._entered, "pages": self._pages, "counters": counters or {}}
        text = json.dumps(end).encode()
        self._file.write(RECORD.pack(END, 0, 0, len(text), self._entered) + text)
        self._file.close()

    def abandon(self) -> None:
        """Close the file without an end mark, so that it is incomplete. Does nothing after finish()."""
        self._file.close()

    def _write_padded(self, values: np.ndarray[Any, Any]) -> None:
        self._file.write(np.ascontiguousarray(values).tobytes())
        self._file.write(bytes(padded(values.nbytes) - values.nbytes))
