"""Counts and writes what each part gets: copies of arrays, topology and rows of tables. Called by run.py.

An edge is held by the owner of its destination. Everything streams from front to back, in bounded memory.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gids.errors import StorageError
from gids.store.array_checks import file_crc32c
from gids.store.feature_store import FeatureStore
from gids.store.files import Locator, array_bytes, map_array
from gids.store.geometry import div_ceil
from gids.store.manifest import ArrayEntry, Manifest, Part, RelationEntry, ScaleEntry, TableEntry, array_entry
from gids.store.names import encode_path, shard_paths, table_path
from gids.store.part import part_name
from gids.store.rows import read_range
from gids.store.scan import read_ahead
from gids.stored_file import AnyFile, open_descriptor
from gids.write.files import ArrayFile, link_file, sync_files
from gids.write.page_sink import MAX_BLOCK_BYTES, PageSink
from gids.write.workplace import Workplace

_NODES = 1 << 18  # read at a time
_EDGES = 1 << 20
_COUNTED_BYTES, _DIVIDED_BYTES = 40, 80  # memory per edge of a block that is counted, or divided
_COPIES, _ROW_BYTES = 4, 40  # memory per row of a block: copies of its bytes, and bytes besides
_PART_BYTES = 64 << 10  # what a part should get of a block, if memory allows
_TABLE_FILES, _TOPOLOGY_FILES = 2, 4  # open files per part


def _files_limit(per_part: int) -> int:
    """The number of parts whose files may be open at once."""
    return max(1, min(64, (os.sysconf("SC_OPEN_MAX") - 64) // (2 * per_part)))


def _groups(parts: int, at_once: int) -> list[range]:
    """The parts 0 … parts - 1, at most at_once in a group."""
    return [range(first, min(first + at_once, parts)) for first in range(0, parts, at_once)]


def check_array(locate: Locator, entry: ArrayEntry) -> None:
    """Raise StorageError if an array of the dataset is damaged."""
    _check_crc(locate.array(entry), entry, locate.array(entry))


def _check_crc(file: AnyFile, entry: ArrayEntry, source: AnyFile) -> None:
    if file_crc32c(file) != entry.crc32c:
        what = "this array of the dataset fails its CRC32C; `gids verify` lists all faults"
        raise StorageError(errno.EBADMSG, what, source)


@dataclass
class Division:
    """One call of partition(): the dataset, the parts, limits and progress.

    first: the first part. Its steps are recorded in the journal, and skipped when it resumes.
    """

    store: FeatureStore
    manifest: Manifest
    workplace: Workplace
    first: Part
    workers: int
    memory_bytes: int
    sync_bytes: int
    on_bytes: Callable[[int], None]

    def __post_init__(self) -> None:
        self.parts = self.first.count
        self.roots = [self.workplace.root / part_name(i) for i in range(self.parts)]
        self.owner_entries: dict[str, ArrayEntry] = {}  # of the arrays in the first part, by node type

    def owners(self, ntype: str) -> np.ndarray:
        """The part of each node, memory-mapped."""
        entry = self.owner_entries[ntype]
        return map_array(self.roots[0] / entry.path, entry)

    def read(self, entry: ArrayEntry, first: int, last: int) -> np.ndarray:
        """Elements first … last, in new memory; the file does not stay in the page cache."""
        values: np.ndarray = read_range(self.store.locate.rows(entry), first, last).numpy()
        return values

    def once(
        self, item: str, progress: int, work: Callable[[], Any], folder: str = "", group: range | None = None
    ) -> Any:
        """Do what is not recorded as done. folder: of these parts (default: all), in which it makes files."""
        roots = self.roots if group is None else self.roots[group.start : group.stop]
        return self.workplace.once(item, progress, work, [root / folder for root in roots if folder])

    def copy(self, item: str, source: ArrayEntry, entry: ArrayEntry, folder: str) -> None:
        """Copy an array of the dataset to the entry's path in all parts, which share it by hard links if
        possible. Raises StorageError if it is damaged."""
        file, (first, *others) = self.store.locate.array(source), (root / entry.path for root in self.roots)

        def work() -> None:
            first.parent.mkdir(parents=True, exist_ok=True)
            with open(open_descriptor(file), "rb") as read, open(first, "wb") as written:
                shutil.copyfileobj(read, written, MAX_BLOCK_BYTES)
                written.flush()
                sync_files([written.fileno()])
            _check_crc(first, entry, file)
            for other in others:
                link_file(first, other)
            self.on_bytes(array_bytes(entry))

        self.once(item, array_bytes(entry), work, folder)


# Which edges and rows are whose

OwnersOf = Callable[[int, int], np.ndarray]
"""(first, last) -> the part of each row from first to last, uint8 or uint16."""


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

    def __init__(self, division: Division, relation: RelationEntry) -> None:
        self._indptr = division.store.locate.map(relation.arrays["indptr"])
        ids = relation.arrays.get("edge_ids")  # None: they are the positions
        self._edge_ids = None if ids is None else partial(division.read, ids)
        self._owners, self._count = division.owners(relation.type[2]), relation.count
        memory_bytes, owners = division.memory_bytes // 2, self._owners
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
    manifest, locate, parts = division.manifest, division.store.locate, division.parts
    nodes, edges, cut = [], [], 0
    seeds = np.zeros(parts, np.int64)
    for entry in manifest.nodes:
        owners = division.owners(entry.type)
        counts = np.zeros(parts, np.int64)
        for start in range(0, entry.count, _EDGES):
            counts += np.bincount(owners[start : start + _EDGES], minlength=parts)
        nodes.append(counts.tolist())
        if (train := entry.arrays.get("train_idx")) is not None:
            check_array(locate, train)
            for start in range(0, train.shape[0], _EDGES):
                ids = division.read(train, start, min(start + _EDGES, train.shape[0]))
                seeds += np.bincount(owners[ids], minlength=parts)
    step = max(1, min(_EDGES, division.memory_bytes // _COUNTED_BYTES))
    for relation in manifest.relations:
        for array in relation.arrays.values():
            check_array(locate, array)
        sources, destinations = division.owners(relation.type[0]), division.owners(relation.type[2])
        counts = np.zeros(parts, np.int64)
        indptr = division.store.locate.map(relation.arrays["indptr"])
        for begin, end, edge_parts in edge_blocks(indptr, destinations, step):
            counts += np.bincount(edge_parts, minlength=parts)
            source_parts = sources[division.read(relation.arrays["indices"], begin, end)]
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


def topology_groups(parts: int) -> list[range]:
    """The parts that one pass over a topology writes."""
    return _groups(parts, _files_limit(_TOPOLOGY_FILES))


def divide_topology(
    division: Division, relation: RelationEntry, held: Sequence[int]
) -> list[dict[str, ArrayEntry]]:
    """Write the in-edges of each part's nodes. held: the number of edges of each part.

    Returns the entries of each part. Reads the source once per group of parts.
    """
    name, entries = encode_path(*relation.type), list[dict[str, ArrayEntry]]()
    for group in topology_groups(division.parts):
        item = f"graph {name} {group.start}-{group.stop - 1}"
        work = partial(_divide_topology, division, relation, group, held)
        done = division.once(item, 8 * relation.count, work, f"graph/{name}", group)
        entries += [{role: array_entry(fields) for role, fields in arrays.items()} for arrays in done]
    return entries


def _divide_topology(
    division: Division, relation: RelationEntry, parts: range, held: Sequence[int]
) -> list[dict[str, ArrayEntry]]:
    owners, indptr = division.owners(relation.type[2]), division.store.locate.map(relation.arrays["indptr"])
    dtypes = {"indices": relation.arrays["indices"].dtype, "edge_ids": id_dtype(relation)}
    if "time" in relation.arrays:
        dtypes["time"] = relation.arrays["time"].dtype
    with ExitStack() as stack:

        def array(part: int, role: str, dtype: str, count: int) -> ArrayFile:
            path = f"graph/{encode_path(*relation.type)}/{role}.npy"
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
                if role in relation.arrays:
                    values = division.read(relation.arrays[role], begin, end)
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


def table_groups(division: Division, entry: TableEntry) -> list[range]:
    """The parts that one pass over a table writes: the same when a run resumes with other memory."""
    by_memory = max(1, division.memory_bytes // 2 // max(entry.page_bytes, _PART_BYTES))
    at_once = min(_files_limit(_TABLE_FILES), by_memory)
    return _groups(division.parts, division.workplace.once(f"groups of {entry.name}", 0, lambda: at_once))


def divide_table(division: Division, entry: TableEntry, held: Sequence[int]) -> list[TableEntry]:
    """Divide the rows of a table. held: the number of rows of each part. Returns its entry in each part."""
    folder = f"tables/{table_path(entry.type, entry.key)}"
    written = []
    for rows in held:
        pages = div_ceil(rows, entry.geometry.rows_per_page)
        sums = ArrayEntry(f"{folder}/checksum.bin", "uint32", (pages,), 0)
        shards = shard_paths(table_path(entry.type, entry.key), [], 1)
        written.append(replace(entry, row_count=rows, shards=shards, checksums=sums, order=None))
    columns = entry.scale.columns if entry.scale is not None else None
    if columns is not None:
        copied = replace(columns, path=f"{folder}/scale.npy")
        division.copy(f"scales {folder}", columns, copied, folder)
        written = [replace(w, scale=ScaleEntry("column", copied)) for w in written]
    if entry.order is not None:
        division.once(f"check {folder}.order", 0, partial(check_array, division.store.locate, entry.order))
    sums_crc: list[int] = []
    for group in table_groups(division, entry):
        item = f"{folder} {group.start}-{group.stop - 1}"
        work = partial(_divide_rows, division, entry, written, group)
        sums_crc += division.once(item, entry.row_count * entry.geometry.row_bytes, work, folder, group)
    return [
        replace(w, checksums=replace(w.checksums, crc32c=crc))
        for w, crc in zip(written, sums_crc, strict=True)
    ]


def _row_owners(division: Division, entry: TableEntry) -> OwnersOf:
    """The parts of the rows of a table."""
    if isinstance(entry.type, str):
        owners = division.owners(entry.type)
        return lambda first, last: owners[first:last]
    (relation,) = (r for r in division.manifest.relations if r.type == entry.type)
    return EdgeOwners(division, relation)


def _divide_rows(
    division: Division, entry: TableEntry, written: Sequence[TableEntry], parts: range
) -> list[int]:
    """Write the rows of these parts, in the order of their ids. Returns the CRC32C of their checksums.

    Rows stay as they are stored. Reads the source once, and compares every page with its checksum; a source
    with an order of rows is compared first, then read through memory maps. Progress is in bytes of the
    source. Raises StorageError.
    """
    table, owners_of = division.store.tables[entry.name], _row_owners(division, entry)
    item = f"rows of {entry.name} {parts.start}-{parts.stop - 1}"
    shards = [division.roots[part] / written[part].shards[0] for part in parts]
    checksums = [division.roots[part] / written[part].checksums.path for part in parts]
    layouts = [written[part].geometry for part in parts]
    sizes = {path: layout.shard_bytes(0) for path, layout in zip(shards, layouts, strict=True)}
    first_row = division.workplace.saved(item, sizes) or 0
    block_rows = max(1, division.memory_bytes // 2 // (_COPIES * table.row_bytes + _ROW_BYTES))
    next_rows = [0] * len(parts)  # of each part
    for start in range(0, first_row, block_rows):
        chosen = by_part(owners_of(start, min(start + block_rows, first_row)), parts)
        next_rows = [row + len(mine) for row, mine in zip(next_rows, chosen, strict=True)]
    division.on_bytes(first_row * table.row_bytes)
    with ExitStack() as stack:
        buffers = threading.local()
        sinks = [
            stack.enter_context(PageSink(layout, [shard], sums, buffers=buffers))
            for layout, shard, sums in zip(layouts, shards, checksums, strict=True)
        ]
        for sink, row in zip(sinks, next_rows, strict=True):
            sink.resume(row)
        reader = stack.enter_context(table.open_pages(check_crc=True))
        pool = stack.enter_context(ThreadPoolExecutor(division.workers, "gids-partition"))
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

            list(pool.map(add, sinks, next_rows, chosen))
            next_rows = [row + len(mine) for row, mine in zip(next_rows, chosen, strict=True)]
            division.on_bytes(rows.nbytes)
            unsynced_bytes += rows.nbytes
            if unsynced_bytes >= division.sync_bytes:
                list(pool.map(sync, sinks))
                division.workplace.save(item, start + len(rows))
                unsynced_bytes = 0
        list(pool.map(PageSink.sync, sinks))
        assert all(sink.first_gap() is None for sink in sinks), f"{table.name}: the parts lack rows"
    return [file_crc32c(path) for path in checksums]
