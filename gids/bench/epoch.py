"""`gids bench epoch`: where an epoch's time goes, with gids and with stock DGL on memory-mapped features.

The quickstart's comparison on a user's dataset: each side runs in a new process, with a cold page cache and,
if the user may create a memory control group, with bounded memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import gids.dgl  # noqa: F401  (raises at once if DGL is not installed)
from gids.bench import text
from gids.bench.arguments import check_known, open_table
from gids.bench.report import Report, Session
from gids.bench.sampling import endless, input_nodes, make_sampler
from gids.io.engine import direct_works
from gids.loader.stats import describe_choices
from gids.measure import sides
from gids.measure.features import why_no_array
from gids.measure.isolation import read_ahead_bytes
from gids.measure.sides import EpochConfig, EpochResult
from gids.sizes import format_bytes
from gids.store import FeatureStore, Table

SETTINGS = {"side": "side"}
STAGES = {
    "sampling": "sampling",
    "planning": "planning",
    "reading": "waiting",
    "gather": "copying",
    "training": "training",
}
COLUMNS = [
    text.Column("epoch", "epoch_s", text.seconds, spread=True),
    *(text.Column(title, f"{stage}_s", text.seconds) for stage, title in STAGES.items()),
    text.Column("CPU", "cpu_s", text.seconds),
    text.Column("batches", "batches", text.count),
    text.Column("rows/s", "rows_per_s", text.count),
    text.Column("MB read", "read_bytes", text.millions),
    text.Column("MB written", "written_bytes", text.millions),
    text.Column("hits %", "hit_ratio", text.percent),
    text.Column("MB RSS", "peak_rss_bytes", text.millions),
]
OURS, ADVISED, PLAIN = "gids", "stock, MADV_RANDOM", "stock"
SIDES = {"gids": OURS, "stock-random": ADVISED, "stock": PLAIN}
_HIDDEN = 64  # width of the hidden layers
_LEAST_BYTES = 96 << 20  # of memory for features
_STOCK_S, _PLAIN_S = 60.0, 15.0  # time limits of stock with and without advice: it may take hours
_LEAST_SHARE = 0.1  # of the minibatches that a side must have trained on to be compared
_START_S = 120  # time limit of the rest of a process: imports, topology, validation


def measure(session: Session) -> None:
    """Fill the report. Setting: the side."""
    args, report = session.args, session.report
    store, table = open_table(args)
    task = choose_task(store, table)
    names = _sides(task.tables, session)
    no_limit = sides.why_no_limit()
    if no_limit:
        report.note(
            f"memory was NOT limited ({no_limit}; try as root): stock DGL can keep all features in the page "
            "cache, which it cannot if they are larger than memory"
        )
    if PLAIN in names and (around := read_ahead_bytes(store.path)):
        report.note(
            f'"{PLAIN}" reads up to {format_bytes(around)} for each missing page, which is the read-ahead of '
            f'this disk (read_ahead_kb); "{ADVISED}" reads only the page'
        )
    if not direct_works([path for chosen in task.tables for path in chosen.shard_paths]):
        report.note("the file system has no direct I/O: gids reads through the page cache, too")
    comparison = sides.Comparison(limited=not no_limit, say=report.note)
    ours = _config(store, task, session)
    configs = {
        OURS: ours,
        ADVISED: replace(ours, side="stock", random_access=True, most_seconds=_STOCK_S),
        PLAIN: replace(ours, side="stock", random_access=False, most_seconds=_PLAIN_S),
    }
    plan = [name for turn in range(args.repeat) for name in (names if turn % 2 == 0 else names[::-1])]
    session.progress.total(len(plan))
    end = time.monotonic() + args.seconds if args.seconds else math.inf
    for number, name in enumerate(plan):
        if (left_s := end - time.monotonic()) <= 0:
            report.partial = "time"
            break
        config, timeout_s = _in_time(configs[name], left_s / (len(plan) - number))
        result = comparison.run(name, config, timeout_s=timeout_s)
        if result is not None:
            report.subject.update(headroom_bytes=comparison.headroom_bytes)
            _add(report, name, result, config)
        session.progress.add(1)


@dataclass(frozen=True)
class Task:
    """target: the node type that is classified. tables: the features of each node type that has them."""

    target: str
    tables: list[Table]


def choose_task(store: FeatureStore, table: Table) -> Task:
    """The task of a dataset with the features `table`. Raises ValueError if it lacks what an epoch needs.

    Of their tables with a vector per node, other node types have the one with the same key, or the largest.
    If several types have classes and a train split, the target is that of the table.
    """
    by_type: dict[str, list[Table]] = {}
    for candidate in store.tables.values():
        if candidate.kind == "node":
            by_type.setdefault(str(candidate.type), []).append(candidate)
    tables = [
        max(candidates, key=lambda t: (t is table, _is_vector(t), t.key == table.key, t.row_bytes))
        for candidates in by_type.values()
    ]
    for chosen in tables if table in tables else [table]:
        if not _is_vector(chosen):
            vectors = [t for t in store.tables.values() if _is_vector(t)]
            names = ", ".join(t.name for t in vectors if chosen.kind == "edge" or t.type == chosen.type)
            cure = (
                f"choose another table by --table ({names})"
                if names
                else "convert features of nodes as vectors"
            )
            raise ValueError(
                f"table {chosen.name!r} has {chosen.kind} rows of shape {list(chosen.shape)}, and training "
                f"needs a vector per node: {cure}"
            )
    train = {t: store.splits.get(t, {}).get("train", torch.zeros(0, dtype=torch.int64)) for t in store.labels}
    classified = [ntype for ntype, labels in store.labels.items() if _are_classes(labels, train[ntype])]
    if not classified:
        raise ValueError(f"{store.name} has no labels that are classes; this comparison needs them")
    targets = [ntype for ntype in classified if len(train[ntype])]
    if not targets:
        raise ValueError(f"no node with classes of {store.name} is in a train split, to train on")
    if len(targets) > 1 and table.type not in targets:
        raise ValueError(
            f"nodes of {store.name} of the types {', '.join(targets)} have labels and a train split: choose "
            "one type by its --table"
        )
    return Task(str(table.type) if table.type in targets else targets[0], tables)


def _is_vector(table: Table) -> bool:
    return table.kind == "node" and len(table.shape) == 1


def _are_classes(labels: Tensor, train: Tensor) -> bool:
    """Whether labels are classes; other nodes than those of the train split may have none, -1."""
    is_whole = labels.dim() == 1 and not labels.dtype.is_floating_point
    return is_whole and bool((labels >= 0).any() and (labels[train] >= 0).all())


def _sides(tables: list[Table], session: Session) -> list[str]:
    """The sides to run. Raises ValueError for an unknown one, and for stock if it cannot map a table."""
    names = session.args.sides
    for name in names or ():
        check_known("--sides", name, tuple(SIDES))
    chosen = [SIDES[name] for name in SIDES if names is None or name in names]
    table, reason = next(((t, reason) for t in tables if (reason := why_no_array(t))), (None, ""))
    if table is None or chosen == [OURS]:
        return chosen
    cannot = f"stock DGL cannot map table {table.name!r}"
    if names is not None:
        raise ValueError(f"{cannot}: {reason}; use --sides gids")
    session.report.note(f"only gids is measured: {cannot}, because {reason}")
    return [OURS]


def _config(store: FeatureStore, task: Task, session: Session) -> EpochConfig:
    args = session.args
    batches = -(-len(store.splits[task.target]["train"]) // args.batch_size)
    batches = min(batches, args.batches) if args.batches > 0 else batches
    feature_bytes = sum(table.row_count * table.row_bytes for table in task.tables)
    memory_bytes = _memory_bytes(store, task, feature_bytes, session)
    session.report.subject.update(
        dataset=str(store.path),
        table=", ".join(table.name for table in task.tables),
        feature_bytes=feature_bytes,
        memory_limit_bytes=memory_bytes,
        fanouts=list(args.fanouts),
        batch_size=args.batch_size,
        batches=batches,
        window=args.window,
        reads=args.reads,
    )
    if len(store.node_types) > 1:
        session.report.subject.update(target=task.target)
    return EpochConfig(
        side="gids",
        dataset=str(store.path),
        tables=tuple(table.name for table in task.tables),
        target=task.target,
        fanouts=tuple(args.fanouts),
        batch_size=args.batch_size,
        hidden=_HIDDEN,
        batches=batches,
        seed=args.seed,
        memory_bytes=memory_bytes,
        gids_memory_bytes=memory_bytes,
        window=args.window,
        reads=args.reads,
        scratch=tuple(str(directory.absolute()) for directory in args.scratch),
        allow_dirs=tuple(args.allow_dir),
        shards=tuple(str(shard) for table in task.tables for shard in table.shard_paths),
    )


def _memory_bytes(store: FeatureStore, task: Task, feature_bytes: int, session: Session) -> int:
    """--memory-limit; by default a quarter of the features, or more for large minibatches."""
    args = session.args
    if args.memory_limit is not None:
        if args.memory_limit < _LEAST_BYTES:
            raise ValueError(
                f"--memory-limit {format_bytes(args.memory_limit)} is too small for the minibatches in "
                f"flight: give {format_bytes(_LEAST_BYTES)} or more"
            )
        return int(args.memory_limit)
    sampler = make_sampler("neighbor", args.fanouts, args.batch_size)
    minibatch = next(endless(store, sampler, seeds="train", batch_size=args.batch_size, seed=args.seed))
    row_bytes = sum(len(input_nodes(minibatch, str(t.type))) * t.row_bytes for t in task.tables)
    blocks = 2 * minibatch.nbytes  # DGL's minibatches take about twice the memory of ours
    return max(feature_bytes // 4, _LEAST_BYTES + 8 * row_bytes + 24 * blocks)


def _in_time(config: EpochConfig, seconds: float) -> tuple[EpochConfig, float]:
    """(the configuration of a run that may take so many seconds, after how many it is killed)."""
    if math.isinf(seconds):
        return config, config.most_seconds + 2 * _START_S if config.most_seconds else 24 * 3600
    # a process needs time to start, too
    most = max(0.1, min(seconds / 2, config.most_seconds or seconds))
    return replace(config, most_seconds=most), seconds + _START_S


def _add(report: Report, name: str, result: EpochResult, config: EpochConfig) -> None:
    if result.wrong_rows:
        raise RuntimeError(
            f"{result.wrong_rows} of {result.compared_rows} rows from {name} differ from the dataset"
        )
    if result.cached_before > 0.01:
        report.note(f"results of {name} are WARM: {result.cached_before:.0%} of a file was in the page cache")
    if result.batches < config.batches:
        advice = "compare rows/s" if comparable(result.batches, config.batches) else "too few for a ratio"
        message = (
            f"`{name}` was stopped after {result.batches} of {config.batches} minibatches in "
            f"{text.seconds(result.seconds)}: {advice}"
        )
        report.note(message)
        if not config.most_seconds or result.seconds < config.most_seconds:
            report.partial = "time"
    report.figure(side=name).add(
        epoch_s=result.seconds,
        **{f"{stage}_s": result.stages[stage] or None for stage in STAGES},
        cpu_s=result.cpu_seconds,
        batches=result.batches,
        rows=result.rows,
        rows_per_s=result.rows_per_s,
        read_bytes=result.read_bytes,
        written_bytes=result.written_bytes or None,
        hit_ratio=result.hit_ratio,
        base_rss_bytes=result.base_rss_bytes,
        peak_rss_bytes=result.peak_rss_bytes,
    )
    if result.choices:
        report.note(f"gids read {describe_choices(result.choices)}")
    report.answers = list(_ratios(report, config.batches))


def comparable(trained: float, batches: int) -> bool:
    """Whether a side that was stopped has trained on enough minibatches for a ratio of rows/s."""
    return trained >= _LEAST_SHARE * batches


def _ratios(report: Report, batches: int) -> Iterator[str]:
    """A sentence for each side of stock that trained on enough minibatches; with MADV_RANDOM first."""
    ours = report.figure(side=OURS).median("rows_per_s")
    for other in (ADVISED, PLAIN):
        figure = report.figure(side=other)
        theirs, trained = figure.median("rows_per_s"), figure.median("batches")
        if ours and theirs and comparable(trained or 0, batches):
            yield f"gids loads {ours / theirs:.1f} x as many rows per second as {other}"
