"""start(): a minibatch is enqueued now and waited for later. It equals sample()'s."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from late_device import LateDevice
from sampling_graphs import citations, mixed_degrees
from test_labor_on_device import assert_same
from waits import Waits

from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Labor, Neighbor, Topology
from gids.sampler.device import PinnedGraph
from gids.store import Graph

SAMPLERS: list[Callable[[Graph], Neighbor | Labor]] = [
    lambda graph: Neighbor([5, 4, 3]),
    lambda graph: Neighbor([3, 2], replace=True),
    lambda graph: Neighbor([-1, 40]),
    lambda graph: Neighbor([4, 4], batch_dependency=math.inf),
    lambda graph: Neighbor([4, 4], weights=torch.rand(graph.num_edges)),
    lambda graph: Labor([3, 5]),
    lambda graph: Labor([3, 5], fixed_count=True),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_minibatches_may_be_finished_in_any_order(
    device: Device, sampler: Callable[[Graph], Neighbor | Labor]
) -> None:
    graph = make_graph(mixed_degrees(500))
    draws, seeds = sampler(graph), torch.from_numpy(np.random.default_rng(2).permutation(500)).split(60)
    with PinnedGraph(graph, device, topology_on="host") as pinned:
        for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
            started = [draws.start(pinned, seeds[step], seed=4, step=step) for step in range(4)]
            beside = draws.sample(pinned, seeds[4], seed=4, step=4)
            found = {step: started[step]() for step in order}
            for step, minibatch in [*found.items(), (4, beside)]:
                assert_same(minibatch, draws.sample(graph, seeds[step], seed=4, step=step))
                assert minibatch.seeds.tolist() == seeds[step].tolist()  # type: ignore[union-attr]
                assert minibatch.step == step


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_minibatches_are_right_on_streams_that_run_out_of_step(seed: int) -> None:
    device, graphs = LateDevice(seed), citations()
    topology = Topology([PinnedGraph(graph, device, topology_on="host") for graph in graphs])
    on_host, draws = Topology(graphs), Neighbor([4, 3])
    streams = [device.new_stream(), device.new_stream()]
    seeds = {"paper": torch.arange(0, 400, 7), "author": torch.arange(20)}
    left: list[Any] = []
    for step in range(8):
        with device.use(streams[step // 3 % 2]):
            left.append(draws.start(topology, seeds, step=step))
        if step % 2:
            with device.use(streams[0]):  # also of minibatches that were started on the other one
                streams[1].slow = True
                made = [finish() for finish in left]
                streams[1].slow = False
                for stream in streams:
                    stream.synchronize()
            for minibatch in made:
                assert_same(minibatch, draws.sample(on_host, seeds, step=minibatch.step))
            left.clear()
    for pinned in topology.pinned:
        pinned.close()
    device.close()


def test_starting_does_not_wait_but_settles_the_minibatch_before() -> None:
    device, graph, draws = Waits(), make_graph(mixed_degrees(300)), Neighbor([5, 4, 3])
    with PinnedGraph(graph, device, topology_on="host") as pinned:
        first = draws.start(pinned, torch.arange(30), step=0)
        assert device.said == [("copy", 0)]
        second = draws.start(pinned, torch.arange(30), step=1)
        assert device.said == [("copy", 0), ("wait", 0), ("copy", 1)]
        second()
        first()
        assert device.said[3:] == [("wait", 1)]
        dropped = draws.start(pinned, torch.arange(30), step=2)
        del dropped
        draws.start(pinned, torch.arange(30), step=3)
        assert device.said[4:] == [("copy", 2), ("copy", 3)], "nobody needs the dropped one"


def test_errors_of_the_seeds_and_the_topology_come_with_the_minibatch(device: Device) -> None:
    graph = make_graph([3] * 100)
    indices = graph.indices.copy()
    indices[:3] = 1000  # of node 0
    broken, draws = replace(graph, indices=indices), Neighbor([3])
    with PinnedGraph(broken, device, topology_on="host") as pinned:
        given = ([1, 2], [0], [3], [100], [4])
        started = [draws.start(pinned, torch.tensor(seeds)) for seeds in given]
        for seeds, finish in zip(given, started, strict=True):
            if seeds == [0]:
                with pytest.raises(FormatError, match=r"indices\[0\] is outside 0 to 99"):
                    finish()
            elif seeds == [100]:
                with pytest.raises(IndexError, match=r"seed 100 is not a .* node"):
                    finish()
            else:
                assert_same(finish(), draws.sample(graph, torch.tensor(seeds)))


def test_graphs_on_the_host_cannot_be_started() -> None:
    with pytest.raises(ValueError, match=r"call sample\(\)"):
        Neighbor([3]).start(make_graph([3] * 10), torch.arange(3))
