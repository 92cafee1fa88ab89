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
from gids.bench.report import Report, check_writable
from gids.bench.session import Session
from gids.trace.trace_file import Trace


@dataclass(frozen=True)
class Source:
    """sampler, order: None for a recorded trace. kappa: None if the sampler takes none."""

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
    from gids.bench.minibatches import DEPENDENT, check_sampler
    from gids.bench.row_orders import check_row_order

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
    for option, given in (("--record writes", args.record), ("--advise takes", args.advise)):
        if given is not None and len(found) > 1:
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
    from gids.bench.minibatches import make_sampler
    from gids.bench.row_orders import STORED, positions_in
    from gids.bench.sampled import sample_trace

    store, table = arguments.open_table(args)
    report.subject.update(
        dataset=str(store.path), fanouts=list(args.fanouts), batch_size=args.batch_size, seeds=args.seeds
    )
    kappa = 1 if source.kappa is None else source.kappa
    with tempfile.TemporaryDirectory(prefix="gids-bench-") as directory:
        path = args.record or Path(directory) / "sampled.trace"
        written = sample_trace(
            store,
            table,
            path,
            sampler=make_sampler(source.sampler, args.fanouts, args.batch_size, kappa=kappa),
            batch_size=args.batch_size,
            batches=args.batches,
            seeds=args.seeds,
            heat=args.heat,
            order=None if args.rows else positions_in(source.order or STORED, store, table),
            rows=args.rows,
            seed=seed,
            most_seconds=limits[0],
            most_pages=limits[1],
            session=session,
        )
        if written < args.batches:
            report.cut_short(f"sampled {written} of {args.batches} minibatches, because of --seconds")
        with Trace(path) as trace:
            yield trace, 0
