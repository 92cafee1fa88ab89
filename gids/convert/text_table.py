"""Parses tables of numbers in text files (.csv, .tsv, .txt, gzipped or not) to a binary scratch file.

Called by the readers, which then read ranges from the scratch file. Memory holds one block only.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from gids.convert.damage import said_by, shown
from gids.convert.text_lines import open_text
from gids.errors import FormatError
from gids.store.rows import FileRows
from gids.write.space import check_space

MAX_WORDS_CHARS = 1 << 20  # in a file of names
_BLOCK_CHARS = 4 << 20
_MAX_IDLE_LINES = 1_000_000  # in a row without a number
_NOT_WHOLE = re.compile(r"[.eEnN]")  # as in 1.5, 1e3, nan, inf


def read_text(path: Path, scratch: Path, dtype: torch.dtype | None = None) -> FileRows:
    """The numbers of a text file as rows[lines, columns], in a file in scratch.

    Columns are separated by commas, tabs or spaces; `#` begins a comment; a first line of words is a header.
    dtype: default int64 if all numbers are whole, else float32. Raises FormatError for lines of another
    length, text that is not a number, a number that dtype cannot hold, and a damaged .gz file.
    """
    kinds = [dtype] if dtype is not None else [torch.int64, torch.float32]
    target = scratch / f"{zlib.crc32(str(path).encode()):08x}-{path.name}.bin"
    for kind in kinds:
        shape = _parse(path, target, kind, give_up=kind is not kinds[-1])
        if shape is not None:
            return FileRows(target, shape, kind)
    raise AssertionError("the last kind never gives up")


def _parse(path: Path, target: Path, dtype: torch.dtype, *, give_up: bool) -> tuple[int, int] | None:
    """Write the numbers. Returns their shape, or None if they are not whole and give_up is set."""
    kind = np.dtype(str(dtype).removeprefix("torch."))
    rows, columns = 0, 0
    with open(target, "wb") as out:
        for first, lines in _blocks_of_lines(path):
            if give_up and any(_NOT_WHOLE.search(line) for line in lines if _has_numbers(line)):
                return None
            values = _numbers(path, first, lines, kind)
            if columns not in (0, values.shape[1]):
                raise FormatError(
                    f"{path} has {values.shape[1]} columns from line {first} on, but {columns} before"
                )
            columns = values.shape[1]
            rows += len(values)
            check_space([(target.parent, values.nbytes)], [])
            out.write(values.data)
    if not rows:
        raise FormatError(f"{path} has no numbers")
    return rows, columns


def _numbers(path: Path, first: int, lines: list[str], dtype: np.dtype[np.generic]) -> np.ndarray:
    kept = [line for line in lines if _has_numbers(line)]
    delimiter = "," if "," in kept[0] else None
    try:
        return np.loadtxt(kept, dtype, comments="#", delimiter=delimiter, ndmin=2)
    except ValueError as error:
        where = _first_bad_line(lines, first, dtype, delimiter)
        raise FormatError(f"{path}, {where or f'lines from {first} on: {said_by(error)}'}") from None


def _first_bad_line(
    lines: list[str], first: int, dtype: np.dtype[np.generic], delimiter: str | None
) -> str | None:
    """A description of the first line with another number of columns or text that is not a number."""
    columns = 0
    for number, line in enumerate(lines, first):
        if not _has_numbers(line):
            continue
        fields = line.partition("#")[0].strip().split(delimiter)
        columns = columns or len(fields)
        if len(fields) != columns:
            return f"line {number}: {len(fields)} columns, but {columns} before"
        for field in fields:
            try:
                dtype.type(field.strip())
            except (ValueError, OverflowError):
                return f"line {number}: could not convert {shown(field.strip())} to {dtype}"
    return None


def _has_numbers(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _blocks_of_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number of the first line, lines) of each block that has a line with numbers."""
    number = numbers_until = 1
    with open_text(path) as file:
        while (line := file.readline()) and not _has_numbers(line):
            number += 1  # comments and empty lines before the header
            _check_idle(path, numbers_until, number)
        if _is_words(line):
            number += 1
        else:
            file.seek(0)
            number = 1
        while lines := file.readlines(_BLOCK_CHARS):
            if any(map(_has_numbers, lines)):
                yield number, lines
                numbers_until = number + len(lines)
            number += len(lines)
            _check_idle(path, numbers_until, number)


def _check_idle(path: Path, since: int, number: int) -> None:
    """Raise FormatError after too many empty lines: a small .gz file may have billions."""
    if number - since > _MAX_IDLE_LINES:
        raise FormatError(f"{path} has no numbers in lines {since} to {number - 1}; remove them")


def _is_words(line: str) -> bool:
    fields = [f for f in re.split(r"[\s,]+", line.strip()) if f]
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
