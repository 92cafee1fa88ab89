"""Time limit and progress of a bench command."""

from __future__ import annotations

import time
from typing import Protocol


class Progress(Protocol):
    """Shows the number of runs done: gids.cli.progress.Progress."""

    def total(self, count: int) -> None: ...
    def add(self, count: int) -> None: ...


class TimeIsUp(Exception):
    """The time limit has passed: the rest is not measured."""


class Session:
    """Bounds and progress of one command.

    seconds: time limit of the command; 0: none. repeat: number of measurements of each setting.
    """

    def __init__(self, *, seconds: float = 0, repeat: int = 1, progress: Progress | None = None) -> None:
        self.repeat = repeat
        self._deadline = time.monotonic() + seconds if seconds else float("inf")
        self._left = 0  # runs to measure, once total() was called
        self._progress = progress

    def left_s(self) -> float:
        """Seconds left; infinite without a limit."""
        return self._deadline - time.monotonic()

    def check(self) -> None:
        """Raise TimeIsUp if the time limit has passed."""
        if self.left_s() <= 0:
            raise TimeIsUp

    def total(self, runs: int) -> None:
        """Set the number of runs."""
        self._left = runs
        if self._progress is not None:
            self._progress.total(runs)

    def done(self) -> None:
        """Count a run as done. Raises TimeIsUp if the time limit has passed and runs are left."""
        self._left -= 1
        if self._progress is not None:
            self._progress.add(1)
        if self._left:
            self.check()
