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
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from harness import make_parser, page_contents, write_pages

import gids.io
from gids.bench.probe import aligned_rows

BLOCK = 4096
BATCH = 4096  # blocks of a minibatch
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


def run_fio(path: Path, batches: list[np.ndarray], depth: int, settings: list[str], log: Path) -> float:
    """Reads per second of fio, replaying the offsets or drawing as many unique ones itself."""
    count = sum(map(len, batches))
    command = ["fio", "--name=random", "--rw=randread", "--ioengine=io_uring", "--direct=1", f"--bs={BLOCK}"]
    command += [f"--iodepth={depth}", "--thread", "--readonly", "--output-format=json"]
    if "REPLAY" in settings:
        lines = ["fio version 2 iolog", f"{path} add", f"{path} open"]
        lines += [f"{path} read {b * BLOCK} {BLOCK}" for batch in batches for b in batch.tolist()]
        log.write_text("\n".join([*lines, f"{path} close", ""]))
        command += [f"--read_iolog={log}", "--replay_no_stall=1"]
    else:
        seed = int(batches[0][0]) + 1
        command += [
            f"--filename={path}",
            "--norandommap=0",
            f"--io_size={count * BLOCK}",
            f"--randseed={seed}",
        ]
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
    reads = min(args.reads, block_count)
    path, log = args.dir / f"gids-bench-io-{block_count}.bin", args.dir / "gids-bench-io.log"
    rng = np.random.default_rng(args.seed)
    has_fio = shutil.which("fio") is not None
    if not has_fio:
        print("fio is not installed: only our own engines are measured")
    try:
        write_pages(path, block_count)
        compare(path, log, block_count, reads, args, rng, has_fio)
    finally:
        log.unlink(missing_ok=True)
        if not args.keep:
            path.unlink(missing_ok=True)


def compare(
    path: Path,
    log: Path,
    block_count: int,
    reads: int,
    args: argparse.Namespace,
    rng: np.random.Generator,
    has_fio: bool,
) -> None:
    found = gids.io.probe(path)
    size = f"{block_count * BLOCK / 1e9:.2f} GB"
    print(f"file: {size} on {found['file_system']}, alignment {found['alignment']} B")
    print(f"{reads} unique reads of {BLOCK} B, depth {args.depth}, seed {args.seed}, {args.rounds} rounds")
    out = aligned_rows(reads, BLOCK)
    settings: list[str] = []
    if has_fio:
        trials = {}
        for name, flags in FIO_SETTINGS.items():
            trials[name] = run_fio(path, draw(rng, block_count, reads), args.depth, flags, log)
            print(f"  fio {name}: {trials[name]:,.0f} reads/s")
        settings = FIO_SETTINGS[max(trials, key=lambda name: trials[name])]
    sides = ["uring", "uring, merged", "threads"] + (["fio"] if has_fio else [])
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(args.rounds):
        batches = draw(rng, block_count, reads)
        for side in sides if turn % 2 else sides[::-1]:
            if side == "fio":
                speed = run_fio(path, batches, args.depth, settings, log)
            else:
                kind, merge = side.split(",")[0], 131072 if "merged" in side else 0
                speed, stats = run_engine(path, batches, out, kind, args.depth, merge)
                if side == "uring":
                    latency, deepest = stats["latency_s"], stats["depth_max"]
            speeds[side].append(speed)
    for side in sides:
        median = statistics.median(speeds[side])
        line = f"{side:14} {median:10,.0f} reads/s {median * BLOCK / 1e6:8,.0f} MB/s"
        if has_fio and side != "fio":
            ratio = statistics.median(a / b for a, b in zip(speeds[side], speeds["fio"], strict=True))
            line += f"   {ratio:.2f} of fio"
        print(line)
    print(f"uring: mean latency {latency * 1e6:.0f} us, at most {deepest} in flight")


if __name__ == "__main__":
    sys.exit(main())
