"""How much memory does a conversion take, and how fast is it beside a plain copy?

    python bench/convert.py            # a 4.3 GB .npy, 3 pairs
    python bench/convert.py --small

Baseline: a copy of the same file in 8 MiB pieces with fsync, alternating with ours. Each conversion runs in a
fresh process (its peak memory is the process's own), ends in `gids verify`, and starts with the source out of
the page cache. Prints peak memory and the ratio of the medians' speeds, checksums included on our side.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from harness import alternate, median_ratio, write_json

from gids.io import drop_page_cache

PIECE_BYTES = 8 << 20


def write_source(path: Path, rows: int, dim: int) -> None:
    """A float32 .npy of random bits, written in pieces."""
    array = np.lib.format.open_memmap(path, "w+", np.float32, (rows, dim))
    rng = np.random.default_rng(0)
    step = PIECE_BYTES // (4 * dim)
    for first in range(0, rows, step):
        array[first : first + step] = rng.random((len(array[first : first + step]), dim), np.float32)
    array.flush()


def copy(source: Path, target: Path) -> float:
    drop_page_cache(source)
    begun = time.perf_counter()
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        while piece := read.read(PIECE_BYTES):
            write.write(piece)
        os.fsync(write.fileno())
    seconds = time.perf_counter() - begun
    target.unlink()
    return seconds


# VmHWM, not getrusage: that would count the parent's memory too, from before the exec.
COMMAND = """
import sys
from gids.cli import main
status = main(sys.argv[1:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("peak", int(peak.split()[1]) * 1024)
sys.exit(status)
"""


def gids(*args: str | Path) -> int:
    """Run a gids command in a fresh process; its peak memory in bytes."""
    done = subprocess.run([sys.executable, "-c", COMMAND, *map(str, args)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"gids {args[0]} failed: {done.stderr}")
    return int(done.stdout.rpartition("peak")[2])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-gb", type=float, default=4.3, help="of the source, in 1e9 bytes")
    parser.add_argument("--small", action="store_true", help="a size for tests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    dim = 1024
    rows = int((0.05 if args.small else args.size_gb) * 1e9) // (4 * dim)
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        directory = Path(name)
        source, dataset = directory / "source.npy", directory / "out.gids"
        write_source(source, rows, dim)
        peaks = []

        def ours() -> float:
            drop_page_cache(source)
            begun = time.perf_counter()
            peaks.append(gids("convert", source, dataset, "--quiet"))
            seconds = time.perf_counter() - begun
            gids("verify", dataset, "--quiet")
            shutil.rmtree(dataset)
            return seconds

        seconds = alternate(
            {"convert": ours, "copy": lambda: copy(source, directory / "copy.npy")},
            1 if args.small else args.rounds,
        )
    size = rows * dim * 4
    for side, times in seconds.items():
        print(f"{side:<8} {median(times):6.2f} s   {size / median(times) / 1e6:6.0f} MB/s")
    ratio = median_ratio(seconds["copy"], seconds["convert"])
    print(f"convert over copy: {ratio:.2f} (start of Python and torch included)")
    print(f"peak memory of converting {size / 1e9:.1f} GB: {max(peaks) / 1e6:.0f} MB (bar 500)")
    write_json(args.json, {"seconds": seconds, "ratio": ratio, "peak_bytes": max(peaks), "size_bytes": size})


if __name__ == "__main__":
    main()
