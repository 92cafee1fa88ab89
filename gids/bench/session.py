"""One bench command: its arguments and report, its time limit and progress."""

from __future__ import annotations

import argparse
import time
from typing import Any

from gids.bench.report import Report


class TimeIsUp(Exception):
    """The time limit has passed: the rest is not measured."""


class Session:
    """args: with seconds, the time limit (0: none), and repeat. progress: a gids.cli.progress.Progress."""

    def __init__(self, args: argparse.Namespace, report: Report, progress: Any = None) -> None:
        self.args, self.report = args, report
        self.repeat: int = args.repeat
        self._deadline = time.monotonic() + args.seconds if args.seconds else float("inf")
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
