"""Parses tables of numbers in text files (.csv, .tsv, .txt, gzipped or not) to a binary scratch file.

Called by the readers, which then read ranges from the scratch file. Memory holds one block of lines.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import warnings
import zlib
from collections.abc import Collection, Iterator
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
_MAX_IDLE_LINES = 1_000_000  # in blocks without a number
_QUOTED = re.compile(r'(?<![^\s,])"\s*([^",\s]*)\s*"(?![^\s,])')  # a whole field
_WHOLE = re.compile(r"[+-]?[0-9]+")
_MOST_EXACT = 2.0**53  # beyond, float64 does not hold all whole numbers
_NOT_WHOLE = re.compile(r"[.eEnN]")  # as in 1.5, 1e3, nan, inf


class NotANumber(FormatError):
    """Text where a number must be."""


class _Fractions(FormatError):
    """Numbers with fractions in columns of whole numbers."""

    def __init__(self, message: str, columns: Collection[int]) -> None:
        super().__init__(message)
        self.columns = columns


def read_text(path: Path, scratch: Path, dtype: torch.dtype | None = None, *, columns: int = 0) -> FileRows:
    """The numbers of a text file as rows[lines, columns], in a file in scratch.

    Columns are separated by commas, tabs or spaces; numbers may be in double quotes; `#` begins a comment; a
    first line of words is a header. dtype: default int64 if all numbers are whole, else float32. columns: of
    a file without numbers; 0: it is refused. Raises FormatError for lines of another length, text that is not
    a number, a number that dtype cannot hold, and a damaged .gz file.
    """
    try:
        kind = dtype or torch.int64
        target, shape = _parse(path, scratch, np.dtype(str(kind).removeprefix("torch.")), default=columns)
    except _Fractions:
        if dtype is not None:
            raise
        return read_text(path, scratch, torch.float32)
    return FileRows(target, shape, kind)


def read_columns(path: Path, scratch: Path) -> list[Rows]:
    """The columns of a text file, as read_text reads it: int64, or float64 if a column has fractions."""
    floats: set[int] = set()
    while True:
        try:
            target, shape = _parse(path, scratch, np.dtype(np.int64), floats)
            break
        except _Fractions as error:
            floats.update(error.columns)
    kinds = [torch.float64 if i in floats else torch.int64 for i in range(shape[1])]
    return [column_of(FileRows(target, shape, kind), i) for i, kind in enumerate(kinds)]


def read_pairs(path: Path, scratch: Path) -> FileRows:
    """The edges of a text file, int64[lines, 2], for formats without headers: sources are first.

    Raises FormatError for a header that says otherwise.
    """
    names = header_of(path)
    if names and end_columns(names, f"the edges of {path}") != (0, 1):
        raise FormatError(f"{path} has the columns {', '.join(names)}; the first must be the sources")
    pairs = read_text(path, scratch, torch.int64, columns=2)
    if pairs.shape[1] != 2:
        raise FormatError(f"{path} has {pairs.shape[1]} columns; edges must have 2")
    return pairs


def header_of(path: Path) -> list[str]:
    """The names in the first line, or in the comment before the first numbers if it names both ends of edges.

    There may be none, and a name may be empty.
    """
    comment = ""
    for line in (line for _, lines in _line_blocks(path) for line in lines):
        if _is_words(line):
            return _fields(line)
        if _has_numbers(line):
            names = _fields(comment)
            with contextlib.suppress(FormatError):
                if len(names) == len(_fields(line)) and end_columns(names, ""):
                    return names
            break
        comment = line.strip().lstrip("#") or comment
    return []


def _parse(
    path: Path, scratch: Path, dtype: np.dtype[np.generic], floats: Collection[int] = (), default: int = 0
) -> tuple[Path, tuple[int, int]]:
    """Write the numbers to a file. Returns it, and their shape. floats: columns that are float64. default:
    columns of a text without numbers; 0: it is refused.

    Raises _Fractions for columns of whole numbers with fractions.
    """
    rows, columns, is_start = 0, 0, True
    target = scratch / f"{zlib.crc32(os.fsencode(path)):08x}-{path.name}.bin"
    with open(target, "wb") as out:
        for first, lines in _line_blocks(path):
            if is_start and (header := next(filter(_has_numbers, lines), "")):
                is_start = False
                lines[lines.index(header)] = "" if _is_words(header) else header
            if not any(map(_has_numbers, lines)):
                continue
            values = _numbers(path, first, lines, dtype, floats)
            if columns not in (0, values.shape[1]):
                raise FormatError(
                    f"{path} has {values.shape[1]} columns from line {first} on, but {columns} before"
                )
            columns = values.shape[1]
            rows += len(values)
            check_space([(target.parent, values.nbytes)])
            out.write(values.data)
    if not (columns := columns or default):
        raise FormatError(f"{path} has no numbers")
    return target, (rows, columns)


def _numbers(
    path: Path, first: int, lines: list[str], dtype: np.dtype[np.generic], floats: Collection[int]
) -> np.ndarray:
    kept = [_QUOTED.sub(r"\1", line) if '"' in line else line for line in filter(_has_numbers, lines)]
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
    is_large = any((abs(part) >= _MOST_EXACT).any() for part in parts if part.dtype == np.float64)
    is_infinite = any(np.isinf(part).any() for part in parts if part.dtype.kind == "f")  # also for 1e400
    if (is_large or is_infinite) and (fault := _fault(path, first, lines, dtype, floats)) is not None:
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
        if wrong := [i for i, field in enumerate(fields) if not _is_exact(field, kinds[i])]:
            at = wrong[0]
            fault = f"{path}, line {number}: could not convert {shown(fields[at])} to {kinds[at]}"
            are_fractions = all(
                kinds[i].kind == "i" and _is_number(fields[i]) and _NOT_WHOLE.search(fields[i]) for i in wrong
            )
            if are_fractions:
                return _Fractions(fault, wrong)
            if kinds[at].kind == "f" and _is_number(fields[at]):
                return FormatError(f"{path}, line {number}: {kinds[at]} cannot hold {fields[at]}")
            return NotANumber(fault)
    return None


def _is_exact(field: str, kind: np.dtype[np.generic]) -> bool:
    """Whether a text is a number that is in the range of a type."""
    try:
        with np.errstate(over="ignore"):
            value = kind.type(field)
        if kind == np.float64 and _WHOLE.fullmatch(field):
            return int(value) == int(field)
    except (ValueError, OverflowError):
        return False
    return bool(np.isfinite(value)) or "n" in field.lower()  # nan and inf, but not 1e400


def _fields(line: str) -> list[str]:
    """The fields of a line, without quotes and comment."""
    text = line.partition("#")[0].strip()
    return [field.strip().strip('"') for field in text.split("," if "," in text else None)]


def _has_numbers(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


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
    """(number of the first line, lines) of each block of a text.

    Raises FormatError for a long line, and for many lines without a number: a small .gz file may have
    billions.
    """
    number = numbers_until = 1
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
            if any(map(_has_numbers, lines)):
                numbers_until = number
            elif number - numbers_until > _MAX_IDLE_LINES:
                raise FormatError(
                    f"{path} has no numbers in lines {numbers_until} to {number - 1}; remove them"
                )
