"""`gids verify PATH…`: read whole datasets and print every fault.

With `--against SRC`, also compare every value with what a conversion of the source makes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from gids.cli.arguments import (
    add_allow_dir,
    add_memory,
    add_path,
    add_quiet,
    add_repeated,
    add_workers,
    adder,
)
from gids.cli.convert import add_table_input, choices_of, has_columns, parse_shape
from gids.cli.progress import Progress


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="check every page, checksum and id of datasets",
        description="Read whole datasets and check every page, checksum and id. Prints one line per fault; "
        "the exit status is 1 if there are any.",
    )
    add_path(parser, "PATH", "a dataset, or a directory of parts; may be repeated", nargs="+")
    add_allow_dir(parser)
    add_workers(parser)
    text = "also compare the tables with SRC, the source that was converted to PATH; may be repeated"
    adder(parser)("--against", Path, text, [], "SRC", action="append")
    add_memory(parser)
    add_quiet(parser, "faults")
    group = parser.add_argument_group("options of SRC, as given to `gids convert`")
    option = adder(group)
    option("--from", None, "input format (default: detected)", metavar="NAME", dest="reader")
    option("--table", None, "table name of a single array", "feat", "[TYPE.]KEY")
    option("--dtype", None, "element type of raw binary", metavar="TYPE")
    option("--shape", parse_shape, "shape of raw binary", metavar="N,DIM,…")
    add_repeated(option, "--skip", "skip this array; may be repeated", "ARRAY")
    add_table_input(option)
    option("--reverse-edges", True, "add the reverse of every edge")


def run(args: argparse.Namespace) -> int:
    from gids.errors import FormatError
    from gids.store.part import part_paths

    if args.against and len(args.path) > 1:
        raise ValueError(f"--against compares one dataset (got {len(args.path)}): give one PATH")
    for path in args.path:
        if not path.exists():
            raise FileNotFoundError(f"no dataset at {path}")
        if not (path / "manifest.json").exists() and not part_paths(path):
            raise FormatError(f"{path} has no manifest.json; is it a gids dataset? `gids convert` makes one")
    try:
        return max([_verify(path, args) for path in args.path])
    except BrokenPipeError:  # of a line about a fault, which nobody reads
        return 1


def _verify(path: Path, args: argparse.Namespace) -> int:
    """Print the faults of a dataset; whether it has any."""
    from gids.store.verification import verify

    count = 0
    with Progress("verify", quiet=args.quiet) as progress:
        watch = {"on_total": progress.total, "on_bytes": progress.add}
        for fault in verify(path, allow_dirs=args.allow_dir, workers=args.workers, **watch):
            print(fault)
            count += 1
    if args.against and not count:  # a faulty dataset may not open
        count = _compare(path, args)
    if not count and not args.quiet:
        print(f"{path}: no faults")
    return 1 if count else 0


def _compare(dataset: Path, args: argparse.Namespace) -> int:
    """Print how the tables differ from the source; the number of tables that do."""
    from gids.convert.comparison import compare
    from gids.convert.edges import add_reverse_edges
    from gids.convert.readers import find_reader, open_source
    from gids.store import FeatureStore
    from gids.store.part import refuse_part

    store = FeatureStore(dataset, allow_dirs=args.allow_dir)
    refuse_part(store, "gids verify --against", "compare the whole dataset with its source")
    path, *others = args.against
    reader = find_reader(path, args.reader, others, by_column=has_columns(args))
    allow_dirs = tuple(args.allow_dir) if "--allow-dir" in reader.takes else ()
    choices = choices_of(args, others, dtype=args.dtype, allow_dirs=allow_dirs)
    count, parent = 0, store.path.parent
    beside = parent if os.access(parent, os.W_OK) else None  # else in the temporary directory
    with (
        tempfile.TemporaryDirectory(prefix="gids-verify-", dir=beside) as scratch,
        Progress("compare", quiet=args.quiet) as progress,
    ):
        source = open_source(reader, path, Path(scratch), choices)
        if args.reverse_edges:
            add_reverse_edges(source)
        progress.total(sum(t.row_count * t.row_bytes for t in store.tables.values()))
        for is_fault, sentence in compare(store, source, on_bytes=progress.add):
            if is_fault:
                print(sentence)
                count += 1
            elif not args.quiet:
                progress.say(sentence)
    return count
