"""The placement of a loader's cache: in host memory, or on a CUDA device with more lines in host memory.

Made by FeatureLoader. It shares memory out and builds the cache. The stream decides when steps are entered,
planned and gathered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gids import cuda
from gids.cache import FeatureCache, HostBudget, MemoryPlan
from gids.cache.budget import row_orders
from gids.cache.device import DeviceBudget, DeviceFeatureCache
from gids.cache.live_batches import Sizes
from gids.cache.output_dtype import out_row_bytes
from gids.io.device.extents import open_extent_reader
from gids.loader.readers import Cache

if TYPE_CHECKING:
    from gids.cache.budget import Budget
    from gids.io import Engine
    from gids.loader.options import Options
    from gids.store import Table

Heats = Mapping[str, npt.NDArray[np.uint8]]


class Placement(ABC):
    """Builds the cache once the sizes of minibatches are known."""

    least_planned: int
    """The least number of planned minibatches, if memory allows, so that their stages overlap."""

    option: str
    """The argument of gids.open() that gives the budget."""

    memories: frozenset[str]
    """The memories that the cache takes: "host", "cuda:INDEX", or both."""

    plan: MemoryPlan | None = None
    """How memory is shared out, once build() has done so."""

    _budget: Budget

    @property
    def memory_bytes(self) -> int:
        """The budget: bytes of host memory, or of device memory."""
        return self._budget.memory_bytes

    @memory_bytes.setter
    def memory_bytes(self, memory_bytes: int) -> None:
        self._budget = replace(self._budget, memory_bytes=memory_bytes)

    def build(self, sizes: Sizes, heats: Heats) -> tuple[Cache, MemoryPlan]:
        """Build the cache; returns it with the memory plan.

        sizes: of minibatches like the first one, with the window and planned minibatches that the user wants.
        Raises MemoryBudgetError, which lists the sum, if one minibatch does not fit.
        """
        self.plan = self._budget.share(sizes)
        return self._cache(self.plan, heats), self.plan

    def share(self, sizes: Sizes, memory_bytes: int) -> MemoryPlan:
        """The plan for another budget. Raises like build()."""
        return replace(self._budget, memory_bytes=memory_bytes).share(sizes)

    def excess_bytes(self, sizes: Sizes) -> int:
        """Bytes beyond memory_bytes that minibatches of these sizes need beside the existing lines.

        0 or less if they fit. Requires build().
        """
        assert self.plan is not None
        return sum({**self.plan.purposes, **self._needed(sizes, self.plan)}.values()) - self.memory_bytes

    @abstractmethod
    def memory(self, cache: Cache | None, held_bytes: int) -> dict[str, int]:
        """Bytes by purpose. held_bytes: of the sampled minibatches."""

    @abstractmethod
    def _cache(self, plan: MemoryPlan, heats: Heats) -> Cache: ...

    @abstractmethod
    def _needed(self, sizes: Sizes, plan: MemoryPlan) -> dict[str, int]:
        """Bytes by purpose that minibatches of these sizes need in a cache of this plan."""


class HostPlacement(Placement):
    """Lines and features in host memory."""

    least_planned = 2
    option = "memory"
    memories = frozenset({"host"})

    def __init__(
        self,
        engine: Engine,
        tables: Sequence[Table],
        options: Options,
        *,
        memory_bytes: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._engine, self._tables, self._options, self._dtype = engine, tables, options, dtype
        self._threads = options.threads or torch.get_num_threads()
        self._budget: HostBudget = HostBudget(
            tables=tables,
            output_row_bytes={t.name: out_row_bytes(t, dtype) for t in tables},
            bounce_bytes=engine.bounce_bytes,
            memory_bytes=memory_bytes,
            cache_bytes=options.cache,
        )

    def _cache(self, plan: MemoryPlan, heats: Heats) -> Cache:
        return FeatureCache(
            self._engine,
            self._tables,
            lines=plan.lines,
            heats=heats,
            policy=self._options.policy,
            threads=self._threads,
            check_crc=self._options.check_crc,
            keep_output_bytes=plan.purposes["outputs"],
            output_rows=plan.sizes.rows,
            late_outputs=plan.late_outputs,
            output_dtype=self._dtype,
        )

    def _needed(self, sizes: Sizes, plan: MemoryPlan) -> dict[str, int]:
        return self._budget.needed(sizes, late_outputs=plan.late_outputs)

    def memory(self, cache: Cache | None, held_bytes: int) -> dict[str, int]:
        kept = {"bounce pool": self._engine.bounce_bytes} | row_orders(self._tables)
        if cache is None:
            return kept
        purposes = cache.memory()
        purposes["window"] += held_bytes
        return purposes | kept


class DevicePlacement(Placement):
    """Lines in device memory and pinned host memory; features in device memory."""

    least_planned = 3  # one is read, one is gathered, one is with the consumer
    option = "device_memory"

    def __init__(
        self,
        device: cuda.Device,
        engine: Engine,
        tables: Sequence[Table],
        options: Options,
        *,
        memory_bytes: int,
        dtype: torch.dtype | None,
    ) -> None:
        self.device, self._engine, self._tables = device, engine, tables
        self._options, self._dtype = options, dtype
        host_cache_bytes = 0 if options.memory is None else options.memory - options.staging
        own = f"cuda:{device.index}"
        self.memories = frozenset({own, "host"} if host_cache_bytes else {own})
        buffered = options.wait == "warp" or options.transfer == "copy"
        self._budget: DeviceBudget = DeviceBudget(
            tables=tables,
            output_row_bytes={t.name: out_row_bytes(t, dtype) for t in tables},
            bounce_bytes=options.staging // options.rounds if buffered else 0,
            memory_bytes=memory_bytes,
            cache_bytes=options.cache,
            host_cache_bytes=host_cache_bytes,
        )

    def _cache(self, plan: MemoryPlan, heats: Heats) -> Cache:
        options = self._options
        with ExitStack() as stack:
            reader = None
            if any(plan.lines.values()) and heats and not options.check_crc:
                paths = [shard for t in self._tables for shard in t.shards]
                reader = open_extent_reader(self.device, self._engine, paths)
                stack.callback(reader.close)
            return DeviceFeatureCache(
                self.device,
                self._engine,
                self._tables,
                lines=plan.lines,
                host_lines=plan.host_lines,
                heats=heats,
                policy=options.policy,
                host_policy=options.host_policy,
                output_dtype=self._dtype,
                check_crc=options.check_crc,
                wait=options.wait,
                transfer=options.transfer,
                staging_bytes=options.staging,
                rounds_max=options.rounds,
                pairs=options.pairs,
                reader=reader,
            )

    def _needed(self, sizes: Sizes, plan: MemoryPlan) -> dict[str, int]:
        return self._budget.needed(sizes)

    def memory(self, cache: Cache | None, held_bytes: int) -> dict[str, int]:
        if cache is None:
            return {}
        return cache.memory() | {"minibatches": held_bytes}
