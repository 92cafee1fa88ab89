"""Spool: sampled minibatches on scratch, from the moment they are sampled until they are trained.

The rows of a minibatch are needed first, to cut packs, and the minibatch itself later: it is kept, or sampled
again. Knows tensors and bytes; a minibatch is any object that pickles.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gids.errors import StorageError
from gids.packs.scratch import BLOCK, Scratch, ScratchFile, ScratchFull
from gids.packs.spaces import Rows
from gids.store import Graph
from gids.store.geometry import align_up

_AHEAD = 2
"""Minibatches that are read before they are due."""

WRITING = 3
"""Minibatches that are written at a time, at most."""

_GROWTH = 64 << 20
"""The file grows by this many bytes at a time, or by less where scratch is small."""

_GROWTH_SHARE = 64
"""The file grows by at most 1/64 of the scratch at a time."""


class ByReference:
    """What minibatches refer to, and what is neither written nor copied: it stays in memory."""


class NotSpoolable(TypeError):
    """A minibatch does not pickle."""


@dataclass(frozen=True)
class _Record:
    """Where a minibatch is. parts: (offset in the record, bytes): the rows of each space; and, if it is kept,
    the pickled object, then its buffers. tables: names of those that it reads."""

    offset: int
    nbytes: int
    parts: tuple[tuple[int, int], ...]
    tables: tuple[str, ...]
    kept: bool


class Spool:
    """Minibatches with their rows, in the order in which they were put. Used by one thread.

    again: called with the number of a minibatch that is not kept; returns a function that samples this one
    and, in later calls, those after it.
    """

    def __init__(
        self, scratch: Scratch, space_count: int, again: Callable[[int], Callable[[], Any]] | None = None
    ) -> None:
        self._file: ScratchFile = scratch.open()
        self._growth = align_up(min(_GROWTH, scratch.limit_bytes // _GROWTH_SHARE), BLOCK)
        self.space_count = space_count
        self._again = again
        self._sample: tuple[int, Callable[[], Any]] | None = None  # with the minibatch that it returns next
        self._records: list[_Record] = []
        self._kept: list[object] = []  # what minibatches refer to: graphs of the dataset
        self._end = 0
        self._staging: list[mmap.mmap] = []  # buffers that are not in use
        self._pid = os.getpid()
        self._readers = ThreadPoolExecutor(1, "gids-spool")
        self._writers = ThreadPoolExecutor(WRITING, "gids-spool-write")
        self._coming: dict[int, Future[mmap.mmap]] = {}
        self.bytes_read = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def bytes_written(self) -> int:
        return self._end

    def put(
        self, minibatch: object, rows: Sequence[Rows], tables: Sequence[str], *, keep: bool = True
    ) -> None:
        """Write a minibatch. Raises NotSpoolable, or StorageError; then nothing was added.

        rows: of each space. tables: names of the tables that it reads. keep: write the minibatch itself, and
        not only its rows.
        """
        written = self.begin_put(minibatch, rows, tables, keep=keep)
        try:
            written.result()
        except StorageError:
            self.drop_from(len(self) - 1)
            raise

    def begin_put(
        self, minibatch: object, rows: Sequence[Rows], tables: Sequence[str], *, keep: bool = True
    ) -> Future[None]:
        """As put(), without waiting: result() may raise StorageError, and then drop_from() must follow."""
        pieces: list[Any] = [*rows, *(self._pickled(minibatch) if keep else ())]
        parts, end = [], 0
        for piece in pieces:
            size = piece.nbytes
            parts.append((end, size))
            end = align_up(end + size, 64)
        nbytes = align_up(max(end, 1), BLOCK)
        if self._end + nbytes > self._file.nbytes:
            try:
                self._file.reserve(self._end + max(nbytes, self._growth))
            except ScratchFull:
                self._file.reserve(self._end + nbytes)
        staging = self._staging.pop() if self._staging else mmap.mmap(-1, 1 << 20)
        if nbytes > len(staging):
            staging = mmap.mmap(-1, align_up(nbytes + nbytes // 4, BLOCK))
        staged = np.frombuffer(staging, np.uint8)
        for (begin, size), piece in zip(parts, pieces, strict=True):
            if size:
                staged[begin : begin + size] = np.frombuffer(piece, np.uint8)
        del staged
        self._records.append(_Record(self._end, nbytes, tuple(parts), tuple(tables), keep))
        written = self._writers.submit(self._write, staging, nbytes, self._end)
        self._end += nbytes
        return written

    def drop_from(self, index: int) -> None:
        """Forget the minibatches from index on. They are written, or failed."""
        if index < len(self._records):
            self._end = self._records[index].offset
            del self._records[index:]

    def rows(self, index: int) -> list[Rows]:
        """The rows of a minibatch in each space. Blocks. Raises StorageError."""
        record = self._records[index]
        begin, size = record.parts[self.space_count - 1]
        read = _read(self._file, record.offset, align_up(max(begin + size, 1), BLOCK))
        return _rows(record, read, self.space_count)

    def rows_of(self, indices: Iterable[int]) -> Iterator[list[Rows]]:
        """The rows of minibatches, read ahead. Raises StorageError."""
        coming: deque[Future[list[Rows]]] = deque()
        for index in indices:
            coming.append(self._readers.submit(self.rows, index))
            if len(coming) > _AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()

    def take(self, index: int) -> tuple[Any, tuple[str, ...], list[Rows]]:
        """A minibatch, its tables and its rows. Blocks; reads the next ones ahead. Raises StorageError."""
        for ahead in range(index, min(index + 1 + _AHEAD, len(self._records))):
            if ahead not in self._coming:
                record = self._records[ahead]
                self._coming[ahead] = self._readers.submit(_read, self._file, record.offset, record.nbytes)
        record = self._records[index]
        read = self._coming.pop(index).result()
        self.bytes_read += record.nbytes
        rows = _rows(record, read, self.space_count)
        if not record.kept:
            return self._sample_again(index), record.tables, rows
        view = memoryview(read)
        pickled, *buffers = (view[begin : begin + size] for begin, size in record.parts[self.space_count :])
        return _Unpickler(io.BytesIO(pickled), buffers, self._kept).load(), record.tables, rows

    def rest(self, index: int) -> Iterator[Any]:
        """The minibatches from index on."""
        for i in range(index, len(self._records)):
            yield self.take(i)[0] if self._records[i].kept else self._sample_again(i)

    def close(self) -> None:
        """Give the space back. Idempotent."""
        if os.getpid() == self._pid:  # a forked child has no such thread
            for threads in (self._readers, self._writers):
                threads.shutdown(wait=True, cancel_futures=True)
        self._coming.clear()
        self._sample = None
        self._file.close()

    def _write(self, staging: mmap.mmap, nbytes: int, offset: int) -> None:
        try:
            _write(self._file, memoryview(staging)[:nbytes], offset)
        finally:
            self._staging.append(staging)

    def _pickled(self, minibatch: object) -> list[Any]:
        """The pickled object, and its buffers."""
        buffers: list[pickle.PickleBuffer] = []
        out = io.BytesIO()
        try:
            _Pickler(out, buffers, self._kept).dump(minibatch)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
            raise NotSpoolable(f"a {type(minibatch).__name__} does not pickle: {error}") from error
        return [out.getbuffer(), *(b.raw() for b in buffers)]

    def _sample_again(self, index: int) -> Any:
        if self._sample is None or self._sample[0] != index:
            assert self._again is not None
            self._sample = (index, self._again(index))
        _, sample = self._sample
        self._sample = (index + 1, sample)
        return sample()


def _rows(record: _Record, read: mmap.mmap, spaces: int) -> list[Rows]:
    return [
        np.frombuffer(read, np.uint32, size // 4, begin) if size else np.empty(0, np.uint32)
        for begin, size in record.parts[:spaces]
    ]


class _Pickler(pickle.Pickler):
    """Pickles tensors as buffers out of band, which are not copied on the way, and graphs by reference.

    kept: gets the objects that are kept in memory.
    """

    def __init__(self, out: io.BytesIO, buffers: list[pickle.PickleBuffer], kept: list[object]) -> None:
        super().__init__(out, protocol=5, buffer_callback=buffers.append)
        self._kept = kept

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Graph | np.memmap | ByReference):
            return None
        for i, known in enumerate(self._kept):
            if known is obj:
                return i
        self._kept.append(obj)
        return len(self._kept) - 1

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.requires_grad:
            return NotImplemented
        if obj.is_quantized or obj.is_meta or obj.is_complex():
            return NotImplemented
        flat = obj.contiguous().cpu().reshape(-1)
        if flat.stride(0) != 1:  # of one value or none, so that it counts as contiguous all the same
            flat = flat.clone(memory_format=torch.contiguous_format)
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


def _restore(
    buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...], device: str | None
) -> torch.Tensor:
    if not len(buffer):
        return torch.empty(shape, dtype=dtype, device=device)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
    # From pinned memory, so that the copy waits in the stream, and this thread does not wait for training.
    return tensor if device is None else tensor.pin_memory().to(device, non_blocking=True)


def _write(file: ScratchFile, data: memoryview, offset: int) -> None:
    def write(rest: memoryview, at: int) -> int:
        return os.pwrite(file.fd, rest, at)

    _transfer(file, data, offset, write, "cannot write a sampled minibatch")


def _read(file: ScratchFile, offset: int, nbytes: int) -> mmap.mmap:
    read = mmap.mmap(-1, nbytes)

    def read_rest(rest: memoryview, at: int) -> int:
        return os.preadv(file.fd, [rest], at)

    _transfer(file, memoryview(read), offset, read_rest, "cannot read a sampled minibatch")
    return read


def _transfer(
    file: ScratchFile, data: memoryview, offset: int, move: Callable[[memoryview, int], int], what: str
) -> None:
    done = 0
    while done < len(data):
        try:
            count = move(data[done:], offset + done)
        except OSError as error:
            reason = f"{what}: {os.strerror(error.errno or 0)}"
            raise StorageError(error.errno or 0, reason, file.directory, offset + done) from error
        if not count:
            raise StorageError(5, f"{what}: the file ended", file.directory, offset + done)
        done += count
