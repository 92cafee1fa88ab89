"""A trace of one table, replayed in caches and compared with MIN: what `gids bench hit-ratio` measures.

Called by hit_ratio.py and advise.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gids.bench.report import Report
from gids.bench.session import Session
from gids.bench.trace_source import Source, open_trace
from gids.heat import choose_seeds
from gids.sizes import format_bytes
from gids.store import FeatureStore
from gids.trace.optimum import Optimum
from gids.trace.replay import replay
from gids.trace.trace_file import Trace


class Case:
    """A trace of one table and its optimum.

    warm: number of minibatches before counting starts. planned: minibatches whose reads are in flight.
    epoch_batches: minibatches per epoch; None if unknown. Describes the first trace in the report's subject.
    """

    def __init__(
        self,
        trace: Trace,
        table: int,
        args: argparse.Namespace,
        session: Session,
        report: Report,
        *,
        seed: int,
    ) -> None:
        self.trace, self.table, self.traced = trace, table, trace.tables[table]
        self.planned, self.epoch_batches = int(args.planned), _epoch_batches(args)
        self._session, self._seed = session, seed
        self._best_hits: dict[int, int] = {}
        traced, counts = self.traced, trace.page_counts(table)
        self.warm = min(int(trace.batch_count * args.warm_up), max(0, trace.batch_count - 1))
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
        self._optimum = Optimum(trace, traced.page_count, table=table, check=session.check)

    def minimum(self, lines: int) -> dict[str, float]:
        """The metrics of Belady's MIN."""
        return self._metrics(self._best(lines), lines)

    def run(self, policy: str, lines: int, window: int) -> dict[str, float]:
        """The metrics of a policy."""
        counts = replay(
            self.trace,
            self.traced.page_count,
            table=self.table,
            lines=lines,
            policy=policy,
            window=window,
            planned=self.planned,
            heat=self.traced.heat,
            seed=self._seed,
            warm=self.warm,
            check=self._session.check,
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

    def _best(self, lines: int) -> int:
        """Hits of MIN."""
        if lines not in self._best_hits:
            hits = self._optimum.hits(lines, warm=self.warm)
            self._best_hits[lines] = int(hits[self.warm :].sum())
        return self._best_hits[lines]

    def cache_lines(self, sizes: list[tuple[str, str, float]], report: Report) -> list[tuple[str, int]]:
        """(name, lines) of each cache size of arguments.parse_cache_size, without repeats."""
        page_count, page_bytes = self.traced.page_count, self.traced.page_bytes
        whole = {"%": page_count, "x": float(report.subject["pages_per_batch"])}
        names: dict[int, str] = {}
        for text, unit, number in sizes:
            lines = int(number // page_bytes if unit == "B" else number * whole[unit])
            if lines >= page_count:
                lines = page_count
                report.note(
                    f"a cache of {text} holds the whole table: every page is a hit after its first read"
                )
            if not lines and number:
                ways = " (2% is a share of the pages, 5x is five minibatches)" if unit == "B" else ""
                report.note(
                    f"a cache of {text} is smaller than a page of {page_bytes} B: nothing is hit{ways}"
                )
            size = format_bytes(lines * page_bytes)
            names.setdefault(lines, f"{text} ({size})" if unit != "B" else size)
        return [(name, lines) for lines, name in sorted(names.items())]


@contextmanager
def open_case(
    source: Source,
    args: argparse.Namespace,
    session: Session,
    report: Report,
    *,
    seed: int,
    seconds: float,
    replays: int,
) -> Iterator[Case]:
    """Open the trace of a source, or sample it. seconds: for sampling and this number of replays together."""
    with open_trace(source, args, session, report, seed=seed, seconds=seconds, replays=replays) as (
        trace,
        table,
    ):
        yield Case(trace, table, args, session, report, seed=seed)


def _epoch_batches(args: argparse.Namespace) -> int | None:
    """--epoch-batches, or the number of seeds of the dataset / batch size."""
    if args.epoch_batches is not None:
        return int(args.epoch_batches)
    if args.replay is not None or args.path is None:
        return None
    seeds = choose_seeds(FeatureStore(Path(args.path), allow_dirs=args.allow_dir), args.seeds)
    return -(-sum(map(len, seeds.values())) // int(args.batch_size))
