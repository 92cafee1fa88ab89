"""PackReads: what all epochs by packs of a loader share: scratch, rates of the disk, memory, counters."""

from __future__ import annotations

import errno
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from gids.cache import FeatureCache
from gids.cuda import on_host
from gids.io.disks import disk_count
from gids.loader.learned import Choice, Learned, NextEpoch
from gids.loader.options import Options
from gids.loader.readers import Gathered, Ids
from gids.loader.row_source import Lender
from gids.loader.stats import PACK_COUNTERS, PACK_SECONDS
from gids.packs import (
    DiskRates,
    OnDevice,
    PackMachine,
    Scratch,
    measure_random,
    measure_rates,
)
from gids.store import Table

if TYPE_CHECKING:
    from gids.io import Engine


class PackReads:
    """tables: of the loader. dtype: of the features, or None for the stored one. engine: of the loader.
    lender: of the source. device: where packs are in device memory.

    Attributes: machine: has the memory of packs, or is None; next_epochs: what is prepared, of all loaders
    that share this one.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        options: Options,
        dtype: torch.dtype | None,
        engine: Engine,
        lender: Lender,
        device: OnDevice | None = None,
    ) -> None:
        self.device, self._lender = device, lender
        self.tables, self.options, self.dtype, self.engine = tables, options, dtype, engine
        self.machine: PackMachine | None = None
        self.counters, self.seconds = Counter(PACK_COUNTERS), dict(PACK_SECONDS)
        self.choices: list[Choice] = []
        self.next_epochs: weakref.WeakSet[NextEpoch] = weakref.WeakSet()
        self._scratch: Scratch | None = None
        self._looked = False
        self._through: FeatureCache | None = None

    @property
    def scratch(self) -> Scratch | None:
        """Where packs go; looked for once. Raises OSError."""
        if not self._looked:
            shards = [path for t in self.tables for path in t.shard_paths]
            try:
                self._scratch = self._lender.scratch(self.options, shards)
            except ValueError as error:  # since gids.open(), memory was mounted there
                raise OSError(errno.ENODEV, str(error)) from error
            self._looked = True
        return self._scratch

    @cached_property
    def disk_count(self) -> int:
        """Disks that a sweep, or reading packs, keeps busy."""
        tables = disk_count(path for t in self.tables for path in t.shard_paths)
        return tables if self.scratch is None else max(tables, self.scratch.disks)

    @property
    def on_device(self) -> bool:
        return self.device is not None

    def rates(self) -> DiskRates:
        """Of the disk, for pages of the table with most bytes."""
        return measure_rates(self._shards, self.scratch, **self._measured_as)

    def random_reads_per_s(self) -> float:
        """Of rates(), in a tenth of the time."""
        return measure_random(self._shards, **self._measured_as)

    @cached_property
    def _shards(self) -> list[Any]:
        return [shard for t in self.tables for shard in t.shards]

    @cached_property
    def _measured_as(self) -> dict[str, Any]:
        table = max(self.tables, key=lambda t: t.page_count * t.page_bytes)
        return {
            "page_bytes": table.page_bytes,
            "depth": self.options.queue_depth,
            "direct": self.options.direct,
            "engine": self.options.engine,
            "memory_bytes": self._lender.host_bytes,
        }

    def prepare_next(self, learned: Learned, coming: NextEpoch) -> None:
        """Keep what is prepared of the next epoch of the loader whose epoch is open."""
        assert self.scratch is not None
        learned.next_epoch, coming.learned = coming, weakref.ref(learned)
        self.next_epochs.add(coming)
        self.scratch.spares.add(coming)

    def prepared(self, learned: Learned, minibatches: Iterable[Any]) -> NextEpoch | None:
        """What is prepared of the epoch that begins now. What was prepared of another one is dropped."""
        coming = None if learned.unpaid else learned.next_epoch
        if coming is None or coming.minibatches is not minibatches or not coming.here:
            learned.drop_next()
            return None
        assert self.scratch is not None
        learned.next_epoch = None
        self.next_epochs.discard(coming)
        self.scratch.spares.discard(coming)
        return coming

    @property
    def next_bytes(self) -> int:
        """Memory of what is prepared of next epochs."""
        return sum(coming.nbytes for coming in self.next_epochs if coming.open)

    def stats(self) -> dict[str, Any]:
        """Counters, each superbatch's choice, and the directories of scratch, once they are known."""
        directories = () if self._scratch is None else self._scratch.directories
        return {
            **self.counters,
            "seconds": dict(self.seconds),
            "choices": [dict(vars(choice)) for choice in self.choices],
            "scratch": [str(directory) for directory in directories],
        }

    def memory(self) -> dict[str, int]:
        """Bytes by purpose; empty while packs have no memory. Those of outputs are peaks."""
        machine, through = self.machine, self._through  # another thread may release them
        if machine is None:
            return {}
        second = {} if through is None else {"second stream": through.memory()["outputs"]}
        return {**machine.plan.purposes, "outputs": machine.rows.peak_output_bytes, **second}

    def read_through(self, ids: Ids) -> Gathered:
        """Rows by random reads, for a second stream while packs have the memory of the cache. Blocks.

        Raises as FeatureCache.read_through().
        """
        if (through := self._through) is None:
            through = self._through = FeatureCache(
                self.engine,
                self.tables,
                lines={t.name: 0 for t in self.tables},
                heats={},
                threads=self.options.threads or torch.get_num_threads(),
                check_crc=self.options.check_crc,
                output_dtype=self.dtype,
            )
        if self.device is None:
            return through.read_through(ids)
        features, error = through.read_through(on_host(ids))
        there = self.device.device.torch_device
        return {name: rows.to(there) for name, rows in features.items()}, error

    def spooling(self) -> AbstractContextManager[object]:
        """A context in which sampled minibatches are copied to the spool."""
        return nullcontext() if self.device is None else self.device.spooling()

    def settle(self) -> None:
        """Wait until minibatches that came from the spool are complete."""
        if self.device is not None:
            self.device.settle()

    def close(self) -> None:
        """Free all memory, and what is prepared of next epochs. Idempotent."""
        self.drop_next()
        self.release()
        self.free_kept()

    def drop_next(self, on_turn: Callable[[Learned], None] = lambda _: None) -> None:
        """Drop what is prepared of next epochs. on_turn: called before, with whose epoch it is."""
        for coming in list(self.next_epochs):
            if (learned := coming.learned()) is not None:
                on_turn(learned)
            coming.close()

    def free_kept(self) -> None:
        """Free the scratch file that is kept for a next epoch."""
        if self._scratch is not None:
            self._scratch.keep(None)

    def release(self) -> None:
        """Free the memory of packs. Between epochs only."""
        if self.machine is not None:
            self.machine.close()
        self.machine = self._through = None
