"""`gids bench bandwidth`: how fast random rows are read and gathered, compared with the disk's ceiling.

The ceiling is that of random reads of pages at the same depth, past the page cache, by an I/O engine of gids
without tables or cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gids import _core, cuda
from gids.bench.isolation import cached_share, cpu_seconds
from gids.bench.plot import plot_bars
from gids.bench.report import Column, Report, Session, count, millions, ratio, seconds
from gids.bench.sampling import open_table
from gids.errors import FormatError, StorageError
from gids.io import drop_page_cache, open_engine
from gids.io.engine import direct_works, probe
from gids.loader import FeatureLoader, Tuning
from gids.loader.source import open as open_source
from gids.store import Table
from gids.write.files import aligned_zeros

ENGINES = ("uring", "threads")
PROBE = "raw probe"
SETTINGS = {"engine": "engine", "state": "page cache"}
COLUMNS = [
    Column("effective MB/s", "effective_bytes_per_s", millions),
    Column("device MB/s", "device_bytes_per_s", millions),
    Column("pages/s read", "reads_per_s", count),
    Column("of ceiling", "of_ceiling", ratio),
    Column("CPU/page", "cpu_s_per_page", seconds),
]
_PROBE_S = 3.0
_VERIFIED_ROWS = 512

# Of the raw probe.
_LEAST_S = 0.5  # a shorter pass over small files is not precise
_READS_MAX = 400_000
_BATCH = 8192  # reads submitted together, in ascending order like a minibatch's


def measure(session: Session) -> None:
    """Fill the report. Settings: engine and state."""
    args, report = session.args, session.report
    if no_uring := _core.why_no_uring():
        report.note(f"uring is not measured: {no_uring}")
    engines = [name for name in ENGINES if not (name == "uring" and no_uring)]
    store, table = open_table(args)
    disk = probe(table.shard_paths[0])
    report.subject.update(
        dataset=str(store.path),
        table=table.name,
        rows=table.row_count,
        row_bytes=table.row_bytes,
        page_bytes=table.page_bytes,
        pages=table.page_count,
        shards=len(table.shard_paths),
        file_system=str(disk["file_system"]),
        device=args.device,
        depth=args.depth,
        rows_per_batch=args.rows,
    )
    if not disk["direct"]:
        report.note(
            f"the file system has no direct I/O ({disk['direct_note']}): reads go through the page cache, "
            "which is memory for a table that fits in it"
        )

    def open_loader(engine: str) -> FeatureLoader:
        direct = direct_works(table.shard_paths)
        tuning = Tuning(engine=engine, queue_depth=args.depth, cache=0, direct=direct)
        source = open_source(store, heat="none", reads="random", tuning=tuning)
        return FeatureLoader(source, [table.name], device=args.device)

    rng, rows = np.random.default_rng(args.seed), min(args.rows, table.row_count)
    batches = [
        torch.from_numpy(rng.choice(table.row_count, rows, replace=False)) for _ in range(args.iterations)
    ]
    session.progress.total(len(engines))
    raw = random_reads(
        table.shard_paths, page_bytes=table.page_bytes, seconds=_PROBE_S, depth=args.depth, seed=args.seed
    )
    ceiling = {
        "effective_bytes_per_s": raw.reads_per_s * table.page_bytes,
        "reads_per_s": raw.reads_per_s,
        "device_bytes_per_s": raw.reads_per_s * table.page_bytes,
        "of_ceiling": None if raw.note else 1.0,
    }
    report.add({"engine": PROBE, "state": "warm" if raw.note else "cold"}, ceiling)
    for engine in engines:
        with open_loader(engine) as loader:
            verify(loader, table, args.seed)
        if warm := why_warm(table.shard_paths):
            report.note(warm)
        with open_loader(engine) as loader:
            metrics = aggregate(loader, table, batches)
        of_ceiling = None if warm else metrics["reads_per_s"] / raw.reads_per_s
        setting = {"engine": engine, "state": "warm" if warm else "cold"}
        report.add(setting, {**metrics, "of_ceiling": of_ceiling})
        session.progress.add(1)


def verify(loader: FeatureLoader, table: Table, seed: int) -> None:
    """Compare rows from a loader with rows of the mapped file. Raises FormatError if one differs."""
    rng = np.random.default_rng(seed)
    rows = min(_VERIFIED_ROWS, table.row_count)
    ids = torch.from_numpy(rng.choice(table.row_count, rows, replace=False))
    (_, features), *_ = loader.attach([ids], lambda ids: {table.name: ids})
    mapped = copy(table).read_rows(ids)  # a copy, so that the map ends here: mapped pages stay in memory
    same = cuda.on_host(features[table.name]).view(torch.uint8).equal(mapped.view(torch.uint8))
    if not same:
        raise FormatError(
            f"engine {loader.engine.name!r} reads rows of {table.name!r} that differ from the mapped file; "
            "check the files with `gids verify`"
        )


def aggregate(loader: FeatureLoader, table: Table, batches: Sequence[torch.Tensor]) -> dict[str, float]:
    """Read the minibatches without a cache: the metrics. Blocks. Raises the loader's errors, OSError."""
    stream = loader.attach(batches, lambda ids: {table.name: ids})
    on_device = None if loader.device.type == "cpu" else cuda.open_device(loader.device).current_stream()
    row_count = 0
    begun, cpu_begun = time.perf_counter(), cpu_seconds()
    for ids, features in stream:
        del features  # the next output reuses its memory
        if on_device is not None:
            on_device.synchronize()
        row_count += len(ids)
    seconds, cpu_s = time.perf_counter() - begun, cpu_seconds() - cpu_begun
    stats = loader.stats()
    return {
        "effective_bytes_per_s": row_count * table.row_bytes / seconds,
        "device_bytes_per_s": stats["bytes_read"] / seconds,
        "reads_per_s": stats["bytes_read"] / seconds / table.page_bytes,
        "cpu_s_per_page": cpu_s / max(1, stats["pages"]),
    }


def plot(report: Report, path: Path) -> None:
    """Draw the rates as PNG: two bars per engine. Raises OSError."""
    bars = {
        f"{setting['engine']} ({setting['state']}): {what}": {what: metrics[metric] / 1e6}
        for setting, metrics in report.figures
        for what, metric in (("read", "device_bytes_per_s"), ("returned rows", "effective_bytes_per_s"))
    }
    plot_bars(path, "Random rows without a cache", bars, "MB/s")


class RawReads(NamedTuple):
    """note: why the page cache may have answered, or ""."""

    reads_per_s: float
    note: str


def random_reads(
    paths: Sequence[str | os.PathLike[str]],
    *,
    page_bytes: int,
    seconds: float,
    depth: int = 256,
    seed: int = 0,
) -> RawReads:
    """Read distinct random pages for `seconds`, or until all pages or 400,000 are read. Blocks.

    Small files are read again, in another order. Raises StorageError if a read fails, OSError, and ValueError
    for files smaller than a page.
    """
    note = why_warm(paths)
    sizes = np.array([os.path.getsize(path) // page_bytes for path in paths], np.int64)
    total, ends = int(sizes.sum()), np.cumsum(sizes)
    if total == 0:
        raise ValueError(f"{paths[0]} is smaller than one page of {page_bytes} B: there is nothing to read")
    rng, done, taken = np.random.default_rng(seed), 0, 0.0
    with open_engine(
        paths,
        depth=depth,
        max_read_bytes=page_bytes,
        max_merge_bytes=0,
        direct=direct_works(paths),
    ) as engine:
        out = aligned_zeros(min(_BATCH, total), page_bytes)
        out[:] = 0  # page faults are not measured
        while not done or taken < min(seconds, _LEAST_S):
            chosen = rng.choice(total, min(total, _READS_MAX), replace=False)
            begun = time.perf_counter() - taken
            for first in range(0, len(chosen), _BATCH):
                pages = np.sort(chosen[first : first + _BATCH])
                files = np.searchsorted(ends, pages, "right")
                offsets = (pages - (ends - sizes)[files]) * page_bytes
                errors = engine.read(files.astype(np.uint32), offsets, page_bytes, out[: len(pages)])
                if errors.any():
                    bad = int(np.flatnonzero(errors)[0])
                    reason = os.strerror(int(errors[bad]))
                    raise StorageError(int(errors[bad]), reason, paths[int(files[bad])], int(offsets[bad]))
                done, taken = done + len(pages), time.perf_counter() - begun
                if taken > seconds:
                    break
    return RawReads(done / taken, note)


def why_warm(paths: Sequence[str | os.PathLike[str]]) -> str:
    """Drop the files' pages from the page cache. Returns why that failed, or ""."""
    try:
        for path in paths:
            drop_page_cache(path)
    except OSError as error:
        return f"results are WARM: the page cache could not be emptied of {error.filename}: {error.strerror}"
    left = max(cached_share(path) for path in paths)
    if left > 0.01:
        return f"results are WARM: {left:.0%} of a shard stays in the page cache (mapped, or in memory)"
    return ""
