"""TextTable: the columns of text files, which pyarrow parses to Arrow files in scratch. For the readers.

The first block decides the type of each column. If a later field does not fit, the column gets the next wider
type (int64, float64, text), and the files are parsed again.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
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
_MISFIT = re.compile(
    r"In CSV column #(\d+): (Row #\d+: )?CSV conversion error to \w+: invalid value '(.*)'", re.DOTALL
)
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
    table = TextTable([path], [layout], scratch, is_matrix=True, floats=floats)
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


class _Misfit(Exception):
    """A field that its column's type cannot hold. why: says so, if it is not a missing one."""

    def __init__(self, column: str, why: str = "") -> None:
        super().__init__(column, why)
        self.column, self.why = column, why


class TextTable(ArrowTable):
    """The columns of text files of one layout. Raises FormatError, and ImportError without pyarrow.

    A column is of whole numbers (int64), numbers (floats; an empty field is NaN), True and False, or text.
    texts: columns that are text in any case. is_matrix: all columns are int64, or all floats. text_at: other
    column of text -> why it is not of numbers.
    """

    def __init__(
        self,
        files: Sequence[Path],
        layouts: Sequence[TextLayout],
        scratch: Path,
        *,
        texts: Collection[str] = (),
        is_matrix: bool = False,
        floats: str = "float64",
    ) -> None:
        self._pa = import_pyarrow(files[0])
        self._files, self._layouts, self._kept, self._is_matrix = files, layouts, frozenset(texts), is_matrix
        self._floats = np.dtype(floats)
        text_at: dict[str, str] = {}
        for file, layout in zip(files, layouts, strict=True):
            if layout.names != layouts[0].names:
                raise FormatError(f"{file} has different columns than {files[0]}")
        folder = Path(tempfile.mkdtemp(dir=scratch))
        parsed = [folder / f"{number}.arrow" for number in range(len(files))]
        kinds = self._first_kinds()
        while (misfit := self._parse(kinds, parsed)) is not None:
            if kinds[misfit.column] == "int64":
                self._make_floats(kinds, misfit.column)
            else:
                text_at[misfit.column] = misfit.why
                kinds[misfit.column] = "large_string"
        super().__init__(parsed)
        self._files, self.text_at = files, text_at
        self.types |= {n: self._pa.null() for n in layouts[0].names if n.startswith(UNNAMED)}

    def ids_are_text(self, column: str) -> bool:
        """See ArrowTable: of texts, whether one field is no whole number."""
        return column in self._kept and column not in self._whole

    def ids(self, column: str, *, as_text: bool, chunk: int = 0) -> Iterator[Any]:
        """See ArrowTable. Fields of texts that are no ids, such as empty ones, are null."""
        if column not in self._kept:
            yield from super().ids(column, as_text=as_text, chunk=chunk)
            return
        for batch in self.batches([column], ID_ROWS, chunk):
            ids, compute = batch.column(0), self._pa.compute
            are_ids = compute.not_equal(ids, "") if as_text else self._are_whole(ids)
            ids = compute.if_else(are_ids, ids, self._pa.scalar(None, ids.type))
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

    def _first_kinds(self) -> dict[str, str]:
        """The type of each column by the first block: "int64", floats, "bool", or "large_string" of texts."""
        texts = dict.fromkeys(self._kept, "large_string")
        names = [name for name in self._layouts[0].names if not name.startswith(UNNAMED)]
        blocks = self._blocks(self._files[0], self._layouts[0], texts, names)
        first = next(blocks, None)
        guessed = {} if first is None else {field.name: str(field.type) for field in first.schema}
        kinds = {n: k if k in ("int64", "bool") else str(self._floats) for n, k in guessed.items()}
        if first is None:
            kinds = dict.fromkeys(names, "int64")
        kinds |= texts
        if str(self._floats) in kinds.values() and self._is_matrix:
            self._make_floats(kinds, *kinds)
        return kinds

    def _make_floats(self, kinds: dict[str, str], *columns: str) -> None:
        """Give columns of whole numbers the type of floats; of a matrix, all of them."""
        for name in kinds if self._is_matrix else columns:
            kinds[name] = str(self._floats) if kinds[name] == "int64" else kinds[name]

    # Parsing

    def _parse(self, kinds: dict[str, str], targets: Sequence[Path]) -> _Misfit | None:
        """Parse all files to Arrow files. Returns the first field that its column's type cannot hold."""
        schema = self._pa.schema([(name, self._pa.type_for_alias(kind)) for name, kind in kinds.items()])
        self._whole = set(self._kept)  # those in which all fields are whole numbers
        for file, layout, target in zip(self._files, self._layouts, targets, strict=True):
            suspects = set()
            with (
                self._pa.OSFile(os.fsencode(target), "wb") as sink,
                self._pa.ipc.new_file(sink, schema) as writer,
            ):
                try:
                    for batch in self._blocks(file, layout, kinds, list(kinds)) if kinds else ():
                        suspects |= self._inexact(batch)
                        writer.write_batch(self._pa.record_batch(batch.columns, schema=schema))
                except _Misfit as misfit:
                    return misfit
            for name in sorted(suspects):
                self._refuse_rounding(file, layout, name)
        return None

    def _inexact(self, batch: Any) -> set[str]:
        """The columns with a float that may not be the number in the text. Raises _Misfit for a missing one
        among whole numbers."""
        compute, inexact = self._pa.compute, set()
        for name, fields in zip(batch.schema.names, batch.columns, strict=True):
            if name in self._kept:
                are_ids = compute.or_(self._are_whole(fields), compute.equal(fields, ""))
                if name in self._whole and compute.all(are_ids).as_py() is False:
                    self._whole.discard(name)
            elif str(fields.type) == "int64" and fields.null_count:
                raise _Misfit(name)
            elif self._pa.types.is_floating(fields.type):
                is_large = compute.greater_equal(compute.abs(fields), self._pa.scalar(_EXACT, fields.type))
                if compute.any(is_large).as_py():
                    inexact.add(name)
        return inexact

    def _refuse_rounding(self, file: Path, layout: TextLayout, name: str) -> None:
        """Raise FormatError for 1e400 and a whole number that is rounded; of int64, not for OGB's float32."""
        for batch in self._blocks(file, layout, {name: "large_string"}, [name]):
            fields = batch.column(0)
            for text in fields.filter(self._pa.compute.match_substring_regex(fields, _INEXACT)).to_pylist():
                with np.errstate(over="ignore"):
                    value = float(self._floats.type(text))
                whole = int(text) if text.strip().lstrip("+-").isdecimal() else 0
                may_be_rounded = self._floats == np.float32 and -(1 << 63) <= whole < 1 << 63
                if np.isinf(value) or (whole and not may_be_rounded and int(value) != whole):
                    raise FormatError(f"{file}: {self._floats} of column {name!r} cannot hold {shown(text)}")

    def _blocks(
        self, file: Path, layout: TextLayout, kinds: dict[str, str], columns: list[str]
    ) -> Iterator[Any]:
        """These columns of a file in blocks. Raises _Misfit, and FormatError for what is no table."""
        pa, names = self._pa, layout.names
        with self._decoding(file):
            stream = pa.OSFile(os.fsencode(file))
            if file.suffix == ".gz":
                stream = pa.CompressedInputStream(stream, "gzip")
            try:
                reader = pa.csv.open_csv(
                    stream,
                    pa.csv.ReadOptions(
                        use_threads=False,
                        block_size=_BLOCK_BYTES,
                        column_names=names,
                        skip_rows=layout.line_count,
                    ),
                    pa.csv.ParseOptions(
                        delimiter=layout.delimiter,
                        newlines_in_values=True,
                        ignore_empty_lines=layout.skips_empty,
                    ),
                    pa.csv.ConvertOptions(
                        column_types={name: pa.type_for_alias(kind) for name, kind in kinds.items()},
                        include_columns=columns,
                        true_values=["True", "true", "TRUE"],
                        false_values=["False", "false", "FALSE"],
                    ),
                )
            except pa.ArrowInvalid as error:
                if "Empty CSV" in str(error):
                    return
                raise
        yield from each_within(partial(self._decoding, file), reader)

    @contextlib.contextmanager
    def _decoding(self, path: Path) -> Iterator[None]:
        """Turn the errors of pyarrow into FormatError and _Misfit."""
        try:
            with super()._decoding(path):
                yield
        except FormatError as error:
            if misfit := _MISFIT.search(str(error.__cause__)):
                column, row, text = misfit.groups()
                where = f"{path}, row {row[5:-2]}" if row else str(path)
                why = f"{shown(text)} is no number ({where})"
                raise _Misfit(self._layouts[0].names[int(column)], why) from None
            cure = f"; {_SEPARATE}" if "columns, got" in str(error) else ""
            raise FormatError(f"{error}{cure}") from error
