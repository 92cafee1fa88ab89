"""ArrayFile: writes one `.npy` file from front to back, with its checksum. Called by the writers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gids import _core
from gids.store.dtypes import ARRAY_DTYPES
from gids.store.files import npy_header
from gids.store.manifest import ArrayEntry
from gids.write.sync import sync_files


class ArrayFile:
    """An array of known type and shape, appended in pieces. Use as a context manager."""

    def __init__(self, root: Path, path: str, dtype: str, shape: Sequence[int]) -> None:
        self._path, self._dtype, self._shape = path, dtype, tuple(shape)
        self._full = root / path
        self._full.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._full, "wb")  # noqa: SIM115 - see __exit__
        self._crc = 0
        self._left = math.prod(self._shape)
        self._write(np.frombuffer(npy_header(dtype, self._shape), np.uint8))

    def append(self, values: np.ndarray) -> None:
        """Append elements, converted to the array's type, which must represent them exactly."""
        values = np.ascontiguousarray(values, ARRAY_DTYPES[self._dtype])
        assert values.size <= self._left, f"{self._path}: {values.size - self._left} elements too many"
        self._left -= values.size
        if values.size:
            self._write(values.reshape(-1).view(np.uint8))

    def finish(self) -> ArrayEntry:
        """Sync the file and return its entry for the manifest."""
        assert self._left == 0, f"{self._path}: {self._left} elements missing"
        self._file.flush()
        sync_files([self._file.fileno()])
        self._file.close()
        return ArrayEntry(self._path, self._dtype, self._shape, self._crc)

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
