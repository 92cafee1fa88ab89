"""`gids quickstart`: compares training with gids and with stock DGL on a synthetic graph, in two minutes.

It makes a graph, converts it with `gids convert`, and trains the same epoch with features that gids reads,
and with features that stock DGL reads from a memory-mapped array.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.bench.arguments import READS, numbers, positive, seconds, window
from gids.bench.session import Step
from gids.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from gids.convert.synthetic import GraphSpec
    from gids.measure.sides import Comparison, EpochConfig

SECONDS, TOTAL_SECONDS = 60.0, 150.0  # time limits of training on each side, and of the command
HIDDEN = 64  # width of the hidden layers
VAL_NODES = 64  # few, because they use full neighborhoods
NODES, LEAST_NODES = 300_000, 150_000  # the default; the least if writing NODES takes over WRITE_SECONDS
WRITE_SECONDS, WRITE_TRIAL_BYTES = 30, 64 << 20
LEAST_MEMORY_BYTES = 96 << 20


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quickstart",
        help="compare training with gids and with stock DGL on a synthetic graph",
        description="Make a synthetic graph, and train an epoch of GraphSAGE with gids, and with stock "
        "DGL on a memory-mapped array. Each runs in a new process with a cold page cache. Print the time by "
        "stage.",
    )
    add = parser.add_argument
    add(
        "--nodes",
        type=positive,
        metavar="N",
        help=f"number of nodes (default: {NODES}, or fewer if the disk writes slowly)",
    )
    add("--dim", type=positive, default=1024, metavar="D", help="float32 features per node (default: 1024)")
    add("--batch-size", type=positive, default=64, metavar="N", help="seeds per minibatch (default: 64)")
    add("--batches", type=positive, default=120, metavar="N", help="minibatches (default: 120)")
    add(
        "--fanouts",
        type=numbers(1),
        default=[3, 3, 3],
        metavar="N,…",
        help="fanout per layer (default: 3,3,3)",
    )
    add(
        "--window",
        type=window,
        default=16,
        metavar="N",
        help="minibatches that gids samples ahead, 0 to 22 (default: 16)",
    )
    add(
        "--reads",
        choices=READS,
        default="auto",
        help="how gids reads: at random, by packs, or auto: the faster of the two (default: auto)",
    )
    add(
        "--memory",
        type=parse_bytes,
        metavar="BYTES",
        help="memory of each side for features; the memory of training is added (default: a quarter of the "
        "features)",
    )
    add(
        "--seconds",
        type=seconds,
        default=SECONDS,
        metavar="S",
        help="stop each side after S seconds of training and compare rows/s "
        f"(default: {SECONDS:.0f}; 0: no limit)",
    )
    add("--seed", type=int, default=0, help="random seed (default: 0)")
    add("--dir", type=Path, metavar="DIR", help="directory for the files (default: the temporary directory)")
    add("--keep", action="store_true", help="keep the files")
    add("--json", action="store_true", help="print JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    begun = time.monotonic()
    if args.memory is not None and args.memory < LEAST_MEMORY_BYTES:
        least = format_bytes(LEAST_MEMORY_BYTES)
        raise ValueError(
            f"--memory {args.memory} is too small for the minibatches in flight; give {least} or more"
        )
    if args.nodes is None:
        args.nodes = _nodes_by_write_speed(args)
    with Step("starting"):
        import gids.dgl  # noqa: F401  (raises at once if DGL is not installed)
        from gids.bench.quickstart import compare
        from gids.convert.synthetic import GraphSpec, write_graph
        from gids.measure.sides import why_no_limit

    classes = min(16, args.nodes)
    val_count = max(classes, min(args.nodes // 10, 4 * args.batch_size))
    spec = GraphSpec(
        node_count=args.nodes,
        dim=args.dim,
        classes=classes,
        train_count=min(args.batches * args.batch_size, args.nodes - val_count),
        val_count=val_count,
        seed=args.seed,
    )
    no_limit = why_no_limit()
    with _directory(args, spec) as directory:
        size = f"{args.nodes:,} nodes, {format_bytes(spec.feature_bytes)} of features"
        with Step(f"making a graph: {size}") as step:
            write_graph(directory / "graph", spec, progress=lambda what, share: step.show(share, what))
        with Step("converting it with `gids convert graph graph.gids`"):
            _convert(directory / "graph", directory / "graph.gids")
        comparison = compare(
            _config(args, spec, directory),
            limited=not no_limit,
            total_seconds=args.seconds and max(TOTAL_SECONDS, TOTAL_SECONDS / SECONDS * args.seconds),
            begun=begun,
        )
        if args.json:
            print(json.dumps(_as_json(args, spec, no_limit, comparison), indent=2))
        else:
            print(_as_text(args, spec, no_limit, directory, comparison))
        if args.keep:
            print(f"files kept in {directory}", file=sys.stderr)
    return 0 if all(result.wrong_rows == 0 for result in comparison.results.values()) else 1


def _config(args: argparse.Namespace, spec: GraphSpec, directory: Path) -> EpochConfig:
    """The configuration of the side gids."""
    from gids.measure.sides import EpochConfig

    memory_bytes = _memory_bytes(args, spec)
    return EpochConfig(
        side="gids",
        source=str(directory / "graph"),
        dataset=str(directory / "graph.gids"),
        fanouts=tuple(args.fanouts),
        batch_size=args.batch_size,
        hidden=HIDDEN,
        batches=args.batches,
        val_nodes=VAL_NODES,
        seed=args.seed,
        memory_bytes=memory_bytes,
        gids_memory_bytes=memory_bytes,
        window=args.window,
        reads=args.reads,
        most_seconds=args.seconds,
    )


def _memory_bytes(args: argparse.Namespace, spec: GraphSpec) -> int:
    """--memory; by default a quarter of the features, or more if the minibatches in flight need more."""
    if args.memory is not None:
        return int(args.memory)
    most_rows: int = min(args.nodes, args.batch_size * math.prod(1 + fanout for fanout in args.fanouts))
    return max(spec.feature_bytes // 4, LEAST_MEMORY_BYTES + 6 * most_rows * spec.row_bytes)


@contextmanager
def _directory(args: argparse.Namespace, spec: GraphSpec) -> Iterator[Path]:
    """Make a directory with space for the graph, twice. Removes it at the end, and on Ctrl-C or SIGTERM."""
    parent = args.dir or _default_parent()
    with ExitStack() as stack:
        for folder in [folder for folder in (parent, *parent.parents) if not folder.exists()][::-1]:
            folder.mkdir()
            stack.callback(_remove_if_empty, folder)
        needed = 2 * spec.directory_bytes + (64 << 20)
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"{format_bytes(needed)} are needed and {format_bytes(free)} are free: "
                "give another --dir, or fewer --nodes",
                str(parent),
            )
        if _in_memory(parent):
            print(
                f"{parent} is in memory, so nothing is read from a disk: give a --dir on a disk",
                file=sys.stderr,
            )
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, before)
        directory = Path(tempfile.mkdtemp(prefix="gids-quickstart-", dir=parent))
        if not args.keep:
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        yield directory


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _default_parent() -> Path:
    temporary = Path(tempfile.gettempdir())
    return Path.cwd() if _in_memory(temporary) else temporary


def _in_memory(path: Path) -> bool:
    from gids.io import probe

    with tempfile.NamedTemporaryFile(dir=path) as file:
        return str(probe(file.name)["file_system"]) in ("tmpfs", "ramfs")


def _nodes_by_write_speed(args: argparse.Namespace) -> int:
    """NODES; fewer, with a message, if the graph and the dataset take long to write."""
    parent = args.dir or _default_parent()
    try:
        with tempfile.TemporaryFile(dir=next(p for p in (parent, *parent.parents) if p.exists())) as file:
            data, begun = os.urandom(WRITE_TRIAL_BYTES), time.perf_counter()
            file.write(data)
            os.fdatasync(file.fileno())
    except OSError:  # _directory() reports a full disk
        return NODES
    bytes_per_s = WRITE_TRIAL_BYTES / (time.perf_counter() - begun)
    nodes = int(bytes_per_s * WRITE_SECONDS / (2 * 4 * args.dim))
    if nodes >= NODES:
        return NODES
    nodes = max(LEAST_NODES, nodes)
    print(
        f"{parent} is slow to write ({format_bytes(int(bytes_per_s))}/s): the graph has {nodes:,} nodes "
        f"instead of {NODES:,}; set the number with --nodes",
        file=sys.stderr,
        flush=True,
    )
    return nodes


def _convert(source: Path, dataset: Path) -> None:
    from gids.cli import convert

    parser = argparse.ArgumentParser()
    convert.add_parser(parser.add_subparsers())
    convert.run(parser.parse_args(["convert", str(source), str(dataset), "--quiet"]))


def _as_text(
    args: argparse.Namespace, spec: GraphSpec, no_limit: str, directory: Path, comparison: Comparison
) -> str:
    from gids.bench.quickstart import column_title, example, table, verdict

    total = -(-spec.train_count // args.batch_size)
    columns = [(column_title(side, run, total), run) for side, run in comparison.results.items()]
    return "\n".join(
        [
            "",
            textwrap.fill(_setting(args, spec, comparison, directory, no_limit), 100),
            "",
            table(columns),
            textwrap.fill(verdict(comparison, total), 100),
            "",
            "With your own data: gids convert SOURCE mine.gids, and then",
            "",
            textwrap.indent(example("mine.gids", args.fanouts, args.batch_size), "    "),
        ]
    )


def _setting(
    args: argparse.Namespace, spec: GraphSpec, comparison: Comparison, directory: Path, no_limit: str
) -> str:
    """The text above the table: the comparison and its conditions."""
    from gids.measure.isolation import read_ahead_bytes

    ours = comparison.results["gids"]
    text = (
        f"An epoch of {len(args.fanouts)}-layer GraphSAGE, {-(-spec.train_count // args.batch_size)} "
        f"minibatches of {args.batch_size} seeds, on {os.cpu_count()} cores. Each side ran in a new process. "
        f"At its start {_share(ours.cached_before)} of the features was in the page cache. "
    )
    if no_limit:
        return text + (
            f"Memory was not limited ({no_limit}; try as root). So stock DGL can keep all features in the "
            "page cache, and the difference is smaller than with features larger than memory."
        )
    read_ahead = read_ahead_bytes(directory)
    around = "more" if read_ahead is None else format_bytes(read_ahead)
    shown = " (last column)" if "stock_without_advice" in comparison.results else ""
    return text + (
        f"The features take {format_bytes(spec.feature_bytes)}; each side may use "
        f"{format_bytes(_memory_bytes(args, spec))} of memory for them, page cache included, and "
        f"{format_bytes(ours.headroom_bytes or 0)} more for training, as measured. Stock DGL maps the "
        f"features with MADV_RANDOM, which few users set: without it{shown} the kernel reads {around} around "
        "each missing row, and evicts other rows for that."
    )


def _share(cached: float) -> str:
    return "nothing" if cached <= 0.01 else f"{cached:.0%} (it could not be emptied: results are WARM)"


def _as_json(
    args: argparse.Namespace, spec: GraphSpec, no_limit: str, comparison: Comparison
) -> dict[str, Any]:
    from gids.bench.quickstart import speed_up

    options = {
        name: value for name, value in vars(args).items() if name not in ("command", "dir", "keep", "json")
    }
    results = comparison.results
    return {
        "options": options,
        "feature_bytes": spec.feature_bytes,
        "cores": os.cpu_count(),
        "why_no_memory_limit": no_limit,
        "speed_up": speed_up(results["gids"], results["stock"]) if "stock" in results else None,
        **{side: asdict(result) for side, result in results.items()},
        **dict.fromkeys(comparison.missing),
        "why_missing": comparison.missing,
    }
