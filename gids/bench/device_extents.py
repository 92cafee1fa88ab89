"""How fast extents of files reach device memory: by kvikio, and by the engine through pinned staging.

Called by bandwidth.py. This is the path that preloads hot pages, and no minibatch's. Knows no cache.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gids import cuda
from gids.bench.probe import direct_works, why_warm
from gids.cuda import Device
from gids.errors import FormatError
from gids.io import open_engine
from gids.io.device.extents import ExtentReader, Extents, open_extent_reader
from gids.measure.counters import cpu_seconds

_OUT_BYTES = 128 << 20  # read by one call
_VERIFIED = 16  # extents


@dataclass(frozen=True)
class Side:
    """A reader to measure. depth: requests in flight; None: kvikio's own number."""

    name: str
    depth: int | None
    reader: ExtentReader


@dataclass(frozen=True)
class Pace:
    """What a run read: extents' bytes, in how many seconds of the clock and of CPU.

    note: why it is warm, or "".
    """

    nbytes: int
    seconds: float
    cpu_s: float
    note: str


class DeviceExtents:
    """The readers of some files into one device. A context manager that closes them. One thread at a time."""

    def __init__(self, device: Device, paths: Sequence[Path], sides: list[Side]) -> None:
        self.sides = sides
        self._device, self._paths = device, list(paths)
        self._sizes = [os.path.getsize(path) for path in paths]
        self._out = device.zeros((min(_OUT_BYTES, sum(self._sizes)),), torch.uint8)

    def extent_bytes(self, wanted: int, page_bytes: int) -> int:
        """As wanted, in whole pages, and no more than the largest file or one call's memory has."""
        most = min(max(self._sizes), self._out.numel())
        return max(page_bytes, min(wanted, most) // page_bytes * page_bytes)

    def verify(self, extent_bytes: int, seed: int) -> None:
        """Compare a few extents of each reader with the files. Raises FormatError when one differs."""
        chosen = self._drawn(extent_bytes, seed)[: min(_VERIFIED, self._out.numel() // extent_bytes)]
        extents = self._extents(chosen, extent_bytes)
        expected = np.empty(len(chosen) * extent_bytes, np.uint8)
        for file, offset, length, place in zip(*extents, strict=True):
            with open(self._paths[file], "rb", buffering=0) as opened:
                opened.seek(int(offset))
                opened.readinto(expected[place : place + length].data)
        for side in self.sides:
            self._out.zero_()
            self._read(side, extents)
            if not np.array_equal(self._out[: len(expected)].cpu().numpy(), expected):
                raise FormatError(
                    f"{side.name} reads extents into device memory that differ from the files: leave kvikio "
                    "out, and tell us what `gids info --system` prints"
                )

    def measure(self, side: Side, extent_bytes: int, *, seconds: float, seed: int) -> Pace:
        """Read distinct random extents, cold, for some seconds or until all are read. Blocks.

        Raises StorageError when an extent cannot be read.
        """
        note = why_warm(self._paths)
        chosen = self._drawn(extent_bytes, seed)
        per_call = self._out.numel() // extent_bytes
        done, cpu_begun, begun = 0, cpu_seconds(), time.perf_counter()
        for first in range(0, len(chosen), per_call):
            some = chosen[first : first + per_call]
            self._read(side, self._extents(some, extent_bytes))
            done += len(some) * extent_bytes
            if time.perf_counter() - begun > seconds:
                break
        return Pace(done, time.perf_counter() - begun, cpu_seconds() - cpu_begun, note)

    def _read(self, side: Side, extents: Extents) -> None:
        files, offsets, lengths, places = extents
        side.reader.read(files, offsets, lengths, self._out, places)

    def _drawn(self, extent_bytes: int, seed: int) -> np.ndarray:
        """int64[n, 2]: (file, offset) of every extent, in random order."""
        every = [
            np.stack([np.full(size // extent_bytes, file), np.arange(size // extent_bytes) * extent_bytes], 1)
            for file, size in enumerate(self._sizes)
        ]
        return np.random.default_rng(seed).permutation(np.concatenate(every))

    @staticmethod
    def _extents(chosen: np.ndarray, extent_bytes: int) -> Extents:
        lengths = np.full(len(chosen), extent_bytes)
        places = np.arange(len(chosen)) * extent_bytes
        return Extents(chosen[:, 0].astype(np.uint32), np.ascontiguousarray(chosen[:, 1]), lengths, places)


@contextlib.contextmanager
def open_device_extents(
    device: str, paths: Sequence[Path], *, engine: str, depths: Sequence[int]
) -> Iterator[DeviceExtents]:
    """Pinned staging by that engine at each depth, and kvikio.

    Raises ImportError where kvikio is not installed, OSError where it does not work, and what opening the
    device raises.
    """
    opened = cuda.open_device(device)
    direct = direct_works(paths)
    with contextlib.ExitStack() as stack:

        def read_by(depth: int, kind: str) -> ExtentReader:
            native = stack.enter_context(open_engine(paths, engine, depth=depth, direct=direct))
            open_it: Callable[..., ExtentReader] = open_extent_reader
            return stack.enter_context(contextlib.closing(open_it(opened, native, paths, kind=kind)))

        kvikio = read_by(max(depths), "kvikio")  # first: it may not be there
        pinned = [(depth, read_by(depth, "pinned")) for depth in depths]
        sides = [Side(reader.name, depth, reader) for depth, reader in pinned]
        yield DeviceExtents(opened, paths, [*sides, Side(kvikio.name, None, kvikio)])
