"""The result of a bench command: filled by the questions, written by gids.cli.bench.

docs/bench-schema.json describes the JSON, docs/bench.md the metrics.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gids.measure.machine import this_machine, versions

if TYPE_CHECKING:
    from gids.cli.progress import Progress

SCHEMA_VERSION = 2
_STREAMS = {"-": "/dev/fd/1", "/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}
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


@dataclass
class Report:
    """The result of a command.

    partial: "interrupted", or "time" if --seconds stopped an epoch before all was measured; else None.
    subject: dataset, table, sizes. notes: conditions of the measurement; notes_above are printed above the
    table.
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
            "machine": this_machine().as_json(),
            "versions": versions(),
            "subject": self.subject,
            "notes": [*self.notes_above, *self.notes],
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
        write_text(path, json.dumps(self.as_json(), indent=2) + "\n")


@dataclass(frozen=True)
class Session:
    """The arguments of a command, its report, and its progress in runs."""

    args: argparse.Namespace
    report: Report
    progress: Progress


def check_writable(path: Path) -> None:
    """Raise OSError, before the measurement, if path cannot be written. Does not change the file."""
    folder, descriptor = path.absolute().parent, _descriptor(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: give the name of a file in it")
    if not folder.is_dir():
        raise FileNotFoundError(f"no directory {folder} to write {path.name} in")
    if descriptor is None:
        is_writable = os.access(path if path.exists() else folder, os.W_OK)
    else:
        is_writable = False
        with contextlib.suppress(OSError, OverflowError):  # it is not open
            is_writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    if not is_writable:
        raise PermissionError(f"{path} cannot be written")


def write_text(path: Path, text: str) -> None:
    """Write a file. One that is open already, such as /dev/stdout, goes on where it is. Raises OSError."""
    descriptor = _descriptor(path)
    print(end="", flush=True)  # also without a stdout
    with path.open("w") if descriptor is None else open(descriptor, "w", closefd=False) as file:
        file.write(text)


def _descriptor(path: Path) -> int | None:
    """The number of an open file that a path is, such as /dev/fd/1; None: it is a path of files."""
    is_open = re.fullmatch(r"(?:/dev|/proc/self)/fd/(\d+)", _STREAMS.get(str(path), str(path)))
    return int(is_open[1]) if is_open else None


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "least": min(values), "most": max(values), "values": list(values)}
