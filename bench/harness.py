"""Code that benchmarks share: options, alternating repeats, results, files with known contents.

gids.bench has fresh processes, a cold page cache, memory limits, and the disk's rate by random reads.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
from report import markdown, measured, target

import gids.io
from gids.bench.bandwidth import random_reads
from gids.bench.isolation import MemoryGroup, run_fresh, why_no_limit
from gids.bench.machine import this_machine, versions
from gids.cli.arguments import integers as integers
from gids.packs.predict import measure_rates
from gids.packs.scratch import Scratch
from gids.store import Table

T = TypeVar("T")
Question = Callable[[argparse.Namespace, "Figures"], int | None]

DEFAULT_READ_AHEAD_BYTES = 128 << 10  # of Linux; some images raise it
PAGE_BYTES = 4096
_WRITTEN_PAGES = 8192  # written or compared at a time
_FIO = "fio --name=x --ioengine=io_uring --direct=1 --bs=256k --iodepth=32 --time_based --output-format=json"
_FIO_SECONDS, _FIO_BYTES = 4, 2 << 30
_SCRATCH_BYTES = 1 << 30
_TEMPORARY = Path(tempfile.gettempdir())
_SHARED: dict[str, dict[str, Any]] = {
    "dir": {
        "default": _TEMPORARY,
        "text": "directory on the disk to measure (default: the temporary directory)",
        "type": Path,
    },
    "keep": {"text": "keep the files for the next run", "action": "store_true"},
    "plot": {"text": "draw the results to FILE, as PNG", "type": Path, "metavar": "FILE"},
    "repeat": {"default": 7, "text": "repeats of each measurement", "small": 1},
    "rounds": {"default": 7, "text": "rounds of alternating sides", "small": 1},
    "seed": {"default": 0, "text": "random seed"},
}


def disk_rates(shard: Path, folder: Path) -> dict[str, float]:
    """Bytes per second by fio; if it is not installed, as gids measures them once in a process.

    "read": long reads of a shard; "write": long writes to a new file in a folder.
    """
    if not shutil.which("fio"):
        scratch = Scratch([folder], _SCRATCH_BYTES)
        found = measure_rates([shard], scratch, direct=True, engine="auto", memory_bytes=_SCRATCH_BYTES)
        return {"read": found.read, "write": found.write}
    rates = {}
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for kind, path, size in (("read", shard, shard.stat().st_size), ("write", file.name, _FIO_BYTES)):
            job = [f"--rw={kind}", f"--filename={path}", f"--size={size}", f"--runtime={_FIO_SECONDS}"]
            command = [*_FIO.split(), *job, *(["--readonly"] if kind == "read" else [])]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rates[kind] = float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])
    return rates


def least_seconds(rates: Mapping[str, float], *, read: float, written: float, cpu_s: float) -> float:
    """The least that the disk, with rates of disk_rates, and the cores take. read, written: bytes."""
    return max(read / rates["read"] + written / rates["write"], cpu_s / (os.cpu_count() or 1))


def device_seconds(table: Table, stats: Mapping[str, Any], probe_s: float) -> float:
    """What the table's disk needs for the random reads and the packs of a loader's stats()."""
    random = random_reads(table.shard_paths, page_bytes=table.page_bytes, seconds=probe_s)
    seconds, packs = float(stats["pages_read"] / random.reads_per_s), stats["packs"]
    if not packs["bytes_read"]:
        return seconds
    rates = disk_rates(Path(table.shard_paths[0]), Path(table.shard_paths[0]).parent)
    return seconds + least_seconds(rates, read=packs["bytes_read"], written=packs["bytes_written"], cpu_s=0)


class Script(argparse.ArgumentParser):
    """The command line of a benchmark: --json, --small, shared options (dir, keep, plot, …) and its own.

    questions: functions of (args, figures) by name, if the script has several.
    """

    def __init__(
        self, doc: str | None, *shared: str, questions: Mapping[str, Question] | None = None
    ) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._questions = questions
        self._small: dict[str, Any] = {}
        self._of_questions: dict[str, dict[bool, dict[str, Any]]] = {}
        if questions:
            self.add_argument("question", choices=list(questions))
        for name in shared:
            self.option(name, **_SHARED[name])
        self.option("json", text="write the results to FILE, after each one", type=Path, metavar="FILE")
        self.option("small", text="small size for tests", action="store_true")

    def option(
        self, name: str, default: Any = None, text: str = "", *, small: Any = None, **options: Any
    ) -> None:
        """Add --name, of the type of its default. small: the default with --small. options: of argparse."""
        if not {"type", "action"} & options.keys():
            if not isinstance(default, list):
                options["type"] = type(default)
            elif isinstance(default[0], str):
                options["nargs"] = "+"
            else:
                options |= {"type": integers, "metavar": "N,…"}
        if default is not None:
            options["default"] = default
            if default != [] and "default: " not in text:
                shown = ",".join(map(str, default)) if isinstance(default, list) else default
                text = f"{text} (default: {shown})".strip()
        action = self.add_argument(f"--{name}", help=text, **options)
        if small is not None:
            self._small[action.dest] = small

    def defaults(self, question: str, small: dict[str, Any] | None = None, **values: Any) -> None:
        """Defaults of one question, for options that have no other. small: those with --small."""
        self._of_questions[question] = {False: values, True: values | (small or {})}

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        if "--small" in (sys.argv if argv is None else argv):
            self.set_defaults(**self._small)
        args = self.parse_args(argv)
        if question := self._of_questions.get(getattr(args, "question", "")):
            for name, value in question[args.small].items():
                if getattr(args, name) is None:
                    setattr(args, name, value)
        return args

    def run(self, question: Question | None = None) -> None:
        """Parse the arguments, ask the question, and exit with the status that it returns."""
        args = self.parse()
        sys.exit((question or self._questions[args.question])(args, Figures(args)))


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

    args: of Script. Small sizes do not measure speed, so their figures are not judged by their targets.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.figures: list[dict[str, Any]] = []
        self.tables: list[dict[str, Any]] = []
        self._path, self._judged = args.json, not args.small
        options = re.sub(r" --json \S+", "", " ".join(sys.argv[1:]))
        self._run = {
            "command": f"bench/{Path(sys.argv[0]).name} {options}".strip(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": this_machine(),
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
        judged = f"; target {limits}: {verdict}" if (limits := target(self.figures[-1])) else ""
        print(f"{name}: {measured(self.figures[-1])}{judged}", flush=True)
        self._write()

    def ratio(self, name: str, above: Sequence[float], below: Sequence[float], **options: Any) -> None:
        """Add the median of the rounds' ratios. options: of add."""
        self.add(name, median(a / b for a, b in zip(above, below, strict=True)), "x", **options)

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print rows, which all have the same columns, in Markdown."""
        if not rows:
            return
        columns = list(rows[0])
        lines = [[_plain(row[column]) for column in columns] for row in rows]
        print(f"\n{title}\n", *markdown(columns, lines), sep="\n", flush=True)
        self.tables.append({"title": title, "columns": columns, "rows": lines})
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            whole = {**self._run, "figures": self.figures, "tables": self.tables}
            self._path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def run_limited(module: str, config: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """run_side, in a process that can limit its memory if "limited" is true in the config that it gets."""
    with nullcontext() if why_no_limit() else MemoryGroup() as group:
        return run_side(module, {**config, "limited": group is not None}, group=group, **options)


def run_side(
    module: str, config: Mapping[str, Any], *, python: str = sys.executable, **options: Any
) -> dict[str, Any]:
    """Run a side, a module of this folder, in a fresh process. options: of run_fresh, whose errors it raises.

    python: the interpreter, which may import another version of gids.
    """
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    with patch.object(sys, "executable", python):
        return run_fresh(module, config, **options)


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
        for first in range(0, page_count, _WRITTEN_PAGES):
            last = min(first + _WRITTEN_PAGES, page_count)
            page_contents(np.arange(first, last)).tofile(file)
    gids.io.drop_page_cache(path)


@contextmanager
def page_file(args: argparse.Namespace, page_count: int) -> Iterator[Path]:
    """A file of write_pages in args.dir, which --keep keeps."""
    path = args.dir / f"gids-bench-{page_count}.bin"
    try:
        write_pages(path, page_count)
        yield path
    finally:
        if not args.keep:
            path.unlink(missing_ok=True)


def read_pages(
    engine: gids.io.Engine, minibatches: Sequence[np.ndarray], out: np.ndarray, *, in_flight: int = 3
) -> tuple[float, float]:
    """Read pages of a file of write_pages into the rows of out: (pages per second, CPU seconds per page).

    minibatches: int64[n] each, several in flight. Raises AssertionError if a read fails or bytes differ.
    """
    counts = [len(pages) for pages in minibatches]
    total, files = sum(counts), np.zeros(max(counts), np.uint32)
    out[:total] = 0
    parts = np.split(out[:total], np.cumsum(counts)[:-1])

    def read(pages: np.ndarray, part: np.ndarray) -> int:
        errors = engine.read(files[: len(pages)], pages * PAGE_BYTES, PAGE_BYTES, part)
        return int(np.count_nonzero(errors))

    with ThreadPoolExecutor(in_flight) as pool:
        begun, cpu_begun = time.perf_counter(), time.process_time()
        failed = sum(pool.map(read, minibatches, parts))
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    assert not failed, f"{failed} reads failed"
    for pages, part in zip(minibatches, parts, strict=True):
        check_pages(pages, part)
    return total / seconds, cpu_s / total


def check_pages(pages: np.ndarray, contents: np.ndarray) -> None:
    """Raise AssertionError unless contents, uint8[n, nbytes], are the beginnings of these pages."""
    for first in range(0, len(pages), _WRITTEN_PAGES):
        part = slice(first, first + _WRITTEN_PAGES)
        expected = page_contents(pages[part], contents.shape[1])
        assert np.array_equal(contents[part], expected), "other bytes than the file's were read"


@contextmanager
def read_ahead(path: Path, size_bytes: int) -> Iterator[None]:
    """Let the kernel read this much around a missing page of mapped files on path's disk.

    Needs root; otherwise changes nothing.
    """
    setting = _read_ahead_setting(path)
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


def read_ahead_bytes(path: Path) -> int | None:
    """Bytes that the kernel reads around a missing page of a mapped file by default. None: unknown."""
    try:
        return int(_read_ahead_setting(path).read_text()) * 1024
    except OSError:
        return None


def _read_ahead_setting(path: Path) -> Path:
    device = path.stat().st_dev
    return Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
