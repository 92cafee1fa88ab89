"""What reading costs: the rates of a disk, measured once per device, and the seconds of each way of reading.

Called when a loader considers packs. Knows files, rates and counts, and nothing of minibatches.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from gids.errors import StorageError
from gids.io import open_engine
from gids.io.disks import device_of, disk_count
from gids.packs.scratch import BLOCK, Scratch, ScratchFile, ScratchFull
from gids.store.geometry import div_ceil
from gids.stored_file import file_status

PLAN_USE_S = 50e-9
"""Planning takes so long for each row that a minibatch uses."""

_LONG_S = 0.3
"""Seconds that long reads, and writes, are measured. Less would not show the limit of a control group, which
lets the bytes of 0.1 s pass at full speed."""

_READ_BYTES = 256 << 10
"""Of a request, as in a sweep."""

_LONG = 4 << 20
"""The most bytes of a long write. Shorter ones are delayed by a busy processor, as by a slow disk."""

_MEMORY_SHARE = 16
_MOST_MEMORY_BYTES = 32 << 20
"""What is read goes to 1/16 of the loader's memory, and at most so much."""

_MOST_S = 1.0
"""If the disk is slow, measuring ends after so many seconds, once two reads or writes came to their end."""

_LEAST_MARKS = 6
"""Long reads, or writes, that are measured."""

_MOST_READ_BYTES = 4 << 30
_SCRATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second. write: of all directories of scratch together. packed: of reads from scratch."""

    read: float
    write: float
    packed: float


def predict(
    rates: DiskRates, *, random_s: float, swept_bytes: int, copied_bytes: int, uses: int
) -> dict[str, float]:
    """Seconds that the consumer waits for a superbatch, by way of reading.

    random_s: that it would wait for random reads, as measured. swept_bytes: of the tables, that a sweep
    reads. copied_bytes: of the copies, which are written and read once. uses: rows that minibatches read.
    """
    moved_s = swept_bytes / rates.read + copied_bytes / rates.write + copied_bytes / rates.packed
    return {"random": random_s, "pack": moved_s + uses * PLAN_USE_S}


known_rates: dict[object, DiskRates] = {}
"""What was measured, by the disks."""


def measure_rates(
    paths: Sequence[str | os.PathLike[str]], scratch: Scratch, *, direct: bool, engine: str, memory_bytes: int
) -> DiskRates:
    """The rates of the disks of these files and of scratch. Blocks for about 0.5 s, once per disk.

    memory_bytes: of the loader. Takes a sixteenth of it, and at most 32 MiB. Nothing else should run
    meanwhile: short measurements beside busy threads are far too low. Raises OSError for a file that cannot
    be opened or read, StorageError for scratch that cannot be written.
    """
    devices, on = _devices(paths), frozenset(map(device_of, scratch.directories))
    key = (devices, on, direct, engine)
    if key not in known_rates:
        most_bytes = max(_READ_BYTES, min(_MOST_MEMORY_BYTES, memory_bytes // _MEMORY_SHARE) // BLOCK * BLOCK)
        read = packed = _long_reads_per_s(paths, most_bytes, direct, engine)
        with closing(scratch.open()) as file:
            write = writes_per_s(file, scratch.free_bytes, min(_LONG, most_bytes))
            if on != devices and file.direct:  # else what was written is in the page cache
                packed = _long_reads_per_s(file.paths, most_bytes, direct, engine)
        known_rates[key] = DiskRates(read, max(1.0, write), packed)
    return known_rates[key]


def _devices(paths: Sequence[str | os.PathLike[str]]) -> frozenset[int]:
    return frozenset(file_status(path).st_dev for path in paths)


def _long_reads_per_s(
    paths: Sequence[str | os.PathLike[str]], longest: int, direct: bool, kind: str
) -> float:
    """Bytes per second of ascending reads, from a random place on, of all files in turn. longest: bytes that
    are read at a time."""
    disks = disk_count(paths)
    out = np.frombuffer(mmap.mmap(-1, longest), np.uint8)
    depth = min(32 * disks, longest // _READ_BYTES)
    with open_engine(paths, kind, depth=depth, direct=direct, max_read_bytes=_READ_BYTES) as engine:
        marks = _Marks()
        for file, at, nbytes in _pieces([file_status(path).st_size for path in paths], longest):
            if marks.enough:
                break
            starts = np.arange(0, nbytes, _READ_BYTES)
            lengths = np.minimum(_READ_BYTES, nbytes - starts)
            files = np.full(len(starts), file, np.uint32)
            engine.read_extents(files, at + starts, lengths, out, starts)
            marks.add(nbytes)
        return marks.rate() or 1e9


class _Marks:
    """When how many bytes were read or written."""

    def __init__(self) -> None:
        self._at = [(time.perf_counter(), 0)]

    def add(self, nbytes: int) -> None:
        self._at.append((time.perf_counter(), self._at[-1][1] + nbytes))

    @property
    def enough(self) -> bool:
        count, seconds = len(self._at) - 1, self._at[-1][0] - self._at[0][0]
        return (count >= _LEAST_MARKS and seconds >= _LONG_S) or (count > 1 and seconds >= _MOST_S)

    def rate(self) -> float:
        """Bytes per second, without the first quarter: a disk with a limit is faster at first."""
        (begun, before), (end, after) = self._at[len(self._at) // 4], self._at[-1]
        return (after - before) / (end - begun) if end > begun else 0.0


def _pieces(sizes: Sequence[int], longest: int) -> Iterator[tuple[int, int, int]]:
    """(file, offset, bytes) of long reads, from a random place on, of all files in turn; at most as many as
    are measured."""
    rounds = div_ceil(max(sizes), longest)
    first = int(np.random.default_rng().integers(max(1, rounds)))
    left = _MOST_READ_BYTES // longest
    for number in range(first, first + min(rounds, left)):
        offset = number % rounds * longest
        for file, size in enumerate(sizes):
            if offset < size:
                yield file, offset, min(longest, size - offset)


def writes_per_s(file: ScratchFile, room_bytes: int, longest: int) -> float:
    """Bytes per second of writes to all directories at a time. longest: bytes of a write.

    Cuts the file to what was written. Raises StorageError.
    """
    _reserve(file, min(_SCRATCH_BYTES, room_bytes // 4))
    sizes = [os.fstat(fd).st_size for fd in file.fds]
    numbers = [number for number, size in enumerate(sizes) if size]
    size = min(sizes[number] for number in numbers) // BLOCK * BLOCK
    data = mmap.mmap(-1, longest)
    data[:] = os.urandom(len(data))  # a disk may recognize zeros
    marks, at, written = _Marks(), 0, 0

    def write(number: int) -> int:
        try:
            return os.pwrite(file.fds[number], memoryview(data)[: size - at], at)
        except OSError as error:
            reason = f"scratch cannot be written: {os.strerror(error.errno or 0)}"
            raise StorageError(error.errno or 0, reason, file.directories[number]) from error

    with ThreadPoolExecutor(len(numbers)) as threads:
        run = map if len(numbers) == 1 else threads.map
        while not marks.enough:
            counts = list(run(write, numbers))
            marks.add(sum(counts))
            at = (at + min(counts)) % size
            written = max(written, at or size)
    for number in numbers:
        os.ftruncate(file.fds[number], written)
    return marks.rate()


def _reserve(file: ScratchFile, nbytes: int) -> None:
    """Make the file so long, or as long as there is room for. Raises ScratchFull."""
    nbytes = max(BLOCK, nbytes // BLOCK * BLOCK)
    while True:
        try:
            return file.reserve(nbytes)
        except ScratchFull:
            if nbytes == BLOCK:
                raise
            nbytes = max(BLOCK, nbytes // 4 // BLOCK * BLOCK)
