"""ArrayFile: writes one `.npy` file from front to back, with its checksum. Called by the writers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gids import _core
from gids.store.array_checks import file_crc32c
from gids.store.dtypes import ARRAY_DTYPES
from gids.store.files import npy_header
from gids.store.manifest import ArrayEntry
from gids.write.sync import sync_files


class ArrayFile:
    """An array that is appended in pieces. Use as a context manager.

    shape: None for one dimension of any length. Then the header is written again at the end, and the file
    is read once more for its checksum.
    """

    def __init__(self, root: Path, path: str, dtype: str, shape: Sequence[int] | None) -> None:
        self._path, self._dtype, self._shape = path, dtype, shape
        self._full = root / path
        self._full.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._full, "wb")  # noqa: SIM115 - see __exit__
        self._crc = self._count = 0
        self._header = npy_header(dtype, (0,) if shape is None else shape)
        self._write(np.frombuffer(self._header, np.uint8))

    def append(self, values: np.ndarray) -> None:
        """Append elements, converted to the array's type, which must represent them exactly."""
        values = np.ascontiguousarray(values, ARRAY_DTYPES[self._dtype])
        self._count += values.size
        if values.size:
            self._write(values.reshape(-1).view(np.uint8))

    def finish(self) -> ArrayEntry:
        """Sync the file and return its entry for the manifest."""
        shape = (self._count,) if self._shape is None else tuple(self._shape)
        assert self._count == math.prod(shape), f"{self._path}: {self._count} elements for {shape}"
        if self._shape is None:
            header = npy_header(self._dtype, shape)
            assert len(header) == len(self._header), "headers of one dimension have 128 bytes"
            self._file.seek(0)
            self._file.write(header)
            self._file.flush()
            self._crc = file_crc32c(self._full)
        self._file.flush()
        sync_files([self._file.fileno()])
        self._file.close()
        return ArrayEntry(self._path, self._dtype, shape, self._crc)

    def discard(self) -> None:
        """Remove the file instead."""
        self._file.close()
        self._full.unlink()

    def _write(self, data: np.ndarray) -> None:
        self._crc = _core.crc32c_extend(self._crc, data)
        self._file.write(data.data)

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
