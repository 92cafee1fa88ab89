"""`gids generate DIR`: write a synthetic graph as files that `gids convert` takes."""

from __future__ import annotations

import argparse
import os
import shutil
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from gids.cli.arguments import add_path, add_quiet, adder, checked
from gids.cli.progress import Progress
from gids.sizes import format_bytes


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
        description="Write a power-law graph, features, labels and splits to the directory DIR, as .npy "
        "files that `gids convert` takes. The same options give the same bytes. The features of a node show "
        "its class only half of the time; the features of its neighbors together show it.",
    )
    option = adder(parser)
    add_path(parser, "DIR", "the directory to make")
    option("--nodes", _count, "number of nodes (default: 1e6)", 1_000_000, "N")
    option("--edges", _count, "number of edges, on average (default: 16 per node)", metavar="N")
    option("--dim", int, "float32 features per node", 128, "D")
    option("--classes", int, "number of classes, at most one per node (default: 16)", metavar="N")
    text = "make two node types: N papers that cite papers, and N / 2 authors that write them"
    option("--hetero", True, text)
    text = "train, val and test fractions of the nodes"
    option("--split", _split, text, (0.1, 0.05, 0.05), "F,F,F")
    option("--seed", int, "seed of the random draws", 0)
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from gids.convert.synthetic import GraphSpec, write_graph

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
    )
    size_bytes = spec.directory_bytes + (spec.feature_bytes // 2 if args.hetero else 0)
    partial = _partial_path(args.path, size_bytes)
    try:
        with Progress("generate", quiet=args.quiet, unit="%") as progress:
            write_graph(partial, spec, typed=args.hetero, progress=progress.share)
        partial.rename(args.path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if not args.quiet:
        target = args.path.with_name(args.path.name + ".gids")
        size_bytes = sum(file.stat().st_size for file in args.path.rglob("*.npy"))
        print(f"{args.path}: {format_bytes(size_bytes)}; now: gids convert {args.path} {target}")
    return 0


def _partial_path(path: Path, size_bytes: int) -> Path:
    """The temporary path, to be renamed to path. Raises FileExistsError, and StorageError without space."""
    from gids.write.files import check_space

    if path.exists():
        raise FileExistsError(f"{path} already exists: choose another name, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    check_space([(path.parent, size_bytes)])
    return path.with_name(f"{path.name}.{os.getpid()}.partial")
