"""`gids bench hit-ratio`: the share of pages that a cache finds, compared with the best possible cache.

It samples minibatches as gids.NodeLoader does, and replays the numbers of their pages: it needs neither
features nor a disk. Another order of the rows is tried without writing a dataset.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from gids.bench.plot import plot_curves
from gids.bench.report import Column, Report, Session, count, percent, ratio
from gids.bench.sampling import check_known, endless, make_sampler, open_table, parse_cache_size
from gids.bench.trace import ORDERS, Optimum, positions_in, replay, sampled_pages
from gids.cache import POLICIES, page_heat
from gids.heat import choose_seeds
from gids.sizes import format_bytes
from gids.store import Table

SETTINGS = {"cache": "cache", "policy": "policy", "window": "window"}
COLUMNS = [
    Column("hits %", "hit_ratio", percent),
    Column("of MIN", "of_min", ratio),
    Column("regret %", "regret", percent),
    Column("pages read", "pages_read", count),
    Column("of an epoch", "epoch_pages_read", count),
]
WINDOWED = ("window-pin", "lookahead")
MINIMUM = "MIN"
PLANNED = 2  # minibatches whose reads are in flight
_WARM_UP = 0.25  # share of the minibatches before counting starts


def measure(session: Session) -> None:
    """Fill the report. Raises ValueError and KeyError for arguments, FormatError without topology."""
    args, report = session.args, session.report
    for name in args.policies:
        check_known("--policies", name, POLICIES, "; MIN is always measured")
    check_known("--order", args.order, ORDERS)
    sizes = [parse_cache_size(size) for size in args.cache]
    store, table = open_table(args)
    if not isinstance(table.type, str):
        raise ValueError(
            f"table {table.name!r} has rows of edges, and samplers read nodes: give another --table"
        )
    positions, heat = positions_in(args.order, store, table), None
    if methods := store.heat_methods(table.type):
        heat = page_heat(store.heat(methods[0], table.type), table.rows_per_page, positions)
    else:
        report.note("the pages have no heat: static cannot choose pages, and lookahead uses only the window")
    sampler = make_sampler(args.sampler, args.fanouts, args.batch_size, kappa=args.kappa)
    minibatches = endless(store, sampler, seeds=args.seeds, batch_size=args.batch_size, seed=args.seed)
    batches = sampled_pages(itertools.islice(minibatches, args.batches), table, positions)
    warm = int(len(batches) * _WARM_UP)
    pages = sum(map(len, batches[warm:]))
    if not pages:
        raise ValueError(f"these minibatches read no pages of table {table.name!r}")
    per_batch = pages / (len(batches) - warm)
    seeds = sum(map(len, choose_seeds(store, args.seeds).values()))
    per_epoch = per_batch * -(-seeds // args.batch_size)
    if per_batch > 0.5 * table.page_count:
        report.note(
            f"a minibatch reads {per_batch / table.page_count:.0%} of all pages on average, so policies "
            "differ little: try smaller minibatches (--batch-size, --fanouts)"
        )
    report.note("`of MIN` and `regret` compare with Belady's MIN with the same number of lines")
    report.subject.update(
        dataset=str(store.path),
        table=table.name,
        pages=table.page_count,
        page_bytes=table.page_bytes,
        rows_per_page=table.rows_per_page,
        sampler=args.sampler,
        kappa="inf" if args.kappa == math.inf else args.kappa,
        order=args.order,
        fanouts=list(args.fanouts),
        batch_size=args.batch_size,
        seeds=args.seeds,
        batches=len(batches),
        warm_up_batches=warm,
        pages_per_batch=per_batch,
        epoch_pages=per_epoch,
    )

    def metrics(hits: int, best: int) -> dict[str, float]:
        """Of what the counted minibatches hit. best: hits of MIN."""
        return {
            "hit_ratio": hits / pages,
            "of_min": hits / best if best else 1.0,
            "regret": (best - hits) / pages,
            "pages_read": pages - hits,
            "epoch_pages_read": per_epoch * (pages - hits) / pages,
        }

    rows = [(p, w) for p in dict.fromkeys(args.policies) for w in (args.windows if p in WINDOWED else [None])]
    caches = _lines(sizes, table, per_batch, report)
    session.progress.total(len(caches) * (1 + len(rows)))
    optimum = Optimum(batches, table.page_count)
    for lines, cache in sorted(caches.items()):
        best = int(optimum.hits(lines, warm=warm)[warm:].sum())
        report.add({"cache": cache, "lines": lines, "policy": MINIMUM, "window": None}, metrics(best, best))
        session.progress.add(1)
        for policy, window in rows:
            replayed = replay(
                batches,
                table.page_count,
                lines=lines,
                policy=policy,
                window=window or 0,
                planned=PLANNED,
                heat=heat,
                seed=args.seed,
                warm=warm,
            )
            hits = int(replayed.hits.sum())
            if hits > best:
                raise RuntimeError(f"{policy} hits {hits} pages, more than MIN's {best}: report this bug")
            setting = {"cache": cache, "lines": lines, "policy": policy, "window": window}
            report.add(setting, metrics(hits, best))
            session.progress.add(1)


def plot(report: Report, path: Path) -> None:
    """Draw hits by window as PNG: a panel per cache, a curve per policy. Raises OSError."""
    windows = sorted({int(w) for f in report.figures if (w := f.setting["window"]) is not None}) or [0]
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for setting, metrics in report.figures:
        curves = panels.setdefault(f"cache {setting['cache']}", {})
        window = setting["window"]
        for x in windows if window is None else [int(window)]:
            curves.setdefault(str(setting["policy"]), {})[x] = 100 * metrics["hit_ratio"]
    plot_curves(
        path,
        "Pages that a cache finds",
        {
            cache: [(policy, list(curve), list(curve.values())) for policy, curve in curves.items()]
            for cache, curves in panels.items()
        },
        ("window (minibatches)", "pages hit (%)"),
    )


def _lines(
    sizes: list[tuple[str, str, float]], table: Table, per_batch: float, report: Report
) -> dict[int, str]:
    """Names by number of lines, for sizes of parse_cache_size."""
    page_count, page_bytes = table.page_count, table.page_bytes
    names: dict[int, str] = {}
    for size, unit, number in sizes:
        lines = int({"B": number / page_bytes, "%": number * page_count, "x": number * per_batch}[unit])
        if lines >= page_count:
            lines = page_count
            report.note(f"a cache of {size} holds the whole table: pages are hits after their first read")
        if not lines and number:
            report.note(
                f"a cache of {size} is smaller than a page of {page_bytes} B, so nothing is hit: give more "
                "bytes, or 2% of the pages or 5x a minibatch"
            )
        names.setdefault(lines, size if unit == "B" else f"{size} ({format_bytes(lines * page_bytes)})")
    return names
