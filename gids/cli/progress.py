"""A progress bar on standard error, shown only on a terminal. Called by the subcommands."""

from __future__ import annotations

import sys
import threading

from tqdm import tqdm

from gids.cli.arguments import printable


class Progress:
    """A context manager. `total` may be set later; any thread may call `add`."""

    def __init__(self, title: str, *, quiet: bool, unit: str = "B") -> None:
        shown = not quiet and sys.stderr.isatty()
        self._lock = threading.Lock()
        self._bar = tqdm(
            desc=title, unit=unit, unit_scale=True, disable=not shown, leave=False, file=sys.stderr
        )

    def total(self, count: int) -> None:
        self._bar.total = count
        self._bar.refresh()

    def add(self, count: int) -> None:
        with self._lock:
            self._bar.update(count)

    def say(self, sentence: str) -> None:
        """Print a line above the bar."""
        self._bar.write(printable(sentence), file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
