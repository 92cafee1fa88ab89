"""Divides a relation's topology: each part gets the in-edges of the nodes that it owns. Called by run.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from gids.store.files import array_rows
from gids.store.manifest import ArrayEntry, RelationEntry
from gids.store.names import encode_path
from gids.store.rows import read_range
from gids.stored_file import AnyFile
from gids.write.array_file import ArrayFile
from gids.write.partition.edge_blocks import by_part, edge_blocks

_BLOCK_NODES = 1 << 18
_EDGE_BYTES = 80
"""Memory per edge of a block: as read, sorted by part, and as written."""
FILES = 4
"""Open files per part."""


def id_dtype(relation: RelationEntry) -> str:
    """The element type of the edge ids in parts."""
    if "edge_ids" in relation.arrays:
        return relation.arrays["edge_ids"].dtype
    return "int64" if relation.count > 1 << 31 else relation.arrays["indices"].dtype


def divide_topology(
    relation: RelationEntry,
    paths: Mapping[str, AnyFile],
    indptr: np.ndarray,
    owners: np.ndarray,
    roots: Sequence[Path],
    parts: range,
    held: Sequence[int],
    *,
    memory_bytes: int,
    on_bytes: Callable[[int], None],
) -> list[dict[str, ArrayEntry]]:
    """Write the arrays of these parts; returns their entries.

    paths: the source's arrays by role. owners: of the destinations. roots: the directories of all parts.
    held: the number of edges of each part. Reads the source once, from front to back.
    """
    dtypes = {"indices": relation.arrays["indices"].dtype, "edge_ids": id_dtype(relation)}
    if "time" in relation.arrays:
        dtypes["time"] = relation.arrays["time"].dtype
    folder = f"graph/{encode_path(*relation.type)}"
    sources = {r: array_rows(paths[r], relation.arrays[r]) for r in dtypes if r in relation.arrays}
    with ExitStack() as stack:

        def array(part: int, role: str, dtype: str, count: int) -> ArrayFile:
            return stack.enter_context(ArrayFile(roots[part], f"{folder}/{role}.npy", dtype, (count,)))

        pointers = [array(part, "indptr", "int64", len(indptr)) for part in parts]
        files = {
            role: [array(part, role, dtype, held[part]) for part in parts] for role, dtype in dtypes.items()
        }
        _write_pointers(indptr, owners, parts, pointers)
        step = max(1, min(1 << 20, memory_bytes // _EDGE_BYTES))
        for begin, end, of in edge_blocks(indptr, owners, step):
            order, ends = by_part(of, parts)
            for role, written in files.items():
                if role in sources:
                    values = read_range(sources[role], begin, end).numpy()
                else:  # the id of an edge is its position
                    values = np.arange(begin, end, dtype=np.int64)
                for index, file in enumerate(written):
                    file.append(values[order[ends[index] : ends[index + 1]]])
            on_bytes(8 * (end - begin))
        return [
            {"indptr": pointers[i].finish(), **{role: files[role][i].finish() for role in files}}
            for i in range(len(parts))
        ]


def _write_pointers(indptr: np.ndarray, owners: np.ndarray, parts: range, files: Sequence[ArrayFile]) -> None:
    totals = [0] * len(files)
    for file in files:
        file.append(np.zeros(1, np.int64))
    for start in range(0, len(owners), _BLOCK_NODES):
        degrees = np.diff(indptr[start : start + _BLOCK_NODES + 1])
        of = owners[start : start + _BLOCK_NODES]
        for index, (part, file) in enumerate(zip(parts, files, strict=True)):
            ends = totals[index] + np.cumsum(np.where(of == part, degrees, 0))
            file.append(ends)
            totals[index] = int(ends[-1])
