"""Packs in device memory: the rows of random reads, in whatever order streams run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from late_device import LateDevice
from packs_example import assert_all_same, assert_same, open_loader, open_source, scratch_files

import gids
from gids.cuda.device import Device
from gids.sampler import Minibatch

MIB = 1 << 20


def small(source: gids.Source, device: str = "cuda") -> gids.NodeLoader:
    """The emulator is slow."""
    return open_loader(source, every=24, batch_size=32, device=device)


def opened(path: Path, device_memory: int) -> gids.Source:
    return open_source(path, "pack", 16 * MIB, device_memory=device_memory, staging=MIB)


@pytest.fixture(scope="module")
def epochs(path: Path) -> list[list[Minibatch]]:
    with open_source(path, "random") as source, small(source, device="cpu") as loader:
        return [list(loader) for _ in range(2)]


@pytest.fixture
def on(device: Device, cuda_is: Callable[[Device], None]) -> Device:
    """What device="cuda" opens in the test."""
    cuda_is(device)
    return device


def test_epochs_are_those_of_random_reads(path: Path, epochs: list[list[Minibatch]], on: Device) -> None:
    with opened(path, 4 * MIB) as source, small(source) as loader:
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
    with opened(path, 16 * MIB) as source, small(source) as loader, device.use(device.new_stream()):
        for expected, minibatch in zip(epochs[0], loader, strict=True):
            device.current_stream().synchronize()
            assert_same(expected, minibatch)
    device.close()
