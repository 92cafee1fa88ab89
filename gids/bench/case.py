"""A trace of one table, replayed in caches and compared with MIN: what `gids bench hit-ratio` measures.

The trace is recorded, or sampled: one per sampler, kappa and order of rows. Orders are tried without writing
a dataset. Called by hit_ratio.py.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt

from gids.bench.arguments import DEPENDENT, changed, check_sampler, open_table
from gids.bench.report import Session, check_writable
from gids.bench.sampling import endless, input_nodes, make_sampler
from gids.cache import page_heat
from gids.errors import FormatError
from gids.heat import choose_seeds
from gids.sizes import format_bytes
from gids.store import FeatureStore, Table
from gids.trace.recording import RowTrace, TouchedPages, Trace, TracedTable, TraceWriter
from gids.trace.replay import LIVE_BATCHES, Optimum, replay
from gids.write.row_order import co_read_order, community_order, degree_order

PLANNED = 2  # minibatches whose reads are in flight
LONGEST = LIVE_BATCHES - PLANNED  # window
_WARM_UP = 0.25  # share of the minibatches before counting starts


class Case:
    """A trace of one table and its optimum.

    warm: number of minibatches before counting starts. epoch_batches: minibatches per epoch; None if unknown.
    Describes the first trace in the report's subject.
    """

    def __init__(self, trace: Trace, table: int, session: Session, seed: int) -> None:
        args, report = session.args, session.report
        self.trace, self.table, self.traced = trace, table, trace.tables[table]
        self.epoch_batches = _epoch_batches(args)
        self._report, self._seed = report, seed
        traced, counts = self.traced, trace.page_counts(table)
        self.warm = int(trace.batch_count * _WARM_UP)
        facts = {
            "table": traced.name,
            "pages": traced.page_count,
            "page_bytes": traced.page_bytes,
            "rows_per_page": traced.rows_per_page,
            "batches": trace.batch_count,
            "warm_up_batches": self.warm,
            "pages_per_batch": float(counts.mean()) if len(counts) else 0.0,
        }
        for key, value in facts.items():
            report.subject.setdefault(key, value)
        self.pages = int(counts[self.warm :].sum())
        """Pages that the counted minibatches read."""
        if not self.pages:
            raise ValueError(f"the trace reads no pages of table {traced.name!r}")
        share = counts[self.warm :].mean() / traced.page_count
        if share > 0.5:
            report.note(
                f"a minibatch reads {share:.0%} of all pages on average, so policies "
                "differ little: try smaller minibatches (--batch-size, --fanouts)"
            )
        if traced.heat is None:
            report.note(
                "the pages have no heat: static cannot choose pages, and lookahead uses only the window"
            )
        optimum, warm = Optimum(trace.batches(table), traced.page_count), self.warm
        self._best = functools.cache(lambda lines: int(optimum.hits(lines, warm=warm)[warm:].sum()))
        """Hits of MIN."""

    def minimum(self, lines: int) -> dict[str, float]:
        """The metrics of Belady's MIN."""
        return self._metrics(self._best(lines), lines)

    def run(self, policy: str, lines: int, window: int) -> dict[str, float]:
        """The metrics of a policy."""
        counts = replay(
            self.trace.batches(self.table),
            self.traced.page_count,
            lines=lines,
            policy=policy,
            window=window,
            planned=PLANNED,
            heat=self.traced.heat,
            seed=self._seed,
            warm=self.warm,
        )
        hits, best = int(counts.hits.sum()), self._best(lines)
        if hits > best:
            raise RuntimeError(f"{policy} hits {hits} pages, more than MIN's {best}: please report this bug")
        metrics = {
            **self._metrics(hits, lines),
            "loads": int(counts.loads.sum()),
            "bypasses": int(counts.bypasses.sum()),
            "evictions": counts.evictions,
        }
        if counts.in_use is not None and lines:
            metrics["in_use_share"] = counts.in_use / lines
        return metrics

    def _metrics(self, hits: int, lines: int) -> dict[str, float]:
        """Hits compared with MIN; pages read, in the trace and per epoch."""
        best, batches = self._best(lines), self.trace.batch_count - self.warm
        metrics = {
            "hit_ratio": hits / self.pages,
            "of_min": hits / best if best else 1.0,
            "regret": (best - hits) / self.pages,
            "pages_read": float(self.pages - hits),
            "pages_per_batch": self.pages / batches,
        }
        if self.epoch_batches is not None:
            metrics["epoch_pages_read"] = (self.pages - hits) / batches * self.epoch_batches
            metrics["epoch_pages"] = self.pages / batches * self.epoch_batches
        return metrics

    def cache_lines(self, sizes: list[tuple[str, str, float]]) -> list[tuple[str, int]]:
        """(name, lines) of each cache size of arguments.parse_cache_size, without repeats."""
        page_count, page_bytes, report = self.traced.page_count, self.traced.page_bytes, self._report
        whole = {"%": page_count, "x": float(report.subject["pages_per_batch"])}
        names: dict[int, str] = {}
        for text, unit, number in sizes:
            lines = int(number // page_bytes if unit == "B" else number * whole[unit])
            if lines >= page_count:
                lines = page_count
                report.note(f"a cache of {text} holds the whole table: pages are hits after their first read")
            if not lines and number:
                ways = " (2% is a share of the pages, 5x is five minibatches)" if unit == "B" else ""
                smaller = f"a cache of {text} is smaller than a page of {page_bytes} B"
                report.note(f"{smaller}: nothing is hit{ways}")
            size = format_bytes(lines * page_bytes)
            names.setdefault(lines, f"{text} ({size})" if unit != "B" else size)
        return [(name, lines) for lines, name in sorted(names.items())]


def _epoch_batches(args: argparse.Namespace) -> int | None:
    """The number of seeds of the dataset / batch size."""
    if args.replay is not None or args.path is None:
        return None
    seeds = choose_seeds(FeatureStore(Path(args.path), allow_dirs=args.allow_dir), args.seeds)
    return -(-sum(map(len, seeds.values())) // int(args.batch_size))


_STORED = "stored"  # the order in the dataset
_ORDERS = (_STORED, "original", "degree", "community", "trace")
_ORDER_BYTES = 256 << 20  # of memory to find the order of a trace


Source = dict[str, str | int | None]
"""The setting of a trace: "sampler", "kappa" (None if it takes none; "inf", as JSON knows no infinity) and
"order" of the rows. All are None for a recorded trace."""


def sources(session: Session) -> list[Source]:
    """The traces to measure. Raises ValueError for options that exclude each other."""
    args, report = session.args, session.report
    if args.replay is not None:
        if unused := changed(args, args.sampling_defaults):
            raise ValueError(f"--replay reads a recorded trace and samples nothing: remove {unused}")
        if args.path is not None and args.advise is None:
            raise ValueError(f"--replay needs a dataset only for --advise in seconds: remove {args.path}")
        return [{"sampler": None, "kappa": None, "order": None}]
    if args.path is None:
        raise ValueError("give a dataset to sample, or a recorded trace with --replay")
    if args.record is not None:
        check_writable(args.record)
    samplers: list[tuple[str, int | str | None]] = []
    for name in dict.fromkeys(args.sampler):
        check_sampler(name)
        if name in DEPENDENT:
            samplers += [(name, "inf" if kappa == math.inf else kappa) for kappa in args.kappa or [1]]
        else:
            samplers.append((name, None))
            if args.kappa is not None:
                report.note(f"{name} takes no kappa: it is measured once")
    orders = list(dict.fromkeys(args.order or [_STORED]))
    for order in orders:
        _check_order(order)
    if args.rows:
        if args.order is not None:
            raise ValueError("--rows traces rows by id, so their order has no effect: remove --order")
        report.note("--rows: each row counts as a page")
    sampled: list[Source] = [
        {"sampler": name, "kappa": kappa, "order": order} for name, kappa in samplers for order in orders
    ]
    for option, value in (
        ("--record writes", args.record),
        ("--advise takes", args.advise),
        ("--plot draws", args.plot),
    ):
        if value is not None and len(sampled) > 1:
            raise ValueError(f"{option} one trace: give one --sampler, one --kappa and one --order")
    return sampled


@contextmanager
def open_case(source: Source, session: Session, *, seed: int) -> Iterator[Case]:
    """Open the trace of a source, or sample it."""
    args, report = session.args, session.report
    if source["sampler"] is None:
        with Trace(args.replay) as trace:
            report.subject.update(trace=str(args.replay))
            yield Case(trace, trace.table_number(args.table), session, seed)
        return
    store, table = open_table(args)
    report.subject.update(
        dataset=str(store.path), fanouts=list(args.fanouts), batch_size=args.batch_size, seeds=args.seeds
    )
    with tempfile.TemporaryDirectory(prefix="gids-bench-") as directory:
        path = args.record or Path(directory) / "sampled.trace"
        _sample(source, store, table, path, args, seed)
        with Trace(path) as trace:
            yield Case(trace, 0, session, seed)


def _sample(
    source: Source,
    store: FeatureStore,
    table: Table,
    path: Path,
    args: argparse.Namespace,
    seed: int,
) -> None:
    """Write a trace of the minibatches that gids.NodeLoader samples.

    With --rows, it has ids of rows instead of pages. Raises ValueError, KeyError for arguments, and
    FormatError for a dataset without topology.
    """
    if not isinstance(table.type, str):
        raise ValueError(
            f"table {table.name!r} has rows of edges, and samplers read nodes: give another --table"
        )
    name, kappa = str(source["sampler"]), float(source["kappa"] or 1)
    sampler = make_sampler(name, args.fanouts, args.batch_size, kappa=kappa)
    positions = None if args.rows else _positions(str(source["order"]), store, table)
    per_page = 1 if args.rows else table.rows_per_page
    methods = store.heat_methods(table.type)
    traced = TracedTable(
        name=table.name,
        page_count=table.row_count if args.rows else table.page_count,
        page_bytes=table.row_bytes if args.rows else table.page_bytes,
        rows_per_page=per_page,
        lines=None,
        heat=page_heat(store.heat(methods[0], table.type), per_page, positions) if methods else None,
        rows=args.rows,
    )
    touched = TouchedPages(traced.page_count, per_page, positions)
    minibatches = endless(store, sampler, seeds=args.seeds, batch_size=args.batch_size, seed=seed)
    writer = TraceWriter(path, [traced])
    try:
        for minibatch in itertools.islice(minibatches, args.batches):
            writer.enter([touched.of(input_nodes(minibatch, table.type).numpy())])
        writer.finish()
    finally:
        writer.abandon()


def _check_order(name: str) -> None:
    """Raise ValueError unless _positions knows the order."""
    kind, _, file = name.partition(":")
    if kind not in _ORDERS or bool(file) != (kind == "trace"):
        raise ValueError(f"--order must be one of {', '.join(_ORDERS)}:FILE (got {name!r})")


def _positions(order: str, store: FeatureStore, table: Table) -> npt.NDArray[Any] | None:
    """The position of each row of a table of nodes: int32 or int64[row_count]; None: in the order of the ids.

    Raises FormatError if the dataset or the trace lacks what the order needs.
    """
    kind, _, file = order.partition(":")
    if kind == _STORED:
        return table.order
    if kind == "original":
        return None
    if kind == "trace":
        with RowTrace(file) as trace, tempfile.TemporaryDirectory(prefix="gids-bench-") as scratch:
            minibatches = trace.minibatches(table.name, table.row_count)
            if minibatches is None:
                raise FormatError(f"{file} has no rows of table {table.name!r}")
            return co_read_order(minibatches, table.row_count, Path(scratch), _ORDER_BYTES)
    ntype = str(table.type)
    degrees = store.out_degrees(ntype)
    if degrees is None:
        raise FormatError(f"{store.name} has no edges from {ntype!r} nodes, which order {kind!r} needs")
    graphs = [store.graph(r) for r in store.relations if kind == "community" and r[0] == r[2] == ntype]
    if not graphs:
        return degree_order(degrees)
    return community_order([(graph.indptr, graph.indices) for graph in graphs], degrees)
