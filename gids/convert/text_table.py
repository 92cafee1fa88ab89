"""Parses tables of numbers in text files (.csv, .tsv, .txt, gzipped or not) to a binary scratch file.

Called by the readers, which then read ranges from the scratch file. Memory holds one block of lines.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import warnings
import zlib
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import torch

from gids.convert.edges import end_columns
from gids.convert.stream_rows import column_of
from gids.convert.untrusted import message_of, open_file, parsing, shown
from gids.errors import FormatError
from gids.store.rows import FileRows, Rows
from gids.write.files import check_space

MAX_LINE_CHARS = 4 << 20  # about 400,000 numbers
MAX_COLUMNS = 100  # of numbers of two types; a text may be read once for each
MAX_WORDS_CHARS = 1 << 20  # in a file of names
_BLOCK_CHARS = 4 << 20
_MAX_IDLE_LINES = 1_000_000  # in a row without a number
_QUOTED = re.compile(r'(?<![^\s,])"\s*([^",\s]*)\s*"(?![^\s,])')  # a whole field
_NOT_WHOLE = re.compile(r"[.eEnN]")  # as in 1.5, 1e3, nan, inf


class NotANumber(FormatError):
    """Text where a number must be."""


class _Fractions(FormatError):
    """Numbers with fractions in columns of whole numbers."""

    def __init__(self, message: str, columns: Collection[int]) -> None:
        super().__init__(message)
        self.columns = columns


def read_text(path: Path, scratch: Path, dtype: torch.dtype | None = None) -> FileRows:
    """The numbers of a text file as rows[lines, columns], in a file in scratch.

    Columns are separated by commas, tabs or spaces; numbers may be in double quotes; `#` begins a comment; a
    first line of words is a header. dtype: default int64 if all numbers are whole, else float32. Raises
    FormatError for lines of another length, text that is not a number, a number that dtype cannot hold, and
    a damaged .gz file.
    """
    target = _target(path, scratch)
    try:
        return _parsed_rows(path, target, dtype or torch.int64)
    except _Fractions:
        if dtype is not None:
            raise
    return _parsed_rows(path, target, torch.float32)


def read_columns(path: Path, scratch: Path) -> list[Rows]:
    """The columns of a text file, as read_text reads it: int64, or float64 if a column has fractions."""
    target, floats = _target(path, scratch), frozenset[int]()
    while True:
        try:
            shape = _parse(path, target, np.dtype(np.int64), floats)
            break
        except _Fractions as error:
            floats |= frozenset(error.columns)
    kinds = [torch.float64 if i in floats else torch.int64 for i in range(shape[1])]
    return [column_of(FileRows(target, shape, kind), i) for i, kind in enumerate(kinds)]


def read_pairs(path: Path, scratch: Path) -> FileRows:
    """The edges of a text file, int64[lines, 2], for formats without headers: sources are first.

    Raises FormatError for a header that says otherwise.
    """
    names, is_comment = header_of(path)
    if names and not is_comment and end_columns(names, f"the edges of {path}") != (0, 1):
        raise FormatError(f"{path} has the columns {', '.join(names)}; the first must be the sources")
    pairs = read_text(path, scratch, torch.int64)
    if pairs.shape[1] != 2:
        raise FormatError(f"{path} has {pairs.shape[1]} columns; edges must have 2")
    return pairs


def header_of(path: Path) -> tuple[list[str], bool]:
    """The names in the first line, or those in the comment before the first numbers; whether it is a comment.

    There may be none, and a name may be empty.
    """
    comment = ""
    lines = (line for _, block in _line_blocks(path) for line in block)
    for line in islice(lines, _MAX_IDLE_LINES):
        if _has_numbers(line):
            return (_fields(line), False) if _is_words(line) else (_fields(comment), True)
        comment = line.strip().lstrip("#") or comment
    return [], False


def _target(path: Path, scratch: Path) -> Path:
    return scratch / f"{zlib.crc32(str(path).encode()):08x}-{path.name}.bin"


def _parsed_rows(path: Path, target: Path, dtype: torch.dtype) -> FileRows:
    return FileRows(target, _parse(path, target, np.dtype(str(dtype).removeprefix("torch."))), dtype)


def _parse(
    path: Path, target: Path, dtype: np.dtype[np.generic], floats: Collection[int] = ()
) -> tuple[int, int]:
    """Write the numbers and return their shape. floats: columns that are float64, the others being int64.

    Raises _Fractions for columns of whole numbers with fractions.
    """
    rows, columns = 0, 0
    with open(target, "wb") as out:
        for first, lines in _blocks_of_lines(path):
            values = _numbers(path, first, lines, dtype, floats)
            if columns not in (0, values.shape[1]):
                raise FormatError(
                    f"{path} has {values.shape[1]} columns from line {first} on, but {columns} before"
                )
            columns = values.shape[1]
            rows += len(values)
            check_space([(target.parent, values.nbytes)])
            out.write(values.data)
    if not rows:
        raise FormatError(f"{path} has no numbers")
    return rows, columns


def _numbers(
    path: Path, first: int, lines: list[str], dtype: np.dtype[np.generic], floats: Collection[int]
) -> np.ndarray:
    kept = [_QUOTED.sub(r"\1", line) if '"' in line else line for line in lines if _has_numbers(line)]
    delimiter = "," if "," in kept[0].partition("#")[0] else None
    kinds = dtype
    if floats:
        columns = len(_fields(kept[0]))
        if columns > MAX_COLUMNS:
            raise FormatError(
                f"{path} has {columns} columns, some with fractions; the limit is {MAX_COLUMNS}"
            )
        kinds = np.dtype([(f"c{i}", np.float64 if i in floats else dtype) for i in range(columns)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # for "1.5" as a whole number, which becomes 1
            values = np.loadtxt(kept, kinds, comments="#", delimiter=delimiter, ndmin=1 if floats else 2)
    except (ValueError, DeprecationWarning) as error:
        raise _fault(path, first, lines, dtype, floats) or FormatError(
            f"{path}, lines from {first} on: {message_of(error)}"
        ) from None
    parts = [values[name] for name in values.dtype.names] if values.dtype.names else [values]
    is_infinite = any(np.isinf(part).any() for part in parts if part.dtype.kind == "f")  # also for 1e400
    if is_infinite and (fault := _fault(path, first, lines, dtype, floats)) is not None:
        raise fault
    return values.view(dtype).reshape(len(values), -1) if floats else values


def _fault(
    path: Path, first: int, lines: list[str], dtype: np.dtype[np.generic], floats: Collection[int]
) -> FormatError | None:
    """The error for the first line with another number of columns or a number that is not of its type."""
    columns = 0
    for number, line in enumerate(lines, first):
        if not _has_numbers(line):
            continue
        fields = _fields(line)
        columns = columns or len(fields)
        if len(fields) != columns:
            return FormatError(f"{path}, line {number}: {len(fields)} columns, but {columns} before")
        kinds = [np.dtype(np.float64) if i in floats else dtype for i in range(columns)]
        wrong = [i for i, field in enumerate(fields) if not _is_exact(field, kinds[i])]
        if wrong:
            column = wrong[0]
            fault = f"{path}, line {number}: could not convert {shown(fields[column])} to {kinds[column]}"
            are_fractions = all(kinds[i].kind == "i" and _is_fraction(fields[i]) for i in wrong)
            return _Fractions(fault, wrong) if are_fractions else NotANumber(fault)
    return None


def _is_fraction(field: str) -> bool:
    return _is_number(field) and _NOT_WHOLE.search(field) is not None


def _is_exact(field: str, kind: np.dtype[np.generic]) -> bool:
    """Whether a text is a number that is in the range of a type."""
    try:
        with np.errstate(over="ignore"):
            value = kind.type(field)
    except (ValueError, OverflowError):
        return False
    return bool(np.isfinite(value)) or "n" in field.lower()  # nan and inf, but not 1e400


def _fields(line: str) -> list[str]:
    """The fields of a line, without quotes and comment."""
    text = line.partition("#")[0].strip()
    return [field.strip().strip('"') for field in text.split("," if "," in text else None)]


def _has_numbers(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _blocks_of_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number of the first line, lines) of each block that has a line with numbers. Empties the header."""
    numbers_until = 1
    is_start = True
    for number, lines in _line_blocks(path):
        first = next((i for i, line in enumerate(lines) if _has_numbers(line)), None)
        if first is not None and is_start:
            is_start = False
            lines[first] = "" if _is_words(lines[first]) else lines[first]
        end = number + len(lines)
        if any(map(_has_numbers, lines)):
            yield number, lines
            numbers_until = end
        if end - numbers_until > _MAX_IDLE_LINES:  # a small .gz file may have billions
            raise FormatError(f"{path} has no numbers in lines {numbers_until} to {end - 1}; remove them")


def _is_words(line: str) -> bool:
    fields = [field for field in _fields(line) if field]
    return bool(fields) and not any(map(_is_number, fields))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def first_words(path: Path) -> list[list[str]]:
    """The comma-separated fields of each line of a small text file. Raises FormatError."""
    with open_text(path) as file:
        text = file.read(MAX_WORDS_CHARS + 1)
    if len(text) > MAX_WORDS_CHARS:
        raise FormatError(f"{path} has more than {MAX_WORDS_CHARS} characters, the limit for a file of names")
    return [line.strip().split(",") for line in text.splitlines() if line.strip()]


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[io.TextIOWrapper]:
    """Open a text to read. Raises FormatError, also later, for a damaged .gz file, and bytes that are not
    text."""
    with open_file(path) as file, parsing(path, "is damaged or truncated"):
        data = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        try:
            yield io.TextIOWrapper(cast(io.BufferedReader, data), encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise FormatError(f"{path} is not text in UTF-8") from None


def _line_blocks(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number of the first line, lines) of each block of a text. Raises FormatError for a long line."""
    number = 1
    with open_text(path) as file:
        while text := file.read(_BLOCK_CHARS):
            text += file.readline(MAX_LINE_CHARS)
            lines = io.StringIO(text).readlines()
            long = next((i for i, line in enumerate(lines) if len(line) >= MAX_LINE_CHARS), None)
            if long is not None:
                raise FormatError(
                    f"{path}, line {number + long}: longer than {MAX_LINE_CHARS} characters, the limit for a "
                    "line"
                )
            yield number, lines
            number += len(lines)
