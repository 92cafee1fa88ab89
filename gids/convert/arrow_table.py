"""Columns of Parquet and Arrow files as Rows, decoded batch by batch. Called by readers/tables.py.

A table is one file or several in order. Reading can start at a row group (Parquet) or a record batch (Arrow);
batches of about 2 MiB are decoded in order from there.
"""

from __future__ import annotations

import contextlib
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gids.convert.source_files import import_library, reading, shown, starts_with
from gids.convert.stream_rows import StreamRows
from gids.errors import FormatError
from gids.store.dtypes import torch_dtype_of

_BATCH_BYTES = 2 << 20
ID_ROWS = 1 << 16  # of a batch of ids
_WIDTH_ROWS = 1000  # rows to read at a time when looking for the first list
_PARQUET, _ARROW = b"PAR1", b"ARROW1"


def is_arrow(path: Path) -> bool:
    """Whether a file is Parquet or an Arrow file (Feather 2)."""
    return starts_with(path, _PARQUET, _ARROW)


def import_pyarrow(file: Path) -> Any:
    """pyarrow, which a file needs, with its parts. Raises ImportError."""
    for part in ("compute", "csv", "ipc", "parquet"):
        import_library(file, f"pyarrow.{part}")
    return import_library(file, "pyarrow")


class ArrowTable:
    """The columns of one or more files. Raises FormatError, and ImportError without pyarrow.

    Attributes: row_count; types (column -> pyarrow type); text_at (column of text of a text file -> why it is
    not of numbers).
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._pa = import_pyarrow(files[0])
        self._files = files
        self._last: tuple[tuple[Path, tuple[str, ...]], Any] | None = None
        self._chunks: list[tuple[Path, int]] = []  # row groups of Parquet files, record batches of others
        self._file_starts, counts = list[int](), list[int]()
        self.types: dict[str, Any] = {}
        self.text_at: dict[str, str] = {}
        for file in files:
            with self._decoding(file):
                reader = self._opened(file)
                if isinstance(reader, self._pa.parquet.ParquetFile):
                    schema, groups = reader.schema_arrow, range(reader.num_row_groups)
                    rows = [reader.metadata.row_group(i).num_rows for i in groups]
                else:
                    schema, groups = reader.schema, range(reader.num_record_batches)
                    rows = [reader.get_batch(i).num_rows for i in groups]
            types = {field.name: field.type for field in schema}
            if len(types) < len(schema):
                twice = next(name for name in types if schema.names.count(name) > 1)
                raise FormatError(f"{file} has two columns {shown(twice)}")
            if self.types and types != self.types:
                raise FormatError(f"{file} has different columns than {files[0]}")
            self.types = types
            self._file_starts.append(sum(counts))
            self._chunks += [(file, group) for group in groups]
            counts += rows
        self._starts = [0, *accumulate(counts)]
        self.row_count = self._starts[-1]

    @contextlib.contextmanager
    def _decoding(self, path: Path) -> Iterator[None]:
        with reading(path):
            yield

    def _opened(self, path: Path, columns: Sequence[str] = ()) -> Any:
        """pyarrow's reader of a file; of an Arrow file with these columns only (default: all).

        Only the last one stays open: a table may have thousands of files.
        """
        is_parquet = starts_with(path, _PARQUET)
        key = (path, () if is_parquet else tuple(columns))
        if self._last is None or self._last[0] != key:
            self._last = None
            if is_parquet:
                reader = self._pa.parquet.ParquetFile(
                    self._pa.OSFile(os.fsencode(path)), pre_buffer=False, buffer_size=1 << 20
                )
            elif starts_with(path, _ARROW):
                names = list(self.types)
                options = self._pa.ipc.IpcReadOptions(included_fields=[names.index(name) for name in columns])
                reader = self._pa.ipc.open_file(self._pa.memory_map(os.fsencode(path)), options=options)
            else:
                raise FormatError(
                    f"{path} is not a Parquet or Arrow file; write the batches of an Arrow stream with "
                    "pyarrow.ipc.new_file"
                )
            self._last = (key, reader)
        return self._last[1]

    def batches(self, columns: list[str], rows: int, first: int = 0) -> Iterator[Any]:
        """The columns in batches of a number of rows, from the chunk `first` on."""
        for path, group in self._chunks[first:]:
            with self._decoding(path):
                reader = self._opened(path, columns)
                if isinstance(reader, self._pa.parquet.ParquetFile):
                    pieces = reader.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)
                else:
                    batch = reader.get_batch(group).select(columns)
                    batch.validate(full=True)  # Arrow trusts offsets and lengths otherwise
                    pieces = (batch.slice(at, rows) for at in range(0, batch.num_rows, rows))
            yield from each_within(partial(self._decoding, path), pieces)

    def dtype(self, column: str) -> torch.dtype | None:
        """The type of a column's numbers, or None if it has no numbers (text, dates, lists of lists)."""
        kind = self.types[column]
        if self.is_list(kind):
            kind = kind.value_type
        types = self._pa.types
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            return None
        return torch_dtype_of(np.dtype(kind.to_pandas_dtype()))

    def is_list(self, kind: Any) -> bool:
        """Whether a column of this type has a list in each row."""
        types = self._pa.types
        return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))

    def ids_are_text(self, column: str) -> bool:
        """Whether the ids in a column are text, not whole numbers. Raises FormatError if they are neither."""
        types, kind = self._pa.types, self.types[column]
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
        for batch in self.batches([column], ID_ROWS, chunk):
            with reading(f"column {column!r} of {self._files[0]}"):
                yield batch.column(0).cast(self._pa.large_string() if as_text else self._pa.int64())

    def number_ids(self, column: str) -> StreamRows:
        """A column of ids that are numbers, int64[rows]; -1: there is none, or it is no whole number."""

        def decode(chunk: int) -> Iterator[torch.Tensor]:
            for ids in self.ids(column, as_text=False, chunk=chunk):
                yield torch.tensor(ids.fill_null(-1).to_numpy())

        return self._stream((self.row_count,), torch.int64, decode)

    def _stream(
        self, shape: tuple[int, ...], dtype: torch.dtype, decode: Callable[[int], Iterator[torch.Tensor]]
    ) -> StreamRows:
        """Rows that decode(number of the first chunk) returns."""

        def open_at(row: int) -> tuple[int, Iterator[torch.Tensor]]:
            chunk = bisect_right(self._starts, row) - 1
            return self._starts[chunk], decode(chunk)

        return StreamRows(shape, dtype, open_at)

    def where(self, row: int) -> str:
        """The file and the row in it, for messages."""
        number = bisect_right(self._file_starts, row) - 1
        return f"{self._files[number]}, row {row - self._file_starts[number]} (the first is 0)"

    def rows(self, columns: Sequence[str], *, is_matrix: bool = False) -> StreamRows:
        """The rows of one column of numbers or lists, or of several columns of numbers side by side.

        is_matrix: also one column has shape [rows, 1].
        """
        dtype = self.dtype(columns[0])
        assert dtype is not None, columns
        shape: tuple[int, ...] = (self.row_count,)
        stacks = is_matrix or len(columns) > 1
        if stacks:
            shape += (len(columns),)
        elif self.is_list(self.types[columns[0]]):
            shape += (self._width(columns[0]),)
        step = max(1, _BATCH_BYTES // max(1, dtype.itemsize * math.prod(shape[1:])))

        def decode(chunk: int) -> Iterator[torch.Tensor]:
            row = self._starts[chunk]
            for batch in self.batches(list(columns), step, chunk):
                parts = [self._numbers(batch.column(c), c, row, shape) for c in columns]
                values = np.stack(parts, axis=1) if stacks else parts[0]
                yield torch.from_numpy(np.ascontiguousarray(values).copy())
                row += batch.num_rows

        return self._stream(shape, dtype, decode)

    def _width(self, column: str) -> int:
        """Number of entries in a row of a list column."""
        kind = self.types[column]
        if self._pa.types.is_fixed_size_list(kind):
            return int(kind.list_size)
        lists = (batch.column(0).drop_null() for batch in self.batches([column], _WIDTH_ROWS))
        return next((len(values[0]) for values in lists if len(values)), 0)

    def _numbers(self, values: Any, column: str, row: int, shape: tuple[int, ...]) -> np.ndarray:
        where = f"column {column!r} of {self._files[0].name}"
        flat = values
        if self.is_list(values.type):
            flat = values.flatten()
            if values.null_count or (np.asarray(values.value_lengths()) != shape[1]).any():
                raise FormatError(
                    f"{where} has a null or a list of another length than {shape[1]} after row {row}"
                )
        if flat.null_count and not self._pa.types.is_floating(flat.type):
            raise FormatError(f"{where} has nulls after row {row}; fill them (labels with -1)")
        numbers: np.ndarray = flat.to_numpy(zero_copy_only=False)
        return numbers.reshape(len(values), *shape[1:]) if flat is not values else numbers


def each_within(context: Callable[[], AbstractContextManager[None]], items: Iterator[Any]) -> Iterator[Any]:
    """Yield the items, each of which is made within a context of its own."""
    while True:
        with context():
            item = next(items, None)
        if item is None:
            return
        yield item
