"""Counts and writes what each part gets: copies of arrays, topology and rows of tables. Called by run.py.

An edge is held by the owner of its destination. Everything streams from front to back, in bounded memory.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gids.errors import StorageError
from gids.store.array_checks import file_crc32c
from gids.store.feature_store import FeatureStore
from gids.store.files import Locator, array_rows, map_array
from gids.store.manifest import ArrayEntry, Manifest, RelationEntry
from gids.store.names import encode_path
from gids.store.rows import read_range
from gids.store.scan import read_ahead
from gids.store.table import Table
from gids.stored_file import AnyFile, StoredFile, open_descriptor
from gids.write.files import ArrayFile, link_file, sync_files
from gids.write.page_sink import MAX_BLOCK_BYTES, PageSink

_NODES = 1 << 18  # read at a time
_EDGES = 1 << 20
_COUNTED_BYTES, _DIVIDED_BYTES = 40, 80  # memory per edge of a block that is counted, or divided
_COPIES, _ROW_BYTES = 4, 40  # memory per row of a block: copies of its bytes, and bytes besides
_PART_BYTES = 64 << 10  # what a part should get of a block, if memory allows
TABLE_FILES, TOPOLOGY_FILES = 2, 4
"""Open files per part."""

OwnersOf = Callable[[int, int], np.ndarray]
"""(first, last) -> the part of each row from first to last, uint8 or uint16."""


def files_limit(per_part: int) -> int:
    """The number of parts whose files may be open at once."""
    soft = os.sysconf("SC_OPEN_MAX")
    return max(1, min(64, (soft - 64) // (2 * per_part)))


def parts_at_once(page_bytes: int, memory_bytes: int) -> int:
    """The number of parts that one pass over a table can write."""
    return min(files_limit(TABLE_FILES), max(1, memory_bytes // 2 // max(page_bytes, _PART_BYTES)))


class SourceArrays:
    """The arrays of the dataset that is divided, by their entries in its manifest."""

    def __init__(self, locate: Locator) -> None:
        self._locate = locate

    def path(self, entry: ArrayEntry) -> StoredFile:
        return self._locate.array(entry)

    def mapped(self, entry: ArrayEntry) -> np.ndarray:
        return map_array(self.path(entry), entry)

    def read(self, entry: ArrayEntry, first: int, last: int) -> np.ndarray:
        """Elements first … last, in new memory; the file does not stay in the page cache."""
        values: np.ndarray = read_range(array_rows(self.path(entry), entry), first, last).numpy()
        return values

    def check(self, entry: ArrayEntry) -> None:
        """Raise StorageError if the array is damaged."""
        if file_crc32c(self.path(entry)) != entry.crc32c:
            raise _damaged(self.path(entry))


def copy_array(source: AnyFile, entry: ArrayEntry, roots: Sequence[Path]) -> None:
    """Copy an array's file to the entry's path in each directory: parts share it by hard links if possible.

    Raises StorageError if it is damaged.
    """
    first, *others = (root / entry.path for root in roots)
    first.parent.mkdir(parents=True, exist_ok=True)
    with open(open_descriptor(source), "rb") as read, open(first, "wb") as written:
        shutil.copyfileobj(read, written, MAX_BLOCK_BYTES)
        written.flush()
        sync_files([written.fileno()])
    if file_crc32c(first) != entry.crc32c:
        raise _damaged(source)
    for other in others:
        link_file(first, other)


def _damaged(path: AnyFile) -> StorageError:
    what = "this array of the dataset fails its CRC32C; `gids verify` lists all faults"
    return StorageError(errno.EBADMSG, what, path)


@dataclass
class Division:
    """What the steps that follow share: the dataset, the directories of all parts, limits and progress.

    on_bytes(n): progress, from any thread.
    """

    store: FeatureStore
    manifest: Manifest
    roots: Sequence[Path]
    workers: int
    memory_bytes: int
    sync_bytes: int
    on_bytes: Callable[[int], None]

    def __post_init__(self) -> None:
        self.arrays = SourceArrays(self.store.locate)
        self.owner_entries: dict[str, ArrayEntry] = {}  # of the arrays in the first part, by node type

    def owners(self, ntype: str) -> np.ndarray:
        """The part of each node, memory-mapped."""
        entry = self.owner_entries[ntype]
        return map_array(self.roots[0] / entry.path, entry)


# Which edges and rows are whose


def edge_blocks(
    indptr: np.ndarray, owners: np.ndarray, block_edges: int, first: int = 0
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (first position, last position, the part of each edge between them) of all edges from `first` on.

    indptr: int64[n + 1]; owners: uint8 or uint16[n]. At most block_edges a block, however large a degree is.
    """
    for start in range(0, len(owners), _NODES):
        bounds = np.asarray(indptr[start : start + _NODES + 1])
        if bounds[-1] <= first:
            continue
        node_parts = np.asarray(owners[start : start + _NODES])
        for begin in range(max(first, int(bounds[0])), int(bounds[-1]), block_edges):
            end = min(begin + block_edges, int(bounds[-1]))
            low = int(np.searchsorted(bounds, begin, side="right")) - 1
            high = int(np.searchsorted(bounds, end, side="left"))
            degrees = np.diff(np.clip(bounds[low : high + 1], begin, end))
            yield begin, end, np.repeat(node_parts[low:high], degrees)


def by_part(owners: np.ndarray, parts: range) -> list[np.ndarray]:
    """The positions, ascending, of the owners that are each of these parts: int64[n] each."""
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=parts.stop))
    return np.split(order, ends)[parts.start : parts.stop]


class EdgeOwners:
    """The parts of the rows of an edge table, which are in the order of edge ids.

    A window of ids is held in memory, and found by one pass over the topology.
    """

    def __init__(
        self,
        indptr: np.ndarray,
        edge_ids: Callable[[int, int], np.ndarray] | None,
        owners: np.ndarray,
        count: int,
        memory_bytes: int,
    ) -> None:
        """edge_ids(first, last): the ids at positions; None: the positions. owners: of the destinations."""
        self._indptr, self._edge_ids, self._owners, self._count = indptr, edge_ids, owners, count
        self._window_ids = max(1, memory_bytes // 2 // owners.itemsize)
        self._block_edges = max(1, min(_EDGES, memory_bytes // 2 // _COUNTED_BYTES))
        self._first = self._last = 0
        self._window = np.empty(0, owners.dtype)

    def __call__(self, first: int, last: int) -> np.ndarray:
        out = np.empty(last - first, self._owners.dtype)
        done = first
        while done < last:
            if not self._first <= done < self._last:
                self._fill(done)
            end = min(last, self._last)
            out[done - first : end - first] = self._window[done - self._first : end - self._first]
            done = end
        return out

    def _fill(self, first: int) -> None:
        """Find the parts of the window that begins at this id."""
        self._first, self._last = first, min(first + self._window_ids, self._count)
        self._window = window = np.empty(self._last - first, self._owners.dtype)
        start = first if self._edge_ids is None else 0
        for begin, end, parts in edge_blocks(self._indptr, self._owners, self._block_edges, start):
            if self._edge_ids is None:
                if begin >= self._last:
                    break
                window[begin - first : min(end, self._last) - first] = parts[: self._last - begin]
            else:
                ids = self._edge_ids(begin, end)
                mine = (ids >= first) & (ids < self._last)
                window[ids[mine] - first] = parts[mine]


def count_parts(division: Division) -> dict[str, Any]:
    """The nodes (by type), edges (by relation) and training seeds of each part, and the number of cut edges.

    Progress is 8 bytes per edge. Checks the checksums of the topology and the training seeds; raises
    StorageError for a damaged array.
    """
    manifest, arrays, parts = division.manifest, division.arrays, len(division.roots)
    nodes, edges, cut = [], [], 0
    seeds = np.zeros(parts, np.int64)
    for entry in manifest.nodes:
        owners = division.owners(entry.type)
        counts = np.zeros(parts, np.int64)
        for start in range(0, entry.count, _EDGES):
            counts += np.bincount(owners[start : start + _EDGES], minlength=parts)
        nodes.append(counts.tolist())
        train = entry.arrays.get("train_idx")
        if train is not None:
            arrays.check(train)
            for start in range(0, train.shape[0], _EDGES):
                ids = arrays.read(train, start, min(start + _EDGES, train.shape[0]))
                seeds += np.bincount(owners[ids], minlength=parts)
    step = max(1, min(_EDGES, division.memory_bytes // _COUNTED_BYTES))
    for relation in manifest.relations:
        for array in relation.arrays.values():
            arrays.check(array)
        sources, destinations = division.owners(relation.type[0]), division.owners(relation.type[2])
        counts = np.zeros(parts, np.int64)
        for begin, end, edge_parts in edge_blocks(
            arrays.mapped(relation.arrays["indptr"]), destinations, step
        ):
            counts += np.bincount(edge_parts, minlength=parts)
            source_parts = sources[arrays.read(relation.arrays["indices"], begin, end)]
            cut += int(np.count_nonzero(source_parts != edge_parts))
            division.on_bytes(8 * (end - begin))
        edges.append(counts.tolist())
    return {"nodes": nodes, "edges": edges, "seeds": seeds.tolist(), "cut": cut}


# Topology


def id_dtype(relation: RelationEntry) -> str:
    """The element type of the edge ids in parts."""
    if "edge_ids" in relation.arrays:
        return relation.arrays["edge_ids"].dtype
    return "int64" if relation.count > 1 << 31 else relation.arrays["indices"].dtype


def divide_topology(
    division: Division, relation: RelationEntry, parts: range, held: Sequence[int]
) -> list[dict[str, ArrayEntry]]:
    """Write the arrays of these parts, which get the in-edges of their nodes; returns their entries.

    held: the number of edges of each part. Reads the source once.
    """
    arrays, owners = division.arrays, division.owners(relation.type[2])
    indptr = arrays.mapped(relation.arrays["indptr"])
    dtypes = {"indices": relation.arrays["indices"].dtype, "edge_ids": id_dtype(relation)}
    if "time" in relation.arrays:
        dtypes["time"] = relation.arrays["time"].dtype
    folder = f"graph/{encode_path(*relation.type)}"
    sources = {
        role: array_rows(arrays.path(entry), entry)
        for role, entry in relation.arrays.items()
        if role in dtypes
    }
    with ExitStack() as stack:

        def array(part: int, role: str, dtype: str, count: int) -> ArrayFile:
            path = f"{folder}/{role}.npy"
            return stack.enter_context(ArrayFile(division.roots[part], path, dtype, (count,)))

        pointers = [array(part, "indptr", "int64", len(indptr)) for part in parts]
        files = {
            role: [array(part, role, dtype, held[part]) for part in parts] for role, dtype in dtypes.items()
        }
        _write_pointers(indptr, owners, parts, pointers)
        step = max(1, min(_EDGES, division.memory_bytes // 2 // _DIVIDED_BYTES))
        for begin, end, edge_parts in edge_blocks(indptr, owners, step):
            chosen = by_part(edge_parts, parts)
            for role, written in files.items():
                if role in sources:
                    values = read_range(sources[role], begin, end).numpy()
                else:  # the id of an edge is its position
                    values = np.arange(begin, end, dtype=np.int64)
                for file, mine in zip(written, chosen, strict=True):
                    file.append(values[mine])
            division.on_bytes(8 * (end - begin))
        return [
            {"indptr": pointers[i].finish(), **{role: files[role][i].finish() for role in files}}
            for i in range(len(parts))
        ]


def _write_pointers(indptr: np.ndarray, owners: np.ndarray, parts: range, files: Sequence[ArrayFile]) -> None:
    totals = [0] * len(files)
    for file in files:
        file.append(np.zeros(1, np.int64))
    for start in range(0, len(owners), _NODES):
        degrees = np.diff(indptr[start : start + _NODES + 1])
        node_parts = owners[start : start + _NODES]
        for index, (part, file) in enumerate(zip(parts, files, strict=True)):
            ends = totals[index] + np.cumsum(np.where(node_parts == part, degrees, 0))
            file.append(ends)
            totals[index] = int(ends[-1])


# Rows


def divide_rows(
    division: Division,
    table: Table,
    owners_of: OwnersOf,
    sinks: Sequence[PageSink],
    parts: range,
    *,
    first_row: int,
    on_sync: Callable[[int], None],
) -> None:
    """Write the rows of a table from first_row on to the sinks of these parts, in the order of their ids.

    Rows stay as they are stored. Reads the source once, and compares every page with its checksum; a source
    with an order of rows is compared first, then read through memory maps. on_sync(n): called when the first
    n rows of the source are on disk. Progress is in bytes of the source. Raises StorageError.
    """
    block_rows = max(1, division.memory_bytes // 2 // (_COPIES * table.row_bytes + _ROW_BYTES))
    next_rows = [0] * len(parts)  # of each part
    for start in range(0, first_row, block_rows):
        chosen = by_part(owners_of(start, min(start + block_rows, first_row)), parts)
        next_rows = [row + len(mine) for row, mine in zip(next_rows, chosen, strict=True)]
    for sink, row in zip(sinks, next_rows, strict=True):
        sink.resume(row)
    division.on_bytes(first_row * table.row_bytes)
    with (
        table.open_pages(check_crc=True) as reader,
        ThreadPoolExecutor(division.workers, "gids-partition") as pool,
    ):
        if table.order is not None and first_row == 0:
            step = max(1, _PART_BYTES // table.page_bytes)
            for page in range(0, table.page_count, step):
                reader.pages(page, step)

        def read(start: int) -> np.ndarray:
            if table.order is None:
                return reader.rows(start, block_rows)
            return table.read_stored(np.arange(start, min(start + block_rows, table.row_count)))

        def sync(sink: PageSink) -> None:
            sink.flush()
            sink.sync()

        unsynced_bytes = 0
        for start, rows in read_ahead(read, range(first_row, table.row_count, block_rows)):
            chosen = by_part(owners_of(start, start + len(rows)), parts)

            def add(sink: PageSink, row: int, mine: np.ndarray, rows: np.ndarray = rows) -> None:
                sink.write(row, rows[mine])

            for _ in pool.map(add, sinks, next_rows, chosen):
                pass
            next_rows = [row + len(mine) for row, mine in zip(next_rows, chosen, strict=True)]
            division.on_bytes(rows.nbytes)
            unsynced_bytes += rows.nbytes
            if unsynced_bytes >= division.sync_bytes:
                for _ in pool.map(sync, sinks):
                    pass
                on_sync(start + len(rows))
                unsynced_bytes = 0
        for _ in pool.map(PageSink.sync, sinks):
            pass
    assert all(sink.first_gap() is None for sink in sinks), f"{table.name}: the parts lack rows"
