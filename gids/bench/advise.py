"""`gids bench hit-ratio --advise`: the smallest cache and window that reach a hit ratio.

The hit ratio grows with the cache and, with lookahead, with the window. A binary search finds the smallest
cache with the longest window; then the shortest window that is enough with this cache is found.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from gids import _core
from gids.bench import text
from gids.bench.report import Report
from gids.bench.session import Session
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.bench.case import Case

POLICY = "lookahead"
PRECISION = 0.01  # relative precision of the cache size, at which the search ends
_PAGE_WORD_BYTES = 8


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


def advise(
    case: Case,
    wanted: tuple[float | None, float | None],
    args: argparse.Namespace,
    session: Session,
    report: Report,
) -> None:
    """Search, and add the answer to the report, with a figure for each cache that was tried.

    wanted: from parse_wanted.
    """
    from gids.trace.replay import LIVE_BATCHES

    per_batch = case.pages / (case.trace.batch_count - case.warm)
    if args.pages_per_s is not None:
        report.subject["pages_per_s"] = args.pages_per_s
    ratio, epoch_s = wanted
    if ratio is None:
        assert epoch_s is not None
        speed = args.pages_per_s or _measured_speed(case, args, report)
        report.subject["pages_per_s"] = speed
        needed = _epoch_batches(case) * per_batch
        ratio = max(0.0, 1 - epoch_s * speed / needed)
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
            f"no cache reaches {ratio:.1%}: with every page in the cache {best:.1%} are hits, the rest are "
            "first reads. A longer trace (--batches) has fewer first reads"
        )
        return
    low, high = 0, case.traced.page_count  # high reaches the ratio, low does not
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


def _answer(case: Case, lines: int, window: int, ratio: float, per_batch: float, report: Report) -> None:
    cache = lines * case.traced.page_bytes
    share = lines / case.traced.page_count
    line_metadata = lines * _core.LINE_METADATA_BYTES
    metadata = line_metadata + case.traced.page_count * _PAGE_WORD_BYTES
    if lines:
        report.answers.append(
            f"{ratio:.1%} of pages are hits with {lines:,} lines ({format_bytes(cache)}, {share:.1%} of the "
            f"table; metadata {format_bytes(metadata)}) and a window of {window}: "
            f"gids.open(..., window={window}, cache={cache + line_metadata})"
        )
        minimum = case.minimum(lines)["hit_ratio"]
        report.answers.append(f"the best possible cache of this size (Belady's MIN) hits {minimum:.1%}")
    else:
        report.answers.append("no cache is needed: the goal is reached even if every page is read each time")
    _say_page_size(case, report)
    speed = report.subject.get("pages_per_s")
    if speed:
        epoch = _epoch_batches(case)
        pages = epoch * per_batch * (1 - ratio)
        report.answers.append(
            f"an epoch of {epoch:,} minibatches then reads {pages:,.0f} pages: "
            f"{text.seconds(pages / speed)} at {speed:,.0f} pages/s"
        )


def _say_page_size(case: Case, report: Report) -> None:
    """Add an answer if shorter pages would need less memory for the same hits."""
    from gids.store.geometry import SECTOR_BYTES, best_page_bytes

    traced = case.traced
    # A trace does not say how long a row is. This is the longest row of which so many fit in a page.
    row_bytes = traced.page_bytes // max(1, traced.rows_per_page)
    best = best_page_bytes(row_bytes, alignment=SECTOR_BYTES)
    if traced.rows_per_page > 1 and traced.page_bytes > best:
        report.answers.append(
            f"a page of {traced.page_bytes} B has {traced.rows_per_page} rows; if rows are read at random, "
            f"the same memory holds more wanted rows in pages of {best} B: convert with --page-bytes {best}, "
            "on a disk with direct I/O of such blocks (see `gids info --system`)"
        )


def _measured_speed(case: Case, args: argparse.Namespace, report: Report) -> float:
    from gids.bench import arguments
    from gids.bench.probe import random_reads

    if args.path is None:
        raise ValueError("--advise in seconds needs the disk's speed: give the dataset too, or --pages-per-s")
    _, table = arguments.open_table(args)
    if table.page_count != case.traced.page_count:
        raise ValueError(
            f"{args.path} has {table.page_count:,} pages of {table.name!r}, the trace has "
            f"{case.traced.page_count:,}: the trace is from another dataset"
        )
    raw = random_reads(table.shard_paths, page_bytes=case.traced.page_bytes, seconds=3.0)
    if raw.note:
        report.note(raw.note)
    return float(raw.reads_per_s)


def _epoch_batches(case: Case) -> int:
    """Minibatches per epoch; if unknown, the number in the trace."""
    return case.epoch_batches or case.trace.batch_count
