"""Writes rows of nodes beside their ids, as a Parquet or a CSV file. For `gids export` and gids.inference.

`gids convert` reads such a file as a table of nodes.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gids.errors import FormatError
from gids.store import Table
from gids.store.ids import NodeIds
from gids.write.npy_export import replacing
from gids.write.publish import already_exists

ID_SUFFIXES = (".parquet", ".csv")
_ID_BYTES = 200  # of memory per id, as a Python object and as a column


def table_rows(table: Table, memory_bytes: int) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """(nodes, rows) of a table of nodes in blocks, in the order of the nodes: int64[n], dtype[n, *shape].

    In a part, those that it holds. Raises FormatError for a table of edges.
    """
    if table.kind != "node":
        raise FormatError(
            f"{table.name!r} is a table of edges, which have no ids of their own: export it to .npy"
        )
    held = None if table.held is None else table.held.ids()
    step = max(1, memory_bytes // (8 * table.row_bytes + _ID_BYTES))
    numbered = ((np.arange(first, first + len(rows)), rows) for first, rows in table.scan(step))
    return ((numbers if held is None else held[numbers], rows) for numbers, rows in numbered)


def export_by_id(
    path: str | os.PathLike[str],
    ids: NodeIds,
    key: str,
    row_shape: tuple[int, ...],
    rows: Iterable[tuple[np.ndarray, torch.Tensor]],
    *,
    overwrite: bool = False,
    on_rows: Callable[[int], None] = lambda _: None,
) -> None:
    """Write a file with the columns `id` and `key`: a number per node, or row_shape[0] of them.

    path: NAME.parquet, where several numbers are a list, or NAME.csv, where they are columns key_0, key_1, ….
    rows: (nodes, rows): int64[n], dtype[n, *row_shape] on the CPU. Floating types of 16 bits become float32.
    on_rows(n): progress. The file appears when it is complete. Needs pyarrow.

    Raises FileExistsError unless overwrite, FormatError for rows of several dimensions.
    """
    path = Path(path)
    if path.suffix not in ID_SUFFIXES:
        raise ValueError(f"{path} must be called NAME{' or NAME'.join(ID_SUFFIXES)}")
    if len(row_shape) > 1 or key == "id":
        why = "is called id" if key == "id" else f"has rows of shape {list(row_shape)}"
        raise FormatError(f"{key!r} {why}, so it cannot be a column beside the ids: export it to .npy")
    if path.exists() and not overwrite:
        raise already_exists(path)
    try:
        pa: Any = importlib.import_module("pyarrow")
        writers: Any = importlib.import_module(
            "pyarrow.parquet" if path.suffix == ".parquet" else "pyarrow.csv"
        )
    except ImportError:
        raise ImportError(f"{path} needs pyarrow: pip install pyarrow") from None

    def batch(nodes: np.ndarray, values: torch.Tensor) -> Any:
        if values.dtype.is_floating_point and values.dtype.itemsize == 2:
            values = values.float()
        of_ids = pa.array(ids[nodes], pa.string() if ids.is_text else pa.int64())
        columns = {key: pa.array(values.numpy().reshape(-1))}
        if row_shape and path.suffix == ".parquet":
            columns = {key: pa.FixedSizeListArray.from_arrays(columns[key], row_shape[0])}
        elif row_shape and row_shape[0] > 1:
            columns = {f"{key}_{i}": pa.array(column) for i, column in enumerate(values.numpy().T)}
        return pa.record_batch([of_ids, *columns.values()], ["id", *columns])

    with replacing(path) as file:
        writer = None
        for nodes, values in rows:
            written = batch(nodes, values)
            if writer is None:
                kind = writers.ParquetWriter if path.suffix == ".parquet" else writers.CSVWriter
                writer = kind(file, written.schema)
            writer.write_batch(written)
            on_rows(len(nodes))
        if writer is None:
            raise FormatError(f"{key!r} has no rows to write to {path}")
        writer.close()
