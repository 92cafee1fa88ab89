"""Reads extents with an engine into pinned host memory and copies them to the device. Made by extents.py.

Staging has two halves: the engine fills one while the other is copied on a separate stream.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gids.cuda.host_memory import host_memory
from gids.io.device.extents import Extents, checked, failure, split

if TYPE_CHECKING:
    import torch

    from gids.cuda import Device, Event
    from gids.io.engine import Engine


class PinnedExtentReader:
    """See :class:`gids.io.device.extents.ExtentReader`. staging_bytes: pinned host memory of both halves.

    Owns its staging but not the engine: close it first. Raises like Device.map_host().
    """

    def __init__(
        self,
        device: Device,
        engine: Engine,
        paths: Sequence[str | os.PathLike[str]],
        *,
        staging_bytes: int = 64 << 20,
    ) -> None:
        import torch

        if staging_bytes < 2 * mmap.PAGESIZE:
            raise ValueError(f"staging_bytes must be at least {2 * mmap.PAGESIZE} (got {staging_bytes})")
        self._device, self._engine = device, engine
        self._paths = [os.fspath(p) for p in paths]
        self._half_bytes = staging_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        self._staging = np.frombuffer(host_memory(2 * self._half_bytes, device.numa_node), np.uint8)
        address, nbytes = self._staging.ctypes.data, len(self._staging)
        self._mapping = device.map_host(address, nbytes, memory=self._staging)
        self._tensor = torch.from_numpy(self._staging)
        self._stream = device.new_stream()
        self._closed = False

    @property
    def name(self) -> str:
        return f"{self._engine.name}+pinned"

    def read(
        self,
        files: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: torch.Tensor,
        out_offsets: npt.NDArray[np.int64],
    ) -> None:
        """See :meth:`gids.io.device.extents.ExtentReader.read`."""
        if self._closed:
            raise RuntimeError("this reader is closed")
        where = self._device.torch_device
        extents = checked(len(self._paths), files, offsets, lengths, out, out_offsets, where)
        extents = extents.take(np.argsort(extents.out_offsets, kind="stable"))
        pieces = split(extents, min(self._half_bytes, self._engine.max_read_bytes))
        copied: list[Event | None] = [None, None]
        self._stream.wait_stream(self._device.current_stream())
        try:
            for number, part in enumerate(_parts(pieces, self._half_bytes)):
                half = number % 2
                if (event := copied[half]) is not None:
                    event.synchronize()
                self._read_and_copy(part, half * self._half_bytes, out)
                copied[half] = self._stream.record_event()
        finally:
            self._stream.synchronize()

    def _read_and_copy(self, part: Extents, begin: int, out: torch.Tensor) -> None:
        ends = np.cumsum(part.lengths)
        staged = begin + ends - part.lengths
        errors = self._engine.read_extents(part.files, part.offsets, part.lengths, self._staging, staged)
        if errors.any():
            raise self._error(part, errors)
        breaks = part.out_offsets[1:] != part.out_offsets[:-1] + part.lengths[:-1]
        first = np.flatnonzero(np.concatenate(([True], breaks)))
        sizes = np.add.reduceat(part.lengths, first)
        with self._device.use(self._stream):
            for to, source, size in zip(
                part.out_offsets[first].tolist(), staged[first].tolist(), sizes.tolist(), strict=True
            ):
                out[to : to + size].copy_(self._tensor[source : source + size], non_blocking=True)

    def _error(self, part: Extents, errors: npt.NDArray[np.int32]) -> Exception:
        failed = np.flatnonzero(errors)
        told = failed[errors[failed] != errno.ECANCELED]  # cancelled reads were not the cause
        failed = told if len(told) else failed
        i = int(failed[np.lexsort((part.offsets[failed], part.files[failed]))[0]])
        return failure(int(errors[i]), self._paths[part.files[i]], int(part.offsets[i]), int(part.lengths[i]))

    def close(self) -> None:
        """Free the staging memory. Idempotent."""
        self._closed = True
        self._mapping.close()


def _parts(pieces: Extents, part_bytes: int) -> list[Extents]:
    """Pieces in groups of at most part_bytes."""
    parts = []
    ends = np.cumsum(pieces.lengths)
    begin = 0
    while begin < len(ends):
        before = ends[begin - 1] if begin else 0
        end = int(np.searchsorted(ends, before + part_bytes, side="right"))
        parts.append(pieces.take(slice(begin, end)))
        begin = end
    return parts
