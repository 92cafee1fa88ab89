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
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from harness import PAGE_BYTES as BLOCK
from harness import Figures, Script, alternate, page_file, read_pages

import gids.io
from gids.write.files import aligned_zeros

BATCH = 4096  # blocks of a minibatch
BAR = 0.95  # of fio
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


def fastest_fio(path: Path, args: argparse.Namespace, rng: np.random.Generator, blocks: int) -> list[str]:
    """The fastest settings; none if fio is not installed."""
    if not shutil.which("fio"):
        print("fio is not installed: only our own engines are measured")
        return []
    trials = {
        name: run_fio(path, draw(rng, blocks, args.reads), args.depth, flags)
        for name, flags in FIO_SETTINGS.items()
    }
    for name, speed in trials.items():
        print(f"  fio {name}: {speed:,.0f} reads/s")
    return FIO_SETTINGS[max(trials, key=lambda name: trials[name])]


def compare(path: Path, block_count: int, args: argparse.Namespace, figures: Figures) -> None:
    rng, disk = np.random.default_rng(args.seed), gids.io.probe(path)
    print(
        f"{args.reads} unique reads of {BLOCK} B of {block_count * BLOCK / 1e9:.2f} GB on "
        f"{disk['file_system']}, alignment {disk['alignment']} B, depth {args.depth}, seed {args.seed}"
    )
    out = aligned_zeros(args.reads, BLOCK)
    settings = fastest_fio(path, args, rng, block_count)
    notes: dict[str, str] = {}

    def by_engine(side: str, kind: str, merge_bytes: int, batches: list[np.ndarray]) -> float:
        gids.io.drop_page_cache(path)
        options = {"depth": args.depth, "max_read_bytes": BLOCK, "max_merge_bytes": merge_bytes}
        with gids.io.open_engine([path], kind, **options) as engine:
            speed, stats = read_pages(engine, batches, out)[0], engine.stats()
        latency_us = 1e6 * stats["latency_s"]
        notes[side] = f"mean latency {latency_us:.0f} us, {stats['depth_max']} in flight"
        return speed

    kinds = {"uring": ("uring", 0), "uring, merged": ("uring", 131072), "threads": ("threads", 0)}
    reads = {side: partial(by_engine, side, *kind) for side, kind in kinds.items()}
    if settings:
        reads["fio"] = lambda batches: run_fio(path, batches, args.depth, settings)
    draws = [draw(rng, block_count, args.reads) for _ in range(args.rounds)]  # all sides read the same
    left = {side: iter(draws) for side in reads}
    sides = {side: (lambda side=side: reads[side](next(left[side]))) for side in reads}
    speeds = alternate(sides, args.rounds)
    for side, rates in speeds.items():
        figures.add(f"random reads, {side}", median(rates), "reads/s", note=notes.get(side, ""))
        if settings and side != "fio":
            bar = BAR if side == "uring" else None
            figures.ratio(f"random reads, {side} over fio", rates, speeds["fio"], bar=bar)


def random_reads(args: argparse.Namespace, figures: Figures) -> None:
    block_count = int(args.size_gb * 1e9) // BLOCK
    args.reads = min(args.reads, block_count)
    with page_file(args, block_count) as path:
        compare(path, block_count, args, figures)


if __name__ == "__main__":
    script = Script(__doc__, "dir", "keep", "rounds", "seed")
    script.option("size-gb", 4.0, small=0.016)
    script.option("reads", 200_000, small=2000)
    script.option("depth", 256)
    script.run(random_reads)
