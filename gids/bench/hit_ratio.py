"""`gids bench hit-ratio`: the share of pages that a cache finds, compared with the best possible cache.

Replays page numbers only: it needs neither features nor a disk. --advise finds the cache for a hit ratio.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gids
from gids.bench import arguments, text
from gids.bench.report import Report
from gids.bench.session import Session
from gids.errors import FormatError
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.bench.case import Case
    from gids.bench.report import Setting
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
WINDOWED = ("window-pin", "lookahead")
MINIMUM = "MIN"
_FIRST = ("lookahead", MINIMUM, "lru")  # policies to measure first
_SIZES = ("1%", "2%", "5%", "10%")
_WINDOWS = (0, 4, 8, 16)
_SAMPLING_OPTIONS = (*arguments.SAMPLING_OPTIONS, "kappa", "batches", "order", "record", "rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    option = arguments.adder(parser)
    add("path", metavar="DATASET", type=Path, nargs="?", help="dataset (not needed with --replay)")
    arguments.add_dataset(parser)
    arguments.add_sampling(parser, several_samplers=True)
    option(
        "--kappa",
        arguments.kappas,
        "number of minibatches over which draws stay correlated, 1 (independent) or more, or inf; for "
        "neighbor and labor (default: 1)",
        metavar="N,…",
    )
    option("--batches", arguments.positive, "minibatches to sample", 200, "N")
    option(
        "--policies",
        arguments.words,
        "cache policies (default: random,lru,static,window-pin,lookahead)",
        metavar="NAME,…",
    )
    option(
        "--windows",
        arguments.numbers(0),
        "minibatches sampled ahead, 0 to 24 minus --planned (default: 0,4,8,16,22)",
        metavar="N,…",
    )
    option("--cache", arguments.words, "cache sizes (default: 1%%,2%%,5%%,10%%)", metavar="SIZE,…")
    option("--planned", arguments.positive, "minibatches whose reads are in flight", 2, "N")
    option(
        "--warm-up",
        arguments.share,
        "share of the minibatches to run before counting (default: 25%%)",
        0.25,
        "SHARE",
    )
    option(
        "--order",
        arguments.words,
        "orders of rows to try, without changing the dataset: stored, original, degree, community, "
        "trace:FILE as in `gids convert --order` (default: stored)",
        metavar="ORDER,…",
    )
    option("--record", Path, "write the sampled trace to FILE", metavar="FILE")
    add("--rows", action="store_true", help="trace rows instead of pages, for --order trace:FILE")
    option("--replay", Path, "replay a recorded trace instead of sampling", metavar="FILE")
    option("--advise", str, "find the smallest cache and window that reach WANTED", metavar="WANTED")
    option("--pages-per-s", arguments.rate, "disk speed for --advise (default: measured)", metavar="N")
    option(
        "--epoch-batches",
        arguments.positive,
        "minibatches per epoch (default: number of seeds / batch size)",
        metavar="N",
    )
    arguments.keep_defaults(parser, _SAMPLING_OPTIONS)


def measure(args: argparse.Namespace, session: Session, report: Report) -> None:
    """Fill the report. Settings: cache, lines, sampler, kappa, order, policy and window."""
    from gids.bench.advise import advise, parse_wanted
    from gids.bench.case import open_case, sources

    policies = _policies(args.policies)
    wanted = parse_wanted(args.advise) if args.advise is not None else None
    _check_together(args)
    windows = [] if wanted else _windows(args.windows, args.planned, policies, report)
    sizes = [arguments.parse_cache_size(size) for size in args.cache or _SIZES]
    traces = sources(args, report)
    if wanted and session.repeat > 1:
        report.note("--advise measures once: --repeat has no effect")
    elif args.replay is not None and session.repeat > 1:
        report.note("each repeat replays the same trace; only random choices differ")
    if not wanted:
        report.note(
            "`of MIN` and `regret` compare with Belady's MIN with the same number of lines, over the same "
            "minibatches"
        )
    rows: list[tuple[str, int | None]] = [
        (policy, window)
        for policy in [MINIMUM, *policies]
        for window in (windows if policy in WINDOWED else [None])
    ]
    caches: list[tuple[str, int]] = []
    plan = list(itertools.product(range(1 if wanted else session.repeat), traces))
    for number, (turn, source) in enumerate(plan):
        seconds = session.left_s() / (len(plan) - number)
        with open_case(
            source,
            args,
            session,
            report,
            seed=args.seed + turn,
            seconds=seconds,
            replays=len(rows) * len(sizes),
        ) as case:
            if wanted:
                advise(case, wanted, args, session, report)
                return
            if case.trace.policy is not None and turn == 0:
                _check_recorded(case.trace, case.table, session, report)
            if not caches:  # the same for every trace
                caches = case.cache_lines(sizes, report)
                if len(traces) > 1:
                    report.note("each sampler and order has a different MIN: compare pages read, not hits")
                session.total(len(plan) * len(caches) * len(rows))
            _measure_case(case, source.setting, rows, caches, session, report)


def _measure_case(
    case: Case,
    setting: Setting,
    rows: Sequence[tuple[str, int | None]],
    caches: Sequence[tuple[str, int]],
    session: Session,
    report: Report,
) -> None:
    """Measure each (policy, window) of rows in each (name, lines) of caches, those of _FIRST first.

    setting: of the case. The report's figures have the order of caches and rows, however many are measured.
    """
    figures = {
        (row, lines): report.figure(cache=cache, lines=lines, **setting, policy=row[0], window=row[1])
        for (cache, lines), row in itertools.product(caches, rows)
    }
    report.figures.sort(key=lambda f: f.setting["lines"])  # type: ignore[arg-type, return-value]
    urgent = sorted(rows, key=lambda row: _FIRST.index(row[0]) if row[0] in _FIRST else len(_FIRST))
    for (policy, window), (_, lines) in itertools.product(urgent, caches):
        metrics = case.minimum(lines) if policy == MINIMUM else case.run(policy, lines, window or 0)
        figures[(policy, window), lines].add(**metrics)
        session.done()


def columns(report: Report) -> tuple[dict[str, str], list[text.Column]]:
    shown = dict(SETTINGS)
    for name in ("sampler", "kappa", "order"):  # shared settings are in the subject
        if len({f.setting.get(name) for f in report.figures} - {None}) < 2:
            del shown[name]
    return shown, COLUMNS


def _policies(names: list[str] | None) -> list[str]:
    from gids.cache import POLICIES

    if names is None:
        return ["random", "lru", "static", "window-pin", "lookahead"]
    for name in names:
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"--policies takes {known} (got {name!r}); MIN is always measured")
    return list(dict.fromkeys(names))


def _check_together(args: argparse.Namespace) -> None:
    """Raise ValueError for options that have no effect together."""
    if args.advise is None:
        if args.pages_per_s is not None:
            raise ValueError("--pages-per-s works only with --advise: remove it")
        return
    unused = arguments.changed(args, dict.fromkeys(("policies", "windows", "cache")))
    if unused:
        raise ValueError(
            f"--advise chooses the cache and the window for lookahead: remove {', '.join(unused)}"
        )


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


def _check_recorded(trace: Trace, table: int, session: Session, report: Report) -> None:
    """Replay a recorded run, and compare with the run's counters."""
    from gids.trace.replay import replay_as_recorded

    traced, counts = trace.tables[table], replay_as_recorded(trace, table, check=session.check)
    recorded: dict[str, Any] = dict(trace.counters.get(traced.name, {}))
    replayed = {name: int(getattr(counts, name).sum()) for name in ("hits", "loads", "bypasses")}
    replayed["evictions"] = counts.evictions
    report.answers.append(
        f"the recorded run ({trace.policy}, window {trace.window_batches}, {traced.lines:,} lines, "
        f"{format_bytes((traced.lines or 0) * traced.page_bytes)}) hit {replayed['hits']:,} of "
        f"{int(counts.pages.sum()):,} pages, {counts.hit_ratio:.2%}, warm-up included"
    )
    if recorded.get("failures"):
        report.note(
            f"in the recorded run {recorded['failures']} reads failed, or were cancelled because a stream "
            "was closed early: after that its counters may differ from the replay's"
        )
    elif trace.device != "cpu":
        report.note(
            f"the run was on {trace.device}, where the search for victims is bounded: it hit "
            f"{recorded.get('hits', 0):,} pages"
        )
    elif any(recorded.get(key, value) != value for key, value in replayed.items()):
        if trace.gids_version == gids.__version__:
            raise FormatError(
                f"{trace.path} is damaged: its replay counts {replayed}, the recorded run counted {recorded}"
            )
        report.note(
            f"the run was recorded by gids {trace.gids_version}, which chooses other "
            f"victims: it hit {recorded.get('hits', 0):,} pages"
        )
