"""PinnedGraph: a device samples from it; its memory is counted, freed, and refused when short."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from emulator import EmulatedDevice
from every_sampler import GRAPH, NEAR, NODES, POSITIVE, assert_same
from late_device import LateDevice
from sampling_model import mixed_degrees

from gids.cuda import Device
from gids.cuda.device import Argument, Stream
from gids.errors import FormatError
from gids.sampler import LocalityBias, Minibatch, Neighbor
from gids.sampler.device import PinnedGraph, pinned_graph
from gids.store import Graph


def sample(graph: object) -> Minibatch:
    return Neighbor([3, 5]).sample(graph, torch.arange(30), seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("topology_on", ["auto", "host", "indptr", "device"])
def test_a_pinned_graph_samples_as_the_graph_does(device: Device, topology_on: str) -> None:
    graph = make_graph(mixed_degrees(300), dtype=np.int32)
    expected = sample(graph)
    with PinnedGraph(graph, device, topology_on=topology_on) as pinned:
        got = sample(pinned)
        assert torch.equal(got.input_nodes.cpu(), expected.input_nodes)  # type: ignore[union-attr, arg-type]
        on_device = {"indptr": 301 * 8, "host": 0}.get(topology_on, 301 * 8 + graph.indices.nbytes)
        assert pinned.device_bytes == on_device
        pages = {"host": [graph.indptr, graph.indices], "indptr": [graph.indices]}.get(topology_on, [])
        assert pinned.host_bytes == sum(-(-a.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for a in pages)


@pytest.mark.parametrize(("topology_on", "most"), [("host", 64), ("indptr", 64), ("device", 94)])
def test_kernels_that_read_the_topology_over_the_bus_take_64_blocks(
    monkeypatch: pytest.MonkeyPatch, topology_on: str, most: int
) -> None:
    """Of up to 1056. Kernels that read device memory take as many as they have work for."""
    device = EmulatedDevice()
    device.sm_count = 132
    grids: dict[str, int] = {}
    launch = device.launch

    def record(stream: Stream, unit: str, kernel: str, blocks: int, threads: int, *args: Argument) -> None:
        grids[kernel] = blocks
        launch(stream, unit, kernel, blocks, threads, *args)

    monkeypatch.setattr(device, "launch", record)
    with PinnedGraph(make_graph([8] * 12_000), device, topology_on=topology_on) as pinned:
        Neighbor([2]).sample(pinned, torch.arange(12_000), seed=0)
    assert grids["gids_draw_neighbors"] == most
    assert grids["gids_count_neighbors"] == (64 if topology_on == "host" else 94)
    assert grids["gids_relabel"] == 94


def test_the_topology_is_unmapped_after_the_kernels_that_read_it(device: Device) -> None:
    late, mapped = LateDevice(seed=1, lazy=1.0), []
    stream = late.new_stream()
    pinned = PinnedGraph(make_graph([2] * 40), late, topology_on="host")
    pinned.used_on(stream)
    stream.put(lambda: mapped.append(len(late.mapped)))
    assert mapped == [], "the stream runs behind"
    pinned.close()
    assert mapped == [2]
    assert not late.mapped
    late.close()
    with PinnedGraph(make_graph([2] * 40), device) as pinned:
        sample(pinned)
        assert pinned._streams == [device.current_stream()]


def test_ids_beyond_31_bits(device: Device) -> None:
    """They need int64 indices. The last one is the largest id that samplers support."""
    most = (1 << 32) - 1
    edges = np.array([most - 1, 1 << 31, 5, most - 1, (1 << 31) - 1, 0])
    relation = ("page", "links", "site")
    graph = Graph(relation, most, 3, np.array([0, 2, 4, 6]), edges, None)
    for topology_on in ("host", "device"):
        with PinnedGraph(graph, device, topology_on=topology_on) as pinned:
            assert pinned.wide
            for given in (graph, pinned):
                minibatch = Neighbor([2]).sample([given], {"site": torch.arange(3)}, seed=0)
                found = [most - 1, 1 << 31, 5, (1 << 31) - 1, 0]
                assert minibatch.input_nodes["page"].tolist() == found
                assert minibatch.blocks[0][relation].indices.tolist() == [0, 1, 2, 0, 3, 4]  # type: ignore[index]


def test_ids_that_do_not_fit_int32_are_detected(device: Device) -> None:
    good = make_graph([2] * 40, seed=1)
    spoiled = good.indices.copy()
    spoiled[[33, 41]] = (1 << 32) + 3, -(1 << 32)
    graph = Graph(good.relation, 40, 40, good.indptr, spoiled, None)
    for topology_on in ("host", "device"):
        with (
            PinnedGraph(graph, device, topology_on=topology_on) as pinned,
            pytest.raises(FormatError, match=r"indices\[33\]"),
        ):
            Neighbor([2]).sample(pinned, torch.arange(40))


def test_closing_is_idempotent_and_dropping_closes(device: Device) -> None:
    graph = make_graph([2] * 30)
    pinned = PinnedGraph(graph, device)
    assert "bytes of host" in repr(pinned)
    pinned.close()
    pinned.close()
    assert pinned.closed
    assert "closed" in repr(pinned)
    released = weakref.finalize(other := PinnedGraph(graph, device, topology_on="host"), lambda: None)
    del other
    gc.collect()
    assert not released.alive


def test_by_default_the_device_holds_arrays_up_to_an_eighth_of_its_free_memory(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph([2] * 1000)
    indptr, both = 8 * 1001, 8 * 1001 + 4 * 2000
    for free, expected in (
        (8 * both, both),
        (8 * both - 1, indptr),
        (8 * indptr, indptr),
        (8 * indptr - 1, 0),
    ):
        monkeypatch.setattr(device, "memory_info", lambda free=free: (free, 1 << 40))
        with PinnedGraph(graph, device) as pinned:
            assert pinned.device_bytes == expected


def test_short_memory_is_refused_with_the_sum(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_graph([2] * 1000, relation=("a", "b", "a"))
    monkeypatch.setattr(device, "memory_info", lambda: (12000, 1 << 40))
    message = (
        r"'a\.b\.a' needs indptr 8008 \+ indices 8000 = 16008 bytes of device memory, but 12000 are free"
    )
    with pytest.raises(MemoryError, match=message):
        PinnedGraph(graph, device, topology_on="device")
    monkeypatch.setattr(pinned_graph, "available_bytes", lambda: 7999)
    with pytest.raises(
        MemoryError, match=r"indices 8000 = 8000 bytes of host memory, but 7999 are available"
    ):
        PinnedGraph(graph, device, topology_on="indptr")


# --- weights and masks ---


@pytest.mark.few(1)
@pytest.mark.parametrize("topology_on", ["host", "indptr", "device"])
def test_weights_are_copied_once_beside_the_indices_and_freed(device: Device, topology_on: str) -> None:
    weights, seeds = POSITIVE.copy(), torch.arange(20)
    with PinnedGraph(GRAPH, device, topology_on=topology_on) as pinned:
        topology = pinned.host_bytes, pinned.device_bytes

        def of_weights() -> tuple[int, int]:
            return pinned.host_bytes - topology[0], pinned.device_bytes - topology[1]

        assert of_weights() == (0, 0)
        samplers = [Neighbor([2], weights=weights) for _ in range(2)]
        for sampler in samplers:
            sampler.sample(pinned, seeds, seed=0)
            sampler.sample(pinned, seeds, step=1, seed=0)
        pages = -(-weights.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        once = (0, weights.nbytes) if topology_on == "device" else (pages, 0)
        assert of_weights() == once
        assert str(pinned.host_bytes) in repr(pinned)
        Neighbor([2], weights=weights + 1).sample(pinned, seeds, seed=0)
        gc.collect()
        assert of_weights() == once
        del sampler, samplers, weights
        gc.collect()
        assert of_weights() == (0, 0)
        kept = Neighbor([2], weights=POSITIVE)
        expected = kept.sample(GRAPH, seeds, seed=0)
        assert_same(kept.sample(pinned, seeds, seed=0), expected)
    with pytest.raises(ValueError, match="closed: pin the graph again"):
        kept.sample(pinned, seeds)
    with PinnedGraph(GRAPH, device) as again:
        assert_same(kept.sample(again, seeds, seed=0), expected)


def test_weights_go_to_the_host_if_the_device_has_little_room(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PinnedGraph(GRAPH, device, topology_on="device") as pinned:
        monkeypatch.setattr(device, "memory_info", lambda: (8 * POSITIVE.nbytes - 1, 1 << 40))
        Neighbor([2], weights=POSITIVE).sample(pinned, torch.arange(20), seed=0)
        assert pinned.host_bytes >= POSITIVE.nbytes


def test_memory_of_masks_is_counted(device: Device) -> None:
    with PinnedGraph(GRAPH, device) as pinned:
        biased, plain = Neighbor([2], locality=LocalityBias(NEAR, 2)), Neighbor([2])
        plain.sample(pinned, torch.arange(0), seed=0)
        biased.sample(pinned, torch.arange(0), seed=0)
        assert biased.nbytes >= plain.nbytes + -(-NODES // 8)


def test_weights_that_do_not_fit_are_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_graph([3, 4])
    with PinnedGraph(graph, device, topology_on="host") as pinned:
        sampler = Neighbor([2], weights=np.ones(7))
        with monkeypatch.context() as short:
            short.setattr(pinned_graph, "available_bytes", lambda: 27)
            message = (
                r"pinning the weights of '_N\._E\._N' needs weights 28 = 28 bytes of host memory, but 27"
            )
            with pytest.raises(MemoryError, match=message):
                sampler.sample(pinned, torch.arange(2))
        assert sampler.sample(pinned, torch.arange(2), seed=0).blocks[0].num_edges == 4  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"weights of .* must have 7 values.*\(got 6\)"):
            Neighbor([2], weights=np.ones(6)).sample(pinned, torch.arange(2))


def test_a_driver_that_refuses_to_pin_is_reported(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, nbytes: int, **options: Any) -> None:
        raise RuntimeError("cudaErrorMemoryAllocation")

    with pytest.raises(ValueError, match=r"topology_on must be auto, host, indptr or device \(got 'gpu'\)"):
        PinnedGraph(GRAPH, device, topology_on="gpu")
    with PinnedGraph(GRAPH, device, topology_on="host") as pinned:
        monkeypatch.setattr(device, "map_host", refuse)
        with pytest.raises(RuntimeError, match=r"weights of '_N\._E\._N': .*: free host memory$"):
            Neighbor([2], weights=POSITIVE).sample(pinned, torch.arange(2))
    with pytest.raises(
        RuntimeError, match=r"indptr of '_N\._E\._N': .*Allocation.*free host memory, or keep"
    ):
        PinnedGraph(GRAPH, device, topology_on="host")
