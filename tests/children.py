"""Forks of tests that end, and the memory of this process."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch


def ended(work: Callable[[], object]) -> None:
    """Run work() in a fork of this process, which ends then."""
    assert status(work) == 0


def status(work: Callable[[], object]) -> int:
    """The status of a fork of this process that runs work()."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        pid = os.fork()
    if not pid:
        torch.set_num_threads(1)  # OpenMP's threads are the parent's
        with contextlib.suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
