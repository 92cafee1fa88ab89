"""One run of aggregation: reads and gathers the rows of given minibatches. Called by bandwidth.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gids import cuda
from gids.bench.probe import direct_works, why_warm
from gids.errors import FormatError
from gids.loader import FeatureLoader, Tuning
from gids.loader.source import open as open_source
from gids.measure.counters import cpu_seconds, device_bytes_read

if TYPE_CHECKING:
    from gids.store import FeatureStore, Table

_VERIFIED_ROWS = 512


@dataclass(frozen=True)
class Run:
    """The settings of a run."""

    engine: str
    depth: int
    cache_bytes: int
    window: int
    threads: int | None = None
    device: str = "cpu"


@dataclass
class Measured:
    """The totals of a run. row_bytes: of the rows, as stored. device_bytes: read from the device.

    lines: of the cache. latencies: of the requests. note: why the run is warm, or "".
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    row_bytes: int = 0
    device_bytes: int = 0
    pages: int = 0
    hits: int = 0
    lines: int = 0
    latencies: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]] | None = None
    note: str = ""

    def percentile(self, share: float) -> float | None:
        """Latency in seconds that this share of the requests did not exceed; None without requests."""
        if self.latencies is None:
            return None
        ends, counts = self.latencies
        total = int(counts.sum())
        if not total:
            return None
        return float(ends[int(np.searchsorted(np.cumsum(counts), share * total))])


def verify(store: FeatureStore, table: Table, run: Run, seed: int) -> None:
    """Compare rows from a loader with rows of the mapped file. Raises FormatError if one differs."""
    rng = np.random.default_rng(seed)
    rows = min(_VERIFIED_ROWS, table.row_count)
    ids = torch.from_numpy(rng.choice(table.row_count, rows, replace=False))
    with _loader(store, table, run) as loader:
        (_, features), *_ = loader.attach([ids], lambda ids: {table.name: ids})
    mapped = copy(table).read_rows(ids)  # a copy, so that the map ends here: mapped pages stay in memory
    same = cuda.on_host(features[table.name]).view(torch.uint8).equal(mapped.view(torch.uint8))
    if not same:
        raise FormatError(
            f"engine {run.engine!r} reads rows of {table.name!r} that differ from the mapped file; "
            "check the files with `gids verify`"
        )


def aggregate(store: FeatureStore, table: Table, run: Run, batches: Sequence[torch.Tensor]) -> Measured:
    """Read the minibatches with an empty cache. Blocks. Raises the loader's errors and OSError."""
    result = Measured(note=why_warm(table.shard_paths))
    with _loader(store, table, run) as loader:
        stream = loader.attach(batches, lambda ids: {table.name: ids})
        before = _counters(loader, run)
        on_device = None if run.device == "cpu" else cuda.open_device(run.device).current_stream()
        begun, cpu_begun = time.perf_counter(), cpu_seconds()
        for ids, features in stream:
            del features  # the next output reuses its memory
            if on_device is not None:
                on_device.synchronize()
            result.row_bytes += len(ids) * table.row_bytes
        result.seconds = time.perf_counter() - begun
        result.cpu_s = cpu_seconds() - cpu_begun
        after = _counters(loader, run)
        result.pages, result.hits, result.device_bytes = (
            after[name] - before[name] for name in ("pages", "hits", "device_bytes")
        )
        result.lines = sum(t["lines"] for t in loader.stats()["tables"].values())
        result.latencies = loader.engine.latencies()
    return result


def _loader(store: FeatureStore, table: Table, run: Run) -> FeatureLoader:
    tuning = Tuning(
        engine=run.engine,
        queue_depth=run.depth,
        cache=run.cache_bytes,
        direct=direct_works(table.shard_paths),
    )
    source = open_source(store, window=run.window, threads=run.threads, tuning=tuning)
    return FeatureLoader(source, [table.name], device=run.device)


def _counters(loader: FeatureLoader, run: Run) -> dict[str, int]:
    """Counters so far. For reads through the page cache, only the kernel counts bytes from the device."""
    stats = loader.stats()
    device_bytes = device_bytes_read() if run.engine == "mmap" else None
    return {
        "pages": stats["pages"],
        "hits": stats["hits"],
        "device_bytes": stats["bytes_read"] if device_bytes is None else device_bytes,
    }
