"""`gids bench epoch`: where an epoch's time goes, with gids and with a stock loader on mapped features.

The quickstart's comparison on a user's dataset: each side runs in a new process, with a cold page cache and,
if the user may create a memory control group, with bounded memory.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from gids.bench.features import why_no_array
from gids.bench.isolation import why_no_limit
from gids.bench.plot import plot_bars
from gids.bench.report import Column, Report, Session, count, millions, percent, seconds
from gids.bench.sampling import open_table
from gids.bench.sides import (
    ADVISED,
    OURS,
    PLAIN,
    Comparison,
    EpochConfig,
    EpochResult,
    installed_framework,
)
from gids.io.engine import direct_works
from gids.loader.stats import describe_choices
from gids.sizes import format_bytes
from gids.store import FeatureStore, Table

SETTINGS = {"side": "side"}
COLUMNS = [
    Column("epoch", "epoch_s", seconds),
    Column("training", "training_s", seconds),
    Column("loading", "loading_s", seconds),
    Column("of it waiting for the disk", "reading_s", seconds),
    Column("CPU", "cpu_s", seconds),
    Column("batches", "batches", count),
    Column("rows/s", "rows_per_s", count),
    Column("MB read", "read_bytes", millions),
    Column("MB written", "written_bytes", millions),
    Column("hits %", "hit_ratio", percent),
    Column("MB RSS", "peak_rss_bytes", millions),
]
_HIDDEN = 64  # width of the hidden layers
_LEAST_BYTES = 96 << 20  # of memory for features
_MOST_S = {OURS: 0.0, ADVISED: 60.0, PLAIN: 15.0}  # time limits; stock may take hours
_LEAST_SHARE = 0.1  # of the minibatches that a side must have trained on to be compared


def measure(session: Session) -> None:
    """Fill the report. Setting: the side."""
    args, report = session.args, session.report
    framework = args.framework or installed_framework()
    module = f"gids.bench.{framework}_side"
    stock = import_module(module).STOCK  # raises at once if the framework is not installed
    store, table = open_table(args)
    check_task(store, table)
    sides = [OURS, ADVISED, PLAIN]
    if reason := why_no_array(table):
        report.note(f"only gids is measured: {table.name!r} cannot be mapped as one array, because {reason}")
        sides = [OURS]
    else:
        report.note(f"stock is {stock}")
    no_limit = why_no_limit()
    if no_limit and len(sides) > 1:
        report.note(
            f"memory was NOT limited ({no_limit}; try as root): stock can keep all features in the page "
            "cache, which it cannot if they are larger than memory"
        )
    if not direct_works(table.shard_paths):
        report.note("the file system has no direct I/O: gids reads through the page cache, too")
    comparison = Comparison(limited=not no_limit, say=report.note, module=module)
    report.subject["with"] = framework
    config = _config(store, table, session)
    session.progress.total(len(sides))
    results: dict[str, EpochResult] = {}
    for side in sides:
        most_seconds = _MOST_S[side]
        if args.seconds:  # a process needs time to start, too
            share = args.seconds / (2 * len(sides))
            most_seconds = min(share, most_seconds or share)
        result = comparison.run(replace(config, side=side, most_seconds=most_seconds))
        if result is not None:
            _add(report, result, config.batches)
            results[side] = result
        session.progress.add(1)
    for other in (ADVISED, PLAIN):
        if other in results and comparable(results[other].batches, config.batches):
            times = results[OURS].rows_per_s / results[other].rows_per_s
            report.answers.append(f"gids loads {times:.1f} x as many rows per second as {other}")


def plot(report: Report, path: Path) -> None:
    """Draw the time of a minibatch as PNG: a bar per side. Raises OSError."""
    bars = {
        str(setting["side"]): {
            stage: 1e3 * metrics[f"{stage}_s"] / metrics["batches"] for stage in ("training", "loading")
        }
        for setting, metrics in report.figures
    }
    plot_bars(path, "Time of a minibatch", bars, "ms")


def check_task(store: FeatureStore, table: Table) -> None:
    """Raise ValueError for a dataset that lacks what an epoch needs."""
    ntype = str(table.type)
    if len(store.node_types) > 1 or len(store.relations) != 1:
        raise ValueError(
            f"{store.name} has {len(store.node_types)} node types and {len(store.relations)} relations; "
            "`gids bench epoch` trains on one of each: measure it with `gids bench bandwidth`"
        )
    if table.kind != "node" or len(table.shape) != 1:
        raise ValueError(
            f"table {table.name!r} has {table.kind} rows of shape {list(table.shape)}, and training needs a "
            "vector per node: choose another --table"
        )
    labels, train = store.labels.get(ntype), store.splits.get(ntype, {}).get("train")
    are_classes = labels is not None and labels[:1].numel() <= 1 and not labels.dtype.is_floating_point
    if labels is None or not are_classes or train is None or not len(train):
        raise ValueError(f"{store.name} has no train split of nodes whose labels are classes, to train on")
    if bool((labels[train] < 0).any()):
        raise ValueError(f"{store.name} has nodes in the train split without a class: remove them from it")


def _config(store: FeatureStore, table: Table, session: Session) -> EpochConfig:
    args = session.args
    batches = -(-len(store.splits[str(table.type)]["train"]) // args.batch_size)
    batches = min(batches, args.batches or batches)
    feature_bytes = table.row_count * table.row_bytes
    memory_bytes = args.memory_limit or max(feature_bytes // 4, _LEAST_BYTES)
    if memory_bytes < _LEAST_BYTES:
        raise ValueError(
            f"--memory-limit {format_bytes(memory_bytes)} is too small for the minibatches in flight: give "
            f"{format_bytes(_LEAST_BYTES)} or more"
        )
    session.report.subject.update(
        dataset=str(store.path),
        table=table.name,
        feature_bytes=feature_bytes,
        memory_limit_bytes=memory_bytes,
        fanouts=list(args.fanouts),
        batch_size=args.batch_size,
        batches=batches,
        window=args.window,
        reads=args.reads,
    )
    scratch = [str(directory.absolute()) for directory in args.scratch]
    return EpochConfig(
        side=OURS,
        dataset=str(store.path),
        allow_dirs=tuple(args.allow_dir),
        tables=(table.name,),
        fanouts=tuple(args.fanouts),
        batch_size=args.batch_size,
        hidden=_HIDDEN,
        batches=batches,
        seed=args.seed,
        memory_bytes=memory_bytes,
        source={"window": args.window, "reads": args.reads, **({"scratch": scratch} if scratch else {})},
    )


def _add(report: Report, result: EpochResult, batches: int) -> None:
    side = result.side
    if result.wrong_rows:
        raise RuntimeError(
            f"{result.wrong_rows} of {result.compared_rows} rows from {side} differ from the dataset"
        )
    if result.cached_before > 0.01:
        report.note(f"results of {side} are WARM: {result.cached_before:.0%} of a file was in the page cache")
    if result.batches < batches:
        advice = "compare rows/s" if comparable(result.batches, batches) else "too few for a ratio"
        report.note(
            f"`{side}` was stopped after {result.batches} of {batches} minibatches in "
            f"{seconds(result.seconds)}: {advice}"
        )
    metrics = {
        "epoch_s": result.seconds,
        **{f"{stage}_s": took_s for stage, took_s in result.stages.items()},
        "cpu_s": result.cpu_seconds,
        "batches": result.batches,
        "rows": result.rows,
        "rows_per_s": result.rows_per_s,
        "read_bytes": result.read_bytes,
        "written_bytes": result.written_bytes or None,
        "hit_ratio": result.hit_ratio,
        "peak_rss_bytes": result.peak_rss_bytes,
    }
    report.add({"side": side}, metrics)
    if result.choices:
        report.note(f"gids read {describe_choices(result.choices)}")


def comparable(trained: float, batches: int) -> bool:
    """Whether a side that was stopped has trained on enough minibatches for a ratio of rows/s."""
    return trained >= _LEAST_SHARE * batches
