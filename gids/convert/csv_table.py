"""CsvTable: the columns of CSV files, parsed once to Arrow files in scratch. Called by readers/tables.py.

pyarrow parses. A first pass finds the type of every column, over all files of a table; a second one writes
the columns that are used. Memory grows with the length of a row only: pyarrow reads 32 blocks ahead, so
blocks are small, and are joined to batches. There is no other limit: where memory ends, pyarrow's threads end
the process, or wait for ever.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import math
import os
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from gids.convert.arrow_table import ID_ROWS, ArrowTable, each_within, import_pyarrow
from gids.convert.text_table import MAX_LINE_CHARS, open_text
from gids.convert.untrusted import open_file, parsing, shown
from gids.errors import FormatError

CSV_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_MIN_BLOCK_BYTES = 1 << 20  # that pyarrow parses at a time
_MAX_BLOCK_BYTES = 8 << 20  # longer than a line of MAX_LINE_CHARS may be
_COLUMN_BYTES = 1 << 10  # of a block, for each column: pyarrow needs 20 µs for a column of a block
_BATCH_BYTES = 16 << 20  # gids needs more
_ARRAY_BYTES = 512  # of memory for a column of a block, beside its text
_KEPT_BYTES = 32 << 20  # at most, of what the columns of a block do not use
_MMAP_THRESHOLD = -3  # of mallopt
_USUAL_THRESHOLD = 32 << 20  # up to which it grows by itself
_FAULT = "cannot be parsed as CSV"
_WHOLE = r"^(0|-?[1-9][0-9]{0,18})$"
"""A whole number as an id: as it would be printed, so that equal numbers are equal text."""
_LEAST = str(-(1 << 63))
_MOST = str((1 << 63) - 1)
_UNNAMED = "(unnamed)"
_MAX_IDLE_LINES = 1_000_000  # before the names
_MAX_COLUMNS = 100_000
_LONG = r"^[+-]?[0-9]{16,}$"  # a whole number that float64 may not hold
_TYPES = {"int": "int64", "float": "float64", "bool": "bool", "id": "large_string"}
NUMBERED = re.compile(r"(.+)_\d+")  # x_0, x_1, …: columns of one table


class _LongRow(FormatError):
    """A row that is longer than a block."""


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


@contextlib.contextmanager
def _returning_unused(column_count: int) -> Iterator[None]:
    """Let the C library return to the system what pyarrow reserves for a column and does not use.

    pyarrow reserves the size of a block for each column of text. By default malloc soon takes such memory
    from the heap, where 1000 columns of a block of 1 MB keep 5 GB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mallopt(_MMAP_THRESHOLD, max(8 << 10, min(_KEPT_BYTES // column_count, _MAX_BLOCK_BYTES)))
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _USUAL_THRESHOLD)


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
        self._files, self._texts = files, frozenset(texts)
        self._names = csv_header(files[0])
        column_count = len(self._names)
        self._block_bytes = max(_MIN_BLOCK_BYTES, min(_COLUMN_BYTES * column_count, _MAX_BLOCK_BYTES // 2))
        scratch.mkdir()
        parsed = [scratch / f"{number}.arrow" for number in range(len(files))]
        with _returning_unused(column_count):
            kinds = self._kinds()
            for file, target in zip(files, parsed, strict=True):
                self._write(file, target, kinds)
        super().__init__(parsed, memory_bytes)
        self._files, self.text_at = files, self._not_numbers
        self.types |= {name: self._pa.string() for name, kind in kinds.items() if kind == "text"}
        self.types |= {name: self._pa.null() for name in self._names if name not in kinds}

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
        number = bisect_right(self._file_starts, row) - 1
        path = self._files[number]
        line, _ = next(islice(self._rows(path), row - self._file_starts[number], None), (0, []))
        return f"{path}, line {line}" if line else str(path)

    def _rows(self, path: Path) -> Iterator[tuple[int, list[str]]]:
        """(line, fields) of each row, read one by one, for messages. Ends early where Python sees no CSV."""
        limit = csv.field_size_limit(_MAX_BLOCK_BYTES)
        try:
            with open_text(path) as file, contextlib.suppress(csv.Error):
                lines, line = csv.reader(file, delimiter=_delimiter(path)), 1
                is_header = True
                for fields in lines:
                    if fields or (len(self._names) == 1 and not is_header):
                        if not is_header:
                            yield line, fields
                        is_header = False
                    line = lines.line_num + 1
        finally:
            csv.field_size_limit(limit)

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
        names = [name for name in self._names if not name.startswith(_UNNAMED)]
        while True:
            try:
                possible = self._possible_kinds(names)
                break
            except _LongRow:
                if self._block_bytes >= _MAX_BLOCK_BYTES:
                    raise
            self._block_bytes *= 2
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

    def _possible_kinds(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The types that each column may have, the first one the best; []: text."""
        self._whole = set(self._texts)  # those in which all fields are whole numbers
        self._gaps: set[str] = set()  # columns with an empty field
        self._not_numbers: dict[str, tuple[int, str]] = {}
        possible = {name: ["id"] if name in self._texts else ["int", "float", "bool"] for name in names}
        row = 0
        for file in self._files:
            for batch in self._batches(file, names):
                for name in names:
                    possible[name] = self._kinds_of(name, batch.column(name), possible[name], row)
                row += batch.num_rows
        return possible

    def _kinds_of(self, name: str, fields: Any, before: list[str], row: int) -> list[str]:
        """The types that a column may have after these fields, from `row` on, of those before; []: text."""
        if name in self._texts:
            if name in self._whole and self._compute.all(self._are_whole(fields)).as_py() is False:
                self._whole.discard(name)
            return before
        if fields.null_count:
            self._gaps.add(name)
        kinds = [kind for kind in before if self._are(kind, fields)]
        if before and not kinds:
            kind = "float" if "float" in before else "bool"
            at = next(i for i in range(len(fields)) if not self._are(kind, fields.slice(i, 1)))
            self._not_numbers[name] = (row + at, fields[at].as_py())
        return kinds

    def _are(self, kind: str, fields: Any) -> bool:
        """Whether all fields are of a type."""
        wrong = {"int": "[xX]", "bool": "^.$"}.get(kind)  # Arrow takes 0x10; 0 and 1 are whole numbers
        if wrong and self._compute.any(self._compute.match_substring_regex(fields, wrong)).as_py():
            return False
        with contextlib.suppress(self._pa.ArrowInvalid):
            fields.cast(_TYPES[kind])
            return True
        return False

    def _write(self, file: Path, target: Path, kinds: dict[str, str]) -> None:
        """Parse the columns that are used to an Arrow file."""
        used = {name: _TYPES[kind] for name, kind in kinds.items() if kind != "text"}
        schema = self._pa.schema(list(used.items()))
        with (
            self._pa.OSFile(os.fsencode(target), "wb") as sink,
            self._pa.ipc.new_file(sink, schema) as writer,
        ):
            for batch in self._batches(file, list(used)):
                columns = [batch.column(name).cast(kind) for name, kind in used.items()]
                for name, numbers in zip(used, columns, strict=True):
                    if kinds[name] == "float":
                        self._refuse_rounding(file, name, batch.column(name), numbers)
                writer.write_batch(self._pa.record_batch(columns, schema=schema))

    def _refuse_rounding(self, file: Path, name: str, fields: Any, numbers: Any) -> None:
        """Raise FormatError for a whole number that is another one as float64, and for 1e400."""
        compute = self._compute
        long = compute.match_substring_regex(fields, _LONG)
        beyond = compute.and_(compute.is_inf(numbers), compute.match_substring_regex(fields, "[0-9]"))
        for text in fields.filter(compute.or_(long, beyond)).to_pylist():
            if math.isinf(float(text)) or int(float(text)) != int(text):
                raise FormatError(
                    f"{file}: {shown(text)} in column {name!r}, which is float64, is another number there"
                )

    def _batches(self, file: Path, columns: Sequence[str]) -> Iterator[Any]:
        """All fields of these columns as text, in batches."""
        names, line_count = _header(file)
        if names != self._names:
            raise FormatError(f"{file} has different columns than {self._files[0]}")
        held, held_bytes = list[Any](), 0
        for block in chain(self._blocks(file, columns, line_count), [None]):
            if block is not None:
                held.append(block)
                held_bytes += block.nbytes + _ARRAY_BYTES * len(columns)
            if held and (block is None or held_bytes >= _BATCH_BYTES):
                yield from self._pa.Table.from_batches(held).combine_chunks().to_batches()
                held, held_bytes = [], 0

    def _blocks(self, file: Path, columns: Sequence[str], line_count: int) -> Iterator[Any]:
        """The same in the blocks that pyarrow parses. Raises _LongRow for a row that is longer."""
        arrow_csv, names = self._pa.csv, self._names
        with self._parsing(file), open_file(file) as opened:
            # Not the file itself: a thread of pyarrow would call Python, and may do so as Python ends.
            stream = self._pa.input_stream(
                f"/proc/self/fd/{opened.fileno()}", compression="gzip" if file.suffix == ".gz" else None
            )
            reader = arrow_csv.open_csv(
                stream,
                arrow_csv.ReadOptions(
                    use_threads=False,
                    block_size=self._block_bytes,
                    column_names=names,
                    skip_rows=line_count,
                ),
                arrow_csv.ParseOptions(
                    delimiter=_delimiter(file),
                    newlines_in_values=True,
                    ignore_empty_lines=len(names) > 1,  # else it is an empty field
                ),
                arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(names, self._pa.large_string()),
                    include_columns=list(columns),
                    null_values=[""],
                    strings_can_be_null=True,
                ),
                self._pa.system_memory_pool(),
            )
        yield from each_within(partial(self._parsing, file), reader)

    @contextlib.contextmanager
    def _parsing(self, file: Path) -> Iterator[None]:
        """Turn the errors of pyarrow into FormatError."""
        with parsing(file, _FAULT):
            try:
                yield
            except self._pa.ArrowInvalid as error:
                if "block size" in str(error):
                    raise _LongRow(
                        f"{file} {_FAULT}: a row has more than {_MAX_BLOCK_BYTES} bytes, the limit"
                    ) from None
                if "columns, got" in str(error):
                    self._refuse_lengths(file)
                raise

    def _refuse_lengths(self, file: Path) -> None:
        """Raise FormatError for the first row with more or fewer fields than the first line."""
        for line, fields in self._rows(file):
            if len(fields) != len(self._names):
                raise FormatError(
                    f"{file}, line {line}: {len(fields)} field{'s' * (len(fields) != 1)}, but the first "
                    f"line has the names of {len(self._names)} columns"
                ) from None
