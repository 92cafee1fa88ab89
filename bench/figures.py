"""The results of a GPU benchmark: printed, and written after each one, so that a killed run keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Figures:
    """Named numbers with their units, and with a target if they have one.

    judged: compare them with the target; False for small sizes, which do not measure speed.
    """

    def __init__(self, path: Path | None = None, *, judged: bool = True) -> None:
        self.found: list[dict[str, Any]] = []
        self._path, self._judged = path, judged

    def add(self, name: str, value: float, unit: str, *, bar: float | None = None, note: str = "") -> None:
        """unit: "x" for a ratio. bar: the target."""
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
