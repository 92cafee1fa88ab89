"""Every loader on a device whose streams run late: rows are those of the table, and nothing uses a tensor
before it has waited for the work that writes it. Whatever a device refuses, no freed memory stays mapped.
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
from gids.store import Table
from gids.write import DatasetWriter

NODES, EDGE_ROWS = 700, 48
SEEDS = torch.arange(0, NODES, 7)
OPTIONS: Any = {"memory": "16MB", "device_memory": "16MB", "staging": "1MiB", "window": 3}
Rows = dict[str, torch.Tensor]
Made = Iterator[tuple[torch.Tensor, torch.Tensor | None, Rows]]
"""Of each minibatch: its nodes, its edges, and the rows by table."""


@pytest.fixture(scope="module")
def rows() -> Rows:
    generator = torch.Generator().manual_seed(5)
    edges = len(random_in_edges(NODES, NODES, 1)[1])
    return {
        "paper.feat": torch.randn(NODES, 100, generator=generator),
        "paper.cites.paper.weight": torch.randn(edges, EDGE_ROWS, generator=generator),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, rows: Rows) -> Path:
    made = tmp_path_factory.mktemp("late") / "one.gids"
    with DatasetWriter(made) as writer:
        cites = ("paper", "cites", "paper")
        writer.write_graph(cites, *random_in_edges(NODES, NODES, 1), num_src=NODES)
        writer.write_table("node", "paper", "feat", rows["paper.feat"])
        writer.write_table("edge", cites, "weight", rows["paper.cites.paper.weight"])
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


def sampled(loader: Any) -> Made:
    for minibatch in loader:
        if isinstance(loader, gids.NodeLoader):
            assert torch.equal(minibatch.labels.cpu(), minibatch.input_nodes.cpu())
        edges = torch.cat([block.edge_ids for block in minibatch.blocks])
        yield minibatch.input_nodes, edges, minibatch.features


def of_pyg(loader: Any) -> Made:
    for data in loader:
        assert torch.equal(data.y, data.n_id)
        features = {"paper.feat": data.x, "paper.cites.paper.weight": data.weight}
        yield data.n_id, data.e_id, features


def of_nodes(source: gids.Source) -> tuple[Any, Made]:
    loader = gids.NodeLoader(
        source,
        SEEDS,
        [4, 4],
        tables=list(source.store.tables),
        labels="inputs",
        batch_size=20,
        shuffle=True,
        device="cuda",
        seed=0,
    )
    return loader, sampled(loader)


def of_edges(source: gids.Source) -> tuple[Any, Made]:
    loader = gids.EdgeLoader(
        source,
        torch.stack([SEEDS, SEEDS.flip(0)]),
        [4, 4],
        tables=list(source.store.tables),
        batch_size=20,
        exclude="self",
        device="cuda",
        seed=0,
    )
    return loader, sampled(loader)


def of_pyg_nodes(source: gids.Source) -> tuple[Any, Made]:
    pyg = pytest.importorskip("gids.pyg")
    tables = {"x": "paper.feat", "weight": "paper.cites.paper.weight"}
    loader = pyg.NeighborLoader(source, [4, 4], SEEDS, tables=tables, batch_size=20, device="cuda", seed=0)
    return loader, of_pyg(loader)


def check(device: LateDevice, source: gids.Source, make: Any, rows: Rows) -> int:
    """Compare the rows of two epochs with the tables, beside a late stream of training."""
    training, count = device.new_stream(), 0
    with source:
        for _ in range(2):
            loader, minibatches = make(source)
            with device.use(training):
                for nodes, edges, features in minibatches:
                    training.put(lambda: None)
                    for name, found in features.items():
                        ids = nodes if name == "paper.feat" else edges
                        assert torch.equal(found.cpu(), rows[name][ids.cpu()]), name
                    count += 1
                    del found, features
            loader.close()
    return count


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [of_nodes, of_edges, of_pyg_nodes], ids=lambda make: make.__name__)
def test_minibatches_of_ranks_that_share_rows_are_waited_for(
    late: LateDevice, path: Path, rows: Rows, one_rank: None, make: Any
) -> None:
    assert check(late, gids.distributed.open(path, **tuned(OPTIONS)), make, rows) >= 10


def test_rows_of_ranks_are_decoded_on_the_device(
    late: LateDevice, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a loader on the CPU returns them, bit for bit. Their bytes never visit the host."""
    path, generator = tmp_path / "kinds.gids", torch.Generator().manual_seed(1)
    with DatasetWriter(path) as writer:
        cites = ("paper", "cites", "paper")
        writer.write_graph(cites, *random_in_edges(NODES, NODES, 1), num_src=NODES)
        for name, dim, options in (
            ("feat", 100, {}),
            ("rows", 33, {"dtype": torch.int8, "scale": "row"}),
            ("columns", 20, {"dtype": torch.int8, "scale": "column"}),
            ("half", 7, {"dtype": torch.float16}),
        ):
            writer.write_table("node", "paper", name, torch.randn(NODES, dim, generator=generator), **options)
        writer.write_table("node", "paper", "year", torch.arange(NODES))
        writer.write_table("node", "paper", "open", torch.arange(NODES) % 3 == 0)
    for dtype in (None, torch.bfloat16):
        options: Any = {"batch_size": 20, "shuffle": True, "dtype": dtype}
        with gids.open(path, **tuned(OPTIONS | {"reads": "random"})) as source:
            expected = list(gids.NodeLoader(source, SEEDS, [3, 3], **{"seed": 0} | options))
        with monkeypatch.context() as patch, gids.distributed.open(path, **tuned(OPTIONS)) as source:
            patch.setattr(Table, "decode", None)
            late.launches.clear()
            loader = gids.NodeLoader(source, SEEDS, [3, 3], device="cuda", **{"seed": 0} | options)
            for a, b in zip(expected, loader, strict=True):
                assert torch.equal(a.input_nodes, b.input_nodes.cpu())
                for name, rows in a.features.items():
                    assert rows.dtype == b.features[name].dtype
                    assert same_bits(rows, b.features[name].cpu()), name
            assert late.launches.count("gids_order_rows") == 6 * len(expected)


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


@pytest.mark.parametrize("reads", ["random", "pack"])
def test_no_freed_memory_stays_mapped_after_a_refusal(
    path: Path, cuda_is: Callable[[Device], None], reads: Any
) -> None:
    limits: Any = {"memory": "16MB", "device_memory": "16MB", "staging": 1 << 18, "window": 0, "planned": 1}
    devices: list[Refusing] = []
    while not devices or devices[-1].requests >= devices[-1].refused:
        devices.append(Refusing(len(devices) + 1))
        cuda_is(devices[-1])
        with gids.open(path, reads=reads, **tuned(limits)) as source:
            with (
                suppress(RuntimeError),
                gids.NodeLoader(
                    source,
                    torch.arange(30),
                    [2],
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
