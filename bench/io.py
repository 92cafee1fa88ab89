"""Do the engines of gids read random 4 KiB blocks as fast as fio, from the same file at the same depth?

    python bench/io.py                 # 4 GB file, 200 000 reads, depth 256, 7 rounds; needs fio
    python bench/io.py --small         # seconds; only shows that it works

Baseline: fio's io_uring engine with O_DIRECT and the best of several settings, found by trying each. fio
replays the offsets that gids reads, in the same order (minibatches of unique random blocks, each sorted), or
draws the same number of unique offsets itself, whichever is faster. Reads are cold: O_DIRECT, and the page
cache is dropped before every run. Each round draws new offsets and swaps the order of the sides; ratios are
medians over the rounds. The bytes that gids reads are compared with the file's known contents.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from harness import Figures, make_parser, page_contents, write_pages

import gids.io
from gids.bench.probe import aligned_rows

BLOCK = 4096
BATCH = 4096  # blocks of a minibatch
BAR = 0.95  # of fio
IN_FLIGHT = 3  # minibatches submitted ahead
GROUPS = ["--iodepth_batch_submit=16", "--iodepth_batch_complete_min=16", "--iodepth_batch_complete_max=256"]
GREEDY = ["--iodepth_batch_submit=32", "--iodepth_batch_complete_min=1", "--iodepth_batch_complete_max=256"]
LIGHT = ["--fixedbufs=1", "--gtod_reduce=1"]
REGISTERED = [*LIGHT, "--registerfiles=1"]  # fio cannot register files when it replays a log
FIO_SETTINGS = {
    "replay": ["REPLAY"],
    "replay, fixed buffers": ["REPLAY", *LIGHT],
    "replay, fixed buffers, groups": ["REPLAY", *LIGHT, *GROUPS],
    "own order, registered": REGISTERED,
    "own order, registered, groups": [*REGISTERED, *GROUPS],
    "own order, registered, greedy groups": [*REGISTERED, *GREEDY],
}


def draw(rng: np.random.Generator, block_count: int, reads: int) -> list[np.ndarray]:
    """Unique random blocks in minibatches, each sorted, as the engine issues them."""
    blocks = rng.permutation(block_count)[:reads]
    return [np.sort(blocks[i : i + BATCH]) for i in range(0, reads, BATCH)]


def run_fio(path: Path, batches: list[np.ndarray], depth: int, settings: list[str]) -> float:
    """Reads per second of fio, replaying the offsets or drawing as many unique ones itself."""
    count = sum(map(len, batches))
    command = ["fio", "--name=random", "--rw=randread", "--ioengine=io_uring", "--direct=1", f"--bs={BLOCK}"]
    command += [f"--iodepth={depth}", "--thread", "--readonly", "--output-format=json"]
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as log:
        if "REPLAY" in settings:
            lines = ["fio version 2 iolog", f"{path} add", f"{path} open"]
            lines += [f"{path} read {b * BLOCK} {BLOCK}" for batch in batches for b in batch.tolist()]
            log.write("\n".join([*lines, f"{path} close", ""]))
            log.flush()
            command += [f"--read_iolog={log.name}", "--replay_no_stall=1"]
        else:
            command += [f"--filename={path}", "--norandommap=0", f"--io_size={count * BLOCK}"]
            command += [f"--randseed={int(batches[0][0]) + 1}"]
        command += [flag for flag in settings if flag != "REPLAY"]
        gids.io.drop_page_cache(path)
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
    read = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    if read["total_ios"] != count:
        raise RuntimeError(f"fio read {read['total_ios']} blocks of {count}")
    return count / (read["runtime"] * 1e-3)


def run_engine(
    path: Path, batches: list[np.ndarray], out: np.ndarray, kind: str, depth: int, merge_bytes: int
) -> tuple[float, dict[str, int | float]]:
    """(reads per second, statistics) of our engine, with a few minibatches submitted ahead."""
    ends = np.cumsum([len(b) for b in batches])
    rows = [out[end - len(b) : end] for b, end in zip(batches, ends, strict=True)]
    offsets = [b * BLOCK for b in batches]
    files = np.zeros(BATCH, np.uint32)
    out[:] = 0
    gids.io.drop_page_cache(path)
    options = {"depth": depth, "max_read_bytes": BLOCK, "max_merge_bytes": merge_bytes}
    with gids.io.open_engine([path], kind, **options) as engine, ThreadPoolExecutor(IN_FLIGHT) as pool:

        def read(i: int) -> int:
            return int(np.count_nonzero(engine.read(files[: len(offsets[i])], offsets[i], BLOCK, rows[i])))

        start = time.perf_counter()
        errors = sum(pool.map(read, range(len(batches))))
        elapsed = time.perf_counter() - start
        stats = engine.stats()
    if errors:
        raise RuntimeError(f"{errors} reads failed")
    for batch, row in zip(batches, rows, strict=True):
        if not np.array_equal(row, page_contents(batch)):
            raise RuntimeError(f"{kind} read other bytes than the file's")
    return len(out) / elapsed, stats


def main() -> None:
    parser = make_parser(__doc__, "dir", "keep", "rounds", "seed")
    parser.add_argument("--size-gb", type=float, default=4.0)
    parser.add_argument("--reads", type=int, default=200_000)
    parser.add_argument("--depth", type=int, default=256)
    args = parser.parse_args()
    if args.small:
        args.size_gb, args.reads, args.rounds = 0.016, 2000, 1
    block_count = int(args.size_gb * 1e9) // BLOCK
    args.reads = min(args.reads, block_count)
    path = args.dir / f"gids-bench-io-{block_count}.bin"
    try:
        write_pages(path, block_count)
        compare(path, block_count, args)
    finally:
        if not args.keep:
            path.unlink(missing_ok=True)


def compare(path: Path, block_count: int, args: argparse.Namespace) -> None:
    figures, rng = Figures(args), np.random.default_rng(args.seed)
    disk = gids.io.probe(path)
    print(
        f"{args.reads} unique reads of {BLOCK} B of {block_count * BLOCK / 1e9:.2f} GB on "
        f"{disk['file_system']}, alignment {disk['alignment']} B, depth {args.depth}, seed {args.seed}"
    )
    out = aligned_rows(args.reads, BLOCK)
    settings: list[str] = []
    if shutil.which("fio"):
        trials = {
            name: run_fio(path, draw(rng, block_count, args.reads), args.depth, flags)
            for name, flags in FIO_SETTINGS.items()
        }
        for name, speed in trials.items():
            print(f"  fio {name}: {speed:,.0f} reads/s")
        settings = FIO_SETTINGS[max(trials, key=lambda name: trials[name])]
    else:
        print("fio is not installed: only our own engines are measured")
    batches: list[np.ndarray] = []
    waits: list[str] = []

    def by_engine(kind: str, merge_bytes: int) -> float:
        speed, stats = run_engine(path, batches, out, kind, args.depth, merge_bytes)
        if kind == "uring" and not merge_bytes:
            waits[:] = [f"mean latency {stats['latency_s'] * 1e6:.0f} us, {stats['depth_max']} in flight"]
        return speed

    sides = {
        "uring": lambda: by_engine("uring", 0),
        "uring, merged": lambda: by_engine("uring", 131072),
        "threads": lambda: by_engine("threads", 0),
    }
    if settings:
        sides["fio"] = lambda: run_fio(path, batches, args.depth, settings)
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(args.rounds):
        batches = draw(rng, block_count, args.reads)
        for side in list(sides)[:: 1 if turn % 2 else -1]:
            speeds[side].append(sides[side]())
    for side, rates in speeds.items():
        figures.add(
            f"random reads, {side}", median(rates), "reads/s", note=waits[0] if side == "uring" else ""
        )
        if settings and side != "fio":
            bar = BAR if side == "uring" else None
            figures.ratio(f"random reads, {side} over fio", rates, speeds["fio"], bar=bar)


if __name__ == "__main__":
    sys.exit(main())
