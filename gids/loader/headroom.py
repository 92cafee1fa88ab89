"""Number of minibatches from worker processes that this process can hold. Called by FrameworkEpoch.

Each tensor from a worker takes a file descriptor and shared memory while it lives, so a window of minibatches
can exhaust both. DGL and GraphBolt alone hold few minibatches.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # an unlimited hard limit may be refused
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _free_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))


def _free_shared_bytes() -> int:
    stat = os.statvfs("/dev/shm")
    return stat.f_bavail * stat.f_frsize


@dataclass
class _Resource:
    name: str
    cure: str
    free: Callable[[], int]
    free_at_start: int


class Headroom:
    """Measures what the held minibatches use, compared with the moment when this was made."""

    def __init__(self) -> None:
        self._resources = []
        for name, cure, free in (
            ("file descriptors", "raise `ulimit -n`", _free_descriptors),
            ("bytes of /dev/shm", "enlarge /dev/shm", _free_shared_bytes),
        ):
            with suppress(OSError):  # the system has no such resource
                self._resources.append(_Resource(name, cure, free, free()))

    def window_limit(self, held: int) -> tuple[int, str] | None:
        """A safe window, and why it must be lowered; None while less than half of each resource is used.

        held: number of minibatches that are sampled and not yet handed out. The other half is for the planned
        ones, those in the workers' queues and those that the consumer keeps.
        """
        for kind in self._resources:
            free = kind.free()
            if 2 * free < kind.free_at_start:
                reason = (
                    f"{held} minibatches from worker processes left {free} of {kind.free_at_start} "
                    f"{kind.name}; {kind.cure}"
                )
                return max(1, held // 2), reason
        return None
