"""`gids bench hit-ratio`: the share of pages that a cache finds, compared with the best possible cache.

Replays page numbers only: it needs neither features nor a disk. --advise finds the smallest cache and window
that reach a hit ratio, which grows with the cache and, with lookahead, with the window. A binary search finds
the smallest cache with the longest window; then the shortest window that is enough with this cache is found.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gids
from gids import _core
from gids.bench import text
from gids.bench.arguments import changed, check_known, open_table, parse_cache_size
from gids.bench.bandwidth import random_reads
from gids.bench.case import LONGEST, Case, Source, open_case, sources
from gids.bench.plot import Curve, plot_curves
from gids.bench.report import Report, Session, Setting
from gids.cache import POLICIES
from gids.errors import FormatError
from gids.sizes import format_bytes
from gids.trace.replay import replay_as_recorded

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
_SIZES = ("1%", "2%", "5%", "10%")
_WINDOWS = (0, 4, 8, 16, LONGEST)
_POLICIES = ["random", "lru", "static", "window-pin", "lookahead"]
Row = tuple[str, int | None]
"""A policy and its window."""

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
    traces = sources(session)
    if wanted and args.repeat > 1:
        report.note("--advise measures once: --repeat has no effect")
    elif args.replay is not None and args.repeat > 1:
        report.note("each repeat replays the same trace; only random choices differ")
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
        with open_case(source, session, seed=args.seed + turn) as case:
            if wanted:
                advise(case, source, wanted, session)
                return
            if case.trace.policy is not None and turn == 0:
                _check_recorded(case, session)
            if not caches:  # the same for every trace
                caches = case.cache_lines(sizes)
                if len(traces) > 1:
                    report.note("each sampler and order has a different MIN: compare pages read, not hits")
                session.progress.total(len(plan) * len(caches) * len(rows))
            _measure_case(case, source, rows, caches, session)


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


def _check_recorded(case: Case, session: Session) -> None:
    """Replay a recorded run, and compare with the run's counters."""
    trace, traced, report = case.trace, case.traced, session.report
    counts = replay_as_recorded(trace, case.table)
    recorded: dict[str, Any] = dict(trace.counters.get(traced.name, {}))
    replayed = {name: int(getattr(counts, name).sum()) for name in ("hits", "loads", "bypasses")}
    replayed["evictions"] = counts.evictions
    report.answers.append(
        f"the recorded run ({trace.policy}, window {trace.window_batches}, {traced.lines:,} lines, "
        f"{format_bytes((traced.lines or 0) * traced.page_bytes)}) hit {replayed['hits']:,} of "
        f"{int(counts.pages.sum()):,} pages, {counts.hit_ratio:.2%}, warm-up included"
    )
    hit = f"it hit {recorded.get('hits', 0):,} pages"
    if recorded.get("failures"):
        report.note(
            f"in the recorded run {recorded['failures']} reads failed, or were cancelled because a stream "
            "was closed early: after that its counters may differ from the replay's"
        )
    elif trace.device != "cpu":
        report.note(f"the run was on {trace.device}, where the search for victims is bounded: {hit}")
    elif any(recorded.get(key, value) != value for key, value in replayed.items()):
        if trace.gids_version == gids.__version__:
            raise FormatError(
                f"{trace.path} is damaged: its replay counts {replayed}, the recorded run counted {recorded}"
            )
        report.note(f"the run was recorded by gids {trace.gids_version}, which chooses other victims: {hit}")


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
        ratio = max(0.0, 1 - epoch_s * speed / _epoch_pages(case))
    if speed is not None:
        report.subject["pages_per_s"] = speed
    report.subject["wanted_hit_ratio"] = ratio

    def hit_ratio(lines: int, window: int) -> float:
        """Measured once, as a figure of the report."""
        size = format_bytes(lines * case.traced.page_bytes)
        setting = {"cache": size, "lines": lines, **source, "policy": POLICY, "window": window}
        figure = report.figure(**setting)
        if not figure.values:
            figure.add(**case.run(POLICY, lines, window))
            session.progress.add(1)
        return figure.values["hit_ratio"][-1]

    try:
        smallest = _smallest(hit_ratio, case.traced.page_count, ratio)
    finally:
        report.figures.sort(key=lambda f: (f.setting["lines"], f.setting["window"]))
    if smallest is None:
        best = hit_ratio(case.traced.page_count, LONGEST)
        report.answers.append(
            f"no cache reaches {ratio:.1%}: with every page in the cache {best:.1%} are hits, the rest are "
            "first reads. A longer trace (--batches) has fewer first reads"
        )
        return
    report.answers += _answers(case, *smallest, hit_ratio(*smallest))
    if speed:
        pages = _epoch_pages(case) * (1 - hit_ratio(*smallest))
        report.answers.append(
            f"an epoch of {_epoch_batches(case):,} minibatches then reads {pages:,.0f} pages: "
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
    cache = lines * case.traced.page_bytes
    share = lines / case.traced.page_count
    line_metadata = lines * _core.LINE_METADATA_BYTES
    metadata = line_metadata + case.traced.page_count * _PAGE_WORD_BYTES
    minimum = case.minimum(lines)["hit_ratio"]
    return [
        f"{ratio:.1%} of pages are hits with {lines:,} lines ({format_bytes(cache)}, {share:.1%} of the "
        f"table; metadata {format_bytes(metadata)}) and a window of {window}: "
        f"gids.open(..., window={window}, tuning=gids.Tuning(cache={cache + line_metadata}))",
        f"the best possible cache of this size (Belady's MIN) hits {minimum:.1%}",
    ]


def _measured_speed(case: Case, session: Session) -> float:
    args = session.args
    if args.path is None:
        raise ValueError("--advise in seconds needs the disk's speed: give the dataset too, or --pages-per-s")
    _, table = open_table(args)
    if table.page_count != case.traced.page_count:
        raise ValueError(
            f"{args.path} has {table.page_count:,} pages of {table.name!r}, the trace has "
            f"{case.traced.page_count:,}: the trace is from another dataset"
        )
    raw = random_reads(table.shard_paths, page_bytes=case.traced.page_bytes, seconds=3.0)
    if raw.note:
        session.report.note(raw.note)
    return float(raw.reads_per_s)


def _epoch_batches(case: Case) -> int:
    """Minibatches per epoch; if unknown, the number in the trace."""
    return case.epoch_batches or case.trace.batch_count


def _epoch_pages(case: Case) -> float:
    """Pages that the minibatches of an epoch ask for."""
    return _epoch_batches(case) * case.pages / (case.trace.batch_count - case.warm)
