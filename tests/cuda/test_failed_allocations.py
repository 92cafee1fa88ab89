"""Whatever a device refuses, no host memory stays mapped that is freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import random_in_edges
from emulator import EmulatedDevice, EmulatedStream
from open_options import tuned

import gids
from gids.cuda.device import Device, Mapping
from gids.cuda.host_memory import host_memory
from gids.write import DatasetWriter

NODES = 300


class Refusing(EmulatedDevice):
    """Refuses one of the requests for memory, streams and mappings: the one of this number."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.requests, self.refused = 0, refused

    def _request(self) -> None:
        self.requests += 1
        if self.requests == self.refused:
            raise torch.OutOfMemoryError("refused by the test")

    def _tensor(self, *args: Any, **options: Any) -> torch.Tensor:
        self._request()
        return super()._tensor(*args, **options)

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._request()
        return super().allocate(nbytes)

    def new_stream(self, *args: Any) -> EmulatedStream:
        self._request()
        return super().new_stream(*args)

    def map_host(self, *args: Any, **options: Any) -> Mapping:
        self._request()
        return super().map_host(*args, **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("refused") / "one.gids"
    with DatasetWriter(made) as writer:
        writer.write_graph(("paper", "cites", "paper"), *random_in_edges(NODES, NODES, 1), num_src=NODES)
        for key in ("feat", "text"):
            writer.write_table("node", "paper", key, torch.randn(NODES, 50))
    return made


@pytest.mark.parametrize("reads", ["random", "pack"])
def test_no_freed_memory_stays_mapped_after_a_refusal(
    path: Path, cuda_is: Callable[[Device], None], reads: Any
) -> None:
    options: Any = {"memory": "16MB", "device_memory": "16MB", "staging": 1 << 18, "window": 0, "planned": 1}
    devices: list[Refusing] = []
    while not devices or devices[-1].requests >= devices[-1].refused:
        devices.append(Refusing(len(devices) + 1))
        cuda_is(devices[-1])
        with gids.open(path, reads=reads, **tuned(options)) as source:
            with (
                suppress(RuntimeError),
                gids.NodeLoader(
                    source, torch.arange(30), [2], batch_size=30, device="cuda", topology_on="host"
                ) as loader,
            ):
                list(loader)
    del loader
    gc.collect()
    assert len(devices) > 20
    for device in devices:
        assert not device.mapped, f"after request {device.refused} was refused"


def test_a_mapping_keeps_its_memory_and_ends_with_it() -> None:
    device, memory = EmulatedDevice(), np.frombuffer(host_memory(4096), np.uint8)
    mapping = device.map_host(memory.ctypes.data, 4096, memory=memory)
    alive = weakref.ref(memory)
    del memory
    assert alive() is not None
    assert list(device.mapped.values()) == [4096]
    mapping.close()
    mapping.close()
    assert alive() is None
    assert not device.mapped
    memory = np.frombuffer(host_memory(4096), np.uint8)
    dropped = device.map_host(memory.ctypes.data, 4096, memory=memory)
    del memory, dropped
    assert not device.mapped, "a mapping that is dropped is closed"
