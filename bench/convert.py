"""How fast is a conversion compared with copying the same bytes, and how much memory does it need?

    python bench/convert.py                                   # a 2 GB .npy, 7 rounds
    python bench/convert.py --size-gb 16 --rounds 1 --alone   # memory and time of a large one
    python bench/convert.py --small

Baselines: `dd` of the same file in pieces of 8 MiB, with and without the page cache (O_DIRECT), alternating
with gids. Each side starts with the source out of the page cache and ends with fsync of its output. Each
conversion runs in a fresh process, writes checksums of every page, and is followed by `gids verify`, which is
not timed. Prints the median ratio of the rounds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from harness import alternate, make_parser, median_ratio, write_json

from gids.io import drop_page_cache
from gids.sizes import format_bytes, parse_bytes

PIECE_BYTES = 8 << 20
BEYOND_BYTES = 300_000_000  # what a conversion may take beyond --memory


def write_source(path: Path, rows: int, dim: int) -> None:
    """A float32 .npy of random bits, written in pieces."""
    rng = np.random.default_rng(0)
    step = PIECE_BYTES // (4 * dim)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
        )
        for first in range(0, rows, step):
            file.write(rng.random((min(step, rows - first), dim), np.float32).data)


def copy(source: Path, target: Path, *flags: str) -> float:
    """Seconds that dd takes."""
    drop_page_cache(source)
    begun = time.perf_counter()
    command = ["dd", f"if={source}", f"of={target}", f"bs={PIECE_BYTES}", "conv=fsync", *flags]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - begun
    target.unlink()
    return seconds


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


def gids(*args: str | Path) -> tuple[int, float]:
    """Run a gids command in a fresh process; (peak bytes, seconds after Python's start)."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, *map(str, args)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"gids {args[0]} failed: {done.stderr}")
    peak_bytes, seconds = done.stdout.rpartition("peak")[2].split()
    return int(peak_bytes), float(seconds)


def main() -> None:
    parser = make_parser(__doc__, "dir", "json", "rounds")
    parser.add_argument("--size-gb", type=float, default=2, help="size of the source in 1e9 bytes")
    parser.add_argument("--dim", type=int, default=1024, help="float32 per row")
    parser.add_argument("--memory", type=parse_bytes, default=256_000_000)
    parser.add_argument("--alone", action="store_true", help="convert only, without copies")
    args = parser.parse_args()
    rows = int((0.05 if args.small else args.size_gb) * 1e9) // (4 * args.dim)
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        directory = Path(name)
        source, dataset = directory / "source.npy", directory / "out.gids"
        write_source(source, rows, args.dim)
        peaks, without_start = [], []

        def ours() -> float:
            drop_page_cache(source)
            begun = time.perf_counter()
            peak_bytes, own_seconds = gids("convert", source, dataset, "--quiet", "--memory", args.memory)
            seconds = time.perf_counter() - begun
            peaks.append(peak_bytes)
            without_start.append(own_seconds)
            gids("verify", dataset, "--quiet")
            shutil.rmtree(dataset)
            return seconds

        target = directory / "copy.npy"
        copies = {
            "dd": lambda: copy(source, target),
            "dd, direct": lambda: copy(source, target, "iflag=direct", "oflag=direct"),
        }
        rounds = 1 if args.small else args.rounds
        seconds = alternate({"convert": ours} if args.alone else {"convert": ours, **copies}, rounds)
    size_bytes = rows * args.dim * 4
    seconds["convert, without Python's start"] = without_start
    for side, times in seconds.items():
        print(f"{side:<31} {median(times):6.2f} s   {size_bytes / median(times) / 1e6:6.0f} MB/s")
    ratios = {
        f"{ours} over {other}": median_ratio(seconds[other], seconds[ours])
        for other in ([] if args.alone else copies)
        for ours in ("convert", "convert, without Python's start")
    }
    for what, ratio in ratios.items():
        print(f"{what}: {ratio:.2f} (target 0.8)")
    print(
        f"peak memory of converting {format_bytes(size_bytes)}: {format_bytes(max(peaks))} "
        f"(target {format_bytes(args.memory + BEYOND_BYTES)})"
    )
    write_json(
        args.json, {"seconds": seconds, "ratios": ratios, "peak_bytes": max(peaks), "size_bytes": size_bytes}
    )


if __name__ == "__main__":
    main()
