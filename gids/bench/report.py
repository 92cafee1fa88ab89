"""The result of a bench command: filled by the questions, printed and written as JSON by gids.cli.bench.

docs/bench-schema.json describes the JSON, docs/bench.md the metrics. `gids partition` prints its table, too.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gids.bench.machine import this_machine, versions

if TYPE_CHECKING:
    from gids.cli.progress import Progress

SCHEMA_VERSION = 3
Setting = Mapping[str, str | int | None]


class Column(NamedTuple):
    """A column of a report. show: formats a number."""

    title: str
    metric: str
    show: Callable[[float], str]


class Figure(NamedTuple):
    """The metrics of one setting. Metrics that were not measured are absent."""

    setting: Setting
    metrics: dict[str, float]


@dataclass
class Report:
    """The result of a command. subject: dataset, table, sizes. notes: conditions of the measurement."""

    question: str
    command: Sequence[str]
    seed: int = 0
    subject: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    begun_s: float = field(default_factory=time.perf_counter)

    def add(self, setting: Setting, metrics: Mapping[str, float | None]) -> None:
        """Add a figure."""
        measured = {name: float(value) for name, value in metrics.items() if value is not None}
        self.figures.append(Figure(setting, measured))

    def note(self, sentence: str) -> None:
        """Add a note, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def write(self, path: Path) -> None:
        """Write the JSON. Raises OSError."""
        contents = {
            "format": "gids-bench",
            "version": SCHEMA_VERSION,
            "question": self.question,
            "command": list(self.command),
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - self.begun_s, 3),
            "seed": self.seed,
            "machine": this_machine(),
            "versions": versions(),
            "subject": self.subject,
            "notes": self.notes,
            "answers": self.answers,
            "figures": [figure._asdict() for figure in self.figures],
        }
        path.write_text(json.dumps(contents, indent=2) + "\n")

    def as_text(self, settings: Mapping[str, str], columns: Sequence[Column]) -> str:
        """The subject, the table, the answers and the notes. settings: key -> title."""
        parts = [f"{key.replace('_', ' ')} {_word(value)}" for key, value in self.subject.items()]
        blocks = [textwrap.fill("; ".join([*parts, f"seed {self.seed}"]), 110)]
        if self.figures:
            blocks.append(self._table(settings, columns))
        sentences = [*self.answers, *(f"note: {note}" for note in self.notes)]
        blocks.append("\n".join(textwrap.fill(each, 110, subsequent_indent="  ") for each in sentences))
        return "\n\n".join(blocks)

    def _table(self, settings: Mapping[str, str], columns: Sequence[Column]) -> str:
        """A line per figure; with one setting a column per figure. Without empty columns."""
        used = [c for c in columns if any(c.metric in f.metrics for f in self.figures)]
        rows = [[*settings.values(), *(c.title for c in used)]]
        for setting, metrics in self.figures:
            words = ["-" if (word := setting.get(key)) is None else str(word) for key in settings]
            rows.append(words + [c.show(metrics[c.metric]) if c.metric in metrics else "-" for c in used])
        if len(settings) == 1:
            return aligned(list(zip(*rows, strict=True)), left=1)
        return aligned(rows, left=len(settings))


class Session(NamedTuple):
    """The arguments of a command, its report, and its progress in runs."""

    args: argparse.Namespace
    report: Report
    progress: Progress


def check_writable(path: Path) -> None:
    """Raise OSError, before the measurement, if path cannot be written. Does not change the file."""
    folder = path.absolute().parent
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: give the name of a file in it")
    if str(path) == "-" or folder.is_relative_to("/dev") or folder.is_relative_to("/proc"):
        raise PermissionError(f"{path} is not a file: give the name of a file to write")
    if not folder.is_dir():
        raise FileNotFoundError(f"no directory {folder} to write {path.name} in")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(f"{path} cannot be written")


def aligned(rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """A table. The first row has the titles, with a rule below them.

    left: number of columns that are aligned to the left, the others are to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "   ".join(cells).rstrip()

    titles, *lines = map(line, rows)
    return "\n".join([titles, "-" * max(map(len, [titles, *lines])), *lines])


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.2f}"


def millions(value: float) -> str:
    """About three digits."""
    return _three_digits(value / 1e6)


def seconds(value: float) -> str:
    """In ns, us, ms or s."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)} {unit}"
    return f"{value / 1e-9:.0f} ns"


def _three_digits(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
