"""What reading costs on a disk: random reads, long reads and long writes, measured once per device.

Called when a loader first considers packs. Knows files and rates, and nothing of minibatches.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gids import _core
from gids.io import open_engine, queue_depth
from gids.io.disks import disk_count
from gids.packs.scratch import BLOCK, Scratch, ScratchFile, ScratchFull
from gids.store.geometry import div_ceil
from gids.stored_file import file_status

_RANDOM_S = 0.05
"""Seconds that random reads are measured."""

_LONG_S = 0.2
"""Seconds that long reads, and writes, are measured. Less would not show the limit of a control group, which
lets the bytes of 0.1 s pass at full speed."""

_UNEVEN_S = 0.3
"""The same if one half of the bytes came _UNEVEN times as fast as the other one."""

_UNEVEN = 1.5

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
"""Long reads, and writes, end after so many seconds, if two came to their end."""

_LEAST_MARKS = 6
"""Long reads, or writes, that are measured."""

_READING = 4
"""Long reads in flight."""

_MOST_READ_BYTES = 4 << 30
_SCRATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class DiskRates:
    """random_reads_per_s: of pages of page_bytes at the loader's queue depth. write_bytes_per_s: 0 without
    scratch."""

    page_bytes: int
    random_reads_per_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def gap_bytes(self) -> int:
        """Unwanted bytes that take as long to read as one more request."""
        return int(self.read_bytes_per_s / self.random_reads_per_s)


_known: dict[object, DiskRates] = {}


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
    Raises OSError for a file that cannot be opened or read.
    """
    most_bytes = min(_MOST_MEMORY_BYTES, (memory_bytes or 1 << 40) // _MEMORY_SHARE)
    slots = max(1, most_bytes // page_bytes)
    depth = min(depth or queue_depth(paths, engine), slots)
    devices = frozenset(file_status(path).st_dev for path in paths)
    on = None if scratch is None else os.stat(scratch.directory).st_dev
    key = (devices, on, page_bytes, depth, direct, engine)
    if key not in _known:
        random_per_s = _random_reads_per_s(paths, page_bytes, depth, min(slots, 4 * depth), direct, engine)
        # Long reads are faster than random ones, so that one takes less than so many seconds.
        longest = int(min(_LONG, most_bytes // _READING, _LONG_S * random_per_s * page_bytes))
        longest = max(_READ_BYTES, longest // BLOCK * BLOCK)
        rates = DiskRates(
            page_bytes,
            random_per_s,
            _long_reads_per_s(paths, longest, direct, engine),
            0.0 if scratch is None else _writes_per_s(scratch, longest),
        )
        if scratch is not None and not rates.write_bytes_per_s:
            return rates  # the disk is full, or fails: not for ever
        _known[key] = rates
    return _known[key]


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
    """Bytes per second of ascending reads, from a random place on. longest: bytes of a read."""
    depth = min(32 * disk_count(paths), _READING * longest // _READ_BYTES)
    with open_engine(paths, kind, depth=depth, direct=direct, max_read_bytes=_READ_BYTES) as engine:
        memory, priority = _core.PackMemory.create(_READING * longest), _core.Priority.create()
        reading: deque[tuple[_core.PackRead, int]] = deque()
        marks, end = _Marks(), time.perf_counter() + _MOST_S
        for i, (file, at, nbytes) in enumerate(
            _pieces([file_status(path).st_size for path in paths], longest)
        ):
            if len(reading) == _READING:
                _wait(reading, marks)
            late = time.perf_counter() > end
            if i == 2 * _READING and not late:  # the first reads are slower
                marks = _Marks()
            if marks.enough or (late and marks.count > 1):
                break
            read = _core.PackRead(engine.native, priority, file, at, memory, i % _READING * longest, nbytes)
            reading.append((read, nbytes))
        while reading:
            _wait(reading, marks)
        return marks.rate() or 1e9


def _wait(reading: deque[tuple[_core.PackRead, int]], marks: _Marks) -> None:
    """Wait for the first read."""
    read, nbytes = reading.popleft()
    read.wait()
    marks.add(nbytes)


class _Marks:
    """When how many bytes were read or written."""

    def __init__(self) -> None:
        self._at = [(time.perf_counter(), 0)]

    def add(self, nbytes: int) -> None:
        self._at.append((time.perf_counter(), self._at[-1][1] + nbytes))

    @property
    def count(self) -> int:
        return len(self._at) - 1

    @property
    def enough(self) -> bool:
        if len(self._at) <= _LEAST_MARKS or self._seconds <= _LONG_S:
            return False
        slow, fast = sorted(self._halves())
        return self._seconds > _UNEVEN_S or fast <= _UNEVEN * slow

    def rate(self) -> float:
        """Bytes per second of the faster half, or, of a long measurement, of all but the first quarter."""
        if self._seconds <= _UNEVEN_S:
            return max(self._halves())
        begun = self._at[0][0] + self._seconds / 4
        return _rate([mark for mark in self._at if mark[0] >= begun])

    @property
    def _seconds(self) -> float:
        return self._at[-1][0] - self._at[0][0]

    def _halves(self) -> tuple[float, float]:
        middle = len(self._at) // 2
        return _rate(self._at[: middle + 1]), _rate(self._at[middle:])


def _rate(marks: Sequence[tuple[float, int]]) -> float:
    (begun, before), (end, after) = marks[0], marks[-1]
    return (after - before) / (end - begun) if end > begun else 0.0


def _pieces(sizes: Sequence[int], longest: int) -> Iterator[tuple[int, int, int]]:
    """(file, offset, bytes) of long reads, from a random place on; at most as many as are measured."""
    counts = [div_ceil(size, longest) for size in sizes]
    total = sum(counts)
    first = int(np.random.default_rng().integers(max(1, total)))
    for number in range(first, first + min(total, _MOST_READ_BYTES // longest)):
        file, piece = 0, number % total
        while piece >= counts[file]:
            piece -= counts[file]
            file += 1
        yield file, piece * longest, min(longest, sizes[file] - piece * longest)


def _writes_per_s(scratch: Scratch, longest: int) -> float:
    """Bytes per second. 0 if scratch cannot be written. longest: bytes of a write."""
    file = scratch.open()
    try:
        _reserve(file, min(_SCRATCH_BYTES, (scratch.limit_bytes - scratch.taken_bytes) // 4))
        data = mmap.mmap(-1, longest)
        data[:] = os.urandom(len(data))  # a disk may recognize zeros
        marks, at, end = _Marks(), 0, time.perf_counter() + _MOST_S
        while not marks.enough and not (marks.count > 1 and time.perf_counter() > end):
            count = os.pwrite(file.fd, memoryview(data)[: file.nbytes - at], at)
            marks.add(count)
            at = (at + count) % file.nbytes
        return marks.rate()
    except (OSError, ScratchFull):
        return 0.0
    finally:
        file.close()


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
