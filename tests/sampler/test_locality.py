"""Neighbor with a LocalityBias: it draws as by weights; masks of ranks; the rows that are in a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from every_sampler import GRAPH, NEAR, POSITIVE, assert_same
from sampling_model import citations, make_graph, mixed_degrees

import gids
from gids.cuda import Device
from gids.distributed import Placement
from gids.heat import hottest_nodes
from gids.sampler import LocalityBias, Neighbor
from gids.store import FeatureStore
from gids.write import DatasetWriter


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"batch_dependency": 4}], ids=repr)
def test_it_draws_as_by_weights(options: Any) -> None:
    """With a factor of 1 as without it."""

    def draw(**more: Any) -> Any:
        return Neighbor([3, 4], **options, **more).sample(GRAPH, torch.arange(200), step=2, seed=0)

    bias, of_edges = LocalityBias(NEAR, 4, weights=True), np.where(NEAR[GRAPH.indices], 4, 1)
    assert_same(draw(locality=bias), draw(weights=1.0 * of_edges))
    assert_same(draw(locality=bias, weights=POSITIVE), draw(weights=POSITIVE * of_edges))
    assert_same(draw(locality=LocalityBias(NEAR, 1)), draw())


def test_relations_from_a_type_with_a_mask_are_biased_and_have_no_weights() -> None:
    """By default, as published, also if their edges have weights."""
    graphs, seeds, masks = citations(), {"paper": torch.arange(100)}, {"author": np.arange(150) < 40}
    of_edges = {g.relation: 1.0 + np.arange(g.num_edges) % 3 for g in graphs}
    for weights in (None, of_edges):
        published, weighed, plain = (
            Neighbor([4], locality=bias, weights=weights).sample(graphs, seeds, step=2, seed=0).blocks[0]
            for bias in (LocalityBias(masks, 5), LocalityBias(masks, 5, weights=True), None)
        )
        for relation, block in published.items():
            other, near = weighed[relation], relation[0] == "author"
            assert torch.equal(block.indices, other.indices)
            assert torch.equal(block.positions, other.positions)
            assert torch.equal(block.positions, plain[relation].positions) != near
            assert (block.weights is None) == (near or weights is None)
            assert (other.weights is None) == (not near and weights is None)


# --- masks by rank ---


def test_a_rank_draws_by_its_own_mask() -> None:
    graph, graphs, seeds = make_graph(mixed_degrees(500)), citations(), torch.arange(100)
    of_ranks = [np.arange(500) % 3 == rank for rank in range(3)]
    of_types = [{"author": np.arange(150) % 3 == rank} for rank in range(3)]
    for masks, of_one in ((of_ranks, graph), (of_types, graphs)):
        nodes = seeds if of_one is graph else {"paper": seeds}
        sampler = Neighbor([3, 4], locality=LocalityBias(masks, 4))
        for rank, mask in enumerate(masks):
            alone = Neighbor([3, 4], locality=LocalityBias(mask, 4))
            of_rank = sampler.of_rank(rank, 3)
            assert_same(of_rank.sample(of_one, nodes, seed=0), alone.sample(of_one, nodes, seed=0))
            assert repr(of_rank) == repr(sampler)  # so that ranks and checkpoints compare all masks
    assert repr(LocalityBias(of_ranks, 4)) != repr(LocalityBias(of_ranks[::-1], 4))


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

    def loader(nodes: Any, rank: int, world_size: int = 2) -> gids.NodeLoader:
        sampler = Neighbor([3], locality=LocalityBias(nodes, 4))
        options: dict[str, Any] = {"batch_size": 100, "shuffle": True, "tables": [], "seed": 0}
        return gids.NodeLoader(
            dataset, torch.arange(400), sampler, rank=rank, world_size=world_size, **options
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


# --- the rows that are in a cache ---

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
    source = gids.open(
        dataset, memory=64 << 20, device_memory=64 << 20, heat="none", tuning=gids.Tuning(staging="8MB")
    )
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
