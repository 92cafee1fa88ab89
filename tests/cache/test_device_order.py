"""The cache in device memory on a slow device: nothing is read before it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_runs import Make, marked, random_batches, run
from late_device import LateDevice, LateEvent
from raw_table import RawTable, write_raw_table

from gids.cache.device import DeviceFeatureCache
from gids.cuda import MadeOn


@pytest.fixture
def table(tmp_path: Path) -> RawTable:
    return write_raw_table(tmp_path, torch.randn(400, 100), page_bytes=512, shards=2)


@contextmanager
def opened(device: LateDevice, table: RawTable, **options: Any) -> Iterator[DeviceFeatureCache]:
    """A cache of 50 lines. It is closed after the body, then the device."""
    with Make(device, staging_bytes=64 * 512) as make:
        yield make(table, 50, **options)
    device.close()


@pytest.fixture
def device(emulator_seed: int) -> LateDevice:
    return LateDevice(emulator_seed)


@pytest.fixture
def cache(device: LateDevice, table: RawTable) -> Iterator[DeviceFeatureCache]:
    with opened(device, table, host_lines=20) as made:
        yield made


def test_rows_are_complete_when_gather_returns(cache: DeviceFeatureCache, table: RawTable) -> None:
    batches, kept = random_batches(np.random.default_rng(3), table, 10, 200), []
    for t, features in enumerate(run(cache, batches, 4, 3)):
        kept.append(features[table.name])
        if t % 4 == 0:
            through, error = cache.read_through(batches[-1])
            assert error is None
            assert torch.equal(through[table.name], table.rows[batches[-1][table.name]])
    for batch, rows in zip(batches, kept, strict=True):
        assert torch.equal(rows, table.rows[batch[table.name]])
    cache.audit()


def test_ids_made_on_another_stream_do_not_wait_for_the_current_one(
    device: LateDevice, cache: DeviceFeatureCache, table: RawTable
) -> None:
    sampling, training, trained = device.new_stream(), device.new_stream(), LateEvent(device)
    training.wait_event(trained)
    rows, ids = torch.arange(0, 400, 3), torch.full((134,), -1)
    sampling.put(lambda: ids.copy_(rows))
    with device.use(training):
        cache.enter(0, MadeOn({table.name: ids}, device, sampling))
        cache.plan(0)
        features, error = cache.gather(0)
        assert error is None
        cache.retire(0)
    assert torch.equal(features[table.name], table.rows[rows])
    trained.passed = True


def test_ids_are_kept_until_the_last_kernel_has_read_them(table: RawTable) -> None:
    device = LateDevice(0, lazy=1.0)
    sampling = device.new_stream()
    with opened(device, table) as cache:
        for step in range(10):
            with device.use(sampling):
                ids = device.empty((150,), torch.int64).random_(0, 400)
            cache.enter(step, MadeOn({table.name: ids}, device, sampling))
            del ids
            cache.plan(step)
            _, error = cache.gather(step)
            assert error is None
            cache.retire(step)  # the last kernel that reads the ids
            sampling.synchronize()
        assert not marked(cache, table)


def test_memory_of_hot_pages_is_filled_again_after_their_copy(tmp_path: Path) -> None:
    """Three times: 32 MiB are read at once."""
    rows = torch.arange(70.0).view(-1, 1).repeat(1, 1 << 18)
    table = write_raw_table(tmp_path, rows, page_bytes=1 << 20)
    device, ids = LateDevice(0, lazy=1.0), torch.tensor([0, 31, 32, 63, 64, 69])
    with Make(device, staging_bytes=16 << 20) as make:
        cache = make(table, 70, heats={table.name: np.ones(70, np.uint8)})
        assert make.engine.stats()["reads"] == 70
        read, error = cache.read_through({table.name: ids})
        assert error is None
        assert torch.equal(read[table.name], rows[ids])
        assert make.engine.stats()["reads"] == 70
    device.close()
