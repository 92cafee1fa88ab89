"""What bench/cooperation.py counts, compared with sets and loops over every node and edge."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gids.sampler import Labor, Neighbor, Topology

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import cooperation
from graphs import OWNERS, OwnersOf, graph_of, make_graph

NODES = 400
FANOUTS = [3, 2]


@pytest.fixture(scope="module")
def topology() -> Topology:
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 9, NODES)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = (NODES * rng.random(indptr[-1]) ** 2).astype(np.int32)
    return Topology(graph_of(indptr, indices))


def drawn(topology: Topology, ranks: int, sampler: object = None) -> list:
    sampler = sampler or Neighbor(FANOUTS)
    parts = np.random.default_rng(1).permutation(NODES)[: 6 * ranks].reshape(ranks, 6)
    return [cooperation.sample(sampler, topology, part, 5, keep_blocks=True) for part in parts]


def test_union_of_the_ranks_minibatches_is_the_global_minibatch(topology: Topology) -> None:
    seeds = np.random.default_rng(1).permutation(NODES)[:24]
    for sampler in (Neighbor(FANOUTS), Labor(FANOUTS, batch_dependency=256)):
        alone = drawn(topology, 4, sampler)
        for count, union in enumerate(cooperation.unite(alone, NODES), 1):
            assert union.tolist() == sorted(set().union(*(m.nodes.tolist() for m in alone[:count])))
            together = sampler.sample(topology, torch.from_numpy(seeds[: 6 * count]), step=5, seed=0)
            assert union.tolist() == sorted(together.input_nodes.tolist())


def test_adjacency_rows_of_the_published_algorithm(topology: Topology) -> None:
    """Rank (i, j) of the grid: what it sends in each stage, receives, and receives in the reduction."""
    degrees = np.diff(topology.graphs[0].indptr)
    for ranks, copies in ((4, 1), (8, 2), (16, 4)):
        parts, stages = ranks // copies, ranks // copies**2
        owners = np.random.default_rng(2).integers(0, parts, NODES).astype(np.uint8)
        minibatches = drawn(topology, ranks)
        sent = np.zeros((copies, stages))
        received, products = np.zeros((parts, copies)), np.zeros((parts, copies))
        for i in range(parts):
            block = minibatches[i * copies : (i + 1) * copies]
            for layer in range(len(FANOUTS)):  # the nodes that draw, from the seeds' layer on
                frontiers = [m.nodes[: m.blocks[-1 - layer].num_dst].tolist() for m in block]
                for v in set().union(*frontiers):
                    j, stage = divmod(int(owners[v]), stages)
                    if owners[v] != i:
                        sent[j, stage] += degrees[v]
                        received[i, j] += degrees[v]
                for v in (v for frontier in frontiers for v in frontier):
                    products[i, owners[v] // stages] += degrees[v]
        words = cooperation.replicate(minibatches, owners, degrees, ranks, copies)
        assert words["kbd / c"] == pytest.approx(products.sum() / copies)
        assert words["stages"] == sent.max(axis=0).sum()
        assert words["reduced"] == pytest.approx(products.mean() * (copies - 1))
        assert words["received"] == pytest.approx(received.mean() + words["reduced"])


def test_owners_are_balanced_and_communities_stay_together() -> None:
    graph = make_graph("clustered", 13, 16, 0)
    owners_of = OwnersOf(graph)
    targets = np.repeat(np.arange(graph.num_dst), np.diff(graph.indptr))
    cut = {}
    for method in OWNERS:
        owners = owners_of(method, 4)
        assert np.bincount(owners, minlength=4).max() <= 1.05 * graph.num_dst / 4
        cut[method] = float(np.mean(owners[targets] != owners[graph.indices]))
    assert min(cut["hash"], cut["range"]) > 0.7
    assert cut["community"] < 0.5
