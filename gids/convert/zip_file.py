"""Opens zip files with a limit for their directory. Called by array_files, scipy_sparse and torch_file."""

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

MAX_DIRECTORY_BYTES = 8 << 20  # about 100,000 members, which need 100 MB of memory


@contextlib.contextmanager
def open_zip(path: Path, fault: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip file to read. fault: such as "is not a valid .npz file".

    Raises FormatError for damage, also within the block, and for two members of one name.
    """
    with open_file(path) as file, parsing(path, fault):
        with zipfile.ZipFile(cast(BinaryIO, _BoundedReads(file, path))) as archive:
            names = set()
            for name in archive.namelist():
                if name in names:
                    raise FormatError(f"{path} has two members {shown(name)}")
                names.add(name)
            yield archive


class _BoundedReads(io.BufferedIOBase):
    """A file with a limit for each read: the size of a zip file's directory."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._file.read(
            MAX_DIRECTORY_BYTES + 1 if size is None or size < 0 else min(size, MAX_DIRECTORY_BYTES + 1)
        )
        if len(data) > MAX_DIRECTORY_BYTES:
            raise FormatError(
                f"{self._path} has too many members or is damaged: its zip directory has more than "
                f"{MAX_DIRECTORY_BYTES} bytes"
            )
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True
