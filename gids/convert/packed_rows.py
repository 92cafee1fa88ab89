"""PackedRows: an array in a deflated member of a zip file, read as a stream. Called by array_files."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gids.convert.damage import parsing, shortened
from gids.convert.source_file import open_file
from gids.convert.stream_rows import StreamRows
from gids.errors import FormatError
from gids.store.dtypes import make_bools_proper

_PIECE_BYTES = 2 << 20


@dataclass(frozen=True)
class PackedMember:
    """A deflated member, whose packed bytes begin at `start` of the file."""

    path: Path
    info: zipfile.ZipInfo
    start: int

    def pieces(self, position: int) -> Iterator[bytes]:
        """The member's bytes from a position on. Raises FormatError for damage, and for a wrong checksum."""
        fault = f"is damaged in its member {shortened(self.info.filename)}"
        with open_file(self.path) as file:
            file.seek(self.start)
            with parsing(self.path, fault):
                packed = zipfile.ZipExtFile(file, "r", self.info)
                packed.seek(position)
            while position < self.info.file_size:
                with parsing(self.path, fault):
                    piece = packed.read(_PIECE_BYTES)
                if not piece:
                    raise FormatError(f"{self.path} {fault}: it has less than {self.info.file_size} bytes")
                position += len(piece)
                os.posix_fadvise(file.fileno(), self.start, file.tell() - self.start, os.POSIX_FADV_DONTNEED)
                yield piece


class PackedRows(StreamRows):
    """Rows of a C-order array from byte `offset` of a packed member on."""

    def __init__(
        self,
        member: PackedMember,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        offset: int,
        byte_swapped: bool = False,
    ) -> None:
        self._member, self._offset, self._byte_swapped = member, offset, byte_swapped
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        super().__init__(shape, dtype, lambda row: (row, self._tensors(row)))

    def _tensors(self, row: int) -> Iterator[torch.Tensor]:
        left = self.shape[0] - row
        if not self._row_bytes:
            yield torch.empty(left, *self.shape[1:], dtype=self.dtype)
            return
        held = bytearray()
        for piece in self._member.pieces(self._offset + row * self._row_bytes):
            held += piece
            count = min(left, len(held) // self._row_bytes)
            if count:
                yield self._decode(held[: count * self._row_bytes], count)
                del held[: count * self._row_bytes]
                left -= count
            if not left:
                return

    def _decode(self, data: bytearray, count: int) -> torch.Tensor:
        values = np.frombuffer(data, np.uint8)
        if self._byte_swapped and self.dtype.itemsize > 1:
            values.view(f"u{self.dtype.itemsize}").byteswap(inplace=True)
        return make_bools_proper(torch.from_numpy(values).view(self.dtype).view(count, *self.shape[1:]))

    def row(self, index: int) -> PackedRows:
        """The elements of one row, as rows."""
        return self._view(self._offset + index * self._row_bytes, self.shape[1:])

    def reshaped(self, shape: tuple[int, ...]) -> PackedRows:
        """The same elements in rows of another shape."""
        return self._view(self._offset, shape)

    def _view(self, offset: int, shape: tuple[int, ...]) -> PackedRows:
        return PackedRows(self._member, shape, self.dtype, offset=offset, byte_swapped=self._byte_swapped)
