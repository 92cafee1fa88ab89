"""Forks of tests that end or are killed, and what a process holds."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def killed(work: Callable[[], object], target: Any, name: str, *, after: bool = False) -> None:
    """Run work() in a fork of this process that is killed before, or after, it calls target.name."""
    called = getattr(target, name)

    def die(*arguments: Any, **options: Any) -> None:
        if after:
            called(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    def work_until_then() -> None:
        setattr(target, name, die)
        work()

    assert os.WTERMSIG(status(work_until_then)) == signal.SIGKILL


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
