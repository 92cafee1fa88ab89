"""`gids bench hit-ratio`: what share of pages a cache would find, beside what the best possible one would.

Metadata only: neither features nor a disk is needed. With --advise it turns the question round.
"""

from __future__ import annotations

import argparse
import itertools
import math
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.bench import arguments, text
from gids.bench.hit_ratio_plot import TYPICAL_WINDOWS
from gids.bench.report import Report
from gids.bench.session import Session
from gids.errors import FormatError
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.bench.case import Case
    from gids.bench.trace_source import Source
    from gids.trace.replay import Counts
    from gids.trace.trace_file import Trace

HELP = "what share of pages a cache would find, by policy, window and size, beside Belady's MIN"
EPILOG = """\
PLACES are cache sizes: a share of the table's pages (2%), bytes of lines (4GB), or so many average
minibatches (5x). WANTED is a hit ratio (60%) or the seconds of an epoch (30s): the time that its missing
pages take to read, at the speed that the dataset's disk shows in a short probe, or that --pages-per-s gives.

To record a run of your own training:

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
    text.Column("pinned %", "in_use_share", text.percent),
]
WINDOWED = tuple(TYPICAL_WINDOWS)
_REPLAY_S_PER_PAGE = 60e-9  # about what a replay takes, to choose how long a trace fits into --seconds
MINIMUM = "MIN"
_PLACES = ("1%", "2%", "5%", "10%")
_WINDOWS = (0, 4, 8, 16)
_PIN = 0.4
_OF_SAMPLING = (*arguments.OF_MINIBATCHES, "kappa", "batches", "heat", "order", "record", "rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="DATASET", type=Path, nargs="?", help="not needed with --replay")
    arguments.add_dataset(parser)
    arguments.add_sampling(parser, several_samplers=True)
    add(
        "--kappa",
        type=arguments.kappas,
        metavar="N,…",
        help="in how many minibatches random numbers change wholly: 1 (independent) or more, or inf, for the "
        "samplers that take it (default: 1)",
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
        help="default: random,lru,static,window-pin,lookahead",
    )
    add(
        "--windows",
        type=arguments.numbers(0),
        metavar="N,…",
        help="minibatches looked ahead (default: 0,4,8,16, and as many as there are marks for: 22)",
    )
    add(
        "--cache",
        type=arguments.words,
        metavar="PLACES,…",
        help="default: 1%%,2%%,5%%,10%%",
    )
    add(
        "--planned",
        type=arguments.positive,
        default=2,
        metavar="N",
        help="minibatches being read (default: 2)",
    )
    add(
        "--pin",
        type=arguments.share,
        metavar="SHARE",
        help="of the cache, pinned to the hottest pages, in the row `pinned` (default: 40%%)",
    )
    add(
        "--warm-up",
        type=arguments.share,
        default=0.25,
        metavar="SHARE",
        help="of the minibatches, not counted (default: 25%%)",
    )
    add(
        "--heat",
        default="auto",
        metavar="METHOD",
        help="auto (the best that is stored), none, or a method's name",
    )
    add(
        "--order",
        type=arguments.words,
        metavar="ORDER,…",
        help="lay the rows out otherwise, for the trace only: original, degree, community or trace:FILE, as "
        "`gids convert --order` does, or stored (default: stored)",
    )
    add("--record", type=Path, metavar="FILE", help="keep the sampled trace")
    add("--rows", action="store_true", help="trace rows in place of pages, for --order trace:FILE")
    add("--replay", type=Path, metavar="FILE", help="a recorded trace in place of sampling")
    add("--advise", metavar="WANTED", help="the smallest cache and window that reach this")
    add(
        "--pages-per-s",
        type=_rate,
        metavar="N",
        help="for --advise: the disk's speed, not measured",
    )
    add(
        "--epoch-batches",
        type=arguments.positive,
        metavar="N",
        help="minibatches of an epoch (default: as many as the seeds make)",
    )
    arguments.keep_defaults(parser, _OF_SAMPLING)


def measure(args: argparse.Namespace, session: Session, report: Report) -> None:
    """Fill the report; the figures' settings are cache, lines, sampler, kappa, policy and window."""
    from gids.bench.advise import advise, parse_wanted
    from gids.bench.case import PINNED, Case
    from gids.bench.places import cache_sizes, parse_places
    from gids.bench.trace_source import open_trace, sources
    from gids.trace.replay import replay_as_recorded

    policies = _policies(args.policies)
    wanted = parse_wanted(args.advise) if args.advise is not None else None
    _check_together(args)
    windows = [] if wanted else _windows(args.windows, args.planned, policies, report)
    sizes = [parse_places(place) for place in args.cache or _PLACES]
    traces = sources(args, report)
    pin = _PIN if args.pin is None else args.pin
    if wanted and session.repeat > 1:
        report.note("--advise looks at one trace once: --repeat changes nothing")
    elif args.replay is not None and session.repeat > 1:
        report.note("the trace is the same in each repeat; only random choices differ")
    if not wanted:
        report.note(
            f"`{PINNED}`: {pin:.0%} of the lines hold the hottest pages for good, preloaded; the rest "
            "choose a random victim. The preload is not counted as read, so it has no share of MIN. of MIN, "
            "regret: beside Belady's MIN with as many lines, over the same minibatches"
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
                caches = cache_sizes(sizes, case, report)
                report.subject.update(pinned_share=pin)
                if case.traced.heat is None:
                    rows = [row for row in rows if row[0] != PINNED]
                if len(traces) > 1:
                    report.note(
                        "each sampler and order has a MIN of its own, and training waits for what is read: "
                        "compare pages read, not hits"
                    )
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
    """What says most comes first, for when time runs out."""
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
    for name in ("sampler", "kappa", "order"):  # what all figures share is said once, in the subject
        if len({f.setting.get(name) for f in report.figures} - {None}) < 2:
            del shown[name]
    return shown, COLUMNS


def plot(report: Report, path: Path) -> None:
    from gids.bench import hit_ratio_plot, sampler_plot
    from gids.bench.plot import save_plot

    chosen = sampler_plot if sampler_plot.groups(report) else hit_ratio_plot
    draw, size = chosen.draw, chosen.size
    width, height = size(report)
    save_plot(path, lambda figure: draw(report, figure), width=width, height=height)


def _limits(seconds: float, replays: int) -> tuple[float, float]:
    """Of sampling, (seconds, pages): so that half of the time is left for all replays of them."""
    return seconds / 4, seconds / 2 / (replays * _REPLAY_S_PER_PAGE)


def _policies(names: list[str] | None) -> list[str]:
    from gids.cache import POLICIES

    if names is None:
        return ["random", "lru", "static", "window-pin", "lookahead"]
    for name in names:
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"no policy {name!r} (there are {known}; MIN stands beside them always)")
    return list(dict.fromkeys(names))


def _check_together(args: argparse.Namespace) -> None:
    """Raise ValueError for options that another makes meaningless."""
    if args.advise is None:
        if args.pages_per_s is not None:
            raise ValueError("--pages-per-s is for --advise, and nothing is to be advised: leave it out")
        return
    unused = arguments.given(args, dict.fromkeys(("policies", "windows", "cache", "pin")))
    if unused:
        raise ValueError(
            f"--advise seeks the cache and the window itself, under lookahead: leave out {', '.join(unused)}"
        )


def _rate(value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r} is no speed; give pages a second, more than 0")
    return found


def _windows(windows: list[int] | None, planned: int, policies: list[str], report: Report) -> list[int]:
    """Those that a page's word has marks for; the others are clipped, and the report says so."""
    from gids.trace.replay import LIVE_BATCHES

    most = LIVE_BATCHES - planned
    if most < 0:
        raise ValueError(f"--planned {planned}: at most {LIVE_BATCHES} minibatches may be live")
    if windows is None:
        windows = sorted({min(window, most) for window in (*_WINDOWS, most)})
    for window in windows:
        if window > most and not set(policies).isdisjoint(WINDOWED):
            report.note(
                f"window {window} is measured as {most}: with {planned} planned, that makes {LIVE_BATCHES} "
                "live minibatches, the most that a page's word has marks for"
            )
    return sorted({min(window, most) for window in windows})


def _check_recorded(trace: Trace, table: int, found: Counts, report: Report) -> None:
    """A trace of a run, repeated as it was, gives what the run counted."""
    traced = trace.tables[table]
    was: dict[str, Any] = dict(trace.counters.get(traced.name, {}))
    mine = {
        "hits": int(found.hits.sum()),
        "loads": int(found.loads.sum()),
        "bypasses": int(found.bypasses.sum()),
    }
    mine["evictions"] = found.evictions
    report.answers.append(
        f"the run that was recorded ({trace.policy}, window {trace.window_batches}, {traced.lines:,} lines, "
        f"{format_bytes((traced.lines or 0) * traced.page_bytes)}) hit {mine['hits']:,} of "
        f"{int(found.pages.sum()):,} pages, {found.hit_ratio:.2%}, warm-up included"
    )
    if was.get("failures"):
        report.note(
            f"{was['failures']} reads failed, or were cancelled as a stream was closed early, in the "
            "recorded run: from there on its counts may differ from the replay's"
        )
    elif trace.device != "cpu":
        report.note(
            f"the run was on {trace.device}, where victims are sought within bounds: it hit "
            f"{was.get('hits', 0):,} pages"
        )
    elif any(was.get(key, value) != value for key, value in mine.items()):
        if trace.gids_version == version("gids"):
            raise FormatError(
                f"{trace.path} replays to {mine}, but the run that was recorded counted {was}: it is damaged"
            )
        report.note(
            f"the run was recorded by gids {trace.gids_version or 'before 0.3'}, which chose victims "
            f"otherwise: it hit {was.get('hits', 0):,} pages"
        )
