"""PackedRows: an array in a deflated member of a zip file, read as a stream. Called by array_files.

A deflate stream starts only at its beginning, or at a checkpoint: a copy of the decompressor's state. The
member's CRC-32 is checked at its end.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gids.convert.stream_rows import StreamRows
from gids.errors import FormatError
from gids.store.dtypes import make_bools_proper

_READ_BYTES = 1 << 18
_PIECE_BYTES = 2 << 20
_CHECKPOINT_BYTES = 16 << 20  # smallest distance of checkpoints in a member
_CHECKPOINTS = 512  # limit per member; one takes about 45 kB


@dataclass
class _Checkpoint:
    position: int  # in the member
    consumed: int  # of the packed bytes
    crc: int
    state: Any  # zlib's decompressor, which is copied before use


@dataclass
class PackedMember:
    """A deflated member: position, packed and unpacked size in bytes, CRC-32. Shared by its arrays."""

    path: Path
    name: str
    start: int
    packed_bytes: int
    size: int
    crc: int
    _checkpoints: list[_Checkpoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        if os.path.getsize(self.path) < self.start + self.packed_bytes:
            raise FormatError(f"{self.path} is truncated in its member {self.name}")

    def pieces(self, position: int) -> Iterator[bytes]:
        """The member's bytes from a position on, at most 2 MiB per piece. Raises FormatError for damage."""
        before = [c for c in list(self._checkpoints) if c.position <= position]
        begin = max(before, key=lambda c: c.position, default=None)
        at, consumed, crc, state = 0, 0, 0, zlib.decompressobj(-zlib.MAX_WBITS)
        if begin is not None:
            at, consumed, crc, state = begin.position, begin.consumed, begin.crc, begin.state.copy()
        with open(self.path, "rb", buffering=0) as file:
            while at < self.size:
                file.seek(self.start + consumed)
                packed = file.read(min(_READ_BYTES, self.packed_bytes - consumed))
                try:
                    piece = state.decompress(packed, min(_PIECE_BYTES, self.size - at))
                except zlib.error as error:
                    raise FormatError(f"{self._where(at)}: {error}") from None
                consumed += len(packed) - len(state.unconsumed_tail)
                if not piece and (state.eof or not packed):
                    raise FormatError(f"{self._where(at)}: it has {at} of {self.size} bytes")
                crc = zlib.crc32(piece, crc)
                if at + len(piece) == self.size and crc != self.crc:
                    raise FormatError(f"{self._where(self.size)}: its checksum is wrong")
                if at + len(piece) > position:
                    yield piece[max(0, position - at) :]
                at += len(piece)
                self._remember(at, consumed, crc, state)
                os.posix_fadvise(file.fileno(), self.start, consumed, os.POSIX_FADV_DONTNEED)

    def _remember(self, at: int, consumed: int, crc: int, state: Any) -> None:
        last = self._checkpoints[-1].position if self._checkpoints else 0
        if at >= last + max(_CHECKPOINT_BYTES, self.size // _CHECKPOINTS):
            self._checkpoints.append(_Checkpoint(at, consumed, crc, state.copy()))

    def _where(self, at: int) -> str:
        return f"{self.path} is damaged in its member {self.name}, before byte {at} of the member"


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
        super().__init__(shape, dtype, self._open)

    def _open(self, row: int) -> tuple[int, Iterator[torch.Tensor]]:
        return row, self._tensors(row)

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
        """One row, as rows of its own."""
        offset = self._offset + index * self._row_bytes
        return PackedRows(
            self._member, self.shape[1:], self.dtype, offset=offset, byte_swapped=self._byte_swapped
        )

    def reshaped(self, shape: tuple[int, ...]) -> PackedRows:
        """The same elements in rows of another shape."""
        return PackedRows(
            self._member, shape, self.dtype, offset=self._offset, byte_swapped=self._byte_swapped
        )
