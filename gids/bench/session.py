"""Time limit and progress: a Session of a bench command, and a Step of the quickstart."""

from __future__ import annotations

import sys
import threading
import time
from typing import Protocol

_REFRESH_S, _LINE_S = 1.0, 10.0  # how often a Step updates a terminal; how often it adds a line to a file


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


class Step:
    """Progress of a part of a long command, on standard error: a context manager.

    On a terminal it updates one line with the share done and the seconds. Elsewhere it prints a line at the
    start, every ten seconds, and at the end. `show` and `say` may be called from any thread.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._done = ""
        self._said: list[str] = []
        self._begun = time.perf_counter()
        self._terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="gids-step", daemon=True)

    def show(self, share: float, what: str = "") -> None:
        """Set the share done, 0 to 1, and the name of the work."""
        self._done = f"{what} {share:.0%}".strip()

    def say(self, sentence: str) -> None:
        """Print a sentence when the step ends. An empty one prints nothing."""
        if sentence:
            self._said.append(sentence)

    def _tick(self) -> None:
        while not self._end.wait(_REFRESH_S if self._terminal else _LINE_S):
            self._report()

    def _report(self) -> None:
        self._write(f"{self._done} after {time.perf_counter() - self._begun:.0f} s".strip(), last=False)

    def __enter__(self) -> Step:
        self._write("", last=False)
        self._ticker.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._end.set()
        self._ticker.join()
        failed = "failed after " if kind else ""
        self._write(f"{failed}{time.perf_counter() - self._begun:.1f} s", last=True)
        for sentence in self._said:
            print(f"  {sentence}", file=sys.stderr, flush=True)

    def _write(self, text: str, *, last: bool) -> None:
        line = f"{self._title} ... {text}".rstrip()
        with self._lock:
            if self._terminal:
                print(f"\r{line}\x1b[K", end="\n" if last else "", file=sys.stderr, flush=True)
            else:
                print(line, file=sys.stderr, flush=True)
