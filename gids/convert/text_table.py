"""TextTable: the columns of text files, which pyarrow parses to Arrow files in scratch. For the readers.

The files are parsed to text once; all fields of a column decide its type, to which they are cast when read.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from gids.convert.arrow_table import ID_ROWS, ArrowTable, each_within, import_pyarrow
from gids.convert.edges import end_columns, have_ends
from gids.convert.source import described
from gids.convert.source_files import reading, shown
from gids.convert.stream_rows import StreamRows
from gids.errors import FormatError

CSV_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_BLOCK_BYTES = 4 << 20  # that pyarrow parses at a time: the limit for a row
UNNAMED = "(unnamed)"
_WHOLE = r"^(0|-?[1-9][0-9]{0,18})$"
"""A whole number as an id: as it would be printed, so that equal numbers are equal text."""
_LEAST, _MOST = str(-(1 << 63)), str((1 << 63) - 1)
_EXACT = 2.0**53  # beyond it, float64 does not hold all whole numbers
_INEXACT = r"[0-9]{16}|[eE][+]?[0-9]{2}"  # in the text of a number that may be another one as a float
_SEPARATE = "separate columns by one tab, comma, semicolon or blank"


@dataclass(frozen=True)
class TextLayout:
    """names: of the columns; line_count: of the lines before the rows; skips_empty: whether an empty line is
    no row."""

    names: list[str]
    line_count: int
    delimiter: str
    skips_empty: bool = True


def is_csv(path: Path) -> bool:
    return path.name.endswith(CSV_SUFFIXES) and path.is_file()


def open_text(path: Path) -> IO[str]:
    """Open a text, gzipped or not."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def table_layout(path: Path) -> TextLayout:
    """Of a CSV file whose first line that is not empty has the names of columns. One without a name gets one.

    Raises FormatError if there is none, and for two columns of one name.
    """
    text, comment, line_count = _first_row(path)
    if not text:
        raise FormatError(f"{path} has no line with the names of its columns")
    delimiter = next((d for d in ("\t,;" if ".tsv" in path.suffixes else ",;") if d in text), ",")
    names, words = _fields(text, delimiter), _fields(comment, delimiter)
    if len(words) == len(names) > 1 and any(map(_is_number, names)):
        names = words
    else:
        line_count += 1
    return TextLayout(named(path, names), line_count, delimiter, skips_empty=len(names) > 1)


def named(path: Path, names: Sequence[str]) -> list[str]:
    """The names of columns, of which one without a name gets one. Raises FormatError for two of one name."""
    names = [name or f"{UNNAMED} {i}" for i, name in enumerate(names, 1)]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise FormatError(f"{path} has two columns {shown(twice)}")
    return names


def list_layout(path: Path, are_names: Callable[[list[str]], bool]) -> tuple[TextLayout, list[str]]:
    """Of a file with or without a line of names, after lines of comments (# or %). Also returns the names.

    The layout's own names are positions: "0", "1", …. are_names: whether the words of the last comment are
    the names of columns, if there is no other line of names.
    """
    text, comment, line_count = _first_row(path)
    if not text:
        return TextLayout([], line_count, ","), []
    delimiter = next((d for d in ",\t;" if d in text.strip()), " ")
    fields = _fields(text, delimiter)
    if delimiter in " \t" and len(fields) > 1 and not fields[-1]:  # KONECT ends lines with a blank
        fields[-1] = UNNAMED
    positions = [name if name == UNNAMED else str(i) for i, name in enumerate(fields)]
    if any(fields) and not any(map(_is_number, fields)):
        return TextLayout(positions, line_count + 1, delimiter), fields
    if not all(fields):
        raise FormatError(f"{path}, line {line_count + 1}: {_SEPARATE}")
    words = re.split(r"[,;\s]+", comment.strip())
    names = words if len(words) == len(fields) and are_names(words) else []
    return TextLayout(positions, line_count, delimiter), names


def _first_row(path: Path) -> tuple[str, str, int]:
    """The first line that is not empty and no comment (# or %), the last comment, and the number of lines
    before. The line is empty if there is none."""
    comment, line_count = "", 0
    with reading(path), open_text(path) as file:
        for line in file:
            text = line.strip()
            if text.startswith("%%MatrixMarket"):
                cure = "scipy.sparse.save_npz('adj.npz', scipy.io.mmread(FILE).tocsr())"
                raise FormatError(f"{path} is a matrix of Matrix Market: write it with {cure}")
            if text and text[0] not in "#%":
                return line.rstrip("\r\n"), comment, line_count
            comment, line_count = text.lstrip("#% ") or comment, line_count + 1
    return "", comment, line_count


def _fields(text: str, delimiter: str) -> list[str]:
    cells = next(csv.reader([text], delimiter=delimiter, skipinitialspace=delimiter != " "), [""])
    return [cell.strip() for cell in cells]


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def read_matrix(path: Path, scratch: Path, floats: str = "float32", column_count: int = 0) -> StreamRows:
    """The numbers of a text file as rows [lines, columns], int64 if all are whole, else floats. A line of
    names is skipped.

    column_count: of a file without rows; 0: it is refused. Raises FormatError for what is no number.
    """
    layout, _ = list_layout(path, lambda _: False)
    if not (names := layout.names or list(map(str, range(column_count)))):
        raise FormatError(f"{path} has no rows")
    layout = TextLayout(names, layout.line_count, layout.delimiter)
    table = TextTable([path], [layout], scratch, floats=floats)
    if table.text_at:
        raise FormatError(next(iter(table.text_at.values())))
    return table.rows([name for name in names if name != UNNAMED], is_matrix=True)


def read_pairs(path: Path, scratch: Path) -> StreamRows:
    """The edges of a text file, int64[lines, 2], for formats without names of columns: sources are first.

    Raises FormatError for names that say otherwise.
    """
    _, names = list_layout(path, have_ends)
    if names and end_columns(names, f"the edges of {path}") != (0, 1):
        raise FormatError(f"{path} has the columns {', '.join(names)}; the first must be the sources")
    pairs = read_matrix(path, scratch, column_count=2)
    if pairs.shape[1] != 2 or pairs.dtype.is_floating_point:
        raise FormatError(f"{path} is {described(pairs)}; edges must be two columns of whole numbers")
    return pairs


class TextTable(ArrowTable):
    """The columns of text files of one layout. Raises FormatError, and ImportError without pyarrow.

    A column is of whole numbers (int64), numbers (float64), True and False, or text. A field that is empty or
    NA is null in the latter ones, and NaN among numbers. floats: of a matrix, whose columns are all int64 or
    all of this type. text_at: column of text -> why it is not of numbers.
    """

    def __init__(
        self, files: Sequence[Path], layouts: Sequence[TextLayout], scratch: Path, *, floats: str = ""
    ) -> None:
        self._pa = import_pyarrow(files[0])
        self._floats = np.dtype(floats or "float64")
        self._nulls = self._pa.array(self._pa.csv.ConvertOptions().null_values)
        self._layouts = layouts
        names = [name for name in layouts[0].names if not name.startswith(UNNAMED)]
        self._kinds = {name: ["int64", str(self._floats), "bool"] for name in names}
        self._whole = set(names)  # those in which all fields are whole numbers, or empty
        self._no_number: dict[str, tuple[str, int]] = {}  # column -> its first such field, and the row
        folder, row, parsed = Path(tempfile.mkdtemp(dir=scratch)), 0, list[Path]()
        schema = self._pa.schema([(name, self._pa.string()) for name in names])
        for file, layout in zip(files, layouts, strict=True):
            if layout.names != layouts[0].names:
                raise FormatError(f"{file} has different columns than {files[0]}")
            parsed.append(folder / f"{len(parsed)}.arrow")
            with (
                self._pa.OSFile(os.fsencode(parsed[-1]), "wb") as sink,
                self._pa.ipc.new_file(sink, schema) as writer,
            ):
                for batch in self._blocks(file, layout, schema) if names else ():
                    for name, fields in zip(names, batch.columns, strict=True):
                        self._find_kinds(name, fields, row)
                    writer.write_batch(batch)
                    row += batch.num_rows
        super().__init__(parsed)
        self._files = files
        kinds = {name: next(iter(kinds), "string") for name, kinds in self._kinds.items()}
        if floats and {*kinds.values()} != {"int64"}:
            kinds = {name: floats if kind == "int64" else kind for name, kind in kinds.items()}
        self.types = {name: self._pa.type_for_alias(kind) for name, kind in kinds.items()}
        self.types |= {n: self._pa.null() for n in layouts[0].names if n.startswith(UNNAMED)}
        for name, (text, row) in self._no_number.items():
            if kinds[name] == "string":
                self.text_at[name] = f"{shown(text)} is no number ({self.where(row)})"

    def batches(self, columns: list[str], rows: int, first: int = 0) -> Iterator[Any]:
        """See ArrowTable. Raises FormatError for a number that its column's type cannot hold."""
        row = self._starts[first]
        for batch in super().batches(columns, rows, first):
            fields = zip(columns, batch.columns, strict=True)
            yield self._pa.record_batch([self._numbers(*field, row) for field in fields], names=columns)
            row += batch.num_rows

    def ids_are_text(self, column: str) -> bool:
        """See ArrowTable: whether one field is no whole number as printed."""
        return column not in self._whole

    def ids(self, column: str, *, as_text: bool, chunk: int = 0) -> Iterator[Any]:
        """See ArrowTable. Fields that are no ids, such as empty ones, are null."""
        for batch in super().batches([column], ID_ROWS, chunk):
            ids = batch.column(0).cast(self._pa.large_string())
            are_ids = self._pa.compute.not_equal(ids, "") if as_text else self._are_whole(ids)
            ids = self._pa.compute.if_else(are_ids, ids, self._pa.scalar(None, ids.type))
            yield ids if as_text else ids.cast(self._pa.int64())

    def where(self, row: int) -> str:
        """The file and the row in it, counted as pyarrow does: the names are a row."""
        number = bisect_right(self._file_starts, row) - 1
        in_file = row - self._file_starts[number] + self._layouts[number].line_count + 1
        return f"{self._files[number]}, row {in_file}"

    def _are_whole(self, ids: Any) -> Any:
        """Whether each text is a whole number that int64 holds."""
        compute = self._pa.compute
        digits = compute.utf8_ltrim(ids, "-")
        fits = compute.or_(
            compute.less(compute.utf8_length(digits), len(_MOST)), compute.less_equal(digits, _MOST)
        )
        fits = compute.or_(fits, compute.equal(ids, _LEAST))
        return compute.and_(compute.match_substring_regex(ids, _WHOLE), fits)

    # Types

    def _find_kinds(self, name: str, fields: Any, row: int) -> None:
        """Keep the types that can hold all fields of a block of a column. row: of the first field."""
        compute, texts = self._pa.compute, self._texts(fields)
        for kind in list(self._kinds[name]):
            try:
                (texts.fill_null("") if kind == "int64" else texts).cast(kind)
            except self._pa.ArrowInvalid:
                self._kinds[name].remove(kind)
                if kind == str(self._floats):
                    words = (i for i, text in enumerate(texts.to_pylist()) if not _is_number(text or "0"))
                    at = next(words, 0)
                    self._no_number[name] = texts[at].as_py(), row + at
        if name in self._whole:
            are_ids = compute.or_(self._are_whole(fields), compute.equal(fields, ""))
            if compute.all(are_ids).as_py() is False:
                self._whole.discard(name)

    def _texts(self, fields: Any) -> Any:
        """The fields, stripped of blanks. A word for a missing value, such as NA, becomes null."""
        texts = self._pa.compute.utf8_trim_whitespace(fields)
        is_null = self._pa.compute.is_in(texts, self._nulls)
        return self._pa.compute.if_else(is_null, self._pa.scalar(None, texts.type), texts)

    def _numbers(self, name: str, fields: Any, row: int) -> Any:
        """Fields in the type of their column. row: of the first one.

        Raises FormatError for 1e400 and a whole number that is rounded; of int64, not for OGB's float32.
        """
        if (kind := self.types[name]) == fields.type:
            return fields
        compute, texts = self._pa.compute, self._texts(fields)
        with reading(f"column {name!r} of {self.where(row)} or below"):
            values = texts.cast(kind)
        if self._pa.types.is_floating(kind):
            is_large = compute.greater_equal(compute.abs(values), self._pa.scalar(_EXACT, kind))
            suspects = compute.and_(is_large, compute.match_substring_regex(texts, _INEXACT))
            for text, value in zip(texts.filter(suspects).to_pylist(), values.filter(suspects), strict=True):
                whole = int(text) if text.lstrip("+-").isdecimal() else 0
                may_be_rounded = self._floats == np.float32 and -(1 << 63) <= whole < 1 << 63
                if np.isinf(value.as_py()) or (whole and not may_be_rounded and int(value.as_py()) != whole):
                    place = self.where(row + compute.index(texts, text).as_py())
                    raise FormatError(f"{place}: {self._floats} of column {name!r} cannot hold {shown(text)}")
        return values

    # Parsing

    def _blocks(self, file: Path, layout: TextLayout, schema: Any) -> Iterator[Any]:
        """The columns of a file as text in blocks. Raises FormatError for what is no table."""
        pa = self._pa
        with _parsing(file):
            stream = pa.OSFile(os.fsencode(file))
            if file.suffix == ".gz":
                stream = pa.CompressedInputStream(stream, "gzip")
            try:
                reader = pa.csv.open_csv(
                    stream,
                    pa.csv.ReadOptions(
                        use_threads=False,
                        block_size=_BLOCK_BYTES,
                        column_names=layout.names,
                        skip_rows=layout.line_count,
                    ),
                    pa.csv.ParseOptions(
                        delimiter=layout.delimiter,
                        newlines_in_values=True,
                        ignore_empty_lines=layout.skips_empty,
                    ),
                    pa.csv.ConvertOptions(column_types=schema, include_columns=schema.names),
                )
            except pa.ArrowInvalid as error:
                if "Empty CSV" in str(error):
                    return
                raise
        yield from each_within(partial(_parsing, file), reader)


@contextlib.contextmanager
def _parsing(path: Path) -> Iterator[None]:
    try:
        with reading(path):
            yield
    except FormatError as error:
        cure = f"; {_SEPARATE}" if "columns, got" in str(error) else ""
        raise FormatError(f"{error}{cure}") from error
