"""A session: how long a bench command may still take, its progress, and the end of its patience.

Called by the questions between, and now and then within, their measurements. Knows nothing of what they
measure.
"""

from __future__ import annotations

import time
from typing import Protocol


class Progress(Protocol):
    """Shows how many runs are measured."""

    def total(self, count: int) -> None: ...
    def add(self, count: int) -> None: ...


class TimeIsUp(Exception):
    """The seconds that were given have passed: what is not measured yet stays unmeasured."""


class Session:
    """Bounds and progress of one command.

    seconds: time limit of the command; 0: none. repeat: number of measurements of each setting.
    """

    def __init__(self, *, seconds: float = 0, repeat: int = 1, progress: Progress | None = None) -> None:
        self.repeat = repeat
        self._deadline = time.monotonic() + seconds if seconds else float("inf")
        self._left = 0  # runs to be measured, once total() has told
        self._progress = progress

    def left_s(self) -> float:
        """Seconds that are left; infinite without a bound."""
        return self._deadline - time.monotonic()

    def check(self) -> None:
        """Raise TimeIsUp once the seconds have passed."""
        if self.left_s() <= 0:
            raise TimeIsUp

    def total(self, runs: int) -> None:
        """How many runs there will be."""
        self._left = runs
        if self._progress is not None:
            self._progress.total(runs)

    def done(self) -> None:
        """One run is measured.

        Raises TimeIsUp when it was the last that the time allows, and others are left.
        """
        self._left -= 1
        if self._progress is not None:
            self._progress.add(1)
        if self._left:
            self.check()
