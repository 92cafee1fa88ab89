"""Print the figures of bench/results into docs/performance.md and their conditions into
docs/performance-conditions.md, between the lines that mark these tables.

    python bench/report.py            # after a new result: bench/io.py --json bench/results/io.json
    python bench/report.py --check    # exit with 1 if a page would change

A result is what a benchmark writes with --json: its command and its figures; "conditions" is added by hand.
Whole tables of some benchmarks are in the results only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
SECTIONS = {
    "Reading and training": ["io", "epoch", "rows-mapped", "device-queue", "little-memory"],
    "Packs": [
        *("packs-held", "packs-4k", "packs", "default-4k", "default-big", "default-mid"),
        *("quickstart", "epochs-mid", "epochs-big", "epochs-big-half"),
    ],
    "Cache": ["cache-hits", "cache-planning", "cache-gather", "page-size"],
    "Dependent and local minibatches": ["dependent", "dependent-training"],
    "Sampling": ["sampling", "sampling-temporal", "sampling-bulk"],
    "Conversion and storage": [
        *("convert", "convert-16gb", "convert-edges", "kills", "convert-orders", "dtypes"),
    ],
    "Several processes": [
        *("cooperation", "cooperation-replicas", "cooperation-caches", "distributed", "placement"),
    ],
    "GraphBolt": ["graphbolt", "graphbolt-hits"],
    "Claims of the paper": ["paper"],
}
"""The names of the results in each section of docs/performance.md."""


def read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def number(value: float) -> str:
    """Four digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def measured(figure: dict[str, Any]) -> str:
    """A list is the range of several runs or settings."""
    value, unit = figure["value"], {"x": "\N{MULTIPLICATION SIGN}"}.get(figure["unit"], figure["unit"])
    text = " to ".join(map(number, value)) if isinstance(value, list) else number(value)
    note = f" ({figure['note']})" if figure["note"] else ""
    return f"{text} {unit}".strip() + note


def target(figure: dict[str, Any]) -> str:
    unit = "" if figure["unit"] == "x" else f" {figure['unit']}"
    limits = {"≥": figure.get("bar"), "≤": figure.get("most")}
    return ", ".join(f"{sign} {number(limit)}{unit}" for sign, limit in limits.items() if limit is not None)


def figures(section: str) -> Iterator[str]:
    """The lines of a section's table: a row for each figure."""
    yield from ("| measurement | command | target | measured |", "|---|---|---|---|")
    for name in SECTIONS[section]:
        result = read(name)
        command = f"`{result['command']}`" if result["command"] else ""
        for figure in result["figures"]:
            yield f"| {figure['name']} | {command} | {target(figure)} | {measured(figure)} |"
            command = ""


def conditions(section: str) -> Iterator[str]:
    for name in SECTIONS[section]:
        result = read(name)
        if result.get("conditions"):
            yield f"* [`{name}`](../bench/results/{name}.json): {result['conditions']}."


PAGES: dict[str, Callable[[str], Iterator[str]]] = {
    "performance.md": figures,
    "performance-conditions.md": conditions,
}


def with_tables(page: str, lines_of: Callable[[str], Iterator[str]]) -> str:
    """The page with new lines between each `<!-- results: SECTION -->` and `<!-- end -->`."""

    def replace(match: re.Match[str]) -> str:
        return "\n".join([match[1], "", *lines_of(match[2]), "", "<!-- end -->"])

    return re.sub(r"(<!-- results: ([\w ]+) -->)\n.*?<!-- end -->", replace, page, flags=re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a page would change"
    )
    args = parser.parse_args(arguments)
    changed = []
    for name, lines_of in PAGES.items():
        page = ROOT / "docs" / name
        before = page.read_text()
        after = with_tables(before, lines_of)
        if after != before:
            changed.append(name)
            if not args.check:
                page.write_text(after)
    print("changed:", ", ".join(changed) or "nothing")
    return int(args.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
