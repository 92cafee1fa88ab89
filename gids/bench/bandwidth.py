"""`gids bench bandwidth`: how fast rows are aggregated, and how close the reads come to what the disk can do.

The disk's ceiling is measured in the same run, by a raw probe of our own and by fio where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gids.bench import arguments, text
from gids.bench.report import Figure, Report
from gids.bench.session import Session
from gids.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

    from gids.bench.aggregation import Measured, Run
    from gids.bench.device_extents import DeviceExtents, Pace, Side
    from gids.store import FeatureStore, Table

HELP = "how fast rows are read and gathered, by engine, batch and depth, beside the disk's ceiling"
EPILOG = """\
Minibatches are sampled beforehand from the dataset's graph, or (--rows, or a dataset without topology) drawn
uniformly from all rows. Each run begins with an empty cache, in this process, after the rows that the engine
hands out were compared with the dataset's. The first lines, `raw probe` and `fio`, are the disk's ceiling.
With --memory-limit the process is a new one, in a memory control group.

`kvikio` among the engines (with --device cuda) is measured on what it is for: extents of the shards read into
device memory, in random order, beside the same through pinned staging. It takes no part in aggregation.
"""
ENGINES = ("uring", "threads", "mmap")
KVIKIO = "kvikio"
STATES = ("cold", "warm")
PROBES = ("raw probe", "fio")
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
FIRST_ITERATIONS = 20  # of the series from an empty cache, as in the paper's Figure 9
_PROBE_S = 3.0
_EXTENTS_S = 3.0
_EXTENTS = (64 << 10, 1 << 20)
_ROWS = 8192
_OF_LIMIT = 0.9  # of --memory-limit, for the loader: the process needs some besides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="DATASET", type=Path)
    arguments.add_dataset(parser)
    arguments.add_sampling(parser, several=True)
    add(
        "--rows", type=arguments.numbers(1), metavar="N,…", help="minibatches of so many uniform rows instead"
    )
    add(
        "--engines",
        type=arguments.words,
        metavar="NAME,…",
        help="default: those that work here of uring, threads, mmap; kvikio needs --device cuda",
    )
    add(
        "--extents",
        type=arguments.sizes,
        metavar="SIZE,…",
        help="read into device memory, beside kvikio (default: 64KiB,1MiB)",
    )
    add(
        "--depth",
        type=arguments.numbers(1),
        default=[256],
        metavar="N,…",
        help="requests in flight (default: 256)",
    )
    add("--cache", default="10%", metavar="SIZE", help="of the table (10%%), or bytes (4GB); default: 10%%")
    add(
        "--window",
        type=arguments.natural,
        default=16,
        metavar="N",
        help="minibatches looked ahead (default: 16)",
    )
    add("--policy", default="lookahead", metavar="NAME", help="of the cache (default: lookahead)")
    add(
        "--states",
        type=arguments.words,
        default=["cold"],
        metavar="cold,warm",
        help="what the page cache has of the dataset; warm runs read through it (default: cold)",
    )
    add(
        "--memory-limit",
        type=parse_bytes,
        metavar="BYTES",
        help="bound memory for cache, minibatches and page cache, as if the table were larger than memory; "
        "usually needs root (default: no bound)",
    )
    add("--iterations", type=arguments.positive, default=40, metavar="N", help="of a run (default: 40)")
    add("--threads", type=arguments.positive, metavar="N", help="that copy rows (default: torch's)")
    add(
        "--device",
        type=arguments.device,
        default="cpu",
        metavar="NAME",
        help="of cache and rows: cpu or cuda (default: cpu)",
    )


def measure(args: argparse.Namespace, session: Session, report: Report) -> None:
    """Fill the report; a series for each setting has its first iterations."""
    if args.memory_limit is not None and not getattr(args, "in_group", False):
        from gids.bench.limited import measure_limited

        measure_limited(args, session, report)
        return
    from gids.bench.aggregation import Run, verify
    from gids.measure.memory_group import limit_own_memory, own_memory_bytes

    engines, with_kvikio = _engines(args.engines, args.device, report)
    if args.extents and not with_kvikio:
        raise ValueError(f"--extents are read beside {KVIKIO}, which --engines does not name: leave them out")
    for state in args.states:
        if state not in STATES:
            raise ValueError(f"no state {state!r} of the page cache (there are {', '.join(STATES)})")
    if args.rows and (unused := arguments.given(args, args.sampling_defaults)):
        raise ValueError(f"--rows are drawn uniformly, and nothing is sampled: leave out {', '.join(unused)}")
    store, table = arguments.open_table(args)
    cache_bytes = _cache_bytes(args, table, report)
    _describe(store, table, engines, args, report)
    makers = _batch_makers(store, table, args, report) if engines else {}
    runs = [
        Run(
            engine,
            depth,
            cache_bytes,
            args.window,
            args.policy,
            state,
            args.threads,
            args.device,
            None if args.memory_limit is None else int(_OF_LIMIT * args.memory_limit),
        )
        for engine, depth, state in itertools.product(engines, args.depth, args.states)
    ]
    with contextlib.ExitStack() as stack:
        extents, sides = None, []
        if with_kvikio:
            extents = stack.enter_context(_open_extents(table, engines, args, report))
            sides = list(itertools.product(_extent_sizes(extents, table, args), extents.sides))
        for engine in engines:
            verify(store, table, next(run for run in runs if run.engine == engine), args.seed)
            session.check()
        left = session.repeat * (len(makers) * len(runs) + len(sides))
        session.total(left)
        batches = {name: make(args.iterations) for name, make in makers.items()}
        if args.memory_limit is not None:
            limit_own_memory(own_memory_bytes() + args.memory_limit)
        probe_s = min(_PROBE_S, session.left_s() / 4 / (session.repeat * len(PROBES) * len(args.depth)))
        for turn in range(session.repeat):
            # The disk's speed drifts where others share it: each round has a ceiling of its own.
            ceilings = _measure_ceilings(table, args, session, report, probe_s, args.seed + turn)
            for name, run in itertools.product(batches, runs):
                most_s = session.left_s() / left
                _measure_run(store, table, run, name, batches[name], most_s, ceilings, report)
                left -= 1
                session.done()
            for extent_bytes, side in sides:
                assert extents is not None
                most_s = min(_EXTENTS_S, session.left_s() / left)
                pace = extents.measure(side, extent_bytes, seconds=most_s, seed=args.seed + turn)
                _add_extents(report, side, extent_bytes, pace, ceilings, table.page_bytes)
                left -= 1
                session.done()


def columns(_: Report) -> tuple[dict[str, str], list[text.Column]]:
    return SETTINGS, COLUMNS


def plot(report: Report, path: Path) -> None:
    from gids.bench.bandwidth_plot import draw, size
    from gids.bench.plot import save_plot

    width, height = size(report)
    save_plot(path, lambda figure: draw(report, figure), width=width, height=height)


def _engines(names: Sequence[str] | None, device: str, report: Report) -> tuple[list[str], bool]:
    """Those that aggregate, and whether kvikio is measured, too."""
    from gids import _core

    no_uring = _core.why_no_uring()
    if names is None:
        if no_uring:
            report.note(f"uring is left out: {no_uring}")
        return [name for name in ENGINES if not (name == "uring" and no_uring)], False
    for name in names:
        if name == KVIKIO and device == "cpu":
            raise ValueError(
                "kvikio reads into GPU memory: give --device cuda "
                f"(on the CPU there are {', '.join(ENGINES)})"
            )
        if name not in (*ENGINES, KVIKIO):
            raise ValueError(f"no engine {name!r} (there are {', '.join(ENGINES)} and, on CUDA, {KVIKIO})")
    return [name for name in dict.fromkeys(names) if name != KVIKIO], KVIKIO in names


def _open_extents(
    table: Table, engines: list[str], args: argparse.Namespace, report: Report
) -> contextlib.AbstractContextManager[DeviceExtents]:
    from gids.bench.device_extents import open_device_extents

    report.note(
        f"{KVIKIO} and pinned staging read extents into device memory, as the preload of hot pages does: "
        "minibatches go another way, and their figures are not comparable with these"
    )
    engine = next((name for name in engines if name != "mmap"), "auto")
    return open_device_extents(args.device, table.shard_paths, engine=engine, depths=args.depth)


def _extent_sizes(extents: DeviceExtents, table: Table, args: argparse.Namespace) -> list[int]:
    """As asked for, each verified, in sizes that the files have."""
    found = sorted({extents.extent_bytes(wanted, table.page_bytes) for wanted in args.extents or _EXTENTS})
    for extent_bytes in found:
        extents.verify(extent_bytes, args.seed)
    return found


def _add_extents(
    report: Report, side: Side, extent_bytes: int, pace: Pace, ceilings: dict[int, float], page_bytes: int
) -> None:
    if pace.note:
        report.note(pace.note)
    rate = pace.nbytes / pace.seconds
    ceiling = max(ceilings.values()) if side.depth is None else ceilings[side.depth]
    report.figure(
        engine=side.name,
        batch=f"{extent_bytes >> 10} KiB extents",
        depth=side.depth,
        cache=None,
        window=None,
        state="warm" if pace.note else "cold",
    ).add(
        effective_bytes_per_s=rate,
        device_bytes_per_s=rate,
        reads_per_s=rate / page_bytes,
        of_ceiling=None if pace.note else rate / page_bytes / ceiling,
        cpu_s_per_page=pace.cpu_s / (pace.nbytes / page_bytes),
    )


def _cache_bytes(args: argparse.Namespace, table: Table, report: Report) -> int:
    from gids.bench.places import parse_size
    from gids.cache.budget import available_bytes

    cache_bytes = parse_size(args.cache, table.page_count, table.page_bytes)
    if cache_bytes >= table.page_count * table.page_bytes:
        report.note(
            f"a cache of {args.cache} holds the whole table: once a page was read all are hits, and the "
            "figures are of memory, not of the disk"
        )
    if args.device != "cpu":
        return cache_bytes
    if cache_bytes > available_bytes() // 2:
        raise ValueError(
            f"--cache {args.cache}: {format_bytes(cache_bytes)} are more than half of the memory that is "
            "available"
        )
    if args.memory_limit is not None and "warm" in args.states:
        raise ValueError(
            "--states warm fills the page cache, which --memory-limit bounds: leave one of them out"
        )
    if args.memory_limit is not None and args.memory_limit <= cache_bytes:
        raise ValueError(
            f"--memory-limit {format_bytes(args.memory_limit)}: the cache alone takes "
            f"{format_bytes(cache_bytes)} of it; give a larger limit or a smaller --cache"
        )
    return cache_bytes


def _describe(
    store: FeatureStore, table: Table, engines: list[str], args: argparse.Namespace, report: Report
) -> None:
    from gids.cache.budget import available_bytes
    from gids.io.engine import probe

    found = probe(table.shard_paths[0])
    report.subject.update(
        dataset=str(store.path),
        table=table.name,
        rows=table.row_count,
        row_bytes=table.row_bytes,
        page_bytes=table.page_bytes,
        pages=table.page_count,
        shards=len(table.shard_paths),
        file_system=str(found["file_system"]),
        device=args.device,
    )
    if args.memory_limit is not None:
        report.subject.update(memory_limit_bytes=args.memory_limit)
    through_page_cache = [name for name in engines if name == "mmap" or not found["direct"]]
    memory_bytes = available_bytes() if args.memory_limit is None else args.memory_limit
    if through_page_cache and table.page_count * table.page_bytes < memory_bytes:
        report.notes_above.append(
            f"the page cache has room for the whole table, so figures of {' and '.join(through_page_cache)} "
            "are of memory rather than of the disk; with a table larger than memory they would be lower. "
            "--memory-limit BYTES compares under less memory. Where features fit into memory, a memory_bytes "
            "that holds them all is fastest"
        )
    if not found["direct"]:
        report.note(f"the file system refuses direct I/O ({found['direct_note']}): reads pass the page cache")


def _batch_makers(
    store: FeatureStore, table: Table, args: argparse.Namespace, report: Report
) -> dict[str, Callable[[int], list[torch.Tensor]]]:
    """By name, what makes minibatches' ids: sampled where there is a graph, else uniform."""
    from gids.bench.aggregation import sampled_ids, uniform_ids
    from gids.bench.minibatches import make_sampler
    from gids.errors import FormatError
    from gids.store import graphs_of

    if args.rows is None and table.kind == "node":
        try:
            graphs_of(store)
            makers = {
                f"{seeds} seeds": sampled_ids(
                    store,
                    table,
                    make_sampler(args.sampler, args.fanouts, seeds),
                    seeds=args.seeds,
                    batch_size=seeds,
                    seed=args.seed,
                )
                for seeds in args.batch_size
            }
            report.subject.update(sampler=args.sampler, fanouts=list(args.fanouts), seeds=args.seeds)
            return makers
        except FormatError as error:
            report.note(f"minibatches are of uniform rows: {error}")
    return {f"{rows} rows": uniform_ids(table, rows=rows, seed=args.seed) for rows in args.rows or [_ROWS]}


def _measure_ceilings(
    table: Table, args: argparse.Namespace, session: Session, report: Report, seconds: float, seed: int
) -> dict[int, float]:
    """Depth -> pages per second, the most that any probe found; each is a figure too."""
    from gids.bench.fio import fio_reads_per_s
    from gids.bench.probe import random_reads

    ceilings: dict[int, float] = {}
    for depth in args.depth:
        raw = random_reads(
            table.shard_paths, page_bytes=table.page_bytes, seconds=seconds, depth=depth, seed=seed
        )
        if raw.note:
            report.note(raw.note)
        if raw.passes > 1:
            report.note(
                "the table is so small that the probes read it several times over: of a larger one the "
                "ceiling would be surer"
            )
        found = {PROBES[0]: raw.reads_per_s}
        session.check()
        other = fio_reads_per_s(
            table.shard_paths,
            page_bytes=table.page_bytes,
            depth=depth,
            seconds=seconds,
            passes=raw.passes,
            seed=seed,
        )
        if other is None:
            report.note("fio is not installed, or cannot read here: the ceiling is the raw probe's alone")
        else:
            found[PROBES[1]] = other
        ceilings[depth] = max(found.values())
        for name, reads_per_s in found.items():
            state = "warm" if raw.note else "cold"
            report.figure(engine=name, batch=None, depth=depth, cache=None, window=None, state=state).add(
                reads_per_s=reads_per_s,
                device_bytes_per_s=reads_per_s * table.page_bytes,
                of_ceiling=None if raw.note else reads_per_s / ceilings[depth],
            )
        session.check()
    return ceilings


def _measure_run(
    store: FeatureStore,
    table: Table,
    run: Run,
    batch: str,
    ids: Sequence[torch.Tensor],
    most_seconds: float,
    ceilings: dict[int, float],
    report: Report,
) -> None:
    from gids.bench.aggregation import aggregate

    found = aggregate(store, table, run, ids, most_seconds=most_seconds)
    if found.note:
        report.note(found.note)
    if len(found.seconds) < len(ids):
        report.cut_short(f"runs that --seconds cut short have fewer than {len(ids)} iterations")
    state = "warm" if found.note else run.state
    figure = report.figure(
        engine=run.engine,
        batch=batch,
        depth=run.depth,
        cache=format_bytes(found.lines * table.page_bytes),
        window=run.window,
        state=state,
    )
    _add(figure, found, None if state == "warm" else ceilings[run.depth], table.page_bytes)
    _add_series(report, figure, found)


def _add(figure: Figure, found: Measured, ceiling: float | None, page_bytes: int) -> None:
    """ceiling: pages per second that the disk gives; None for a run through the page cache."""
    device = found.rate(found.device_bytes)
    pages, hits = sum(found.pages), sum(found.hits)
    figure.add(
        effective_bytes_per_s=found.rate(found.row_bytes),
        device_bytes_per_s=device,
        reads_per_s=device / page_bytes,
        of_ceiling=None if ceiling is None else device / page_bytes / ceiling,
        hit_ratio=hits / pages if pages else 0.0,
        latency_p50_s=found.percentile(0.5),
        latency_p99_s=found.percentile(0.99),
        latency_p999_s=found.percentile(0.999),
        cpu_s_per_page=found.cpu_s / max(1, pages),
        iterations=len(found.seconds),
    )


def _add_series(report: Report, figure: Figure, found: Measured) -> None:
    """The first iterations of the setting's first run."""
    if any(series["setting"] == dict(figure.setting) for series in report.series):
        return
    first = slice(0, FIRST_ITERATIONS)
    seconds = found.seconds[first]

    def rates(values: Sequence[int]) -> list[float]:
        return [value / s for value, s in zip(values[first], seconds, strict=True)]

    report.series.append(
        {
            "name": "first iterations from an empty cache",
            "setting": dict(figure.setting),
            "values": {
                "seconds": seconds,
                "effective_bytes_per_s": rates(found.row_bytes),
                "device_bytes_per_s": rates(found.device_bytes),
                "hit_ratio": [
                    h / p if p else 0.0 for h, p in zip(found.hits[first], found.pages[first], strict=True)
                ],
            },
        }
    )
