"""Fresh processes with a cold page cache and bounded memory, and what this process uses.

A process that maps a file keeps its pages in the page cache, so each run needs a new one. A memory control
group (v1 or v2) limits it; unlike an rlimit, that counts the page cache too. Making one usually needs root.
``python -m gids.bench.isolation MODULE`` is such a process. Knows nothing of graphs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_ANSWER = "answer: "  # the prefix of the line with the result
_ENVIRONMENT = {  # the user's own settings win
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads give up their core
    "MALLOC_ARENA_MAX": "2",  # or each thread keeps freed memory
}
_GROUP_VARIABLE = "GIDS_MEMORY_GROUP"  # the group in which a process was started
_GROUPS = Path("/sys/fs/cgroup")
_PR_SET_THP_DISABLE = 41


class FreshProcessError(ChildProcessError):
    """A measured process failed. The message has its last output; reason is short, for `NAME {reason}`."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


def run_fresh(
    module: str,
    config: Mapping[str, Any],
    *,
    group: MemoryGroup | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Return ``module.run(config)``, computed in a new process. The config and the result are sent as JSON.

    Blocks. On any exception, Ctrl-C included, the process and its children are killed. Raises
    FreshProcessError if it fails, takes longer than timeout_s, or is killed because memory ran out.
    The process has two malloc arenas and no transparent huge pages, which take up to a third more memory.
    """
    # -P: do not import gids from the current directory
    command = [sys.executable, "-P", "-m", "gids.bench.isolation", module]
    timed_out = False
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        subprocess.Popen(
            group.command(command) if group else command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**_ENVIRONMENT, **os.environ, **({_GROUP_VARIABLE: str(group.path)} if group else {})},
        ) as process,
    ):
        try:
            process.communicate(json.dumps(dict(config)), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too
        output.seek(0)
        lines = output.read().splitlines()
    answers = [line for line in lines if line.startswith(_ANSWER)]
    if process.returncode == 0 and answers:
        result: dict[str, Any] = json.loads(answers[-1].removeprefix(_ANSWER))
        return result
    if group and group.kills():
        reason = "needed more memory than its limit and was killed by the kernel"
    elif timed_out:
        reason = f"did not end within {timeout_s:.0f} s and was stopped: the disk may be very slow or busy"
    elif process.returncode == -signal.SIGKILL:
        reason = "was killed, most likely because the machine ran out of memory"
    else:
        reason = f"failed (exit status {process.returncode})" + (f": {lines[-1]}" if lines else "")
    raise FreshProcessError("\n".join([f"{module} {reason}", *lines[-20:]]), reason)


def _serve(module: str) -> int:
    """Answer run_fresh. Prints an exception as one line. Returns the exit status."""
    # Before torch is imported. If the kernel refuses, huge pages stay on.
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    try:
        result = importlib.import_module(module).run(json.load(sys.stdin))
        print(_ANSWER + json.dumps(dict(result)), flush=True)
        return 0
    except Exception as error:
        if os.environ.get("GIDS_TRACEBACK"):
            raise
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1


class MemoryGroup:
    """A memory control group for the processes that ``command`` starts.

    A context manager that removes the group; its processes must have ended by then. Raises OSError if the
    kernel has no memory controller, or the user may not make a group.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"gids-bench-{os.getpid()}-", dir=_parent_group()))

    def command(self, command: list[str]) -> list[str]:
        """A command that joins the group and then runs ``command``, so that all its memory counts."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

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


def why_no_limit() -> str:
    """Why memory cannot be limited here; "" if it can."""
    try:
        with MemoryGroup() as group:
            joined = subprocess.run(group.command(["true"]), capture_output=True).returncode == 0
            return "" if joined else "no permission to join a memory control group"
    except OSError as error:
        return f"no memory control group: {error.strerror or error}"


def limit_own_memory(more_bytes: int) -> None:
    """Limit this process, which was started in a MemoryGroup, to what it uses now and so many bytes more.

    The page cache counts, but pages of files that are cached now can be dropped. Raises OSError.
    """
    group = Path(os.environ[_GROUP_VARIABLE])
    used = int(_first(group, "memory.current", "memory.usage_in_bytes").read_text())
    fields = _fields(group / "memory.stat")
    for name in ("inactive_file", "active_file"):
        used -= fields.get(f"total_{name}", fields.get(name, 0))
    _first(group, "memory.max", "memory.limit_in_bytes").write_text(str(used + more_bytes))


def _first(group: Path, version_2: str, version_1: str) -> Path:
    """The file of the kernel's version of control groups."""
    return group / version_2 if (group / version_2).exists() else group / version_1


def _fields(path: Path) -> dict[str, int]:
    """Parse lines of a name and a number."""
    return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}


def _parent_group() -> Path:
    """The group below which groups are made: the root, where systems usually mount it."""
    if (_GROUPS / "memory/tasks").exists():  # v1
        return _GROUPS / "memory"
    control = _GROUPS / "cgroup.subtree_control"
    if control.exists() and "memory" in control.read_text().split():
        return _GROUPS
    raise OSError(0, f"{_GROUPS} has no memory controller")


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


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1]))
