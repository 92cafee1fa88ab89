"""How many reads must overlap until a disk gives its peak, and does the model of GIDS predict it?

    python bench/accesses.py          # 1 to 65,536 reads of 4 KiB at once, a minute
    python bench/accesses.py --small

Figure 8 and equations 2 and 3 of Park et al., "GIDS", PVLDB 17(6), 2024: N reads that are posted together
take T_i + N / peak + T_t seconds, with the peak in reads/s and T_i + T_t the time of one read. So
N = p / (1 - p) x peak x (T_i + T_t) reads give the share p of the peak. Here the peak is the highest measured
rate, and T_i + T_t follows from the median time of one read; the sizes between are predicted. Random distinct
pages of a file of known contents, cold, by io_uring if the machine has it; every page is checked.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
from harness import PAGE_BYTES, Figures, Script, check_pages, page_file

import gids.io
from gids.write.files import aligned_zeros

SHARE = 0.95  # of the peak, as in the paper
_MOST_DEPTH = 16_384
_LEAST_READS = 64  # of each N, in all rounds


def model(accesses: float, *, peak: float, overhead_s: float) -> float:
    """Reads per second of so many reads that are posted together."""
    return accesses / (overhead_s + accesses / peak)


def needed(share: float, *, peak: float, overhead_s: float) -> float:
    """Reads that must be posted together for this share of the peak."""
    return share / (1 - share) * peak * overhead_s


def accesses(args: argparse.Namespace, figures: Figures) -> None:
    page_count = int(args.size_gb * 1e9) // PAGE_BYTES
    sizes = [4**power for power in range(9) if 4**power <= min(args.most, page_count)]
    rng = np.random.default_rng(args.seed)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    out = aligned_zeros(sizes[-1], PAGE_BYTES)
    out[:] = 1  # page faults are not measured
    with page_file(args, page_count) as path:
        gids.io.drop_page_cache(path)
        depth = min(sizes[-1], _MOST_DEPTH)
        options = {"depth": depth, "max_read_bytes": PAGE_BYTES, "max_merge_bytes": 0}
        with gids.io.open_engine([path], **options) as engine:
            print(f"{engine.name}, at most {depth:,} in flight", flush=True)
            for _ in range(args.rounds):
                for size in sizes:
                    for _ in range(max(1, _LEAST_READS // size)):
                        pages, part = rng.choice(page_count, size, replace=False), out[:size]
                        files = np.zeros(size, np.uint32)
                        begun = time.perf_counter()
                        errors = engine.read(files, pages * PAGE_BYTES, PAGE_BYTES, part)
                        seconds[size].append(time.perf_counter() - begun)
                        assert not errors.any(), "a read failed"
                        check_pages(pages, part)
    rates = {size: size / median(taken) for size, taken in seconds.items()}
    peak = max(rates.values())
    overhead_s = max(0.0, 1 / rates[1] - 1 / peak)
    predicted = {size: model(size, peak=peak, overhead_s=overhead_s) for size in sizes}
    rows = [{"reads at once": n, "reads/s": rates[n], "model": predicted[n]} for n in sizes]
    figures.table("reads per second by the number of overlapping reads", rows)
    between = [predicted[size] / rates[size] for size in sizes[1:-1]]
    figures.add("model over measured", (min(between), max(between)), "x")
    figures.add("time of one read", 1e6 / rates[1], "us")
    figures.add("peak", peak, "reads/s")
    enough = needed(SHARE, peak=peak, overhead_s=overhead_s)
    figures.add("reads for 95 % of the peak, by the model", enough, "")
    first = next(size for size in sizes if rates[size] >= SHARE * peak)
    figures.add("the fewest of those measured that give 95 % of the peak", first, "")


if __name__ == "__main__":
    script = Script(__doc__, "dir", "keep", "rounds", "seed")
    script.option("size-gb", 4.0, "of the file", small=0.01)
    script.option("most", 65_536, "reads at once", small=256)
    script.run(accesses)
