"""Fresh processes with a cold page cache and bounded memory: the same for both sides of a comparison.

Each run needs a new process, because a process that maps a file keeps its pages in the page cache. The page
cache is emptied per file (``gids.io.drop_page_cache``), which needs no privilege. A control group
(memory_group.py) limits the memory. Called by the benchmarks. Knows nothing of graphs.
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

_ANSWER = "answer: "  # the prefix of a line for run_fresh
_ENVIRONMENT = {  # the user's own settings win
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads give up their core
    "MALLOC_ARENA_MAX": "2",  # or each thread keeps freed memory
}


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
    launcher = str(Path(__file__).with_name("launcher.py"))
    # -P: do not import gids from the current directory
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
