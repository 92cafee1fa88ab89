"""The output: the table, the verdict and example code. Called by gids.cli.quickstart and bench/epoch.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gids.measure.choices import describe_choices
from gids.measure.sides import EpochResult
from gids.quickstart.comparison import NAMES, OURS, PLAIN, STOCK, Comparison

_STAGES = {
    "sampling": "sampling",
    "planning": "planning reads",
    "reading": "waiting for features",
    "gather": "copying features",
    "training": "training",
}

_EXAMPLE = """\
import gids.dgl, dgl  # gids before dgl
source = gids.open({path!r})  # memory="16GB", window=16, ...
graph = gids.dgl.graph(source)
sampler = dgl.dataloading.NeighborSampler({fanouts}, prefetch_node_feats=["feat"], prefetch_labels=["label"])
loader = gids.dgl.DataLoader(graph, source.split("train"), sampler, gids=source, batch_size={batch_size})
for input_nodes, output_nodes, blocks in loader: ...  # blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]
"""


def table(columns: Sequence[tuple[str, EpochResult]]) -> str:
    """A column per (title, result): seconds by stage, then the rest. Empty lines are omitted."""
    stages = [
        (title, [_seconds(result.stages[stage]) for _, result in columns]) for stage, title in _STAGES.items()
    ]
    rest: dict[str, Callable[[EpochResult], str]] = {
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
    facts = [(title, [show(result) for _, result in columns]) for title, show in rest.items()]
    sections = [[line for line in lines if set(line[1]) != {"-"}] for lines in (stages, facts)]
    titles = [title for title, _ in columns]
    first = max(len(title) for lines in sections for title, _ in lines)
    width = max(
        len(cell) for cells in [titles, *(c for lines in sections for _, c in lines)] for cell in cells
    )

    def line(title: str, cells: Sequence[str]) -> str:
        return title.ljust(first) + "".join(f"   {cell:>{width}}" for cell in cells)

    rule = "-" * len(line("", titles))
    body = [[line(title, cells) for title, cells in lines] for lines in sections]
    return "\n".join([line("", titles), rule, *body[0], rule, *body[1], rule])


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
