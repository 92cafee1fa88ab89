"""How much faster does gids gather cold rows than torch gathers them from a memory-mapped tensor?

    python bench/aggregation.py            # 4.3 GB on disk, three minutes
    python bench/aggregation.py --small    # seconds; only shows that it works

Random distinct rows of 4 KiB, in minibatches, without a cache. Baseline: ``features[ids]`` on a memory-mapped
tensor with 1, 2 and 16 threads, with Linux's default read-ahead of 128 KiB (set if permitted), and with
MADV_RANDOM. All sides read the same pages of the same file in fresh processes with a cold page cache. Their
memory, page cache included, is limited (if permitted) to what they use before they open the file plus a
quarter of the file. Rows are compared with the source. Sides run in alternating order; results are medians.
The rate of the engine alone is printed too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from harness import (
    DEFAULT_READ_AHEAD_BYTES,
    alternate,
    make_parser,
    median_ratio,
    read_ahead,
    write_json,
    write_numbered,
)

import gids.io
from gids.bench.probe import random_reads
from gids.measure.isolation import run_fresh
from gids.measure.memory_group import MemoryGroup
from gids.measure.sides import why_no_limit

DIM = 1024
THREADS = 2  # ours, and the baseline's that the bar is about
BAR = 10.0


def run(side: str, threads: int, advised: bool, config: dict[str, Any]) -> dict[str, float]:
    shard = Path(config["shard"])
    gids.io.drop_page_cache(shard)
    this = {**config, "side": side, "threads": threads, "advised": advised}
    with read_ahead(shard, DEFAULT_READ_AHEAD_BYTES), ExitStack() as stack:
        group = None if why_no_limit() else stack.enter_context(MemoryGroup("gids-aggregation"))
        return run_fresh("aggregation_side", {**this, "limited": group is not None}, group=group)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "dir", "json", "rounds", "seed")
    add = parser.add_argument
    add("--rows", type=int, default=1 << 20, help="rows of 4 KiB (default: 1048576)")
    add("--batch", type=int, default=8192)
    add("--seconds", type=float, default=4.0, help="time limit of each run")
    args = parser.parse_args(argv)
    if args.small:
        args.rows, args.batch, args.seconds, args.rounds = 4096, 512, 0.2, 1
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the fresh processes find aggregation_side
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="gids-aggregation-") as directory:
        shard = write_numbered(Path(directory) / "rows.gids", args.rows, DIM)
        config = {
            "dataset": str(Path(directory) / "rows.gids"),
            "shard": str(shard),
            "dim": DIM,
            "rows": args.rows,
            "batch": args.batch,
            "seconds": args.seconds,
            "seed": args.seed,
        }
        sides: dict[str, Any] = {
            "gids": partial(run, "gids", THREADS, False, config),
            **{f"mapped, {n} threads": partial(run, "mapped", n, False, config) for n in (1, 2, 16)},
            "mapped, advised, 2 threads": partial(run, "mapped", 2, True, config),
            "mapped, advised, 16 threads": partial(run, "mapped", 16, True, config),
        }
        results = alternate(sides, args.rounds)
        device = random_reads([shard], page_bytes=4096, seconds=args.seconds).reads_per_s
    speeds = {name: [r["rows_per_s"] for r in rounds] for name, rounds in results.items()}
    ratios = {name: median_ratio(speeds["gids"], speeds[name]) for name in sides if name != "gids"}
    for name, rounds in results.items():
        cpu = median(r["cpu_s_per_row"] for r in rounds)
        beside = f"gids is {ratios[name]:.2f} x as fast" if name in ratios else ""
        print(f"{name:<28} {median(speeds[name]):>9.0f} rows/s  {1e6 * cpu:6.2f} us of CPU a row  {beside}")
    print(f"{'the device, engine alone':<28} {device:>9.0f} pages/s")
    print(
        f"cold aggregation over torch on a memory-mapped tensor, {THREADS} threads "
        f"(target {BAR:g}): {ratios[f'mapped, {THREADS} threads']:.2f}"
    )
    write_json(args.json, {"rows_per_s": speeds, "ratios": ratios, "device_pages_per_s": device})
    return 0


if __name__ == "__main__":
    sys.exit(main())
