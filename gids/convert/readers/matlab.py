"""Reads MATLAB files (version 5) with an adjacency matrix, such as `A` and `local_info` of Facebook100.

SciPy loads the whole file into memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gids.convert.array_files import SparseRows
from gids.convert.edges import add_weights
from gids.convert.labels import normalised
from gids.convert.source import LABELS, Choices, InEdges, Reader, Source
from gids.convert.source_files import import_library, reading, starts_with
from gids.convert.stream_rows import column_of, derived
from gids.errors import FormatError
from gids.store.dtypes import torch_dtype_of
from gids.store.names import NODE, RELATION
from gids.store.rows import ArrayRows, GeneratedRows, Rows

_ADJACENCY = ("A", "adj", "adjacency", "network", "net", "W", "Network")
_GENDER = 1  # the column of local_info that is the label


def _recognises(path: Path) -> bool:
    return starts_with(path, b"MATLAB 5.0 MAT-file", b"MATLAB 7.3 MAT-file")


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    source = Source(skip=choices.skip)
    variables = {name: values for name, values in _load(path).items() if not source.skips(name)}
    name = _adjacency(variables, path)
    count = variables[name].shape[0]
    source.add_nodes(NODE, count, f"{name!r} of {path.name}")
    # Row u lists the destinations of u, so column v lists the sources of v.
    matrix = variables.pop(name).tocsc()
    matrix.sort_indices()
    source.graphs[RELATION] = InEdges(ArrayRows(matrix.indptr), ArrayRows(matrix.indices), None)
    if torch_dtype_of(matrix.dtype) is None:
        raise FormatError(f"{name!r} of {path.name} has {matrix.dtype} values, which tables cannot hold")
    add_weights(source, RELATION, ArrayRows(matrix.data))
    for key, values in variables.items():
        if key == "local_info":
            _add_attributes(values, source)
        elif (rows := _rows(values)) is None or rows.shape[0] != count:
            why = f"{_described(values)} is not an array of numbers with a row per node"
            is_note = np.size(values) == 1 or getattr(values, "dtype", np.dtype("U")).kind == "U"
            source.leave_out(repr(key), why, "" if is_note else key)
        elif key.lower() in LABELS or key == choices.labels:
            is_column = len(rows.shape) == 2 and rows.shape[1] == 1  # MATLAB has no one-dimensional arrays
            source.labels[NODE] = normalised(column_of(rows, 0) if is_column else rows, are_classes=True)
        else:
            source.add_node_table(NODE, key, rows, key)
    return source


def _load(path: Path) -> dict[str, Any]:
    io = import_library(path, "scipy.io")
    with reading(path):
        try:
            variables = io.loadmat(path)
        except NotImplementedError:
            raise FormatError(f"{path} has MATLAB format 7.3 (HDF5); save it with save(…, '-v7')") from None
    return {name: values for name, values in variables.items() if not name.startswith("__")}


def _described(values: Any) -> str:
    return f"{type(values).__name__} {getattr(values, 'shape', '')} {getattr(values, 'dtype', '')}".strip()


def _adjacency(variables: dict[str, Any], path: Path) -> str:
    square = [n for n, v in variables.items() if hasattr(v, "tocsc") and v.shape[0] == v.shape[1]]
    square = [n for n in square if n in _ADJACENCY] or square
    if len(square) != 1:
        raise FormatError(
            f"{path} must have one square sparse matrix; it has {len(square)}, of {', '.join(variables)}"
        )
    return square[0]


def _rows(values: Any) -> Rows | None:
    is_array = isinstance(values, np.ndarray) and bool(values.shape)
    if not (is_array or hasattr(values, "tocsr")) or torch_dtype_of(values.dtype) is None:
        return None
    if hasattr(values, "tocsr"):
        matrix = values.tocsr()
        parts = (ArrayRows(a) for a in (matrix.data, matrix.indices, matrix.indptr))
        return SparseRows(*parts, shape=matrix.shape)
    if values.shape[0] == 1 and values.ndim == 2:  # MATLAB has no one-dimensional arrays
        values = values[0]
    return ArrayRows(np.ascontiguousarray(values))


def _add_attributes(values: np.ndarray, source: Source) -> None:
    """Facebook100: gender is the label (0: unknown); every other attribute is a group of one-hot columns."""
    is_matrix = isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and values.ndim == 2
    if not is_matrix or values.shape[0] != source.nodes[NODE] or values.shape[1] <= _GENDER:
        raise FormatError(
            f"local_info is {_described(values)}; it must have a row per node and 2 columns of numbers"
        )
    gender = normalised(ArrayRows(values[:, _GENDER].copy()), are_classes=True)
    source.labels[NODE] = derived(gender, lambda classes, _: classes.clamp(min=0) - 1, torch.int64)
    source.add_node_table(NODE, "feat", _one_hot(np.delete(values, _GENDER, axis=1)), "local_info")


def _one_hot(attributes: np.ndarray) -> Rows:
    """float32 rows with a column per value that occurs in a column of attributes, in order."""
    positions, width = [], 0
    for column in attributes.T:
        known, index = np.unique(column, return_inverse=True)
        positions.append(width + index)
        width += len(known)
    ones = torch.from_numpy(np.stack(positions, axis=1))

    def fill(start: int, out: torch.Tensor) -> None:
        out.zero_()
        out.scatter_(1, ones[start : start + len(out)], 1.0)

    return GeneratedRows((len(attributes), width), torch.float32, fill)


_LAYOUT = """\
Needs SciPy, which loads the whole file into memory. The square sparse matrix (A, adj, network, ...) is
the graph: row u lists the destinations of u; values other than 1 are table weight of edges. local_info
(Facebook100): gender is the label, 0 means none; the other attributes are one-hot columns of table feat,
as in PyG's LINKXDataset. label, labels, y: labels. Other arrays and sparse matrices with a row per node:
tables."""

READER = Reader(
    "matlab",
    "a MATLAB file (.mat, not 7.3) with a sparse adjacency matrix, such as Facebook100's",
    _LAYOUT,
    _recognises,
    _read,
    takes=("--labels", "--skip"),
)
