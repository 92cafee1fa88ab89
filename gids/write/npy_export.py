"""Writes a table as a `.npy` file, rows in order of their ids. Called by `gids export`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gids.store import Table
from gids.store.files import npy_header
from gids.store.quantize import split_rows
from gids.write.files import check_space
from gids.write.publish import already_exists


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
    return [steps, ArrayOut(beside, "float32", shape[:1], lambda rows: _row_scales(rows, table.shape))]


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
        if array.path.exists() and not overwrite:
            raise already_exists(array.path)
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


def _row_scales(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    _, scales = split_rows(rows, shape, "row")
    assert scales is not None
    return scales.reshape(-1).numpy()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that replaces path on success and is removed otherwise."""
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
