"""state_dict() and load_state_dict(): a state continues with the same minibatches, or is refused."""

from __future__ import annotations

import json
import shutil
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


def write(path: Path, *, edges: int = 0, edge_times: int = 0, node_times: int = 0, rows: int = 0) -> Path:
    """A dataset with times of nodes and edges. The numbers are seeds of its random values."""

    def draw(seed: int, high: int, size: Any) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, high, size)

    with DatasetWriter(path) as writer:
        writer.write_table("node", "_N", "feat", torch.from_numpy(draw(rows, 99, (NODES, 4))).float())
        writer.write_times("_N", draw(node_times, 50, NODES))
        of_edges = edge_list(*draw(edges, NODES, (2, EDGES)), num_src=NODES, num_dst=NODES)
        writer.write_edges(("_N", "_E", "_N"), of_edges, times=draw(edge_times, 50, EDGES))
    return path


def nodes(path: Path, sampler: Any = (3, 3)) -> gids.NodeLoader:
    return gids.NodeLoader(path, torch.arange(NODES), sampler, batch_size=7, seed=0)


def edges(path: Path) -> gids.EdgeLoader:
    return gids.EdgeLoader(path, None, [3, 3], batch_size=40, seed=0, time=False)


def contents(minibatch: Minibatch) -> list[list[Any]]:
    return [tensor.tolist() for tensor in minibatch.tensors()]


@pytest.mark.parametrize("other", [{"edges": 1}, {"edge_times": 1}, {"node_times": 1}])
def test_a_state_of_a_dataset_of_the_same_size_with_other_edges_or_times_is_refused(
    tmp_path: Path, other: dict[str, int]
) -> None:
    with nodes(write(tmp_path / "saved.gids")) as loader:
        state = loader.state_dict()
    with nodes(write(tmp_path / "other.gids", **other)) as loader:
        with pytest.raises(ValueError, match=r"checksum of edges and times = .*, for the same dataset"):
            loader.load_state_dict(state)


def test_a_state_continues_with_the_same_edges_wherever_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "saved.gids")
    with nodes(path) as loader:
        epoch = iter(loader)
        next(epoch)
        state, expected = json.loads(json.dumps(loader.state_dict())), [contents(m) for m in epoch]
    assert len(expected) > 5
    for same in (
        shutil.copytree(path, tmp_path / "copied.gids"),
        write(tmp_path / "converted again.gids", rows=1),
    ):
        with nodes(same) as loader:
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
    partition(path, tmp_path / "parts", 3, method="hash")
    for part in (tmp_path / "parts").iterdir():
        assert FeatureStore(part).topology_crc == checksum
    assert FeatureStore(write(tmp_path / "other.gids", edge_times=1)).topology_crc != checksum


def test_a_state_of_another_kind_of_loader_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gids")
    with nodes(path) as one, edges(path) as other:
        for loader, state in ((one, other.state_dict()), (other, one.state_dict())):
            with pytest.raises(ValueError, match="the state was saved by a loader with "):
                loader.load_state_dict(state)


def test_a_sampler_is_compared_by_its_repr_or_by_its_class_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own:
        def __init__(self, fanout: int) -> None:
            self.neighbor = Neighbor([fanout])

        def sample(self, *args: Any, **numbers: Any) -> Minibatch:
            return self.neighbor.sample(*args, **numbers)

    class Printed(Own):
        def __repr__(self) -> str:
            return f"Printed({self.neighbor!r})"

    path = write(tmp_path / "t.gids")
    with nodes(path, Printed(2)) as loader:
        state = loader.state_dict()
    with nodes(path, Printed(3)) as loader:
        with pytest.raises(ValueError, match=r"Printed\(Neighbor\(\[2\]"):
            loader.load_state_dict(state)
    assert "repr" not in caplog.text
    with nodes(path, Own(2)) as loader:
        loader.load_state_dict(loader.state_dict())
    assert "Own has no __repr__" in caplog.text
