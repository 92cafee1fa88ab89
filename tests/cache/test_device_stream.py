"""The cache in device memory under a stream: statistics, memory, closing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_runs import Batch, Make, windowed
from emulator import EmulatedDevice
from raw_table import RawTable, write_raw_table

from gids.cache.device import DeviceFeatureCache
from gids.cuda.device import Device
from gids.errors import MemoryBudgetError


@pytest.fixture
def table(tmp_path: Path) -> RawTable:
    return write_raw_table(tmp_path, torch.randn(400, 100), page_bytes=4096, shards=2)


@pytest.fixture
def make(device: Device) -> Iterator[Make]:
    with Make(device, staging_bytes=32 * 4096) as made:
        yield made


@pytest.fixture
def cache(make: Make, table: RawTable) -> DeviceFeatureCache:
    return make(table, 12)  # type: ignore[no-any-return]


def batches_of(table: RawTable, count: int, seed: int = 0) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [
        {table.name: torch.from_numpy((400 * rng.random(rng.integers(0, 150)) ** 2).astype(np.int64))}
        for _ in range(count)
    ]


def test_a_cache_larger_than_free_device_memory_is_refused_with_the_sum(
    make: Make, device: Device, table: RawTable
) -> None:
    free, _ = device.memory_info()
    lines = free // 4096 + 1
    with pytest.raises(MemoryBudgetError, match=r"lines .* \+ page tables .* free") as caught:
        make(table, lines)
    assert f"{lines * 4096 + 8 * table.page_count + 8 * lines} bytes" in str(caught.value)


def test_a_dropped_cache_ends_its_queue_and_unmaps(device: Device, table: RawTable) -> None:
    with Make(device, staging_bytes=32 * 4096) as make:
        cache = make(table, 12, 3)
        make.pop_all()  # which closes it
        stream = windowed(cache, batches_of(table, 8), 3, 2)
        next(stream)
        queue, gone = cache._queue, weakref.ref(cache)
        del stream, cache
        gc.collect()
        assert gone() is None
        with pytest.raises(RuntimeError, match="closed"):
            queue.take(0)


def test_after_its_queue_ended_the_cache_raises_and_close_removes_all_marks(
    make: Make, table: RawTable
) -> None:
    cache = make(table, 30)
    stream = windowed(cache, batches_of(table, 8), 3, 3)
    next(stream)
    cache._queue.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)
    words = cache.page_words(table.name)
    assert not np.any(words & np.uint64(0xFFFFFF))
    assert not np.any(words >> np.uint64(62) == 1)
    cache.audit()


def test_a_closed_cache_returns_its_memory(table: RawTable) -> None:
    device = EmulatedDevice()
    device.empty(123_456, torch.uint8)  # which torch keeps, for whoever uses torch
    with Make(device, staging_bytes=32 * 4096) as make:
        cache = make(table, 12)
        for _batch, _features in windowed(cache, batches_of(table, 3), 2, 2):
            pass
        del _features
        lines_bytes, free = cache.memory()["lines"], device.memory.unreserved_bytes
        cache.close()
        device.memory.collect()
        assert device.memory.tensor_bytes <= cache._counters.nbytes + cache._queue.memory()["queue"]
        assert device.memory.unreserved_bytes == free + lines_bytes > free, "lines go back to the driver"
        assert device.memory.kept_bytes > 123_456, "what torch has cached stays with torch"
        ids = {table.name: torch.tensor([1])}
        for call in (lambda: cache.enter(0, ids), lambda: cache.read_through(ids)):
            with pytest.raises(RuntimeError, match="this cache is closed"):
                call()
