"""Packs in device memory: the rows of random reads, in whatever order streams run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_device import LateDevice
from packs_example import assert_all_same, assert_same, open_loader, open_source, scratch_files

import gids
from gids.cuda.device import Device
from gids.errors import MemoryBudgetError
from gids.sampler import Minibatch

MIB = 1 << 20


def small(source: gids.Source, **options: Any) -> gids.NodeLoader:
    """The emulator is slow."""
    return open_loader(source, **{"every": 12, "batch_size": 32, "device": "cuda"} | options)


def opened(path: Path, reads: str = "pack", device_memory: int = 16 * MIB, **options: Any) -> gids.Source:
    return open_source(path, reads, 16 * MIB, device_memory=device_memory, staging=MIB, **options)


@pytest.fixture(scope="module")
def epochs(path: Path) -> list[list[Minibatch]]:
    with open_source(path, "random") as source, small(source, device="cpu") as loader:
        return [list(loader) for _ in range(2)]


@pytest.fixture
def on(device: Device, cuda_is: Callable[[Device], None]) -> Device:
    """What device="cuda" opens in the test."""
    cuda_is(device)
    return device


@pytest.mark.parametrize("device_memory", [16 * MIB, 4 * MIB])
def test_epochs_are_those_of_random_reads(
    path: Path, epochs: list[list[Minibatch]], on: Device, device_memory: int
) -> None:
    with opened(path, device_memory=device_memory) as source, small(source) as loader:
        for epoch in epochs:
            assert_all_same(epoch, loader)
        stats = loader.stats()["packs"]
        assert stats["minibatches"] == sum(map(len, epochs))
        assert {choice["way"] for choice in stats["choices"]} == {"pack"}
    assert scratch_files(path) == []


def test_streams_that_run_late(
    path: Path, epochs: list[list[Minibatch]], cuda_is: Callable[[Device], None]
) -> None:
    device = LateDevice(0, lazy=1.0)
    cuda_is(device)
    with opened(path) as source, small(source) as loader, device.use(device.new_stream()):
        for expected, minibatch in zip(epochs[0], loader, strict=True):
            device.current_stream().synchronize()
            assert_same(expected, minibatch)
    device.close()


def test_an_epoch_that_is_left_and_one_that_is_interrupted(
    path: Path, epochs: list[list[Minibatch]], on: Device
) -> None:
    with opened(path) as source, small(source) as loader:
        assert_same(epochs[0][0], next(iter(loader)))
        found = iter(loader)
        assert_same(epochs[1][0], next(found))
        with small(source, every=300) as other:
            assert len(list(other)) == len(other)
        assert_all_same(epochs[1][1:], found)


def test_rows_are_converted_and_an_overflow_is_an_error(path: Path, on: Device) -> None:
    def rows(device: str) -> list[torch.Tensor]:
        with opened(path) as source:
            loader = gids.FeatureLoader(source, ["paper.feat"], dtype=torch.float16, device=device)
            asked = [torch.arange(i, 4000, 97) for i in range(4)]
            return [f["paper.feat"] for _, f in loader.attach(asked, lambda ids: {"paper.feat": ids})]

    assert all(torch.equal(a, b.cpu()) for a, b in zip(rows("cpu"), rows("cuda"), strict=True))


def test_memory_that_is_too_small(path: Path, on: Device, caplog: pytest.LogCaptureFixture) -> None:
    with opened(path, device_memory=1 * MIB // 2) as source, small(source) as loader:
        with pytest.raises(MemoryBudgetError):  # random reads do not fit either
            list(loader)
    assert "are too little for" in caplog.text
