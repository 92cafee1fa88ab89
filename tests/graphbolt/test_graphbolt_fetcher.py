"""The stage gids_fetch: how far it looks ahead, how it ends, what it refuses. tests/torture checks rows."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import graphbolt_model as model
import pytest
import torch
from datasets import has_open
from graphbolt_model import Dataset, Minibatches
from torch.utils.data.datapipes.iter import IterableWrapper

import gids

MEMORY = {"memory": 1 << 28}


def fetch(pipe: Any, several: Dataset, **options: Any) -> Any:
    source = gids.open(several.store, **MEMORY, **options)
    return pipe.gids_fetch(source, several.node_keys, several.edge_keys)


def test_a_window_of_minibatches_is_sampled_ahead(graphbolt: Any, minibatch: Any, several: Dataset) -> None:
    source = Minibatches(minibatch)
    pipe = fetch(source, several, window=8, tuning=gids.Tuning(planned=2))
    ahead = []
    for handed_out, _ in enumerate(pipe, start=1):
        ahead.append(source.sampled - handed_out)
    assert ahead[0] == 0  # the first comes as soon as it can
    assert max(ahead) == 8 + 1  # the window, and the one that is planned
    assert ahead[-1] == 0
    assert pipe.stats()["window"] == 8


def test_a_new_epoch_ends_one_that_was_left(graphbolt: Any, minibatch: Any, several: Dataset) -> None:
    fetcher = fetch(Minibatches(minibatch), several)
    for each in fetcher:
        if each.seed_nodes == 5:
            break
    left = iter(fetcher)
    for _ in range(3):
        model.check(several, next(left))
    assert [each.seed_nodes for each in fetcher] == list(range(40))
    with pytest.raises(RuntimeError, match="invalidated"):  # torch's own rule: one iterator of a pipe
        next(left)


def test_a_page_that_cannot_be_read_ends_the_epoch(graphbolt: Any, minibatch: Any, several: Dataset) -> None:
    batches = [minibatch(input_nodes={"paper": torch.arange(40 * i, 40 * i + 40)}) for i in range(10)]
    pipe = IterableWrapper(batches).gids_fetch(gids.open(several.store, **MEMORY), {"paper": ["feat"]})
    shard, offset = several.store.table("paper.feat").page_location(5 * 40 + 7)  # a page a row
    pipe.feature_loader._engine.inject_faults([(shard, offset, errno.EIO, 1 << 30)])
    iterator = iter(pipe)
    for number in range(5):
        assert next(iterator).input_nodes["paper"][0] == 40 * number
    with pytest.raises(gids.StorageError, match="shard-00") as caught:
        next(iterator)
    assert (caught.value.errno, caught.value.offset) == (errno.EIO, offset)
    with pytest.raises(RuntimeError, match="an error ended this epoch after 5 of its minibatches"):
        next(iterator)


def test_an_error_in_sampling_comes_at_its_turn(graphbolt: Any, minibatch: Any, several: Dataset) -> None:
    iterator = iter(fetch(Minibatches(minibatch, fails_at=7), several))
    assert [next(iterator).seed_nodes for _ in range(7)] == list(range(7))
    with pytest.raises(OSError, match="sampler"):
        next(iterator)


def test_a_closed_fetcher_cannot_be_iterated(graphbolt: Any, minibatch: Any, several: Dataset) -> None:
    """Also if another one has the same FeatureLoader."""
    fetcher = fetch(Minibatches(minibatch), several)
    source, keys = fetcher.feature_loader.source, (several.node_keys, several.edge_keys)
    other = Minibatches(minibatch).gids_fetch(source, *keys)
    assert other.feature_loader is fetcher.feature_loader
    iterator = iter(fetcher)
    next(iterator)
    fetcher.close()
    fetcher.close()
    assert list(iterator) == []
    with pytest.raises(ValueError, match="closed"):
        iter(fetcher)


def test_wrong_keys_are_refused(graphbolt: Any, minibatch: Any, one: Dataset) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, ValueError, "give node_feature_keys or edge_feature_keys"),
        ({"node_feature_keys": "feat"}, TypeError, r"give a list, \['feat'\]"),
        ({"node_feature_keys": ["x"]}, KeyError, "no feature .*x.*it has .*year"),
        ({"node_feature_keys": {"venue": ["feat"]}}, KeyError, "no feature .*'venue'"),
        ({"edge_feature_keys": ["feat"]}, KeyError, "no feature .*'edge', None, 'feat'"),
        ({"edge_feature_keys": {"a:b:c": ["w"]}}, KeyError, "no feature .*'a:b:c'"),
    ]
    for keys, error, message in cases:
        with pytest.raises(error, match=message):
            Minibatches(minibatch).gids_fetch(one.store, **keys)


def test_minibatches_that_do_not_fit_are_refused(
    graphbolt: Any, minibatch: Any, one: Dataset, several: Dataset
) -> None:
    node = torch.tensor([3])
    without_ids = [SimpleNamespace(original_edge_ids=None)]
    cases: list[tuple[Dataset, Any, tuple[Any, ...], type[Exception], str]] = [
        (one, {"input_nodes": {"paper": node}}, (["feat"],), ValueError, "heterogeneous graph: .* by type"),
        (several, {"input_nodes": node}, ({"paper": ["feat"]},), ValueError, "homogeneous .* as a list"),
        (one, {"input_nodes": torch.tensor([3, 400])}, (["feat"],), IndexError, "id 400 at position 1"),
        (
            one,
            {"input_nodes": node, "sampled_subgraphs": without_ids},
            (["feat"], ["weight"]),
            ValueError,
            "layer 0 .* has no edge ids",
        ),
    ]
    for dataset, fields, keys, error, message in cases:
        given = minibatch(**{"sampled_subgraphs": []} | fields)
        pipe = IterableWrapper([given]).gids_fetch(gids.open(dataset.store, **MEMORY), *keys)
        with pytest.raises(error, match=message):
            next(iter(pipe))


def test_a_closed_stage_or_store_holds_no_dataset(
    graphbolt: Any, minibatch: Any, one: Dataset, tmp_path: Path
) -> None:
    path = shutil.copytree(one.store.path, tmp_path / "one.gids")
    stage = Minibatches(minibatch).gids_fetch
    for opening in (lambda: stage(path, ["feat"]), lambda: graphbolt.FeatureStore(path)):
        opened = opening()
        assert has_open(path)
        opened.close()
        assert not has_open(path)
