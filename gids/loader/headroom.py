"""How many minibatches from worker processes this process can hold. Called by FrameworkEpoch.

Each tensor that a worker sends costs a file descriptor and shared memory for as long as it lives, so a
window of minibatches can exhaust both where DGL or GraphBolt alone, which hold few, would not.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, as far as the system lets us."""
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
    """Watches what held minibatches use up, from the moment it is made."""

    def __init__(self) -> None:
        self._resources = []
        for name, cure, free in (
            ("file descriptors", "raise `ulimit -n`", _free_descriptors),
            ("bytes of /dev/shm", "enlarge /dev/shm", _free_shared_bytes),
        ):
            with suppress(OSError):  # the system does not have it, so nothing can exhaust it
                self._resources.append(_Resource(name, cure, free, free()))

    def window_limit(self, held: int) -> tuple[int, str] | None:
        """A window that is safe, and why it must be lowered; None while less than half has been used up.

        held: the minibatches sampled and not yet handed over. Half of what they hold leaves room for those
        that are planned, those in the workers' queues and those that the consumer keeps.
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
