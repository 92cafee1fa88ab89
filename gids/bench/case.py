"""A trace of one table, replayed in caches and compared with MIN. Called by hit_ratio.py and advise.py."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gids.bench.report import Report
from gids.bench.session import Session
from gids.trace.optimum import Optimum
from gids.trace.replay import Counts, replay
from gids.trace.trace_file import Trace, TracedTable

PINNED = "pinned"
"""Not a policy of gids: a share of the lines always holds the hottest pages, the rest evicts at random."""


@dataclass
class Case:
    """A trace of one table and its optimum."""

    trace: Trace
    table: int
    traced: TracedTable
    optimum: Optimum
    warm: int
    planned: int
    seed: int
    session: Session
    epoch_batches: int | None
    """Minibatches per epoch; None if neither a dataset nor --epoch-batches gives them."""
    _best_hits: dict[int, int] = field(default_factory=dict)

    @classmethod
    def prepare(
        cls,
        trace: Trace,
        table: int,
        args: argparse.Namespace,
        session: Session,
        report: Report,
        *,
        seed: int,
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
            report.subject.setdefault(key, value)  # of the first trace, where there are several
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
        """The metrics of Belady's MIN with this number of lines."""
        hits = self._best(lines)
        return {"hit_ratio": hits / self.pages, "of_min": 1.0, "regret": 0.0, **self._pages(hits)}

    def run(self, policy: str, lines: int, window: int, *, pin: float = 0.0) -> dict[str, float]:
        """The metrics of a cache. pin: the share of lines that PINNED pins.

        PINNED has no share of MIN: its hottest pages are loaded without being counted as read.
        """
        pinned, rest, in_use = None, lines, 0
        if policy == PINNED:
            assert self.traced.heat is not None
            pinned = hottest(self.traced.heat, int(lines * pin))
            in_use = int(pinned.sum())
            policy, rest = "random", lines - int(lines * pin)
        found = self._replay(policy, rest, window, pinned)
        best = self._best(lines)
        hits = int(found.hits.sum())
        if hits > best and pinned is None:
            raise RuntimeError(f"{policy} hits {hits} pages, more than MIN's {best}: please report this bug")
        beside = {"of_min": hits / best if best else 1.0, "regret": (best - hits) / self.pages}
        return {
            "hit_ratio": found.hit_ratio,
            **(beside if pinned is None else {}),
            **self._pages(hits),
            "loads": int(found.loads.sum()),
            "bypasses": int(found.bypasses.sum()),
            "evictions": found.evictions,
            **(
                {} if found.in_use is None or not lines else {"in_use_share": (in_use + found.in_use) / lines}
            ),
        }

    def _pages(self, hits: int) -> dict[str, float]:
        """Pages read, in the trace and per epoch."""
        counted = self.trace.batch_count - self.warm
        found = {"pages_read": float(self.pages - hits), "pages_per_batch": self.pages / counted}
        if self.epoch_batches is not None:
            found["epoch_pages_read"] = (self.pages - hits) / counted * self.epoch_batches
            found["epoch_pages"] = self.pages / counted * self.epoch_batches
        return found

    def _best(self, lines: int) -> int:
        """Hits of MIN."""
        if lines not in self._best_hits:
            hits = self.optimum.hits(lines, warm=self.warm)
            self._best_hits[lines] = int(hits[self.warm :].sum())
        return self._best_hits[lines]

    def _replay(
        self, policy: str, lines: int, window: int, pinned: npt.NDArray[np.bool_] | None = None
    ) -> Counts:
        return replay(
            self.trace,
            self.traced.page_count,
            table=self.table,
            lines=lines,
            policy=policy,
            window=window,
            planned=self.planned,
            heat=self.traced.heat,
            pinned=pinned,
            seed=self.seed,
            warm=self.warm,
            check=self.session.check,
        )


def hottest(heat: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.bool_]:
    """bool[page_count]: the `count` hottest pages."""
    chosen = np.zeros(len(heat), bool)
    count = min(count, len(heat))
    if count:
        chosen[np.argpartition(heat, len(heat) - count)[len(heat) - count :]] = True
    return chosen


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
