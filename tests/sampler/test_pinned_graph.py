"""PinnedGraph: a device samples from it; its memory is counted, freed, and refused when short."""

from __future__ import annotations

import gc
import mmap
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from emulator import EmulatedDevice
from every_sampler import GRAPH, POSITIVE, assert_same
from late_device import LateDevice
from sampling_model import make_graph, mixed_degrees

from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Neighbor
from gids.sampler.device import PinnedGraph
from gids.store import Graph


def in_pages(array: np.ndarray) -> int:
    return -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


@pytest.mark.parametrize("topology_on", ["auto", "host", "indptr", "device"])
def test_a_pinned_graph_samples_as_the_graph_does(device: Device, topology_on: str) -> None:
    graph, draws = make_graph(mixed_degrees(300), dtype=np.int32), Neighbor([3, 5])
    with PinnedGraph(graph, device, topology_on=topology_on) as pinned:
        assert_same(*(draws.sample(given, torch.arange(30), seed=0) for given in (pinned, graph)))
        on_device = {"indptr": 301 * 8, "host": 0}.get(topology_on, 301 * 8 + graph.indices.nbytes)
        assert pinned.device_bytes == on_device
        pages = {"host": [graph.indptr, graph.indices], "indptr": [graph.indices]}.get(topology_on, [])
        assert pinned.host_bytes == sum(map(in_pages, pages))


def test_the_topology_is_unmapped_after_the_kernels_that_read_it() -> None:
    late, mapped = LateDevice(seed=1, lazy=1.0), []
    stream = late.new_stream()
    pinned = PinnedGraph(make_graph([2] * 40), late, topology_on="host")
    pinned.used_on(stream)
    stream.put(lambda: mapped.append(len(late.mapped)))
    assert mapped == [], "the stream runs behind"
    pinned.close()
    pinned.close()
    assert mapped == [2]
    assert not late.mapped
    assert "closed" in repr(pinned)
    late.close()


def test_dropping_a_pinned_graph_frees_it() -> None:
    device = EmulatedDevice()
    released = weakref.finalize(PinnedGraph(make_graph([2] * 30), device, topology_on="host"), lambda: None)
    gc.collect()
    assert not released.alive
    assert not device.mapped


def test_ids_beyond_31_bits(device: Device) -> None:
    """They need int64 indices. The last one is the largest id that samplers support."""
    most = (1 << 32) - 1
    edges = np.array([most - 1, 1 << 31, 5, most - 1, (1 << 31) - 1, 0])
    relation = ("page", "links", "site")
    graph = Graph(relation, most, 3, np.array([0, 2, 4, 6]), edges, None)
    for topology_on in ("host", "device"):
        with PinnedGraph(graph, device, topology_on=topology_on) as pinned:
            for given in (graph, pinned):
                minibatch: Any = Neighbor([2]).sample([given], {"site": torch.arange(3)}, seed=0)
                found = [most - 1, 1 << 31, 5, (1 << 31) - 1, 0]
                assert minibatch.input_nodes["page"].tolist() == found
                assert minibatch.blocks[0][relation].indices.tolist() == [0, 1, 2, 0, 3, 4]


def test_ids_that_do_not_fit_int32_are_detected(device: Device) -> None:
    graph = make_graph([2] * 40, seed=1)
    graph.indices[[33, 41]] = (1 << 32) + 3, -(1 << 32)
    for topology_on in ("host", "device"):
        with (
            PinnedGraph(graph, device, topology_on=topology_on) as pinned,
            pytest.raises(FormatError, match=r"indices\[33\]"),
        ):
            Neighbor([2]).sample(pinned, torch.arange(40), seed=0)


def test_by_default_the_device_holds_arrays_up_to_an_eighth_of_its_free_memory() -> None:
    graph = make_graph([2] * 1000)
    indptr, both = 8 * 1001, 8 * 1001 + 4 * 2000
    for free, expected in ((8 * both, both), (8 * both - 1, indptr), (8 * indptr - 1, 0)):
        with PinnedGraph(graph, EmulatedDevice(total_bytes=free)) as pinned:
            assert pinned.device_bytes == expected


def test_short_memory_is_refused_with_the_sum() -> None:
    graph = make_graph([2] * 1000, relation=("a", "b", "a"))
    short = r"'a\.b\.a' needs indptr 8008 \+ indices 8000 = 16008 bytes of device memory, but 12000 are free"
    with pytest.raises(MemoryError, match=short):
        PinnedGraph(graph, EmulatedDevice(total_bytes=12_000), topology_on="device")
    endless = replace(graph, indices=np.broadcast_to(np.int32(0), 1 << 50))
    with pytest.raises(MemoryError, match=r"indices \d+ = \d+ bytes of host memory, but \d+ are available"):
        PinnedGraph(endless, EmulatedDevice(), topology_on="indptr")
    with pytest.raises(ValueError, match=r"topology_on must be auto, host, indptr or device \(got 'gpu'\)"):
        PinnedGraph(graph, EmulatedDevice(), topology_on="gpu")


# --- weights and masks ---


def test_weights_are_copied_once_beside_the_indices_and_freed(device: Device) -> None:
    weights, seeds = POSITIVE.copy(), torch.arange(20)
    with PinnedGraph(GRAPH, device, topology_on="host") as pinned:
        topology = pinned.host_bytes
        samplers = [Neighbor([2], weights=weights) for _ in range(2)]
        for sampler in samplers:
            for step in range(2):
                sampler.sample(pinned, seeds, step=step, seed=0)
        assert pinned.host_bytes - topology == in_pages(weights)
        assert str(pinned.host_bytes) in repr(pinned)
        Neighbor([2], weights=weights + 1).sample(pinned, seeds, seed=0)
        gc.collect()
        assert pinned.host_bytes - topology == in_pages(weights)
        del sampler, samplers, weights
        gc.collect()
        assert pinned.host_bytes == topology
        kept = Neighbor([2], weights=POSITIVE)
        expected = kept.sample(GRAPH, seeds, seed=0)
        assert_same(kept.sample(pinned, seeds, seed=0), expected)
    with pytest.raises(ValueError, match="closed: pin the graph again"):
        kept.sample(pinned, seeds, seed=0)
    with PinnedGraph(GRAPH, device) as again:
        assert_same(kept.sample(again, seeds, seed=0), expected)
        assert again.device_bytes == 8 * len(GRAPH.indptr) + 4 * GRAPH.num_edges + POSITIVE.nbytes


def test_weights_go_to_the_host_if_the_device_has_little_room() -> None:
    """Beside the topology there is no eighth left for them."""
    nbytes = 8 * len(GRAPH.indptr) + 4 * GRAPH.num_edges
    with PinnedGraph(GRAPH, EmulatedDevice(total_bytes=8 * nbytes), topology_on="device") as pinned:
        Neighbor([2], weights=POSITIVE).sample(pinned, torch.arange(20), seed=0)
        assert pinned.device_bytes == nbytes
        assert pinned.host_bytes == in_pages(POSITIVE)


class Refusing(EmulatedDevice):
    """A device whose driver pins no memory from now on, if so set."""

    refuses = True

    def map_host(self, address: int, nbytes: int, **options: Any) -> Any:
        if self.refuses:
            raise RuntimeError("cudaErrorMemoryAllocation")
        return super().map_host(address, nbytes, **options)


def test_a_driver_that_refuses_to_pin_is_reported() -> None:
    device = Refusing()
    topology = r"indptr of '_N\._E\._N': .*Allocation.*free host memory, or keep"
    with pytest.raises(RuntimeError, match=topology):
        PinnedGraph(GRAPH, device, topology_on="host")
    device.refuses = False
    with PinnedGraph(GRAPH, device, topology_on="host") as pinned:
        device.refuses = True
        with pytest.raises(RuntimeError, match=r"weights of '_N\._E\._N': .*: free host memory$"):
            Neighbor([2], weights=POSITIVE).sample(pinned, torch.arange(2), seed=0)
