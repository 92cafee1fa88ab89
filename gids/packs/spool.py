"""Spool: sampled minibatches in scratch, in the order in which they will be trained.

A minibatch is any object that pickles, as for worker processes. Knows tensors and bytes.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.feature_cache import check_ids
from gids.cuda import on_host
from gids.errors import StorageError
from gids.packs.scratch import BLOCK, Scratch
from gids.store import Graph, Table
from gids.store.geometry import align_up
from gids.store.table import positions_of

Rows = npt.NDArray[np.uint32]
"""Positions of rows on disk, as a minibatch reads them."""

MOST_ROWS = 1 << 32
"""Rows of a table that an annex can hold: positions take 4 bytes."""

_GROWTH = 64 << 20
"""The file grows by this many bytes at a time, or by 1/64 of the scratch if that is less."""

_SMALL = 64 << 10
"""Shorter parts of a minibatch have memory of their own, which is what is kept where only they are kept."""

KEPT = 2
"""Memory of so many minibatches is used again: fresh memory costs more than to read into it. One is the
consumer's."""

_CPU = torch.device("cpu")
_VECTORS = 512  # buffers that one system call writes or reads


class NotSpoolable(TypeError):
    """A minibatch does not pickle."""


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


class Spool:
    """Minibatches, first in, first out. Its file is written through the page cache.

    Raises StorageError if a directory takes no file.

    Attributes: bytes_written, bytes_read.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._file = scratch.open(striped=False)
        self._growth = align_up(min(_GROWTH, scratch.limit_bytes // 64), BLOCK)
        self._io = io.FileIO(self._file.paths[0], "r+")  # without O_DIRECT
        self._lengths: deque[list[int]] = deque()  # of each minibatch: of its parts
        self._kept: list[object] = []  # what minibatches refer to: graphs of the dataset
        self._longest = 0  # memory of a minibatch
        self._pool: _core.BufferPool | None = None
        self.bytes_written = self.bytes_read = 0

    def __len__(self) -> int:
        """Minibatches that were put and not taken."""
        return len(self._lengths)

    def put(self, minibatch: object) -> None:
        """Add a minibatch. Raises NotSpoolable, StorageError (ScratchFull); then nothing was added."""
        parts = self._pickled(minibatch)
        lengths = [len(part) for part in parts]
        end = self.bytes_written + sum(lengths)
        try:
            if end > self._file.nbytes:
                self._file.reserve(align_up(end + self._growth, BLOCK))
            self._move(os.pwritev, parts, self.bytes_written, "write")
        finally:
            parts.clear()  # else frames of an error leave views to the garbage collector: Python crashes
        self._lengths.append(lengths)
        self._longest = max(self._longest, _end_of(self._lengths[-1]))
        self.bytes_written = end

    def take(self) -> Any:
        """The oldest minibatch, which has memory of its own. Raises StorageError."""
        lengths = self._lengths.popleft()
        if self._pool is None:
            self._pool = _core.BufferPool.create(KEPT * self._longest)
        memory = self._pool.take(_end_of(lengths), self._longest).data
        at = accumulate(map(_room_of, lengths), initial=0)
        parts = [
            memory[i : i + n] if n >= _SMALL else memoryview(bytearray(n))
            for i, n in zip(at, lengths, strict=False)
        ]
        self._move(os.preadv, parts, self.bytes_read, "read")
        self.bytes_read += sum(map(len, parts))
        pickled, *buffers = parts
        try:
            return _Unpickler(io.BytesIO(pickled), buffers, self._kept).load()
        except Exception as error:  # of the objects' own methods
            raise RuntimeError(
                f"a minibatch that was pickled cannot be read back: {error!r}; let its sampler return "
                "objects that pickle faithfully, or use reads='random'"
            ) from error

    def close(self) -> None:
        """Give the space back. Idempotent."""
        self._io.close()
        self._lengths.clear()
        self._file.close()

    def _pickled(self, minibatch: object) -> list[memoryview]:
        """The pickled object, then its buffers."""
        buffers: list[pickle.PickleBuffer] = []
        out = io.BytesIO()
        try:
            _Pickler(out, buffers, self._kept).dump(minibatch)
        except Exception as error:  # of the objects' own methods
            raise NotSpoolable(f"a {type(minibatch).__name__} does not pickle: {error}") from error
        return [out.getbuffer(), *(b.raw() for b in buffers)]

    def _move(self, call: Any, parts: list[memoryview], at: int, what: str) -> None:
        """pwritev or preadv of all parts."""
        left = deque(part for part in parts if len(part))
        try:
            while left:
                done = call(self._io.fileno(), [left[i] for i in range(min(len(left), _VECTORS))], at)
                if not done:
                    raise OSError(5, "the file ended")
                at += done
                while left and done >= len(left[0]):
                    done -= len(left.popleft())
                if done:
                    left[0] = left[0][done:]
        except OSError as error:
            reason = f"cannot {what} a sampled minibatch: {error.strerror}"
            raise StorageError(error.errno or 5, reason, self._file.directories[0]) from error
        finally:
            left.clear()  # as in put()


def _room_of(length: int) -> int:
    """Bytes of a part in the memory of its minibatch."""
    return align_up(length, 64) if length >= _SMALL else 0


def _end_of(lengths: Sequence[int]) -> int:
    """Memory of a minibatch whose parts have these lengths."""
    return sum(map(_room_of, lengths))


class _Pickler(pickle.Pickler):
    """Pickles tensors as buffers out of band, which are not copied on the way, and graphs by reference.

    kept: gets the objects that are kept in memory.
    """

    def __init__(self, out: io.BytesIO, buffers: list[pickle.PickleBuffer], kept: list[object]) -> None:
        super().__init__(out, protocol=5, buffer_callback=buffers.append)
        self._kept = kept

    def persistent_id(self, obj: Any) -> int | None:
        mapped = isinstance(obj, np.memmap) and obj._mmap is not None  # type: ignore[attr-defined]
        if not mapped and not isinstance(obj, Graph):
            return None
        for i, known in enumerate(self._kept):
            if known is obj:
                return i
        self._kept.append(obj)
        return len(self._kept) - 1

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.requires_grad:
            return NotImplemented
        if obj.is_quantized or obj.is_meta or obj.is_complex() or obj.__dict__:
            return NotImplemented
        flat = on_host(obj.contiguous()).reshape(-1)
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
