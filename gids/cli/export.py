"""`gids export DATASET TABLE OUT.npy`: a table back as an array that NumPy opens."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from gids.cli.progress import Progress
from gids.cli.sizes import format_bytes, parse_bytes


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a table of a dataset as a .npy file",
        description="Write TABLE (TYPE.KEY, or KEY where only one has it) of DATASET to OUT, rows in "
        "order of their ids. bfloat16, which NumPy lacks, is written as float32.",
    )
    add = parser.add_argument
    add("dataset", metavar="DATASET", type=Path)
    add("table", metavar="TABLE")
    add("path", metavar="OUT", type=Path)
    add(
        "--allow-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a directory outside the dataset in which shards may lie",
    )
    add("--memory", type=parse_bytes, default=64_000_000, metavar="BYTES", help="of buffers (default: 64MB)")
    add("--overwrite", action="store_true", help="replace OUT, in one step at the end")
    add("--quiet", action="store_true", help="print errors only")


def run(args: argparse.Namespace) -> int:
    from gids.store import FeatureStore
    from gids.store.convert.space import check_space

    table = FeatureStore(args.dataset, allow_dirs=args.allow_dir).table(args.table)
    if args.path.exists() and not args.overwrite:
        raise FileExistsError(f"{args.path} exists; choose another name, or --overwrite it")
    dtype = _array_dtype(table.dtype)
    width = table.row_bytes // table.dtype.itemsize * _itemsize(dtype)
    check_space([(args.path.resolve().parent, table.row_count * width)], [])
    partial = args.path.with_name(f"{args.path.name}.{os.getpid()}.partial")
    # Two blocks of pages, and of rows, are held.
    rows_per_block = max(
        1, args.memory // (4 * max(table.row_bytes, table.page_bytes // table.rows_per_page))
    )
    try:
        with open(partial, "wb") as file, Progress("export", quiet=args.quiet) as progress:
            progress.total(table.row_count * width)
            file.write(_header(dtype, (table.row_count, *table.shape)))
            for _, rows in table.scan(rows_per_block):
                values = rows if str(rows.dtype) != "torch.bfloat16" else rows.float()
                file.write(values.numpy().data)
                progress.add(values.nbytes)
            file.flush()
            os.fdatasync(file.fileno())
        partial.replace(args.path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if not args.quiet:
        print(
            f"{args.path}: {dtype}{[table.row_count, *table.shape]}, {format_bytes(table.row_count * width)}"
        )
    return 0


def _array_dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return "float32" if name == "bfloat16" else name


def _itemsize(dtype: str) -> int:
    import numpy as np

    return np.dtype(dtype).itemsize


def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    from gids.store.files import npy_header

    return npy_header(dtype, shape)
