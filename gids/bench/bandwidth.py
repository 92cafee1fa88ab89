"""`gids bench bandwidth`: how fast rows are read and gathered, compared with the disk's ceiling.

The ceiling is that of random reads of pages at a fixed depth, past the page cache, by an I/O engine of gids
without tables or cache.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from gids import _core, cuda
from gids.bench import text
from gids.bench.arguments import changed, check_known, open_table, parse_cache_size
from gids.bench.report import Session
from gids.bench.sampling import endless, input_nodes, make_sampler
from gids.cache.budget import available_bytes
from gids.errors import FormatError, StorageError
from gids.io import drop_page_cache, open_engine
from gids.io.disks import RING_READS_PER_S, ring_count
from gids.io.engine import direct_works, probe
from gids.loader import FeatureLoader, Tuning
from gids.loader.source import open as open_source
from gids.measure.isolation import cached_share, cpu_seconds, device_bytes_read
from gids.sizes import format_bytes
from gids.store import FeatureStore, Table, graphs_of
from gids.write.files import aligned_zeros

ENGINES = ("uring", "threads", "mmap")
PROBE = "raw probe"
SETTINGS = {
    "engine": "engine",
    "batch": "batch",
    "depth": "depth",
    "cache": "cache",
    "window": "window",
    "state": "page cache",
}
COLUMNS = [
    text.Column("effective MB/s", "effective_bytes_per_s", text.millions, spread=True),
    text.Column("device MB/s", "device_bytes_per_s", text.millions),
    text.Column("pages/s read", "reads_per_s", text.count),
    text.Column("of ceiling", "of_ceiling", text.ratio),
    text.Column("hits %", "hit_ratio", text.percent),
    text.Column("p50", "latency_p50_s", text.seconds),
    text.Column("p99", "latency_p99_s", text.seconds),
    text.Column("p99.9", "latency_p999_s", text.seconds),
    text.Column("CPU/page", "cpu_s_per_page", text.seconds),
]
_PROBE_S = 3.0
_ROWS = 8192
_VERIFIED_ROWS = 512

# Of the raw probe.
_LEAST_S = 0.5
_READS_MAX = 400_000
_RING_LIMIT = 0.7  # of RING_READS_PER_S: above it, a ring may be the limit
_FASTER = 1.1
_BATCH = 8192  # reads submitted together, in ascending order like a minibatch's


def measure(session: Session) -> None:
    """Fill the report. Settings: engine, batch, depth, cache, window and state."""
    args, report = session.args, session.report
    engines = _engines(session)
    if args.rows and (unused := changed(args, args.sampling_defaults)):
        raise ValueError(f"--rows draws uniform rows and samples nothing: remove {unused}")
    store, table = open_table(args)
    cache_bytes = _cache_bytes(table, session)
    _describe(store, table, engines, session)

    def open_loader(engine: str, depth: int) -> FeatureLoader:
        direct = direct_works(table.shard_paths)
        tuning = Tuning(engine=engine, queue_depth=depth, cache=cache_bytes, direct=direct)
        source = open_source(store, window=args.window, threads=args.threads, tuning=tuning)
        return FeatureLoader(source, [table.name], device=args.device)

    for engine in engines:
        with open_loader(engine, args.depth[0]) as loader:
            verify(loader, table, args.seed)
    batches = _minibatches(store, table, session)
    plan = list(itertools.product(batches.items(), engines, args.depth))
    session.progress.total(args.repeat * len(plan))
    for turn in range(args.repeat):
        # Other processes may use the disk: each round measures the ceiling again.
        ceilings = _measure_ceilings(table, session, args.seed + turn)
        for (batch, ids), engine, depth in plan:
            if warm := why_warm(table.shard_paths):
                report.note(warm)
            with open_loader(engine, depth) as loader:
                metrics = aggregate(loader, table, ids)
                lines = sum(stats["lines"] for stats in loader.stats()["tables"].values())
            report.figure(
                engine=engine,
                batch=batch,
                depth=depth,
                cache=format_bytes(lines * table.page_bytes),
                window=args.window,
                state="warm" if warm else "cold",
            ).add(**metrics, of_ceiling=None if warm else metrics["reads_per_s"] / ceilings[depth])
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
    """Read the minibatches with an empty cache: the metrics. Blocks. Raises the loader's errors, OSError."""
    stream = loader.attach(batches, lambda ids: {table.name: ids})
    on_device = None if loader.device.type == "cpu" else cuda.open_device(loader.device).current_stream()
    before, row_count = _counters(loader), 0
    begun, cpu_begun = time.perf_counter(), cpu_seconds()
    for ids, features in stream:
        del features  # the next output reuses its memory
        if on_device is not None:
            on_device.synchronize()
        row_count += len(ids)
    seconds, cpu_s = time.perf_counter() - begun, cpu_seconds() - cpu_begun
    pages, hits, device_bytes = (b - a for a, b in zip(before, _counters(loader), strict=True))
    return {
        "effective_bytes_per_s": row_count * table.row_bytes / seconds,
        "device_bytes_per_s": device_bytes / seconds,
        "reads_per_s": device_bytes / seconds / table.page_bytes,
        "hit_ratio": hits / pages if pages else 0.0,
        "cpu_s_per_page": cpu_s / max(1, pages),
        **percentiles(*loader.engine.latencies()),
    }


def percentiles(ends: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> dict[str, float]:
    """The latencies in seconds that 50, 99 and 99.9 % of the requests did not exceed; {} without requests."""
    total = int(counts.sum())
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999} if total else {}
    places = {name: np.searchsorted(np.cumsum(counts), share * total) for name, share in shares.items()}
    return {f"latency_{name}_s": float(ends[place]) for name, place in places.items()}


def _counters(loader: FeatureLoader) -> tuple[int, int, int]:
    """Pages, hits and bytes from the device: if pages are mapped, only the kernel counts the bytes."""
    stats = loader.stats()
    device_bytes = device_bytes_read() if loader.engine.name == "mmap" else None
    return stats["pages"], stats["hits"], stats["bytes_read"] if device_bytes is None else device_bytes


def _engines(session: Session) -> list[str]:
    if session.args.engines is None:
        no_uring = _core.why_no_uring()
        if no_uring:
            session.report.note(f"uring is not measured: {no_uring}")
        return [name for name in ENGINES if not (name == "uring" and no_uring)]
    for name in session.args.engines:
        check_known("--engines", name, ENGINES)
    return list(dict.fromkeys(session.args.engines))


def _cache_bytes(table: Table, session: Session) -> int:
    size = session.args.cache
    _, unit, number = parse_cache_size(size, minibatches=False)
    cache_bytes = int(number)
    if unit == "%":
        cache_bytes = int(number * table.page_count) * (table.page_bytes + _core.LINE_METADATA_BYTES)
    if cache_bytes >= table.page_count * table.page_bytes:
        session.report.note(
            f"a cache of {size} holds the whole table: after the first read every page is a hit, so the "
            "results measure memory, not the disk"
        )
    if session.args.device == "cpu" and cache_bytes > available_bytes() // 2:
        raise ValueError(
            f"--cache {size}: {format_bytes(cache_bytes)} is more than half of the available memory; give a "
            "smaller cache"
        )
    return cache_bytes


def _describe(store: FeatureStore, table: Table, engines: list[str], session: Session) -> None:
    disk, report = probe(table.shard_paths[0]), session.report
    report.subject.update(
        dataset=str(store.path),
        table=table.name,
        rows=table.row_count,
        row_bytes=table.row_bytes,
        page_bytes=table.page_bytes,
        pages=table.page_count,
        shards=len(table.shard_paths),
        file_system=str(disk["file_system"]),
        device=session.args.device,
    )
    through_page_cache = [name for name in engines if name == "mmap" or not disk["direct"]]
    if through_page_cache and table.page_count * table.page_bytes < available_bytes():
        report.notes_above.append(
            f"the whole table fits into the page cache, so {' and '.join(through_page_cache)} measures "
            "memory, not the disk: it is slower on a table larger than memory. To measure with less memory, "
            "run `systemd-run --scope -p MemoryMax=BYTES gids bench ...`. If the features fit into memory, a "
            "cache that holds all of them is fastest"
        )
    if not disk["direct"]:
        report.note(
            f"the file system has no direct I/O ({disk['direct_note']}): reads go through the page cache"
        )


def _minibatches(store: FeatureStore, table: Table, session: Session) -> dict[str, list[torch.Tensor]]:
    """Name -> node ids of minibatches, int64[n] each: sampled, or uniform if there is no topology."""
    args, report = session.args, session.report
    if args.rows is None and table.kind == "node":
        try:
            graphs_of(store)
            batches = {}
            for seeds in args.batch_size:
                sampler = make_sampler("neighbor", args.fanouts, seeds)
                stream = endless(store, sampler, seeds=args.seeds, batch_size=seeds, seed=args.seed)
                first = itertools.islice(stream, args.iterations)
                batches[f"{seeds} seeds"] = [input_nodes(minibatch, str(table.type)) for minibatch in first]
            report.subject.update(fanouts=list(args.fanouts), seeds=args.seeds)
            return batches
        except FormatError as error:
            report.note(f"minibatches are uniform random rows: {error}")
    rng = np.random.default_rng(args.seed)
    return {
        f"{rows} rows": [
            torch.from_numpy(rng.choice(table.row_count, min(rows, table.row_count), replace=False))
            for _ in range(args.iterations)
        ]
        for rows in args.rows or [_ROWS]
    }


def _measure_ceilings(table: Table, session: Session, seed: int) -> dict[int, float]:
    """Return depth -> pages per second of the raw probe, and add a figure for each depth."""
    report, ceilings = session.report, {}
    for depth in session.args.depth:
        options = {"seconds": _PROBE_S, "depth": depth, "seed": seed}
        raw = random_reads(table.shard_paths, page_bytes=table.page_bytes, **options)
        if raw.note:
            report.note(raw.note)
        if raw.passes > 1:
            report.note(
                "the table is so small that the probe reads it several times: the ceiling is less certain "
                "than with a larger table"
            )
        ceilings[depth] = raw.reads_per_s
        state = "warm" if raw.note else "cold"
        report.figure(engine=PROBE, batch=None, depth=depth, cache=None, window=None, state=state).add(
            reads_per_s=raw.reads_per_s,
            device_bytes_per_s=raw.reads_per_s * table.page_bytes,
            of_ceiling=None if raw.note else 1.0,
        )
    return ceilings


@dataclass(frozen=True)
class RawReads:
    """passes: number of passes over the files. note: why the page cache may have answered, or ""."""

    reads_per_s: float
    passes: int
    note: str = ""


def random_reads(
    paths: Sequence[str | os.PathLike[str]],
    *,
    page_bytes: int,
    seconds: float,
    depth: int = 256,
    seed: int = 0,
) -> RawReads:
    """Read distinct random pages for `seconds`, or until all pages or _READS_MAX are read. Blocks.

    Small files are read again, in another order, until _LEAST_S have passed: a short pass is not precise.
    Where the rings and not the disks may be the limit, it reads again with twice as many rings, as long as
    that is faster.

    Raises StorageError if a read fails, OSError, and ValueError for files smaller than a page.
    """
    sizes = np.array([os.path.getsize(path) // page_bytes for path in paths], np.int64)
    total = int(sizes.sum())
    if total == 0:
        raise ValueError(f"{paths[0]} is smaller than one page of {page_bytes} B: there is nothing to read")
    note = why_warm(paths)
    rings, most = ring_count(paths), ring_count(paths, reads_per_s=math.inf)
    best = reads = _random_reads(paths, sizes, page_bytes, seconds, depth, rings, seed)
    while reads.reads_per_s > _RING_LIMIT * RING_READS_PER_S * rings and rings < most:
        rings = min(2 * rings, most)
        reads = _random_reads(paths, sizes, page_bytes, seconds, depth, rings, seed)
        if reads.reads_per_s < _FASTER * best.reads_per_s:
            break
        best = reads
    return replace(best, note=note)


def _random_reads(
    paths: Sequence[str | os.PathLike[str]],
    sizes: npt.NDArray[np.int64],
    page_bytes: int,
    seconds: float,
    depth: int,
    rings: int,
    seed: int,
) -> RawReads:
    """sizes: of the files, in pages."""
    total = int(sizes.sum())
    rng = np.random.default_rng(seed)
    ends = np.cumsum(sizes)
    done = passes = 0
    with open_engine(
        paths,
        depth=depth,
        max_read_bytes=page_bytes,
        max_merge_bytes=0,
        direct=direct_works(paths),
        reads_per_s=rings * RING_READS_PER_S,
    ) as engine:
        out = aligned_zeros(min(_BATCH, total), page_bytes)
        out[:] = 0  # page faults are not measured
        taken = 0.0
        while not passes or (total <= _READS_MAX and taken < min(seconds, _LEAST_S)):
            passes += 1
            chosen = rng.choice(total, min(total, _READS_MAX), replace=False)
            begun = time.perf_counter()
            for first in range(0, len(chosen), _BATCH):
                pages = np.sort(chosen[first : first + _BATCH])
                files = np.searchsorted(ends, pages, "right")
                offsets = (pages - (ends - sizes)[files]) * page_bytes
                errors = engine.read(files.astype(np.uint32), offsets, page_bytes, out[: len(pages)])
                if errors.any():
                    bad = int(np.flatnonzero(errors)[0])
                    reason = os.strerror(int(errors[bad]))
                    raise StorageError(int(errors[bad]), reason, paths[int(files[bad])], int(offsets[bad]))
                done += len(pages)
                if taken + time.perf_counter() - begun > seconds:
                    break
            taken += time.perf_counter() - begun
    return RawReads(done / taken, passes)


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
