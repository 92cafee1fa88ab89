"""Fresh processes with a cold page cache and bounded memory: the same for both sides of a comparison.

A process that maps a file keeps its pages in the page cache, hence a new process for every run. The page
cache is emptied per file (``gids.io.drop_page_cache``), which needs no privilege. Memory is bounded by a
control group (memory_group.py). Called by the quickstart and the benchmarks. Knows nothing of graphs.
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
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gids.measure.memory_group import MemoryGroup
from gids.sizes import format_bytes

_PROGRESS, _ANSWER = "progress: ", "answer: "  # begin a fresh process's lines for run_fresh
_ENVIRONMENT = {  # what the user has set wins
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait leave their core to those that work
    "MALLOC_ARENA_MAX": "2",  # else each thread keeps freed memory of its own
}


class FreshProcessError(ChildProcessError):
    """A measured process failed. The message holds its last words; reason is short, for `NAME {reason}`."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class FreshProcessTimeout(FreshProcessError):
    """A measured process took too long, and was killed."""


class FreshProcessOutOfMemory(FreshProcessError):
    """The kernel killed a measured process, or a child of it, for want of memory."""


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
    fails or answers nothing; of its kinds FreshProcessTimeout when it takes too long, and
    FreshProcessOutOfMemory when the kernel kills a process of the group.

    Both sides of a comparison have the same two arenas of malloc and no transparent huge pages: these would
    take up to a third of the memory more, on some machines and not on others.
    """
    launcher = str(Path(__file__).with_name("launcher.py"))
    # -P: not the gids of the current directory
    command = [sys.executable, "-I", "-S", launcher, "-P", "-m", module]
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
            result, words = _converse(process, config, progress)
            if result is not None:
                process.wait()
            timed_out = not alarm.is_alive()
        finally:
            alarm.cancel()
            _kill(process)  # whatever it started as well
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
    return FreshProcessError("\n".join([f"{module} {reason.partition(': ')[0]}", *words]), reason)


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
