"""How fast is an epoch of short rows by packs in device memory, compared with random reads? Called by gpu.py.

A table of 512-byte rows, and minibatches of random rows: low row numbers are read more often. Both
sides have the same device memory, a part of the table; the page cache is dropped before each. Every row of
every minibatch is compared on the device, in both sides' time.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from gpu_harness import TABLE, Bench, make_table
from harness import alternate

import gids
import gids.io

_VALUES = 128
SIZES = {
    "row_count": (2 << 20, 8 << 10),
    "minibatches": (40, 6),
    "minibatch_rows": (50_000, 300),
    "memory_share": (0.25, 0.75),  # of the table, in device memory
    "host_bytes": (1 << 30, 16 << 20),
    "staging_bytes": (256 << 20, 1 << 20),
    "rounds": (1, 1),
}


def packs(bench: Bench) -> None:
    sizes = bench.sizes
    table, _ = make_table(bench.directory, 4 * _VALUES, 4 * _VALUES * sizes.row_count)
    path = bench.directory / f"rows-{table.row_bytes}.gids"
    columns = torch.arange(_VALUES, dtype=torch.int32, device=bench.device.torch_device)
    shape = (sizes.minibatches, sizes.minibatch_rows)
    drawn = (sizes.row_count * np.random.default_rng(0).random(shape) ** 2).astype(np.int64)
    batches = [{TABLE: ids} for ids in torch.from_numpy(drawn)]

    def epoch(reads: str) -> tuple[float, dict[str, Any]]:
        """(rows per second, the loader's stats()) of an epoch of which every row is compared."""
        gids.io.drop_page_cache(path)
        source = gids.open(
            path,
            reads=reads,
            memory=sizes.host_bytes,
            device_memory=int(sizes.row_count * table.row_bytes * sizes.memory_share),
            tuning=gids.Tuning(staging=sizes.staging_bytes),
        )
        wrong = torch.zeros((), dtype=torch.int64, device=columns.device)
        with source, gids.FeatureLoader(source, [TABLE], device="cuda") as loader:
            begun = time.perf_counter()
            for ids, features in loader.attach(batches, lambda ids: ids, count=len(batches)):
                first = ids[TABLE].to(columns.device).to(torch.int32) * _VALUES
                wrong += (features[TABLE].view(torch.int32) != first[:, None] + columns).sum()
            assert int(wrong) == 0, f"reads={reads!r}: {int(wrong)} values are wrong"
            seconds = time.perf_counter() - begun
            stats = loader.stats()
        by_packs = stats["packs"]["minibatches"]
        assert by_packs == (len(batches) if reads == "pack" else 0), f"{by_packs} minibatches by packs"
        return len(batches) * sizes.minibatch_rows / seconds, stats

    sides = {reads: partial(epoch, reads) for reads in ("random", "pack")}
    epochs = alternate(sides, sizes.rounds)
    rates = {reads: [rate for rate, _ in of_side] for reads, of_side in epochs.items()}
    name = "epoch of 512 B rows on the device"
    for reads, of_side in rates.items():
        bench.figures.add(f"{name}, reads={reads!r}", median(of_side), "rows/s")
    bench.figures.ratio(f"{name}, packs over random reads", rates["pack"], rates["random"])
    stats = epochs["pack"][-1][1]["packs"]
    for key in ("bytes_read", "bytes_written"):
        bench.figures.add(f"packs, {key.replace('_', ' ')}", stats[key] / 1e6, "MB")
    for stage, seconds in stats["seconds"].items():
        bench.figures.add(f"packs, whole epoch: {stage}", seconds, "s")
