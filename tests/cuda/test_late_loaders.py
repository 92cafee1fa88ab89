"""Loaders on a device whose streams run late, with rows that ranks share: rows are those of the table, and
nothing uses a tensor before it has waited for the work that writes it. tests/torture has the loaders of one
process. Whatever a device refuses, no freed memory stays mapped.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import random_in_edges, same_bits
from emulator import EmulatedDevice, EmulatedStream
from late_device import LateDevice
from open_options import tuned

import gids
import gids.distributed
from gids.cuda.device import Device, Mapping
from gids.cuda.host_memory import host_memory
from gids.write import DatasetWriter

NODES = 700
CITES = ("paper", "cites", "paper")
SEEDS = torch.arange(0, NODES, 14)
OPTIONS: Any = {"memory": "16MB", "device_memory": "16MB", "staging": "1MiB", "window": 3}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("late") / "one.gids"
    indptr, indices = random_in_edges(NODES, NODES, 1)
    generator = torch.Generator().manual_seed(1)
    with DatasetWriter(made) as writer:
        writer.write_graph(CITES, indptr, indices, num_src=NODES)
        for key, dim, options in (
            ("feat", 100, {}),
            ("rows", 33, {"dtype": torch.int8, "scale": "row"}),
            ("columns", 20, {"dtype": torch.int8, "scale": "column"}),
            ("half", 7, {"dtype": torch.float16}),
        ):
            writer.write_table("node", "paper", key, torch.randn(NODES, dim, generator=generator), **options)
        writer.write_table("node", "paper", "year", torch.arange(NODES))
        writer.write_table("node", "paper", "open", torch.arange(NODES) % 3 == 0)
        writer.write_table("edge", CITES, "weight", torch.randn(len(indices), 48, generator=generator))
        writer.write_labels("paper", torch.arange(NODES))
    return made


@pytest.fixture
def late(cuda_is: Callable[[Device], None]) -> Iterator[LateDevice]:
    device = LateDevice(0, lazy=1.0)
    cuda_is(device)
    yield device
    device.close()
    assert not device.mapped


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_rows_of_ranks_are_those_of_a_loader_on_the_cpu(
    late: LateDevice, path: Path, one_rank: None, dtype: torch.dtype | None
) -> None:
    """Bit for bit, of two epochs, beside a late stream of training. Their kinds are decoded on the device."""
    options: Any = {"batch_size": 20, "shuffle": True, "dtype": dtype, "labels": "inputs", "seed": 0}
    training = late.new_stream()
    with (
        gids.open(path, **tuned(OPTIONS | {"reads": "random"})) as source,
        gids.distributed.open(path, **tuned(OPTIONS)) as shared,
        gids.NodeLoader(source, SEEDS, [4, 4], tables=list(source.store.tables), **options) as loader,
        gids.NodeLoader(
            shared, SEEDS, [4, 4], tables=list(source.store.tables), device="cuda", **options
        ) as late_loader,
    ):
        for _ in range(2):
            expected = list(loader)
            with late.use(training):
                for a, b in zip(expected, late_loader, strict=True):
                    training.put(lambda: None)
                    assert torch.equal(a.input_nodes, b.input_nodes.cpu())
                    assert torch.equal(a.labels, b.labels.cpu())
                    for name, rows in a.features.items():
                        assert rows.dtype == b.features[name].dtype
                        assert same_bits(rows, b.features[name].cpu()), name
    assert "gids_order_rows" in late.launches


# --- refusals ---


class Refusing(EmulatedDevice):
    """Refuses one of the requests for memory, streams and mappings: the one of this number."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.requests, self.refused = 0, refused

    def _request(self) -> None:
        self.requests += 1
        if self.requests == self.refused:
            raise torch.cuda.OutOfMemoryError("refused by the test")

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


def test_no_freed_memory_stays_mapped_after_a_refusal(path: Path, cuda_is: Callable[[Device], None]) -> None:
    limits: Any = {"memory": "16MB", "device_memory": "16MB", "staging": 1 << 18, "window": 0, "planned": 1}
    devices: list[Refusing] = []
    while not devices or devices[-1].requests >= devices[-1].refused:
        devices.append(Refusing(len(devices) + 1))
        cuda_is(devices[-1])
        with gids.open(path, reads="random", **tuned(limits)) as source:
            with (
                suppress(RuntimeError),
                gids.NodeLoader(
                    source,
                    torch.arange(30),
                    [2],
                    tables=["paper.feat"],
                    batch_size=30,
                    device="cuda",
                    topology_on="host",
                    seed=0,
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
