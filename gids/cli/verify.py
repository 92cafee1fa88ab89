"""`gids verify PATH`: reads all of a dataset and reports every byte that is not as it was written."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from gids.cli.progress import Progress


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="check every page, checksum and id of a dataset",
        description="Check every page, checksum and id of a dataset. A line per fault; exit status 1.",
    )
    parser.add_argument("path", metavar="PATH", type=Path)
    parser.add_argument(
        "--allow-dir", action="append", default=[], metavar="DIR", help="where shards may lie outside PATH"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(4, os.cpu_count() or 1),
        metavar="N",
        help="threads (default: %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="print faults only")


def run(args: argparse.Namespace) -> int:
    from gids.store.verify import verify

    if not args.path.exists():
        raise FileNotFoundError(f"no dataset at {args.path}")
    count = 0
    with Progress("verify", quiet=args.quiet) as progress:
        checked = verify(
            args.path,
            allow_dirs=args.allow_dir,
            workers=args.workers,
            on_total=progress.total,
            on_bytes=progress.add,
        )
        for fault in checked:
            print(fault)
            count += 1
    if not count and not args.quiet:
        print(f"{args.path}: no faults")
    return 1 if count else 0
