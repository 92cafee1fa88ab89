"""Dependent and nested minibatches: numbers are uniform in each one and change slowly, or belong to a large
minibatch. Seeds are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from every_sampler import assert_same_tensors
from sampling_graphs import citations, mixed_degrees
from scipy import stats

from gids import _core
from gids.sampler import Block, Labor, LocalityBias, Minibatch, Neighbor, Sampler
from gids.sampler.minibatch import PerType
from gids.sampler.topology import Graphs
from gids.store import Graph

UNLIKELY = 1e-3  # one correct sampler in a thousand fails; these seeds do not


def variates(step: int, kappa: int, *, seed: int = 3, epoch: int = 1, nodes: int = 20_000) -> np.ndarray:
    """The numbers of nodes 0, 1, … in [0, 1)."""
    out = np.empty(nodes, np.uint64)
    _core.variates((seed, epoch, step), kappa, 0, 0, np.arange(nodes), out)
    return out / 2.0**64


def make(kind: str, kappa: float, **options: Any) -> Sampler:
    sampler: Any = {"neighbor": Neighbor, "labor": Labor}[kind]
    return sampler([5, 5], batch_dependency=kappa, **options)  # type: ignore[no-any-return]


def dense(nodes: int = 3000, degree: int = 60) -> Graph:
    return make_graph(np.full(nodes, degree), seed=8)


@pytest.mark.parametrize("kappa", [2, 8, 64])
def test_numbers_are_uniform_at_every_c(kappa: int) -> None:
    for step in range(0, kappa + 1, max(1, kappa // 8)):
        r = variates(5 * kappa + step, kappa)
        p = stats.chisquare(np.bincount((r * 100).astype(int), minlength=100)).pvalue
        assert p > UNLIKELY, (step, p)
        assert stats.kstest(r, "uniform").pvalue > UNLIKELY


@pytest.mark.parametrize("kappa", [2, 8, 64])
def test_numbers_change_gradually_from_one_group_to_the_next(kappa: int) -> None:
    """Numbers and their correlation equal the formula."""
    ends = [variates(group, 1) for group in (5, 6)]
    np.testing.assert_array_equal(variates(5 * kappa, kappa), ends[0])
    np.testing.assert_array_equal(variates(6 * kappa, kappa), ends[1])
    normal = [stats.norm.ppf(end) for end in ends]
    for i in range(1, kappa, max(1, kappa // 4)):
        angle = i / kappa * math.pi / 2
        n = math.cos(angle) * normal[0] + math.sin(angle) * normal[1]
        np.testing.assert_allclose(variates(5 * kappa + i, kappa), stats.norm.cdf(n), atol=1e-12)


def test_with_infinite_dependency_numbers_depend_only_on_the_epoch() -> None:
    np.testing.assert_array_equal(variates(0, 0), variates(1 << 40, 0))
    np.testing.assert_array_equal(variates(7, 0), variates(0, 1))
    assert abs(np.corrcoef(variates(7, 0), variates(7, 0, epoch=2))[0, 1]) < 0.03


@pytest.mark.parametrize("kind", ["neighbor", "labor"])
def test_dependency_one_is_independent_and_infinity_is_constant_in_an_epoch(kind: str) -> None:
    graph, seeds = dense(), torch.arange(100)
    plain: Any = {"neighbor": Neighbor, "labor": Labor}[kind]([5, 5])
    for step in (0, 9):
        assert_same_tensors(
            make(kind, 1).sample(graph, seeds, step=step), plain.sample(graph, seeds, step=step)
        )
    endless = make(kind, math.inf)
    first = endless.sample(graph, seeds, epoch=2)
    assert_same_tensors(first, endless.sample(graph, seeds, epoch=2, step=12345))
    other = endless.sample(graph, seeds, epoch=3)
    assert first.input_nodes.tolist() != other.input_nodes.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["neighbor", "labor"])
def test_the_larger_kappa_the_more_two_minibatches_share(kind: str) -> None:
    graph, seeds = dense(), torch.arange(100)
    shares = []
    for kappa in (1, 4, 16, 64, math.inf):
        one, other = (make(kind, kappa).sample(graph, seeds, step=s).blocks[1] for s in (0, 1))
        shared = np.intersect1d(one.positions, other.positions)  # type: ignore[union-attr]
        shares.append(len(shared) / one.num_edges)  # type: ignore[union-attr]
    print(shares)
    assert (np.diff(shares) > 0).all()
    assert shares[0] < 0.15
    assert shares[-1] == 1


@pytest.mark.parametrize("kind", ["neighbor", "labor"])
def test_full_neighborhoods_do_not_depend_on_kappa(kind: str) -> None:
    graph, seeds = dense(500, 30), torch.arange(20)
    plain: Any = {"neighbor": Neighbor, "labor": Labor}[kind]
    for fanouts in ([-1, -1], [30, 30]):
        one = plain(fanouts).sample(graph, seeds, step=3)
        for kappa in (8, math.inf):
            assert_same_tensors(one, plain(fanouts, batch_dependency=kappa).sample(graph, seeds, step=3))


# --- nested ---


NODES, KAPPA, BATCH = 1200, 6, 25
KINDS: dict[str, Any] = {
    "neighbor": Neighbor,
    "with replacement": lambda fanouts, **o: Neighbor(fanouts, replace=True, **o),
    "locality": lambda fanouts, **o: Neighbor(
        fanouts, locality=LocalityBias(np.arange(NODES) % 3 == 0, 5), **o
    ),
    "labor": Labor,
    "labor of fixed count": lambda fanouts, **o: Labor(fanouts, fixed_count=True, **o),
    "labor, one number in all layers": lambda fanouts, **o: Labor(fanouts, layer_dependency=True, **o),
}
Edges = set[tuple[int, str, int, int, float]]


def edges_of(minibatch: Minibatch) -> Edges:
    """(layer, relation, destination, position, weight) of every edge, by ids of the graph."""
    found: Edges = set()
    for layer, blocks in enumerate(minibatch.blocks):
        for block in blocks.values() if isinstance(blocks, dict) else [blocks]:
            assert isinstance(block, Block)
            nodes = minibatch.input_nodes
            ids = nodes[block.relation[2]] if isinstance(nodes, dict) else nodes
            weights = torch.ones(block.num_edges) if block.weights is None else block.weights
            ends = ids[block.coo()[1]].tolist()
            for end, position, weight in zip(ends, block.positions.tolist(), weights.tolist(), strict=True):
                found.add((layer, str(block.relation), end, position, weight))
    return found


def assert_nested(sampler: Any, graphs: Graphs, pieces: list[PerType], large: Minibatch) -> None:
    together: Edges = set()
    for i, piece in enumerate(pieces):
        together |= edges_of(sampler.sample(graphs, piece, seed=4, epoch=1, step=2 * KAPPA + i))
    whole = edges_of(large)
    assert together == whole
    assert len(whole) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_the_minibatches_of_a_group_are_parts_of_one_large_minibatch(kind: str) -> None:
    graph = make_graph(mixed_degrees(NODES))
    order = torch.from_numpy(np.random.default_rng(0).permutation(NODES)[: KAPPA * BATCH])
    fanouts = [3, -1, 4]
    # The large minibatch, by a sampler of independent ones: the third of the epoch.
    large = KINDS[kind](fanouts).sample(graph, order, seed=4, epoch=1, step=2)
    nested = KINDS[kind](fanouts, batch_dependency=KAPPA, nested=True)
    assert_nested(nested, graph, list(order.split(BATCH)), large)
    after = nested.sample(graph, order[:BATCH], seed=4, epoch=1, step=3 * KAPPA)
    before = nested.sample(graph, order[:BATCH], seed=4, epoch=1, step=3 * KAPPA - 1)
    assert edges_of(after) != edges_of(before)
    assert (after.step, before.step) == (3 * KAPPA, 3 * KAPPA - 1)


@pytest.mark.parametrize("make", [Neighbor, Labor])
def test_nesting_works_with_relations(make: Any) -> None:
    graphs = citations()
    papers, authors = torch.arange(0, 60), torch.arange(20, 50)
    pieces: list[PerType] = [{"paper": papers[i::3], "author": authors[i::3]} for i in range(3)]
    large = make([2, 4]).sample(graphs, {"paper": papers, "author": authors}, seed=4, epoch=1, step=2)
    nested = make([2, 4], batch_dependency=KAPPA, nested=True)
    assert_nested(nested, graphs, pieces, large)


def test_infinity_is_one_minibatch_of_the_whole_epoch() -> None:
    graph, seeds = make_graph(mixed_degrees(NODES)), torch.arange(40)
    nested = Neighbor([3, 4], batch_dependency=math.inf, nested=True)
    first = edges_of(nested.sample(graph, seeds, epoch=2))
    assert first == edges_of(nested.sample(graph, seeds, epoch=2, step=12345))
    assert first == edges_of(Neighbor([3, 4]).sample(graph, seeds, epoch=2))
    assert first != edges_of(nested.sample(graph, seeds, epoch=3))


def test_impossible_nesting_is_refused() -> None:
    for make in (Neighbor, Labor):
        with pytest.raises(ValueError, match="nested=True needs batch_dependency"):
            make([3], nested=True)  # type: ignore[operator]
    for times in (1, -1):
        with pytest.raises(ValueError, match="use importance_sampling=0"):
            Labor([3], importance_sampling=times, batch_dependency=4, nested=True)


def lru_miss_rate(
    sampler: Sampler, graph: Graph, seeds: Sequence[torch.Tensor], *, lines: int, warm: int = 10
) -> float:
    """Miss rate of an LRU cache with one page per node, after the first `warm` minibatches."""
    planner = _core.Planner(graph.num_src, lines, policy="lru")
    missed = nodes = 0
    for step, ids in enumerate(seeds):
        minibatch = sampler.sample(graph, ids, seed=2, step=step)
        planner.enter(step, minibatch.input_nodes.numpy())  # type: ignore[union-attr]
        hits, loads, bypasses = planner.plan(step)
        planner.retire(step)
        if step >= warm:
            missed, nodes = missed + loads + bypasses, nodes + hits + loads + bypasses
    return missed / nodes


def fresh_seeds(graph: Graph, size: int, steps: int) -> list[torch.Tensor]:
    """The seeds of one epoch, without repeats."""
    order = torch.from_numpy(np.random.default_rng(1).permutation(graph.num_dst))
    return list(order[: steps * size].split(size))


def test_labor_on_a_dense_graph_misses_a_fraction_with_large_kappas() -> None:
    """The claim of "Cooperative Minibatching" (there 64 % to 16 % on Reddit, of degree 490): degree 300,
    fanout 10, a cache of one and a half minibatches; the seeds are an epoch's, never the same.
    """
    graph = dense(20_000, 300)
    seeds = fresh_seeds(graph, 16, 60)
    samplers = [Labor([10, 10, 10], batch_dependency=kappa, threads=1) for kappa in (1, 4, 16, 64, 256)]
    lines = 3 * len(samplers[0].sample(graph, seeds[0]).input_nodes) // 2
    rates = [lru_miss_rate(sampler, graph, seeds, lines=lines) for sampler in samplers]
    assert (np.diff(rates) < 0).all()
    assert rates[0] > 0.6
    assert rates[-1] < rates[0] / 4


def test_neighbor_gains_if_destinations_repeat() -> None:
    """Numbers belong to a destination's edges, so draws of other seeds do not help."""
    graph = dense(20_000, 300)
    fresh = fresh_seeds(graph, 16, 60)
    rates = {}
    for name, seeds in (("fresh", fresh), ("same", fresh[:1] * len(fresh))):
        for kappa in (1, 64):
            sampler = Neighbor([10, 10], batch_dependency=kappa, threads=1)
            rates[name, kappa] = lru_miss_rate(sampler, graph, seeds, lines=2700)
    assert rates["fresh", 64] > 0.9 * rates["fresh", 1]
    assert rates["same", 64] < 0.1 * rates["same", 1]


@pytest.mark.parametrize("kind", ["neighbor", "labor-0", "labor-*"])
def test_larger_minibatches_need_fewer_nodes_per_seed(kind: str) -> None:
    """E|S| / |seeds| does not rise, E|S| is concave (theorems 3.1, 3.2 of "Cooperative Minibatching").

    Seeds are drawn anew for every minibatch, and the means of so few differ from the expectations: a
    rise counts only where it is beyond three standard errors.
    """
    sampler: Sampler = Neighbor([8, 8])
    if kind != "neighbor":
        sampler = Labor([8, 8], importance_sampling=0 if kind == "labor-0" else -1)
    graph, steps = dense(), 12
    seeds = np.array([8, 16, 32, 64, 128, 256, 512])
    rng = np.random.default_rng(5)
    sizes = np.empty((steps, len(seeds)))
    for i, n in enumerate(seeds):
        for step in range(steps):
            drawn = torch.from_numpy(rng.permutation(graph.num_dst)[:n])
            minibatch = sampler.sample(graph, drawn, seed=9, step=step)
            sizes[step, i] = len(minibatch.input_nodes)
    means, errors = sizes.mean(0), sizes.std(0, ddof=1) / np.sqrt(steps)
    per_seed, of_these = means / seeds, errors / seeds
    assert (np.diff(per_seed) < 3 * np.hypot(of_these[1:], of_these[:-1])).all()
    assert per_seed[-1] < 0.7 * per_seed[0]
    slopes = np.diff(means) / np.diff(seeds)
    of_slopes = np.hypot(errors[1:], errors[:-1]) / np.diff(seeds)
    assert (np.diff(slopes) < 3 * np.hypot(of_slopes[1:], of_slopes[:-1])).all()
    assert slopes[-1] < 0.5 * slopes[0]
