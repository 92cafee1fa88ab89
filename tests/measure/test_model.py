"""The model of the comparison equals its formula, computed node by node."""

from __future__ import annotations

import pytest
import torch

from gids.measure.epoch import GraphSage, SageLayer

import dgl  # isort: skip

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")
EDGES = {CITES: [(1, 0), (2, 0), (2, 1)], WRITES: [(0, 1)]}


def block_of_papers():
    """Papers 0 and 1 are seeds; paper 0 has no author."""
    return dgl.create_block(
        {relation: tuple(map(list, zip(*pairs, strict=True))) for relation, pairs in EDGES.items()},
        {"paper": 3, "author": 1},
        {"paper": 2, "author": 0},
    )


def test_a_layer_adds_the_means_of_all_relations():
    torch.manual_seed(0)
    x = {"paper": torch.randn(3, 4), "author": torch.randn(1, 5)}
    layer = SageLayer({"paper": 4, "author": 5}, 6, list(EDGES))
    result = layer(block_of_papers(), x)
    assert result["author"].shape == (0, 6)
    for node in range(2):
        expected = layer.own[0](x["paper"][node])
        for (relation, pairs), neighbors in zip(EDGES.items(), layer.neighbors, strict=True):
            rows = [x[relation[0]][source] for source, target in pairs if target == node]
            if rows:
                expected = expected + neighbors(torch.stack(rows).mean(0))
        torch.testing.assert_close(result["paper"][node], expected)


def test_a_type_without_features_is_left_out_and_a_target_that_none_reach_is_refused():
    layer = SageLayer({"author": 5}, 6, list(EDGES))
    result = layer(block_of_papers(), {"author": torch.ones(1, 5)})
    assert len(layer.neighbors) == 1
    assert result["paper"][0].tolist() == [0] * 6
    with pytest.raises(ValueError, match="no features reach 'author' nodes in 2 layers"):
        GraphSage({"paper": 4}, 8, 3, 2, list(EDGES), "author")
