"""The traces of `gids bench hit-ratio`: a recorded one, or a sampled one per sampler, kappa and order.

Called by hit_ratio.py. Knows nothing of caches and policies.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gids.bench import arguments
from gids.bench.minibatches import DEPENDENT, check_sampler, endless, input_nodes, make_sampler
from gids.bench.report import Report, check_writable
from gids.bench.row_orders import STORED, check_row_order, positions_in
from gids.bench.session import Session
from gids.cache import page_heat
from gids.store import FeatureStore, Table
from gids.trace.recording import TouchedPages
from gids.trace.trace_file import Trace, TracedTable, TraceWriter

_LEAST_BATCHES = 64  # enough to fill windows


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
        unused = arguments.given(args, args.sampling_defaults)
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
    found = []
    for name in dict.fromkeys(args.sampler):
        check_sampler(name)
        if name in DEPENDENT:
            found += [Source(name, kappa) for kappa in args.kappa or [1]]
        else:
            found.append(Source(name, None))
            if args.kappa is not None:
                report.note(f"{name} takes no kappa: it is measured once")
    orders = [check_row_order(name) for name in dict.fromkeys(args.order or ["stored"])]
    if args.rows:
        if args.order is not None:
            raise ValueError("--rows traces rows by id, so their order has no effect: remove --order")
        report.note("--rows: each row counts as a page")
    found = [replace(source, order=order) for source in found for order in orders]
    for option, value in (("--record writes", args.record), ("--advise takes", args.advise)):
        if value is not None and len(found) > 1:
            raise ValueError(f"{option} one trace: give one --sampler, one --kappa and one --order")
    report.subject.update(
        orders=orders,
        samplers=list(dict.fromkeys(source.sampler for source in found)),
        kappas=list(dict.fromkeys(source.setting["kappa"] for source in found if source.kappa is not None)),
    )
    return found


@contextlib.contextmanager
def open_trace(
    source: Source,
    args: argparse.Namespace,
    session: Session,
    report: Report,
    seed: int,
    limits: tuple[float, float],
) -> Iterator[tuple[Trace, int]]:
    """Open a trace, or sample it. Yields the trace and the number of its table.

    limits: the most seconds and pages to sample.
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

    With --rows, the trace has ids of rows instead of pages. Raises ValueError, KeyError for arguments and
    FormatError for a dataset without topology.
    """
    if not isinstance(table.type, str):
        raise ValueError(
            f"table {table.name!r} has rows of edges, and samplers read nodes: give another --table"
        )
    assert source.sampler is not None
    kappa = 1 if source.kappa is None else source.kappa
    sampler = make_sampler(source.sampler, args.fanouts, args.batch_size, kappa=kappa)
    order = None if args.rows else positions_in(source.order or STORED, store, table)
    per_page = 1 if args.rows else table.rows_per_page
    methods = store.heat_methods(table.type)
    traced = TracedTable(
        name=table.name,
        page_count=table.row_count if args.rows else table.page_count,
        page_bytes=table.row_bytes if args.rows else table.page_bytes,
        rows_per_page=per_page,
        lines=None,
        heat=page_heat(store.heat(methods[0], table.type), per_page, order) if methods else None,
        rows=args.rows,
    )
    minibatches = endless(store, sampler, seeds=args.seeds, batch_size=args.batch_size, seed=seed)
    touched = TouchedPages(traced.page_count, per_page, order)
    most_seconds, most_pages = limits
    stop_at = session.left_s() - most_seconds
    count = total = 0
    writer = TraceWriter(path, [traced])
    try:
        for minibatch in minibatches:
            enough = session.left_s() < stop_at or (total > most_pages and count >= _LEAST_BATCHES)
            if count == args.batches or (count and enough):
                break
            count += 1
            pages = touched.of(input_nodes(minibatch, table.type).numpy())
            writer.enter([pages])
            total += len(pages)
        writer.finish()
    finally:
        writer.abandon()
    return count
