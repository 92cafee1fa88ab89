"""`gids restripe DATASET --stripe DIR…`: move the pages of a dataset to other SSDs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gids.cli.arguments import add_allow_dir, add_quiet, add_workers, how_to_open
from gids.cli.progress import Progress


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "restripe",
        usage="gids restripe DATASET --stripe [DIR ...] [option ...]",
        help="move the pages of a dataset to other SSDs",
        description="Copy one shard of every table of DATASET to each DIR, check every page, and then remove "
        "the old shards. The dataset is unchanged until everything is copied. After that, programs that open "
        "it must allow these directories.",
    )
    add = parser.add_argument
    add("dataset", metavar="DATASET", type=Path, help="a dataset")
    add(
        "--stripe",
        nargs="*",
        required=True,
        metavar="DIR",
        help="directories that get a shard each, one per SSD; none: move everything back into DATASET",
    )
    add_allow_dir(parser)
    add_workers(parser)
    add_quiet(parser)


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
