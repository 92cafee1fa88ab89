"""`gids bench hit-ratio`: the share of pages that a cache finds, compared with the best possible cache.

Replays page numbers only: it needs neither features nor a disk. --advise finds the cache for a hit ratio.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gids
from gids.bench import text
from gids.bench.advise import advise, parse_wanted
from gids.bench.arguments import changed, check_known, parse_cache_size
from gids.bench.case import LONGEST, Case, open_case, sources
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
