"""Helpers for the tests of both caches: rows, minibatches, and the loader's order of calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from datasets import same_bits
from raw_table import RawTable

from gids.cache import FeatureCache
from gids.cache.device import DeviceFeatureCache
from gids.cuda import Device
from gids.io import Engine, open_engine
from gids.loader.rows import Cache

Batch = dict[str, torch.Tensor]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


class Make(ExitStack):
    """make(table, lines, **options): a cache on a device, or in host memory, closed twice with its engine.

    options: of the cache, beside these defaults. host_lines: further lines, in the host memory below a
    device's. depth: of the engine. engine: of the cache made last.
    """

    engine: Engine

    def __init__(self, device: Device | None = None, **defaults: Any) -> None:
        super().__init__()
        self._device, self._defaults = device, {"heats": {}} | defaults

    def __call__(
        self,
        table: RawTable,
        lines: int,
        host_lines: int = 0,
        *,
        depth: int = 64,
        **options: Any,
    ) -> Any:
        opened = open_engine(table.shard_paths, depth=depth, max_read_bytes=table.page_bytes)
        self.engine = self.enter_context(opened)
        options = self._defaults | options
        cache: Any
        if self._device is None:
            options["lines"] = {table.name: lines + host_lines}
            cache = FeatureCache(self.engine, [table], **options)
        else:
            options = {"staging_bytes": 1 << 20} | options
            options |= {"lines": {table.name: lines}}
            options |= {"host_lines": {table.name: host_lines}}
            cache = DeviceFeatureCache(self._device, self.engine, [table], **options)
        self.callback(cache.close)
        self.callback(cache.close)
        return cache


def make_rows(n: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of random bits."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (n, dim * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(n, dim)


def random_batches(rng: np.random.Generator, table: RawTable, count: int, size: int) -> list[Batch]:
    """Skewed ids, with repeats; some minibatches are empty."""
    out = []
    for _ in range(count):
        ids = (table.row_count * rng.random(rng.integers(0, size + 1)) ** 2).astype(np.int64)
        out.append({table.name: torch.from_numpy(ids)})
    return out


def run(cache: Cache, batches: Sequence[Batch], window: int, planned: int) -> Iterator[Batch]:
    """The features of each minibatch, in the loader's order: plan ahead of gathering."""
    for features, error in gathered(cache, batches, window, planned):
        assert error is None
        yield features


def gathered(
    cache: Cache, batches: Sequence[Batch], window: int, planned: int
) -> Iterator[tuple[Batch, Exception | None]]:
    """What gather() returns for each minibatch, in the loader's order."""
    first = entered = planned_to = cache.next_step
    for t in range(first, first + len(batches)):
        while planned_to < min(first + len(batches), t + planned):
            while entered < min(first + len(batches), planned_to + 1 + window):
                cache.enter(entered, batches[entered - first])
                entered += 1
            cache.plan(planned_to)
            planned_to += 1
        result = cache.gather(t)
        cache.retire(t)
        yield result


def rows_of(cache: Cache, table: RawTable, ids: torch.Tensor) -> torch.Tensor:
    """The rows of one minibatch, on the CPU."""
    (features,) = run(cache, [{table.name: ids}], 0, 1)
    return features[table.name].cpu()


def check(cache: Cache, table: RawTable, batches: Sequence[Batch], window: int, planned: int) -> None:
    """Every row equals its source, the metadata agrees after every step, and no mark is left."""
    for ids, got in zip(batches, run(cache, batches, window, planned), strict=True):
        assert same_bits(got[table.name], table.rows[ids[table.name]])
        cache.audit()  # type: ignore[attr-defined]
    assert not marked(cache, table)


def marked(cache: Cache, table: RawTable) -> bool:
    """Whether a page word of the table still has a mark."""
    return bool(np.any(cache.page_words(table.name) & np.uint64(0xFFFFFF)))


def loading(cache: Cache, table: RawTable) -> bool:
    """Whether a page of the table is LOADING."""
    return bool(np.any(cache.page_words(table.name) >> np.uint64(62) == 1))
