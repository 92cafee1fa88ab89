"""Parses tables of numbers in text files (.csv, .tsv, .txt, gzipped or not) to a binary scratch file.

Called by the readers, which then read ranges from the scratch file. Memory holds one block of lines.
"""

from __future__ import annotations

import contextlib
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from gids.convert.damage import message_of, parsing, shown
from gids.convert.source_file import open_file
from gids.errors import FormatError
from gids.store.rows import FileRows
from gids.write.space import check_space

MAX_LINE_BYTES = 4 << 20  # about 400,000 numbers
MAX_WORDS_CHARS = 1 << 20  # in a file of names
_PIECE_BYTES = 1 << 16
_PACKED_BYTES = 1 << 15
_ZERO_BYTES = 1 << 20
_GZIP = 16 + zlib.MAX_WBITS
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
        raise FormatError(f"{path}, {where or f'lines from {first} on: {message_of(error)}'}") from None


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
    """(number of the first line, lines) of each block that has a line with numbers. Empties the header."""
    number = numbers_until = 1
    is_start = True
    with open_text(path) as file:
        while lines := file.readlines(_BLOCK_CHARS):
            first = next((i for i, line in enumerate(lines) if _has_numbers(line)), None)
            if first is not None and is_start:
                is_start = False
                lines[first] = "" if _is_words(lines[first]) else lines[first]
            if any(map(_has_numbers, lines)):
                yield number, lines
                numbers_until = number + len(lines)
            number += len(lines)
            if number - numbers_until > _MAX_IDLE_LINES:  # a small .gz file may have billions
                raise FormatError(
                    f"{path} has no numbers in lines {numbers_until} to {number - 1}; remove them"
                )


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


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[io.TextIOWrapper]:
    """Open a text to read. Raises FormatError, also later, for a line of more than MAX_LINE_BYTES, a damaged
    .gz file, and bytes that are not text."""
    with open_file(path) as file, parsing(path, "is damaged or truncated"):
        lines = _BoundedLines(_Gunzip(file) if path.suffix == ".gz" else file, path)
        try:
            yield io.TextIOWrapper(cast(io.BufferedReader, lines), encoding="ascii")
        except UnicodeDecodeError:
            raise FormatError(f"{path} is not text") from None


class _BoundedLines(io.BufferedIOBase):
    """The bytes of a text in bounded pieces. Raises FormatError within a line that is too long."""

    def __init__(self, file: BinaryIO | _Gunzip, path: Path) -> None:
        self._file, self._path = file, path
        self._line, self._held = 1, 0  # of the last line that was read: its number, bytes so far

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1, /) -> bytes:
        data = self._file.read(_PIECE_BYTES if size < 0 else min(size, _PIECE_BYTES))
        end = max(data.rfind(b"\n"), data.rfind(b"\r"))
        self._line += data.count(b"\n")
        self._held = self._held + len(data) if end < 0 else len(data) - end - 1
        if self._held > MAX_LINE_BYTES:
            raise FormatError(
                f"{self._path}, line {self._line}: longer than {MAX_LINE_BYTES} bytes, the limit for a line"
            )
        return data

    def read(self, size: int | None = -1, /) -> bytes:
        return self.read1(-1 if size is None else size)


class _Gunzip:
    """The content of a .gz file. Unlike Python's reader, it skips zeros at the end in large pieces."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._packed = file, b""
        self._state = zlib.decompressobj(_GZIP)

    def read(self, size: int) -> bytes:
        """1 to `size` bytes, or none at the end. Raises zlib.error and EOFError."""
        while True:
            if self._state.eof and not self._begin_member():
                return b""
            if not self._packed:
                self._packed = self._file.read(_PACKED_BYTES)
                if not self._packed:
                    raise EOFError("the compressed file ended early")
            data = self._state.decompress(self._packed, size)
            self._packed = self._state.unused_data if self._state.eof else self._state.unconsumed_tail
            if data:
                return data

    def _begin_member(self) -> bool:
        """Whether another member follows, perhaps after zeros."""
        while self._packed == bytes(len(self._packed)):
            self._packed = self._file.read(_ZERO_BYTES)
            if not self._packed:
                return False
        self._packed = self._packed.lstrip(b"\0")
        self._state = zlib.decompressobj(_GZIP)
        return True
