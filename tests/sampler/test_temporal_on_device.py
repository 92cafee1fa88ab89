"""Disjoint, temporal and bidirectional minibatches of a device equal those of the CPU, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from every_sampler import assert_same
from sampling_graphs import citations, mixed_degrees
from temporal_model import some_seeds, with_times

import gids
from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import LocalityBias, Neighbor, TimedSeeds, Topology
from gids.sampler.device import PinnedGraph
from gids.store import Graph
from gids.write import DatasetWriter, edge_list

NODES = 150


def options_of(rng: np.random.Generator, edges: int) -> dict[str, dict[str, Any]]:
    weights = rng.random(edges) * (rng.random(edges) < 0.8)
    return {
        "uniform": {},
        "replaced": {"replace": True},
        "weights": {"weights": weights},
        "weights, replaced": {"weights": weights, "replace": True},
        "locality": {"locality": LocalityBias(rng.random(NODES) < 0.4, 3)},
        "gradual": {"batch_dependency": 4},
        "nested": {"batch_dependency": 4, "nested": True},
        "bidirectional": {"subgraph": "bidirectional"},
    }


@pytest.mark.few(3)
@pytest.mark.parametrize("by", [None, "edges", "nodes"])
@pytest.mark.parametrize("topology_on", ["host", "device"])
def test_minibatches_of_a_device_equal_those_of_the_cpu(device: Device, by: Any, topology_on: str) -> None:
    rng = np.random.default_rng(3)
    dtype = np.int32 if topology_on == "host" else np.int64
    graph = make_graph(mixed_degrees(NODES), dtype=np.int64)
    graph = graph if by is None else with_times(graph, by, rng, dtype=dtype)
    seeds, times = torch.from_numpy(rng.integers(0, NODES, 20)), torch.from_numpy(rng.integers(-5, 60, 20))
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
        none = sampler.sample(pinned, TimedSeeds(seeds[:0], times[:0]) if by else seeds[:0])
        assert none.input_nodes.tolist() == none.batch.tolist() == []  # type: ignore[union-attr]


def test_relations_are_sampled_as_on_the_cpu(device: Device) -> None:
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
            assert_same(*(sampler.sample(g, TimedSeeds(ids, times), step=2) for g in (pinned, graphs)))
        for graph in pinned:
            graph.close()


def test_trees_continue_on_a_device(device: Device) -> None:
    rng = np.random.default_rng(5)
    graph = with_times(make_graph(mixed_degrees(NODES)), "edges", rng)
    seeds = some_seeds(rng, NODES, 20)
    sampler = Neighbor([3, 4], temporal="edges")
    with PinnedGraph(graph, device) as pinned:
        found = []
        for topology in (Topology(pinned), Topology(graph)):
            trees = sampler.trees(topology, seeds)
            first = sampler.sample_layer(topology, trees.seeds, 0, seed=1)
            kept = replace(trees.seeds, ids=first.input_nodes, batch=first.batch)
            found.append(sampler.sample_layer(topology, kept, 1, seed=1))
        assert_same(*found)
        started = [sampler.start(pinned, seeds, step=step) for step in range(3)]
        for step, finish in enumerate(started):  # the next one is started before this one is finished
            assert_same(finish(), sampler.sample(graph, seeds, step=step))


def test_faults_and_limits_are_errors(device: Device) -> None:
    rng = np.random.default_rng(6)
    graph = with_times(make_graph([4] * 20), "nodes", rng)
    sampler = Neighbor([3], temporal="nodes")
    broken = replace(graph, indices=np.where(np.arange(80) == 41, 20, graph.indices))
    with PinnedGraph(graph, device) as pinned, PinnedGraph(broken, device) as bad:
        for wrong in (-1, 20):
            for on in (graph, pinned):
                with pytest.raises(
                    IndexError, match=f"seed {wrong} is not a '_N' node: ids run from 0 to 19"
                ):
                    sampler.sample(on, TimedSeeds(torch.tensor([3, wrong]), torch.tensor([9, 9])))
        for on in (broken, bad):
            with pytest.raises(FormatError, match=r"indices\[41\] is outside 0 to 19"):
                Neighbor([-1], temporal="nodes").sample(
                    on, TimedSeeds(torch.arange(20), torch.full((20,), 99))
                )
        with pytest.raises(ValueError, match=r"subgraph='induced'\) samples on the CPU only"):
            Neighbor([3], subgraph="induced").sample(pinned, torch.arange(3))


def test_loaders_on_a_device_have_the_minibatches_of_the_cpu(
    device: Device, cuda_is: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(7)
    src, dst = rng.integers(0, NODES, (2, 1500))
    with DatasetWriter(tmp_path / "m.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.randn(NODES, 8))
        edges = edge_list(src, dst, num_src=NODES, num_dst=NODES)
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
            gids.EdgeLoader(source, None, [3, 3], batch_size=300, strategy="last", device=name) as loader,
        ):
            runs.append(list(loader))
            feat = source.store.table("feat")
            for minibatch in runs[-1]:
                nodes = minibatch.input_nodes
                assert isinstance(nodes, torch.Tensor)
                assert torch.equal(minibatch.features["_N.feat"].cpu(), feat.read_rows(nodes.tolist()))
    assert len(runs[0]) == 5
    for on_host, on_device in zip(*runs, strict=True):
        assert_same(on_device, on_host)


def test_an_unsorted_graph_of_a_device_is_refused(device: Device) -> None:
    graph = Graph(("a", "to", "a"), 2, 2, np.array([0, 2, 2]), np.array([0, 1]), None, np.array([5, 1]))
    with (
        PinnedGraph(graph, device) as pinned,
        pytest.raises(ValueError, match="not sorted by the times of edges"),
    ):
        Neighbor([1], temporal="edges").sample(pinned, TimedSeeds(torch.tensor([0]), torch.tensor([9])))
