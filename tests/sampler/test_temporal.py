"""Disjoint, temporal, bidirectional and induced sampling equal their models, with any number of threads."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from every_sampler import assert_refused, assert_same, assert_same_tensors
from sampling_model import citations, mixed_degrees
from temporal_model import candidates, sample_trees, some_seeds, time_at, with_times

from gids.sampler import (
    Block,
    Labor,
    LocalityBias,
    Minibatch,
    Neighbor,
    TimedSeeds,
    sort_by_time,
)
from gids.store import Graph

NUMBERS = (7, 2, 5)
NUMBERED = dict(zip(("seed", "epoch", "step"), NUMBERS, strict=True))
KINDS = [(None, "uniform"), ("edges", "uniform"), ("edges", "last"), ("nodes", "uniform"), ("nodes", "last")]


def layers_of(minibatch: Minibatch) -> list[list[Block]]:
    return [list(b.values()) if isinstance(b, dict) else [b] for b in reversed(minibatch.blocks)]


def timed(graphs: list[Graph], by: str | None, rng: np.random.Generator, dtype: type) -> list[Graph]:
    """The second relation has no times."""
    return [g if by is None or r == 1 else with_times(g, by, rng, dtype=dtype) for r, g in enumerate(graphs)]


def check(
    graphs: list[Graph],
    roots: dict[str, tuple[np.ndarray, np.ndarray]],
    fanouts: list[list[int]],
    by: Any,
    strategy: Any,
    threads: tuple[int, ...],
    subgraphs: tuple[str, ...] = ("directional", "induced"),
) -> None:
    """Sampled and induced minibatches equal the model. One graph is a homogeneous one.

    roots: nodes and times, by type. fanouts: by layer, the seeds' first, and relation.
    """
    ids, times = ({t: torch.from_numpy(both[i]) for t, both in roots.items()} for i in range(2))
    layers: list[Any] = [
        dict(zip((g.relation for g in graphs), layer, strict=True)) for layer in reversed(fanouts)
    ]
    given: Any = graphs
    if len(graphs) == 1:
        [given], [ids], [times] = graphs, ids.values(), times.values()
        layers = [layer[0] for layer in reversed(fanouts)]
    pairs = {
        t: list(zip(n.tolist(), (d if by else 0 * d).tolist(), strict=True)) for t, (n, d) in roots.items()
    }
    for subgraph in subgraphs:
        last, induced = strategy == "last", subgraph == "induced"
        model = sample_trees(graphs, pairs, fanouts, NUMBERS, by=by, last=last, induced=induced)
        for count in threads:
            options: Any = {"temporal": by, "strategy": strategy, "subgraph": subgraph, "threads": count}
            sampler = Neighbor(layers, disjoint=True, **options)
            minibatch = sampler.sample(given, TimedSeeds(ids, times) if by else ids, **NUMBERED)
            model.check(minibatch)
            assert (minibatch.times is not None) == (by is not None)
            if len(graphs) == 1:
                assert torch.equal(minibatch.seeds, ids)
                assert not by or torch.equal(minibatch.times, times)


@pytest.mark.few(3)
@pytest.mark.parametrize(("by", "strategy"), KINDS, ids=str)
def test_homogeneous_minibatches_equal_the_model(by: Any, strategy: Any) -> None:
    rng = np.random.default_rng(1)
    for fanouts, dtype in product([[3], [4, 2], [3, -1], [3, 2, 1], [60]], [np.int32, np.int64]):
        graphs = timed([make_graph(mixed_degrees(200), dtype=dtype)], by, rng, dtype)
        roots = {"_N": (rng.integers(0, 200, 30), rng.integers(-5, 60, 30))}  # some are repeated
        check(graphs, roots, [[f] for f in fanouts], by, strategy, (1, 2, 5))


@pytest.mark.parametrize(("by", "strategy"), KINDS, ids=str)
def test_heterogeneous_minibatches_equal_the_model(by: Any, strategy: Any) -> None:
    rng = np.random.default_rng(2)
    graphs = timed(citations(), by, rng, np.int64)
    roots = {t: (rng.integers(0, n, 9), rng.integers(0, 50, 9)) for t, n in (("author", 150), ("paper", 400))}
    check(graphs, roots, [[3, 2, 0, -1], [2, 4, 3, 1]], by, strategy, (1, 4))


def test_many_nodes_found_by_many_threads_at_once_equal_the_model() -> None:
    rng = np.random.default_rng(8)
    graph = with_times(make_graph(rng.integers(0, 60, 3000)), "edges", rng)
    roots = {"_N": (rng.integers(0, 3000, 400), rng.integers(0, 60, 400))}
    check([graph], roots, [[30], [4]], "edges", "uniform", (1, 4), ("directional",))


def test_minibatches_in_bulk_equal_those_made_alone() -> None:
    rng = np.random.default_rng(3)
    graph = with_times(make_graph(mixed_degrees(300)), "nodes", rng)
    given = [some_seeds(rng, 300, n) for n in (5, 40, 0, 17, 33, 8)]
    for subgraph in ("directional", "bidirectional", "induced"):
        one, many = (Neighbor([3, 4], temporal="nodes", subgraph=subgraph, threads=t) for t in (1, 3))  # type: ignore[arg-type]
        bulk = many.sample_bulk(graph, given, first_step=4, seed=0)
        for step, (seeds, made) in enumerate(zip(given, bulk, strict=True), 4):
            assert_same(made, one.sample(graph, seeds, step=step, seed=0))


def test_a_tree_does_not_depend_on_the_others_of_its_minibatch() -> None:
    rng = np.random.default_rng(4)
    graph = with_times(make_graph(mixed_degrees(300)), "edges", rng)
    seeds = some_seeds(rng, 300, 40)
    sampler = Neighbor([3, 4], temporal="edges", threads=1)
    together = sampler.sample(graph, seeds, seed=9)
    for tree in (0, 11, 39):
        own = slice(tree, tree + 1)
        alone = sampler.sample(graph, TimedSeeds(seeds.ids[own], seeds.times[own]), seed=9)  # type: ignore[index]
        assert alone.input_nodes.tolist() == together.input_nodes[together.batch == tree].tolist()  # type: ignore[index,union-attr]


OPTIONS: list[dict[str, Any]] = [
    {"replace": True},
    {"weights": True},
    {"weights": True, "replace": True},
    {"locality": True},
    {"batch_dependency": 4},
    {"batch_dependency": 4, "nested": True},
    {},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_later_edges_are_as_if_they_did_not_exist(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    nodes = 120
    for by, strategy in KINDS[1:]:
        graph = with_times(make_graph(mixed_degrees(nodes)), by, rng)  # type: ignore[arg-type]
        weights = rng.random(graph.num_edges) * (rng.random(graph.num_edges) > 0.2)
        locality = LocalityBias(rng.random(nodes) < 0.5, 3.0) if options.get("locality") else None
        others = {k: v for k, v in options.items() if k not in ("weights", "locality")}

        sampler = partial(Neighbor, [3, 4], temporal=by, strategy=strategy, locality=locality, **others)
        weigh = (lambda of: torch.from_numpy(of)) if options.get("weights") else (lambda of: None)
        latest = 20
        kept = np.array([time_at(graph, by, p) <= latest for p in range(graph.num_edges)])  # type: ignore[operator]
        before = np.concatenate([[0], np.cumsum(kept)])
        cut = replace(
            graph,
            indptr=before[graph.indptr],
            indices=graph.indices[kept],
            edge_times=None if graph.edge_times is None else graph.edge_times[kept],
        )
        seeds = torch.from_numpy(rng.permutation(nodes)[:40])
        given = TimedSeeds(seeds, torch.full((40,), latest))
        whole = sampler(weights=weigh(weights)).sample(graph, given, step=6, seed=0)
        less = sampler(weights=weigh(weights[kept])).sample(cut, given, step=6, seed=0)
        positions = torch.from_numpy(np.flatnonzero(kept))
        for one, other in zip(whole.blocks, less.blocks, strict=True):
            assert isinstance(one, Block)
            assert isinstance(other, Block)
            assert torch.equal(one.indices, other.indices)
            assert torch.equal(one.positions, positions[other.positions])
            assert (one.weights is None) == (other.weights is None)
            assert one.weights is None or torch.equal(one.weights, other.weights)  # type: ignore[arg-type]


def reverses(graphs: list[Graph]) -> list[Graph]:
    """The graphs, and rev_NAME of those between two types."""
    found = list(graphs)
    for graph in graphs:
        src, name, dst = graph.relation
        if src != dst:
            ends = np.repeat(np.arange(graph.num_dst), np.diff(graph.indptr))
            order = np.argsort(graph.indices, kind="stable")
            indptr = np.concatenate([[0], np.bincount(graph.indices, minlength=graph.num_src).cumsum()])
            found.append(
                Graph((dst, f"rev_{name}", src), graph.num_dst, graph.num_src, indptr, ends[order], order)
            )
    return found


def test_bidirectional_subgraphs_have_every_sampled_edge_and_its_reverse_once() -> None:
    graphs = reverses([g for g in citations() if g.relation[1] != "written by"])
    rng = np.random.default_rng(7)
    seeds = {t: torch.from_numpy(rng.permutation(100)[:20]) for t in ("paper", "author")}
    for disjoint in (False, True):
        plain = Neighbor([2, 3], disjoint=disjoint).sample(graphs, seeds, seed=3)
        both = Neighbor([2, 3], disjoint=disjoint, subgraph="bidirectional").sample(graphs, seeds, seed=3)
        [layer] = both.blocks
        assert isinstance(layer, dict)
        for graph in graphs:
            src, name, dst = graph.relation
            other = graph.relation if src == dst else (dst, f"rev_{name}", src)
            if name.startswith("rev_"):
                other = (dst, name.removeprefix("rev_"), src)
            sampled: dict[tuple[int, int], int] = {}
            for relation, backwards in ((graph.relation, False), (other, True)):
                for blocks in reversed(plain.blocks):
                    assert isinstance(blocks, dict)
                    block = blocks[relation]
                    ends = torch.stack(block.coo()).T.tolist()
                    for (a, b), edge in zip(ends, block.edge_ids.tolist(), strict=True):
                        sampled.setdefault((b, a) if backwards else (a, b), edge)
            block = layer[graph.relation]
            found = [(a, b) for a, b in torch.stack(block.coo()).T.tolist()]
            assert found == sorted(sampled, key=lambda edge: (edge[1], edge[0]))
            assert block.edge_ids.tolist() == [sampled[edge] for edge in found]
            assert block.num_dst == len(both.input_nodes[dst])  # type: ignore[index]
            assert block.num_src == len(both.input_nodes[src])  # type: ignore[index]


def test_induced_subgraphs_without_trees_have_all_edges_among_the_nodes() -> None:
    graphs = citations()
    sampler = Neighbor([2, 2], subgraph="induced", threads=3)
    seeds = {"paper": torch.tensor([5, 9, 5, 17])}  # one is repeated
    minibatch = sampler.sample(graphs, seeds, seed=0)
    assert minibatch.batch is None
    [layer] = minibatch.blocks
    assert isinstance(layer, dict)
    nodes = minibatch.input_nodes
    assert isinstance(nodes, dict)
    for graph in graphs:
        src, _, dst = graph.relation
        local = {}
        for at, node in enumerate(nodes[src].tolist()):
            local.setdefault(node, at)
        expected = [
            (position, local[int(graph.indices[position])], v)
            for v, node in enumerate(nodes[dst].tolist())
            for position in candidates(graph, node, None, 0)
            if int(graph.indices[position]) in local
        ]
        block = layer[graph.relation]
        sources, destinations = block.coo()
        assert (
            list(zip(block.positions.tolist(), sources.tolist(), destinations.tolist(), strict=True))
            == expected
        )


def test_trees_continue_layer_by_layer() -> None:
    rng = np.random.default_rng(9)
    graph = with_times(make_graph(mixed_degrees(200)), "edges", rng)
    seeds = some_seeds(rng, 200, 20)
    sampler, last = Neighbor([3, 4], temporal="edges"), Neighbor([4], temporal="edges")
    whole = sampler.sample(graph, seeds, seed=1)
    trees = sampler.trees(graph, seeds)
    first = last.sample(graph, trees.seeds, seed=1)
    assert torch.equal(first.blocks[0].positions, whole.blocks[1].positions)  # type: ignore[union-attr]
    kept = replace(trees.seeds, ids=first.input_nodes, batch=first.batch)
    second = last.sample(graph, kept, seed=1)
    assert second.batch is not None
    assert second.batch[: len(first.batch)].tolist() == first.batch.tolist()  # type: ignore[arg-type,index]
    assert torch.equal(sampler.sample(graph, trees.seeds, seed=1).input_nodes, whole.input_nodes)  # type: ignore[arg-type]


def test_seeds_without_times_have_the_times_of_their_nodes() -> None:
    rng = np.random.default_rng(10)
    graph = with_times(make_graph(mixed_degrees(100)), "nodes", rng)
    seeds = torch.arange(30)
    sampler = Neighbor([3, 3], temporal="nodes")
    own = sampler.sample(graph, seeds, seed=0)
    assert graph.src_times is not None
    given = sampler.sample(graph, TimedSeeds(seeds, torch.from_numpy(graph.src_times[:30])), seed=0)
    assert_same(own, given)
    with pytest.raises(IndexError, match=r"seed -1 is not a '_N' node: ids run from 0 to 99"):
        sampler.sample(graph, torch.tensor([3, -1]))


def test_a_graph_is_sorted_by_time_in_memory() -> None:
    rng = np.random.default_rng(12)
    plain = make_graph(mixed_degrees(100))
    seeds = TimedSeeds(torch.arange(50), torch.from_numpy(rng.integers(0, 50, 50)))
    for by, field, count in (("edges", "edge_times", plain.num_edges), ("nodes", "src_times", 100)):
        graph = replace(plain, **{field: rng.integers(0, 50, count)})  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=rf"not sorted by the times of {by} \(at position .*sort_by_time"
        ):
            Neighbor([3], temporal=by).sample(graph, seeds)  # type: ignore[arg-type]
        ordered = sort_by_time(graph, by)  # type: ignore[arg-type]
        assert ordered.edge_ids is not None
        assert np.array_equal(graph.indices[ordered.edge_ids], ordered.indices)
        for v in range(100):
            part = slice(graph.indptr[v], graph.indptr[v + 1])
            assert sorted(ordered.edge_ids[part]) == list(range(part.start, part.stop))
        times = [time_at(ordered, by, p) for p in range(plain.num_edges)]
        for v in range(100):
            mine = times[graph.indptr[v] : graph.indptr[v + 1]]
            assert mine == sorted(mine)  # type: ignore[type-var]
        unmarked = replace(ordered, sorted_by=None)  # checked, and found in order
        a, b = (Neighbor([3], temporal=by).sample(g, seeds, seed=0) for g in (ordered, unmarked))  # type: ignore[arg-type]
        assert_same_tensors(a, b)


def test_the_order_of_many_edges_is_checked_in_little_memory() -> None:
    nodes, degree = 1 << 20, 16
    times = np.tile(np.arange(degree, dtype=np.int32), nodes)
    graph = Graph(
        ("_N", "_E", "_N"),
        nodes,
        nodes,
        np.arange(nodes + 1) * degree,
        np.empty(nodes * degree, np.int32),
        None,
        edge_times=times,
    )
    tracemalloc.start()
    try:
        assert sort_by_time(graph, "edges").indices is graph.indices
        assert tracemalloc.get_traced_memory()[1] < nodes * degree / 2  # less than a byte for each edge
    finally:
        tracemalloc.stop()


def test_wrong_arguments_raise_errors_that_say_what_to_do() -> None:
    graph, ids = make_graph(mixed_degrees(50)), torch.arange(5)
    dated, seeds = with_times(graph, "edges", np.random.default_rng(0)), TimedSeeds(ids, ids)
    floats = replace(graph, edge_times=np.zeros(graph.num_edges))
    by_edges, trees = Neighbor([3], temporal="edges"), Neighbor([3], disjoint=True)
    both_ways: Any = Neighbor([3], subgraph="bidirectional")
    make: Any = partial(Neighbor, [3])
    assert_refused(
        (ValueError, "temporal='time' must be one of None, 'edges', 'nodes'", lambda: make(temporal="time")),
        (ValueError, "strategy='last' needs times", lambda: make(strategy="last")),
        (ValueError, "must be one of 'uniform', 'last'", lambda: make(temporal="edges", strategy="first")),
        (ValueError, "subgraph='both' must be one of", lambda: make(subgraph="both")),
        (ValueError, "no relation of the dataset has times of edges", lambda: by_edges.sample(graph, seeds)),
        (ValueError, "'_N' nodes have no times, so the seeds need", lambda: by_edges.sample(dated, ids)),
        (ValueError, "has 4 values for 5 '_N'", lambda: by_edges.sample(dated, TimedSeeds(ids, ids[:4]))),
        (TypeError, r"are torch\.int32", lambda: by_edges.sample(dated, TimedSeeds(ids, ids.int()))),
        (ValueError, "the sampler is not temporal", lambda: trees.sample(dated, seeds)),
        (TypeError, "makes no trees, so it takes no TimedSeeds", lambda: Labor([3]).sample(dated, seeds)),
        (IndexError, "seed 99 is not a '_N' node", lambda: trees.sample(graph, torch.tensor([99]))),
        (TypeError, r"int32 or int64\[\d+\] \(got float64", lambda: by_edges.sample(floats, seeds)),
        (ValueError, "--reverse-edges", lambda: both_ways.sample(citations()[1:2], {"paper": ids})),
    )
