"""state_dict() and load_state_dict(): a state continues with the same minibatches, or is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gids
from gids.sampler import Minibatch, Neighbor
from gids.store import FeatureStore
from gids.write import DatasetWriter, edge_list
from gids.write.partition import partition

NODES, EDGES = 60, 400
E = ("_N", "_E", "_N")


def write(path: Path, *, edges: int = 0, edge_times: int = 0, node_times: int = 0, rows: int = 0) -> Path:
    """A dataset with times of nodes and edges. The numbers are seeds of its random values."""

    def draw(seed: int, high: int, size: Any) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, high, size)

    with DatasetWriter(path) as writer:
        writer.write_table("node", "_N", "feat", torch.from_numpy(draw(rows, 99, (NODES, 4))).float())
        writer.write_times("_N", draw(node_times, 50, NODES))
        pairs = draw(edges, NODES, (2, EDGES))
        writer.write_edges(
            E, edge_list(*pairs, num_src=NODES, num_dst=NODES), times=draw(edge_times, 50, EDGES)
        )
    return path


def nodes(path: Path, **options: Any) -> gids.NodeLoader:
    return gids.NodeLoader(
        path, torch.arange(NODES), options.pop("sampler", [3, 3]), batch_size=7, **{"seed": 0} | options
    )


def edges(path: Path, **options: Any) -> gids.EdgeLoader:
    return gids.EdgeLoader(path, None, options.pop("sampler", [3, 3]), batch_size=40, **{"seed": 0} | options)


LOADERS = [nodes, edges]


def contents(minibatch: Minibatch) -> list[list[Any]]:
    return [tensor.tolist() for tensor in minibatch.tensors()]


@pytest.mark.parametrize("loader_of", LOADERS)
@pytest.mark.parametrize("other", [{"edges": 1}, {"edge_times": 1}, {"node_times": 1}])
def test_a_state_of_a_dataset_of_the_same_size_with_other_edges_or_times_is_refused(
    tmp_path: Path, loader_of: Callable[..., Any], other: dict[str, int]
) -> None:
    with loader_of(write(tmp_path / "saved.gids")) as loader:
        state = loader.state_dict()
    with loader_of(write(tmp_path / "other.gids", **other)) as loader:
        with pytest.raises(ValueError, match=r"checksum of edges and times = .*, for the same dataset"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("loader_of", LOADERS)
def test_a_state_continues_with_the_same_edges_wherever_they_are(
    tmp_path: Path, loader_of: Callable[..., Any]
) -> None:
    path = write(tmp_path / "saved.gids")
    with loader_of(path) as loader:
        epoch = iter(loader)
        next(epoch)
        state, expected = json.loads(json.dumps(loader.state_dict())), [contents(m) for m in epoch]
    assert len(expected) > 5
    for same in (
        shutil.copytree(path, tmp_path / "copied.gids"),
        write(tmp_path / "converted again.gids"),
        write(tmp_path / "other features.gids", rows=1),
    ):
        with loader_of(same) as loader:
            loader.load_state_dict(state)
            assert [contents(m) for m in loader] == expected


def test_an_epoch_that_is_set_is_next_after_a_loaded_one_of_which_nothing_was_read(tmp_path: Path) -> None:
    with nodes(write(tmp_path / "t.gids")) as loader:
        loader.epoch = 2
        loader.load_state_dict(loader.state_dict())
        iter(loader)
        for epoch in (3, 2):
            loader.epoch = epoch
            assert next(iter(loader)).epoch == epoch


def test_parts_have_the_checksum_of_edges_and_times_of_the_whole_dataset(tmp_path: Path) -> None:
    """So that a state of one process continues on several."""
    path = write(tmp_path / "whole.gids")
    checksum = FeatureStore(path).topology_crc
    for count in (1, 3):
        partition(path, tmp_path / f"{count}.parts", count, method="hash")
        for part in (tmp_path / f"{count}.parts").iterdir():
            assert FeatureStore(part).topology_crc == checksum
    assert FeatureStore(write(tmp_path / "other.gids", edge_times=1)).topology_crc != checksum


class Own:
    """A sampler of a user, which does not print its arguments."""

    def __init__(self, fanout: int, temporal: Any = None) -> None:
        self.neighbor, self.temporal = Neighbor([fanout], temporal=temporal), temporal

    def sample(self, *args: Any, **numbers: Any) -> Minibatch:
        return self.neighbor.sample(*args, **numbers)


def test_a_state_with_times_and_one_without_are_two(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gids")
    with edges(path, sampler=Own(3, "edges")) as loader:
        state = loader.state_dict()
    with edges(path, sampler=Own(3)) as loader:
        with pytest.raises(ValueError, match=r"loader with time = 'own', and this one has None"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("by", ["edges", "nodes"])
def test_a_temporal_sampler_is_refused_where_times_are_not_wanted(tmp_path: Path, by: Any) -> None:
    with pytest.raises(ValueError, match=r"time=False: .*temporal=.* samples by time: leave temporal= out"):
        edges(write(tmp_path / "t.gids"), sampler=Neighbor([3], temporal=by), time=False)


def test_a_state_of_another_kind_of_loader_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gids")
    with nodes(path) as one, edges(path, time=False) as other:
        with pytest.raises(ValueError, match="the state was saved by a loader with relation = "):
            one.load_state_dict(other.state_dict() | {"made_with": other._made_with() | one._made_with()})


def test_a_sampler_without_a_repr_is_compared_by_its_class_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Printed(Own):
        def __repr__(self) -> str:
            return f"Printed({self.neighbor!r})"

    path = write(tmp_path / "t.gids")
    with nodes(path, sampler=Printed(2)) as loader:
        state = loader.state_dict()
    with nodes(path, sampler=Printed(3)) as loader:
        with pytest.raises(ValueError, match=r"Printed\(Neighbor\(\[2\]"):
            loader.load_state_dict(state)
    assert "repr" not in caplog.text
    with nodes(path, sampler=Own(2)) as loader:
        loader.load_state_dict(loader.state_dict())
    assert "Own has no __repr__" in caplog.text
