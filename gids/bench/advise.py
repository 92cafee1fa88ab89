"""`gids bench hit-ratio --advise`: the smallest cache and window that reach a hit ratio.

The hit ratio grows with the cache and, with lookahead, with the window. A binary search finds the smallest
cache with the longest window; then the shortest window that is enough with this cache is found.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable

import numpy as np

from gids import _core
from gids.bench import text
from gids.bench.arguments import open_table
from gids.bench.case import LONGEST, Case, Source
from gids.bench.probe import random_reads
from gids.bench.report import Session
from gids.sizes import format_bytes

POLICY = "lookahead"
PRECISION = 0.01  # relative precision of the cache size
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
