"""Feature and FeatureStore: GraphBolt's interface over a dataset, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphbolt_model import Dataset

import gids

MEMORY = {"memory": 1 << 28}


def test_a_store_has_every_feature(graphbolt: Any, dataset: Dataset) -> None:
    store = graphbolt.FeatureStore(gids.open(dataset.store.path, **MEMORY))
    assert sorted(store.keys(), key=str) == sorted(dataset.source, key=str)
    assert len(store) == len(dataset.source)
    for key, rows in dataset.source.items():
        ids = torch.tensor([7, 3, 7], dtype=torch.int32)
        for given in (ids, ids.long(), None):
            assert torch.equal(store.read(*key, given), rows if given is None else rows[given])
        assert store.size(*key) == rows.shape[1:]
        assert store.count(*key) == len(rows)
        found = store.metadata(*key)
        assert (found["row_count"], found["dtype"]) == (len(rows), rows.dtype)
        assert store.read(*key, ids[:0]).shape == (0, *rows.shape[1:])
    assert store.stats()["hits"] > 0
    store.close()
    store.close()


def test_a_store_names_what_it_has(graphbolt: Any, several: Dataset, one: Dataset) -> None:
    store = graphbolt.FeatureStore(gids.open(several.store, **MEMORY))
    keys = ("node", "paper", "x"), ("node", None, "feat"), ("graph", None, "feat"), ("edge", "a:b", "w")
    for key in keys:
        with pytest.raises(KeyError, match=r"no feature .*'author:writes:paper', 'weight'"):
            store.read(*key, torch.tensor([0]))
    store, ids = graphbolt.FeatureStore(gids.open(one.store, **MEMORY)), torch.tensor([5, 2])
    for domain, type_name, key in (("node", "_N", "feat"), ("edge", "_N:_E:_N", "weight")):
        assert torch.equal(store.read(domain, type_name, key, ids), store.read(domain, None, key, ids))


def test_a_feature_of_its_own(graphbolt: Any, one: Dataset) -> None:
    rows, ids = one.source["node", None, "feat"], torch.tensor([7, 7, 399])
    source = gids.open(one.store, **MEMORY, tuning=gids.Tuning(cache=0))
    for name in ("_N.feat", "feat"):
        own = graphbolt.Feature(source, name, dtype=torch.float16)
        assert torch.equal(own.read(ids), rows[ids].half())
        assert torch.equal(own.read(), rows.half())
        own.close()
    with pytest.raises(KeyError, match="no table 'x'"):
        graphbolt.Feature(source, "x")


def test_a_read_larger_than_the_first_is_warned_of_once_unless_foretold(
    graphbolt: Any, one: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    every = torch.arange(400)
    for foretold in (400, None):
        source = gids.open(one.store, memory=92_000, tuning=gids.Tuning(queue_depth=2))
        feature = graphbolt.Feature(source, "_N.feat", minibatch_rows=foretold)
        for ids in (every[:1], every, every):
            feature.read(ids)
            if foretold:
                assert sum(feature.feature_loader.stats()["memory"].values()) <= 92_000
        feature.close()
        told = [record for record in caplog.records if "minibatch_rows=" in record.getMessage()]
        assert len(told) == (0 if foretold else 1)


def test_wrong_calls_say_why(graphbolt: Any, one: Dataset) -> None:
    store = graphbolt.FeatureStore(gids.open(one.store, **MEMORY))
    feature = store["node", None, "feat"]
    with pytest.raises(TypeError, match="cannot be changed"):
        feature.update(torch.zeros(1, 6), torch.tensor([0]))
    with pytest.raises(TypeError, match="cannot be changed"):
        store.update("node", None, "feat", torch.zeros(400, 6))
    for each in (store, feature):
        assert not each.is_pinned()
        with pytest.raises(TypeError, match="cannot be pinned"):
            each.pin_memory_()
    with pytest.raises(IndexError, match="id 400"):
        feature.read(torch.tensor([400]))
    store.close()
    with pytest.raises(ValueError, match="closed"):
        feature.read(torch.tensor([0]))
