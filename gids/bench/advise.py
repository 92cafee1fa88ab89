"""The smallest cache and window that reach what is wanted of a trace. Called by hit_ratio.py for --advise.

A hit ratio grows with the cache and, under lookahead, with the window: so the smallest cache is sought with
the longest window, by halving, and then the shortest window that does as well with it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gids import _core
from gids.bench import text
from gids.bench.report import Report
from gids.bench.session import Session
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.bench.case import Case

POLICY = "lookahead"
PRECISION = 0.01  # of the cache: the search ends when it is known so well
_PAGE_WORD_BYTES = 8


@dataclass(frozen=True)
class Wanted:
    """A hit ratio, or the seconds that an epoch's missing pages may take to read; the other is None."""

    hit_ratio: float | None
    epoch_s: float | None


def parse_wanted(value: str) -> Wanted:
    """`60%`, `0.6` or `30s`. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(%|s|)", value)
    if found:
        number = float(found[1])
        if found[2] == "s" and number > 0:
            return Wanted(None, number)
        ratio = number / 100 if found[2] == "%" else number
        if found[2] != "s" and 0 < ratio <= 1:
            return Wanted(ratio, None)
    raise ValueError(
        f"--advise {value}: write a hit ratio such as 60%, or the seconds of an epoch such as 30s"
    )


def advise(case: Case, wanted: Wanted, args: argparse.Namespace, session: Session, report: Report) -> None:
    """Search, and add the answer to the report; its figures are the caches that were looked at."""
    from gids.trace.replay import LIVE_BATCHES

    per_batch = case.pages / (case.trace.batch_count - case.warm)
    if args.pages_per_s is not None:
        report.subject["pages_per_s"] = args.pages_per_s
    if wanted.epoch_s is None:
        assert wanted.hit_ratio is not None
        ratio = wanted.hit_ratio
    else:
        speed = args.pages_per_s or _measured_speed(case, args, report)
        report.subject["pages_per_s"] = speed
        needed = _epoch_batches(case) * per_batch
        ratio = max(0.0, 1 - wanted.epoch_s * speed / needed)
    longest = LIVE_BATCHES - case.planned

    def measured(lines: int, window: int) -> float:
        size = format_bytes(lines * case.traced.page_bytes)
        figure = report.figure(cache=size, lines=lines, policy=POLICY, window=window)
        if not figure.values:
            figure.add(**case.run(POLICY, lines, window))
        session.done()
        return figure.values["hit_ratio"][-1]

    try:
        _search(case, ratio, longest, per_batch, measured, report)
    finally:
        report.figures.sort(key=lambda f: (f.setting["lines"], f.setting["window"]))


def _search(
    case: Case,
    ratio: float,
    longest: int,
    per_batch: float,
    measured: Callable[[int, int], float],
    report: Report,
) -> None:
    report.subject["wanted_hit_ratio"] = ratio
    best = measured(case.traced.page_count, longest)
    if best < ratio:
        report.answers.append(
            f"no cache hits the {ratio:.1%} that are needed: with every page in it, {best:.1%} are hits, as "
            "the rest is read for the first time. A longer trace repeats more (--batches)"
        )
        return
    low, high = 0, case.traced.page_count  # reached with high; not with low, which is looked at first
    if measured(0, longest) >= ratio:
        high = 0
    while high - low > max(1, int(PRECISION * high)):
        middle = (low + high) // 2
        if measured(middle, longest) >= ratio:
            high = middle
        else:
            low = middle
    window = next(w for w in [*range(0, longest, 4), longest] if measured(high, w) >= ratio)
    _answer(case, high, window, measured(high, window), per_batch, report)


def _answer(
    case: Case,
    lines: int,
    window: int,
    ratio: float,
    per_batch: float,
    report: Report,
) -> None:
    cache = lines * case.traced.page_bytes
    share = lines / case.traced.page_count
    of_lines = lines * _core.LINE_METADATA_BYTES
    metadata = of_lines + case.traced.page_count * _PAGE_WORD_BYTES
    if lines:
        report.answers.append(
            f"{ratio:.1%} are hits with {lines:,} lines ({format_bytes(cache)}, {share:.1%} of the "
            f"table; metadata {format_bytes(metadata)}) and a window of {window}: "
            f"gids.open(..., window={window}, cache={cache + of_lines})"
        )
        minimum = case.minimum(lines)["hit_ratio"]
        report.answers.append(f"a cache of that size that knows the future would hit {minimum:.1%}")
    else:
        report.answers.append("no cache is needed for that: it is reached when every page is read each time")
    speed = report.subject.get("pages_per_s")
    if speed:
        epoch = _epoch_batches(case)
        pages = epoch * per_batch * (1 - ratio)
        report.answers.append(
            f"an epoch of {epoch:,} minibatches then reads {pages:,.0f} pages: "
            f"{text.seconds(pages / speed)} at {speed:,.0f} pages/s"
        )


def _measured_speed(case: Case, args: argparse.Namespace, report: Report) -> float:
    from gids.bench import arguments
    from gids.bench.probe import random_reads

    if args.path is None:
        raise ValueError(
            "--advise in seconds needs the disk's speed: name the dataset too, or give --pages-per-s"
        )
    _, table = arguments.open_table(args)
    if table.page_count != case.traced.page_count:
        raise ValueError(
            f"{args.path} has {table.page_count:,} pages of {table.name!r}, and the trace tells of "
            f"{case.traced.page_count:,}: it is of another dataset"
        )
    found = random_reads(table.shard_paths, page_bytes=case.traced.page_bytes, seconds=3.0)
    if found.note:
        report.note(found.note)
    return float(found.reads_per_s)


def _epoch_batches(case: Case) -> int:
    """Where no epoch is known, what the trace holds counts as one."""
    return case.epoch_batches or case.trace.batch_count
