"""Chooses how extents of files are read into device memory: through pinned host memory, or with kvikio.

Called by the loader to preload hot pages, and by benchmarks; never for a minibatch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from gids.errors import StorageError
from gids.io.device import kvikio_probe
from gids.io.device.extent_reader import ExtentReader, Extents, PinnedExtentReader
from gids.io.device.kvikio_reader import KvikioReader

if TYPE_CHECKING:
    import torch

    from gids.cuda import Device
    from gids.io.engine import Engine

__all__ = ["ExtentReader", "open_extent_reader"]

_log = logging.getLogger("gids")
_logged: set[str] = set()
_TRIAL_BYTES = 32 << 20
_TRIALS = (
    0,
    1,
    1,
    0,
)  # which reader is tried; the better trial of each counts, as the first registers memory
_SMALL_STAGING_BYTES = 8 << 20


class FasterReader(ExtentReader):
    """Reads the first extents with two readers in turn, and the rest with the faster one.

    If the second reader fails, the first one repeats that read and does all the others.
    """

    def __init__(
        self,
        device: Device,
        paths: Sequence[str | os.PathLike[str]],
        first: ExtentReader,
        second: ExtentReader,
    ) -> None:
        super().__init__(device, paths)
        self._readers = [first, second]
        self._chosen: ExtentReader | None = None
        self._trials = 0
        self._speeds = [0.0, 0.0]

    @property
    def name(self) -> str:
        if self._chosen is not None:
            return self._chosen.name
        return f"{self._readers[0].name} or {self._readers[1].name}, not yet measured"

    def read_checked(self, extents: Extents, out: torch.Tensor) -> None:
        ends = np.cumsum(extents.lengths)
        begin = 0
        while self._chosen is None and begin < len(ends):
            before = int(ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(ends, before + _TRIAL_BYTES)) + 1
            if end > len(ends):  # the rest is too short to measure
                break
            self._try(extents.take(slice(begin, end)), out)
            begin = end
        if begin < len(ends):
            (self._chosen or self._readers[0]).read_checked(extents.take(slice(begin, None)), out)

    def _try(self, part: Extents, out: torch.Tensor) -> None:
        which = _TRIALS[self._trials]
        self._trials += 1
        started = time.perf_counter()
        try:
            self._readers[which].read_checked(part, out)
        except StorageError as error:
            if which == 0:
                raise
            _log.info("reading extents with %s: %s", self._readers[0].name, error)
            self._keep(0)
            self._readers[0].read_checked(part, out)
            return
        speed = int(part.lengths.sum()) / (time.perf_counter() - started)
        self._speeds[which] = max(self._speeds[which], speed)
        if self._trials == len(_TRIALS):
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
        super().close()
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
    if kind not in ("auto", "kvikio", "pinned"):
        raise ValueError(f"kind must be 'auto', 'kvikio' or 'pinned' (got {kind!r})")
    if kind == "pinned" or not paths:
        return PinnedExtentReader(device, engine, paths)
    obstacle = kvikio_probe.why_no_gds() if kind == "auto" else ""
    if not obstacle:
        probe = kvikio_probe.probe_kvikio(paths[0], device.index)
        if kind == "auto" and not probe.gds:
            obstacle = probe.reason
    if obstacle:
        if obstacle not in _logged:
            _logged.add(obstacle)
            _log.info("reading extents with %s+pinned: %s", engine.name, obstacle)
        return PinnedExtentReader(device, engine, paths)
    if probe.version is None:
        raise ImportError(f"{probe.reason}: pip install kvikio-cu13 (CUDA 12: kvikio-cu12)")
    if not (probe.gds or probe.compat):
        raise OSError(f"kvikio {probe.version} does not work here: {probe.reason}; use kind='pinned'")
    with contextlib.ExitStack() as undo:
        small = PinnedExtentReader(device, engine, paths, staging_bytes=_SMALL_STAGING_BYTES)
        undo.callback(small.close)
        if kind == "kvikio":
            reader: ExtentReader = KvikioReader(device, paths, gds=probe.gds, small=small)
        else:
            pinned = PinnedExtentReader(device, engine, paths)
            undo.callback(pinned.close)
            try:
                kvikio = KvikioReader(device, paths, gds=True, small=small)
                reader = FasterReader(device, paths, pinned, kvikio)
            except StorageError as error:  # this file is on another file system than the first one
                _log.info("reading extents with %s: %s", pinned.name, error)
                reader = pinned
        undo.pop_all()
    return reader
