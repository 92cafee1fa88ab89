"""Columns of Parquet and Arrow files as Rows, decoded batch by batch. Called by readers/tables.py.

A table is one file or several in order. Reading can start at a row group (Parquet) or a record batch (Arrow);
batches of about 2 MiB are decoded in order from there.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gids.convert.stream_rows import StreamRows
from gids.convert.untrusted import at_most, open_file, parsing, shown, starts_with
from gids.errors import FormatError
from gids.store.dtypes import torch_dtype_of
from gids.store.geometry import MAX_ROWS

_BATCH_BYTES = 2 << 20
_MAX_FOOTER_BYTES = 64 << 20  # of a Parquet file: about 400,000 columns of row groups
ID_ROWS = 1 << 16  # of a batch of ids
_WIDTH_ROWS = 1000  # rows to read at a time when looking for the first list
_PARQUET, _ARROW = b"PAR1", b"ARROW1"


def is_arrow(path: Path) -> bool:
    """Whether a file is Parquet or an Arrow file (Feather 2)."""
    return starts_with(path, _PARQUET, _ARROW)


@dataclass(frozen=True)
class _Chunk:
    """Rows that are decoded from their start by batches(columns, rows per batch)."""

    row_count: int
    batches: Callable[[list[str], int], Iterator[Any]]


class ArrowTable:
    """The columns of one or more files. Raises FormatError, and ImportError without pyarrow.

    memory_bytes: limit for decoding a batch (None: no limit). Attributes: row_count; types (column -> pyarrow
    type); text_at (column of text of a CSV file -> the row and text of a field that is no number).
    """

    def __init__(self, files: Sequence[Path], memory_bytes: int | None = None) -> None:
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
        except ImportError:
            raise ImportError(f"{files[0]} needs pyarrow: pip install pyarrow") from None
        self._files, self._memory_bytes = files, memory_bytes
        self._chunks: list[_Chunk] = []
        self._last: tuple[Path, Any] | None = None
        self._file_starts: list[int] = []
        self.types: dict[str, Any] = {}
        self.text_at: dict[str, tuple[int, str]] = {}
        for file in files:
            with self._decoding(file):
                schema, chunks = self._open(file)
            types = {}
            for field in schema:
                if field.name in types:
                    raise FormatError(f"{file} has two columns {shown(field.name)}")
                types[field.name] = field.type
            if self.types and types != self.types:
                raise FormatError(f"{file} has different columns than {files[0]}")
            self.types = types
            self._file_starts.append(sum(chunk.row_count for chunk in self._chunks))
            for chunk in chunks:
                if not 0 <= chunk.row_count <= MAX_ROWS:
                    raise FormatError(f"{file} gives {chunk.row_count} rows; a part has 0 to {MAX_ROWS}")
            self._chunks += chunks
        self._starts = [0, *accumulate(chunk.row_count for chunk in self._chunks)]
        self.row_count = self._starts[-1]

    def _open(self, path: Path) -> tuple[Any, list[_Chunk]]:
        """The schema of a file and its chunks."""
        file = self._opened(path)
        if starts_with(path, _PARQUET):
            schema, batches = file.schema_arrow, self._parquet_batches
            counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        else:
            schema, batches = file.schema, self._arrow_batches
            counts = [file.get_batch(i).num_rows for i in range(file.num_record_batches)]
        return schema, [_Chunk(count, partial(batches, path, i)) for i, count in enumerate(counts)]

    @contextlib.contextmanager
    def _decoding(self, path: Path) -> Iterator[None]:
        with parsing(path, "is damaged or truncated"), at_most(self._memory_bytes):
            try:
                yield
            except MemoryError:  # Arrow's own error is a subclass
                raise FormatError(
                    f"{path} has a row, page or batch that needs more than {self._memory_bytes} bytes of "
                    "memory: raise --memory, or write the file with smaller pages or batches"
                ) from None

    def _opened(self, path: Path) -> Any:
        """pyarrow's reader of a file. Only the last one stays open: a table may have thousands of files."""
        if self._last is None or self._last[0] != path:
            self._last = None
            self._last = (path, self._reader(path))
        return self._last[1]

    def _reader(self, path: Path) -> Any:
        if starts_with(path, _PARQUET):
            _check_footer(path)
            parquet = importlib.import_module("pyarrow.parquet")
            return parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        if not starts_with(path, _ARROW):
            raise FormatError(f"{path} is not a Parquet or Arrow file")
        return importlib.import_module("pyarrow.ipc").open_file(self._arrow.memory_map(str(path)))

    def _parquet_batches(self, path: Path, group: int, columns: list[str], rows: int) -> Iterator[Any]:
        with self._decoding(path):
            found = self._opened(path).iter_batches(
                rows, row_groups=[group], columns=columns, use_threads=False
            )
        while True:
            with self._decoding(path):
                batch = next(found, None)
            if batch is None:
                return
            yield batch

    def _arrow_batches(self, path: Path, group: int, columns: list[str], rows: int) -> Iterator[Any]:
        with self._decoding(path):
            batch = self._opened(path).get_batch(group).select(columns)
            batch.validate(full=True)  # Arrow trusts offsets and lengths otherwise
        for first in range(0, batch.num_rows, rows):
            yield batch.slice(first, rows)

    def dtype(self, column: str) -> torch.dtype | None:
        """The type of a column's numbers, or None if it has no numbers (text, dates, lists of lists)."""
        kind = self.types[column]
        if self.is_list(kind):
            kind = kind.value_type
        types = self._arrow.types
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            return None
        return torch_dtype_of(np.dtype(kind.to_pandas_dtype()))

    def is_list(self, kind: Any) -> bool:
        """Whether a column of this type has a list in each row."""
        types = self._arrow.types
        return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))

    def ids_are_text(self, column: str) -> bool:
        """Whether the ids in a column are text, not whole numbers. Raises FormatError if they are neither."""
        types, kind = self._arrow.types, self.types[column]
        if types.is_dictionary(kind):
            kind = kind.value_type
        is_view = getattr(types, "is_string_view", lambda _: False)  # since pyarrow 16
        if types.is_string(kind) or types.is_large_string(kind) or is_view(kind):
            return True
        if not types.is_integer(kind):
            raise FormatError(
                f"column {column!r} of {self._files[0]} is of type {self.types[column]}: ids must be text or "
                "whole numbers; choose another column with --id-column"
            )
        return False

    def ids(self, column: str, *, as_text: bool, chunk: int = 0) -> Iterator[Any]:
        """A column of ids in batches, from a chunk on: arrays of large_string, or of int64, with nulls.

        Raises FormatError for ids of the other kind, and for 2^63 and more.
        """
        if as_text != self.ids_are_text(column):
            raise FormatError(
                f"column {column!r} of {self._files[0]} is of type {self.types[column]}, but the ids of "
                f"its nodes are {'text' if as_text else 'whole numbers'}: make both the same"
            )
        for part in self._chunks[chunk:]:
            for batch in part.batches([column], ID_ROWS):
                with parsing(self._files[0], f"has an unusable id in column {column!r}"):
                    yield batch.column(0).cast(self._arrow.large_string() if as_text else self._arrow.int64())

    def number_ids(self, column: str) -> StreamRows:
        """A column of ids that are numbers, int64[rows]; -1: there is none, or it is no whole number."""

        def open_at(row: int) -> tuple[int, Iterator[torch.Tensor]]:
            first = bisect_right(self._starts, row) - 1
            batches = self.ids(column, as_text=False, chunk=first)
            return self._starts[first], (torch.tensor(ids.fill_null(-1).to_numpy()) for ids in batches)

        return StreamRows((self.row_count,), torch.int64, open_at)

    def where(self, row: int) -> str:
        """The file and the row in it, for messages."""
        number = bisect_right(self._file_starts, row) - 1
        return f"{self._files[number]}, row {row - self._file_starts[number]} (the first is 0)"

    def rows(self, columns: Sequence[str]) -> StreamRows:
        """The rows of one column of numbers or lists, or of several columns of numbers side by side."""
        dtype = self.dtype(columns[0])
        assert dtype is not None, columns
        shape: tuple[int, ...] = (self.row_count,)
        if len(columns) > 1:
            shape += (len(columns),)
        elif self.is_list(self.types[columns[0]]):
            shape += (self._width(columns[0]),)
        step = max(1, _BATCH_BYTES // max(1, dtype.itemsize * math.prod(shape[1:])))

        def open_at(row: int) -> tuple[int, Iterator[torch.Tensor]]:
            first = bisect_right(self._starts, row) - 1
            return self._starts[first], self._decoded(first, list(columns), step, shape)

        return StreamRows(shape, dtype, open_at)

    def _width(self, column: str) -> int:
        """Number of entries in a row of a list column."""
        kind = self.types[column]
        if self._arrow.types.is_fixed_size_list(kind):
            return int(kind.list_size)
        for chunk in self._chunks:
            for batch in chunk.batches([column], _WIDTH_ROWS):
                if len(lists := batch.column(0).drop_null()):
                    return len(lists[0])
        return 0

    def _decoded(
        self, first: int, columns: list[str], step: int, shape: tuple[int, ...]
    ) -> Iterator[torch.Tensor]:
        for index in range(first, len(self._chunks)):
            row = self._starts[index]
            for batch in self._chunks[index].batches(columns, step):
                parts = [self._numbers(batch.column(c), c, row, shape) for c in columns]
                values = np.stack(parts, axis=1) if len(columns) > 1 else parts[0]
                yield torch.from_numpy(np.ascontiguousarray(values).copy())
                row += batch.num_rows

    def _numbers(self, values: Any, column: str, row: int, shape: tuple[int, ...]) -> np.ndarray:
        where = f"column {column!r} of {self._files[0].name}"
        count = len(values)
        is_list = self.is_list(values.type)
        if is_list:
            if values.null_count:
                raise FormatError(f"{where} has a null after row {row}; every row must have a list")
            flat = values.flatten()
            lengths = np.asarray(values.value_lengths())
            if len(flat) != count * shape[1] or (lengths != shape[1]).any():
                raise FormatError(f"{where} has a list of another length than {shape[1]} after row {row}")
            values = flat
        if values.null_count and not self._arrow.types.is_floating(values.type):
            raise FormatError(f"{where} has nulls after row {row}; fill them (labels with -1)")
        found: np.ndarray = values.to_numpy(zero_copy_only=False)
        return found.reshape(count, shape[1]) if is_list else found


def _check_footer(path: Path) -> None:
    """Raise FormatError for a Parquet file with too long a footer. pyarrow reads all of it."""
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 8))
        footer_bytes = int.from_bytes(file.read(4), "little")
        if file.read(4) == _PARQUET and footer_bytes > _MAX_FOOTER_BYTES:
            raise FormatError(
                f"{path} has a footer of {footer_bytes} bytes; the limit is {_MAX_FOOTER_BYTES}"
            )
