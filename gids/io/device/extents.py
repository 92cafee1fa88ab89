"""Reads extents of files into device memory: the interface of a reader, shared code, and the choice of one.

Called by the cache to preload hot pages, and by benchmarks; never for a minibatch. Knows files, offsets and
bytes, but not tables or pages.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gids.errors import StorageError

if TYPE_CHECKING:
    import torch

    from gids.cuda import Device
    from gids.io.engine import Engine

_log = logging.getLogger("gids")
_logged: set[str] = set()
_TRIAL_BYTES = 32 << 20
_TRIALS = 2  # of each reader; the better one counts, as the first registers memory
_SMALL_STAGING_BYTES = 8 << 20


class ExtentReader(Protocol):
    """Reads extents of files into device memory. Made by :func:`open_extent_reader`. One thread at a time."""

    @property
    def name(self) -> str:
        """One of "uring+pinned", "threads+pinned", "kvikio (GDS)" or "kvikio (compat)"."""

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
        extent fails; the contents of out are then undefined. Raises ValueError for arguments that do not fit.
        """

    def close(self) -> None:
        """Free the reader's memory. The engine stays open. Idempotent."""


class Extents(NamedTuple):
    """Columns of equal length."""

    files: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    out_offsets: npt.NDArray[np.int64]

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_] | slice) -> Extents:
        return Extents(self.files[index], self.offsets[index], self.lengths[index], self.out_offsets[index])


def checked(
    file_count: int,
    files: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    out: torch.Tensor,
    out_offsets: npt.NDArray[np.int64],
    device: torch.device,
) -> Extents:
    """The extents without the empty ones. Raises ValueError if they do not fit files or out."""
    if str(out.dtype) != "torch.uint8" or out.ndim != 1 or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous uint8[m] (got {out.dtype}{list(out.shape)})")
    if out.device != device:
        raise ValueError(f"out must be on {device} (got {out.device})")
    found = Extents(files, offsets, lengths, out_offsets)
    for name, column in found._asdict().items():
        wanted = "uint32" if name == "files" else "int64"
        if column.dtype != wanted or column.shape != files.shape or column.ndim != 1:
            raise ValueError(
                f"{name} must be {wanted}[{len(files)}] (got {column.dtype}{list(column.shape)})"
            )
    bad = (
        (files >= file_count)
        | (offsets < 0)
        | (lengths < 0)
        | (out_offsets < 0)
        | (lengths > out.numel() - out_offsets)
    )
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"extent {i} ({lengths[i]} bytes at byte {offsets[i]} of file {files[i]}, to byte "
            f"{out_offsets[i]} of out) does not fit {file_count} files and an out of {out.numel()} bytes"
        )
    return found.take(lengths > 0)


def merged(extents: Extents) -> Extents:
    """Join extents that follow each other in a file and in out. Sorted by file and offset."""
    if len(extents.files) < 2:
        return extents
    shift = extents.offsets - extents.out_offsets  # the same for all that can be joined
    ordered = extents.take(np.lexsort((extents.offsets, shift, extents.files)))
    joins = (
        (ordered.files[1:] == ordered.files[:-1])
        & (ordered.offsets[1:] == ordered.offsets[:-1] + ordered.lengths[:-1])
        & (ordered.out_offsets[1:] == ordered.out_offsets[:-1] + ordered.lengths[:-1])
    )
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    runs = ordered.take(first)._replace(lengths=np.add.reduceat(ordered.lengths, first))
    return runs.take(np.lexsort((runs.out_offsets, runs.offsets, runs.files)))


def split(extents: Extents, piece_bytes: int) -> Extents:
    """Cut extents into pieces of at most piece_bytes, in the same order."""
    counts = -(-extents.lengths // piece_bytes)
    if not len(counts) or counts.max() == 1:
        return extents
    source = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = number * piece_bytes
    return Extents(
        extents.files[source],
        extents.offsets[source] + begin,
        np.minimum(extents.lengths[source] - begin, piece_bytes),
        extents.out_offsets[source] + begin,
    )


def failure(
    code: int, path: str | os.PathLike[str], offset: int, length: int, detail: str = ""
) -> StorageError:
    """The error of an extent that could not be read. code: its errno. detail: added in parentheses."""
    reason = "the file ends before it" if code == errno.ENODATA else os.strerror(code)
    told = f" ({detail})" if detail else ""
    return StorageError(code, f"cannot read {length} bytes: {reason}{told}", path, offset)


class FasterReader:
    """Reads the first extents with two readers in turn, and the rest with the faster one.

    If the second reader fails, the first one repeats that read and does all the others.
    """

    def __init__(self, first: ExtentReader, second: ExtentReader) -> None:
        self._readers = [first, second]
        self._chosen: ExtentReader | None = None
        self._trials = 0
        self._speeds = [0.0, 0.0]

    @property
    def name(self) -> str:
        if self._chosen is not None:
            return self._chosen.name
        return f"{self._readers[0].name} or {self._readers[1].name}, not yet measured"

    def read(
        self,
        files: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: torch.Tensor,
        out_offsets: npt.NDArray[np.int64],
    ) -> None:
        """See :meth:`ExtentReader.read`."""
        extents = Extents(files, offsets, lengths, out_offsets)
        ends = np.cumsum(lengths)
        begin = 0
        while self._chosen is None and len(ends):
            before = int(ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(ends, before + _TRIAL_BYTES)) + 1
            if end > len(ends):  # the rest is too short to measure
                break
            self._try(extents.take(slice(begin, end)), out)
            begin = end
        rest = extents.take(slice(begin, None))
        (self._chosen or self._readers[0]).read(rest.files, rest.offsets, rest.lengths, out, rest.out_offsets)

    def _try(self, part: Extents, out: torch.Tensor) -> None:
        which = (0, 1, 1, 0)[self._trials % 4]
        self._trials += 1
        started = time.perf_counter()
        try:
            self._readers[which].read(part.files, part.offsets, part.lengths, out, part.out_offsets)
        except StorageError as error:
            if which == 0:
                raise
            _log.info("reading extents with %s: %s", self._readers[0].name, error)
            self._keep(0)
            self._readers[0].read(part.files, part.offsets, part.lengths, out, part.out_offsets)
            return
        speed = int(part.lengths.sum()) / (time.perf_counter() - started)
        self._speeds[which] = max(self._speeds[which], speed)
        if self._trials == _TRIALS * len(self._readers):
            best = self._speeds.index(max(self._speeds))
            _log.info(
                "reading extents with %s: %.2f GB/s, against %.2f GB/s with %s",
                self._readers[best].name,
                self._speeds[best] / 1e9,
                self._speeds[1 - best] / 1e9,
                self._readers[1 - best].name,
            )
            self._keep(best)

    def _keep(self, best: int) -> None:
        self._readers[1 - best].close()
        self._chosen = self._readers[best]
        self._readers = [self._chosen]

    def close(self) -> None:
        """Close the readers that are still open. Idempotent."""
        for reader in reversed(self._readers):
            reader.close()


def open_extent_reader(
    device: Device,
    engine: Engine,
    paths: Sequence[str | os.PathLike[str]],
    *,
    kind: Literal["auto", "kvikio", "pinned"] = "auto",
) -> ExtentReader:
    """Open a reader of these files into the memory of device.

    paths: the paths that engine was opened with, in the same order. kind: "pinned" reads with the engine into
    pinned staging (64 MiB, freed by close) and copies; "kvikio" reads with kvikio, by GPUDirect Storage (GDS)
    if the machine has it; "auto" is pinned without GDS, and otherwise measures both on the first extents and
    keeps the faster one. Logger "gids" reports the choice and the reason at level INFO.

    For "kvikio", and for "auto" if GDS may work, the first call probes kvikio in child processes, for at most
    a minute. Raises ImportError if kind is "kvikio" and kvikio is not installed, OSError if it does not work
    here, ValueError for an unknown kind.
    """
    from gids.io.device.pinned_reader import PinnedExtentReader

    if kind not in ("auto", "kvikio", "pinned"):
        raise ValueError(f"kind must be 'auto', 'kvikio' or 'pinned' (got {kind!r})")
    if kind == "pinned" or not paths:
        return PinnedExtentReader(device, engine, paths)
    from gids.io.device.kvikio_probe import probe_kvikio, why_no_gds

    obstacle = why_no_gds() if kind == "auto" else ""
    if not obstacle:
        found = probe_kvikio(paths[0], device.index)
        if kind == "auto" and not found.gds:
            obstacle = found.reason
    if obstacle:
        if obstacle not in _logged:
            _logged.add(obstacle)
            _log.info("reading extents with %s+pinned: %s", engine.name, obstacle)
        return PinnedExtentReader(device, engine, paths)
    if found.version is None:
        raise ImportError(f"{found.reason}: pip install kvikio-cu13 (CUDA 12: kvikio-cu12)")
    if not (found.gds or found.compat):
        raise OSError(f"kvikio {found.version} does not work here: {found.reason}; use kind='pinned'")
    from gids.io.device.kvikio_reader import KvikioReader

    with contextlib.ExitStack() as undo:
        small = PinnedExtentReader(device, engine, paths, staging_bytes=_SMALL_STAGING_BYTES)
        undo.callback(small.close)
        if kind == "kvikio":
            reader: ExtentReader = KvikioReader(device, paths, gds=found.gds, small=small)
        else:
            pinned = PinnedExtentReader(device, engine, paths)
            undo.callback(pinned.close)
            try:
                reader = FasterReader(pinned, KvikioReader(device, paths, gds=True, small=small))
            except StorageError as error:  # this file is on another file system than the first one
                _log.info("reading extents with %s: %s", pinned.name, error)
                reader = pinned
        undo.pop_all()
    return reader
