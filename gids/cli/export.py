"""`gids export DATASET TABLE OUT.npy`: a table back as an array that NumPy opens."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gids.cli.progress import Progress
from gids.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    import numpy as np

    from gids.store import Table


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a table of a dataset as a .npy file",
        description="Write TABLE (TYPE.KEY, or KEY where only one has it) of DATASET to OUT, rows in "
        "order of their ids. bfloat16, which NumPy lacks, and int8 with a scale are written as float32.",
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
    add(
        "--raw",
        action="store_true",
        help="of a table of int8 with a scale: the int8, and the scales as float32 in OUT.scale.npy",
    )
    add("--memory", type=parse_bytes, default=64_000_000, metavar="BYTES", help="of buffers (default: 64MB)")
    add("--overwrite", action="store_true", help="replace OUT, in one step at the end")
    add("--quiet", action="store_true", help="print errors only")


@dataclass(frozen=True)
class _Part:
    """An array that is written: whole, or by of(rows as they are stored, uint8[n, row_bytes])."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    of: Callable[[np.ndarray], np.ndarray] | None = None
    whole: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        import numpy as np

        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def run(args: argparse.Namespace) -> int:
    from gids.store import FeatureStore
    from gids.store.files import npy_header
    from gids.write.space import check_space

    table = FeatureStore(args.dataset, allow_dirs=args.allow_dir).table(args.table)
    parts = list(_raw_parts(table, args.path) if args.raw else _parts(table, args.path))
    for part in parts:
        if part.path.exists() and not args.overwrite:
            raise FileExistsError(f"{part.path} exists; choose another name, or --overwrite it")
    size_bytes = sum(part.nbytes for part in parts)
    check_space([(args.path.resolve().parent, size_bytes)], [])
    # Two blocks of pages, and of rows, are held.
    out_row_bytes = size_bytes // max(1, table.row_count)
    widest = max(table.row_bytes, out_row_bytes, table.page_bytes // table.rows_per_page)
    rows_per_block = max(1, args.memory // (4 * widest))
    with ExitStack() as stack:
        files = [stack.enter_context(_replacing(part.path)) for part in parts]
        progress = stack.enter_context(Progress("export", quiet=args.quiet))
        progress.total(size_bytes)
        for file, part in zip(files, parts, strict=True):
            file.write(npy_header(part.dtype, part.shape))
            if part.whole is not None:
                file.write(part.whole.data)
        for _, rows in table.scan(rows_per_block, stored=True):
            for file, part in zip(files, parts, strict=True):
                if part.of is not None:
                    values = part.of(rows.numpy())
                    file.write(values.data)
                    progress.add(values.nbytes)
    if not args.quiet:
        for part in parts:
            print(f"{part.path}: {part.dtype}{list(part.shape)}, {format_bytes(part.nbytes)}")
    return 0


def _parts(table: Table, path: Path) -> Iterator[_Part]:
    """The rows as they are read."""
    name = str(table.dtype).removeprefix("torch.")
    shape = (table.row_count, *table.shape)
    if name == "bfloat16":
        yield _Part(path, "float32", shape, lambda rows: table.decode(rows).float().numpy())
    else:
        yield _Part(path, name, shape, lambda rows: table.decode(rows).numpy())


def _raw_parts(table: Table, path: Path) -> Iterator[_Part]:
    """The rows before they are multiplied by their scales, and these."""
    from gids.store.quantize import split_rows

    scale = table.scale
    if scale is None:
        yield from _parts(table, path)
        return
    shape = (table.row_count, *table.shape)
    yield _Part(path, "int8", shape, lambda rows: split_rows(rows, table.shape, scale)[0].numpy())
    beside = path.with_suffix(".scale.npy")
    if scale == "column":
        yield _Part(beside, "float32", table.shape, whole=table.column_scales())
    else:
        yield _Part(beside, "float32", shape[:1], lambda rows: _scales_of(rows, table.shape))


def _scales_of(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    from gids.store.quantize import split_rows

    _, scales = split_rows(rows, shape, "row")
    assert scales is not None
    return scales.reshape(-1).numpy()


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of path when all went well, and is gone otherwise."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fdatasync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
