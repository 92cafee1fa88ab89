"""What reading costs on a disk: random reads, long reads and long writes, measured once per device.

Called when a loader first considers packs. Knows files and rates, and nothing of minibatches.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from gids import _core
from gids.closing import Threads
from gids.errors import StorageError
from gids.io import open_engine, queue_depth
from gids.io.disks import device_of, disk_count
from gids.packs.scratch import BLOCK, Scratch, ScratchFile, ScratchFull
from gids.store.geometry import div_ceil
from gids.stored_file import file_status

_RANDOM_S = 0.05
"""Seconds that random reads are measured."""

_DOUBTED = 40_000
"""A disk that makes fewer random reads per second is measured twice: something else may have kept it busy."""

_LONG_S = 0.3
"""Seconds that long reads, and writes, are measured. Less would not show the limit of a control group, which
lets the bytes of 0.1 s pass at full speed."""

_READ_BYTES = 256 << 10
"""Of a request, as in a sweep."""

_LONG = 4 << 20
"""The most bytes of a long read or write. Shorter ones are delayed by a busy processor, as by a slow disk."""

_MEMORY_SHARE = 16
_MOST_MEMORY_BYTES = 32 << 20
"""What is read goes to 1/16 of the loader's memory, and at most so much; bounced reads take as much again."""

_FIRST_READS = 16
"""Random reads at first; then twice as many each time, so that a slow disk does not have to make many."""

_MOST_S = 1.0
"""If they are slow, they end after so many seconds, once two came to their end."""

_LEAST_MARKS = 6
"""Long reads, or writes, that are measured."""

_READING = 4
"""Long reads in flight."""

_MOST_READ_BYTES = 4 << 30
_SCRATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class DiskRates:
    """random_reads_per_s: of pages of page_bytes at the loader's queue depth. write_bytes_per_s: of all
    directories of scratch together, 0 without scratch. packed_bytes_per_s: of reads from scratch; None: it is
    on the disks of the tables."""

    page_bytes: int
    random_reads_per_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    packed_bytes_per_s: float | None = None

    @property
    def gap_bytes(self) -> int:
        """Unwanted bytes that take as long to read as one more request."""
        return int(self.read_bytes_per_s / self.random_reads_per_s)

    def packed_s(self, nbytes: float) -> float:
        """Seconds that it takes to read so many bytes from scratch."""
        return nbytes / (self.packed_bytes_per_s or self.read_bytes_per_s)


_known: dict[object, Any] = {}
"""What was measured: floats of random reads, and DiskRates."""


def measure_random(
    paths: Sequence[str | os.PathLike[str]],
    *,
    page_bytes: int,
    depth: int | None,
    direct: bool,
    engine: str,
    memory_bytes: int | None = None,
) -> float:
    """Random reads per second, as of measure_rates(), in 0.05 s, once per disk."""
    slots = max(1, _most_bytes(memory_bytes) // page_bytes)
    depth = min(depth or queue_depth(paths, engine), slots)
    key = (_devices(paths), page_bytes, depth, direct, engine)
    if key not in _known:
        measured = paths, page_bytes, depth, min(slots, 4 * depth), direct, engine
        _known[key] = _random_reads_per_s(*measured)
        if _known[key] < _DOUBTED:
            _known[key] = max(_known[key], _random_reads_per_s(*measured))
    return float(_known[key])


def measure_rates(
    paths: Sequence[str | os.PathLike[str]],
    scratch: Scratch | None,
    *,
    page_bytes: int,
    depth: int | None,
    direct: bool,
    engine: str,
    memory_bytes: int | None = None,
) -> DiskRates:
    """The rates of the disks of these files and of scratch. Blocks for about 0.5 s, once per disk.

    depth: of the loader's engine, or None for its default; less is in flight if memory_bytes, the memory of
    the loader, is small. Takes an eighth of it, and at most 64 MiB.

    Nothing else should run meanwhile: short measurements beside busy threads are far too low.
    Raises OSError for a file that cannot be opened or read, StorageError for scratch that cannot be written.
    """
    random_per_s = measure_random(
        paths, page_bytes=page_bytes, depth=depth, direct=direct, engine=engine, memory_bytes=memory_bytes
    )
    devices = _devices(paths)
    on = None if scratch is None else frozenset(map(device_of, scratch.directories))
    key = (devices, on, page_bytes, random_per_s, direct, engine)
    if key not in _known:
        # Long reads are faster than random ones, so that one takes less than so many seconds.
        most_bytes = _most_bytes(memory_bytes) // _READING
        longest = int(min(_LONG, most_bytes, _LONG_S * random_per_s * page_bytes))
        longest = max(_READ_BYTES, longest // BLOCK * BLOCK)
        read_per_s, write_per_s, packed_per_s = _long_reads_per_s(paths, longest, direct, engine), 0.0, None
        if scratch is not None:
            with closing(scratch.open()) as file:
                write_per_s = _writes_per_s(file, scratch.limit_bytes - scratch.taken_bytes, longest)
                if on != devices and file.direct:  # else what was written is in the page cache
                    packed_per_s = _long_reads_per_s(file.paths, longest, direct, engine)
        _known[key] = DiskRates(page_bytes, random_per_s, read_per_s, write_per_s, packed_per_s)
    rates: DiskRates = _known[key]
    return rates


def _most_bytes(memory_bytes: int | None) -> int:
    """Of what is read to measure, at most."""
    return min(_MOST_MEMORY_BYTES, (memory_bytes or 1 << 40) // _MEMORY_SHARE)


def _devices(paths: Sequence[str | os.PathLike[str]]) -> frozenset[int]:
    return frozenset(file_status(path).st_dev for path in paths)


def _random_reads_per_s(
    paths: Sequence[str | os.PathLike[str]],
    page_bytes: int,
    depth: int,
    most_reads: int,
    direct: bool,
    kind: str,
) -> float:
    """most_reads: at a time."""
    rng = np.random.default_rng(0)
    pages = np.array([max(1, file_status(p).st_size // page_bytes) for p in paths])
    with open_engine(
        paths, kind, depth=depth, direct=direct, max_read_bytes=page_bytes, max_merge_bytes=0
    ) as engine:
        memory = _core.PackMemory.create(most_reads * page_bytes)  # aligned, so that no read is bounced
        out = memory.bytes().reshape(most_reads, page_bytes)

        def read(count: int) -> float:
            files = rng.integers(0, len(paths), count).astype(np.uint32)
            offsets, begun = rng.integers(0, pages[files]) * page_bytes, time.perf_counter()
            engine.read(files, offsets, page_bytes, out[:count])
            return time.perf_counter() - begun

        read(1)  # what happens once is not measured
        count, last, left = min(_FIRST_READS, most_reads), 0, _RANDOM_S
        done, seconds = 0, 0.0
        while left > 0:
            took = read(count)
            left -= took
            # Those of the largest number at a time count.
            done, seconds = (done + count, seconds + took) if count == last else (count, took)
            last, count = count, min(2 * count, most_reads)
        return done / max(seconds, 1e-9)


def _long_reads_per_s(
    paths: Sequence[str | os.PathLike[str]], longest: int, direct: bool, kind: str
) -> float:
    """Bytes per second of ascending reads, from a random place on, of all files in turn. longest: bytes of a
    read."""
    disks = disk_count(paths)
    reading = max(_READING, disks)
    longest = max(_READ_BYTES, _READING * longest // reading // BLOCK * BLOCK)
    depth = min(32 * disks, reading * longest // _READ_BYTES)
    with open_engine(paths, kind, depth=depth, direct=direct, max_read_bytes=_READ_BYTES) as engine:
        memory, priority = _core.PackMemory.create(reading * longest), _core.Priority.create()
        coming: deque[tuple[_core.PackRead, int]] = deque()
        marks = _Marks()

        def wait() -> None:
            read, nbytes = coming.popleft()
            read.wait()
            marks.add(nbytes)

        for i, (file, at, nbytes) in enumerate(
            _pieces([file_status(path).st_size for path in paths], longest)
        ):
            if len(coming) == reading:
                wait()
            if marks.enough:
                break
            read = _core.PackRead(engine.native, priority, file, at, memory, i % reading * longest, nbytes)
            coming.append((read, nbytes))
        while coming:
            wait()
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


def _writes_per_s(file: ScratchFile, room_bytes: int, longest: int) -> float:
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

    with Threads(len(numbers), "gids-measure") as threads:
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
