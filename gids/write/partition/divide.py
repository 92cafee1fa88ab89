"""Division: counts and writes what each part gets: copies of arrays, topology and rows of tables. Called by
partition().

An edge is held by the owner of its destination. Everything streams from front to back, in bounded memory.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gids.errors import StorageError
from gids.store.feature_store import FeatureStore
from gids.store.files import Locator, array_bytes, map_array
from gids.store.geometry import div_ceil
from gids.store.manifest import (
    OWNER,
    ArrayEntry,
    Manifest,
    NodesEntry,
    Part,
    RelationEntry,
    ScaleEntry,
    TableEntry,
    owner_dtype,
)
from gids.store.names import encode_path, shard_paths, table_path
from gids.store.part import part_name
from gids.store.rows import file_crc32c, read_ahead, read_range
from gids.stored_file import AnyFile, open_descriptor
from gids.write.files import ArrayFile, link_file, sync_files, write_array
from gids.write.page_sink import MAX_BLOCK_BYTES, PageSink
from gids.write.workplace import Workplace

_NODES = 1 << 18  # read at a time
_EDGES = 1 << 20
_EDGE_BYTES = 80  # memory per edge of a block
_COPIES, _ROW_BYTES = 4, 40  # memory per row of a block: copies of its bytes, and bytes besides
_CHECKED_BYTES = 1 << 20  # at a time
_TABLE_FILES, _TOPOLOGY_FILES = 2, 4  # open files per part


def check_array(locate: Locator, entry: ArrayEntry) -> None:
    """Raise StorageError if an array of the dataset is damaged."""
    _check_crc(locate.array(entry), entry, locate.array(entry))


def _check_crc(file: AnyFile, entry: ArrayEntry, source: AnyFile) -> None:
    if file_crc32c(file) != entry.crc32c:
        what = "this array of the dataset fails its CRC32C; `gids verify` lists all faults"
        raise StorageError(errno.EBADMSG, what, source)


def _files_limit(per_part: int) -> int:
    """The number of parts whose files may be open at once."""
    return max(1, min(64, (os.sysconf("SC_OPEN_MAX") - 64) // (2 * per_part)))


def by_part(owners: np.ndarray, parts: range) -> list[np.ndarray]:
    """The positions, ascending, of the owners that are each of these parts: int64[n] each."""
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=parts.stop))
    return np.split(order, ends)[parts.start : parts.stop]


@dataclass
class Division:
    """One call of partition(): the dataset, the parts, limits and progress.

    first: the first part.
    """

    store: FeatureStore
    manifest: Manifest
    workplace: Workplace
    first: Part
    workers: int
    memory_bytes: int
    on_bytes: Callable[[int], None]

    def __post_init__(self) -> None:
        self.parts = self.first.count
        self.roots = [self.workplace.root / part_name(i) for i in range(self.parts)]
        self._owners: dict[str, ArrayEntry] = {}  # of the arrays in the first part, by node type
        self._block_edges = max(1, min(_EDGES, self.memory_bytes // 2 // _EDGE_BYTES))

    def groups(self, at_once: int) -> list[range]:
        """The parts, at most at_once in a group. One pass over the source writes a group."""
        starts = range(0, self.parts, at_once)
        return [range(first, min(first + at_once, self.parts)) for first in starts]

    def topology_groups(self) -> list[range]:
        return self.groups(_files_limit(_TOPOLOGY_FILES))

    def table_groups(self, entry: TableEntry) -> list[range]:
        """An incomplete page of each part is in memory."""
        at_once = max(1, self.memory_bytes // 4 // entry.page_bytes)
        return self.groups(min(_files_limit(_TABLE_FILES), at_once))

    def read(self, entry: ArrayEntry, first: int, last: int) -> np.ndarray:
        """Elements first … last, in new memory; the file does not stay in the page cache."""
        values: np.ndarray = read_range(self.store.locate.rows(entry), first, last).numpy()
        return values

    def node_array_bytes(self, nodes: NodesEntry) -> int:
        """The bytes of the arrays of a node type, which the parts share."""
        owners = ArrayEntry("owner.npy", owner_dtype(self.parts), (nodes.count,), 0)
        return sum(map(array_bytes, [*nodes.arrays.values(), owners]))

    def work_bytes(self) -> int:
        """The bytes of progress."""
        total = sum(map(self.node_array_bytes, self.manifest.nodes))
        total += sum(8 * r.count for r in self.manifest.relations) * (1 + len(self.topology_groups()))
        for entry in self.manifest.tables:
            if entry.scale is not None and entry.scale.columns is not None:
                total += array_bytes(entry.scale.columns)
            total += entry.row_count * entry.geometry.row_bytes * len(self.table_groups(entry))
        return total

    def needed_bytes(self) -> int:
        """The bytes of all parts, and of the owners of edges while their tables are divided."""
        total = sum(map(self.node_array_bytes, self.manifest.nodes))
        for relation in self.manifest.relations:
            ids = ArrayEntry("edge_ids.npy", id_dtype(relation), (relation.count,), 0)
            divided = [relation.arrays[role] for role in ("indices", "time") if role in relation.arrays]
            total += self.parts * array_bytes(relation.arrays["indptr"])
            total += sum(map(array_bytes, [*divided, ids]))
            if any(entry.type == relation.type for entry in self.manifest.tables):
                total += relation.count * np.dtype(owner_dtype(self.parts)).itemsize
        for entry in self.manifest.tables:
            total += (entry.geometry.page_count + self.parts) * (entry.page_bytes + 4)
        return total

    # Arrays of nodes, and owners

    def write_owners(self, nodes: NodesEntry, pieces: Iterable[np.ndarray]) -> None:
        """Write the owner of every node of a type to all parts, which share the file. pieces: the owners."""
        path, dtype = f"nodes/{encode_path(nodes.type)}.{OWNER}.npy", owner_dtype(self.parts)
        first, *others = self.roots
        entry = write_array(first, path, dtype, (nodes.count,), pieces)
        for other in others:
            link_file(first / path, other / path)
        self.on_bytes(array_bytes(entry))
        self._owners[nodes.type] = entry

    def owners(self, ntype: str) -> np.ndarray:
        """The part of each node, memory-mapped."""
        entry = self._owners[ntype]
        return map_array(self.roots[0] / entry.path, entry)

    def copy_node_arrays(self, nodes: NodesEntry) -> dict[str, ArrayEntry]:
        """Copy every array of a node type to every part. Returns their entries, and that of the owners."""
        name = encode_path(nodes.type)
        entries = {role: replace(a, path=f"nodes/{name}.{role}.npy") for role, a in nodes.arrays.items()}
        for role, source in nodes.arrays.items():
            self._copy(source, entries[role])
        return {**entries, OWNER: self._owners[nodes.type]}

    def _copy(self, source: ArrayEntry, entry: ArrayEntry) -> None:
        """Copy an array of the dataset to the entry's path in all parts, which share it by hard links if
        possible. Raises StorageError if it is damaged."""
        file, (first, *others) = self.store.locate.array(source), (root / entry.path for root in self.roots)
        first.parent.mkdir(parents=True, exist_ok=True)
        with open(open_descriptor(file), "rb") as read, open(first, "wb") as written:
            shutil.copyfileobj(read, written, MAX_BLOCK_BYTES)
            written.flush()
            sync_files([written.fileno()])
        _check_crc(first, entry, file)
        for other in others:
            link_file(first, other)
        self.on_bytes(array_bytes(entry))

    # Edges

    def edge_parts(self, relation: RelationEntry) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (first position, last position, the part of each edge between them) of all edges.

        A block has a bounded number of edges, however large a degree is.
        """
        indptr, owners = self.store.locate.map(relation.arrays["indptr"]), self.owners(relation.type[2])
        for start in range(0, len(owners), _NODES):
            bounds = np.asarray(indptr[start : start + _NODES + 1])
            node_parts = np.asarray(owners[start : start + _NODES])
            for begin in range(int(bounds[0]), int(bounds[-1]), self._block_edges):
                end = min(begin + self._block_edges, int(bounds[-1]))
                low = int(np.searchsorted(bounds, begin, side="right")) - 1
                high = int(np.searchsorted(bounds, end, side="left"))
                degrees = np.diff(np.clip(bounds[low : high + 1], begin, end))
                yield begin, end, np.repeat(node_parts[low:high], degrees)

    def read_edges(self, relation: RelationEntry, role: str, begin: int, end: int) -> np.ndarray:
        """The values of an array of edges. Edge ids that are not stored are the positions."""
        if role in relation.arrays:
            return self.read(relation.arrays[role], begin, end)
        return np.arange(begin, end, dtype=np.int64)

    def row_owners(self, entry: TableEntry) -> np.ndarray:
        """The part of each row of a table, memory-mapped; of edges from a scratch file, by id."""
        if isinstance(entry.type, str):
            return self.owners(entry.type)
        (relation,) = (r for r in self.manifest.relations if r.type == entry.type)
        dtype = np.dtype(owner_dtype(self.parts))
        path = self.workplace.scratch / encode_path(*relation.type)
        if not relation.count:
            return np.empty(0, dtype)
        if not path.exists():
            step = self.memory_bytes // 2 // dtype.itemsize
            with open(path, "wb") as file:
                for first in range(0, relation.count, step):  # a range of ids for each pass over the topology
                    owners = np.empty(min(step, relation.count - first), dtype)
                    for begin, end, parts in self.edge_parts(relation):
                        ids = self.read_edges(relation, "edge_ids", begin, end) - first
                        mine = (ids >= 0) & (ids < len(owners))
                        owners[ids[mine]] = parts[mine]
                    file.write(owners.data)
        return np.memmap(path, dtype, "r", shape=(relation.count,))

    def count(self) -> dict[str, Any]:
        """The nodes (by type), edges (by relation) and training seeds of each part, and the number of cut
        edges.

        Progress is 8 bytes per edge. Checks the checksums of the topology and the training seeds; raises
        StorageError for a damaged array.
        """
        nodes, edges, cut, locate = [], [], 0, self.store.locate
        seeds = np.zeros(self.parts, np.int64)
        for entry in self.manifest.nodes:
            owners = self.owners(entry.type)
            nodes.append(self._counted(owners).tolist())
            if (train := entry.arrays.get("train_idx")) is not None:
                check_array(locate, train)
                for start in range(0, train.shape[0], _EDGES):
                    ids = self.read(train, start, min(start + _EDGES, train.shape[0]))
                    seeds += self._counted(owners[ids])
        for relation in self.manifest.relations:
            for array in relation.arrays.values():
                check_array(locate, array)
            sources, counts = self.owners(relation.type[0]), np.zeros(self.parts, np.int64)
            for begin, end, parts in self.edge_parts(relation):
                counts += self._counted(parts)
                source_parts = sources[self.read(relation.arrays["indices"], begin, end)]
                cut += int(np.count_nonzero(source_parts != parts))
                self.on_bytes(8 * (end - begin))
            edges.append(counts.tolist())
        return {"nodes": nodes, "edges": edges, "seeds": seeds.tolist(), "cut": cut}

    def _counted(self, owners: np.ndarray) -> np.ndarray:
        """How many of these owners each part is: int64[parts]."""
        counts = np.zeros(self.parts, np.int64)
        for start in range(0, len(owners), _EDGES):
            counts += np.bincount(owners[start : start + _EDGES], minlength=self.parts)
        return counts

    def divide_topology(self, relation: RelationEntry, held: Sequence[int]) -> list[dict[str, ArrayEntry]]:
        """Write the in-edges of each part's nodes. held: the number of edges of each part.

        Returns the entries of each part. Reads the source once per group of parts.
        """
        groups = self.topology_groups()
        return [arrays for group in groups for arrays in self._write_topology(relation, group, held)]

    def _write_topology(
        self, relation: RelationEntry, group: range, held: Sequence[int]
    ) -> list[dict[str, ArrayEntry]]:
        owners, indptr = self.owners(relation.type[2]), self.store.locate.map(relation.arrays["indptr"])
        dtypes = {"indices": relation.arrays["indices"].dtype, "edge_ids": id_dtype(relation)}
        if "time" in relation.arrays:
            dtypes["time"] = relation.arrays["time"].dtype
        with ExitStack() as stack:

            def array(part: int, role: str, dtype: str, count: int) -> ArrayFile:
                path = f"graph/{encode_path(*relation.type)}/{role}.npy"
                return stack.enter_context(ArrayFile(self.roots[part], path, dtype, (count,)))

            files = {"indptr": [array(part, "indptr", "int64", len(indptr)) for part in group]}
            for role, dtype in dtypes.items():
                files[role] = [array(part, role, dtype, held[part]) for part in group]
            totals = [0] * len(group)
            for file in files["indptr"]:
                file.append(np.zeros(1, np.int64))
            for start in range(0, len(owners), _NODES):
                degrees, node_parts = (
                    np.diff(indptr[start : start + _NODES + 1]),
                    owners[start : start + _NODES],
                )
                for i, part in enumerate(group):
                    ends = totals[i] + np.cumsum(np.where(node_parts == part, degrees, 0))
                    files["indptr"][i].append(ends)
                    totals[i] = int(ends[-1])
            for begin, end, edge_parts in self.edge_parts(relation):
                chosen = by_part(edge_parts, group)
                for role in dtypes:
                    values = self.read_edges(relation, role, begin, end)
                    for file, mine in zip(files[role], chosen, strict=True):
                        file.append(values[mine])
                self.on_bytes(8 * (end - begin))
            return [{role: files[role][i].finish() for role in files} for i in range(len(group))]

    # Rows

    def divide_table(self, entry: TableEntry, held: Sequence[int]) -> list[TableEntry]:
        """Divide a table. held: the number of rows of each part. Returns its entry in each part."""
        name = table_path(entry.type, entry.key)
        folder = f"tables/{name}"
        written = []
        for rows in held:
            pages = div_ceil(rows, entry.geometry.rows_per_page)
            sums = ArrayEntry(f"{folder}/checksum.bin", "uint32", (pages,), 0)
            shards = shard_paths(name, [], 1)
            written.append(replace(entry, row_count=rows, shards=shards, checksums=sums, order=None))
        columns = entry.scale.columns if entry.scale is not None else None
        if columns is not None:
            copied = replace(columns, path=f"{folder}/scale.npy")
            self._copy(columns, copied)
            written = [replace(w, scale=ScaleEntry("column", copied)) for w in written]
        if entry.order is not None:
            check_array(self.store.locate, entry.order)
        sums_crc = [
            crc for group in self.table_groups(entry) for crc in self._write_rows(entry, written, group)
        ]
        return [w.with_crc(crc) for w, crc in zip(written, sums_crc, strict=True)]

    def _write_rows(self, entry: TableEntry, written: Sequence[TableEntry], group: range) -> list[int]:
        """Write the rows of these parts, in the order of their ids. Returns the CRC32C of their checksums.

        Rows stay as they are stored. Reads the source once, and compares every page with its checksum; a
        source with an order of rows is compared first, then read through memory maps. Progress is in bytes of
        the source. Raises StorageError.
        """
        table, owners = self.store.tables[entry.name], self.row_owners(entry)
        block_rows = max(1, self.memory_bytes // 2 // (_COPIES * table.row_bytes + _ROW_BYTES))
        with ExitStack() as stack:
            buffers = threading.local()
            sinks = [
                stack.enter_context(PageSink(self.roots[part], written[part], buffers=buffers))
                for part in group
            ]
            reader = stack.enter_context(table.open_pages(check_crc=True))
            pool = stack.enter_context(ThreadPoolExecutor(self.workers, "gids-partition"))
            if table.order is not None:
                step = max(1, _CHECKED_BYTES // table.page_bytes)
                for page in range(0, table.page_count, step):
                    reader.pages(page, step)

            def read(start: int) -> np.ndarray:
                if table.order is None:
                    return reader.rows(start, block_rows)
                return table.read_stored(np.arange(start, min(start + block_rows, table.row_count)))

            for start, rows in read_ahead(read, range(0, table.row_count, block_rows)):
                chosen = by_part(owners[start : start + len(rows)], group)

                def add(sink: PageSink, mine: np.ndarray, rows: np.ndarray = rows) -> None:
                    sink.append(rows[mine])

                list(pool.map(add, sinks, chosen))
                self.on_bytes(rows.nbytes)
            return list(pool.map(PageSink.finish, sinks))


def id_dtype(relation: RelationEntry) -> str:
    """The element type of the edge ids in parts."""
    if "edge_ids" in relation.arrays:
        return relation.arrays["edge_ids"].dtype
    return "int64" if relation.count > 1 << 31 else relation.arrays["indices"].dtype
