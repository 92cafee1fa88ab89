"""NodesById: the nodes of one type by the ids in a table, to number the ends of edges. For readers/tables.py.

Ids are divided by their key into partitions on disk. Nodes and edges of equal ids are in the same partition,
so they are joined one partition at a time: memory does not grow with the table. pyarrow compares the ids
themselves, not their keys.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gids.convert.arrow_table import ArrowTable
from gids.convert.source_files import shown
from gids.convert.stream_rows import BLOCK_BYTES, saved
from gids.errors import FormatError
from gids.store.dtypes import equal_values
from gids.store.ids import MAX_ID_BYTES, number_keys, text_keys
from gids.store.manifest import position_dtype
from gids.store.rows import FileRows, Rows, blocks

_PARTITION_IDS = 1 << 18
_MAX_PARTITIONS = 256  # files that are open at a time
_ID_BYTES = 200  # of memory per id that is joined, without its text
_TEXT_COPIES = 4  # of the text of an id
_MERGE_ROWS = 1 << 20


class NodesById:
    """The nodes of a type, which are the rows of a table, by the ids in one of its columns.

    memory_bytes: limit for joining. scratch: a directory to make, kept as long as arrays are read.

    Attributes: is_text; arrays (those of a dataset, by role).

    Raises FormatError for a missing id, an id of two rows, and too little memory.
    """

    def __init__(
        self, ntype: str, table: ArrowTable, column: str, *, scratch: Path, memory_bytes: int
    ) -> None:
        self.ntype, self._table, self._column = ntype, table, column
        self.is_text = table.ids_are_text(column)
        self._pa: Any = importlib.import_module("pyarrow")
        self._kind = self._pa.large_string() if self.is_text else self._pa.int64()
        self._scratch, self._memory_bytes = scratch, memory_bytes
        scratch.mkdir()
        count = 1
        while count < _MAX_PARTITIONS and count * _PARTITION_IDS < table.row_count:
            count *= 2
        self._nodes = _Partitions(scratch / "nodes", count)
        self.arrays: dict[str, Rows] = {}
        self._write_ids()
        self._check_memory()
        self._write_keys()

    def nodes_of(self, table: ArrowTable, column: str, target: Path) -> FileRows:
        """The node of each id in a column of a table, int64[rows], in a file; -1: no node has the id."""

        def ids() -> Iterator[Any]:
            return table.ids(column, as_text=self.is_text)

        if self._nodes.count == 1:
            return saved(target, self._join(0, ids()))
        ends = _Partitions(target.with_suffix(".ends"), self._nodes.count)
        which, joined = target.with_suffix(".parts"), target.with_suffix(".joined")
        with ends.open(self._pa.schema({"id": self._kind})), open(which, "wb") as numbers:
            for batch in ids():
                partitions = self._partitions(_keys(batch))
                ends.add(self._pa.record_batch([batch], ["id"]), partitions)
                numbers.write(partitions.data)
        parts = ((batch.column("id") for batch in ends.read(index)) for index in range(ends.count))
        saved(joined, chain.from_iterable(starmap(self._join, enumerate(parts))))
        shutil.rmtree(ends.folder)
        nodes = saved(target, _merged(which, joined, ends.row_counts))
        which.unlink()
        joined.unlink()
        return nodes

    def _write_ids(self) -> None:
        """Write the ids in the order of the nodes, and divide them."""
        row = text_bytes = 0
        with contextlib.ExitStack() as stack:
            schema = self._pa.schema({"row": self._pa.int64(), "id": self._kind})
            stack.enter_context(self._nodes.open(schema))
            texts = stack.enter_context(open(self._scratch / "id", "wb"))
            offsets = stack.enter_context(open(self._scratch / "offset", "wb"))
            offsets.write(np.zeros(1, np.int64).data)
            for ids in self._table.ids(self._column, as_text=self.is_text):
                self._check(ids, row)
                keys = _keys(ids)
                if self.is_text:
                    data, bounds = _text(ids)
                    texts.write(data.data)
                    offsets.write((bounds[1:] + text_bytes).data)
                    text_bytes += len(data)
                else:
                    texts.write(ids.to_numpy().data)
                rows = np.arange(row, row + len(ids))
                batch = self._pa.record_batch([rows, ids], schema=schema)
                self._nodes.add(batch, self._partitions(keys))
                row += len(ids)
        kind, count = (torch.uint8, text_bytes) if self.is_text else (torch.int64, row)
        self.arrays["id"] = FileRows(self._scratch / "id", (count,), kind)
        if self.is_text:
            self.arrays["id_offset"] = FileRows(self._scratch / "offset", (row + 1,), torch.int64)

    def _check(self, ids: Any, first: int) -> None:
        """Raise FormatError for a missing id, and for one that is too long. first: row of the first id."""
        if ids.null_count:
            at = first + int(np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False))[0])
            raise FormatError(f"{self._table.where(at)}: the node has no id in column {self._column!r}")
        if self.is_text:
            long = np.flatnonzero(np.diff(_text(ids)[1]) > MAX_ID_BYTES)
            if len(long):
                raise FormatError(
                    f"{self._table.where(first + int(long[0]))}: the id in column {self._column!r} has more "
                    f"than {MAX_ID_BYTES} bytes, the limit"
                )

    def _write_keys(self) -> None:
        """Write the keys in ascending order, and their nodes. Refuse an id that two nodes have."""
        count = self._table.row_count
        dtype = position_dtype(count)
        with open(self._scratch / "key", "wb") as keys, open(self._scratch / "node", "wb") as nodes:
            for index in range(self._nodes.count):
                rows, ids = self._loaded(index)
                firsts = self._pa.compute.index_in(ids, value_set=ids).to_numpy()
                again = np.flatnonzero(firsts != np.arange(len(firsts)))
                if len(again):
                    at = int(again[0])
                    places = [self._table.where(int(rows[i])) for i in (firsts[at], at)]
                    id_ = shown(ids[at].as_py())
                    raise FormatError(f"two {self.ntype!r} nodes have the id {id_}: {' and '.join(places)}")
                of_rows = _keys(ids)
                order = np.argsort(of_rows, kind="stable")
                keys.write(of_rows[order].data)
                nodes.write(rows[order].astype(dtype).data)
        self.arrays["id_key"] = FileRows(self._scratch / "key", (count,), torch.int64)
        self.arrays["id_node"] = FileRows(self._scratch / "node", (count,), getattr(torch, dtype))

    def _check_memory(self) -> None:
        """Raise FormatError if a partition does not fit into half of the memory."""
        needed = max(
            _ID_BYTES * count + _TEXT_COPIES * size_bytes
            for count, size_bytes in zip(self._nodes.row_counts, self._nodes.nbytes, strict=True)
        )
        if needed > self._memory_bytes // 2:
            raise FormatError(
                f"the ids of {self._table.row_count} {self.ntype!r} nodes need more memory: give "
                f"--memory {-(-2 * needed // 1_000_000)}MB"
            )

    def _loaded(self, index: int) -> tuple[np.ndarray, Any]:
        """(rows, ids) of the nodes in a partition."""
        batches = list(self._nodes.read(index))
        rows = [batch.column("row").to_numpy() for batch in batches]
        ids = [batch.column("id") for batch in batches]
        return (
            np.concatenate([np.empty(0, np.int64), *rows]),
            self._pa.concat_arrays([self._pa.array([], self._kind), *ids]),
        )

    def _join(self, index: int, batches: Iterable[Any]) -> Iterator[np.ndarray]:
        """The nodes of ids in a partition, in pieces."""
        rows, known = self._loaded(index)
        rows = np.append(rows, -1)  # for an unknown id, whose index is -1
        for ids in self._joined(batches):
            yield rows[self._pa.compute.index_in(ids, value_set=known).fill_null(-1).to_numpy()]

    def _joined(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches in pieces of an eighth of the memory: each lookup builds a hash table of the nodes."""
        held: list[Any] = []
        held_bytes = 0
        for batch in batches:
            held.append(batch)
            held_bytes += batch.nbytes + 16 * len(batch)
            if held_bytes > self._memory_bytes // 8:
                yield self._pa.concat_arrays(held)
                held, held_bytes = [], 0
        if held:
            yield self._pa.concat_arrays(held)

    def _partitions(self, keys: np.ndarray) -> np.ndarray:
        """The partition of each key, uint8[n]: they ascend with the keys."""
        bits = self._nodes.count.bit_length() - 1
        if not bits:
            return np.zeros(len(keys), np.uint8)
        return ((keys >> (64 - bits)) + (self._nodes.count >> 1)).astype(np.uint8)


class _Partitions:
    """Record batches that are divided into partitions, each in a file.

    Attributes: count; row_counts, nbytes (of each partition).
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self._ipc: Any = importlib.import_module("pyarrow.ipc")
        self.row_counts, self.nbytes = [0] * count, [0] * count

    @contextlib.contextmanager
    def open(self, schema: Any) -> Iterator[None]:
        """Open the files to add to them."""
        self.folder.mkdir()
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(self.folder / str(i), "wb")) for i in range(self.count)]
            self._writers = [stack.enter_context(self._ipc.new_stream(file, schema)) for file in files]
            yield

    def add(self, batch: Any, partitions: np.ndarray) -> None:
        """Append the rows of a batch to the partitions, uint8[rows]."""
        if self.count > 1:
            batch = batch.take(np.argsort(partitions, kind="stable"))
        starts = np.concatenate([[0], np.cumsum(np.bincount(partitions, minlength=self.count))]).tolist()
        for index in range(self.count):
            if part := batch.slice(starts[index], starts[index + 1] - starts[index]):
                self._writers[index].write_batch(part)
                self.row_counts[index] += part.num_rows
                self.nbytes[index] += part.nbytes

    def read(self, index: int) -> Iterator[Any]:
        """The batches of a partition, in the order in which their rows were added."""
        with open(self.folder / str(index), "rb") as file, self._ipc.open_stream(file) as batches:
            yield from batches


def _merged(which: Path, joined: Path, row_counts: list[int]) -> Iterator[np.ndarray]:
    """The values of a file that is sorted by partition, int64, in the order of the rows.

    which: file of the partition of each row, uint8. row_counts: of the partitions.
    """
    at = np.concatenate([[0], np.cumsum(row_counts)]).tolist()  # where the next value of each is
    with open(which, "rb") as partitions, open(joined, "rb") as values:
        while len(numbers := np.fromfile(partitions, np.uint8, _MERGE_ROWS)):
            merged = np.empty(len(numbers), np.int64)
            counts = np.bincount(numbers, minlength=len(row_counts)).tolist()
            sorted_values = []
            for index, count in enumerate(counts):
                values.seek(8 * at[index])
                sorted_values.append(np.fromfile(values, np.int64, count))
                at[index] += count
            merged[np.argsort(numbers, kind="stable")] = np.concatenate(sorted_values)
            yield merged


def _keys(ids: Any) -> np.ndarray:
    """The keys of an array of ids, int64[n]. A null may have any key."""
    if str(ids.type) == "int64":
        return number_keys(ids.fill_null(0).to_numpy())
    return text_keys(*_text(ids))


def _text(ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """The UTF-8 of a large_string array, and the offset of each id in it, int64[n + 1]."""
    _, offsets, data = ids.buffers()
    if not len(ids):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    bounds = np.frombuffer(offsets, np.int64, len(ids) + 1, 8 * ids.offset)
    text = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return text[bounds[0] : bounds[-1]], bounds - bounds[0]


def are_positions(table: ArrowTable, column: str) -> bool:
    """Whether a column of numbers is 0, 1, 2, …: then ids are node numbers."""
    dtype = table.dtype(column)
    if dtype is not None and dtype.is_floating_point and not table.is_list(table.types[column]):
        return all(
            bool(equal_values(block, torch.arange(start, start + len(block))).all())
            for start, block in blocks(table.rows([column]), BLOCK_BYTES)
        )
    if table.ids_are_text(column):
        return False
    row = 0
    for ids in table.ids(column, as_text=False):
        if ids.null_count or (ids.to_numpy() != np.arange(row, row + len(ids))).any():
            return False
        row += len(ids)
    return True
