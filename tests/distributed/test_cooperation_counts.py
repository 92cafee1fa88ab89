"""What bench/cooperation.py counts, compared with sets and loops over every node and edge."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from gids.sampler import Neighbor, Topology

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import cooperation
from graphs import graph_of

NODES = 400
FANOUTS = [3, 2]


def test_adjacency_rows_of_the_published_algorithm() -> None:
    """Rank (i, j) of the grid: what it sends in each stage, receives, and receives in the reduction."""
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 9, NODES)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = (NODES * rng.random(indptr[-1]) ** 2).astype(np.int32)
    topology = Topology(graph_of(indptr, indices))
    for ranks, copies in ((4, 1), (8, 2), (16, 4)):
        parts, stages = ranks // copies, ranks // copies**2
        owners = np.random.default_rng(2).integers(0, parts, NODES).astype(np.uint8)
        seeds = np.random.default_rng(1).permutation(NODES)[: 6 * ranks].reshape(ranks, 6)
        sampler = Neighbor(FANOUTS)
        minibatches = [cooperation.sample(sampler, topology, part, 5, keep_blocks=True) for part in seeds]
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
