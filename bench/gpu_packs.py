"""How fast is an epoch of short rows by packs in device memory, compared with random reads? Called by gpu.py.

A table of 512-byte rows, and minibatches of random rows: low row numbers are read more often. Both
sides have the same device memory, a part of the table; the page cache is dropped before each. Every row of
every minibatch is compared on the device, in both sides' time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from figures import Figures
from harness import alternate, median_ratio

import gids
import gids.io
from gids.cuda import Device
from gids.write import DatasetWriter

_VALUES = 128
_TABLE = "node.feat"
Ids = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PackSizes:
    """memory_share: of the table, in device memory."""

    row_count: int = 2 << 20
    minibatches: int = 40
    minibatch_rows: int = 50_000
    memory_share: float = 0.25
    host_bytes: int = 1 << 30
    staging_bytes: int = 256 << 20
    rounds: int = 1


SMALL = PackSizes(
    row_count=8 << 10,
    minibatches=6,
    minibatch_rows=300,
    memory_share=0.75,
    host_bytes=16 << 20,
    staging_bytes=1 << 20,
)


@dataclass
class Epoch:
    """rows_per_s, and the loader's stats()."""

    rows_per_s: float
    stats: dict[str, Any]


def packs(device: Device, directory: Path, sizes: PackSizes, figures: Figures) -> None:
    path = directory / "rows.gids"
    with DatasetWriter(path) as writer:
        values = torch.arange(sizes.row_count * _VALUES, dtype=torch.int32)
        writer.write_table("node", "node", "feat", values.view(-1, _VALUES))
    rng = np.random.default_rng(0)
    shape = (sizes.minibatches, sizes.minibatch_rows)
    drawn = torch.from_numpy((sizes.row_count * rng.random(shape) ** 2).astype(np.int64))
    batches: list[Ids] = [{_TABLE: ids} for ids in drawn]
    sides = {
        reads: (lambda of=reads: _epoch(device, path, of, batches, sizes)) for reads in ("random", "pack")
    }
    epochs = alternate(sides, sizes.rounds)  # type: ignore[arg-type]
    rates = {reads: [epoch.rows_per_s for epoch in of] for reads, of in epochs.items()}
    for reads, of in rates.items():
        figures.add(f"epoch of 512 B rows on the device, reads={reads!r}", median(of), "rows/s")
    ratio = median_ratio(rates["pack"], rates["random"])
    figures.add("epoch of 512 B rows on the device, packs over random reads", ratio, "x")
    stats = epochs["pack"][-1].stats
    for key in ("bytes_read", "bytes_written"):
        figures.add(f"packs, {key.replace('_', ' ')}", stats["packs"][key] / 1e6, "MB")
    for stage, seconds in stats["packs"]["seconds"].items():
        figures.add(f"packs, whole epoch: {stage}", seconds, "s")


def _epoch(device: Device, path: Path, reads: Any, batches: list[Ids], sizes: PackSizes) -> Epoch:
    """Read all minibatches and compare every row."""
    gids.io.drop_page_cache(path)
    there = device.torch_device
    columns = torch.arange(_VALUES, dtype=torch.int32, device=there)
    source = gids.open(
        path,
        reads=reads,
        memory=sizes.host_bytes,
        device_memory=int(sizes.row_count * _VALUES * 4 * sizes.memory_share),
        tuning=gids.Tuning(staging=sizes.staging_bytes),
    )
    wrong = torch.zeros((), dtype=torch.int64, device=there)
    with source, gids.FeatureLoader(source, [_TABLE], device="cuda") as loader:
        begun = time.perf_counter()
        for ids, features in loader.attach(batches, lambda ids: ids, count=len(batches)):
            first = ids[_TABLE].to(there).to(torch.int32) * _VALUES
            wrong += (features[_TABLE] != first[:, None] + columns).sum()
        assert int(wrong) == 0, f"reads={reads!r}: {int(wrong)} values are wrong"
        seconds = time.perf_counter() - begun
        stats = loader.stats()
    by_packs = stats["packs"]["minibatches"]
    assert by_packs == (len(batches) if reads == "pack" else 0), f"{by_packs} minibatches by packs"
    return Epoch(len(batches) * sizes.minibatch_rows / seconds, stats)
