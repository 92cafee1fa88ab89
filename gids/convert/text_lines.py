"""Reads lines of bounded length from a text file, gzipped or not. Called by text_table."""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from gids.convert.damage import parsing
from gids.convert.source_file import open_file
from gids.errors import FormatError

MAX_LINE_BYTES = 4 << 20  # about 400,000 numbers
_PIECE_BYTES = 1 << 16
_PACKED_BYTES = 1 << 15
_ZERO_BYTES = 1 << 20
_GZIP = 16 + zlib.MAX_WBITS


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

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        assert offset == whence == 0, "a text is read again from its start only"
        self._line, self._held = 1, 0
        return self._file.seek(0)

    def tell(self) -> int:
        return 0  # TextIOWrapper asks at the start only

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
        self._file = file
        self.seek(0)

    def seek(self, offset: int) -> int:
        self._packed = b""
        self._state = zlib.decompressobj(_GZIP)
        return self._file.seek(offset)

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
