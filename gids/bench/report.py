"""A report: what a bench command measured, and on what. Filled by the questions, written by gids.cli.bench.

Its JSON is docs/bench-schema.json's; bench.md says what each figure means.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from gids.measure.machine import commit, this_machine, versions

SCHEMA_VERSION = 1
Setting = Mapping[str, str | int | float | bool | None]


@dataclass
class Figure:
    """What one setting gave: each metric's values, one per repeat.

    A metric that was not measured is absent.
    """

    setting: Setting
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **metrics: float | None) -> None:
        """One repeat's."""
        for name, value in metrics.items():
            if value is not None:
                self.values.setdefault(name, []).append(float(value))

    def median(self, metric: str) -> float | None:
        found = self.values.get(metric)
        return median(found) if found else None


@dataclass
class Report:
    """What a command answers.

    partial: why not all was measured as it was asked for ("interrupted", "time"), or None. "time": settings
    are missing, or runs were cut short.

    subject: what was measured (dataset, table, sizes). notes: sentences that a reader of the figures must
    know; notes_above: those to be read before the figures. series: named sequences of numbers, such as those
    of single iterations.
    """

    question: str
    command: Sequence[str]
    seed: int = 0
    repeat: int = 1
    partial: str | None = None
    subject: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    notes_above: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    series: list[dict[str, Any]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._started = datetime.now(UTC)
        self._begun = time.perf_counter()

    def figure(self, **setting: str | int | float | bool | None) -> Figure:
        """The figure of a setting, a new one when there is none."""
        for found in self.figures:
            if found.setting == setting:
                return found
        self.figures.append(Figure(setting))
        return self.figures[-1]

    def note(self, sentence: str) -> None:
        """Say it once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def cut_short(self, sentence: str) -> None:
        """What is there was measured over less than was asked for, for --seconds."""
        self.partial = self.partial or "time"
        self.note(sentence)

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
            "machine": this_machine().as_json(),
            "versions": versions(),
            "commit": commit(),
            "subject": self.subject,
            "notes": [*self.notes_above, *self.notes],
            "answers": self.answers,
            "figures": [
                {
                    "setting": dict(figure.setting),
                    "metrics": {name: _spread(values) for name, values in figure.values.items()},
                }
                for figure in self.figures
                if figure.values
            ],
            "series": self.series,
        }

    def write(self, path: Path) -> None:
        """Write the JSON: to a file all of it or nothing, to a pipe or device as it is. Raises OSError."""
        text = json.dumps(self.as_json(), indent=2) + "\n"
        if not _is_file(path):
            path.write_text(text)
            return
        part = _part(path)
        try:
            part.write_text(text)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def check_writable(path: Path) -> None:
    """Raise OSError, before anything is measured, when a file cannot be written at path; leaves it alone."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name a file in it")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"no directory {path.absolute().parent} to write {path.name} in")
    if not _is_file(path):
        return
    try:
        _part(path).touch()
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {error.strerror}") from None
    _part(path).unlink()


def _is_file(path: Path) -> bool:
    """Whether path is a file, or becomes one; a pipe or a device would be replaced by one."""
    return path.is_file() or not path.exists()


def _part(path: Path) -> Path:
    """What is written first, then takes the place of path."""
    return path.with_name(path.name + ".part")


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "least": min(values), "most": max(values), "values": list(values)}
