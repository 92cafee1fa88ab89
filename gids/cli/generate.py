"""`gids generate OUT`: write a synthetic graph as a dataset, or as files that `gids convert` takes."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.cli.arguments import add_path, add_quiet, adder, checked
from gids.cli.progress import Progress
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.convert.synthetic import GraphSpec
    from gids.store.names import Relation


def _whole(text: str) -> int:
    if text.isdigit():
        return int(text)
    count = float(text)
    if count != int(count):
        raise ValueError
    return int(count)


_count = checked(_whole, lambda n: n >= 0, "an integer of 0 or more: write 1000000 or 1e6")

_split = checked(
    lambda text: tuple(map(float, text.split(","))),
    lambda shares: len(shares) == 3 and min(shares) >= 0 and sum(shares) <= 1 + 1e-9,
    "three fractions with a sum of at most 1: write 0.1,0.05,0.05",
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="make a synthetic graph with labels that can be learned",
        description="Write a power-law graph, features, labels and splits: as a dataset if OUT ends in "
        ".gids, else to a directory of .npy files that `gids convert` takes. The same options give the same "
        "graph. The features of a node show its class only half of the time; the features of its neighbors "
        "together show it.",
    )
    option = adder(parser)
    add_path(parser, "OUT", "the dataset or the directory to make")
    option("--nodes", _count, "number of nodes (default: 1e6)", 1_000_000, "N")
    option("--edges", _count, "number of edges, on average (default: 16 per node)", metavar="N")
    option("--dim", int, "values of a row of features", 128, "D")
    option("--dtype", ("float32", "float16"), "type of the features", "float32")
    option("--classes", int, "number of classes, at most one per node (default: 16)", metavar="N")
    text = "make two node types: N papers that cite papers, and N / 2 authors that write them"
    option("--hetero", True, text)
    text = "train, val and test fractions of the nodes"
    option("--split", _split, text, (0.1, 0.05, 0.05), "F,F,F")
    option("--seed", int, "seed of the random draws", 0)
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from gids.convert.synthetic import TWO_RELATIONS, GraphSpec, write_dataset

    ends = [min(args.nodes, round(share * args.nodes)) for share in accumulate(args.split)]
    train, val, test = (end - begin for begin, end in pairwise([0, *ends]))
    edges = 16 * args.nodes if args.edges is None else args.edges
    spec = GraphSpec(
        node_count=args.nodes,
        degree=edges / max(1, args.nodes),
        dim=args.dim,
        classes=min(16, args.nodes) if args.classes is None else args.classes,
        train_count=train,
        val_count=val,
        test_count=test,
        seed=args.seed,
        dtype=args.dtype,
    )
    size_bytes = spec.directory_bytes + (spec.feature_bytes // 2 if args.hetero else 0)
    _check_new(args.path, size_bytes)
    relations = TWO_RELATIONS if args.hetero else ()
    is_dataset = args.path.name.endswith(".gids")
    with Progress("generate", quiet=args.quiet, unit="%") as progress:
        if is_dataset:
            write_dataset(args.path, spec, relations=relations, progress=progress.share)
        else:
            _write_directory(args.path, spec, relations, progress)
    if not args.quiet:
        written = sum(file.stat().st_size for file in args.path.rglob("*") if file.is_file())
        target = args.path.with_name(args.path.name + ".gids")
        now = f"gids info {args.path}" if is_dataset else f"gids convert {args.path} {target}"
        print(f"{args.path}: {format_bytes(written)}; now: {now}")
    return 0


def _write_directory(path: Path, spec: GraphSpec, relations: Sequence[Relation], progress: Progress) -> None:
    """Write to a temporary path, and rename it at the end."""
    from gids.convert.synthetic import write_graph

    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write_graph(partial, spec, relations=relations, progress=progress.share)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_new(path: Path, size_bytes: int) -> None:
    """Raise FileExistsError if something is at path, and StorageError without space."""
    from gids.write.files import check_space

    if path.exists():
        raise FileExistsError(f"{path} already exists: choose another name, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    check_space([(path.parent, size_bytes)])
