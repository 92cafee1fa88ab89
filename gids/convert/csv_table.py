"""CsvTable: the columns of CSV files, parsed once to Parquet files in scratch. Called by readers/tables.py.

pyarrow parses. A first pass finds the type of every column, over all files of a table; a second one writes
the columns that are used.
"""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gids.convert.arrow_table import ID_ROWS, ArrowTable, import_pyarrow
from gids.convert.text_table import MAX_LINE_CHARS, open_text
from gids.convert.untrusted import at_most, open_file, parsing, shown
from gids.errors import FormatError

CSV_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_BLOCK_BYTES = 8 << 20  # longer than a line of MAX_LINE_CHARS may be
_FAULT = "cannot be parsed as CSV"
_WHOLE = r"^(0|-?[1-9][0-9]{0,18})$"
"""A whole number as an id: as it would be printed, so that equal numbers are equal text."""
_LEAST = str(-(1 << 63))
_MOST = str((1 << 63) - 1)
_UNNAMED = "(unnamed)"
_MAX_IDLE_LINES = 1_000_000  # before the names
_MAX_COLUMNS = 100_000
_LONG = r"^[+-]?[0-9]{16,}$"  # a whole number that float64 may not hold
NUMBERED = re.compile(r"(.+)_\d+")  # x_0, x_1, …: columns of one table


def is_csv(path: Path) -> bool:
    return path.name.endswith(CSV_SUFFIXES) and path.is_file()


def csv_header(path: Path) -> list[str]:
    """The names in the first line that is not empty. Raises FormatError."""
    return _header(path)[0]


def _header(path: Path) -> tuple[list[str], int]:
    """The names, and the number of lines up to them. A column without a name gets one."""
    with open_text(path) as file:
        lines = iter(lambda: file.readline(MAX_LINE_CHARS), "")
        for number, line in enumerate(islice(lines, _MAX_IDLE_LINES), 1):
            if line.strip():
                with parsing(path, _FAULT):
                    names = next(csv.reader([line], delimiter=_delimiter(path)))
                names = [name.strip() or f"{_UNNAMED} {i}" for i, name in enumerate(names, 1)]
                if len(names) > _MAX_COLUMNS:
                    raise FormatError(f"{path} has {len(names)} columns; the limit is {_MAX_COLUMNS}")
                if len(set(names)) < len(names):
                    twice = next(name for i, name in enumerate(names) if name in names[:i])
                    raise FormatError(f"{path} has two columns {shown(twice)}")
                return names, number
    raise FormatError(f"{path} has no line with the names of its columns")


def _delimiter(path: Path) -> str:
    return "\t" if ".tsv" in path.suffixes else ","


class CsvTable(ArrowTable):
    """The columns of CSV files with a header.

    A column is of whole numbers (int64), numbers (float64; an empty field is NaN), True and False, or text.
    texts: columns that are kept as text; other text is not.
    """

    def __init__(
        self, files: Sequence[Path], texts: Collection[str], scratch: Path, memory_bytes: int | None
    ) -> None:
        self._pa = import_pyarrow(files[0])
        self._compute = self._pa.compute
        self._sources, self._limit = files, memory_bytes
        self._texts = frozenset(texts)
        self._whole = set(texts)  # those in which all fields are whole numbers
        self._gaps: set[str] = set()  # columns with an empty field
        self._not_numbers: dict[str, tuple[int, str]] = {}
        self._names = csv_header(files[0])
        kinds = self._kinds()
        scratch.mkdir()
        parsed = [scratch / f"{number}.parquet" for number in range(len(files))]
        for file, target in zip(files, parsed, strict=True):
            self._write(file, target, kinds)
        super().__init__(parsed, memory_bytes)
        self.types |= {name: self._pa.string() for name, kind in kinds.items() if kind == "text"}
        self.types |= {name: self._pa.null() for name in self._names if name not in kinds}
        self.text_at, self._files = self._not_numbers, files

    def ids_are_text(self, column: str) -> bool:
        """See ArrowTable: of texts, whether one field is no whole number."""
        return column not in self._whole

    def ids(self, column: str, *, as_text: bool, chunk: int = 0) -> Iterator[Any]:
        """One of the columns of texts as ids; see ArrowTable. As numbers, other fields are null."""
        for batch in self.batches([column], ID_ROWS, chunk):
            ids = batch.column(0)
            if not as_text:
                no_id = self._pa.scalar(None, self._pa.large_string())
                ids = self._compute.if_else(self._are_whole(ids), ids, no_id).cast(self._pa.int64())
            yield ids

    def where(self, row: int) -> str:
        """The file and the line in it, for messages. Reads the file up to this line."""
        number = sum(start <= row for start in self._file_starts) - 1
        path, row = self._sources[number], row - self._file_starts[number]
        limit = csv.field_size_limit(_BLOCK_BYTES)
        try:
            with open_text(path) as file, contextlib.suppress(csv.Error):
                lines, line = csv.reader(file, delimiter=_delimiter(path)), 1
                for fields in lines:
                    is_row = bool(fields) or len(self._names) == 1
                    if is_row and row < 0:
                        return f"{path}, line {line}"
                    row -= is_row
                    line = lines.line_num + 1
        finally:
            csv.field_size_limit(limit)
        return str(path)

    def _are_whole(self, ids: Any) -> Any:
        """Whether each text is a whole number that int64 holds."""
        compute = self._compute
        digits = compute.utf8_ltrim(ids, "-")
        fits = compute.or_(
            compute.less(compute.utf8_length(digits), len(_MOST)), compute.less_equal(digits, _MOST)
        )
        fits = compute.or_(fits, compute.equal(ids, _LEAST))
        return compute.and_(compute.match_substring_regex(ids, _WHOLE), fits)

    def _kinds(self) -> dict[str, str]:
        """The type of each column with a name: "int", "float", "bool", "text" or "id", over all files."""
        names, row = [name for name in self._names if not name.startswith(_UNNAMED)], 0
        possible = {name: ["id"] if name in self._texts else ["int", "float", "bool"] for name in names}
        for file in self._sources:
            for batch in self._batches(file, names):
                for name in names:
                    possible[name] = self._kinds_of(name, batch.column(name), possible[name], row)
                row += batch.num_rows
        kinds = {name: (of_column or ["text"])[0] for name, of_column in possible.items()}
        kinds |= {name: "float" for name in self._gaps if kinds[name] == "int"}
        groups: dict[str, list[str]] = {}
        for name in kinds:
            if (numbered := NUMBERED.fullmatch(name)) and kinds[name] in ("int", "float"):
                groups.setdefault(numbered[1], []).append(name)
        for names in groups.values():  # x_0, x_1, … are one table
            if any(kinds[name] == "float" for name in names):
                kinds |= dict.fromkeys(names, "float")
        return kinds

    def _kinds_of(self, name: str, fields: Any, before: list[str], row: int) -> list[str]:
        """The types that a column may have after these fields, from `row` on, of those before; []: text."""
        if name in self._texts:
            if name in self._whole and self._compute.all(self._are_whole(fields)).as_py() is False:
                self._whole.discard(name)
            return before
        if fields.null_count:
            self._gaps.add(name)
        kinds = [kind for kind in before if self._parsed(fields, kind) is not None]
        if before and not kinds:
            kind = "float" if "float" in before else "bool"
            at = next(i for i in range(len(fields)) if self._parsed(fields.slice(i, 1), kind) is None)
            self._not_numbers[name] = (row + at, fields[at].as_py())
        return kinds

    def _parsed(self, fields: Any, kind: str) -> Any | None:
        """Fields as a type, or None if one is not of it."""
        wrong = {"int": "[xX]", "bool": "^.$"}.get(kind)  # Arrow takes 0x10; 0 and 1 are whole numbers
        if wrong and self._compute.any(self._compute.match_substring_regex(fields, wrong)).as_py():
            return None
        try:
            return fields.cast({"int": "int64", "float": "float64", "bool": "bool"}[kind])
        except self._pa.ArrowInvalid:
            return None

    def _write(self, file: Path, target: Path, kinds: dict[str, str]) -> None:
        """Parse the columns that are used to a Parquet file."""
        types = {"int": self._pa.int64(), "float": self._pa.float64(), "bool": self._pa.bool_()}
        types["id"] = self._pa.large_string()
        used = {name: types[kind] for name, kind in kinds.items() if kind != "text"}
        schema = self._pa.schema(list(used.items()))
        plain: dict[str, Any] = {"compression": "NONE", "use_dictionary": False, "write_statistics": False}
        with self._pa.parquet.ParquetWriter(target, schema, **plain) as writer:
            for batch in self._batches(file, list(used)):
                for name, kind in kinds.items():
                    if kind == "float":
                        self._refuse_rounding(file, name, batch.column(name))
                columns = [batch.column(name).cast(kind) for name, kind in used.items()]
                writer.write_batch(self._pa.record_batch(columns, schema=schema))

    def _refuse_rounding(self, file: Path, name: str, fields: Any) -> None:
        """Raise FormatError for a whole number that is another one as float64."""
        long = fields.filter(self._compute.match_substring_regex(fields, _LONG))
        for text in long.to_pylist():
            if int(float(text)) != int(text):
                raise FormatError(
                    f"{file}: {shown(text)} in column {name!r}, which is float64, is another number there"
                )

    def _batches(self, file: Path, columns: Sequence[str]) -> Iterator[Any]:
        """All fields of these columns as text, in batches."""
        names, line_count = _header(file)
        if names != self._names:
            raise FormatError(f"{file} has different columns than {self._sources[0]}")
        with open_file(file) as opened:
            with parsing(file, _FAULT), at_most(self._limit):
                packing = "gzip" if file.suffix == ".gz" else None
                reader = self._pa.csv.open_csv(
                    self._pa.input_stream(opened, compression=packing),
                    self._pa.csv.ReadOptions(
                        use_threads=False, block_size=_BLOCK_BYTES, column_names=names, skip_rows=line_count
                    ),
                    self._pa.csv.ParseOptions(
                        delimiter=_delimiter(file),
                        newlines_in_values=True,
                        ignore_empty_lines=len(names) > 1,  # else it is an empty field
                    ),
                    self._pa.csv.ConvertOptions(
                        column_types=dict.fromkeys(names, self._pa.large_string()),
                        include_columns=list(columns),
                        null_values=[""],
                        strings_can_be_null=True,
                    ),
                )
            while True:
                with parsing(file, _FAULT), at_most(self._limit):
                    batch = next(reader, None)
                if batch is None:
                    return
                yield batch
