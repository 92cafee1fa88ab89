"""Nested minibatches: kappa of them make up the large minibatch of all their seeds. Seeds are fixed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from sampling_graphs import citations, mixed_degrees

from gids.sampler import Block, Labor, LocalityBias, Minibatch, Neighbor
from gids.sampler.minibatch import PerType
from gids.sampler.topology import Graphs

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
