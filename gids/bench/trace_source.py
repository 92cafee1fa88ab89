"""Traces of `gids bench hit-ratio`: a recorded one, or a sampled one per sampler, kappa and order of rows.

Orders are tried without writing a dataset. Called by case.py and hit_ratio.py. Knows nothing of caches and
policies.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from gids.bench import arguments
from gids.bench.minibatches import DEPENDENT, check_sampler, endless, input_nodes, make_sampler
from gids.bench.report import Report, check_writable
from gids.bench.session import Session
from gids.cache import page_heat
from gids.errors import FormatError
from gids.store import FeatureStore, Table
from gids.trace.recording import TouchedPages
from gids.trace.trace_file import RowTrace, Trace, TracedTable, TraceWriter
from gids.write.row_order import co_read_order, community_order, degree_order

_STORED = "stored"  # the order in the dataset
_ORDERS = (_STORED, "original", "degree", "community", "trace")
_ORDER_BYTES = 256 << 20  # of memory to find the order of a trace
_LEAST_BATCHES = 64  # enough to fill windows
_REPLAY_S_PER_PAGE = 60e-9  # about what a replay takes, to choose how long a trace fits into --seconds


@dataclass(frozen=True)
class Source:
    """A sampler with its kappa (None if it takes none) and an order of rows. A recorded trace has None."""

    sampler: str | None
    kappa: float | None
    order: str | None = None

    @property
    def setting(self) -> dict[str, str | int | None]:
        """As figures have it: JSON knows no infinity."""
        kappa = None if self.kappa is None else "inf" if self.kappa == math.inf else int(self.kappa)
        return {"sampler": self.sampler, "kappa": kappa, "order": self.order}


def sources(args: argparse.Namespace, report: Report) -> list[Source]:
    """The traces to measure. Raises ValueError for options that exclude each other."""
    if args.replay is not None:
        unused = arguments.changed(args, args.sampling_defaults)
        if unused:
            raise ValueError(
                f"--replay reads a recorded trace and samples nothing: remove {', '.join(unused)}"
            )
        if args.path is not None and args.advise is None:
            raise ValueError(f"--replay needs a dataset only for --advise in seconds: remove {args.path}")
        return [Source(None, None)]
    if args.path is None:
        raise ValueError("give a dataset to sample, or a recorded trace with --replay")
    if args.record is not None:
        check_writable(args.record)
    sampled = []
    for name in dict.fromkeys(args.sampler):
        check_sampler(name)
        if name in DEPENDENT:
            sampled += [Source(name, kappa) for kappa in args.kappa or [1]]
        else:
            sampled.append(Source(name, None))
            if args.kappa is not None:
                report.note(f"{name} takes no kappa: it is measured once")
    orders = list(dict.fromkeys(args.order or [_STORED]))
    for order in orders:
        _check_order(order)
    if args.rows:
        if args.order is not None:
            raise ValueError("--rows traces rows by id, so their order has no effect: remove --order")
        report.note("--rows: each row counts as a page")
    sampled = [replace(source, order=order) for source in sampled for order in orders]
    for option, value in (("--record writes", args.record), ("--advise takes", args.advise)):
        if value is not None and len(sampled) > 1:
            raise ValueError(f"{option} one trace: give one --sampler, one --kappa and one --order")
    report.subject.update(
        orders=orders,
        samplers=list(dict.fromkeys(source.sampler for source in sampled)),
        kappas=list(dict.fromkeys(s.setting["kappa"] for s in sampled if s.kappa is not None)),
    )
    return sampled


@contextmanager
def open_trace(
    source: Source,
    args: argparse.Namespace,
    session: Session,
    report: Report,
    *,
    seed: int,
    seconds: float,
    replays: int,
) -> Iterator[tuple[Trace, int]]:
    """Open a trace, or sample it. Yields the trace and the number of its table.

    seconds: what a sampled trace and this number of replays may take together.
    """
    if source.sampler is None:
        with Trace(args.replay) as trace:
            report.subject.update(trace=str(args.replay))
            yield trace, trace.table_number(args.table)
        return
    store, table = arguments.open_table(args)
    report.subject.update(
        dataset=str(store.path), fanouts=list(args.fanouts), batch_size=args.batch_size, seeds=args.seeds
    )
    with tempfile.TemporaryDirectory(prefix="gids-bench-") as directory:
        path = args.record or Path(directory) / "sampled.trace"
        # Half of the time is left for the replays.
        limits = seconds / 4, seconds / 2 / (replays * _REPLAY_S_PER_PAGE)
        written = _sample(source, store, table, path, args, session, seed, limits)
        if written < args.batches:
            report.cut_short(f"sampled {written} of {args.batches} minibatches, because of --seconds")
        with Trace(path) as trace:
            yield trace, 0


def _sample(
    source: Source,
    store: FeatureStore,
    table: Table,
    path: Path,
    args: argparse.Namespace,
    session: Session,
    seed: int,
    limits: tuple[float, float],
) -> int:
    """Write a trace of the minibatches that gids.NodeLoader samples. Returns their number.

    limits: the most seconds and pages. With --rows, the trace has ids of rows instead of pages. Raises
    ValueError, KeyError for arguments and FormatError for a dataset without topology.
    """
    if not isinstance(table.type, str):
        raise ValueError(
            f"table {table.name!r} has rows of edges, and samplers read nodes: give another --table"
        )
    assert source.sampler is not None
    kappa = 1 if source.kappa is None else source.kappa
    sampler = make_sampler(source.sampler, args.fanouts, args.batch_size, kappa=kappa)
    positions = None if args.rows else _positions(source.order or _STORED, store, table)
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
    most_seconds, most_pages = limits
    stop_at = session.left_s() - most_seconds
    count = total = 0
    writer = TraceWriter(path, [traced])
    try:
        for minibatch in endless(store, sampler, seeds=args.seeds, batch_size=args.batch_size, seed=seed):
            enough = session.left_s() < stop_at or (total > most_pages and count >= _LEAST_BATCHES)
            if count == args.batches or (count and enough):
                break
            pages = touched.of(input_nodes(minibatch, table.type).numpy())
            writer.enter([pages])
            count, total = count + 1, total + len(pages)
        writer.finish()
    finally:
        writer.abandon()
    return count


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
