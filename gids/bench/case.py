"""A trace of one table, replayed in caches and compared with MIN. Called by hit_ratio.py and advise.py."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from gids.bench.report import Report
from gids.bench.session import Session
from gids.sizes import format_bytes
from gids.trace.optimum import Optimum
from gids.trace.replay import replay
from gids.trace.trace_file import Trace, TracedTable


@dataclass
class Case:
    """A trace of one table and its optimum.

    warm: number of minibatches before counting starts. epoch_batches: minibatches per epoch; None if unknown.
    """

    trace: Trace
    table: int
    traced: TracedTable
    optimum: Optimum
    warm: int
    planned: int
    seed: int
    session: Session
    epoch_batches: int | None
    _best_hits: dict[int, int] = field(default_factory=dict)

    @classmethod
    def prepare(
        cls, trace: Trace, table: int, args: argparse.Namespace, session: Session, report: Report, seed: int
    ) -> Case:
        traced = trace.tables[table]
        warm = min(int(trace.batch_count * args.warm_up), max(0, trace.batch_count - 1))
        counts = trace.page_counts(table)
        facts = {
            "table": traced.name,
            "pages": traced.page_count,
            "page_bytes": traced.page_bytes,
            "rows_per_page": traced.rows_per_page,
            "batches": trace.batch_count,
            "warm_up_batches": warm,
            "pages_per_batch": float(counts.mean()) if len(counts) else 0.0,
        }
        for key, value in facts.items():
            report.subject.setdefault(key, value)  # of the first trace
        if not int(counts[warm:].sum()):
            raise ValueError(f"the trace reads no pages of table {traced.name!r}")
        mean = counts[warm:].mean()
        if mean > traced.page_count / 2:
            report.note(
                f"a minibatch reads {mean / traced.page_count:.0%} of all pages on average, so policies "
                "differ little: try smaller minibatches (--batch-size, --fanouts)"
            )
        if traced.heat is None:
            report.note(
                "the pages have no heat: static cannot choose pages, and lookahead uses only the window"
            )
        optimum = Optimum(trace, traced.page_count, table=table, check=session.check)
        return cls(trace, table, traced, optimum, warm, args.planned, seed, session, _epoch_batches(args))

    @property
    def pages(self) -> int:
        """Pages that the counted minibatches read."""
        return int(self.trace.page_counts(self.table)[self.warm :].sum())

    def minimum(self, lines: int) -> dict[str, float]:
        """The metrics of Belady's MIN."""
        return self._metrics(self._best(lines), lines)

    def run(self, policy: str, lines: int, window: int) -> dict[str, float]:
        """The metrics of a policy."""
        found = replay(
            self.trace,
            self.traced.page_count,
            table=self.table,
            lines=lines,
            policy=policy,
            window=window,
            planned=self.planned,
            heat=self.traced.heat,
            seed=self.seed,
            warm=self.warm,
            check=self.session.check,
        )
        hits, best = int(found.hits.sum()), self._best(lines)
        if hits > best:
            raise RuntimeError(f"{policy} hits {hits} pages, more than MIN's {best}: please report this bug")
        metrics = {
            **self._metrics(hits, lines),
            "loads": int(found.loads.sum()),
            "bypasses": int(found.bypasses.sum()),
            "evictions": found.evictions,
        }
        if found.in_use is not None and lines:
            metrics["in_use_share"] = found.in_use / lines
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
            hits = self.optimum.hits(lines, warm=self.warm)
            self._best_hits[lines] = int(hits[self.warm :].sum())
        return self._best_hits[lines]

    def cache_lines(self, sizes: list[tuple[str, str, float]], report: Report) -> list[tuple[str, int]]:
        """(name, lines) of each cache size of arguments.parse_cache_size, without repeats."""
        page_count, page_bytes = self.traced.page_count, self.traced.page_bytes
        whole = {"%": page_count, "x": float(report.subject["pages_per_batch"])}
        found: dict[int, str] = {}
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
            found.setdefault(lines, f"{text} ({size})" if unit != "B" else size)
        return [(name, lines) for lines, name in sorted(found.items())]


def _epoch_batches(args: argparse.Namespace) -> int | None:
    """--epoch-batches, or the number of seeds of the dataset / batch size."""
    if args.epoch_batches is not None:
        return int(args.epoch_batches)
    if args.replay is not None or args.path is None:
        return None
    from gids.heat import choose_seeds
    from gids.store import FeatureStore

    seeds = choose_seeds(FeatureStore(Path(args.path), allow_dirs=args.allow_dir), args.seeds)
    return -(-sum(map(len, seeds.values())) // int(args.batch_size))
