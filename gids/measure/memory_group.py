"""Memory control groups (v1 or v2): bound the memory of a process and its children, and measure it.

A group counts the page cache too, which an rlimit would not. To make one usually needs root. Used by
isolation.py, and by the processes that it starts. Knows nothing of graphs.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

_GROUP_VARIABLE = "GIDS_MEMORY_GROUP"  # tells a process in which group it was started
_NO_LIMIT = 1 << 60  # v1 reports a missing limit as a number near 2**63
_SAMPLE_S = 0.003


class MemoryGroup:
    """A memory control group below this process's own, for the processes that ``command`` starts.

    A context manager that removes the group; its processes must be gone by then. Raises OSError where the
    kernel or the rights to make a group are missing.
    """

    def __init__(self, name: str) -> None:
        self.path = _make_group(name)

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process in the group needs in its environment for the functions below."""
        return {_GROUP_VARIABLE: str(self.path)}

    def command(self, command: list[str]) -> list[str]:
        """A command that joins the group and then becomes ``command``: so all its memory is counted."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    def limit_bytes(self) -> int | None:
        """The limit that is set now; None where there is none."""
        text = _first(self.path, "memory.max", "memory.limit_in_bytes").read_text().strip()
        return None if text == "max" or int(text) >= _NO_LIMIT else int(text)

    def kills(self) -> int:
        """Number of the group's processes that the kernel has killed for want of memory."""
        return _fields(_first(self.path, "memory.events", "memory.oom_control")).get("oom_kill", 0)

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(50):  # the kernel lets go of a group shortly after its last process
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def limit_own_memory(limit_bytes: int | None) -> None:
    """Bound the memory, page cache included, of the MemoryGroup that this process was started in.

    None removes the limit. Raises OSError when the kernel cannot shrink the group to the limit.
    """
    file = _first(_own_group(), "memory.max", "memory.limit_in_bytes")
    unlimited = "max" if file.name == "memory.max" else "-1"
    file.write_text(unlimited if limit_bytes is None else str(limit_bytes))


def own_memory_bytes() -> int:
    """Memory that this process's MemoryGroup has in use, without the pages of files: those can be dropped."""
    group = _own_group()
    used = int(_first(group, "memory.current", "memory.usage_in_bytes").read_text())
    fields = _fields(group / "memory.stat")
    return used - sum(
        fields.get(f"total_{name}", fields.get(name, 0)) for name in ("inactive_file", "active_file")
    )


class OwnPeak:
    """The most that own_memory_bytes() reports while this context manager is entered, in `peak_bytes`."""

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
    """Lines of a name and a number."""
    return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}


def _make_group(name: str) -> Path:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for _, mount, kind, options, *_ in mounts:
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in own:
            return _make_below(_inside(mount, own["memory"]), name)
    for _, mount, kind, *_ in mounts:
        # In v2 a group with processes has no controlled children, so ours may have to be a cousin of our own.
        if kind == "cgroup2" and "" in own:
            start = _inside(mount, own[""])
            for parent in (start, *start.parents):
                if not parent.is_relative_to(mount):
                    break
                if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                    return _make_below(parent, name)
    raise OSError(0, "the kernel offers no memory controller here")


def _make_below(parent: Path, name: str) -> Path:
    """Under a new name: a group of an earlier run may still be there."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-{os.getpid()}-", dir=parent))


def _inside(mount: str, group: str) -> Path:
    path = Path(mount) / group.lstrip("/")
    return path if path.is_dir() else Path(mount)  # in a container the mount may be our own group already
