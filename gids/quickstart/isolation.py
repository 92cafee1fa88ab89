"""Fresh processes with a cold page cache and bounded memory, so that both sides of a comparison meet the same.

A process that maps a file keeps its pages in the page cache, hence a new process for every run. The page
cache is emptied per file by ``posix_fadvise``, which needs no privilege. Memory is bounded by a memory
cgroup (v1 or v2), which usually needs root: it counts the page cache too, which an rlimit would not.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

PROGRESS = "progress: "


class FreshProcessError(RuntimeError):
    """A measured process failed. The message holds its last words."""


class MemoryGroup:
    """A memory cgroup below this process's own. Without the right to make one: ``path`` None, ``refusal`` says why.

    Only the processes that it is handed to join it, before they run anything; remove() when they are gone.
    """

    def __init__(self, name: str) -> None:
        self.path: Path | None = None
        self.refusal = ""
        try:
            self.path = _make_group(f"{name}-{os.getpid()}")
        except OSError as error:
            self.refusal = f"no memory cgroup ({error.strerror or error})"

    def command(self, command: list[str]) -> list[str]:
        """The command that joins the group and then becomes ``command``."""
        if self.path is None:
            return command
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    def remove(self) -> None:
        if self.path is None:
            return
        for _ in range(50):  # the kernel lets go of a group shortly after its last process
            try:
                self.path.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.1)
        self.path = None


def set_memory_limit(group: str | os.PathLike[str], limit_bytes: int) -> None:
    """Bound the memory of a cgroup's processes, page cache included. May be called by one of them.

    Raises OSError when the kernel cannot shrink the group to the limit, or forbids it.
    """
    root = Path(group)
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

    The process calls ``read_config``, perhaps ``report_progress``, and ``answer``. Blocks. On any exception
    here, Ctrl-C included, the process and its children are killed. Raises FreshProcessError when it fails,
    takes too long, or answers nothing.
    """
    command = [sys.executable, "-m", module]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        group.command(command) if group else command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )
    assert process.stdin and process.stdout and process.stderr
    errors: deque[str] = deque(maxlen=20)
    listener = threading.Thread(target=_listen, args=(process.stderr, errors, progress), daemon=True)
    alarm = threading.Timer(timeout_s, _kill, [process])
    alarm.daemon = True
    try:
        listener.start()
        alarm.start()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(dict(config)))
            process.stdin.close()
        output = process.stdout.read()
        process.wait()
        listener.join(timeout=5)
        timed_out = not alarm.is_alive()
    finally:
        alarm.cancel()
        _kill(process)
        process.wait()
    if process.returncode != 0:
        cause = f"exit status {process.returncode}"
        if process.returncode == -signal.SIGKILL:
            cause = f"took more than {timeout_s:.0f} s" if timed_out else "killed, most likely for want of memory"
        raise FreshProcessError("\n".join([f"{module} failed ({cause})", *errors]))
    try:
        result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError) as error:
        raise FreshProcessError("\n".join([f"{module} gave no answer", *errors])) from error
    return result


def read_config() -> dict[str, Any]:
    """What run_fresh was given, in the process that it started."""
    config: dict[str, Any] = json.load(sys.stdin)
    return config


def report_progress(share: float) -> None:
    """Tell run_fresh how far the work is, 0 to 1."""
    print(f"{PROGRESS}{share:.4f}", file=sys.stderr, flush=True)


def answer(result: Mapping[str, Any]) -> None:
    """Give run_fresh its result. The last thing that the process does."""
    print(json.dumps(dict(result)), flush=True)


def _listen(stream: IO[str], errors: deque[str], progress: Callable[[float], None] | None) -> None:
    for line in stream:
        if not line.startswith(PROGRESS):
            errors.append(line.rstrip())
        elif progress:
            progress(float(line[len(PROGRESS) :]))


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def drop_page_cache(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Write dirty pages of files, and of all files in directories, to disk and forget the clean ones."""
    for file in _files_in(paths):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a dirty page cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


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


def _files_in(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for path in map(Path, paths):
        yield from (item for item in path.rglob("*") if item.is_file()) if path.is_dir() else (path,)
