"""Process: whether a process of this machine still runs. Used by ranks that wait for each other."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process, as others see it.

    machine: its name, an id that changes when it is started, and the process's namespace of process ids.
    started: when the process was; "" if /proc is missing.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{socket.gethostname()} {boot} {_namespace()}"
            return cls(machine, os.getpid(), _started(os.getpid()) or "")
        return cls(socket.gethostname(), os.getpid(), "")

    def has_ended(self, here: Process) -> bool:
        """Whether it is known to have ended; False if it runs on another machine than `here`, or in another
        namespace."""
        return self.machine == here.machine and bool(self.started) and _started(self.pid) != self.started


def _namespace() -> str:
    """The namespace of process ids; "" if the kernel does not say."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _started(pid: int) -> str | None:
    """When a process was started, or None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
