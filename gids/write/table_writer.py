"""TableWriter: writes a table block by block. Made by DatasetWriter.open_table, and by gids.inference for the
tables that it keeps between two layers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from gids.closing import Closing
from gids.errors import StorageError
from gids.store.dtypes import TABLE_DTYPES, byte_view, make_bools_proper
from gids.store.manifest import TableEntry
from gids.store.rows import as_rows, read_range
from gids.write.files import check_space
from gids.write.narrow import cast_exactly, refuse_overflow
from gids.write.page_sink import PageSink


class TableWriter(Closing):
    """A table that is being written. A context manager; on success, `finish` is called.

    `write` takes blocks of rows in their order, from one thread at a time. Takes a few MiB of memory.
    Attributes: name, row_count, shape (of a row), dtype.
    """

    def __init__(self, root: Path, entry: TableEntry, add: Callable[[TableEntry], object]) -> None:
        """root: the folder of a dataset. add: is called with the entry, once all rows are on disk.

        Raises StorageError if a disk has too little space.
        """
        self.name, self.row_count, self.shape = entry.name, entry.row_count, entry.shape
        self.dtype: torch.dtype = TABLE_DTYPES[entry.dtype]
        self.entry = entry
        self._root, self._add, self._row, self._is_finished = root, add, 0, False
        root.mkdir(exist_ok=True)
        folders = [Path(shard).parents[1] if os.path.isabs(shard) else root for shard in entry.shards]
        check_space((folder, entry.geometry.shard_bytes(i)) for i, folder in enumerate(folders))
        self._sink = PageSink(root, entry, direct=False)  # because blocks may be small

    def write(self, rows: torch.Tensor | np.ndarray) -> None:
        """Write the next rows. Blocks.

        rows: number[n, *shape] on any device; cast to the table's dtype. Rounding to a shorter floating type
        is allowed; NaN and infinities are kept.

        Raises ValueError for rows of another shape or too many of them; FormatError for a value that does not
        fit the table's dtype; StorageError if the disk is full or fails; ValueError after that.
        """
        if isinstance(rows, np.ndarray):
            rows = read_range(as_rows(rows), 0, len(rows) if rows.ndim else 0)
        block = rows.detach().cpu()
        stop = self._row + len(block) if block.dim() else 0
        if not block.dim() or tuple(block.shape[1:]) != self.shape:
            expected = ", ".join(["n", *map(str, self.shape)])
            raise ValueError(f"rows are {list(block.shape)}; a block of {self.name!r} is [{expected}]")
        if stop > self.row_count:
            raise ValueError(f"row {stop - 1} is out of range for {self.name!r} ({self.row_count} rows)")
        values = block.contiguous()
        if values.dtype != self.dtype:
            values = torch.empty(block.shape, dtype=self.dtype)
            cast_exactly(block, values)
            refuse_overflow(block, values, self._row)
        elif values.dtype == torch.bool:
            values = make_bools_proper(values.clone())
        self._check_whole()
        with self._explaining():
            self._sink.append(byte_view(values).reshape(len(block), self._sink.layout.row_bytes))
        self._row = stop

    def finish(self) -> TableEntry:
        """Sync and close the files, and return the entry. Idempotent. Raises ValueError if rows are missing,
        StorageError."""
        if not self._is_finished:
            self._check_whole()
            if self._row < self.row_count:
                raise ValueError(
                    f"rows {self._row} to {self.row_count - 1} of {self.name!r} were never written: "
                    f"write all {self.row_count} rows"
                )
            with self._explaining():
                self.entry = self.entry.with_crc(self._sink.finish())
            self._is_finished = True
            self.close()
            self._add(self.entry)
        return self.entry

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._sink.close()

    def _check_whole(self) -> None:
        """Raise ValueError if an error ended a write in the middle."""
        if self._sink.next_row != self._row:
            raise ValueError(f"{self.name!r} is broken by an error: write it again")

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"{os.strerror(error.errno or 0)} while writing table {self.name!r}"
            raise StorageError(error.errno or 0, what, self._root) from error

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self.finish()
        finally:
            self.close()
