"""Code that benchmarks share: options, alternating repeats, results, files with known contents.

gids.measure has fresh processes, a cold page cache and memory limits; gids.bench.probe has the disk's rate.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from report import number

import gids.io
from gids.bench.arguments import integers as integers
from gids.measure.isolation import run_fresh
from gids.measure.machine import this_machine, versions
from gids.measure.memory_group import MemoryGroup
from gids.measure.sides import why_no_limit
from gids.write import DatasetWriter

T = TypeVar("T")

DEFAULT_READ_AHEAD_BYTES = 128 << 10  # of Linux; some images raise it
PAGE_BYTES = 4096
_FIO = "fio --name=x --ioengine=io_uring --direct=1 --bs=256k --iodepth=32 --time_based --output-format=json"
_FIO_SECONDS, _FIO_BYTES = 4, 2 << 30
_OPTIONS: dict[str, dict[str, Any]] = {
    "dir": {
        "type": Path,
        "default": Path(tempfile.gettempdir()),
        "help": "directory on the disk to measure (default: the temporary directory)",
    },
    "keep": {"action": "store_true", "help": "keep the files for the next run"},
    "repeat": {"type": int, "default": 7, "help": "repeats of each measurement (default: 7)"},
    "rounds": {"type": int, "default": 7, "help": "rounds of alternating sides (default: 7)"},
    "seed": {"type": int, "default": 0, "help": "random seed (default: 0)"},
}


def disk_rates(shard: Path, folder: Path) -> dict[str, float] | None:
    """Bytes per second by fio; None if it is not installed.

    "read": long reads of a shard; "write": long writes to a new file in a folder.
    """
    if not shutil.which("fio"):
        return None
    rates = {}
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for kind, path, size in (("read", shard, shard.stat().st_size), ("write", file.name, _FIO_BYTES)):
            job = [f"--rw={kind}", f"--filename={path}", f"--size={size}", f"--runtime={_FIO_SECONDS}"]
            command = [*_FIO.split(), *job, *(["--readonly"] if kind == "read" else [])]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rates[kind] = float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])
    return rates


def make_parser(description: str | None, *options: str) -> argparse.ArgumentParser:
    """A parser with --json, --small and these shared options: dir, keep, repeat, rounds, seed."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in options:
        parser.add_argument(f"--{option}", **_OPTIONS[option])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE, after each one")
    parser.add_argument("--small", action="store_true", help="small size for tests")
    return parser


def alternate(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every side once per round, in reverse order every other round, so that drift affects all alike."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(rounds):
        names = list(sides)
        for name in names if turn % 2 == 0 else reversed(names):
            results[name].append(sides[name]())
    return results


class Figures:
    """The results of a benchmark: printed, and written to args.json after each one.

    A killed run keeps what it wrote. bench/report.py prints such files as the tables of docs/performance.md.

    args: of make_parser. Small sizes do not measure speed, so their figures are not judged by their targets.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.figures: list[dict[str, Any]] = []
        self.tables: list[dict[str, Any]] = []
        self._path, self._judged = args.json, not args.small
        options = re.sub(r" --json \S+", "", " ".join(sys.argv[1:]))
        self._run = {
            "command": f"bench/{Path(sys.argv[0]).name} {options}".strip(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": this_machine().as_json(),
            "versions": versions(),
        }

    def add(
        self,
        name: str,
        value: float | tuple[float, float],
        unit: str,
        *,
        bar: float | None = None,
        most: float | None = None,
        note: str = "",
    ) -> None:
        """value: one, or the least and the greatest of several settings. unit: "x" for a ratio. bar: the
        target, the least good value; most: the greatest good value."""
        passed, values = None, value if isinstance(value, tuple) else (value, value)
        if self._judged and (bar is not None or most is not None):
            passed = bool((bar is None or values[0] >= bar) and (most is None or values[1] <= most))
        figure = {
            "name": name,
            "value": [*map(float, value)] if isinstance(value, tuple) else float(value),
            "unit": unit,
            "bar": bar,
            "passed": passed,
            "note": note,
        }
        self.figures.append(figure if most is None else figure | {"most": most})
        verdict = {True: "passed", False: "FAILED", None: "not judged"}[passed]
        limits = [
            f"{sign} {number(limit)}" for sign, limit in ((">=", bar), ("<=", most)) if limit is not None
        ]
        target = f"  (target {' and '.join(limits)}: {verdict})" if limits else ""
        shown = " to ".join(map(number, dict.fromkeys(values)))
        print(f"{name}: {shown} {unit}{target}{f'  {note}' if note else ''}", flush=True)
        self._write()

    def ratio(self, name: str, above: Sequence[float], below: Sequence[float], **options: Any) -> None:
        """Add the median of the rounds' ratios. options: of add."""
        self.add(name, median(a / b for a, b in zip(above, below, strict=True)), "x", **options)

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print rows, which all have the same columns, in Markdown: floats with three significant digits,
        numbers from 1000 on in thousands."""
        if not rows:
            return
        columns = list(rows[0])
        print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for row in rows:
            print(f"| {' | '.join(_shown(row[column]) for column in columns)} |", flush=True)
        lines = [[_plain(row[column]) for column in columns] for row in rows]
        self.tables.append({"title": title, "columns": columns, "rows": lines})
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            whole = {**self._run, "figures": self.figures, "tables": self.tables}
            self._path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _shown(value: object) -> str:
    value = _plain(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:,.{2 if name == ' M' else 1}f}{name}"
    return f"{value:d}" if isinstance(value, int) else f"{value:.3g}"


def run_limited(module: str, config: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Run a side, a module of this folder, in a fresh process. options: of run_fresh, whose errors it raises.

    The process can limit its memory if "limited" is true in the config that it gets.
    """
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    with ExitStack() as stack:
        group = None if why_no_limit() else stack.enter_context(MemoryGroup("gids-bench"))
        return run_fresh(module, {**config, "limited": group is not None}, group=group, **options)


def page_contents(pages: np.ndarray, nbytes: int = PAGE_BYTES) -> np.ndarray:
    """uint8[n, nbytes]: the start of these pages of a file of write_pages: a different value in each word."""
    words = pages.astype(np.uint64)[:, None] * np.uint64(PAGE_BYTES // 8)
    words = words + np.arange(nbytes // 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


def write_pages(path: Path, page_count: int) -> None:
    """Write a file of pages of 4 KiB with known contents, unless it exists."""
    if path.exists() and path.stat().st_size == page_count * PAGE_BYTES:
        return
    with open(path, "wb") as file:
        for first in range(0, page_count, 8192):
            page_contents(np.arange(first, min(first + 8192, page_count))).tofile(file)
    gids.io.drop_page_cache(path)


class NumberedRows:
    """Features of which row i holds i everywhere."""

    dtype = torch.float32

    def __init__(self, rows: int, dim: int) -> None:
        self.shape = (rows, dim)

    def read_into(self, start: int, out: torch.Tensor) -> None:
        out.copy_(torch.arange(start, start + len(out), dtype=self.dtype)[:, None].expand_as(out))


def write_numbered(path: Path, rows: int, dim: int) -> Path:
    """Write a dataset of NumberedRows. Returns its only shard."""
    with DatasetWriter(path) as writer:
        writer.write_table("node", "_N", "feat", NumberedRows(rows, dim))
    return gids.FeatureStore(path).table("_N.feat").shard_paths[0]


@contextmanager
def read_ahead(path: Path, size_bytes: int) -> Iterator[None]:
    """Let the kernel read this much around a missing page of mapped files on path's disk.

    Needs root; otherwise changes nothing. gids.measure.isolation.read_ahead_bytes gives the value in use.
    """
    device = path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        before = setting.read_text()
        setting.write_text(str(size_bytes >> 10))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        setting.write_text(before)
