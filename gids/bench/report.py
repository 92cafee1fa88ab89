"""The result of a bench command: filled by the questions, printed and written as JSON by gids.cli.bench.

docs/bench-schema.json describes the JSON, docs/bench.md the metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gids.bench.machine import this_machine, versions
from gids.bench.text import Column, aligned

if TYPE_CHECKING:
    from gids.cli.progress import Progress

SCHEMA_VERSION = 3
Setting = Mapping[str, str | int | float | bool | None]


@dataclass
class Figure:
    """The metrics of one setting: a value per repeat. Metrics that were not measured are absent."""

    setting: Setting
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **metrics: float | None) -> None:
        """Add the metrics of one repeat."""
        for name, value in metrics.items():
            if value is not None:
                self.values.setdefault(name, []).append(float(value))

    def median(self, metric: str) -> float | None:
        values = self.values.get(metric)
        return median(values) if values else None

    def cell(self, column: Column) -> str:
        middle = self.median(column.metric)
        if middle is None:
            return "-"
        values = self.values[column.metric]
        if not column.spread or len(values) < 2:
            return column.show(middle)
        return f"{column.show(middle)} ({column.show(min(values))} to {column.show(max(values))})"


@dataclass
class Report:
    """The result of a command. subject: dataset, table, sizes. notes: conditions of the measurement.

    partial: "interrupted", or None.
    """

    question: str
    command: Sequence[str]
    seed: int = 0
    repeat: int = 1
    partial: str | None = None
    subject: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._started = datetime.now(UTC)
        self._begun = time.perf_counter()

    def figure(self, **setting: str | int | float | bool | None) -> Figure:
        """Return the figure of a setting; add it if it is new."""
        for figure in self.figures:
            if figure.setting == setting:
                return figure
        self.figures.append(Figure(setting))
        return self.figures[-1]

    @property
    def measured(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.values]

    def note(self, sentence: str) -> None:
        """Add a note, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def as_json(self) -> dict[str, Any]:
        return {
            "format": "gids-bench",
            "version": SCHEMA_VERSION,
            "question": self.question,
            "command": list(self.command),
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - self._begun, 3),
            "seed": self.seed,
            "repeat": self.repeat,
            "partial": self.partial,
            "machine": this_machine(),
            "versions": versions(),
            "subject": self.subject,
            "notes": self.notes,
            "answers": self.answers,
            "figures": [
                {
                    "setting": dict(figure.setting),
                    "metrics": {name: _spread(values) for name, values in figure.values.items()},
                }
                for figure in self.measured
            ],
        }

    def write(self, path: Path) -> None:
        """Write the JSON. Raises OSError."""
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n")

    def as_text(self, settings: Mapping[str, str], columns: Sequence[Column]) -> str:
        """The subject, the table, the answers and the notes. settings: key -> title."""
        common = self._shared(settings)
        facts = {key.replace("_", " "): value for key, value in self.subject.items()}
        facts |= {settings[key]: value for key, value in common.items()}
        parts = [f"{key} {_word(value)}" for key, value in facts.items()] + [f"seed {self.seed}"]
        if self.repeat > 1:
            parts.append(f"{self.repeat} repeats: medians (range)")
        blocks = [textwrap.fill("; ".join(parts), 110)]
        if self.measured:
            shown = {key: title for key, title in settings.items() if key not in common}
            blocks.append(self._table(shown, columns))
        sentences = [*self.answers, *(f"note: {note}" for note in self.notes)]
        blocks.append("\n".join(textwrap.fill(each, 110, subsequent_indent="  ") for each in sentences))
        return "\n\n".join(blocks)

    def _shared(self, settings: Mapping[str, str]) -> dict[str, object]:
        """The settings, except the first one, that have the same value in all figures."""
        same: dict[str, object] = {}
        for key in list(settings)[1:]:
            values = {f.setting.get(key) for f in self.measured} - {None}
            if len(values) == 1:
                same[key] = values.pop()
        return same

    def _table(self, settings: Mapping[str, str], columns: Sequence[Column]) -> str:
        """A line per figure; with one setting a column per figure. Without empty columns."""
        used = [c for c in columns if any(c.metric in f.values for f in self.measured)]
        keys = [k for k in settings if any(f.setting.get(k) is not None for f in self.measured)]
        rows = [[settings[k] for k in keys] + [c.title for c in used]]
        for figure in self.measured:
            words = [figure.setting.get(k) for k in keys]
            rows.append(["-" if w is None else str(w) for w in words] + [figure.cell(c) for c in used])
        if len(settings) == 1:
            return aligned(list(zip(*rows, strict=True)), left=1)
        return aligned(rows, left=len(keys))


@dataclass(frozen=True)
class Session:
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


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "least": min(values), "most": max(values), "values": list(values)}


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
