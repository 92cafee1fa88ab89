"""What a benchmark found: printed at once and written after each, so that a killed run leaves its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Figures:
    """Named numbers with their units, and with the bar that they are held to, if there is one.

    judged: hold them to it. Small sizes show nothing of speed, and are not.
    """

    def __init__(self, path: Path | None = None, *, judged: bool = True) -> None:
        self.found: list[dict[str, Any]] = []
        self._path, self._judged = path, judged

    def add(self, name: str, value: float, unit: str, *, bar: float | None = None, note: str = "") -> None:
        """unit: "x" for a ratio. bar: the least that passes."""
        passed = bool(value >= bar) if bar is not None and self._judged else None
        figure = {
            "name": name,
            "value": float(value),
            "unit": unit,
            "bar": bar,
            "passed": passed,
            "note": note,
        }
        self.found.append(figure)
        verdict = {True: "passed", False: "FAILED", None: "not judged"}[passed]
        held = "" if bar is None else f"  (target {bar:,.4g}: {verdict})"
        print(f"{name}: {value:,.4g} {unit}{held}{f'  {note}' if note else ''}", flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps({"figures": self.found}, indent=2) + "\n")
