"""HopSampler without a loader. Tests of loaders compare its minibatches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gids.pyg.hops import HopSampler
from gids.sampler import Neighbor
from gids.store import Graph
from gids.store.names import Relation


def graph(relation: Relation, num_src: int, num_dst: int, seed: int) -> Graph:
    rng = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 5, num_dst))])
    return Graph(relation, num_src, num_dst, indptr, rng.integers(0, num_src, indptr[-1]), None)


def test_a_type_that_is_never_a_source() -> None:
    graphs = [graph(("a", "to", "b"), 30, 10, 0)]
    found = HopSampler([3, 3]).sample(graphs, {"b": torch.arange(10)}, seed=0)
    assert found.nodes_per_hop["b"] == [10, 0, 0]
    assert found.nodes_per_hop["a"] == [0, found.edges["a", "to", "b"].index[0].max() + 1, 0]
    assert found.input_nodes["b"].tolist() == list(range(10))  # type: ignore[index]


@pytest.mark.parametrize(("weighted", "replace"), [(False, False), (True, False), (True, True)])
def test_every_hop_draws_as_a_sampler_of_its_own(weighted: bool, replace: bool) -> None:
    relations = [("a", "one", "a"), ("a", "two", "a")]
    graphs = [graph(relation, 90, 90, i) for i, relation in enumerate(relations)]
    weights = None
    if weighted:  # of one relation; the other is drawn from uniformly
        weights = {relations[1]: np.random.default_rng(2).random(graphs[1].num_edges).astype(np.float32)}
    counts = {relations[0]: [2, -1, 1], relations[1]: [3, 1, 0]}
    sampler = HopSampler(counts, replace=replace, weights=weights)
    numbers = {"seed": 5, "epoch": 1, "step": 2}
    found = sampler.sample(graphs, {"a": torch.arange(2, 90, 11)}, **numbers)
    nodes = found.input_nodes["a"]  # type: ignore[index]
    begins = np.cumsum([0, *found.nodes_per_hop["a"]])
    at = dict.fromkeys(relations, 0)
    for hop in range(3):
        newest = nodes[begins[hop] : begins[hop + 1]]
        alone = Neighbor([{r: counts[r][hop] for r in relations}], replace=replace, weights=weights)
        expected = alone.sample(graphs, {"a": newest}, **numbers)
        for relation in relations:
            block: Any = expected.blocks[0][relation]  # type: ignore[index, call-overload]
            edges = found.edges[relation]
            here = slice(at[relation], at[relation] + edges.per_hop[hop])
            at[relation] = here.stop
            src, dst = block.coo()
            assert torch.equal(edges.ids[here], block.edge_ids)
            assert torch.equal(nodes[edges.index[0, here]], expected.input_nodes["a"][src])  # type: ignore[index]
            assert torch.equal(edges.index[1, here], dst + begins[hop])
