"""Readers of extents of files into device memory: the interface, and the reader by pinned host memory.

kvikio_reader.py has the other reader, and chooses. They read the hottest pages before the first minibatch,
never those of a minibatch. They know files, offsets and bytes, but not tables or pages.
"""

from __future__ import annotations

import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from gids.closing import Closing
from gids.cuda.host_memory import host_memory
from gids.errors import StorageError

if TYPE_CHECKING:
    import torch

    from gids.cuda import Device, Event
    from gids.io.engine import Engine


class Extents(NamedTuple):
    """Columns of equal length: ``lengths[i]`` bytes at ``offsets[i]`` of file ``files[i]`` go to byte
    ``out_offsets[i]`` of the output.
    """

    files: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    out_offsets: npt.NDArray[np.int64]

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_] | slice) -> Extents:
        """The extents at these positions."""
        return Extents(self.files[index], self.offsets[index], self.lengths[index], self.out_offsets[index])

    def merged(self) -> Extents:
        """Join extents that follow each other in a file and in the output. Sorted by file and offset."""
        if len(self.files) < 2:
            return self
        shift = self.offsets - self.out_offsets  # the same for all that can be joined
        ordered = self.take(np.lexsort((self.offsets, shift, self.files)))
        joins = (
            (ordered.files[1:] == ordered.files[:-1])
            & (ordered.offsets[1:] == ordered.offsets[:-1] + ordered.lengths[:-1])
            & (ordered.out_offsets[1:] == ordered.out_offsets[:-1] + ordered.lengths[:-1])
        )
        first = np.flatnonzero(np.concatenate(([True], ~joins)))
        runs = ordered.take(first)._replace(lengths=np.add.reduceat(ordered.lengths, first))
        return runs.take(np.lexsort((runs.out_offsets, runs.offsets, runs.files)))

    def split(self, piece_bytes: int) -> Extents:
        """Cut extents into pieces of at most piece_bytes, in the same order."""
        counts = -(-self.lengths // piece_bytes)
        if not len(counts) or counts.max() == 1:
            return self
        source = np.repeat(np.arange(len(counts)), counts)
        begin = (np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)) * piece_bytes
        return Extents(
            self.files[source],
            self.offsets[source] + begin,
            np.minimum(self.lengths[source] - begin, piece_bytes),
            self.out_offsets[source] + begin,
        )


class ExtentReader(Closing, ABC):
    """Reads extents of files into device memory. One thread at a time.

    paths: names of the files, for errors.
    """

    def __init__(self, device: Device, paths: Sequence[str | os.PathLike[str]]) -> None:
        self._device, self._paths = device, list(paths)
        self._closed = False

    def read(
        self,
        files: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: torch.Tensor,
        out_offsets: npt.NDArray[np.int64],
    ) -> None:
        """Read ``lengths[i]`` bytes at ``offsets[i]`` of file ``files[i]`` to ``out[out_offsets[i]:]``.

        files: uint32[n], indices of the paths that the reader was opened with. offsets, lengths, out_offsets:
        int64[n], in any order. out: uint8[m], contiguous, on the reader's device; extents must not overlap in
        it. Fastest when neighbors in a file are neighbors in out. Waits for work on the current stream,
        then blocks until the bytes are on the device.

        Raises StorageError with shard, offset and errno (ENODATA: the file ends before the extent) if an
        extent fails; the contents of out are then undefined. Raises RuntimeError if the reader is closed.
        """
        if self._closed:
            raise RuntimeError("this reader is closed")
        extents = Extents(files, offsets, lengths, out_offsets)
        self._check(extents, out)
        self.read_checked(extents.take(lengths > 0), out)

    @abstractmethod
    def read_checked(self, extents: Extents, out: torch.Tensor) -> None:
        """The same for extents that fit and are not empty."""

    def close(self) -> None:
        """Free the reader's memory. The engine stays open. Idempotent."""
        self._closed = True

    def _check(self, extents: Extents, out: torch.Tensor) -> None:
        """Only a bug of the caller can break these."""
        files, offsets, lengths, out_offsets = extents
        assert out.device == self._device.torch_device
        assert (str(out.dtype), out.ndim, out.is_contiguous()) == ("torch.uint8", 1, True)
        assert files.dtype == np.uint32
        assert offsets.dtype == lengths.dtype == out_offsets.dtype == np.int64
        assert files.shape == offsets.shape == lengths.shape == out_offsets.shape == (len(files),)
        assert (files < len(self._paths)).all()
        assert (np.minimum(np.minimum(offsets, lengths), out_offsets) >= 0).all()
        assert (lengths <= out.numel() - out_offsets).all()

    def _failure(self, code: int, file: int, offset: int, length: int, detail: str = "") -> StorageError:
        """The error of an extent that could not be read. code: its errno. detail: added in parentheses."""
        reason = "the file ends before it" if code == errno.ENODATA else os.strerror(code)
        reason += f" ({detail})" if detail else ""
        return StorageError(code, f"cannot read {length} bytes: {reason}", self._paths[file], offset)


class PinnedExtentReader(ExtentReader):
    """Reads with an engine into pinned host memory and copies to the device.

    staging_bytes: pinned host memory. It has two halves: the engine fills one while the other is copied on a
    separate stream. Does not own the engine: close the reader first. Raises like Device.map_host().
    """

    def __init__(
        self,
        device: Device,
        engine: Engine,
        paths: Sequence[str | os.PathLike[str]],
        *,
        staging_bytes: int = 64 << 20,
    ) -> None:
        import torch

        super().__init__(device, [os.fspath(path) for path in paths])
        if staging_bytes < 2 * mmap.PAGESIZE:
            raise ValueError(f"staging_bytes must be at least {2 * mmap.PAGESIZE} (got {staging_bytes})")
        self._engine = engine
        self._half_bytes = staging_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        self._staging = np.frombuffer(host_memory(2 * self._half_bytes, device.numa_node), np.uint8)
        address, nbytes = self._staging.ctypes.data, len(self._staging)
        self._mapping = device.map_host(address, nbytes, memory=self._staging)
        self._tensor = torch.from_numpy(self._staging)
        self._stream = device.new_stream()

    def read_checked(self, extents: Extents, out: torch.Tensor) -> None:
        ordered = extents.take(np.argsort(extents.out_offsets, kind="stable"))
        pieces = ordered.split(min(self._half_bytes, self._engine.max_read_bytes))
        copied: list[Event | None] = [None, None]
        self._stream.wait_stream(self._device.current_stream())
        try:
            for number, part in enumerate(_parts(pieces, self._half_bytes)):
                half = number % 2
                if (event := copied[half]) is not None:
                    event.synchronize()
                self._read_and_copy(part, half * self._half_bytes, out)
                copied[half] = self._stream.record_event()
        finally:
            self._stream.synchronize()

    def _read_and_copy(self, part: Extents, begin: int, out: torch.Tensor) -> None:
        ends = np.cumsum(part.lengths)
        staged = begin + ends - part.lengths
        errors = self._engine.read_extents(part.files, part.offsets, part.lengths, self._staging, staged)
        if errors.any():
            raise self._first_failure(part, errors)
        breaks = part.out_offsets[1:] != part.out_offsets[:-1] + part.lengths[:-1]
        first = np.flatnonzero(np.concatenate(([True], breaks)))
        sizes = np.add.reduceat(part.lengths, first)
        with self._device.use(self._stream):
            for to, source, size in zip(
                part.out_offsets[first].tolist(), staged[first].tolist(), sizes.tolist(), strict=True
            ):
                out[to : to + size].copy_(self._tensor[source : source + size], non_blocking=True)

    def _first_failure(self, part: Extents, errors: npt.NDArray[np.int32]) -> StorageError:
        failed = np.flatnonzero(errors)
        causes = failed[errors[failed] != errno.ECANCELED]  # cancelled reads were not the cause
        failed = causes if len(causes) else failed
        i = int(failed[np.lexsort((part.offsets[failed], part.files[failed]))[0]])
        return self._failure(int(errors[i]), int(part.files[i]), int(part.offsets[i]), int(part.lengths[i]))

    def close(self) -> None:
        super().close()
        self._mapping.close()


def _parts(pieces: Extents, part_bytes: int) -> list[Extents]:
    """Pieces in groups of at most part_bytes."""
    parts = []
    ends = np.cumsum(pieces.lengths)
    begin = 0
    while begin < len(ends):
        before = ends[begin - 1] if begin else 0
        end = int(np.searchsorted(ends, before + part_bytes, side="right"))
        parts.append(pieces.take(slice(begin, end)))
        begin = end
    return parts
