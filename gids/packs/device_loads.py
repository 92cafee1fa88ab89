"""Reads packs from scratch into device memory, in the background, through pinned staging.

Called by DeviceRows. Uses streams of its own, never torch's current one. Knows bytes and row sets.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cuda.numa import prefer_node
from gids.packs.memory import ALIGNMENT
from gids.packs.row_memory import Bad, Extent, PackSource

if TYPE_CHECKING:
    from gids.cuda.device import Device, Event

STAGING_PARTS = 4
"""One part is copied to the device while the others are read."""

Stopped = Callable[[], bool]


class Staging:
    """Pinned host memory that packs and row sets pass on their way to the device. One transfer at a time.

    Attributes: stream: of the copies.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._part_bytes = max(1, nbytes // STAGING_PARTS // ALIGNMENT) * ALIGNMENT
        self._memory = _core.PackMemory.create(STAGING_PARTS * self._part_bytes)
        self._bytes = self._memory.bytes()
        self._address: int = self._bytes.ctypes.data
        prefer_node(self._address, self._memory.nbytes, device.numa_node)
        self.mapping = device.map_host(self._address, self._memory.nbytes, memory=self._memory)
        self.stream = device.new_stream()
        self._copied: list[Event | None] = [None] * STAGING_PARTS
        self._lock = threading.Lock()

    def read(
        self, source: PackSource, extents: Sequence[Extent], to: torch.Tensor, stopped: Stopped
    ) -> list[Bad]:
        """Read extents of a scratch file to the device. Blocks. Returns what could not be read.

        Incomplete once stopped() is true. to: uint8[n] on the device, which no other stream uses.
        """
        bad: list[Bad] = []
        reads: deque[tuple[_core.PackRead, int, Extent]] = deque()

        def finish() -> None:
            read, part, (offset, at, nbytes) = reads.popleft()
            bad.extend((offset + begin, code) for begin, _, code in read.wait())
            self._copy(part, to[at : at + nbytes])

        with self._lock:
            for i, piece in enumerate(_pieces(extents, self._part_bytes)):
                if stopped():
                    break
                if len(reads) == STAGING_PARTS - 1:
                    finish()
                part = i % STAGING_PARTS
                self._wait_for(part)
                begin = part * self._part_bytes
                where = piece.offset, self._memory, begin, piece.nbytes
                engine, priority, files = source
                read = _core.PackRead(engine.native, priority, files[0], *where, files=len(files))
                reads.append((read, part, piece))
            while reads and not stopped():
                finish()
            reads.clear()  # which cancels those that were not waited for
            self.stream.synchronize()
        return bad

    def write(self, array: npt.NDArray[Any], to: torch.Tensor) -> None:
        """Copy an array to the device. Blocks. to: contiguous, of as many bytes, used by no other stream."""
        source, flat = array.view(np.uint8), to.view(torch.uint8)
        with self._lock:
            for i, first in enumerate(range(0, len(source), self._part_bytes)):
                piece, part = source[first : first + self._part_bytes], i % STAGING_PARTS
                self._wait_for(part)
                begin = part * self._part_bytes
                self._bytes[begin : begin + len(piece)] = piece
                self._copy(part, flat[first : first + len(piece)])
            self.stream.synchronize()

    def _wait_for(self, part: int) -> None:
        """Until the part was copied."""
        event = self._copied[part]
        if event is not None:
            event.synchronize()

    def _copy(self, part: int, to: torch.Tensor) -> None:
        self._device.copy_from_host(self.stream, to, self._address + part * self._part_bytes)
        self._copied[part] = self.stream.record_event()


class DeviceLoad:
    """See gids.packs.row_memory.Load. work: called in a thread; returns what wait() returns."""

    def __init__(self, device: Device, work: Callable[[Stopped], tuple[list[Any], list[Bad]]]) -> None:
        self._device = device
        self._stop = threading.Event()
        self._result: tuple[list[Any], list[Bad]] = ([], [])
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="gids-pack-load", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Stopped], tuple[list[Any], list[Bad]]]) -> None:
        try:
            self._device.beside_captures()
            self._result = work(self._stop.is_set)
        except BaseException as error:
            self._error = error.with_traceback(None)

    def wait(self) -> tuple[list[Any], list[Bad]]:
        """See Load.wait(). Raises what the device raised, and ValueError after close()."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise ValueError("this loader is closed: make a new one")
        return self._result

    def close(self) -> None:
        """See Load.close()."""
        self._stop.set()
        self._thread.join()


def _pieces(extents: Sequence[Extent], most_bytes: int) -> Iterator[Extent]:
    for offset, at, nbytes in extents:
        for first in range(0, nbytes, most_bytes):
            yield Extent(offset + first, at + first, min(most_bytes, nbytes - first))
