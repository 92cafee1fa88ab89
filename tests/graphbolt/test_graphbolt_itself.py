"""gids.graphbolt in pipes of GraphBolt itself: its samplers, its loader, its workers, its own fetcher."""

from __future__ import annotations

from typing import Any

import graphbolt_model as model
import numpy as np
import pytest
import torch
from graphbolt_model import COUNTS, EDGES, WHY_NOT, Dataset

import gids
import gids.dgl

import dgl  # isort: skip

MEMORY = {"memory": 1 << 28}


@pytest.fixture
def graph(gb: Any) -> Any:
    """A sampling graph whose edge ids are those of the dataset `several`."""
    rng, ntypes = np.random.default_rng(4), sorted(COUNTS)
    offsets = np.cumsum([0, *(COUNTS[t] for t in ntypes)])
    start = dict(zip(ntypes, offsets, strict=False))
    of_relations = [
        (
            start[src] + (COUNTS[src] * rng.random(n) ** 2).astype(np.int64),
            start[dst] + rng.integers(0, COUNTS[dst], n),
            np.full(n, number, np.uint8),
            rng.permutation(n),
        )
        for number, ((src, _, dst), n) in enumerate(EDGES.items())
    ]
    src, dst, kind, ids = map(np.concatenate, zip(*of_relations, strict=True))
    order = np.lexsort((kind, dst))
    degrees = np.bincount(dst, minlength=offsets[-1])
    return gb.fused_csc_sampling_graph(
        torch.from_numpy(np.concatenate([[0], np.cumsum(degrees)])),
        torch.from_numpy(src[order]),
        edge_attributes={gb.ORIGINAL_EDGE_ID: torch.from_numpy(ids[order])},
        node_type_offset=torch.from_numpy(offsets),
        type_per_edge=torch.from_numpy(kind[order]),
        node_type_to_id={t: i for i, t in enumerate(ntypes)},
        edge_type_to_id={":".join(r): i for i, r in enumerate(EDGES)},
    )


def sampled(gb: Any, graph: Any, fanout: int = 4, *, shuffle: bool = False) -> Any:
    """A pipe of 15 sampled minibatches."""
    items = gb.ItemSetDict({"paper": gb.ItemSet(torch.arange(300), names="seed_nodes")})
    return gb.ItemSampler(items, batch_size=20, shuffle=shuffle).sample_neighbor(graph, [fanout, fanout])


def fetched(pipe: Any, dataset: Dataset) -> Any:
    """The pipe with the features of the dataset. Without a cache every page is read."""
    source = gids.open(dataset.store, **MEMORY, tuning=gids.Tuning(cache=0))
    return pipe.gids_fetch(source, dataset.node_keys, dataset.edge_keys)


def seeds_of(minibatch: Any) -> list[int]:
    return minibatch.seed_nodes["paper"].tolist()


@pytest.mark.parametrize(("workers", "copied"), [(0, False), (2, False), (0, True)])
def test_epochs_of_graphbolts_loader(
    gb: Any, graph: Any, several: Dataset, workers: int, copied: bool
) -> None:
    """copied: GraphBolt runs all stages before the copy in a thread."""
    pipe = fetched(sampled(gb, graph, shuffle=True), several)
    loader = gb.DataLoader(pipe.copy_to(torch.device("cpu")) if copied else pipe, num_workers=workers)
    orders = []
    for _epoch in range(2):
        minibatches = list(loader)
        for each in minibatches:
            assert model.check(several, each) >= 2
        orders.append([seeds_of(each) for each in minibatches])
        assert sorted(seed for seeds in orders[-1] for seed in seeds) == list(range(300))
    assert orders[0] != orders[1]
    pipe.close()


def test_the_same_as_graphbolts_own_fetcher(gb: Any, graph: Any, several: Dataset) -> None:
    stock = gb.BasicFeatureStore(
        {k: gb.TorchBasedFeature(v.view(len(v), -1)) for k, v in several.source.items()}
    )
    ours = gids.graphbolt.FeatureStore(gids.open(several.store, **MEMORY))
    assert isinstance(ours, gb.FeatureStore)
    assert all(isinstance(ours[key], gb.Feature) for key in several.source)

    keys = several.node_keys, several.edge_keys
    every = sampled(gb, graph, -1)  # all neighbors: GraphBolt's draws cannot be repeated
    by_stock = gb.DataLoader(every.fetch_feature(stock, *keys))
    by_store = gb.DataLoader(sampled(gb, graph, -1).fetch_feature(ours, *keys))
    by_stage = gb.DataLoader(fetched(sampled(gb, graph, -1), several))
    for expected, *others in zip(by_stock, by_store, by_stage, strict=True):
        for found in others:
            assert seeds_of(found) == seeds_of(expected)
            for mine, wanted in zip(
                [found.node_features, *found.edge_features],
                [expected.node_features, *expected.edge_features],
                strict=True,
            ):
                assert mine.keys() == wanted.keys()
                for key, rows in wanted.items():
                    assert torch.equal(mine[key].view(len(rows), -1), rows)


def test_features_of_an_earlier_stage_stay(gb: Any, graph: Any, several: Dataset) -> None:
    label = gb.TorchBasedFeature(torch.arange(400)[:, None])
    labels = gb.BasicFeatureStore({("node", "paper", "label"): label})
    pipe = sampled(gb, graph).fetch_feature(labels, {"paper": ["label"]})
    minibatches = list(gb.DataLoader(fetched(pipe, several)))
    assert len(minibatches) == 15
    for each in minibatches:
        found = each.node_features.pop(("paper", "label"))
        assert torch.equal(found[:, 0], each.input_nodes["paper"])


def test_the_import_error_lists_the_versions_that_are_needed() -> None:
    if not WHY_NOT:
        pytest.skip("GraphBolt is here")
    assert "gids.graphbolt needs DGL's GraphBolt: dgl 2.1.0, torch 2.2.0 or 2.2.1" in WHY_NOT
    assert f"dgl {dgl.__version__}" in WHY_NOT
    assert "tools/graphbolt_env.sh" in WHY_NOT
