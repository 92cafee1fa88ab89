"""Process: whether a process of this machine still runs. Used by ranks that wait for each other."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """machine: its name, and an id that changes when it is started. started: when the process was."""

    machine: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(f"{socket.gethostname()} {boot}", os.getpid(), _started(os.getpid()) or "")
        return cls(socket.gethostname(), os.getpid(), "")

    def has_ended(self, here: Process) -> bool:
        """Whether it is known to have ended; False if it ran on another machine than `here`."""
        return self.machine == here.machine and bool(self.started) and _started(self.pid) != self.started


def _started(pid: int) -> str | None:
    """When a process was started, or None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
