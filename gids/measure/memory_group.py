"""Memory control groups (v1 or v2): limit the memory of a process and its children, and measure it.

Unlike an rlimit, a group counts the page cache too. Making one usually needs root. Called by isolation.py and
by the processes that it starts. Knows nothing of graphs.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_GROUP_VARIABLE = "GIDS_MEMORY_GROUP"  # the group in which a process was started
_NO_LIMIT = 1 << 60  # v1 reports a missing limit as a number near 2**63
_SAMPLE_S = 0.003


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
