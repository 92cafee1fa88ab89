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
from gids.store.dtypes import equal_values, torch_dtype_of

_BATCH_BYTES = 2 << 20
ID_ROWS = 1 << 16  # of a batch of ids
_WIDTH_ROWS = 1000  # rows to read at a time when looking for the first list
_AROUND = r"""[][(){}<>"'$€£%\s,;|+.-]|(?i:array|tensor|nan|none|null|dtype=\w+|(np|torch)[.]\w+)"""
_NUMBER = r"[0-9][-+0-9.eETZ,;:|/\s]*|(?i:inf(inity)?)"
_NUMBERS = rf"^({_AROUND})*({_NUMBER})({_AROUND}|{_NUMBER})*$"
"""A field of text that is a number, a date, or a vector of numbers, as NumPy and others print it."""
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
    not of numbers); ends (columns of the ends of edges).
    """

    ends: tuple[str, ...] = ()

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
            self.types = self.types or types
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
                options = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}
                reader = self._pa.parquet.ParquetFile(self._pa.OSFile(os.fsencode(path)), **options)
            elif starts_with(path, _ARROW):
                file = self._pa.memory_map(os.fsencode(path))
                names = self._pa.ipc.open_file(file).schema.names
                options = self._pa.ipc.IpcReadOptions(included_fields=[names.index(name) for name in columns])
                reader = self._pa.ipc.open_file(file, options=options)
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

    def dtype(self, *columns: str) -> torch.dtype | None:
        """The type of the numbers of columns: NumPy's common type; None if one has no numbers (text, dates,
        lists of lists)."""
        types, kinds = self._pa.types, [*map(self._value_type, columns)]
        if not all(types.is_integer(k) or types.is_floating(k) or types.is_boolean(k) for k in kinds):
            return None
        return torch_dtype_of(np.result_type(*(k.to_pandas_dtype() for k in kinds)))

    def is_list(self, column: str) -> bool:
        """Whether a column has a list in each row."""
        types, kind = self._pa.types, self.types[column]
        return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))

    def is_text(self, column: str) -> bool:
        """Whether a column has text, or lists of text."""
        types, kind = self._pa.types, self._value_type(column)
        is_view = getattr(types, "is_string_view", lambda _: False)  # since pyarrow 16
        return bool(types.is_string(kind) or types.is_large_string(kind) or is_view(kind))

    def _value_type(self, column: str) -> Any:
        """The type of a column's values, also of those in lists and dictionaries."""
        kind = self.types[column]
        kind = kind.value_type if self.is_list(column) else kind
        return kind.value_type if self._pa.types.is_dictionary(kind) else kind

    def ids_are_text(self, column: str) -> bool:
        """Whether the ids in a column are text, not whole numbers. Raises FormatError if they are neither."""
        is_text = self.is_text(column)
        if self.is_list(column) or not (is_text or self._pa.types.is_integer(self._value_type(column))):
            raise FormatError(
                f"column {column!r} of {self._files[0]} is of type {self.types[column]}: ids must be text or "
                "whole numbers; cast it (pandas makes floats where one is missing), or choose another "
                "column with --id-column"
            )
        return is_text

    def null_count(self, column: str) -> int:
        """Number of values that are missing. Reads the column."""
        values = (batch.column(0) for batch in self.batches([column], ID_ROWS))
        return sum((v.flatten() if self.is_list(column) else v).null_count for v in values)

    def numbers_as_text(self, columns: Sequence[str]) -> dict[str, str]:
        """Columns of text in which a field (of lists: all of one) is a number, or numbers -> such a field."""
        examples, text = dict[str, str](), self._pa.large_string()
        for batch in self.batches(list(columns), ID_ROWS) if columns else ():
            for column in columns:
                texts = batch.column(column).cast(self._pa.list_(text) if self.is_list(column) else text)
                if self.is_list(column):
                    texts = self._pa.compute.binary_join(texts, self._pa.scalar(" ", text))
                numbers = texts.filter(self._pa.compute.match_substring_regex(texts, _NUMBERS))
                examples |= dict(zip([column], numbers[:1].to_pylist(), strict=False))
        return examples

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

    def rows(self, columns: Sequence[str], *, is_matrix: bool = False, fill: int | None = None) -> StreamRows:
        """The rows of one column of numbers or lists, or of columns of numbers side by side.

        is_matrix: columns side by side, [rows, columns], in their common type. fill: for nulls, 0; or -1,
        which makes whole numbers and bools int64, and leaves floats; None: nulls among both are refused.
        """
        dtype = self.dtype(*columns)
        assert dtype is not None, columns
        if fill == -1 and not dtype.is_floating_point:
            dtype = torch.int64
        shape: tuple[int, ...] = (self.row_count,)
        if is_matrix:
            shape += (len(columns),)
        elif self.is_list(columns[0]):
            shape += (width := self._width(columns[0]),)
            is_empty = np.array([self.row_count > 0 and not width])
            self._refuse(is_empty, 0, columns[0], "is empty, as all lists are")
        step = max(1, _BATCH_BYTES // max(1, dtype.itemsize * math.prod(shape[1:])))

        def decode(chunk: int) -> Iterator[torch.Tensor]:
            row = self._starts[chunk]
            for batch in self.batches(list(columns), step, chunk):
                values = torch.empty((batch.num_rows, *shape[1:]), dtype=dtype)
                parts = values.unbind(1) if is_matrix else [values]
                for column, part in zip(columns, parts, strict=True):
                    self._read_numbers(batch.column(column), column, row, part, fill)
                yield values
                row += batch.num_rows

        return self._stream(shape, dtype, decode)

    def _width(self, column: str) -> int:
        """Number of entries in a row of a list column."""
        kind = self.types[column]
        if self._pa.types.is_fixed_size_list(kind):
            return int(kind.list_size)
        batches = (batch.column(0).value_lengths() for batch in self.batches([column], _WIDTH_ROWS))
        return next(filter(None, (self._pa.compute.max(lengths).as_py() for lengths in batches)), 0)

    def _read_numbers(self, values: Any, column: str, row: int, out: torch.Tensor, fill: int | None) -> None:
        """Copy a column of a batch, from a row on, to out. Raises FormatError for what out cannot hold."""
        flat = values
        if self.is_list(column):
            lengths = np.where(values.is_null(), -1, values.value_lengths().fill_null(-1))
            self._refuse(lengths != out.shape[1], row, column, f"is no list of {out.shape[1]}, as others are")
            flat = values.flatten()
        if self._pa.types.is_dictionary(flat.type):
            flat = flat.dictionary_decode()
        if flat.null_count and (fill == 0 or not self._pa.types.is_floating(flat.type)):
            if fill is None:
                nulls = np.asarray(flat.is_null()).reshape(len(values), -1)
                self._refuse(nulls.any(axis=1), row, column, "is null")
            with reading(f"column {column!r} of {self.where(row)} or below"):
                flat = flat.cast(self._pa.int64()) if fill else flat
            flat = flat.fill_null(self._pa.scalar(fill).cast(flat.type))
        numbers = flat.to_numpy(zero_copy_only=False).reshape(out.shape)
        np.copyto(out.numpy(), numbers, casting="unsafe")
        name = str(out.dtype).removeprefix("torch.")
        if numbers.dtype.kind in "iu" and numbers.dtype.name != name:
            exact = equal_values(torch.from_numpy(numbers.copy()), out).numpy()
            why = f"has digits that {name} lacks (--separate {column} keeps them)"
            self._refuse(~exact, row, column, why)

    def _refuse(self, wrong: Any, row: int, column: str, why: str) -> None:
        """Raise FormatError if a row of a batch is wrong. row: the first one."""
        if wrong.any():
            where = f"{self.where(row + int(wrong.argmax()))}: {column!r}"
            cure = "--drop-unknown" if column in self.ends else f"--skip {column}"
            raise FormatError(f"{where} {why}; correct it, or leave it out with {cure}")


def each_within(context: Callable[[], AbstractContextManager[None]], items: Iterator[Any]) -> Iterator[Any]:
    """Yield the items, each of which is made within a context of its own."""
    while True:
        with context():
            item = next(items, None)
        if item is None:
            return
        yield item
