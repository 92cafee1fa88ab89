"""Dependent minibatches: numbers are uniform in each one and change slowly. Seeds are fixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from every_sampler import assert_same_tensors
from scipy import stats

from gids import _core
from gids.sampler import Labor, Neighbor, Sampler
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
def test_steps_may_be_sampled_in_any_order(kind: str) -> None:
    graph, seeds = dense(500, 30), torch.arange(60)
    sampler = make(kind, 4)
    in_turn = [sampler.sample(graph, seeds, step=step) for step in range(10)]
    for step in (9, 3, 6, 0):
        assert_same_tensors(make(kind, 4, threads=2).sample(graph, seeds, step=step), in_turn[step])


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


@pytest.mark.parametrize("kind", ["neighbor", "labor"])
def test_an_lru_cache_misses_less_as_kappa_grows(kind: str) -> None:
    graph = dense(20_000, 100)
    seeds = fresh_seeds(graph, 64, 60)
    plain: Any = {"neighbor": Neighbor, "labor": Labor}[kind]
    samplers = [plain([5, 10], batch_dependency=kappa, threads=1) for kappa in (1, 16, 256)]
    rates = [lru_miss_rate(sampler, graph, seeds, lines=5000) for sampler in samplers]
    print(rates)
    assert (np.diff(rates) < 0).all()
    assert rates[-1] < 0.95 * rates[0]


def test_labor_on_a_dense_graph_misses_a_fraction_with_large_kappas() -> None:
    """The claim of "Cooperative Minibatching" (there 64 % to 16 % on Reddit, of degree 490): degree 300,
    fanout 10, a cache of one and a half minibatches; the seeds are an epoch's, never the same.
    """
    graph = dense(20_000, 300)
    seeds = fresh_seeds(graph, 16, 60)
    samplers = [Labor([10, 10, 10], batch_dependency=kappa, threads=1) for kappa in (1, 4, 16, 64, 256)]
    lines = 3 * len(samplers[0].sample(graph, seeds[0]).input_nodes) // 2
    rates = [lru_miss_rate(sampler, graph, seeds, lines=lines) for sampler in samplers]
    print(rates)
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
    print(rates)
    assert rates["fresh", 64] > 0.9 * rates["fresh", 1]
    assert rates["same", 64] < 0.1 * rates["same", 1]
