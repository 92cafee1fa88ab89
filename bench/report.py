"""Print the figures of bench/results into docs/performance.md and docs/papers.md, between the lines that mark
their tables.

    python bench/report.py            # after a new result: bench/io.py --json bench/results/io.json
    python bench/report.py --check    # exit with 1 if a page would change

A result is what a benchmark writes with --json: its command and its figures; "conditions" is added by hand.
Some tables, rows and columns are in the results only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from papers import PLOTS, TABLES, WORKS, Row, Shown, result_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
SECTIONS = {
    "Reading and training": ["io", "epoch", "epoch-27gb", "rows-pyg", "epoch-by-memory", "rows-mapped"],
    "At full size": ["full-size"],
    "Packs": ["packs-held", "packs-cloud", "packs", "default-big", "default-mid", "epochs-big"],
    "Cache": ["cache-hits", "cache-planning", "cache-gather", "page-size"],
    "Dependent and local minibatches": ["dependent", "dependent-training"],
    "Sampling": ["sampling", "sampling-temporal"],
    "Conversion and storage": [
        *("convert", "convert-16gb", "convert-edges", "kills", "convert-orders", "dtypes"),
    ],
    "Several processes": ["cooperation", "cooperation-caches"],
    "On a GPU": [
        *("gpu-gather", "gpu-planning", "gpu-queue", "gpu-bus", "gpu-sampling"),
        *("gpu-overlap", "gpu-packs", "gpu-training"),
    ],
    "On a GPU with fast files": ["gpu-array"],
}
"""The names of the results in each section of docs/performance.md."""
NOT_SHOWN = [
    *("default-4k", "device-queue", "distributed", "epochs-big-half", "epochs-mid", "gpu-extents"),
    *("little-memory", "packs-4k", "placement", "quickstart"),
]
"""Results that no page has: they repeat others in another size. None misses its target."""
LEFT_OUT = {
    "epoch-27gb": ".*memory of the process.*",
    "full-size": r".*: (rows|opening)|(random|pack): memory.*|(read|written) in .*|peak memory.*"
    "|epoch: 300 minibatches|(random|pack): first.*|generation|edges.*",
    "rows-pyg": r"epoch of PyG, \d+ B, (gids(, packs)?|PyG.*)",
    "epoch-by-memory": "epoch with memory for (1/8|1/2|1) of.*|.*DGL.*",
    "rows-mapped": "the same, torch.*",
    "packs": r"settings.*|.*rows of (128 B|[24] KiB)",
    "packs-cloud": ".*seconds until.*",
    "packs-held": '(reads|writes) of the held disk|the same over (DGL|torch).*|.*"pack".*',
    "default-mid": "MID, (160|256) MB|memory of.*",
    "epochs-big": ".*wait for the first minibatch.*",
    "cache-hits": "the same, W = 20",
    "cache-planning": "10[⁵⁶] lines|.*10⁴ lines",
    "cache-gather": "bfloat16|gather alone, rows of 4 KiB|int8 per .*",
    "page-size": "32 seeds.*|rows of 400 B.*",
    "dependent": "κ = (16|64|∞)|.*`lookahead`.*",
    "dependent-training": ".*factor (2|16)",
    "sampling": "input nodes.*|LABOR-0, 1 thread",
    "sampling-temporal": ".*last.*|.*nodes.*|.disjoint.*",
    "convert": "the same without.*",
    "convert-edges": "10⁹ edges.*|.gids generate.*",
    "convert-orders": "R-MAT.*|converting cold.*|16 classes.*|.*70 %",
    "dtypes": "bfloat16|int8, scale per row",
    "cooperation": "busiest.*|clustered|rows sent.*|.*, 4 ranks: .*",
    "cooperation-caches": "LRU of 3 %.*|clustered.*",
    "gpu-planning": ".*(host time|CPU.*)",
    "gpu-bus": ".*blocks.*",
    "gpu-gather": ".*(read \\+ written|index_select)",
    "gpu-queue": "random pages.*|.*wait warp.*",
    "gpu-sampling": "neighbor sampling 10,5,5.*|.*indptr.*|.*(small|Loader)",
    "gpu-overlap": "reads.*|.*transfer copy.*",
    "gpu-packs": "packs, .*|.*reads=.*",
    "gpu-training": ".*(not waited for|transfer copy)|minibatches of.*",
    "gpu-array": "rows of 512 B, (cpu|cuda|torch).*|.*(main thread|the other pages|tmpfs).*"
    "|.*(virtual disk|cpu).*moved.*|.*cuda by default over torch.*|.*by copies.*",
}
"""Figures (by regular expression) that only the results, or docs/papers.md, have. Failed targets are shown.

By the name of the result."""


def read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def number(value: float) -> str:
    """Four significant digits, but whole numbers below a million as they are; thousands with a comma."""
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e6):
        return f"{value:,.0f}"
    return f"{float(f'{value:.4g}'):,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


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


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """The lines of a table."""
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(v if isinstance(v, str) else number(v) for v in row)} |"


def figures(section: str) -> Iterator[str]:
    """The lines of a section's table: a row for each figure. The first one of a result leads to it."""
    rows = []
    for name in SECTIONS[section]:
        result = read(name)
        script = f"`{result['command'].partition(' --')[0]}`" if result["command"] else "result"
        link = f" ([{script}](../bench/results/{name}.json))"
        for figure in result["figures"]:
            if figure.get("passed") is False or not re.fullmatch(LEFT_OUT.get(name, ""), figure["name"]):
                rows.append((figure["name"] + link, target(figure), measured(figure)))
                link = ""
    yield from markdown(("measurement", "target", "measured"), rows)


def of_papers(section: str) -> Iterator[str]:
    """The lines of a section of docs/papers.md: a row for each item of a paper, or a table."""
    if section in TABLES:
        yield from part_of_table(TABLES[section])
        return
    if section in PLOTS:
        run, title = PLOTS[section]
        there = (ROOT / f"docs/papers-{run}.png").exists()
        yield f"![{title}](papers-{run}.png)" if there else f"Not drawn yet: `{run}`."
        return
    rows = []
    for row in WORKS[section]:
        path = RESULTS / f"{result_of(row.run)}.json"
        item = f"[{row.item}](../bench/results/{path.name})" if path.exists() else row.item
        rows.append((item, row.paper, _ours(row, path), row.differs))
    yield from markdown(("in the paper", "paper", "gids", "what differs"), rows)


def _ours(row: Row, path: Path) -> str:
    """The figures of a row, from the result at path."""
    if not path.exists():
        return f"not measured yet: `{row.run}`"
    by_name = {figure["name"]: figure for figure in read(path.stem)["figures"]}
    ours = []
    for label, name in row.figures:
        # {most}: the largest size that was measured
        pattern = re.escape(name).replace(re.escape("{most}"), r"\d+")
        measures = [f for n, f in by_name.items() if re.fullmatch(pattern, n)]
        if measures:
            ours.append(f"{label}: {measured(measures[0] | {'note': ''})}")
    return "; ".join(ours) or ("below" if not row.figures else "not measured yet")


def part_of_table(shown: Shown) -> Iterator[str]:
    path = RESULTS / f"{result_of(shown.run)}.json"
    for table in read(path.stem)["tables"] if path.exists() else []:
        if table["title"].startswith(shown.title) and not table["title"].endswith("curves"):
            rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
            rows = [row for row in rows if all(row[name] in values for name, values in shown.only.items())]
            yield from (f"{table['title'][0].upper()}{table['title'][1:]}:", "")
            yield from markdown(shown.columns, ([row[name] for name in shown.columns] for row in rows))
            return
    yield f"Not measured yet: `{shown.run}`."


PAGES: dict[str, Callable[[str], Iterator[str]]] = {
    "papers.md": of_papers,
    "performance.md": figures,
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
