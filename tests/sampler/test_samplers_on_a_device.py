"""Minibatches of a device equal those of the CPU bit by bit, sampled at once or finished later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from every_sampler import GRAPH, NODES, ON_DEVICES, assert_refused, assert_same, blocks_of, make, spoiled
from late_device import LateDevice
from sampling_model import citations, mixed_degrees
from temporal_model import some_seeds, with_times
from waits import Waits

import gids
from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Labor, LocalityBias, Neighbor, TimedSeeds, Topology
from gids.sampler.device import PinnedGraph
from gids.sampler.device.sampling import DeviceSampler
from gids.sampler.layered import LayeredSampler
from gids.write import DatasetWriter, edge_list


@pytest.mark.few(10)
@pytest.mark.parametrize("kind", ON_DEVICES)
def test_minibatches_of_a_device_equal_those_of_the_cpu(device: Device, kind: str) -> None:
    seeds = torch.from_numpy(np.random.default_rng(1).permutation(NODES)[:30])
    with PinnedGraph(GRAPH, device, topology_on="host") as pinned:
        for fanouts, step in (([3, 5], 5), ([40], 4), ([-1, 2], 7), ([1], 1)):
            sampler = make(kind, fanouts)
            for given in (seeds, torch.tensor([5, 5, 2]), seeds[:0]):
                minibatch = sampler.sample(pinned, given, seed=7, epoch=2, step=step)
                assert_same(minibatch, sampler.sample(GRAPH, given, seed=7, epoch=2, step=step))
                assert minibatch.input_nodes.device == device.torch_device


def on_relations(kind: str) -> LayeredSampler:
    """A sampler of the four relations of citations(), with numbers for each of them."""
    graphs = citations()
    relations = [graph.relation for graph in graphs]
    numbers = ((3, 0, -1, 1), (5, 2, 4, 1), (0, 3, 2, 2))
    fanouts = [dict(zip(relations, layer, strict=True)) for layer in numbers]
    weights = {relations[i]: np.arange(graphs[i].num_edges, dtype=np.float32) % 3 for i in (0, 2)}
    options = {key: value for key, value in ON_DEVICES[kind][1].items() if key != "weights"}
    if "weights" in kind:
        near = LocalityBias({"author": np.arange(150) < 40}, 5, weights="dependent" not in kind)
        options |= {"weights": weights, "locality": near}
    return ON_DEVICES[kind][0](fanouts, **options)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "kind",
    [
        "labor",
        "labor of fixed count",
        "dependent",
        "dependent, replaced",
        "weights",
        "weights, replaced",
        "weights, dependent",
    ],
)
def test_relations_are_sampled_as_on_the_cpu(device: Device, kind: str) -> None:
    """With weights, two relations lead from one type, one with weights; another has only a mask."""
    graphs, sampler = citations(), on_relations(kind)
    seeds = {"paper": torch.arange(5, 25), "author": torch.arange(9)}
    pinned = [PinnedGraph(g, device) for g in graphs]
    sampled = sampler.sample(pinned, seeds, step=3, seed=0)
    assert_same(sampled, sampler.sample(graphs, seeds, step=3, seed=0))
    if kind.startswith("weights"):
        has_weights = [block.weights is not None for block in blocks_of(sampled)]
        expected = [True, False, True, False] if "dependent" in kind else [True, True, True, False]
        assert has_weights == expected * 3
    for p in pinned:
        p.close()


def test_a_sampler_gets_other_weights_and_masks(device: Device) -> None:
    """New arrays get the ids of those that they replace."""
    sampler, ids, turns = Neighbor([3, 3], weights=np.ones(GRAPH.num_edges, np.float32)), set(), 8
    with PinnedGraph(GRAPH, device, topology_on="host") as pinned:
        for turn in range(turns):
            sampler.weights = sampler.locality = None
            weights = np.ones(GRAPH.num_edges, np.float32)
            weights[turn % 2 :: 2] = turn % 4 // 2  # 0 or 1
            mask = np.arange(NODES) % turns == turn
            sampler.weights, sampler.locality = weights, LocalityBias(mask, 50, weights=True)
            ids |= {id(weights)}
            del weights
            on_device, on_host = (
                sampler.sample(g, torch.arange(30), step=turn, seed=0) for g in (pinned, GRAPH)
            )
            assert_same(on_device, on_host)
    assert len(ids) < turns


def test_a_hub_with_few_drawable_edges(device: Device) -> None:
    """As many drawable edges as wanted, one less, one more, none; far from each other."""
    graph = make_graph([3000] * 6, num_src=3000, relation=("a", "to", "b"))
    weights = np.zeros(graph.num_edges, np.float32)
    for v, possible in enumerate((0, 1, 4, 5, 40)):
        weights[v * 3000 + np.linspace(0, 2999, possible).astype(int)] = 2
    weights[15_000:] = np.arange(3000) % 2
    with PinnedGraph(graph, device) as pinned:
        for fanout in (4, 5, -1):
            for replace in (False, True):
                sampler = Neighbor([fanout], weights=weights, replace=replace)
                assert_same(*(sampler.sample([g], {"b": torch.arange(6)}, seed=0) for g in (pinned, graph)))


@pytest.mark.parametrize(
    "sampler",
    [
        Labor([3]),
        Labor([4]),
        Labor([3], fixed_count=True),
        Neighbor([3], batch_dependency=4),
        Neighbor([3], replace=True),
        Neighbor([3], weights=np.ones(80)),
        Neighbor([3], weights=np.ones(80), replace=True),
        Neighbor([3], locality=LocalityBias(np.ones(20, bool), 2)),
        Neighbor([3], locality=LocalityBias(np.ones(20, bool), 2), replace=True),
    ],
    ids=str,
)
def test_a_source_out_of_range_is_a_format_error(device: Device, sampler: LayeredSampler) -> None:
    bad = spoiled(make_graph([4] * 20), indices=dict.fromkeys(range(40, 44), 20))
    messages = []
    with PinnedGraph(bad, device) as pinned:
        for graph in (bad, pinned):
            with pytest.raises(FormatError, match=r"indices\[4.\] is outside 0 to 19") as caught:
                sampler.sample(graph, torch.arange(20), seed=0)  # type: ignore[arg-type]
            messages.append(str(caught.value))
    assert messages[0] == messages[1]


# --- start(): a minibatch is enqueued now and waited for later ---


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "fanouts"),
    [
        ("neighbor", [5, 4, 3]),
        ("neighbor", [-1, 40]),
        ("dependent for an epoch", [4, 4]),
        ("weights", [4, 4]),
        ("labor of fixed count", [3, 5]),
    ],
)
def test_minibatches_may_be_finished_in_any_order(device: Device, kind: str, fanouts: list[int]) -> None:
    draws = make(kind, fanouts)
    seeds = torch.from_numpy(np.random.default_rng(2).permutation(NODES)).split(60)
    with PinnedGraph(GRAPH, device, topology_on="host") as pinned:
        for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
            started = [draws.start(pinned, seeds[step], seed=4, step=step) for step in range(4)]
            beside = draws.sample(pinned, seeds[4], seed=4, step=4)
            found = {step: started[step]() for step in order}
            for step, minibatch in [*found.items(), (4, beside)]:
                assert_same(minibatch, draws.sample(GRAPH, seeds[step], seed=4, step=step))


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(2))
def test_minibatches_are_right_on_streams_that_run_out_of_step(seed: int) -> None:
    device, graphs = LateDevice(seed), citations()
    topology = Topology([PinnedGraph(graph, device, topology_on="host") for graph in graphs])
    on_host, draws = Topology(graphs), Neighbor([4, 3])
    streams = [device.new_stream(), device.new_stream()]
    seeds = {"paper": torch.arange(0, 400, 7), "author": torch.arange(20)}
    left: list[Any] = []
    for step in range(8):
        with device.use(streams[step // 3 % 2]):
            left.append(draws.start(topology, seeds, step=step, seed=0))
        if step % 2:
            with device.use(streams[0]):  # also of minibatches that were started on the other one
                streams[1].slow = True
                made = [finish() for finish in left]
                streams[1].slow = False
                for stream in streams:
                    stream.synchronize()
            for minibatch in made:
                assert_same(minibatch, draws.sample(on_host, seeds, step=minibatch.step, seed=0))
            left.clear()
    for pinned in topology.pinned:
        pinned.close()
    device.close()


def test_starting_does_not_wait_but_settles_the_minibatch_before() -> None:
    device, draws = Waits(), Neighbor([5, 4, 3])
    with PinnedGraph(GRAPH, device, topology_on="host") as pinned:
        first = draws.start(pinned, torch.arange(30), step=0, seed=0)
        assert device.said == [("copy", 0)]
        second = draws.start(pinned, torch.arange(30), step=1, seed=0)
        assert device.said == [("copy", 0), ("wait", 0), ("copy", 1)]
        second()
        first()
        assert device.said[3:] == [("wait", 1)]
        dropped = draws.start(pinned, torch.arange(30), step=2, seed=0)
        del dropped
        draws.start(pinned, torch.arange(30), step=3, seed=0)
        assert device.said[4:] == [("copy", 2), ("copy", 3)], "nobody needs the dropped one"


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


@pytest.mark.parametrize("n", [0, 1, 255, 2048, 2049, 40_001])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_running_sums_equal_those_of_torch(device: Device, n: int, dtype: torch.dtype) -> None:
    """In one block, and in several."""
    sampler, values = DeviceSampler(device), torch.randint(0, 4, (n + 1,), dtype=dtype)
    stream = sampler.stream = device.new_stream()
    with device.use(stream):
        here = values.to(device.torch_device).clone()
        total, base = (torch.full((1,), fill, device=device.torch_device) for fill in (0, 100))
        with device.batch(stream):
            sampler.scan(here, total, base=base, skip=1)
    stream.synchronize()
    expected = values[1:].cumsum(0, dtype=dtype)
    assert here.tolist() == [0, *expected.tolist()]
    assert total.item() == 100 + int(values[1:].sum())


# --- disjoint, temporal, bidirectional ---


PLACES = 150


def options_of(rng: np.random.Generator, edges: int) -> dict[str, dict[str, Any]]:
    weights = rng.random(edges) * (rng.random(edges) < 0.8)
    return {
        "uniform": {},
        "replaced": {"replace": True},
        "weights": {"weights": weights},
        "weights, replaced": {"weights": weights, "replace": True},
        "locality": {"locality": LocalityBias(rng.random(PLACES) < 0.4, 3)},
        "gradual": {"batch_dependency": 4},
        "nested": {"batch_dependency": 4, "nested": True},
        "bidirectional": {"subgraph": "bidirectional"},
    }


@pytest.mark.few(3)
@pytest.mark.parametrize("by", [None, "edges", "nodes"])
@pytest.mark.parametrize("topology_on", ["host", "device"])
def test_trees_of_a_device_equal_those_of_the_cpu(device: Device, by: Any, topology_on: str) -> None:
    rng = np.random.default_rng(3)
    dtype = np.int32 if topology_on == "host" else np.int64
    graph = make_graph(mixed_degrees(PLACES), dtype=np.int64)
    graph = graph if by is None else with_times(graph, by, rng, dtype=dtype)
    seeds, times = torch.from_numpy(rng.integers(0, PLACES, 20)), torch.from_numpy(rng.integers(-5, 60, 20))
    given = TimedSeeds(seeds, times) if by else seeds
    with PinnedGraph(graph, device, topology_on=topology_on) as pinned:
        for kind, options in options_of(rng, graph.num_edges).items():
            for strategy in ("uniform", "last") if by else ("uniform",):
                for fanouts in ([2, 3], [-1, 2], [40]):
                    sampler = Neighbor(fanouts, disjoint=True, temporal=by, strategy=strategy, **options)  # type: ignore[arg-type]
                    print(kind, strategy, fanouts)
                    found = sampler.sample(pinned, given, seed=5, step=3)
                    assert_same(found, sampler.sample(graph, given, seed=5, step=3))
                    assert found.batch.device == device.torch_device  # type: ignore[union-attr]
        none = sampler.sample(pinned, TimedSeeds(seeds[:0], times[:0]) if by else seeds[:0], seed=0)
        assert none.input_nodes.tolist() == none.batch.tolist() == []  # type: ignore[union-attr]


def test_relations_with_times_are_sampled_as_on_the_cpu(device: Device) -> None:
    """One relation has no times; some are left out of a layer."""
    rng = np.random.default_rng(4)
    for by in ("edges", "nodes"):
        graphs = [g if r == 1 else with_times(g, by, rng) for r, g in enumerate(citations(np.int64))]
        fanouts = [
            {g.relation: n for g, n in zip(graphs, numbers, strict=True)}
            for numbers in ((3, 0, -1, 1), (2, 4, 3, 1))
        ]
        ids = {"paper": torch.arange(5, 20), "author": torch.arange(9)}
        times = {t: torch.from_numpy(rng.integers(0, 50, len(of))) for t, of in ids.items()}
        pinned = [PinnedGraph(g, device) for g in graphs]
        for strategy in ("uniform", "last"):
            sampler = Neighbor(fanouts, temporal=by, strategy=strategy)  # type: ignore[arg-type]
            assert_same(
                *(sampler.sample(g, TimedSeeds(ids, times), step=2, seed=0) for g in (pinned, graphs))
            )
        for graph in pinned:
            graph.close()


def test_trees_continue_on_a_device(device: Device) -> None:
    rng = np.random.default_rng(5)
    graph = with_times(make_graph(mixed_degrees(PLACES)), "edges", rng)
    seeds = some_seeds(rng, PLACES, 20)
    sampler = Neighbor([3, 4], temporal="edges")
    with PinnedGraph(graph, device) as pinned:
        found = []
        for topology in (Topology(pinned), Topology(graph)):
            trees = sampler.trees(topology, seeds)
            first = Neighbor([4], temporal="edges").sample(topology, trees.seeds, seed=1)
            kept = replace(trees.seeds, ids=first.input_nodes, batch=first.batch)
            found.append(Neighbor([3], temporal="edges").sample(topology, kept, seed=1))
        assert_same(*found)
        started = [sampler.start(pinned, seeds, step=step, seed=0) for step in range(3)]
        for step, finish in enumerate(started):  # the next one is started before this one is finished
            assert_same(finish(), sampler.sample(graph, seeds, step=step, seed=0))


def test_times_go_to_the_device_before_kernels_are_held() -> None:
    """Memory that a held kernel still uses may be theirs."""
    rng, device = np.random.default_rng(5), LateDevice(0)
    graph = with_times(make_graph(mixed_degrees(PLACES)), "edges", rng)
    seeds, sampler = some_seeds(rng, PLACES, 20), Neighbor([3, 4], temporal="edges")
    with PinnedGraph(graph, device, topology_on="device") as pinned:
        with device.use(device.new_stream()):
            assert_same(sampler.sample(pinned, seeds, seed=0), sampler.sample(graph, seeds, seed=0))
    device.close()


def test_faults_and_limits_are_errors(device: Device) -> None:
    rng = np.random.default_rng(6)
    graph = with_times(make_graph([4] * 20), "nodes", rng)
    sampler = Neighbor([3], temporal="nodes")
    unsorted = replace(graph, src_times=np.arange(20)[::-1].copy(), sorted_by=None)
    broken = replace(graph, indices=np.where(np.arange(80) == 41, 20, graph.indices))
    with (
        PinnedGraph(graph, device) as pinned,
        PinnedGraph(broken, device) as bad,
        PinnedGraph(unsorted, device) as mixed,
    ):
        for wrong in (-1, 20):
            for on in (graph, pinned):
                with pytest.raises(
                    IndexError, match=f"seed {wrong} is not a '_N' node: ids run from 0 to 19"
                ):
                    sampler.sample(on, TimedSeeds(torch.tensor([3, wrong]), torch.tensor([9, 9])), seed=0)
        for on in (broken, bad):
            with pytest.raises(FormatError, match=r"indices\[41\] is outside 0 to 19"):
                Neighbor([-1], temporal="nodes").sample(
                    on,
                    TimedSeeds(torch.arange(20), torch.full((20,), 99)),
                    seed=0,
                )
        ids = torch.arange(3)
        induced, importance = Neighbor([3], subgraph="induced"), Labor([3], importance_sampling=1)
        assert_refused(
            (
                ValueError,
                r"subgraph='induced'\) samples on the CPU",
                lambda: induced.sample(pinned, ids, seed=0),
            ),
            (ValueError, "on the CPU only, .*not pinned", lambda: importance.sample(pinned, ids, seed=0)),
            (
                ValueError,
                "not sorted by the times",
                lambda: sampler.sample(mixed, TimedSeeds(ids, ids), seed=0),
            ),
            (ValueError, r"call sample\(\)", lambda: sampler.start(graph, ids, seed=0)),
        )


def test_loaders_on_a_device_have_the_minibatches_of_the_cpu(
    device: Device, cuda_is: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(7)
    src, dst = rng.integers(0, PLACES, (2, 1500))
    with DatasetWriter(tmp_path / "m.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.randn(PLACES, 8))
        edges = edge_list(src, dst, num_src=PLACES, num_dst=PLACES)
        writer.write_edges(("_N", "_E", "_N"), edges, times=rng.integers(0, 99, 1500))
    cuda_is(device)
    runs = []
    for name in ("cpu", "cuda"):
        device_memory = "32MB" if name == "cuda" else None
        with (
            gids.open(
                tmp_path / "m.gids",
                memory="32MB",
                device_memory=device_memory,
                tuning=gids.Tuning(staging="4MB"),
            ) as source,
            gids.EdgeLoader(
                source, None, [3, 3], batch_size=300, strategy="last", device=name, seed=0
            ) as loader,
        ):
            runs.append(list(loader))
            feat = source.store.table("feat")
            where = device.torch_device if name == "cuda" else torch.device("cpu")
            for minibatch in runs[-1]:
                assert {tensor.device for tensor in minibatch.tensors()} == {where}
                nodes = minibatch.input_nodes
                assert torch.equal(minibatch.features["_N.feat"].cpu(), feat.read_rows(nodes.tolist()))
    assert len(runs[0]) == 5
    for on_host, on_device in zip(*runs, strict=True):
        assert_same(on_device, on_host)
