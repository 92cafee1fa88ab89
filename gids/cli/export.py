"""`gids export DATASET TABLE OUT.npy`: write a table as an array that NumPy opens."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gids.bench.arguments import add_allow_dir
from gids.cli.arguments import add_memory, add_quiet
from gids.cli.progress import Progress
from gids.sizes import format_bytes


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a table of a dataset as a .npy file",
        description="Write TABLE of DATASET to the file OUT, with rows in order of their ids. bfloat16 "
        "(which NumPy lacks) and int8 with a scale are written as float32. A part of a "
        "partitioned dataset writes only the rows that it holds.",
    )
    add = parser.add_argument
    add("dataset", metavar="DATASET", type=Path, help="a dataset")
    add("table", metavar="TABLE", help="TYPE.KEY, or KEY if only one table has it")
    add("path", metavar="OUT", type=Path, help="the file to make, NAME.npy")
    add_allow_dir(parser)
    add(
        "--raw",
        action="store_true",
        help="write int8 with a scale as int8, and the float32 scales to OUT with the suffix .scale.npy",
    )
    add_memory(parser, 64_000_000)
    add("--overwrite", action="store_true", help="replace OUT when the export is done")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from gids.store import FeatureStore
    from gids.write.npy_export import export, exported_arrays

    table = FeatureStore(args.dataset, allow_dirs=args.allow_dir).table(args.table)
    arrays = exported_arrays(table, args.path, raw=args.raw)
    with Progress("export", quiet=args.quiet) as progress:
        export(
            table,
            arrays,
            memory_bytes=args.memory,
            overwrite=args.overwrite,
            on_total=progress.total,
            on_bytes=progress.add,
        )
    if not args.quiet:
        if table.held is not None:
            print(
                f"{args.dataset} is a part: these are the rows of {table.row_count} of {table.id_count} ids"
            )
        for array in arrays:
            print(f"{array.path}: {array.dtype}{list(array.shape)}, {format_bytes(array.nbytes)}")
    return 0
