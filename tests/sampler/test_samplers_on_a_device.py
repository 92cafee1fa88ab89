"""Minibatches of a device equal those of the CPU bit by bit, sampled at once or finished later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_sampler import GRAPH, NODES, ON_DEVICES, assert_same, make, seeds_for, spoiled
from late_device import LateDevice
from sampling_model import citations, make_graph, with_times
from waits import Waits

import gids
from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Labor, LocalityBias, Neighbor, Topology
from gids.sampler.device import PinnedGraph
from gids.write import DatasetWriter, edge_list


@pytest.mark.parametrize("kind", ON_DEVICES)
def test_minibatches_of_a_device_equal_those_of_the_cpu(device: Device, kind: str) -> None:
    ids = torch.from_numpy(np.random.default_rng(1).permutation(NODES)[:15])
    with PinnedGraph(GRAPH, device, topology_on="host") as pinned:
        for fanouts in ([-1, 3], [40]):
            sampler = make(kind, fanouts)
            steps = [seeds_for(sampler, of_step) for of_step in (ids, torch.tensor([5, 5, 2]), ids[:0])]
            on_device, on_host = (
                sampler.sample_bulk(graph, steps, seed=7, epoch=2, first_step=5) for graph in (pinned, GRAPH)
            )
            for one, other in zip(on_device, on_host, strict=True):
                assert_same(one, other)
                assert {tensor.device for tensor in one.tensors()} == {device.torch_device}


@pytest.mark.parametrize("kind", ["labor of fixed count", "weights", "times of edges, last"])
def test_relations_are_sampled_as_on_the_cpu(device: Device, kind: str) -> None:
    """With numbers for each of them. Two lead from one type; one has neither times nor weights."""
    graphs = [graph if r == 1 else with_times(graph, r) for r, graph in enumerate(citations())]
    relations = [graph.relation for graph in graphs]
    numbers = ((3, 0, -1, 1), (5, 2, 4, 1), (0, 3, 2, 2))
    fanouts: list[Any] = [dict(zip(relations, layer, strict=True)) for layer in numbers]
    if kind == "weights":
        weights = {relations[i]: np.arange(graphs[i].num_edges, dtype=np.float32) % 3 for i in (0, 2)}
        near = LocalityBias({"author": np.arange(150) < 40}, 5, weights=True)
        sampler: Any = Neighbor(fanouts, weights=weights, locality=near, batch_dependency=4)
    else:
        sampler = make(kind, fanouts)
    seeds = seeds_for(sampler, {"paper": torch.arange(5, 25), "author": torch.arange(9)})
    pinned = [PinnedGraph(g, device) for g in graphs]
    assert_same(*(sampler.sample(given, seeds, step=3, seed=0) for given in (pinned, graphs)))
    for p in pinned:
        p.close()


def test_a_sampler_gets_other_weights_and_masks(device: Device) -> None:
    """New arrays may get the ids of those that they replace."""
    graph, turns = make_graph([8] * 200), 8
    sampler = Neighbor([3, 3], weights=np.ones(1600, np.float32))
    with PinnedGraph(graph, device, topology_on="host") as pinned:
        for turn in range(turns):
            sampler.weights = sampler.locality = None
            weights = np.ones(1600, np.float32)
            weights[turn % 2 :: 2] = turn % 4 // 2  # 0 or 1
            mask = np.arange(200) % turns == turn
            sampler.weights, sampler.locality = weights, LocalityBias(mask, 50, weights=True)
            del weights
            assert_same(*(sampler.sample(g, torch.arange(20), seed=0) for g in (pinned, graph)))


def test_layers_of_thousands_of_nodes_are_numbered_by_several_blocks(device: Device) -> None:
    graph = make_graph([2] * 5000)
    with PinnedGraph(graph, device) as pinned:
        assert_same(*(Neighbor([1]).sample(g, torch.arange(5000), seed=0) for g in (pinned, graph)))


# --- start(): a minibatch is enqueued now and waited for later ---


@pytest.mark.parametrize(
    ("kind", "fanouts"),
    [("neighbor", [5, 4, 3]), ("labor of fixed count", [3, 5]), ("times of edges", [3, 3])],
)
def test_minibatches_may_be_finished_in_any_order(device: Device, kind: str, fanouts: list[int]) -> None:
    draws = make(kind, fanouts)
    seeds = [
        seeds_for(draws, ids)
        for ids in torch.from_numpy(np.random.default_rng(2).permutation(NODES)).split(20)[:5]
    ]
    with PinnedGraph(GRAPH, device, topology_on="host") as pinned:
        started = [draws.start(pinned, seeds[step], seed=4, step=step) for step in range(4)]
        beside = draws.sample(pinned, seeds[4], seed=4, step=4)
        for minibatch in [*(started[step]() for step in (3, 1, 0, 2)), beside]:
            expected = draws.sample(GRAPH, seeds[minibatch.step], seed=4, step=minibatch.step)
            assert_same(minibatch, expected)


def test_minibatches_are_right_on_streams_that_run_out_of_step() -> None:
    """Times go to the device before kernels are held: memory that a held kernel still uses may be theirs."""
    device = LateDevice(0)
    graphs = [with_times(graph, r) for r, graph in enumerate(citations())]
    topology = Topology([PinnedGraph(graph, device, topology_on="host") for graph in graphs])
    on_host = Topology(graphs)
    streams = [device.new_stream(), device.new_stream()]
    ids = {"paper": torch.arange(0, 400, 20), "author": torch.arange(9)}
    samplers, left = [make(kind, [3, 2]) for kind in ("neighbor", "times of nodes")], list[Any]()
    for step in range(6):
        draws = samplers[step // 2 % 2]
        with device.use(streams[step // 3 % 2]):
            left.append((draws, draws.start(topology, seeds_for(draws, ids), step=step, seed=0)))
        if step % 2:
            with device.use(streams[0]):  # also of minibatches that were started on the other one
                streams[1].slow = True
                made = [(draws, finish()) for draws, finish in left]
                streams[1].slow = False
                for stream in streams:
                    stream.synchronize()
            for draws, minibatch in made:
                expected = draws.sample(on_host, seeds_for(draws, ids), step=minibatch.step, seed=0)
                assert_same(minibatch, expected)
            left.clear()
    for pinned in topology.pinned:
        pinned.close()
    device.close()


def test_starting_does_not_wait_but_settles_the_minibatch_before() -> None:
    """The host waits once for each minibatch, and for each layer of all in-edges, whose number it needs."""
    device, draws = Waits(), Neighbor([5, 4, 3])
    with PinnedGraph(GRAPH, device, topology_on="host") as pinned:
        first = draws.start(pinned, torch.arange(10), step=0, seed=0)
        assert device.said == [("copy", 0)]
        second = draws.start(pinned, torch.arange(10), step=1, seed=0)
        assert device.said == [("copy", 0), ("wait", 0), ("copy", 1)]
        second()
        first()
        assert device.said[3:] == [("wait", 1)]
        dropped = draws.start(pinned, torch.arange(10), step=2, seed=0)
        del dropped
        draws.start(pinned, torch.arange(10), step=3, seed=0)
        assert device.said[4:] == [("copy", 2), ("copy", 3)], "nobody needs the dropped one"
        before = len(device.said)
        Neighbor([5, 3, -1]).sample(pinned, torch.arange(10), seed=0)
        assert [what for what, _ in device.said[before:]].count("wait") == 2


def test_errors_of_the_seeds_and_the_topology_come_with_the_minibatch(device: Device) -> None:
    graph, draws = make_graph([3] * 100), Neighbor([3])
    broken = spoiled(graph, indices=dict.fromkeys(range(3), 1000))  # of node 0
    errors: dict[int, tuple[type[Exception], str]] = {
        0: (FormatError, r"indices\[0\] is outside 0 to 99"),
        100: (IndexError, r"seed 100 is not a .* node"),
    }
    with PinnedGraph(broken, device, topology_on="host") as pinned:
        started = {seed: draws.start(pinned, torch.tensor([seed]), seed=0) for seed in (1, 0, 3, 100, 4)}
        for seed, finish in started.items():
            if seed in errors:
                with pytest.raises(errors[seed][0], match=errors[seed][1]):
                    finish()
            else:
                assert_same(finish(), draws.sample(graph, torch.tensor([seed]), seed=0))


def test_samplers_of_the_cpu_alone_are_refused(device: Device) -> None:
    graph, ids = make_graph([4] * 20), torch.arange(3)
    with PinnedGraph(graph, device) as pinned:
        for sampler in (Neighbor([3], subgraph="induced"), Labor([3], importance_sampling=1)):
            with pytest.raises(ValueError, match="samples on the CPU only, but the graphs are pinned"):
                sampler.sample(pinned, ids, seed=0)
    with pytest.raises(ValueError, match=r"call sample\(\)"):
        Neighbor([3]).start(graph, ids, seed=0)


def test_a_loader_with_times_has_the_minibatches_of_the_cpu(
    device: Device, cuda_is: Callable[[Device], None], tmp_path: Path
) -> None:
    rng = np.random.default_rng(7)
    with DatasetWriter(tmp_path / "m.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.randn(150, 8))
        edges = edge_list(*rng.integers(0, 150, (2, 600)), num_src=150, num_dst=150)
        writer.write_edges(("_N", "_E", "_N"), edges, times=rng.integers(0, 99, 600))
    cuda_is(device)
    runs = []
    for name, options in (("cpu", {}), ("cuda", {"device_memory": "32MB"})):
        tuning = gids.Tuning(staging="4MB")
        with gids.open(tmp_path / "m.gids", memory="32MB", tuning=tuning, **options) as source:
            given: dict[str, Any] = {"batch_size": 200, "strategy": "last", "device": name, "seed": 0}
            with gids.EdgeLoader(source, None, [3, 3], **given) as loader:
                runs.append(list(loader))
    assert len(runs[0]) == 3
    for on_host, on_device in zip(*runs, strict=True):
        assert_same(on_device, on_host)
        assert torch.equal(on_device.features["_N.feat"].cpu(), on_host.features["_N.feat"])
        assert {tensor.device for tensor in on_device.tensors()} == {device.torch_device}
