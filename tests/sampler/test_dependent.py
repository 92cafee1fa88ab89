"""Dependent and nested minibatches: numbers change slowly, or belong to a large minibatch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from every_sampler import assert_same_tensors
from sampling_model import citations, mixed_degrees
from scipy import stats

from gids import _core
from gids.sampler import Labor, LocalityBias, Minibatch, Neighbor, Sampler
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
            make(kind, 1).sample(graph, seeds, step=step, seed=0),
            plain.sample(graph, seeds, step=step, seed=0),
        )
    endless = make(kind, math.inf)
    first = endless.sample(graph, seeds, epoch=2, seed=0)
    assert_same_tensors(first, endless.sample(graph, seeds, epoch=2, step=12345, seed=0))
    other = endless.sample(graph, seeds, epoch=3, seed=0)
    assert first.input_nodes.tolist() != other.input_nodes.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["neighbor", "labor"])
def test_the_larger_kappa_the_more_two_minibatches_share(kind: str) -> None:
    graph, seeds = dense(), torch.arange(100)
    shares = []
    for kappa in (1, 4, 16, 64, math.inf):
        one, other = (make(kind, kappa).sample(graph, seeds, step=s, seed=0).blocks[1] for s in (0, 1))
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
        one = plain(fanouts).sample(graph, seeds, step=3, seed=0)
        for kappa in (8, math.inf):
            assert_same_tensors(
                one, plain(fanouts, batch_dependency=kappa).sample(graph, seeds, step=3, seed=0)
            )


# --- nested ---


NODES, KAPPA, BATCH = 1200, 6, 25
KINDS: dict[str, Any] = {
    "neighbor": Neighbor,
    "with replacement": lambda fanouts, **o: Neighbor(fanouts, replace=True, **o),
    "locality": lambda fanouts, **o: Neighbor(
        fanouts, locality=LocalityBias(np.arange(NODES) % 3 == 0, 5, weights=True), **o
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
    first = edges_of(nested.sample(graph, seeds, epoch=2, seed=0))
    assert first == edges_of(nested.sample(graph, seeds, epoch=2, step=12345, seed=0))
    assert first == edges_of(Neighbor([3, 4]).sample(graph, seeds, epoch=2, seed=0))
    assert first != edges_of(nested.sample(graph, seeds, epoch=3, seed=0))


def test_impossible_nesting_is_refused() -> None:
    for make in (Neighbor, Labor):
        with pytest.raises(ValueError, match="nested=True needs batch_dependency"):
            make([3], nested=True)  # type: ignore[operator]
    for times in (1, -1):
        with pytest.raises(ValueError, match="use importance_sampling=0"):
            Labor([3], importance_sampling=times, batch_dependency=4, nested=True)
