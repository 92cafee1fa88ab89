"""I/O engines: read pieces of files, out of order, with a bounded number in flight.

Called by the cache and by people who measure. Knows files, offsets and bytes; nothing of tables or pages.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from gids import _core

QUEUE_DEPTH = 256
"""Requests in flight, where nothing else is asked for."""

_log = logging.getLogger("gids")
_logged: set[str] = set()


class Engine:
    """A set of open files and the threads that read them. Made by :func:`open_engine`.

    Safe to use from several threads at once. An engine does not survive a fork: in the child every read
    raises RuntimeError, and closing does nothing.
    """

    def __init__(self, native: _core.Engine) -> None:
        self.native = native  # what the cache's native half takes

    @property
    def name(self) -> str:
        """The engine in use: "uring", "threads" or "mmap"."""
        return self.native.name

    @property
    def note(self) -> str:
        """What was found when it opened: direct or buffered, the kernel's features, why not io_uring."""
        return self.native.note

    @property
    def alignment(self) -> int:
        """Bytes that offset, length and address should be multiples of; others are read through a copy."""
        return self.native.alignment

    @property
    def depth(self) -> int:
        """Requests that can be in flight at once."""
        return self.native.depth

    @property
    def max_read_bytes(self) -> int:
        """The longest read that it takes."""
        return self.native.max_read_bytes

    @property
    def bounce_bytes(self) -> int:
        """Memory set aside for reads that cannot land where they should (committed when first used)."""
        return self.native.bounce_bytes

    def read(
        self,
        files: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.int64],
        nbytes: int,
        out: npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.int32]:
        """Read ``nbytes`` bytes at each offset into the rows of ``out``.

        files: uint32[n], index of the file in the list that the engine was opened with.
        offsets: int64[n], bytes from the start of the file; any order, may repeat.
        out: uint8[n, nbytes], C-contiguous. Aligned to :attr:`alignment` it is read into directly.

        Returns int32[n]: 0, or the errno of each read that failed (ENODATA: the file ends before it), whose
        row of ``out`` is then undefined. Blocks without the GIL; Ctrl-C ends the wait after the reads in
        flight. Raises ValueError for a file, offset or length that the engine cannot read (nothing is read)
        and RuntimeError when it is closed or was opened before a fork.
        """
        if out.ndim != 2 or out.shape[1] != nbytes:
            raise ValueError(
                f"out has shape {out.shape}; asked for reads of {nbytes} B, it must be [n, {nbytes}]"
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

        reads, requests (to the kernel, after merging), bytes_asked, bytes_read (with what alignment adds),
        errors, retries, busy_s (time with a request in flight), latency_s (mean of a request), depth_max; and
        in_flight, the requests that are in flight now.
        """
        return self.native.stats()

    def latencies(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """How long requests took since it opened: (seconds, counts), float64[n] and int64[n].

        counts[i] requests took less than seconds[i], and at least seconds[i - 1]; buckets are a sixteenth of
        a doubling wide. The difference of two answers is of the requests between them.
        """
        ends, counts = self.native.latencies()
        return np.array(ends), np.array(counts, np.int64)

    def inject_faults(self, faults: Iterable[tuple[int, int, int, int]]) -> None:
        """For tests: (file, offset, errno, times) makes reads that touch the byte fail that many times.

        Replaces the faults injected before. EINTR and EAGAIN are repeated by the engine, as from the kernel.
        """
        self.native.inject_faults(list(faults))

    def close(self) -> None:
        """Complete what was submitted, end the threads, close the files. May be called twice."""
        self.native.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<gids.io.Engine {self.name}: {self.note}>"


def open_engine(
    paths: Sequence[str | os.PathLike[str]],
    kind: str = "auto",
    *,
    depth: int = QUEUE_DEPTH,
    threads: int = 0,
    direct: bool = True,
    max_read_bytes: int = 1 << 20,
    max_merge_bytes: int = 131072,
) -> Engine:
    """Open files for reading.

    kind: "uring" (io_uring), "threads" (preadv in a thread pool), "mmap" (page faults: the baseline for
    comparison), or "auto": uring, and threads where io_uring is not to be had; logger "gids" then says why,
    once. depth: requests in flight. threads: 0 means 1 ring (uring), 32 readers (threads), 1 per core (mmap).
    direct: O_DIRECT, past the page cache. max_read_bytes: the largest read that will be asked for; it sizes
    the bounce pool. max_merge_bytes: neighbouring reads of a call become one request up to this size; 0:
    never.

    Raises OSError (FileNotFoundError, …) for a file that cannot be opened, or whose file system refuses
    direct I/O, and where the system gives no more threads; ValueError for an unknown kind or a number out of
    range.
    """
    native = _core.open_engine(
        kind,
        [os.fspath(p) for p in paths],
        depth=depth,
        threads=threads,
        direct=direct,
        max_read_bytes=max_read_bytes,
        max_merge_bytes=max_merge_bytes,
    )
    engine = Engine(native)
    if kind == "auto" and engine.name != "uring" and engine.note not in _logged:
        _logged.add(engine.note)
        _log.warning("I/O engine %s: %s", engine.name, engine.note)
    return engine


def probe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Tell what this machine and the file's file system allow.

    Returns: io_uring (bool), io_uring_note (why not, or ""), direct (bool), direct_note, alignment (bytes, of
    direct I/O; 1 without), file_system ("ext4", …), memlock_bytes (memory that may be registered with the
    kernel; -1: no limit). Raises OSError when the file cannot be opened.
    """
    import resource

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
