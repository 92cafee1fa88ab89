"""Fresh processes with a cold page cache and bounded memory: the same for both sides of a comparison.

A process that maps a file keeps its pages in the page cache, hence a new process for every run. The page
cache is emptied per file (``gids.io.drop_page_cache``), which needs no privilege. Memory is bounded by a
memory cgroup (v1 or v2), which usually needs root: it counts the page cache too, which an rlimit would not.
Called by the quickstart and the benchmarks. Knows nothing of graphs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_PROGRESS, _ANSWER = "progress: ", "answer: "  # begin a fresh process's lines for run_fresh
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait leave their core to those that work
_GROUP_VARIABLE = "GIDS_MEMORY_GROUP"  # tells a process where its limit is to be written


class FreshProcessError(ChildProcessError):
    """A measured process failed. The message holds its last words."""


class FreshProcessTimeout(FreshProcessError):
    """A measured process took too long, and was killed."""


class MemoryGroup:
    """A memory cgroup below this process's own, for the processes that are started by ``command``.

    A context manager that removes it; its processes must be gone by then. Raises OSError without the right,
    or the kernel's support, to make one.
    """

    def __init__(self, name: str) -> None:
        self.path = _make_group(f"{name}-{os.getpid()}")

    def command(self, command: list[str]) -> list[str]:
        """A command that joins the group and then becomes ``command``: so all its memory is counted."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(50):  # the kernel lets go of a group shortly after its last process
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def limit_own_memory(limit_bytes: int) -> None:
    """Bound the memory, page cache included, of the MemoryGroup that this process was started in.

    Raises OSError when the kernel cannot shrink the group to the limit.
    """
    root = Path(os.environ[_GROUP_VARIABLE])
    version_2 = root / "memory.max"
    (version_2 if version_2.exists() else root / "memory.limit_in_bytes").write_text(str(limit_bytes))


def _make_group(name: str) -> Path:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for _, mount, kind, options, *_ in mounts:
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in own:
            path = _inside(mount, own["memory"]) / name
            path.mkdir()
            return path
    for _, mount, kind, *_ in mounts:
        # In v2 a group with processes has no controlled children, so ours may have to be a cousin of our own.
        if kind == "cgroup2" and "" in own:
            start = _inside(mount, own[""])
            for parent in (start, *start.parents):
                if not parent.is_relative_to(mount):
                    break
                if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                    path = parent / name
                    path.mkdir()
                    return path
    raise OSError(0, "the kernel offers no memory controller here")


def _inside(mount: str, group: str) -> Path:
    path = Path(mount) / group.lstrip("/")
    return path if path.is_dir() else Path(mount)  # in a container the mount may be our own group already


def run_fresh(
    module: str,
    config: Mapping[str, Any],
    *,
    group: MemoryGroup | None = None,
    timeout_s: float = 3600,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Run ``python -m module`` in a new process; give it config as JSON and return the JSON that it answers.

    The process calls ``serve``. progress(share) is called when it calls ``report_progress``. Blocks. On any
    exception here, Ctrl-C included, the process and its children are killed. Raises FreshProcessError when it
    fails or answers nothing, FreshProcessTimeout when it takes too long.
    """
    command = [sys.executable, "-m", module]
    with subprocess.Popen(
        group.command(command) if group else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**_ENVIRONMENT, **os.environ, **({_GROUP_VARIABLE: str(group.path)} if group else {})},
    ) as process:
        alarm = threading.Timer(timeout_s, _kill, [process])
        alarm.start()
        try:
            result, words = _converse(process, config, progress)
            if result is not None:
                process.wait()
            timed_out = not alarm.is_alive()
        finally:
            alarm.cancel()
            _kill(process)  # whatever it started as well
    if result is not None and process.returncode == 0:
        return result
    if timed_out:
        raise FreshProcessTimeout(f"{module} took more than {timeout_s:.0f} s")
    cause = f"exit status {process.returncode}"
    if process.returncode == -signal.SIGKILL:
        cause = "killed, most likely for want of memory"
    raise FreshProcessError("\n".join([f"{module} failed ({cause})", *words]))


def _converse(
    process: subprocess.Popen[str], config: Mapping[str, Any], progress: Callable[[float], None] | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """The process's answer, if it gave one, and the last of what else it wrote."""
    assert process.stdin
    assert process.stdout
    words: deque[str] = deque(maxlen=20)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(dict(config)))
        process.stdin.close()
    for line in process.stdout:
        if line.startswith(_ANSWER):
            return json.loads(line[len(_ANSWER) :]), list(words)
        if not line.startswith(_PROGRESS):
            words.append(line.rstrip())
        elif progress:
            progress(float(line[len(_PROGRESS) :]))
    process.wait()
    return None, list(words)


def serve(work: Callable[[dict[str, Any]], Mapping[str, Any]]) -> int:
    """The other end of run_fresh, in the process that it started: answer with what work(config) returns.

    An exception becomes one line. Returns the exit status.
    """
    try:
        print(_ANSWER + json.dumps(dict(work(json.load(sys.stdin)))), flush=True)
        return 0
    except Exception as error:
        if os.environ.get("GIDS_TRACEBACK"):
            raise
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1


def report_progress(share: float) -> None:
    """Tell run_fresh how far the work is, 0 to 1."""
    print(f"{_PROGRESS}{share:.4f}", flush=True)


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
        del start  # or the map could not be closed
    if code != 0:
        raise OSError(ctypes.get_errno(), "mincore failed", os.fspath(path))
    return float((pages & 1).mean())


def read_ahead_bytes(path: str | os.PathLike[str]) -> int | None:
    """What the kernel reads around a missing page of a mapped file, unless advised. None: unknown."""
    device = os.stat(path).st_dev
    try:
        text = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text()
    except OSError:
        return None
    return int(text) * 1024
