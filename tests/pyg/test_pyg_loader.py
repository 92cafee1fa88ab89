"""gids.pyg.NeighborLoader: PyG's minibatches, attribute by attribute, from a dataset on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import has_open
from pyg_model import (
    AUTHORS,
    CITES,
    PAPERS,
    WRITES,
    WRITTEN,
    AllNeighbors,
    assert_all_same,
    stores,
)
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader as PygNodeLoader
from torch_geometric.sampler import NumNeighbors

import gids
from gids.pyg import NeighborLoader
from gids.write import DatasetWriter, edge_list


def test_minibatches_are_those_of_pygs_own_node_loader(
    one: Data, one_path: Path, several: HeteroData, several_path: Path
) -> None:
    """All neighbors are taken, so that nothing is drawn; PyG's loader puts its Data together from memory."""
    by_type: Any = {CITES: [-1, 0], WRITES: [-1, -1], WRITTEN: [0, -1]}
    papers, authors = torch.tensor([5, 599, 17, 5, 0]), torch.arange(3, AUTHORS, 2)
    for data, path, ntype, ids, counts, hops in (
        (one, one_path, None, torch.arange(0, PAPERS, 4), [-1, -1], [None, None]),
        (one, one_path, None, papers, [-1, -1, -1], [None, None, None]),
        (several, several_path, "paper", papers[1:], [-1, -1], [None, None]),
        (several, several_path, "author", authors, by_type, [{CITES, WRITES}, {WRITES, WRITTEN}]),
    ):
        options: dict[str, Any] = {"batch_size": 32, "shuffle": True, "seed": 0}
        with NeighborLoader(path, counts, ids if ntype is None else (ntype, ids), **options) as loader:
            ours = list(loader)
            assert len(loader) == len(ours) == -(-len(ids) // 32)
        order = torch.cat([stores(batch)[ntype].input_id for batch in ours])
        assert sorted(order.tolist()) == list(range(len(ids))) != order.tolist()
        nodes: Any = ids[order] if ntype is None else (ntype, ids[order])
        sampler = AllNeighbors(gids.FeatureStore(path), hops)
        theirs = PygNodeLoader(data, sampler, input_nodes=nodes, batch_size=32, input_id=order)
        assert_all_same(ours, theirs)


def test_every_node_draws_once_and_in_its_hop(one: Data, one_path: Path) -> None:
    in_degree = torch.bincount(one.edge_index[1], minlength=PAPERS)
    with NeighborLoader(one_path, [4, 3, 2], batch_size=99, shuffle=True, seed=0) as loader:
        for batch in loader:
            row, col = batch.edge_index
            source, destination = one.edge_index[:, batch.e_id]
            assert torch.equal(batch.n_id[row], source)
            assert torch.equal(batch.n_id[col], destination)
            assert len(batch.e_id.unique()) == len(batch.e_id)
            assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
            hop_of = torch.arange(4).repeat_interleave(torch.tensor(batch.num_sampled_nodes))
            fanout = torch.tensor([4, 3, 2, 0])[hop_of]
            drawn = torch.bincount(col, minlength=len(batch.n_id))
            assert torch.equal(drawn, torch.minimum(in_degree[batch.n_id], fanout))
            ends = torch.cumsum(torch.tensor(batch.num_sampled_edges), 0)
            assert torch.equal(hop_of[col], torch.searchsorted(ends, torch.arange(len(col)), right=True))


MASK = torch.zeros(PAPERS, dtype=torch.bool)
MASK[[7, 30, 200]] = True


@pytest.mark.parametrize(
    ("nodes", "ids", "input_ids"),
    [
        (None, list(range(PAPERS)), list(range(PAPERS))),
        ([9, 4], [9, 4], [0, 1]),
        (np.array([9, 4], dtype=np.int32), [9, 4], [0, 1]),
        (MASK, [7, 30, 200], [7, 30, 200]),
    ],
    ids=["all", "list", "array", "mask"],
)
def test_input_nodes(
    one_path: Path, several_path: Path, nodes: Any, ids: list[int], input_ids: list[int]
) -> None:
    for path, given in ((one_path, nodes), (several_path, ("paper", nodes))):
        with NeighborLoader(path, [1], given, batch_size=PAPERS, seed=0) as loader:
            [batch] = loader
        storage = batch if path == one_path else batch["paper"]
        assert storage.n_id[: storage.batch_size].tolist() == ids
        assert storage.input_id.tolist() == input_ids


def test_no_nodes_all_of_a_type_and_numbers_of_their_own(one_path: Path, several_path: Path) -> None:
    with NeighborLoader(one_path, [1], [9, 4], input_id=torch.tensor([70, 50]), batch_size=2) as loader:
        assert next(iter(loader)).input_id.tolist() == [70, 50]
    with NeighborLoader(one_path, [1], []) as loader:
        assert list(loader) == []
    with NeighborLoader(several_path, [1], "author", batch_size=AUTHORS) as loader:
        assert next(iter(loader))["author"].batch_size == AUTHORS
    with NeighborLoader(one_path, [2], ("paper", None)) as loader:
        assert isinstance(next(iter(loader)), HeteroData)


def test_what_data_and_num_neighbors_may_be(several_path: Path) -> None:
    counts: dict[Any, list[int]] = {CITES: [2, 1], WRITES: [2, 2], WRITTEN: [2, 2]}
    by_name = NumNeighbors({"paper__cites__paper": [2, 1]}, default=[2, 2])
    options: dict[str, Any] = {"batch_size": 200, "seed": 0}
    with NeighborLoader(str(several_path), counts, "paper", **options) as loader:
        expected = list(loader)
    for data, given in ((gids.FeatureStore(several_path), counts), (several_path, by_name)):
        with NeighborLoader(data, given, "paper", **options) as loader:
            assert_all_same(loader, expected)


def test_an_error_of_the_transform_ends_the_epoch_which_a_state_resumes(one_path: Path) -> None:
    def transform(data: Any) -> Any:
        steps.append(loader.state_dict()["step"])
        if len(steps) == 2:
            raise StopIteration
        return data

    steps: list[int] = []
    with NeighborLoader(one_path, [2], batch_size=100, transform=transform, seed=0) as loader:
        epoch = iter(loader)
        next(epoch)
        with pytest.raises(RuntimeError):
            next(epoch)
        with pytest.raises(RuntimeError, match="ended this epoch after"):
            next(epoch)
        loader.load_state_dict(loader.state_dict())
        assert sum(1 for _ in loader) == len(loader) - 1
        assert steps == [0, 1, *range(1, len(loader))]


def test_only_the_tables_asked_for(one_path: Path, several_path: Path) -> None:
    with NeighborLoader(one_path, [2], tables=[], labels=False, transform=lambda d: d.keys()) as loader:
        assert not {"x", "y", "edge_attr"} & set(next(iter(loader)))
    with NeighborLoader(one_path, [2], tables={"y": "paper.feat"}, labels=False) as loader:
        batch = next(iter(loader))
        assert torch.equal(batch.y, gids.FeatureStore(one_path).read_rows(batch.n_id, "paper.feat"))
    with NeighborLoader(several_path, [2], "paper", tables=["author.feat"]) as loader:
        batch = next(iter(loader))
        assert "x" in batch["author"]
        assert "x" not in batch["paper"]
        assert "edge_attr" not in batch[WRITES]


def test_a_closed_loader_holds_no_dataset(one_path: Path, tmp_path: Path) -> None:
    path = shutil.copytree(one_path, tmp_path / "one.gids")
    loader = NeighborLoader(path, [2], seed=0)
    assert has_open(path)
    loader.close()
    assert not has_open(path)


def test_nodes_without_features_have_a_number(several: HeteroData, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "nodes.gids") as writer:
        row, col = several[WRITES].edge_index
        writer.write_edges(WRITES, edge_list(row, col, num_src=AUTHORS, num_dst=PAPERS))
    with NeighborLoader(tmp_path / "nodes.gids", [-1], "paper", batch_size=200) as loader:
        for batch in loader:
            for ntype in ("paper", "author"):
                assert batch[ntype].num_nodes == len(batch[ntype].n_id)


def test_seeds_are_the_split_of_this_name(tmp_path: Path) -> None:
    path, ids = tmp_path / "d.gids", torch.tensor([4, 2])
    with DatasetWriter(path) as writer:
        for ntype in ("paper", "train"):
            writer.write_table("node", ntype, "x", torch.arange(6.0).view(6, 1))
        writer.write_split("paper", "train", ids)
        writer.write_split("paper", "val", ids + 1)
        writer.write_graph(("paper", "to", "train"), torch.arange(7), torch.arange(6), num_src=6)
    for seeds, expected in (
        ("val", ids + 1),
        (("paper", "train"), ids),
        ({"paper": "train"}, ids),
        (("paper", None), torch.arange(6)),
    ):
        with NeighborLoader(path, [2], seeds, batch_size=6, memory="64MB") as loader:
            [batch] = loader
            assert loader.data.num_nodes == {"paper": 6, "train": 6}
        assert torch.equal(batch["paper"].n_id[:6], expected)
    with pytest.raises(ValueError, match=r"a split and a node type.*give \('train', None\)"):
        NeighborLoader(path, [2], "train")
