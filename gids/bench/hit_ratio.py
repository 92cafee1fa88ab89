"""`gids bench hit-ratio`: the share of pages that a cache finds, compared with the best possible cache.

It samples minibatches as gids.NodeLoader does, and replays the numbers of their pages: it needs neither
features nor a disk. Orders of rows are tried without writing a dataset.

--advise finds the smallest cache and window that reach a hit ratio, which grows with the cache and, with
lookahead, with the window. A binary search finds the smallest cache with the longest window; then the
shortest window that is enough with this cache is found.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.bench import text
from gids.bench.arguments import (
    DEPENDENT,
    changed,
    check_known,
    check_sampler,
    open_table,
    parse_cache_size,
)
from gids.bench.bandwidth import random_reads
from gids.bench.plot import Curve, plot_curves
from gids.bench.report import Report, Session, Setting
from gids.bench.sampling import endless, make_sampler
from gids.bench.trace import LIVE_BATCHES, ORDERS, Optimum, positions_in, replay, sampled_pages
from gids.cache import POLICIES, page_heat
from gids.heat import choose_seeds
from gids.sizes import format_bytes
from gids.store import FeatureStore

SETTINGS = {
    "cache": "cache",
    "sampler": "sampler",
    "kappa": "kappa",
    "order": "order",
    "policy": "policy",
    "window": "window",
}
COLUMNS = [
    text.Column("hits %", "hit_ratio", text.percent, spread=True),
    text.Column("of MIN", "of_min", text.ratio),
    text.Column("regret %", "regret", text.percent),
    text.Column("pages read", "pages_read", text.count),
    text.Column("of an epoch", "epoch_pages_read", text.count),
    text.Column("bypassed", "bypasses", text.count),
    text.Column("evicted", "evictions", text.count),
    text.Column("in use %", "in_use_share", text.percent),
]
WINDOWED = ("window-pin", "lookahead")
MINIMUM = "MIN"
PLANNED = 2  # minibatches whose reads are in flight
LONGEST = LIVE_BATCHES - PLANNED  # window
_WARM_UP = 0.25  # share of the minibatches before counting starts
_SIZES = ("1%", "2%", "5%", "10%")
_WINDOWS = (0, 4, 8, 16, LONGEST)
_POLICIES = ["random", "lru", "static", "window-pin", "lookahead"]
Row = tuple[str, int | None]
"""A policy and its window."""

Source = dict[str, str | int | None]
"""The setting of a trace: "sampler", "kappa" (None if it takes none; "inf", as JSON knows no infinity) and
"order" of the rows."""

# Of --advise.
POLICY = "lookahead"
PRECISION = 0.01  # relative precision of the cache size
_PAGE_WORD_BYTES = 8


def measure(session: Session) -> None:
    """Fill the report. Settings: cache, lines, sampler, kappa, order, policy and window."""
    args, report = session.args, session.report
    for name in args.policies or ():
        check_known("--policies", name, POLICIES, "; MIN is always measured")
    policies = list(dict.fromkeys(args.policies or _POLICIES))
    wanted = parse_wanted(args.advise) if args.advise is not None else None
    if wanted and (unused := changed(args, dict.fromkeys(("policies", "windows", "cache", "plot")))):
        raise ValueError(f"--advise chooses the cache and the window for lookahead: remove {unused}")
    if not wanted and args.pages_per_s is not None:
        raise ValueError("--pages-per-s works only with --advise: remove it")
    windows = sorted(set(args.windows or _WINDOWS))
    sizes = [parse_cache_size(size) for size in args.cache or _SIZES]
    traces = _sources(session)
    if wanted and args.repeat > 1:
        report.note("--advise measures once: --repeat has no effect")
    if not wanted:
        report.note(
            "`of MIN` and `regret` compare with Belady's MIN with the same number of lines, over the same "
            "minibatches"
        )
    rows: list[Row] = [
        (policy, window)
        for policy in [MINIMUM, *policies]
        for window in (windows if policy in WINDOWED else [None])
    ]
    caches: list[tuple[str, int]] = []
    plan = list(itertools.product(range(1 if wanted else args.repeat), traces))
    for turn, source in plan:
        case = Case(source, session, seed=args.seed + turn)
        if wanted:
            return advise(case, source, wanted, session)
        if not caches:  # the same for every trace
            caches = case.cache_lines(sizes)
            if len(traces) > 1:
                report.note("each sampler and order has a different MIN: compare pages read, not hits")
            session.progress.total(len(plan) * len(caches) * len(rows))
        _measure_case(case, source, rows, caches, session)


def _sources(session: Session) -> list[Source]:
    """What to sample. Raises ValueError for options that exclude each other."""
    args, report = session.args, session.report
    samplers: list[tuple[str, int | str | None]] = []
    for name in dict.fromkeys(args.sampler):
        check_sampler(name)
        if name in DEPENDENT:
            samplers += [(name, "inf" if kappa == math.inf else kappa) for kappa in args.kappa or [1]]
        else:
            samplers.append((name, None))
            if args.kappa is not None:
                report.note(f"{name} takes no kappa: it is measured once")
    orders = list(dict.fromkeys(args.order or [ORDERS[0]]))
    for order in orders:
        check_known("--order", order, ORDERS)
    sampled: list[Source] = [
        {"sampler": name, "kappa": kappa, "order": order} for name, kappa in samplers for order in orders
    ]
    for option, value in (("--advise takes", args.advise), ("--plot draws", args.plot)):
        if value is not None and len(sampled) > 1:
            raise ValueError(f"{option} one trace: give one --sampler, one --kappa and one --order")
    return sampled


def _measure_case(
    case: Case, setting: Setting, rows: Sequence[Row], caches: Sequence[tuple[str, int]], session: Session
) -> None:
    """Measure each row in each (name, lines) of caches. setting: of the case."""
    report = session.report
    for (cache, lines), (policy, window) in itertools.product(caches, rows):
        figure = report.figure(cache=cache, lines=lines, **setting, policy=policy, window=window)
        figure.add(**(case.minimum(lines) if policy == MINIMUM else case.run(policy, lines, window or 0)))
        session.progress.add(1)
    report.figures.sort(key=lambda f: f.setting["lines"])  # type: ignore[arg-type, return-value]


def plot(report: Report, path: Path) -> None:
    """Draw hits by window as PNG: a panel per cache, a curve per policy. Raises OSError."""
    windows = sorted({int(w) for f in report.measured if (w := f.setting["window"]) is not None})
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for figure in report.measured:
        window, hits = figure.setting["window"], 100 * (figure.median("hit_ratio") or 0)
        lines = panels.setdefault(f"cache {figure.setting['cache']}", {})
        line = lines.setdefault(str(figure.setting["policy"]), {})
        line |= dict.fromkeys(windows or [0], hits) if window is None else {int(window): hits}
    curves: dict[str, list[Curve]] = {
        cache: [(policy, list(line), list(line.values())) for policy, line in lines.items()]
        for cache, lines in panels.items()
    }
    plot_curves(path, "Hit ratio by window", curves, ("window (minibatches)", "pages hit (%)"))


class Case:
    """The pages of a table that the minibatches of a source read, and MIN's hits.

    Attributes: table; batches: see trace.py; warm: number of minibatches before counting starts; pages: that
    the counted minibatches read; epoch_batches: minibatches per epoch. Describes the first case in the
    report's subject. Raises ValueError, KeyError for arguments, and FormatError for a dataset without
    topology.
    """

    def __init__(self, source: Source, session: Session, seed: int) -> None:
        args, report = session.args, session.report
        store, table = open_table(args)
        if not isinstance(table.type, str):
            raise ValueError(
                f"table {table.name!r} has rows of edges, and samplers read nodes: give another --table"
            )
        self.table, self._report, self._seed = table, report, seed
        positions = positions_in(str(source["order"]), store, table)
        methods = store.heat_methods(table.type)
        self._heat = (
            page_heat(store.heat(methods[0], table.type), table.rows_per_page, positions) if methods else None
        )
        kappa = float(source["kappa"] or 1)
        sampler = make_sampler(str(source["sampler"]), args.fanouts, args.batch_size, kappa=kappa)
        minibatches = endless(store, sampler, seeds=args.seeds, batch_size=args.batch_size, seed=seed)
        self.batches = sampled_pages(itertools.islice(minibatches, args.batches), table, positions)
        self.warm = int(len(self.batches) * _WARM_UP)
        counts = np.array([len(pages) for pages in self.batches])
        self.pages = int(counts[self.warm :].sum())
        if not self.pages:
            raise ValueError(f"these minibatches read no pages of table {table.name!r}")
        seeds = sum(map(len, choose_seeds(store, args.seeds).values()))
        self.epoch_batches = -(-seeds // int(args.batch_size))
        self._describe(store, counts, session)
        optimum, warm = Optimum(self.batches, table.page_count), self.warm
        self._best = functools.cache(lambda lines: int(optimum.hits(lines, warm=warm)[warm:].sum()))
        """Hits of MIN."""

    def _describe(self, store: FeatureStore, counts: npt.NDArray[np.int64], session: Session) -> None:
        """In the report. counts: pages of each minibatch."""
        args, report, table = session.args, session.report, self.table
        facts = {
            "dataset": str(store.path),
            "fanouts": list(args.fanouts),
            "batch_size": args.batch_size,
            "seeds": args.seeds,
            "table": table.name,
            "pages": table.page_count,
            "page_bytes": table.page_bytes,
            "rows_per_page": table.rows_per_page,
            "batches": len(self.batches),
            "warm_up_batches": self.warm,
            "pages_per_batch": float(counts.mean()),
        }
        for key, value in facts.items():
            report.subject.setdefault(key, value)
        share = counts[self.warm :].mean() / table.page_count
        if share > 0.5:
            report.note(
                f"a minibatch reads {share:.0%} of all pages on average, so policies "
                "differ little: try smaller minibatches (--batch-size, --fanouts)"
            )
        if self._heat is None:
            report.note(
                "the pages have no heat: static cannot choose pages, and lookahead uses only the window"
            )

    @property
    def epoch_pages(self) -> float:
        """Pages that the minibatches of an epoch ask for."""
        return self.epoch_batches * self.pages / (len(self.batches) - self.warm)

    def minimum(self, lines: int) -> dict[str, float]:
        """The metrics of Belady's MIN."""
        return self._metrics(self._best(lines), lines)

    def run(self, policy: str, lines: int, window: int) -> dict[str, float]:
        """The metrics of a policy."""
        counts = replay(
            self.batches,
            self.table.page_count,
            lines=lines,
            policy=policy,
            window=window,
            planned=PLANNED,
            heat=self._heat,
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
        return metrics | ({"in_use_share": counts.in_use / lines} if lines else {})

    def _metrics(self, hits: int, lines: int) -> dict[str, float]:
        """Hits compared with MIN; pages read, in the trace and per epoch."""
        best, missed = self._best(lines), self.pages - hits
        return {
            "hit_ratio": hits / self.pages,
            "of_min": hits / best if best else 1.0,
            "regret": (best - hits) / self.pages,
            "pages_read": float(missed),
            "pages_per_batch": self.pages / (len(self.batches) - self.warm),
            "epoch_pages_read": self.epoch_pages * missed / self.pages,
            "epoch_pages": self.epoch_pages,
        }

    def cache_lines(self, sizes: list[tuple[str, str, float]]) -> list[tuple[str, int]]:
        """(name, lines) of each cache size of arguments.parse_cache_size, without repeats."""
        page_count, page_bytes, report = self.table.page_count, self.table.page_bytes, self._report
        whole = {"%": page_count, "x": float(report.subject["pages_per_batch"])}
        names: dict[int, str] = {}
        for size_text, unit, number in sizes:
            lines = int(number // page_bytes if unit == "B" else number * whole[unit])
            if lines >= page_count:
                lines = page_count
                report.note(
                    f"a cache of {size_text} holds the whole table: pages are hits after their first read"
                )
            if not lines and number:
                ways = " (2% is a share of the pages, 5x is five minibatches)" if unit == "B" else ""
                smaller = f"a cache of {size_text} is smaller than a page of {page_bytes} B"
                report.note(f"{smaller}: nothing is hit{ways}")
            size = format_bytes(lines * page_bytes)
            names.setdefault(lines, f"{size_text} ({size})" if unit != "B" else size)
        return [(name, lines) for lines, name in sorted(names.items())]


def parse_wanted(value: str) -> tuple[float | None, float | None]:
    """Parse `60%`, `0.6` or `30s`: (hit ratio, None) or (None, seconds per epoch). Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%|s|)", value)
    if match:
        number = float(match[1])
        if match[2] == "s" and number > 0:
            return None, number
        ratio = number / 100 if match[2] == "%" else number
        if match[2] != "s" and 0 < ratio <= 1:
            return ratio, None
    raise ValueError(
        f"--advise {value} is not a goal: use a hit ratio such as 60%, or seconds per epoch such as 30s"
    )


def advise(case: Case, source: Source, wanted: tuple[float | None, float | None], session: Session) -> None:
    """Search, and add the answer to the report, with a figure for each cache that was tried.

    source: of the case. wanted: from parse_wanted.
    """
    report, speed = session.report, session.args.pages_per_s
    ratio, epoch_s = wanted
    if ratio is None:
        assert epoch_s is not None
        speed = speed or _measured_speed(case, session)
        ratio = max(0.0, 1 - epoch_s * speed / case.epoch_pages)
    if speed is not None:
        report.subject["pages_per_s"] = speed
    report.subject["wanted_hit_ratio"] = ratio

    def hit_ratio(lines: int, window: int) -> float:
        """Measured once, as a figure of the report."""
        size = format_bytes(lines * case.table.page_bytes)
        setting = {"cache": size, "lines": lines, **source, "policy": POLICY, "window": window}
        figure = report.figure(**setting)
        if not figure.values:
            figure.add(**case.run(POLICY, lines, window))
            session.progress.add(1)
        return figure.values["hit_ratio"][-1]

    try:
        smallest = _smallest(hit_ratio, case.table.page_count, ratio)
    finally:
        report.figures.sort(key=lambda f: (f.setting["lines"], f.setting["window"]))
    if smallest is None:
        best = hit_ratio(case.table.page_count, LONGEST)
        report.answers.append(
            f"no cache reaches {ratio:.1%}: with every page in the cache {best:.1%} are hits, the rest are "
            "first reads. A longer trace (--batches) has fewer first reads"
        )
        return
    report.answers += _answers(case, *smallest, hit_ratio(*smallest))
    if speed:
        pages = case.epoch_pages * (1 - hit_ratio(*smallest))
        report.answers.append(
            f"an epoch of {case.epoch_batches:,} minibatches then reads {pages:,.0f} pages: "
            f"{text.seconds(pages / speed)} at {speed:,.0f} pages/s"
        )


def _smallest(
    hit_ratio: Callable[[int, int], float], page_count: int, ratio: float
) -> tuple[int, int] | None:
    """(lines, window) of the smallest cache that reaches a hit ratio; None if none does."""
    if hit_ratio(page_count, LONGEST) < ratio:
        return None
    steps = 2 + int(math.log(page_count) / math.log1p(PRECISION))
    sizes = [0, *np.unique(np.geomspace(1, page_count, steps).astype(int)).tolist()]
    # the last size reaches it
    lines = sizes[bisect.bisect_left(sizes[:-1], ratio, key=lambda lines: hit_ratio(lines, LONGEST))]
    windows = [*range(0, LONGEST, 4), LONGEST]
    return lines, next(window for window in windows if hit_ratio(lines, window) >= ratio)


def _answers(case: Case, lines: int, window: int, ratio: float) -> list[str]:
    """The smallest cache, and what MIN hits with it."""
    if not lines:
        return ["no cache is needed: the goal is reached even if every page is read each time"]
    cache = lines * case.table.page_bytes
    share = lines / case.table.page_count
    line_metadata = lines * _core.LINE_METADATA_BYTES
    metadata = line_metadata + case.table.page_count * _PAGE_WORD_BYTES
    minimum = case.minimum(lines)["hit_ratio"]
    return [
        f"{ratio:.1%} of pages are hits with {lines:,} lines ({format_bytes(cache)}, {share:.1%} of the "
        f"table; metadata {format_bytes(metadata)}) and a window of {window}: "
        f"gids.open(..., window={window}, tuning=gids.Tuning(cache={cache + line_metadata}))",
        f"the best possible cache of this size (Belady's MIN) hits {minimum:.1%}",
    ]


def _measured_speed(case: Case, session: Session) -> float:
    raw = random_reads(case.table.shard_paths, page_bytes=case.table.page_bytes, seconds=3.0)
    if raw.note:
        session.report.note(raw.note)
    return float(raw.reads_per_s)
