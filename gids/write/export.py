"""Writes a table as a `.npy` file, rows in order of ids; or rows of nodes beside their ids, as a Parquet or
a CSV file, which `gids convert` reads as a table of nodes. Called by `gids export`.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from gids.errors import FormatError, StorageError
from gids.store import FeatureStore, Table
from gids.store.dtypes import SCALE_BYTES, split_rows
from gids.store.files import npy_header
from gids.write.files import check_space

ID_SUFFIXES = (".parquet", ".csv")
_ID_BYTES = 200  # of memory per id, as a Python object and as a column


@dataclass(frozen=True)
class ArrayOut:
    """An array to write: `whole`, or encode(rows as they are stored, uint8[n, row_bytes]) block by block."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    encode: Callable[[np.ndarray], np.ndarray] | None = None
    whole: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def exported_arrays(table: Table, path: Path, *, raw: bool = False) -> list[ArrayOut]:
    """The arrays that a table is exported to: one at path, and with raw its scales beside it.

    bfloat16 (which NumPy lacks) and int8 with a scale become float32. raw: int8 with a scale stays int8, and
    the scales go to PATH.scale.npy.
    """
    scale, shape = table.scale, (table.row_count, *table.shape)
    if not raw or scale is None:
        name = str(table.dtype).removeprefix("torch.")
        if name == "bfloat16":
            return [ArrayOut(path, "float32", shape, lambda rows: table.decode(rows).float().numpy())]
        return [ArrayOut(path, name, shape, lambda rows: table.decode(rows).numpy())]
    steps = ArrayOut(path, "int8", shape, lambda rows: split_rows(rows, table.shape, scale)[0].numpy())
    beside = path.with_suffix(".scale.npy")
    if scale == "column":
        return [steps, ArrayOut(beside, "float32", table.shape, whole=table.column_scales())]
    encode = lambda rows: rows[:, -SCALE_BYTES:].copy().view(np.float32).reshape(-1)  # noqa: E731
    return [steps, ArrayOut(beside, "float32", shape[:1], encode)]


def export(
    table: Table,
    arrays: Sequence[ArrayOut],
    *,
    memory_bytes: int,
    overwrite: bool = False,
    on_total: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> None:
    """Write the arrays of exported_arrays; each file appears when it is complete.

    Raises FileExistsError unless overwrite, StorageError when the disk has too little space.
    """
    for array in arrays:
        _check_path(array.path, overwrite)
    size_bytes = sum(array.nbytes for array in arrays)
    check_space([(arrays[0].path.resolve().parent, size_bytes)])
    # Two blocks of pages and two of rows are in memory.
    out_row_bytes = size_bytes // max(1, table.row_count)
    widest = max(table.row_bytes, out_row_bytes, table.page_bytes // table.rows_per_page)
    with ExitStack() as stack:
        files = [stack.enter_context(replacing(array.path)) for array in arrays]
        on_total(size_bytes)
        for file, array in zip(files, arrays, strict=True):
            file.write(npy_header(array.dtype, array.shape))
            if array.whole is not None:
                file.write(array.whole.data)
        for _, rows in table.scan(max(1, memory_bytes // (4 * widest)), stored=True):
            for file, array in zip(files, arrays, strict=True):
                if array.encode is not None:
                    values = array.encode(rows.numpy())
                    file.write(values.data)
                    on_bytes(values.nbytes)


def _check_path(path: Path, overwrite: bool) -> None:
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no regular file, so it is not replaced: choose another name")
    if path.exists() and not overwrite:
        cure = "choose another name, or replace it (--overwrite; in Python overwrite=True)"
        raise FileExistsError(f"{path} already exists: {cure}")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that replaces path on success and is removed otherwise.

    Raises StorageError if the disk is full or fails.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fdatasync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            what = f"{os.strerror(error.errno)}, and the file was not written"
            raise StorageError(error.errno, what, path) from error
        raise


def export_by_id(
    store: FeatureStore,
    table: Table,
    path: Path,
    *,
    memory_bytes: int,
    overwrite: bool = False,
    on_bytes: Callable[[int], None],
) -> None:
    """Write a table of nodes as a file with the columns `id` and the table's key; of a part, the rows that it
    holds.

    path: NAME.parquet, where several numbers are a list, or NAME.csv, where they are columns key_0, key_1, ….
    A table made of columns has these in both.
    Floating types of 16 bits become float32. The file appears when it is complete. Needs pyarrow.

    Raises FileExistsError unless overwrite, FormatError for edges and for rows of several dimensions.
    """
    key, row_shape, names = table.key, table.shape, table.columns or ()
    if table.kind != "node":
        raise FormatError(
            f"{table.name!r} is a table of edges, which have no ids of their own: export it to .npy"
        )
    if len(row_shape) > 1 or key == "id" or "id" in names:
        why = "is called id" if len(row_shape) < 2 else f"has rows of shape {list(row_shape)}"
        raise FormatError(f"{key!r} {why}, so it cannot be a column beside the ids: export it to .npy")
    _check_path(path, overwrite)
    try:
        pa: Any = importlib.import_module("pyarrow")
        writers: Any = importlib.import_module(
            "pyarrow.parquet" if path.suffix == ".parquet" else "pyarrow.csv"
        )
    except ImportError:
        raise ImportError(f"{path} needs pyarrow: pip install pyarrow") from None
    ids, held = store.ids(str(table.type)), None if table.held is None else table.held.ids()
    step = max(1, memory_bytes // (8 * table.row_bytes + _ID_BYTES))

    def batch(nodes: np.ndarray, values: torch.Tensor) -> Any:
        if values.dtype.is_floating_point and values.dtype.itemsize == 2:
            values = values.float()
        of_ids = pa.array(ids[nodes], pa.string() if ids.is_text else pa.int64())
        columns = {key: pa.array(values.numpy().reshape(-1))}
        if names:
            columns = dict(zip(names, map(pa.array, values.numpy().T), strict=True))
        elif row_shape and path.suffix == ".parquet":
            columns = {key: pa.FixedSizeListArray.from_arrays(columns[key], row_shape[0])}
        elif row_shape and row_shape[0] > 1:
            columns = {f"{key}_{i}": pa.array(column) for i, column in enumerate(values.numpy().T)}
        return pa.record_batch([of_ids, *columns.values()], ["id", *columns])

    with replacing(path) as file:
        writer = None
        for first, rows in table.scan(step) if table.row_count else [(0, table.read_rows([]))]:
            numbers = np.arange(first, first + len(rows))
            written = batch(numbers if held is None else held[numbers], rows)
            if writer is None:
                kind = writers.ParquetWriter if path.suffix == ".parquet" else writers.CSVWriter
                writer = kind(file, written.schema)
            writer.write_batch(written)
            on_bytes(len(rows) * table.row_bytes)
        assert writer is not None, "there is a block, perhaps without rows"
        writer.close()
