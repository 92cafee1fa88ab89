"""One memory budget for all FeatureLoaders of a source. They take turns: one cache has the memory at a time.

Made by gids.open. It knows which loaders have a cache and which have an open epoch, and nothing of tables.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.cache.budget import available_bytes
from gids.cache.device import check_device_memory
from gids.closing import OwnLock
from gids.cuda import Device
from gids.errors import MemoryBudgetError
from gids.io.disks import device_of
from gids.loader.counting import PRESENT, Stats, added
from gids.loader.ranks import local_ranks
from gids.packs import Scratch, find_scratch
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.loader.epoch_stream import EpochStream
    from gids.loader.feature_loader import FeatureLoader
    from gids.loader.options import Options

log = logging.getLogger("gids")


class Lender:
    """memory, device_memory: bytes, or None for half of what is available when the first loader asks."""

    def __init__(self, memory: int | None, device_memory: int | None) -> None:
        self.lock = OwnLock()  # guards every cache of the source, and the owner of the window
        self._memory, self._device_memory = memory, device_memory
        self._on_device: dict[int, int] = {}  # by index
        self._borrowers: weakref.WeakSet[FeatureLoader] = weakref.WeakSet()
        self.shared: weakref.WeakValueDictionary[Hashable, FeatureLoader] = weakref.WeakValueDictionary()
        """The FeatureLoaders that several loaders may use, by what they load."""
        self._streams: weakref.WeakSet[EpochStream[Any]] = weakref.WeakSet()  # that read no rows
        self._scratches: dict[Hashable, Scratch] = {}  # by the options, and the file system
        self._ended: Stats = {}  # of closed loaders
        self.closed = False

    def scratch(self, options: Options, shards: Sequence[Path]) -> Scratch | None:
        """Where packs of these shards' tables go; None if there is no such disk, which is logged.

        Loaders with the same options whose scratch is on one file system share its limit.
        """
        with self.lock:
            chosen = options.scratch, options.scratch_bytes
            scratch = find_scratch(*chosen, shards, warn=options.reads == "pack", ranks=local_ranks())
            if scratch is None:
                return None
            devices = frozenset(map(device_of, scratch.directories))
            return self._scratches.setdefault((*chosen, devices), scratch)

    @property
    def host_bytes(self) -> int:
        """The budget in host memory."""
        with self.lock:
            if self._memory is None:
                share = 2 * local_ranks()
                self._memory = available_bytes() // share
                log.info(
                    "memory= is not given: taking 1/%d of the memory available, %s",
                    share,
                    format_bytes(self._memory),
                )
            return self._memory

    def device_bytes(self, device: Device, cache: int | None) -> int:
        """The budget in device memory. Raises MemoryBudgetError if less than it, or than cache, is free."""
        with self.lock:
            if device.index not in self._on_device:
                free_bytes, _ = device.memory_info()
                nbytes = self._device_memory
                asked = {"device_memory": nbytes, "cache": cache}
                check_device_memory(asked, free_bytes=free_bytes, device=device.name)
                if nbytes is None:
                    nbytes = free_bytes // 2
                    log.info(
                        "device_memory= is not given: taking half of the free memory of %s, %s",
                        device.name,
                        format_bytes(nbytes),
                    )
                self._on_device[device.index] = nbytes
            return self._on_device[device.index]

    def join(self, borrower: FeatureLoader) -> None:
        """Called by each new FeatureLoader."""
        with self.lock:  # another thread may iterate over them
            self._borrowers.add(borrower)

    def join_stream(self, stream: EpochStream[Any]) -> None:
        """Called with each new stream of no FeatureLoader."""
        with self.lock:
            self._streams.add(stream)

    def count(self, stats: Stats) -> None:
        """Called by a FeatureLoader that closes."""
        with self.lock:
            self._ended = added(self._ended, stats)

    def stats(self) -> dict[str, Any]:
        """The sum over all FeatureLoaders, without what only one of them has."""
        with self.lock:
            total = self._ended
            for borrower in self._borrowers:
                if not borrower.closed:
                    total = added(total, borrower.stats())
        return {key: value for key, value in total.items() if key not in PRESENT}

    def lend(self, to: FeatureLoader, *, host: bool = False) -> int:
        """Take the memory from idle caches of other loaders. Returns the host memory that they keep.

        host: it needs host memory, which its cache does not take. Raises MemoryBudgetError if a loader that
        has some of the memory has an open epoch.
        """
        with self.lock:
            memories = to.memories | ({"host"} if host else set())
            others = [b for b in self._borrowers if b is not to and b.memories & memories]
            for other in others:
                if other.has_cache and other.has_open_epoch:
                    raise MemoryBudgetError(
                        f"{other!r} has an open epoch, and its cache holds the memory of this source, which "
                        f"{to!r} needs now: end that epoch first (end its loop, or close() its iterator), or "
                        "give one of the two a source of its own: gids.open(PATH, memory=...)"
                    )
            for other in others:
                if other.has_cache:
                    log.info("%r gives its cache's memory to %r, which begins an epoch", other, to)
                    other.release_cache()
            return sum(other.kept_bytes for other in others)

    def close(self) -> None:
        """Close the FeatureLoaders, and the streams that read no rows. Idempotent."""
        self.closed = True
        with self.lock:
            joined = [*self._borrowers, *self._streams]
        for one in joined:
            one.close()
