"""`gids bench epoch`: where an epoch's time goes, with gids and with stock DGL on memory-mapped features.

The quickstart's comparison on a user's dataset: each side runs in a new process, with a cold page cache and,
if the user may create a memory control group, with bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

import gids.dgl  # noqa: F401  (raises at once if DGL is not installed)
from gids.bench import text
from gids.bench.arguments import open_table
from gids.bench.features import why_no_array
from gids.bench.isolation import why_no_limit
from gids.bench.report import Report, Session
from gids.bench.sides import ADVISED, OURS, PLAIN, Comparison, EpochConfig, EpochResult
from gids.io.engine import direct_works
from gids.loader.stats import describe_choices
from gids.sizes import format_bytes
from gids.store import FeatureStore, Table

SETTINGS = {"side": "side"}
COLUMNS = [
    text.Column("epoch", "epoch_s", text.seconds, spread=True),
    text.Column("training", "training_s", text.seconds),
    text.Column("loading", "loading_s", text.seconds),
    text.Column("of it waiting for the disk", "reading_s", text.seconds),
    text.Column("CPU", "cpu_s", text.seconds),
    text.Column("batches", "batches", text.count),
    text.Column("rows/s", "rows_per_s", text.count),
    text.Column("MB read", "read_bytes", text.millions),
    text.Column("MB written", "written_bytes", text.millions),
    text.Column("hits %", "hit_ratio", text.percent),
    text.Column("MB RSS", "peak_rss_bytes", text.millions),
]
_HIDDEN = 64  # width of the hidden layers
_LEAST_BYTES = 96 << 20  # of memory for features
_MOST_S = {OURS: 0.0, ADVISED: 60.0, PLAIN: 15.0}  # time limits; stock may take hours
_LEAST_SHARE = 0.1  # of the minibatches that a side must have trained on to be compared


def measure(session: Session) -> None:
    """Fill the report. Setting: the side."""
    args, report = session.args, session.report
    store, table = open_table(args)
    target, tables = choose_task(store, table)
    sides = [OURS, ADVISED, PLAIN]
    for chosen in tables:
        if reason := why_no_array(chosen):
            report.note(
                f"only gids is measured: stock DGL cannot map table {chosen.name!r}, because {reason}"
            )
            sides = [OURS]
            break
    no_limit = why_no_limit()
    if no_limit and len(sides) > 1:
        report.note(
            f"memory was NOT limited ({no_limit}; try as root): stock DGL can keep all features in the page "
            "cache, which it cannot if they are larger than memory"
        )
    if not direct_works([path for chosen in tables for path in chosen.shard_paths]):
        report.note("the file system has no direct I/O: gids reads through the page cache, too")
    comparison = Comparison(limited=not no_limit, say=report.note)
    config = _config(store, target, tables, session)
    session.progress.total(args.repeat * len(sides))
    for side in sides * args.repeat:
        most_seconds = _MOST_S[side]
        if args.seconds:  # a process needs time to start, too
            share = args.seconds / (2 * args.repeat * len(sides))
            most_seconds = min(share, most_seconds or share)
        result = comparison.run(replace(config, side=side, most_seconds=most_seconds))
        if result is not None:
            _add(report, result, config.batches)
        session.progress.add(1)


def choose_task(store: FeatureStore, table: Table) -> tuple[str, list[Table]]:
    """(the node type to classify, a table of features for each node type) if `table` is the chosen table.

    Other node types have the table with the same key, or their largest one. Raises ValueError for a dataset
    that lacks what an epoch needs.
    """
    vectors = [t for t in store.tables.values() if t.kind == "node" and len(t.shape) == 1]
    if table not in vectors:
        names = ", ".join(t.name for t in vectors) or "none here: convert features of nodes as vectors"
        raise ValueError(
            f"table {table.name!r} has {table.kind} rows of shape {list(table.shape)}, and training needs a "
            f"vector per node: choose another table by --table ({names})"
        )
    by_type: dict[str, Table] = {}
    for each in sorted(vectors, key=lambda t: (t is table, t.key == table.key, t.row_bytes)):
        by_type[str(each.type)] = each
    none = torch.zeros(0, dtype=torch.int64)
    targets = [
        ntype
        for ntype, labels in store.labels.items()
        if _are_classes(labels, store.splits.get(ntype, {}).get("train", none))
    ]
    if not targets:
        raise ValueError(f"{store.name} has no train split of nodes whose labels are classes, to train on")
    if len(targets) > 1 and table.type not in targets:
        raise ValueError(
            f"nodes of the types {', '.join(targets)} have labels: choose one type by its --table"
        )
    return str(table.type) if table.type in targets else targets[0], list(by_type.values())


def _are_classes(labels: Tensor, train: Tensor) -> bool:
    """Whether the nodes of a train split have classes; other nodes may have none, -1."""
    is_whole = labels.dim() == 1 and not labels.dtype.is_floating_point
    return is_whole and len(train) > 0 and bool((labels[train] >= 0).all())


def _config(store: FeatureStore, target: str, tables: list[Table], session: Session) -> EpochConfig:
    args = session.args
    batches = -(-len(store.splits[target]["train"]) // args.batch_size)
    batches = min(batches, args.batches or batches)
    feature_bytes = sum(table.row_count * table.row_bytes for table in tables)
    memory_bytes = args.memory_limit or max(feature_bytes // 4, _LEAST_BYTES)
    if memory_bytes < _LEAST_BYTES:
        raise ValueError(
            f"--memory-limit {format_bytes(memory_bytes)} is too small for the minibatches in flight: give "
            f"{format_bytes(_LEAST_BYTES)} or more"
        )
    session.report.subject.update(
        dataset=str(store.path),
        table=", ".join(table.name for table in tables),
        target=target,
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
        tables=tuple(table.name for table in tables),
        target=target,
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
            f"{text.seconds(result.seconds)}: {advice}"
        )
    report.figure(side=side).add(
        epoch_s=result.seconds,
        **{f"{stage}_s": seconds for stage, seconds in result.stages.items()},
        cpu_s=result.cpu_seconds,
        batches=result.batches,
        rows=result.rows,
        rows_per_s=result.rows_per_s,
        read_bytes=result.read_bytes,
        written_bytes=result.written_bytes or None,
        hit_ratio=result.hit_ratio,
        peak_rss_bytes=result.peak_rss_bytes,
    )
    if result.choices:
        report.note(f"gids read {describe_choices(result.choices)}")
    report.answers = list(_ratios(report, batches))


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
