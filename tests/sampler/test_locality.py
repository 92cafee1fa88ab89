"""Neighbor with a LocalityBias: probabilities, estimates, pages saved, errors. Seeds are fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from every_sampler import assert_refused, assert_same
from sampling_model import citations, mixed_degrees
from scipy import stats

import gids
from gids.cuda import Device
from gids.distributed import Placement
from gids.heat import hottest_nodes
from gids.sampler import LocalityBias, Neighbor
from gids.store import FeatureStore, Graph
from gids.write import DatasetWriter

UNLIKELY = 1e-3  # one correct sampler in a thousand fails; these seeds do not
HELD = np.array([True, False, False, True, False])


@pytest.mark.parametrize("factor", [1.5, 4])
def test_pairs_have_the_probabilities_of_successive_weighted_draws(factor: float) -> None:
    nodes = 20_000
    graph = Graph(("a", "to", "b"), 5, nodes, np.arange(nodes + 1) * 5, np.tile(np.arange(5), nodes), None)
    sampler = Neighbor([2], locality=LocalityBias({"a": HELD}, factor))
    [block] = sampler.sample([graph], {"b": torch.arange(nodes)}, seed=3).blocks[0].values()  # type: ignore[union-attr]
    pairs, counts = np.unique(block.positions.numpy().reshape(-1, 2) % 5, axis=0, return_counts=True)
    weights = np.where(HELD, factor, 1.0)
    total, expected = weights.sum(), []
    for i, j in pairs:
        one = weights[i] / total * weights[j] / (total - weights[i])
        other = weights[j] / total * weights[i] / (total - weights[j])
        expected.append(nodes * (one + other))
    assert len(pairs) == 10
    assert stats.chisquare(counts, expected).pvalue > UNLIKELY


def test_a_factor_of_one_is_neighbor_without_it() -> None:
    graph, seeds = make_graph(mixed_degrees(500)), torch.arange(200)
    held = np.arange(500) % 2 == 0
    for options in ({}, {"replace": True}, {"batch_dependency": 4}):
        plain = Neighbor([3, 4], **options)  # type: ignore[arg-type]
        biased = Neighbor([3, 4], locality=LocalityBias(held, 1), **options)  # type: ignore[arg-type]
        assert_same(plain.sample(graph, seeds, step=2, seed=0), biased.sample(graph, seeds, step=2, seed=0))


def test_only_relations_from_a_masked_type_are_biased() -> None:
    graphs = citations()
    held = np.arange(150) < 40
    sampler = Neighbor([4], locality=LocalityBias({"author": held}, 5, weights=True))
    seeds = {"paper": torch.arange(100)}
    biased, plain = sampler.sample(graphs, seeds, seed=0), Neighbor([4]).sample(graphs, seeds, seed=0)
    for relation, block in biased.blocks[0].items():  # type: ignore[union-attr]
        other = plain.blocks[0][relation]  # type: ignore[index]
        assert (block.weights is None) == torch.equal(block.positions, other.positions)
        assert (block.weights is not None) == (relation[0] == "author")


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"batch_dependency": 4}], ids=repr)
def test_weights_do_not_change_what_is_drawn(options: Any) -> None:
    """By default, as published, relations with a mask have none, also if their edges have weights."""
    graphs, seeds, masks = citations(), {"paper": torch.arange(100)}, {"author": np.arange(150) < 40}
    of_edges = {g.relation: 1.0 + np.arange(g.num_edges) % 3 for g in graphs}
    for weights in (None, of_edges):
        published, weighed = (
            Neighbor([4], locality=LocalityBias(masks, 5, **given), weights=weights, **options)
            .sample(graphs, seeds, step=2, seed=0)
            .blocks[0]
            for given in ({}, {"weights": True})
        )
        for relation, block in published.items():  # type: ignore[union-attr]
            other = weighed[relation]  # type: ignore[index]
            assert torch.equal(block.indices, other.indices)
            assert torch.equal(block.positions, other.positions)
            assert (block.weights is None) == (relation[0] == "author" or weights is None)
            assert (other.weights is None) == (relation[0] != "author" and weights is None)


# --- masks by rank ---


def test_a_rank_draws_by_its_own_mask() -> None:
    graph, graphs, seeds = make_graph(mixed_degrees(500)), citations(), torch.arange(100)
    of_ranks = [np.arange(500) % 3 == rank for rank in range(3)]
    of_types = [{"author": np.arange(150) % 3 == rank} for rank in range(3)]
    for masks, of_one in ((of_ranks, graph), (of_types, graphs)):
        bias = LocalityBias(masks, 4)
        nodes = seeds if of_one is graph else {"paper": seeds}
        for options in ({}, {"replace": True}, {"batch_dependency": 4}):
            sampler = Neighbor([3, 4], locality=bias, **options)  # type: ignore[arg-type]
            for rank, mask in enumerate(masks):
                alone = Neighbor([3, 4], locality=LocalityBias(mask, 4), **options)  # type: ignore[arg-type]
                of_rank = sampler.of_rank(rank, 3)
                assert_same(
                    of_rank.sample(of_one, nodes, step=2, seed=0), alone.sample(of_one, nodes, step=2, seed=0)
                )
                assert repr(of_rank) == repr(sampler)  # so that ranks and checkpoints compare all masks
    assert repr(LocalityBias(of_ranks, 4)) != repr(LocalityBias(of_ranks[::-1], 4))
    with pytest.raises(ValueError, match=r"masks for 3 ranks: sample by a loader, or .*\.of_rank"):
        Neighbor([3], locality=LocalityBias(of_ranks, 4)).sample(graph, seeds, seed=0)


def test_a_placement_tells_which_rows_are_cheap_for_a_device() -> None:
    rows = [np.array([0, 1]), np.array([1, 2]), np.array([3]), np.array([4])]
    costs = np.array([[0, 1, 4, 6], [1, 0, 4, 4], [4, 4, 0, 1], [9, 4, 1, 0]])
    placed = Placement.of(rows, 6, peer_cost=costs, host_cost=8)
    for most_cost, expected in (
        (0, [[0, 1], [1, 2], [3], [4]]),
        (1, [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]),
        (4, [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4]]),
        (8, [[0, 1, 2, 3, 4, 5]] * 4),  # all that is left is in the host, which costs less than device 0
    ):
        assert [np.flatnonzero(mask).tolist() for mask in placed.within(most_cost)] == expected


def test_loaders_give_each_rank_its_mask(dataset: FeatureStore) -> None:
    masks = [torch.arange(NODES) % 2 == rank for rank in range(2)]

    def loader(nodes: object, rank: int, world_size: int = 2) -> gids.NodeLoader:
        sampler = Neighbor([3], locality=LocalityBias(nodes, 4))  # type: ignore[arg-type]
        options: dict[str, Any] = {"batch_size": 100, "shuffle": True, "tables": []}
        return gids.NodeLoader(
            dataset, torch.arange(400), sampler, rank=rank, world_size=world_size, **{"seed": 0} | options
        )

    states = []
    for rank in range(2):
        with loader(masks, rank) as by_rank, loader(masks[rank], rank) as alone:
            for minibatch, expected in zip(by_rank, alone, strict=True):
                assert_same(minibatch, expected)
            states.append(by_rank.state_dict())
    assert states[0] == states[1]
    with pytest.raises(ValueError, match="masks for 2 ranks, but this is rank 2 of 3"):
        loader(masks, 2, 3)


# --- what is held, and what it saves ---

NODES = 4000


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    path = tmp_path_factory.mktemp("locality") / "one.gids"
    graph = make_graph(np.full(NODES, 30), relation=("paper", "cites", "paper"))
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.arange(NODES * 256.0).reshape(NODES, 256))
        writer.write_table("edge", graph.relation, "w", torch.zeros(graph.num_edges, 1))
        writer.write_graph(graph.relation, graph.indptr, graph.indices, num_src=NODES)
    return FeatureStore(path)


def test_the_hottest_nodes_are_those_of_the_hottest_pages(dataset: FeatureStore) -> None:
    degrees = np.asarray(dataset.out_degrees("paper"), np.int64)
    pages = degrees.reshape(-1, 4).sum(1)  # four rows to a page
    held = hottest_nodes(dataset, "paper.feat", 50 * (4096 + 16)).numpy().reshape(-1, 4)
    assert (held.any(1) == held.all(1)).all()
    assert held.all(1).sum() == 50
    lightest = np.log2(pages[held.all(1)].min())
    assert lightest > np.log2(pages[~held.any(1)].max()) - 12 / 255  # a step of the scale
    assert hottest_nodes(dataset, "paper.feat", 1 << 40).all()
    assert not hottest_nodes(dataset, "paper.feat", 0).any()
    with pytest.raises(ValueError, match="is a table of edges"):
        hottest_nodes(dataset, "paper.cites.paper.w", 1)
    with pytest.raises(ValueError, match="cache_bytes=-1"):
        hottest_nodes(dataset, "paper.feat", -1)
    with pytest.raises(KeyError, match="gids heat"):
        hottest_nodes(dataset, "paper.feat", 1, method="sampled")


@pytest.mark.parametrize("device_name", ["cpu", "cuda"])
def test_a_loader_reports_the_rows_in_its_cache(
    dataset: FeatureStore, device_name: str, device: Device, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(device)
    source = gids.open(dataset, memory=512 << 20, device_memory=256 << 20, heat="none")
    with gids.FeatureLoader(source, ["paper.feat"], device=device_name) as loader:
        assert not loader.cached_rows("paper.feat").any()
        list(loader.attach([{"paper.feat": torch.tensor([5, 3999])}], lambda m: m))
        held = loader.cached_rows("paper.feat")
        assert held.nonzero().view(-1).tolist() == [4, 5, 6, 7, 3996, 3997, 3998, 3999]
        assert len(held) == NODES
        with pytest.raises(KeyError, match=r"it loads 'paper\.feat'"):
            loader.cached_rows("paper.x")
    with pytest.raises(ValueError, match="closed"):
        loader.cached_rows("paper.feat")


# --- what is refused ---


def test_bad_masks_and_factors() -> None:
    for factor in (0.5, 0, -1, float("nan"), float("inf"), True, "2"):
        with pytest.raises(ValueError, match=r"factor must be 1 \(no bias\) or more"):
            LocalityBias(HELD, factor)  # type: ignore[arg-type]
    for wrong in (HELD.astype(float), HELD.astype(np.uint8), HELD[:, None], torch.ones(5)):
        with pytest.raises(TypeError, match=r"must be bool\[num_nodes\]"):
            LocalityBias(wrong, 2)
    graph, seeds, papers = make_graph([3, 4, 0, 2, 9, 1]), torch.arange(2), {"paper": torch.arange(2)}
    floats, wide = HELD.astype(float), np.full(9, 1e38)

    def sample(mask: Any, factor: float, given: Any, nodes: Any) -> None:
        Neighbor([2], locality=LocalityBias(mask, factor)).sample(given, nodes, seed=0)

    make: Any = Neighbor
    assert_refused(
        (TypeError, r"mask of 'a' must be .*got float64", lambda: LocalityBias({"a": floats}, 2)),
        (ValueError, "nodes is an empty list", lambda: LocalityBias([], 2)),
        (ValueError, r"rank 1 must be of .*got 4, and 5", lambda: LocalityBias([HELD, HELD[:4]], 2)),
        (ValueError, r"got {'b': 5}, and {'a': 5}", lambda: LocalityBias([{"a": HELD}, {"b": HELD}], 2)),
        (TypeError, r"must be bool\[num_nodes\]", lambda: LocalityBias([HELD, HELD.astype(int)], 2)),
        (TypeError, r"must be a gids\.sampler\.LocalityBias \(got ndarray", lambda: make([2], locality=HELD)),
        (
            ValueError,
            r"exceed float32: scale them down",
            lambda: make([2], weights=wide, locality=LocalityBias(HELD, 4)),
        ),
        (ValueError, r"must have 6 entries \(got 5\)", lambda: sample(HELD, 1, graph, seeds)),
        (ValueError, r"must have 6 entries \(got 5\)", lambda: sample(HELD, 2, graph, seeds)),
        (
            ValueError,
            "for 'venues', but the graphs have 'paper', 'author', 'venue'",
            lambda: sample({"venues": HELD}, 2, citations(), papers),
        ),
        (ValueError, "give a dictionary by node type", lambda: sample(HELD, 2, citations(), papers)),
    )
