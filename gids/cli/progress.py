"""Progress on standard error: a bar on a terminal, else a line per stage. Called by the subcommands."""

from __future__ import annotations

import contextlib
import sys
import threading

from tqdm import tqdm

from gids.cli.arguments import printable


class Progress:
    """A context manager. `stage` and `total` may be called at any time; any thread may call `add`.

    title: of the bar, and the first word of each line. quiet: print only what `say` gets.
    """

    def __init__(self, title: str, *, quiet: bool, unit: str = "B") -> None:
        self._title = title
        self._shared = ""  # the stage of share()
        on_terminal = sys.stderr.isatty()
        self._prints_lines = not quiet and not on_terminal
        self._lock = threading.Lock()
        self._bar = tqdm(
            desc=title,
            unit=unit,
            unit_scale=True,
            disable=quiet or not on_terminal,
            leave=False,
            file=sys.stderr,
        )

    def stage(self, what: str) -> None:
        """Begin a stage, such as a table."""
        self._bar.set_description(f"{self._title}: {printable(what)}")
        if self._prints_lines:
            self.say(f"{self._title}: {what}")

    def total(self, count: int) -> None:
        self._bar.total = count
        self._bar.refresh()

    def share(self, what: str, share: float) -> None:
        """This share of a stage is done, 0 to 1."""
        if what != self._shared:
            self._shared = what
            self.stage(what)
            self.total(100)
        self._bar.n = int(100 * share)
        self._bar.refresh()

    def add(self, count: int) -> None:
        with self._lock:
            self._bar.update(count)

    def say(self, sentence: str) -> None:
        """Print a line above the bar, if anybody still reads."""
        with contextlib.suppress(BrokenPipeError):
            self._bar.write(printable(sentence), file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
