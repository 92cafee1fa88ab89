"""I/O engines: read pieces of files, out of order, with a bounded number in flight.

Called by the cache and by benchmarks. Knows files, offsets and bytes, but not tables or pages.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.closing import Closing
from gids.io.disks import DISK_DEPTH, MOST_DEPTH, RING_DEPTH, core_count, disk_count, ring_count
from gids.stored_file import StoredFile, opened

_log = logging.getLogger("gids")
_logged: set[str] = set()


class Engine(Closing):
    """A set of open files and the threads that read them. Made by :func:`open_engine`.

    Several threads may use it at once. In a forked child every read raises RuntimeError, and close() does
    nothing.
    """

    def __init__(self, native: _core.Engine) -> None:
        self.native = native  # for the native cache

    @property
    def name(self) -> str:
        """The engine in use: "uring", "threads" or "mmap"."""
        return self.native.name

    @property
    def note(self) -> str:
        """The result of opening: direct or buffered I/O, kernel features, why io_uring is not used."""
        return self.native.note

    @property
    def alignment(self) -> int:
        """Alignment in bytes of offset, length and address for direct reads. Others need an extra copy."""
        return self.native.alignment

    @property
    def depth(self) -> int:
        """The number of requests that can be in flight at once."""
        return self.native.depth

    @property
    def max_read_bytes(self) -> int:
        """The longest read that it accepts, in bytes."""
        return self.native.max_read_bytes

    @property
    def bounce_bytes(self) -> int:
        """Memory for reads that need an extra copy, in bytes. It is committed on first use."""
        return self.native.bounce_bytes

    def read(
        self,
        files: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.int64],
        nbytes: int,
        out: npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.int32]:
        """Read ``nbytes`` bytes at each offset into the rows of ``out``.

        files: uint32[n], indices of the paths that the engine was opened with.
        offsets: int64[n], bytes from the start of the file, in any order, may repeat.
        out: uint8[n, nbytes], C-contiguous. If it is aligned to :attr:`alignment`, no copy is needed.

        Returns int32[n]: 0, or the errno of each read that failed (ENODATA: the file ends before it). The row
        of a failed read is undefined. Blocks without the GIL; Ctrl-C ends the wait after the reads in flight.
        Raises ValueError, before any read, for a file, offset or length that the engine cannot read, and
        RuntimeError if it is closed or was opened before a fork.
        """
        if out.ndim != 2 or out.shape[1] != nbytes:
            raise ValueError(
                f"out must have shape [n, {nbytes}] for reads of {nbytes} bytes (got {list(out.shape)})"
            )
        errors = np.empty(len(files), dtype=np.int32)
        self.native.read(files, offsets, out, errors)
        return errors

    def read_extents(
        self,
        files: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
        out_offsets: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int32]:
        """Read ``lengths[i]`` bytes at ``offsets[i]`` of file ``files[i]`` to ``out[out_offsets[i]:]``.

        files: uint32[n]. offsets, lengths (1 to :attr:`max_read_bytes`), out_offsets: int64[n]; extents must
        not overlap in out. out: uint8[m], contiguous. Blocks and returns errors as :meth:`read` does.
        """
        errors = np.empty(len(files), dtype=np.int32)
        self.native.read_extents(files, offsets, lengths, out, out_offsets, errors)
        return errors

    def stats(self) -> dict[str, int | float]:
        """Counters since it opened.

        reads, requests (to the kernel, after merging), bytes_asked, bytes_read (including alignment), errors,
        retries, busy_s (time with a request in flight), latency_s (mean per request), depth_max,
        threads (that read now), and in_flight, the number of requests in flight now.
        """
        return self.native.stats()

    def latencies(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """A histogram of request latencies since it opened: (seconds, counts), float64[n] and int64[n].

        counts[i] requests took seconds[i - 1] or more and less than seconds[i]. There are 16 buckets per
        factor of 2. Subtract two histograms for the requests between them.
        """
        ends, counts = self.native.latencies()
        return np.array(ends), np.array(counts, np.int64)

    def inject_faults(self, faults: Iterable[tuple[int, int, int, int]]) -> None:
        """For tests: (file, offset, errno, times) makes reads of that byte fail that many times.

        Replaces the faults injected before. The engine retries EINTR and EAGAIN, as it does for the kernel's.
        """
        self.native.inject_faults(list(faults))

    def close(self) -> None:
        """Complete submitted reads, end the threads, close the files. Idempotent."""
        self.native.close()

    def __repr__(self) -> str:
        return f"<gids.io.Engine {self.name}: {self.note}>"


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # an unlimited hard limit may be refused
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def queue_depth(paths: Iterable[str | os.PathLike[str]], kind: str = "auto") -> int:
    """The default number of requests in flight for files: 256 per disk, and 64 per ring that may be added; at
    most 16384.

    256 if each takes a thread: with the engine "threads", and with "auto" if io_uring is not available.
    """
    if kind == "threads" or (kind == "auto" and _core.why_no_uring()):
        return DISK_DEPTH
    disks = disk_count(paths)
    return min(MOST_DEPTH, DISK_DEPTH * disks + RING_DEPTH * max(0, core_count() - disks))


def open_engine(
    paths: Sequence[str | os.PathLike[str]],
    kind: str = "auto",
    *,
    depth: int | None = None,
    threads: int = 0,
    direct: bool = True,
    max_read_bytes: int = 1 << 20,
    max_merge_bytes: int = 131072,
) -> Engine:
    """Open files for reading.

    paths: files, or `Table.shards`, which are then those of the dataset that was opened. kind: "uring"
    (io_uring), "threads" (preadv in a thread pool), "mmap" (page faults, a baseline for comparison) or
    "auto": uring, or threads if io_uring is not available; logger "gids" then reports why, once. depth:
    number of requests in flight (None: see queue_depth). threads: number of threads (0: as the load asks for
    with uring, depth readers for threads, 1 per core for mmap). direct: use O_DIRECT, past the page cache.
    max_read_bytes: the longest read, which sizes the bounce pool. max_merge_bytes: merge
    neighboring reads of a call into one request up to this size (0: never).

    Raises StorageError if a shard was replaced; OSError (FileNotFoundError, …) if a file cannot be opened,
    its file system refuses direct I/O, or no thread can be started; ValueError for an unknown kind or a
    number out of range.
    """

    def open_native() -> _core.Engine:
        with contextlib.ExitStack() as files:
            return _core.open_engine(
                kind,
                [os.fspath(p) for p in paths],
                depth=queue_depth(paths, kind) if depth is None else depth,
                threads=threads,
                rings=ring_count(paths),
                most_rings=core_count(),
                direct=direct,
                max_read_bytes=max_read_bytes,
                max_merge_bytes=max_merge_bytes,
                descriptors=[
                    files.enter_context(opened(p)) if isinstance(p, StoredFile) else -1 for p in paths
                ],
            )

    try:
        native = open_native()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise_descriptor_limit()
        try:
            native = open_native()
        except OSError as again:
            if again.errno != errno.EMFILE:
                raise
            text = f"too many open files: reading opens {len(paths)} files twice; raise `ulimit -n`"
            raise OSError(errno.EMFILE, text) from None
    engine = Engine(native)
    if kind == "auto" and engine.name != "uring" and engine.note not in _logged:
        _logged.add(engine.note)
        _log.warning("I/O engine %s: %s", engine.name, engine.note)
    return engine


def probe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Report what this machine and the file's file system support.

    Returns a dictionary: io_uring (bool), io_uring_note (why not, or ""), direct (bool), direct_note (why
    not, or ""), alignment (of direct I/O, in bytes; 1 without it), file_system ("ext4", …), memlock_bytes
    (limit of memory registered with the kernel; -1: no limit). Raises OSError if the file cannot be opened.
    """
    name = os.fspath(path)
    file_system, alignment = _core.probe_file(name, direct=False)
    direct_note = ""
    try:
        _, alignment = _core.probe_file(name, direct=True)
    except OSError as error:
        direct_note = error.strerror or str(error)
    uring_note = _core.why_no_uring()
    return {
        "io_uring": not uring_note,
        "io_uring_note": uring_note,
        "direct": not direct_note,
        "direct_note": direct_note,
        "alignment": alignment,
        "file_system": file_system,
        "memlock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }


def direct_works(paths: Sequence[str | os.PathLike[str]]) -> bool:
    """Whether all files support direct I/O."""
    return all(bool(probe(path)["direct"]) for path in paths)


def drop_page_cache(path: str | os.PathLike[str]) -> None:
    """Drop the clean pages of a file, or of every file below a directory, from the page cache.

    Dirty pages are written to the disk first. Pages that a process has mapped stay. Raises OSError.
    """
    root = Path(path)
    for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
        if not file.is_file():
            continue
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
