"""`gids bench hit-ratio`: the share of pages that a cache finds, compared with the best possible cache.

Replays page numbers only: it needs neither features nor a disk. --advise finds the cache for a hit ratio.
"""

from __future__ import annotations

import argparse
import itertools
import math
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.bench import arguments, text
from gids.bench.report import Report
from gids.bench.session import Session
from gids.errors import FormatError
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.bench.case import Case
    from gids.bench.trace_source import Source
    from gids.trace.replay import Counts
    from gids.trace.trace_file import Trace

HELP = "the share of pages that a cache finds, by policy, window and size, compared with Belady's MIN"
EPILOG = """\
SIZE is a cache size: a share of the table's pages (2%), bytes (4GB), or a number of average minibatches
(5x). WANTED is a hit ratio (60%), or the time that an epoch may take to read the missing pages (30s). The
speed of the disk is measured on the dataset, or given by --pages-per-s.

To record your own training:

    with gids.trace.record(loader, "run.trace"):  # gids.NodeLoader, gids.dgl.DataLoader, gids.FeatureLoader
        train(loader)
    gids bench hit-ratio --replay run.trace
"""
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
TYPICAL_WINDOWS = {"window-pin": 8, "lookahead": 16}
"""The defaults of the paper and of FeatureLoader."""
WINDOWED = tuple(TYPICAL_WINDOWS)
_REPLAY_S_PER_PAGE = 60e-9  # about what a replay takes, to choose how long a trace fits into --seconds
MINIMUM = "MIN"
_SIZES = ("1%", "2%", "5%", "10%")
_WINDOWS = (0, 4, 8, 16)
_PIN = 0.4
_OF_SAMPLING = (*arguments.OF_MINIBATCHES, "kappa", "batches", "heat", "order", "record", "rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="DATASET", type=Path, nargs="?", help="dataset (not needed with --replay)")
    arguments.add_dataset(parser)
    arguments.add_sampling(parser, several_samplers=True)
    add(
        "--kappa",
        type=arguments.kappas,
        metavar="N,…",
        help="number of minibatches over which draws stay correlated, 1 (independent) or more, or inf; for "
        "neighbor and labor (default: 1)",
    )
    add(
        "--batches",
        type=arguments.positive,
        default=200,
        metavar="N",
        help="minibatches to sample (default: 200)",
    )
    add(
        "--policies",
        type=arguments.words,
        metavar="NAME,…",
        help="cache policies (default: random,lru,static,window-pin,lookahead)",
    )
    add(
        "--windows",
        type=arguments.numbers(0),
        metavar="N,…",
        help="minibatches sampled ahead, 0 to 24 minus --planned (default: 0,4,8,16,22)",
    )
    add(
        "--cache",
        type=arguments.words,
        metavar="SIZE,…",
        help="cache sizes (default: 1%%,2%%,5%%,10%%)",
    )
    add(
        "--planned",
        type=arguments.positive,
        default=2,
        metavar="N",
        help="minibatches whose reads are in flight (default: 2)",
    )
    add(
        "--pin",
        type=arguments.share,
        metavar="SHARE",
        help="share of the cache that holds the hottest pages in the row `pinned` (default: 40%%)",
    )
    add(
        "--warm-up",
        type=arguments.share,
        default=0.25,
        metavar="SHARE",
        help="share of the minibatches to run before counting (default: 25%%)",
    )
    add(
        "--heat",
        default="auto",
        metavar="METHOD",
        help="heat of the pages: auto (the best one stored), none, or the name of a method (default: auto)",
    )
    add(
        "--order",
        type=arguments.words,
        metavar="ORDER,…",
        help="orders of rows to try, without changing the dataset: stored, or original, degree, community, "
        "trace:FILE as in `gids convert --order` (default: stored)",
    )
    add("--record", type=Path, metavar="FILE", help="write the sampled trace to FILE")
    add("--rows", action="store_true", help="trace rows instead of pages, for --order trace:FILE")
    add("--replay", type=Path, metavar="FILE", help="replay a recorded trace instead of sampling")
    add("--advise", metavar="WANTED", help="find the smallest cache and window that reach WANTED")
    add(
        "--pages-per-s",
        type=_rate,
        metavar="N",
        help="disk speed for --advise (default: measured)",
    )
    add(
        "--epoch-batches",
        type=arguments.positive,
        metavar="N",
        help="minibatches per epoch (default: number of seeds / batch size)",
    )
    arguments.keep_defaults(parser, _OF_SAMPLING)


def measure(args: argparse.Namespace, session: Session, report: Report) -> None:
    """Fill the report. Settings: cache, lines, sampler, kappa, order, policy and window."""
    from gids.bench.advise import advise, parse_wanted
    from gids.bench.cache_sizes import cache_lines, parse_cache_size
    from gids.bench.case import PINNED, Case
    from gids.bench.trace_source import open_trace, sources
    from gids.trace.replay import replay_as_recorded

    policies = _policies(args.policies)
    wanted = parse_wanted(args.advise) if args.advise is not None else None
    _check_together(args)
    windows = [] if wanted else _windows(args.windows, args.planned, policies, report)
    sizes = [parse_cache_size(place) for place in args.cache or _SIZES]
    traces = sources(args, report)
    pin = _PIN if args.pin is None else args.pin
    if wanted and session.repeat > 1:
        report.note("--advise measures once: --repeat has no effect")
    elif args.replay is not None and session.repeat > 1:
        report.note("each repeat replays the same trace; only random choices differ")
    if not wanted:
        report.note(
            f"`{PINNED}`: {pin:.0%} of the lines always hold the hottest pages, the rest evict at random. "
            "These pages are loaded before counting starts, so `pinned` has no share of MIN. `of MIN` and "
            "`regret` compare with Belady's MIN with the same number of lines, over the same minibatches"
        )
    rows = [
        (policy, window)
        for policy in [MINIMUM, PINNED, *policies]
        for window in (windows if policy in WINDOWED else [None])
    ]
    rounds = 1 if wanted else session.repeat
    caches: list[tuple[str, int]] = []
    plan = list(itertools.product(range(rounds), traces))
    for number, (turn, source) in enumerate(plan):
        limits = _limits(session.left_s() / (len(plan) - number), len(rows) * len(sizes))
        with open_trace(source, args, session, report, args.seed + turn, limits) as (trace, table):
            case = Case.prepare(trace, table, args, session, report, seed=args.seed + turn)
            if wanted:
                advise(case, wanted, args, session, report)
                return
            if trace.policy is not None and turn == 0:
                _check_recorded(trace, table, replay_as_recorded(trace, table, check=session.check), report)
            if not caches:  # the same for every trace
                caches = cache_lines(sizes, case, report)
                report.subject.update(pinned_share=pin)
                if case.traced.heat is None:
                    rows = [row for row in rows if row[0] != PINNED]
                if len(traces) > 1:
                    report.note("each sampler and order has a different MIN: compare pages read, not hits")
                session.total(len(plan) * len(caches) * len(rows))
            try:
                _measure_all(case, source, caches, rows, pin, report)
            finally:
                _sort(report, traces, rows)


def _sort(report: Report, traces: list[Source], rows: list[tuple[str, int | None]]) -> None:
    """By cache, trace, policy and window."""
    trace_places: dict[object, int] = {
        tuple(source.setting.values()): number for number, source in enumerate(traces)
    }
    row_places: dict[object, int] = {row: number for number, row in enumerate(rows)}
    report.figures.sort(
        key=lambda f: (
            f.setting["lines"],
            trace_places[f.setting["sampler"], f.setting["kappa"], f.setting["order"]],
            row_places[f.setting["policy"], f.setting["window"]],
        )
    )


def _measure_all(
    case: Case,
    source: Source,
    caches: list[tuple[str, int]],
    rows: list[tuple[str, int | None]],
    pin: float,
    report: Report,
) -> None:
    """Measure the most informative settings first, in case the time runs out."""
    windows = [window for _, window in rows if window is not None]
    typical = {
        policy: min(windows, key=lambda w: abs(w - depth), default=0)
        for policy, depth in TYPICAL_WINDOWS.items()
    }

    def urgency(row: tuple[str, int | None]) -> int:
        policy, window = row
        if window is None:
            return 0 if policy == MINIMUM else 3
        return 4 if window != typical[policy] else 1 if policy == "lookahead" else 2

    for policy, window in sorted(rows, key=urgency):
        for places, lines in caches:
            figure = report.figure(cache=places, lines=lines, **source.setting, policy=policy, window=window)
            if policy == MINIMUM:
                figure.add(**case.minimum(lines))
            else:
                figure.add(**case.run(policy, lines, window or 0, pin=pin))
            case.session.done()


def columns(report: Report) -> tuple[dict[str, str], list[text.Column]]:
    shown = dict(SETTINGS)
    for name in ("sampler", "kappa", "order"):  # shared settings are in the subject
        if len({f.setting.get(name) for f in report.figures} - {None}) < 2:
            del shown[name]
    return shown, COLUMNS


def _limits(seconds: float, replays: int) -> tuple[float, float]:
    """(seconds, pages) to sample at most, so that half of the time is left for the replays."""
    return seconds / 4, seconds / 2 / (replays * _REPLAY_S_PER_PAGE)


def _policies(names: list[str] | None) -> list[str]:
    from gids.cache import POLICIES

    if names is None:
        return ["random", "lru", "static", "window-pin", "lookahead"]
    for name in names:
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"no policy {name!r} (there are {known}; MIN is always measured)")
    return list(dict.fromkeys(names))


def _check_together(args: argparse.Namespace) -> None:
    """Raise ValueError for options that have no effect together."""
    if args.advise is None:
        if args.pages_per_s is not None:
            raise ValueError("--pages-per-s works only with --advise: remove it")
        return
    unused = arguments.given(args, dict.fromkeys(("policies", "windows", "cache", "pin")))
    if unused:
        raise ValueError(
            f"--advise chooses the cache and the window for lookahead: remove {', '.join(unused)}"
        )


def _rate(value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"must be greater than 0 (got {value!r})")
    return found


def _windows(windows: list[int] | None, planned: int, policies: list[str], report: Report) -> list[int]:
    """Clip the windows to the number of live minibatches, with a note in the report."""
    from gids.trace.replay import LIVE_BATCHES

    most = LIVE_BATCHES - planned
    if most < 0:
        raise ValueError(f"--planned must be {LIVE_BATCHES} or less (got {planned})")
    if windows is None:
        windows = sorted({min(window, most) for window in (*_WINDOWS, most)})
    for window in windows:
        if window > most and not set(policies).isdisjoint(WINDOWED):
            report.note(
                f"window {window} is measured as {most}: the window and the {planned} planned minibatches "
                f"can be {LIVE_BATCHES} together"
            )
    return sorted({min(window, most) for window in windows})


def _check_recorded(trace: Trace, table: int, found: Counts, report: Report) -> None:
    """Compare the replay of a recorded run with the run's counters."""
    traced = trace.tables[table]
    was: dict[str, Any] = dict(trace.counters.get(traced.name, {}))
    mine = {
        "hits": int(found.hits.sum()),
        "loads": int(found.loads.sum()),
        "bypasses": int(found.bypasses.sum()),
    }
    mine["evictions"] = found.evictions
    report.answers.append(
        f"the recorded run ({trace.policy}, window {trace.window_batches}, {traced.lines:,} lines, "
        f"{format_bytes((traced.lines or 0) * traced.page_bytes)}) hit {mine['hits']:,} of "
        f"{int(found.pages.sum()):,} pages, {found.hit_ratio:.2%}, warm-up included"
    )
    if was.get("failures"):
        report.note(
            f"in the recorded run {was['failures']} reads failed, or were cancelled because a stream was "
            "closed early: after that its counters may differ from the replay's"
        )
    elif trace.device != "cpu":
        report.note(
            f"the run was on {trace.device}, where the search for victims is bounded: it hit "
            f"{was.get('hits', 0):,} pages"
        )
    elif any(was.get(key, value) != value for key, value in mine.items()):
        if trace.gids_version == version("gids"):
            raise FormatError(
                f"{trace.path} is damaged: its replay counts {mine}, the recorded run counted {was}"
            )
        report.note(
            f"the run was recorded by gids {trace.gids_version or 'before 0.3'}, which chooses other "
            f"victims: it hit {was.get('hits', 0):,} pages"
        )
