"""Spool: sampled minibatches on scratch, from the moment they are sampled until they are trained.

The rows of a minibatch are needed first, to cut packs, and the minibatch itself later. Knows tensors and
bytes; a minibatch is any object that pickles.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.feature_cache import check_ids
from gids.closing import Threads
from gids.cuda import on_host
from gids.errors import StorageError
from gids.packs.scratch import BLOCK, Scratch, ScratchFile, ScratchFull
from gids.store import Graph, Table
from gids.store.geometry import align_up
from gids.store.table import positions_of

_AHEAD = 2
"""Minibatches that are read before they are due."""

WRITING = 3
"""Minibatches that are written at a time, at most."""

_GROWTH = 64 << 20
"""The file grows by this many bytes at a time, or by less where scratch is small."""

_GROWTH_SHARE = 64
"""The file grows by at most 1/64 of the scratch at a time."""

_NARROW = 1024
"""An int64 tensor of so many values or more is written in 4 bytes a value, if all are in [0, 2^32)."""

_SMALL = 64 << 10
"""Arrays and tensors of so many bytes or fewer have memory of their own: if they are kept, as labels may be
for a whole epoch, what was read with them is not."""

_FAITHFUL = ("builtins", "dgl", "gids", "numpy", "torch", "torch_geometric")
"""Packages whose objects pickle faithfully, if one of the same type did."""

_CURE = "make its sampler return objects that pickle faithfully, or use reads='random'"


Rows = npt.NDArray[np.uint32]
"""Positions of rows on disk, as a minibatch reads them."""

MOST_ROWS = 1 << 32
"""Rows of a table that packs can hold: positions take 4 bytes."""

_CPU = torch.device("cpu")


class ByReference:
    """What minibatches refer to, and what is neither written nor copied: it stays in memory."""


class NotSpoolable(TypeError):
    """A minibatch does not pickle, or does not unpickle to the same minibatch."""


@dataclass(frozen=True, eq=False)
class Reads:
    """What a minibatch reads. rows: of each table of the loader. tables: names of those that it reads."""

    rows: list[Rows]
    tables: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Reads)
            and self.tables == other.tables
            and all(np.array_equal(a, b) for a, b in zip(self.rows, other.rows, strict=True))
        )


def rows_of(ids: Mapping[str, torch.Tensor], tables: Sequence[Table]) -> list[Rows]:
    """The rows that a minibatch reads of each table: uint32[n] each, in the order of its ids.

    ids: int64[n] on the CPU, by table. Raises IndexError for an id out of range, KeyError for an unknown
    table, TypeError or ValueError for a wrong dtype, device or shape.
    """
    check_ids(ids, [t.name for t in tables], _CPU)
    rows = []
    for table in tables:
        if table.name not in ids:
            rows.append(np.empty(0, np.uint32))
            continue
        array = ids[table.name].contiguous().numpy()
        try:
            _core.check_rows(array, table.row_count)
        except IndexError as error:
            raise IndexError(f"table '{table.name}': {error}") from None
        rows.append((array if table.order is None else positions_of(array, table.order)).astype(np.uint32))
    return rows


@dataclass(frozen=True)
class _Record:
    """Where a minibatch is. parts: (offset in the record, bytes): the rows of each table, the pickled object,
    then its buffers. tables: names of those that it reads. written: done once it may be read."""

    offset: int
    nbytes: int
    parts: tuple[tuple[int, int], ...]
    tables: tuple[str, ...]
    written: Future[None]


class Spool:
    """Minibatches with their rows, in the order in which they were put. Used by one thread.

    reads_of: returns what a minibatch reads. A minibatch that comes back from scratch must read the same.
    It is unpickled on trial before it is written, unless the types of its objects are known: those of the
    packages in _FAITHFUL are after one trial. on_device: its tensors are on a device. Then all types are, and
    what comes back is not compared, because the host would wait for training each time. spare: as of
    Scratch.open(). counters: get "bytes_read" and "bytes_written".
    """

    def __init__(
        self,
        scratch: Scratch,
        table_count: int,
        reads_of: Callable[[Any], Reads],
        *,
        on_device: bool = False,
        spare: bool = False,
        counters: Counter[str] | None = None,
    ) -> None:
        self.file: ScratchFile = scratch.open(spare=spare)
        self._growth = align_up(min(_GROWTH, scratch.limit_bytes // _GROWTH_SHARE), BLOCK)
        self.table_count = table_count
        self._reads_of, self._on_device = reads_of, on_device
        self._types: set[type] = set()  # that are known to unpickle
        self._records: list[_Record] = []
        self._kept: list[object] = []  # what minibatches refer to: graphs of the dataset
        self._end = 0
        self._staging: list[mmap.mmap] = []  # buffers that are not in use
        self._pid = os.getpid()
        self._readers = Threads(1, "gids-spool")
        self._writers = Threads(WRITING, "gids-spool-write")
        self._coming: dict[int, Future[mmap.mmap]] = {}
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._rows_bytes = 0  # that were read and are not in counters

    def __len__(self) -> int:
        return len(self._records)

    @property
    def bytes_written(self) -> int:
        return self._end

    def begin_put(self, minibatch: object, reads: Reads) -> Future[None]:
        """Begin to write a minibatch. Raises NotSpoolable, or OSError (StorageError, or for want of memory);
        then nothing was added.

        The result may raise StorageError too, and then drop_from() must follow.
        """
        pieces = [(array, _stored(array)) for array in (*reads.rows, *self._pickled(minibatch, reads))]
        parts, end = [], 0
        for array, stored in pieces:
            size = len(array) * stored.itemsize
            parts.append((end, size))
            end = align_up(end + size, 64)
        nbytes = align_up(max(end, 1), BLOCK)
        if self._end + nbytes > self.file.nbytes:
            try:
                self.file.reserve(self._end + max(nbytes, self._growth))
            except ScratchFull:
                self.file.reserve(self._end + nbytes)
        staging = self._staging.pop() if self._staging else mmap.mmap(-1, 1 << 20)
        if nbytes > len(staging):
            staging = mmap.mmap(-1, align_up(nbytes + nbytes // 4, BLOCK))
        staged = np.frombuffer(staging, np.uint8)
        for (begin, size), (array, stored) in zip(parts, pieces, strict=True):
            np.copyto(staged[begin : begin + size].view(stored), array, casting="unsafe")
        del staged
        written = self._writers.submit(self._write, staging, nbytes, self._end)
        self._records.append(_Record(self._end, nbytes, tuple(parts), reads.tables, written))
        self._end += nbytes
        self.counters["bytes_written"] += nbytes
        return written

    def drop_from(self, index: int) -> None:
        """Forget the minibatches from index on. They are written, or failed."""
        if index < len(self._records):
            self.counters["bytes_written"] -= self._end - self._records[index].offset
            self._end = self._records[index].offset
            for read in range(index, len(self._records)):
                self._coming.pop(read, None)
            del self._records[index:]

    def rows(self, index: int) -> list[Rows]:
        """The rows of a minibatch in each table. Blocks. Raises StorageError."""
        record = self._records[index]
        begin, size = record.parts[self.table_count - 1]
        nbytes = align_up(max(begin + size, 1), BLOCK)
        read = _read(self.file, record.offset, nbytes)
        self._rows_bytes += nbytes
        return _rows(record, read, self.table_count)

    def rows_of(self, indices: Iterable[int]) -> Iterator[list[Rows]]:
        """The rows of minibatches, read ahead. Raises StorageError."""
        coming: deque[Future[list[Rows]]] = deque()
        for index in indices:
            coming.append(self._readers.submit(self.rows, index))
            if len(coming) > _AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()

    def take(self, index: int) -> tuple[Any, Reads]:
        """A minibatch, and what it reads. Blocks until it is written and read; reads those of the next ones
        ahead that are written too.

        Raises StorageError, and RuntimeError if the minibatch is not the one that was put.
        """
        self._records[index].written.result()
        for ahead in range(index, min(index + 1 + _AHEAD, len(self._records))):
            record = self._records[ahead]
            if not record.written.done():
                break
            if ahead not in self._coming:
                self._coming[ahead] = self._readers.submit(_read, self.file, record.offset, record.nbytes)
        record = self._records[index]
        read = self._coming.pop(index).result()
        self.counters["bytes_read"] += record.nbytes
        self._count_rows()
        reads = Reads(_rows(record, read, self.table_count), record.tables)
        view = memoryview(read)
        parts = record.parts[self.table_count :]
        pieces = [view[i : i + n] if n > _SMALL else bytearray(view[i : i + n]) for i, n in parts]
        try:
            minibatch = self._unpickled(pieces)
            same = self._on_device or self._reads_of(minibatch) == reads
        except Exception as error:
            raise RuntimeError(f"minibatch {index} does not unpickle ({error!r}): {_CURE}") from error
        if not same:
            raise RuntimeError(
                f"minibatch {index}, a {type(minibatch).__name__}, reads other rows after it was pickled and "
                f"unpickled: {_CURE}"
            )
        return minibatch, reads

    def close(self) -> None:
        """Give the space back. Idempotent."""
        if os.getpid() == self._pid:  # a forked child has no such thread
            for threads in (self._readers, self._writers):
                threads.shutdown(wait=True, cancel_futures=True)
        self._count_rows()
        self._coming.clear()
        self._reads_of = _closed  # it may refer to who has this spool
        self.file.close()

    def _count_rows(self) -> None:
        """Count what rows() read. Not there, because other threads call it."""
        self.counters["bytes_read"] += self._rows_bytes
        self._rows_bytes = 0

    def _write(self, staging: mmap.mmap, nbytes: int, offset: int) -> None:
        try:
            _write(self.file, memoryview(staging)[:nbytes], offset)
        finally:
            self._staging.append(staging)

    def _pickled(self, minibatch: object, reads: Reads) -> list[npt.NDArray[Any]]:
        """The pickled object, and its buffers. Unpickles it on trial, unless the types in it are known."""
        buffers: list[pickle.PickleBuffer] = []
        out = io.BytesIO()
        what = f"a {type(minibatch).__name__}"
        try:
            pickler = _Pickler(out, buffers, self._kept)
            pickler.dump(minibatch)
        except Exception as error:  # of the objects' own methods
            raise NotSpoolable(f"{what} does not pickle: {error}") from error
        pieces = [out.getbuffer(), *(b.raw() for b in buffers)]
        if not pickler.types <= self._types:
            try:
                same = self._reads_of(self._unpickled([bytearray(piece) for piece in pieces])) == reads
            except Exception as error:
                raise NotSpoolable(f"{what} does not unpickle: {error}") from error
            if not same:
                raise NotSpoolable(f"{what} reads other rows after it was pickled and unpickled")
            faithful = {t for t in pickler.types if str(t.__module__).split(".")[0] in _FAITHFUL}
            self._types |= pickler.types if self._on_device else faithful
        dtypes = (np.int64 if i in pickler.int64 else np.uint8 for i in range(-1, len(buffers)))
        return [np.frombuffer(piece, dtype) for piece, dtype in zip(pieces, dtypes, strict=True)]

    def _unpickled(self, pieces: Sequence[Any]) -> Any:
        pickled, *buffers = pieces
        return _Unpickler(io.BytesIO(pickled), buffers, self._kept).load()


def _closed(_: Any) -> Reads:
    raise ValueError("this spool is closed")


def _rows(record: _Record, read: mmap.mmap, tables: int) -> list[Rows]:
    return [
        np.frombuffer(read, np.uint32, size // 4, begin) if size else np.empty(0, np.uint32)
        for begin, size in record.parts[:tables]
    ]


class _Pickler(pickle.Pickler):
    """Pickles tensors as buffers out of band, which are not copied on the way, and graphs by reference.

    kept: gets the objects that are kept in memory. Attributes: types: of the objects in the minibatch. int64:
    numbers of the buffers of int64 tensors.
    """

    def __init__(self, out: io.BytesIO, buffers: list[pickle.PickleBuffer], kept: list[object]) -> None:
        super().__init__(out, protocol=5, buffer_callback=buffers.append)
        self._kept, self._buffers = kept, buffers
        self.types: set[type] = set()
        self.int64: set[int] = set()

    def persistent_id(self, obj: Any) -> int | None:
        mapped = isinstance(obj, np.memmap) and obj._mmap is not None  # type: ignore[attr-defined]
        if not mapped and not isinstance(obj, Graph | ByReference):
            return None
        for i, known in enumerate(self._kept):
            if known is obj:
                return i
        self._kept.append(obj)
        return len(self._kept) - 1

    def reducer_override(self, obj: Any) -> Any:
        self.types.add(obj if isinstance(obj, type) else type(obj))
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.requires_grad:
            return NotImplemented
        if obj.is_quantized or obj.is_meta or obj.is_complex() or obj.__dict__:
            return NotImplemented
        flat = on_host(obj.contiguous()).reshape(-1)
        if flat.stride(0) != 1:  # of one value or none, so that it counts as contiguous all the same
            flat = flat.clone(memory_format=torch.contiguous_format)
        if obj.dtype == torch.int64:
            self.int64.add(len(self._buffers))  # the next one
        device = None if obj.device.type == "cpu" else str(obj.device)
        return _restore, (
            pickle.PickleBuffer(flat.view(torch.uint8).numpy().data),
            obj.dtype,
            tuple(obj.shape),
            device,
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, buffers: Sequence[memoryview], kept: Sequence[object]) -> None:
        super().__init__(data, buffers=buffers)
        self._kept = kept

    def persistent_load(self, pid: int) -> object:
        return self._kept[pid]


def _stored(array: npt.NDArray[Any]) -> np.dtype[Any]:
    """The dtype in which an array is written."""
    wide = array.dtype != np.int64 or len(array) < _NARROW or array.min() < 0 or array.max() >= 1 << 32
    return array.dtype if wide else np.dtype(np.uint32)


def _restore(
    buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...], device: str | None
) -> torch.Tensor:
    if not len(buffer):
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype == torch.int64 and len(buffer) < 8 * math.prod(shape):  # 4 bytes a value
        tensor = torch.from_numpy(np.frombuffer(buffer, np.uint32).astype(np.int64)).view(shape)
    else:
        tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
    # From pinned memory, so that the copy waits in the stream, and this thread does not wait for training.
    return tensor if device is None else tensor.pin_memory().to(device, non_blocking=True)


def _write(file: ScratchFile, data: memoryview, offset: int) -> None:
    _transfer(file, data, offset, os.pwrite, "cannot write a sampled minibatch")


def _read(file: ScratchFile, offset: int, nbytes: int) -> mmap.mmap:
    read = mmap.mmap(-1, nbytes)

    def read_rest(fd: int, rest: memoryview, at: int) -> int:
        return os.preadv(fd, [rest], at)

    _transfer(file, memoryview(read), offset, read_rest, "cannot read a sampled minibatch")
    return read


def _transfer(
    file: ScratchFile, data: memoryview, offset: int, move: Callable[[int, memoryview, int], int], what: str
) -> None:
    done = 0
    for number, at, nbytes in file.stripes(offset, len(data)):
        end, directory = done + nbytes, file.directories[number]
        while done < end:
            try:
                count = move(file.fds[number], data[done:end], at)
            except OSError as error:
                reason = f"{what}: {os.strerror(error.errno or 0)}"
                raise StorageError(error.errno or 0, reason, directory, at) from error
            if not count:
                raise StorageError(5, f"{what}: the file ended", directory, at)
            done, at = done + count, at + count
