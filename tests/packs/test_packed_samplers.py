"""Every sampler and loader by packs: the very minibatches and rows of random reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import in_edges
from packs_example import AUTHORS, PAPERS, assert_all_same, assert_same, cut_small, open_loader, open_source

import gids
from gids.sampler import Labor, Ladies, LocalityBias, Minibatch, Neighbor, RandomWalk
from gids.write import DatasetWriter

NODES = 2000
CITES = ("paper", "cites", "paper")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One node type; rows of 64 bytes, and of 12 bytes for each edge."""
    path = tmp_path_factory.mktemp("samplers") / "one.gids"
    rng = np.random.default_rng(0)
    indptr, indices = in_edges(rng.integers(0, 20, NODES), NODES, rng)
    with DatasetWriter(path, stripe=2) as writer:
        writer.write_table("node", "paper", "feat", torch.arange(NODES * 16.0).reshape(NODES, 16))
        writer.write_table("edge", CITES, "w", torch.arange(len(indices) * 3.0).reshape(-1, 3))
        writer.write_graph(CITES, indptr, indices, num_src=NODES)
    return path


def weights(path: Path) -> torch.Tensor:
    edges = gids.FeatureStore(path).graph(CITES).num_edges
    return torch.arange(edges) % 7 + 0.5


SAMPLERS: dict[str, Any] = {
    "neighbor": lambda path: Neighbor([3, 4], batch_dependency=8),
    "with replacement": lambda path: Neighbor([3, 4], replace=True),
    "weighted": lambda path: Neighbor([3, 4], weights=weights(path)),
    "weighted with replacement": lambda path: Neighbor([3, 4], replace=True, weights=weights(path)),
    "all neighbors": lambda path: Neighbor([-1, 2]),
    "labor": lambda path: Labor([3, 4], batch_dependency=4),
    "nested": lambda path: Labor([3, 4], batch_dependency=4, nested=True),
    "labor-*": lambda path: Labor([3, 4], importance_sampling=-1, batch_dependency=math.inf),
    "locality": lambda path: Neighbor([3, 4], locality=LocalityBias(torch.arange(NODES) % 5 == 0, 4)),
    "ladies": lambda path: Ladies([200, 100]),
    "poisson ladies": lambda path: Ladies([200, 100], poisson=True),
    "walks": lambda path: RandomWalk([3, 3]),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_sampler(one: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batch_size": 96, "shuffle": True, "seed": 5, "tables": ["paper.feat"]}
    if kind != "walks":  # whose edges are not the graph's
        options["tables"].append("paper.cites.paper.w")
    with open_source(one, "random") as source:
        loader = gids.NodeLoader(source, torch.arange(NODES), SAMPLERS[kind](one), **{"seed": 0} | options)
        expected = [list(loader) for _ in range(2)]
    cut_small(monkeypatch, minibatches=9, packs=2)
    with open_source(one, "pack") as source:
        loader = gids.NodeLoader(source, torch.arange(NODES), SAMPLERS[kind](one), **{"seed": 0} | options)
        for epoch in expected:
            assert_all_same(epoch, loader)
        stats = loader.stats()["packs"]
        assert stats["minibatches"] == 2 * len(loader)
        assert stats["superbatches"] >= 6


@pytest.mark.parametrize("relation", [CITES, ("author", "writes", "paper")])
def test_edge_loaders(path: Path, relation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batch_size": 50, "shuffle": True, "seed": 2, "negatives": 2}
    nodes = {"paper": PAPERS, "author": AUTHORS}
    edges = torch.stack([torch.arange(700) % nodes[ntype] for ntype in relation[::2]])

    def epochs(reads: str) -> list[list[Any]]:
        with open_source(path, reads, 32 << 20) as source:
            loader = gids.EdgeLoader(
                source, edges, Neighbor([4, 3]), relation=relation, **{"seed": 0} | options
            )
            found = [list(loader) for _ in range(2)]
            assert loader.stats()["packs"]["minibatches"] == (0 if reads == "random" else 2 * len(loader))
            return found

    expected = epochs("random")
    cut_small(monkeypatch, minibatches=5, packs=2)
    for one, other in zip(expected, epochs("pack"), strict=True):
        assert_all_same(one, other)


def test_drop_last_several_seed_types_and_other_dtypes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = {"paper": torch.arange(0, PAPERS, 11), "author": torch.arange(AUTHORS)}
    options: dict[str, Any] = {"batch_size": 70, "drop_last": True, "shuffle": True, "dtype": torch.float32}
    with open_source(path, "random") as source:
        expected = list(gids.NodeLoader(source, seeds, [3, 2], **{"seed": 0} | options))
    cut_small(monkeypatch, minibatches=4, packs=1)
    with open_source(path, "pack") as source:
        loader = gids.NodeLoader(source, seeds, [3, 2], **{"seed": 0} | options)
        assert_all_same(expected, loader)
        assert loader.stats()["packs"]["minibatches"] == len(expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("stop", [5, 12, 20])
def test_resuming_between_and_inside_superbatches(
    path: Path, epochs: list[list[Minibatch]], stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [*epochs[0], *epochs[1]]
    cut_small(monkeypatch, minibatches=6, packs=2)
    with open_source(path, "pack") as source:
        loader = open_loader(source)
        epoch = iter(loader)
        for a, b in zip(expected[:stop], epoch, strict=False):
            assert_same(a, b)
        state = loader.state_dict()
        epoch.close()
    with open_source(path, "pack") as source:
        resumed = open_loader(source)
        resumed.load_state_dict(state)
        assert_all_same(expected[stop:], [*resumed, *resumed])
