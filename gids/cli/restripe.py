"""`gids restripe DATASET --stripe DIR…`: moves the pages of a dataset to other SSDs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from gids.cli.allow_dirs import how_to_open
from gids.cli.progress import Progress


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "restripe",
        usage="gids restripe DATASET --stripe [DIR ...] [option ...]",
        help="spread the pages of a dataset over other SSDs",
        description="Put one shard of every table of DATASET into each DIR, by a copy that is checked, and "
        "remove the old shards. The dataset stays as it was until all is copied. Whoever opens it then must "
        "allow the directories.",
    )
    add = parser.add_argument
    add("dataset", metavar="DATASET", type=Path)
    add(
        "--stripe",
        nargs="*",
        required=True,
        metavar="DIR",
        help="all directories that are to have a shard, one per SSD; none: back into DATASET",
    )
    add(
        "--allow-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a directory outside the dataset in which shards lie now",
    )
    workers = min(4, os.cpu_count() or 1)
    add("--workers", type=int, default=workers, metavar="N", help=f"threads (default: {workers})")
    add("--quiet", action="store_true", help="print errors only")


def run(args: argparse.Namespace) -> int:
    from gids.write import restripe

    with Progress("restripe", quiet=args.quiet) as progress:
        restripe(
            args.dataset,
            args.stripe,
            allow_dirs=args.allow_dir,
            workers=args.workers,
            on_total=progress.total,
            on_bytes=progress.add,
        )
    if not args.quiet:
        shards = max(1, len(args.stripe))
        print(f"{args.dataset}: {shards} shard{'s' * (shards != 1)} of each table")
        if args.stripe:
            print(how_to_open(args.dataset, args.stripe))
    return 0
