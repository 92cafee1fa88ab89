"""Fresh processes with a cold page cache and bounded memory: the same for both sides of a comparison.

Each run needs a new process, because a process that maps a file keeps its pages in the page cache. The page
cache is emptied per file (``gids.io.drop_page_cache``), which needs no privilege. A memory control group (v1
or v2) limits the memory; unlike an rlimit, it counts the page cache too. Making one usually needs root.

Called by the benchmarks and by the processes that they start. Knows nothing of graphs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gids.sizes import format_bytes

_ANSWER = "answer: "  # the prefix of a line for run_fresh
_ENVIRONMENT = {  # the user's own settings win
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads give up their core
    "MALLOC_ARENA_MAX": "2",  # or each thread keeps freed memory
}
_WITHOUT_HUGE_PAGES = """
import ctypes, os, sys
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, *map(ctypes.c_ulong, (1, 0, 0, 0)))  # if refused, they stay on
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Turns huge pages off for this process and its children, and then runs ``python ARGUMENTS``."""
_GROUP_VARIABLE = "GIDS_MEMORY_GROUP"  # the group in which a process was started
_NO_LIMIT = 1 << 60  # v1 reports a missing limit as a number near 2**63
_SAMPLE_S = 0.003


class FreshProcessError(ChildProcessError):
    """A measured process failed. The message has its last output; reason is short, for `NAME {reason}`."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class FreshProcessTimeout(FreshProcessError):
    """A measured process took too long and was killed."""


class FreshProcessOutOfMemory(FreshProcessError):
    """The kernel killed a measured process, or a child of it, because memory ran out."""


def run_fresh(
    module: str,
    config: Mapping[str, Any],
    *,
    group: MemoryGroup | None = None,
    timeout_s: float = 3600,
) -> dict[str, Any]:
    """Run ``python -m module`` in a new process, send it config as JSON, and return its answer, also JSON.

    The process calls ``serve``. Blocks. On any exception, Ctrl-C included, the process and its children are
    killed. Raises FreshProcessError if it fails or does not answer: FreshProcessTimeout if it takes too long,
    FreshProcessOutOfMemory if the kernel kills a process of the group.

    Processes use two malloc arenas and no transparent huge pages, which take up to a third more memory on
    some machines.
    """
    # -P: do not import gids from the current directory
    command = [sys.executable, "-I", "-S", "-c", _WITHOUT_HUGE_PAGES, "-P", "-m", module]
    kills_before = group.kills() if group else 0
    with subprocess.Popen(
        group.command(command) if group else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**_ENVIRONMENT, **os.environ, **(group.environment if group else {})},
    ) as process:
        alarm = threading.Timer(timeout_s, _kill, [process])
        alarm.start()
        try:
            result, words = _converse(process, config)
            if result is not None:
                process.wait()
            timed_out = not alarm.is_alive()
        finally:
            alarm.cancel()
            _kill(process)  # and its children
    if result is not None and process.returncode == 0:
        return result
    out_of_memory = group is not None and group.kills() > kills_before
    if timed_out and not out_of_memory:
        raise FreshProcessTimeout(
            f"{module} took more than {timeout_s:.0f} s",
            f"did not end within {timeout_s:.0f} s and was stopped",
        )
    raise _failure(module, process.returncode, words, group if out_of_memory else None)


def _failure(
    module: str, status: int, words: list[str], short_of_memory: MemoryGroup | None
) -> FreshProcessError:
    """short_of_memory: the group in which the kernel killed a process."""
    if short_of_memory is not None:
        limit = short_of_memory.limit_bytes()
        needed = "memory than there is" if limit is None else f"than {format_bytes(limit)} of memory"
        reason = f"needed more {needed} and was killed by the kernel"
        return FreshProcessOutOfMemory("\n".join([f"{module} {reason}", *words]), reason)
    if status == -signal.SIGKILL:
        reason = "was killed, most likely because the machine ran out of memory"
    else:
        cause = f"signal {-status}" if status < 0 else f"exit status {status}"
        reason = f"failed ({cause})" + (f": {words[-1]}" if words else "")
    return FreshProcessError("\n".join([f"{module} {reason}", *words]), reason)


def _converse(
    process: subprocess.Popen[str], config: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the process's answer, or None, and the last lines of its other output."""
    assert process.stdin
    assert process.stdout
    words: deque[str] = deque(maxlen=20)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(dict(config)))
        process.stdin.close()
    for line in process.stdout:
        if line.startswith(_ANSWER):
            return json.loads(line[len(_ANSWER) :]), list(words)
        words.append(line.rstrip())
    process.wait()
    return None, list(words)


def serve(work: Callable[[dict[str, Any]], Mapping[str, Any]]) -> int:
    """Answer run_fresh with the result of work(config). Called in the process that run_fresh started.

    Prints an exception as one line. Returns the exit status.
    """
    try:
        print(_ANSWER + json.dumps(dict(work(json.load(sys.stdin)))), flush=True)
        return 0
    except Exception as error:
        if os.environ.get("GIDS_TRACEBACK"):
            raise
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def cached_share(path: str | os.PathLike[str]) -> float:
    """The share of a file's pages that the page cache holds, 0 to 1."""
    size = os.path.getsize(path)
    if size == 0:
        return 0.0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        start = np.frombuffer(mapped, np.uint8)
        address, length = ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(size)
        code = ctypes.CDLL(None, use_errno=True).mincore(address, length, ctypes.c_void_p(pages.ctypes.data))
        del start  # an open array keeps the map open
    if code != 0:
        raise OSError(ctypes.get_errno(), "mincore failed", os.fspath(path))
    return float((pages & 1).mean())


def read_ahead_bytes(path: str | os.PathLike[str]) -> int | None:
    """Bytes that the kernel reads around a missing page of a mapped file by default. None: unknown."""
    device = os.stat(path).st_dev
    try:
        text = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text()
    except OSError:
        return None
    return int(text) * 1024


class MemoryGroup:
    """A memory control group below this process's own, for the processes that ``command`` starts.

    A context manager that removes the group; its processes must have ended by then. Raises OSError if the
    kernel has no memory controller, or the user may not make a group.
    """

    def __init__(self, name: str) -> None:
        self._own, parent = _own_and_parent()
        # A new name: a group of an earlier run may still exist.
        self.path = Path(tempfile.mkdtemp(prefix=f"{name}-{os.getpid()}-", dir=parent))

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for a process in the group that calls the functions below."""
        return {_GROUP_VARIABLE: str(self.path)}

    def command(self, command: list[str]) -> list[str]:
        """A command that joins the group and then runs ``command``, so that all its memory counts."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    @contextmanager
    def joined(self, limit_bytes: int) -> Iterator[None]:
        """A context in which this process is in the group.

        limit_bytes: of the memory that it takes inside. The memory that it had before does not count.
        """
        _first(self.path, "memory.max", "memory.limit_in_bytes").write_text(str(limit_bytes))
        (self.path / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (self._own / "cgroup.procs").write_text(str(os.getpid()))

    def limit_bytes(self) -> int | None:
        """The current limit; None if there is none."""
        text = _first(self.path, "memory.max", "memory.limit_in_bytes").read_text().strip()
        return None if text == "max" or int(text) >= _NO_LIMIT else int(text)

    def kills(self) -> int:
        """Number of processes of the group that the kernel killed because memory ran out."""
        return _fields(_first(self.path, "memory.events", "memory.oom_control")).get("oom_kill", 0)

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(50):  # the kernel frees a group shortly after its last process ends
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def limit_own_memory(limit_bytes: int | None) -> None:
    """Limit the memory, page cache included, of the MemoryGroup in which this process was started.

    None removes the limit. Raises OSError if the kernel cannot shrink the group to the limit.
    """
    file = _first(_own_group(), "memory.max", "memory.limit_in_bytes")
    unlimited = "max" if file.name == "memory.max" else "-1"
    file.write_text(unlimited if limit_bytes is None else str(limit_bytes))


def own_memory_bytes() -> int:
    """Memory in use by this process's MemoryGroup, without pages of files, which can be dropped."""
    group = _own_group()
    used = int(_first(group, "memory.current", "memory.usage_in_bytes").read_text())
    fields = _fields(group / "memory.stat")
    return used - sum(
        fields.get(f"total_{name}", fields.get(name, 0)) for name in ("inactive_file", "active_file")
    )


class OwnPeak:
    """A context manager: `peak_bytes` is the greatest own_memory_bytes() while it is entered."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gids-memory-peak", daemon=True)

    def _watch(self) -> None:
        while not self._end.wait(_SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, own_memory_bytes())

    def __enter__(self) -> OwnPeak:
        self.peak_bytes = own_memory_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def _own_group() -> Path:
    return Path(os.environ[_GROUP_VARIABLE])


def _first(group: Path, version_2: str, version_1: str) -> Path:
    """The file of the kernel's version of control groups."""
    return group / version_2 if (group / version_2).exists() else group / version_1


def _fields(path: Path) -> dict[str, int]:
    """Parse lines of a name and a number."""
    return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}


def _own_and_parent() -> tuple[Path, Path]:
    """The group of this process, and the one below which it may make others."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for _, mount, kind, options, *_ in mounts:
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in own:
            group = _inside(mount, own["memory"])
            return group, group
    for _, mount, kind, *_ in mounts:
        # In v2 a group with processes has no controlled children, so this group may need to be in a parent.
        if kind == "cgroup2" and "" in own:
            start = _inside(mount, own[""])
            for parent in (start, *start.parents):
                if not parent.is_relative_to(mount):
                    break
                if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                    return start, parent
    raise OSError(0, "the kernel has no memory controller here")


def _inside(mount: str, group: str) -> Path:
    path = Path(mount) / group.lstrip("/")
    return path if path.is_dir() else Path(mount)  # in a container the mount may be the own group


def resident_bytes(field: str) -> int:
    """A field of /proc/self/status: "VmRSS", its peak "VmHWM", or its parts "RssAnon" and "RssShmem"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def device_bytes_read() -> int | None:
    """Bytes read from devices for this process, including the kernel's read-ahead. None if hidden."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:  # some containers hide it
        return None
    return int(fields["read_bytes"])


def cpu_seconds() -> float:
    """User and system time of all threads, and of children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
