"""`gids export DATASET TABLE OUT`: write a table as an array that NumPy opens, or beside the ids of nodes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.cli.arguments import add_allow_dir, add_memory, add_path, add_quiet, adder
from gids.cli.progress import Progress
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.store import FeatureStore, Table


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a table of a dataset as a .npy, .parquet or .csv file",
        description="Write TABLE of DATASET to the file OUT, with rows in the order of the nodes or edges. "
        "NAME.npy is an array. NAME.parquet and NAME.csv, for tables of nodes, have the ids of the nodes in "
        "the column id, and the values beside them. bfloat16 (which NumPy lacks) and int8 with a scale are "
        "written as float32. A part of a partitioned dataset writes only the rows that it holds.",
    )
    option = adder(parser)
    parser.add_argument("dataset", metavar="DATASET", type=Path, help="a dataset")
    parser.add_argument("table", metavar="TABLE", help="TYPE.KEY, or KEY if only one table has it")
    add_path(parser, "OUT", "the file to make: NAME.npy, NAME.parquet or NAME.csv")
    add_allow_dir(parser)
    text = "write int8 with a scale as int8, and the float32 scales to OUT with the suffix .scale.npy"
    option("--raw", True, text)
    add_memory(parser, 64_000_000)
    option("--overwrite", True, "replace OUT when the export is done")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from gids.store import FeatureStore
    from gids.write.export import ID_SUFFIXES, export, exported_arrays

    if args.path.suffix not in ("", ".npy", *ID_SUFFIXES):
        raise ValueError(
            f"{args.path} must be called NAME.npy, NAME.parquet or NAME.csv (got {args.path.suffix!r})"
        )
    store = FeatureStore(args.dataset, allow_dirs=args.allow_dir)
    table = store.table(args.table)
    if args.path.suffix in ID_SUFFIXES:
        return _export_by_id(args, store, table)
    arrays = exported_arrays(table, args.path, raw=args.raw)
    with Progress("export", quiet=args.quiet) as progress:
        watch = {"on_total": progress.total, "on_bytes": progress.add}
        export(table, arrays, memory_bytes=args.memory, overwrite=args.overwrite, **watch)
    if not args.quiet:
        _report_part(args, table)
        for array in arrays:
            print(f"{array.path}: {array.dtype}{list(array.shape)}, {format_bytes(array.nbytes)}")
    return 0


def _export_by_id(args: argparse.Namespace, store: FeatureStore, table: Table) -> int:
    from gids.write.export import export_by_id

    if args.raw:
        raise ValueError(f"--raw is for .npy, not for {args.path}: leave it out")
    with Progress("export", quiet=args.quiet) as progress:
        progress.total(table.row_count * table.row_bytes)
        options = {"memory_bytes": args.memory, "overwrite": args.overwrite, "on_bytes": progress.add}
        export_by_id(store, table, args.path, **options)
    if not args.quiet:
        _report_part(args, table)
        size = format_bytes(args.path.stat().st_size)
        print(f"{args.path}: the ids of {table.row_count} nodes and their {table.key}, {size}")
    return 0


def _report_part(args: argparse.Namespace, table: Table) -> None:
    if table.held is not None:
        print(f"{args.dataset} is a part: these are the rows of {table.row_count} of {table.id_count} ids")
