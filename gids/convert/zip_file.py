"""Zip files of a source: opened with a bound on their directory. Called by array_files and torch_file."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from gids.convert.damage import parsing, shown
from gids.convert.source_file import open_file
from gids.errors import FormatError

MAX_DIRECTORY_BYTES = 8 << 20  # about 100,000 members, which take 100 MB of memory when listed


@contextlib.contextmanager
def open_zip(path: Path, fault: str) -> Iterator[zipfile.ZipFile]:
    """A zip file to read. fault: "is not a valid .npz file". Raises FormatError, also for what fails within.

    Two members of one name are refused.
    """
    with open_file(path) as file, parsing(path, fault):
        with zipfile.ZipFile(cast(BinaryIO, _BoundedReads(file, path))) as archive:
            names = set()
            for name in archive.namelist():
                if name in names:
                    raise FormatError(f"{path} has two members called {shown(name)}")
                names.add(name)
            yield archive


class _BoundedReads(io.BufferedIOBase):
    """A file of which no read takes more than a zip file's directory may have."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._file.read(
            MAX_DIRECTORY_BYTES + 1 if size is None or size < 0 else min(size, MAX_DIRECTORY_BYTES + 1)
        )
        if len(data) > MAX_DIRECTORY_BYTES:
            raise FormatError(
                f"{self._path} has a zip directory of more than {MAX_DIRECTORY_BYTES} bytes: "
                "it has too many members, or is damaged"
            )
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True
