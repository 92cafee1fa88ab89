"""How fast are conversions, and how much memory do they need?

    python bench/convert.py features                                   # a 2 GB .npy, 7 rounds
    python bench/convert.py features --size-gb 16 --rounds 1 --alone   # memory and time of a large one
    python bench/convert.py edges     # 5, 10, 20 and 50 million edges, 256 MB
    python bench/convert.py features --small

Each conversion runs in a fresh process, with the source out of the page cache, and is verified in this one,
which is not timed.

features: baselines are `dd` of the same file in pieces of 8 MiB, with and without the page cache (O_DIRECT),
alternating with gids. Each side ends with fsync of its output. gids writes checksums of every page.

edges: each size from an edge_index.npy with power-law degrees. --options are options of `gids convert`. The
last figure extrapolates the time linearly from the largest size; memory is bounded.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from harness import Figures, Script, alternate

from gids.cli import main as gids_command
from gids.io import drop_page_cache
from gids.sizes import parse_bytes

BAR = 0.8
PIECE_BYTES = 8 << 20
PIECE_EDGES = 1 << 20
BEYOND_BYTES = 300_000_000  # what a conversion may take beyond --memory
DEGREE = 16

# VmHWM, not getrusage: that would count the parent's memory too, from before the exec.
COMMAND = """
import sys, time
import gids.convert.readers
from gids.cli import main
begun = time.perf_counter()
status = main(sys.argv[1:])
seconds = time.perf_counter() - begun
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("peak", int(peak.split()[1]) * 1024, seconds)
sys.exit(status)
"""


def convert(source: Path, path: Path, *options: str | Path) -> tuple[float, int, float]:
    """Convert in a fresh process, and verify: (seconds, peak bytes, seconds after Python's start)."""
    for file in [source] if source.is_file() else source.iterdir():
        drop_page_cache(file)
    command = [sys.executable, "-P", "-c", COMMAND, "convert", source, path, "--quiet", *options]
    begun = time.perf_counter()
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"gids convert failed: {done.stderr}")
    if gids_command(["verify", str(path), "--quiet"]) != 0:
        raise SystemExit("the dataset has faults")
    peak_bytes, own_seconds = done.stdout.rpartition("peak")[2].split()
    return seconds, int(peak_bytes), float(own_seconds)


def features(args: argparse.Namespace, figures: Figures) -> None:
    rows = int(args.size_gb * 1e9) // (4 * args.dim)
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        source, dataset, target = (Path(name) / file for file in ("source.npy", "out.gids", "copy.npy"))
        write_rows(source, rows, args.dim)

        def ours() -> tuple[float, int, float]:
            run = convert(source, dataset, "--memory", str(args.memory))
            shutil.rmtree(dataset)
            return run

        def copy(*flags: str) -> tuple[float, int, float]:
            drop_page_cache(source)
            begun = time.perf_counter()
            command = ["dd", f"if={source}", f"of={target}", f"bs={PIECE_BYTES}", "conv=fsync", *flags]
            subprocess.run(command, check=True, capture_output=True)
            seconds = time.perf_counter() - begun
            target.unlink()
            return seconds, 0, seconds

        direct = partial(copy, "iflag=direct", "oflag=direct")
        sides = {"convert": ours} | ({} if args.alone else {"dd": copy, "dd, direct": direct})
        runs = alternate(sides, args.rounds)
    mb = rows * args.dim * 4 / 1e6
    speeds = {side: [mb / seconds for seconds, _, _ in each] for side, each in runs.items()}
    without = "convert, without Python's start"
    speeds[without] = [mb / seconds for _, _, seconds in runs["convert"]]
    for side, rates in speeds.items():
        figures.add(side, median(rates), "MB/s", note=f"{mb / median(rates):.2f} s")
    for other in ("dd", "dd, direct") if not args.alone else ():
        for side in ("convert", without):
            bar = BAR if (side, other) == ("convert", "dd") else None
            figures.ratio(f"{side} over {other}", speeds[side], speeds[other], bar=bar)
    peak = max(peak_bytes for _, peak_bytes, _ in runs["convert"])
    name = f"peak memory of converting {mb:,.0f} MB"
    figures.add(name, peak / 1e6, "MB", most=(args.memory + BEYOND_BYTES) / 1e6)


def write_rows(path: Path, rows: int, dim: int) -> None:
    """A float32 .npy of random bits, written in pieces."""
    rng = np.random.default_rng(0)
    step = PIECE_BYTES // (4 * dim)
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, rows, step):
            file.write(rng.random((min(step, rows - first), dim), np.float32).data)


def edges(args: argparse.Namespace, figures: Figures) -> None:
    options = ["--memory", str(args.memory), "--workers", args.workers, *(f"--{o}" for o in args.options)]
    rows = []
    for count in map(int, args.edges):
        with tempfile.TemporaryDirectory(dir=args.dir) as name:
            source = Path(name) / "source"
            write_edges(source, count)
            seconds, peak_bytes, _ = convert(source, Path(name) / "out.gids", *options)
        row = {"edges": count, "seconds": seconds, "edges/s": count / seconds}
        rows.append(row | {"peak bytes": peak_bytes})
    figures.table("sorting edges", rows)
    minutes = seconds / count * 1e9 / 60
    note = (
        f"--memory {args.memory / 1e6:,.0f} MB, the same peak; beside the source's 16 GB, 16 GB of dataset "
        "(8 without edge ids) and 25 GB of scratch files"
    )
    figures.add("10^9 edges, extrapolated", minutes, "minutes", note=note)


def write_edges(folder: Path, edge_count: int) -> None:
    """edge_index.npy, int64[2, edge_count], and num_nodes.npy; written in pieces."""
    folder.mkdir()
    node_count = max(1, edge_count // DEGREE)
    np.save(folder / "num_nodes.npy", np.array(node_count))
    array = np.lib.format.open_memmap(folder / "edge_index.npy", "w+", np.int64, (2, edge_count))
    rng = np.random.default_rng(0)
    for row, power in ((0, 3), (1, 2)):
        for first in range(0, edge_count, PIECE_EDGES):
            count = min(PIECE_EDGES, edge_count - first)
            array[row, first : first + count] = rng.random(count) ** power * node_count
    array.flush()


if __name__ == "__main__":
    script = Script(__doc__, "dir", "rounds", questions={"features": features, "edges": edges})
    option = script.option
    option("memory", parse_bytes("256MB"), "--memory of gids convert (default: 256MB)", type=parse_bytes)
    option("size-gb", 2.0, "features: size of the source in 1e9 bytes", small=0.05)
    option("dim", 1024, "features: float32 per row")
    option("alone", text="features: convert only, without copies", action="store_true")
    option("edges", [5e6, 1e7, 2e7, 5e7], "edges: numbers of edges", small=[2e5], type=float, nargs="+")
    option("workers", "2", "edges: --workers of gids convert")
    text = "edges: without dashes, such as dedup"
    option("options", [], text, type=str, nargs="*", metavar="OPTION")
    script.run()
