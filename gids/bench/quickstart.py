"""The quickstart's comparison: gids, stock DGL, and stock DGL without advice; the table and the verdict.

Called by gids.cli.quickstart, which makes the data. gids.measure runs the sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gids.bench.session import Step
from gids.bench.text import aligned
from gids.measure.choices import describe_choices
from gids.measure.sides import Comparison, EpochConfig, EpochResult

OURS, STOCK, PLAIN = "gids", "stock", "stock_without_advice"
NAMES = {OURS: "gids", STOCK: "stock DGL", PLAIN: "stock DGL without MADV_RANDOM"}
PLAIN_SECONDS = 15.0  # time limit of stock without advice
_START_SECONDS = 60.0  # time limit of a side besides training
_LEAST_SECONDS = 20.0  # with less time left, no other side is started
_DAY = 86400.0
_STAGES = {
    "sampling": "sampling",
    "planning": "planning reads",
    "reading": "waiting for features",
    "gather": "copying features",
    "training": "training",
}

_FACTS: dict[str, Callable[[EpochResult], str]] = {
    "whole epoch": lambda r: _seconds(r.seconds),
    "CPU time": lambda r: _seconds(r.cpu_seconds),
    "feature rows": lambda r: f"{r.rows:,}",
    "rows/s": lambda r: f"{r.rows_per_s:,.0f}",
    "MB read": lambda r: "-" if r.read_bytes is None else f"{r.read_bytes / 1e6:,.0f}",
    "MB/s read": lambda r: "-" if r.read_bytes is None else f"{r.read_bytes / r.seconds / 1e6:,.0f}",
    "hit ratio": lambda r: _share(r.hit_ratio),
    "peak RSS": lambda r: f"{r.peak_rss_bytes / 1e6:,.0f} MB",
    "training accuracy": lambda r: _share(r.train_accuracy),
    "validation accuracy": lambda r: _share(r.val_accuracy),
    "rows like the source": lambda r: f"{r.compared_rows - r.wrong_rows:,} of {r.compared_rows:,}",
}
_EXAMPLE = """\
import gids.dgl, dgl  # gids before dgl
source = gids.open({path!r})  # memory="16GB", window=16, ...
graph = gids.dgl.graph(source)
sampler = dgl.dataloading.NeighborSampler({fanouts}, prefetch_node_feats=["feat"], prefetch_labels=["label"])
loader = gids.dgl.DataLoader(graph, source.split("train"), sampler, gids=source, batch_size={batch_size})
for input_nodes, output_nodes, blocks in loader: ...  # blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]
"""


def compare(ours: EpochConfig, *, limited: bool, total_seconds: float, begun: float) -> Comparison:
    """Train on each side for ours.most_seconds at most. Blocks. limited: whether memory is limited.

    total_seconds: approximate time limit, counted from begun (time.monotonic()); 0: none. If gids takes long,
    stock gets less time, and stock without advice may be skipped. Raises FreshProcessError if gids fails.
    """
    comparison = Comparison(limited=limited)

    def run(side: str, work: str, config: EpochConfig, timeout_s: float) -> None:
        with Step(work) as step:
            comparison.run(
                side, config, title=NAMES[side], timeout_s=timeout_s, say=step.say, progress=step.show
            )

    def left() -> float:
        return begun + (total_seconds or _DAY) - time.monotonic()

    timeout_s = 2 * (ours.most_seconds + _START_SECONDS) if ours.most_seconds else _DAY
    run(OURS, "training with gids", ours, timeout_s)
    # If all features fit into the page cache, reading ahead is faster.
    stock = replace(ours, side="stock", random_access=limited)
    timeout_s = _DAY
    if total_seconds:
        seconds = max(_LEAST_SECONDS, left() - 2 * _LEAST_SECONDS)
        stock = replace(stock, most_seconds=min(ours.most_seconds or seconds, seconds))
        timeout_s = stock.most_seconds + _START_SECONDS
    run(STOCK, "training with stock DGL on a memory-mapped array", stock, timeout_s)
    if not limited:
        return comparison
    timeout_s = min(left(), PLAIN_SECONDS + _START_SECONDS)
    if timeout_s < _LEAST_SECONDS:
        comparison.missing[PLAIN] = f"{NAMES[PLAIN]} was skipped, because the time was up"
        return comparison
    plain = replace(stock, random_access=False, val_nodes=0, most_seconds=PLAIN_SECONDS)
    run(PLAIN, "the same without MADV_RANDOM, for some seconds", plain, timeout_s)
    return comparison


def table(columns: Sequence[tuple[str, EpochResult]]) -> str:
    """A column per (title, result): seconds by stage, then the rest. Empty lines are omitted."""
    results = [result for _, result in columns]
    stages = [[title, *(_seconds(r.stages[stage]) for r in results)] for stage, title in _STAGES.items()]
    rest = [[title, *map(show, results)] for title, show in _FACTS.items()]
    lines = [[row for row in rows if set(row[1:]) != {"-"}] for rows in (stages, rest)]
    return aligned([["", *(title for title, _ in columns)], *lines[0], None, *lines[1], None], left=1)


def column_title(side: str, result: EpochResult, total: int) -> str:
    """total: the minibatches of the whole training."""
    title = "no advice" if side == PLAIN else NAMES[side]
    return title if result.batches == total else f"{title}, {result.batches} of {total}"


def speed_up(ours: EpochResult, other: EpochResult) -> float:
    """Compare seconds if both trained on the same minibatches, else rows per second."""
    if ours.batches == other.batches:
        return other.seconds / ours.seconds
    return ours.rows_per_s / other.rows_per_s


def verdict(comparison: Comparison, total: int) -> str:
    """Sentences: how much faster gids is, which sides were stopped, and why others are missing."""
    results = comparison.results
    ours, sentences = results[OURS], []
    if STOCK in results:
        factor = f"{speed_up(ours, results[STOCK]):.1f} x as"
        whole = ours.batches == results[STOCK].batches
        fast = f"{factor} fast as" if whole else f"{factor} fast, by rows/s, as"
        sentences.append(f"gids is {fast} {NAMES[STOCK]}.")
    if PLAIN in results:
        factor = f"{ours.rows_per_s / results[PLAIN].rows_per_s:,.0f} x as fast, by rows/s,"
        sentences.append(f"It is {factor} as {NAMES[PLAIN]}.")
    stopped = {side: run for side, run in results.items() if run.batches < total and side != PLAIN}
    for side, run in stopped.items():
        sentences.append(
            f"{_capital(NAMES[side])} was stopped after {run.seconds:.0f} s and {run.batches} of {total} "
            "minibatches, so compare rows/s."
        )
    if ours.choices:
        sentences.append(f"gids read {describe_choices(ours.choices)}.")
    for reason in comparison.missing.values():
        sentences.append(f"{_capital(reason)}.")
    return " ".join(sentences)


def _capital(sentence: str) -> str:
    return sentence if sentence.startswith("gids") else sentence[0].upper() + sentence[1:]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def example(path: str, fanouts: Sequence[int], batch_size: int) -> str:
    """Code that loads the features of a homogeneous dataset with gids."""
    return _EXAMPLE.format(path=path, fanouts=list(fanouts), batch_size=batch_size)
