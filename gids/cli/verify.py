"""`gids verify PATH`: reads all of a dataset and reports every byte that is not as it was written.

With `--against SRC`, also every value that is not the source's, or not as near as it was rounded.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from gids.cli.convert import load_graphs, parse_shape
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
    parser.add_argument(
        "--against",
        metavar="SRC",
        type=Path,
        help="compare the tables with what `gids convert SRC PATH` was given",
    )
    of_source = parser.add_argument_group("of SRC, as for `gids convert`")
    of_source.add_argument("--from", dest="reader", metavar="NAME")
    of_source.add_argument("--table", default="feat", metavar="[TYPE.]KEY")
    of_source.add_argument("--dtype", metavar="TYPE", help="of raw binary")
    of_source.add_argument("--shape", type=parse_shape, metavar="N,DIM,…")
    of_source.add_argument("--skip", action="append", default=[], metavar="ARRAY")
    of_source.add_argument("--reverse-edges", action="store_true")
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
    if args.against is not None and not count:  # what cannot be opened cannot be compared
        count = _compare(args)
    if not count and not args.quiet:
        print(f"{args.path}: no faults")
    return 1 if count else 0


def _compare(args: argparse.Namespace) -> int:
    """Print what differs from the source; how many tables do."""
    from gids.convert.comparison import compare
    from gids.convert.edge_options import add_reverse_edges
    from gids.convert.readers import Choices, find_reader, open_source
    from gids.store import FeatureStore

    store = FeatureStore(args.path, allow_dirs=args.allow_dir)
    reader = find_reader(args.against, args.reader)
    choices = Choices(
        table=args.table,
        dtype=args.dtype,
        shape=args.shape,
        skip=tuple(args.skip),
        load_graphs=load_graphs,
    )
    count = 0
    with (
        tempfile.TemporaryDirectory(prefix="gids-verify-", dir=store.path.parent) as scratch,
        Progress("compare", quiet=args.quiet) as progress,
    ):
        source = open_source(reader, args.against, Path(scratch), choices)
        if args.reverse_edges:
            add_reverse_edges(source)
        progress.total(sum(t.row_count * t.row_bytes for t in store.tables.values()))
        for table in compare(store, source, on_bytes=progress.add):
            if table.fault:
                print(table.fault)
                count += 1
            elif not args.quiet:
                progress.say(table.said)
    return count
