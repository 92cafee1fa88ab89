"""Temporal and bidirectional sampling beyond the model: late edges, reverses, trees that go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from every_sampler import assert_same, assert_same_tensors
from sampling_model import citations, make_graph, mixed_degrees, times_of_edges, with_times

from gids.cuda import Device
from gids.sampler import LocalityBias, Neighbor, TimedSeeds, Topology, sort_by_time
from gids.sampler.device import PinnedGraph
from gids.store import Graph


@pytest.mark.parametrize("by", ["edges", "nodes"])
@pytest.mark.parametrize(
    "options",
    [
        {"replace": True},
        {"weights": True, "strategy": "last"},
        {"weights": True, "replace": True},
        {"locality": True, "batch_dependency": 4},
    ],
    ids=str,
)
def test_later_edges_are_as_if_they_did_not_exist(by: str, options: dict[str, Any]) -> None:
    rng, nodes, latest = np.random.default_rng(5), 120, 20
    graph = with_times(make_graph(mixed_degrees(nodes)))
    kept = times_of_edges(graph, by) <= latest
    before = np.concatenate([[0], np.cumsum(kept)])
    edge_times = graph.edge_times[kept]
    cut = replace(graph, indptr=before[graph.indptr], indices=graph.indices[kept], edge_times=edge_times)
    weights = rng.random(graph.num_edges) * (rng.random(graph.num_edges) > 0.2)
    mask = rng.random(nodes) < 0.5
    given = TimedSeeds(torch.from_numpy(rng.permutation(nodes)[:40]), torch.full((40,), latest))

    def draw(of: Graph, of_edges: np.ndarray) -> Any:
        chosen: dict[str, Any] = options | {"temporal": by}
        chosen |= {"weights": of_edges} if "weights" in options else {}
        chosen |= {"locality": LocalityBias(mask, 3.0)} if "locality" in options else {}
        return Neighbor([3, 4], **chosen).sample(of, given, step=6, seed=0)

    positions = torch.from_numpy(np.flatnonzero(kept))
    for one, other in zip(draw(graph, weights).blocks, draw(cut, weights[kept]).blocks, strict=True):
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.positions, positions[other.positions])
        assert (one.weights is None) == (other.weights is None)
        assert one.weights is None or torch.equal(one.weights, other.weights)


def reverses(graphs: list[Graph]) -> list[Graph]:
    """The graphs, and rev_NAME of those between two types."""
    found = list(graphs)
    for graph in graphs:
        src, name, dst = graph.relation
        if src != dst:
            ends = np.repeat(np.arange(graph.num_dst), np.diff(graph.indptr))
            order = np.argsort(graph.indices, kind="stable")
            indptr = np.concatenate([[0], np.bincount(graph.indices, minlength=graph.num_src).cumsum()])
            relation = (dst, f"rev_{name}", src)
            found.append(Graph(relation, graph.num_dst, graph.num_src, indptr, ends[order], order))
    return found


@pytest.mark.parametrize("disjoint", [False, True])
def test_bidirectional_subgraphs_have_every_sampled_edge_and_its_reverse_once(disjoint: bool) -> None:
    graphs = reverses([g for g in citations() if g.relation[1] != "written by"])
    seeds = {"paper": torch.arange(0, 100, 6), "author": torch.arange(20)}
    plain: Any = Neighbor([2, 3], disjoint=disjoint).sample(graphs, seeds, seed=3)
    both: Any = Neighbor([2, 3], disjoint=disjoint, subgraph="bidirectional").sample(graphs, seeds, seed=3)
    [layer] = both.blocks
    for graph in graphs:
        src, name, dst = graph.relation
        other = graph.relation if src == dst else (dst, f"rev_{name}", src)
        if name.startswith("rev_"):
            other = (dst, name.removeprefix("rev_"), src)
        sampled: dict[tuple[int, int], int] = {}
        for relation, backwards in ((graph.relation, False), (other, True)):
            for blocks in reversed(plain.blocks):
                block = blocks[relation]
                ends = torch.stack(block.coo()).T.tolist()
                for (a, b), edge in zip(ends, block.edge_ids.tolist(), strict=True):
                    sampled.setdefault((b, a) if backwards else (a, b), edge)
        block = layer[graph.relation]
        found = [(a, b) for a, b in torch.stack(block.coo()).T.tolist()]
        assert found == sorted(sampled, key=lambda edge: (edge[1], edge[0]))
        assert block.edge_ids.tolist() == [sampled[edge] for edge in found]
        assert block.num_dst == len(both.input_nodes[dst])
        assert block.num_src == len(both.input_nodes[src])


def test_trees_continue_layer_by_layer(device: Device) -> None:
    graph = with_times(make_graph(mixed_degrees(200)))
    seeds = TimedSeeds(torch.arange(0, 200, 10), torch.arange(20) * 3)
    sampler, last = Neighbor([3, 4], temporal="edges"), Neighbor([4], temporal="edges")
    whole = sampler.sample(graph, seeds, seed=1)
    with PinnedGraph(graph, device) as pinned:
        found: list[Any] = []
        for topology in (Topology(graph), Topology(pinned)):
            trees = sampler.trees(topology, seeds)
            first: Any = last.sample(topology, trees.seeds, seed=1)
            assert torch.equal(first.blocks[0].positions.cpu(), whole.blocks[1].positions)
            kept = replace(trees.seeds, ids=first.input_nodes, batch=first.batch)
            found.append(last.sample(topology, kept, seed=1))
            assert found[-1].batch[: len(first.batch)].tolist() == first.batch.tolist()
            again: Any = sampler.sample(topology, trees.seeds, seed=1)
            assert torch.equal(again.input_nodes.cpu(), whole.input_nodes)
        assert_same(*found)


def test_seeds_without_times_have_the_times_of_their_nodes() -> None:
    graph, sampler = with_times(make_graph(mixed_degrees(100))), Neighbor([3, 3], temporal="nodes")
    own = sampler.sample(graph, torch.arange(30), seed=0)
    given = TimedSeeds(torch.arange(30), torch.from_numpy(graph.src_times[:30]))
    assert_same(own, sampler.sample(graph, given, seed=0))


@pytest.mark.parametrize("by", ["edges", "nodes"])
def test_a_graph_is_sorted_by_time_in_memory(device: Device, by: Any) -> None:
    rng, plain = np.random.default_rng(12), make_graph(mixed_degrees(100))
    seeds = TimedSeeds(torch.arange(50), torch.from_numpy(rng.integers(0, 50, 50)))
    name, count = {"edges": ("edge_times", plain.num_edges), "nodes": ("src_times", 100)}[by]
    graph = replace(plain, **{name: rng.integers(0, 50, count)})
    sampler = Neighbor([3], temporal=by)
    with PinnedGraph(graph, device) as pinned:
        for given in (graph, pinned):
            with pytest.raises(ValueError, match=rf"not sorted by the times of {by} \(at .*sort_by_time"):
                sampler.sample(given, seeds)
    ordered = sort_by_time(graph, by)
    assert np.array_equal(graph.indices[ordered.edge_ids], ordered.indices)
    times = times_of_edges(ordered, by)
    for v in range(100):
        part = slice(graph.indptr[v], graph.indptr[v + 1])
        assert sorted(ordered.edge_ids[part]) == list(range(part.start, part.stop))
        assert (np.diff(times[part]) >= 0).all()
    unmarked = replace(ordered, sorted_by=None)  # checked, and found in order
    assert_same_tensors(*(sampler.sample(g, seeds, seed=0) for g in (ordered, unmarked)))
    assert sort_by_time(unmarked, by).indices is ordered.indices, "nothing is copied"
