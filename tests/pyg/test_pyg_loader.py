"""gids.pyg.NeighborLoader: PyG's minibatches, attribute by attribute, from a dataset on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import has_open
from open_options import take_options, tuned
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
import gids.pyg
from gids.write import DatasetWriter, edge_list


def open_loader(path: Any, num_neighbors: Any, nodes: Any = None, **options: Any) -> gids.pyg.NeighborLoader:
    given = {"batch_size": 32, "memory": 64 << 20, "cache": 60_000, **options}
    taken = take_options(given)
    source = gids.open(path, **tuned(taken)) if isinstance(path, str | Path | gids.FeatureStore) else path
    return gids.pyg.NeighborLoader(source, num_neighbors, nodes, **{"seed": 0} | given)


@pytest.mark.parametrize("shuffle", [False, True])
def test_minibatches_are_those_of_pygs_own_node_loader(
    one: Data, one_path: Path, several: HeteroData, several_path: Path, shuffle: bool
) -> None:
    """All neighbors are taken, so that nothing is drawn; PyG's loader puts its Data together from memory."""
    by_type: Any = {CITES: [-1, 0], WRITES: [-1, -1], WRITTEN: [0, -1]}
    papers, authors = torch.tensor([5, 599, 17, 5, 0]), torch.arange(3, AUTHORS, 2)
    for data, path, ntype, ids, counts, hops in (
        (one, one_path, None, torch.arange(PAPERS), [-1, -1], [None, None]),
        (one, one_path, None, papers, [-1, -1, -1], [None, None, None]),
        (several, several_path, "paper", papers[1:], [-1, -1], [None, None]),
        (several, several_path, "author", authors, by_type, [{CITES, WRITES}, {WRITES, WRITTEN}]),
    ):
        with open_loader(path, counts, ids if ntype is None else (ntype, ids), shuffle=shuffle) as loader:
            ours = list(loader)
            assert len(loader) == len(ours) == -(-len(ids) // 32)
        order = torch.cat([stores(batch)[ntype].input_id for batch in ours])
        assert sorted(order.tolist()) == list(range(len(ids)))
        assert (order.tolist() == sorted(order.tolist())) != shuffle
        nodes: Any = ids[order] if ntype is None else (ntype, ids[order])
        sampler = AllNeighbors(gids.FeatureStore(path), hops)
        theirs = PygNodeLoader(data, sampler, input_nodes=nodes, batch_size=32, input_id=order)
        assert_all_same(ours, theirs)


def test_every_node_draws_once_and_in_its_hop(one: Data, one_path: Path) -> None:
    in_degree = torch.bincount(one.edge_index[1], minlength=PAPERS)
    with open_loader(one_path, [4, 3, 2], shuffle=True) as loader:
        for batch in loader:
            row, col = batch.edge_index
            source, destination = one.edge_index[:, batch.e_id]
            assert torch.equal(batch.n_id[row], source)
            assert torch.equal(batch.n_id[col], destination)
            assert len(batch.e_id.unique()) == len(batch.e_id)
            assert torch.equal(batch.x, one.x[batch.n_id])
            assert torch.equal(batch.y, one.y[batch.n_id])
            assert torch.equal(batch.edge_attr, one.edge_attr[batch.e_id])
            assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
            hop_of = torch.arange(4).repeat_interleave(torch.tensor(batch.num_sampled_nodes))
            fanout = torch.tensor([4, 3, 2, 0])[hop_of]
            drawn = torch.bincount(col, minlength=len(batch.n_id))
            assert torch.equal(drawn, torch.minimum(in_degree[batch.n_id], fanout))
            ends = torch.cumsum(torch.tensor(batch.num_sampled_edges), 0)
            assert torch.equal(hop_of[col], torch.searchsorted(ends, torch.arange(len(col)), right=True))


def test_input_nodes(one_path: Path, several_path: Path) -> None:
    mask = torch.zeros(PAPERS, dtype=torch.bool)
    mask[[7, 30, 200]] = True
    for nodes, ids, input_ids in (
        (None, list(range(PAPERS)), list(range(PAPERS))),
        ([9, 4], [9, 4], [0, 1]),
        (torch.tensor([9, 4], dtype=torch.int32), [9, 4], [0, 1]),
        (np.array([9, 4]), [9, 4], [0, 1]),
        (mask, [7, 30, 200], [7, 30, 200]),
    ):
        with open_loader(one_path, [1], nodes, batch_size=PAPERS) as loader:
            (batch,) = loader
            assert batch.n_id[: batch.batch_size].tolist() == ids
            assert batch.input_id.tolist() == input_ids
        with open_loader(several_path, [1], ("paper", nodes), batch_size=PAPERS) as loader:
            (typed,) = loader
            assert typed["paper"].n_id[: typed["paper"].batch_size].tolist() == ids
            assert typed["paper"].input_id.tolist() == input_ids
    with open_loader(one_path, [1], [9, 4], input_id=torch.tensor([70, 50])) as loader:
        assert next(iter(loader)).input_id.tolist() == [70, 50]
    with open_loader(one_path, [1], []) as loader:
        assert list(loader) == []
    with open_loader(several_path, [1], "author", batch_size=AUTHORS) as loader:
        assert next(iter(loader))["author"].batch_size == AUTHORS


def test_what_data_and_num_neighbors_may_be(one_path: Path, several_path: Path) -> None:
    counts: dict[Any, list[int]] = {CITES: [2, 1], WRITES: [2, 2], WRITTEN: [2, 2]}
    by_name = NumNeighbors({"paper__cites__paper": [2, 1]}, default=[2, 2])
    with open_loader(str(several_path), counts, "paper") as loader:
        expected = list(loader)
    for data, given in ((gids.FeatureStore(several_path), counts), (several_path, by_name)):
        with gids.pyg.NeighborLoader(data, given, "paper", batch_size=32, seed=0) as loader:
            assert_all_same(loader, expected)
    with open_loader(one_path, NumNeighbors([3, 2])) as loader, open_loader(one_path, (3, 2)) as other:
        assert_all_same(loader, other)
    with open_loader(one_path, [2], ("paper", None)) as loader:
        assert isinstance(next(iter(loader)), HeteroData)


def test_a_table_gets_no_name_that_minibatches_have_already(one_path: Path, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "x.gids") as writer:
        writer.write_table("node", "paper", "x", torch.ones(PAPERS, 2))
    x = gids.FeatureStore(tmp_path / "x.gids").table("x")
    with pytest.raises(ValueError, match="two tables would have the name 'x' of 'paper': give names"):
        open_loader(one_path, [3], tables=["paper.feat", x])
    for name in ("edge_index", "num_nodes", "batch_size", "y"):
        with pytest.raises(ValueError, match=f"have the name '{name}' of 'paper', which minibatches have"):
            open_loader(one_path, [3], tables={name: "paper.feat"})
    with open_loader(one_path, [3], tables={"y": "paper.feat"}, labels=False) as loader:
        batch = next(iter(loader))
        assert torch.equal(batch.y, gids.FeatureStore(one_path).read_rows(batch.n_id, "paper.feat"))


@pytest.mark.parametrize("error", [ValueError, StopIteration])
def test_an_error_of_the_transform_ends_the_epoch_which_a_state_resumes(one_path: Path, error: Any) -> None:
    def transform(data: Any) -> Any:
        steps.append(loader.state_dict()["step"])
        if len(steps) == 2:
            raise error
        return data

    steps: list[int] = []
    with open_loader(one_path, [2], transform=transform) as loader:
        epoch = iter(loader)
        next(epoch)
        with pytest.raises(RuntimeError if error is StopIteration else error):
            next(epoch)
        with pytest.raises(RuntimeError, match="ended this epoch after"):
            next(epoch)
        loader.load_state_dict(loader.state_dict())
        assert sum(1 for _ in loader) == len(loader) - 1
        assert steps == [0, 1, *range(1, len(loader))]


def test_only_the_tables_asked_for_and_a_transform(one_path: Path, several_path: Path) -> None:
    with open_loader(one_path, [2], tables=[], labels=False, transform=lambda d: d.keys()) as loader:
        assert not {"x", "y", "edge_attr"} & set(next(iter(loader)))
        assert loader.stats()["memory"]["sampler"] > 0
    with open_loader(several_path, [2], "paper", tables=["author.feat"]) as loader:
        batch = next(iter(loader))
        assert "x" in batch["author"]
        assert "x" not in batch["paper"]
        assert "edge_attr" not in batch[WRITES]


def test_minibatches_depend_on_seed_and_epoch_alone(one_path: Path) -> None:
    def run(**options: Any) -> list[list[int]]:
        with open_loader(one_path, [3, 3], shuffle=True, **options) as loader:
            return [b.n_id.tolist() + b.e_id.tolist() for _ in range(2) for b in loader]

    expected = run()
    without_effect: dict[str, Any] = {"num_workers": 0, "in_order": True, "is_sorted": True}
    for options in ({"window": 0}, {"threads": 1}, {"threads": 4, **without_effect}, {"tables": []}):
        assert run(**options) == expected, options
    assert run(seed=1) != expected
    assert expected[: len(expected) // 2] != expected[len(expected) // 2 :]


def test_a_closed_loader_holds_no_dataset(one_path: Path, tmp_path: Path) -> None:
    path = shutil.copytree(one_path, tmp_path / "one.gids")
    loader = gids.pyg.NeighborLoader(path, [2], seed=0)
    assert has_open(path)
    loader.close()
    assert not has_open(path)


def test_nodes_without_features_have_a_number(several: HeteroData, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "nodes.gids") as writer:
        row, col = several[WRITES].edge_index
        writer.write_edges(WRITES, edge_list(row, col, num_src=AUTHORS, num_dst=PAPERS))
    with open_loader(tmp_path / "nodes.gids", [-1], "paper") as loader:
        for batch in loader:
            for ntype in ("paper", "author"):
                assert batch[ntype].num_nodes == len(batch[ntype].n_id)


def test_wrong_arguments_of_a_loader_are_refused(
    one: Data, one_path: Path, several_path: Path, tmp_path: Path
) -> None:
    with DatasetWriter(tmp_path / "nodes.gids") as writer:
        writer.write_table("node", "paper", "feat", one.x)
    on_gpu = {"subgraph_type": "induced", "device": "cuda"}
    for error, message, path, counts, nodes, options in (
        (gids.FormatError, "nodes.gids has no topology", tmp_path / "nodes.gids", [2], None, {}),
        (ValueError, "num_neighbors", one_path, [-2], None, {}),
        (TypeError, "give a list", one_path, {CITES: [2]}, None, {}),
        (ValueError, "edge type", several_path, {CITES: [2]}, "paper", {}),
        (ValueError, "hops", several_path, {CITES: [2], WRITES: [2, 2], WRITTEN: [2]}, "paper", {}),
        (ValueError, "must be a split, a node type", several_path, [2], None, {}),
        (KeyError, "no split and no node type 'venue'", several_path, [2], "venue", {}),
        (ValueError, "a mask is", one_path, [2], torch.ones(3, dtype=torch.bool), {}),
        (TypeError, "give int64", one_path, [2], torch.ones(3), {}),
        (IndexError, "ids run from 0 to 599", one_path, [2], [600], {}),
        (KeyError, "time_attr='t': neither nodes nor edges", one_path, [2], None, {"time_attr": "t"}),
        (ValueError, "input_time= needs time_attr=", one_path, [2], None, {"input_time": torch.zeros(600)}),
        (ValueError, "strategy='last' needs time_attr", one_path, [2], None, {"temporal_strategy": "last"}),
        (ValueError, "strategy='first' must be", one_path, [2], None, {"temporal_strategy": "first"}),
        (ValueError, "for each of the 600 seeds", one_path, [2], None, {"input_id": torch.arange(6)}),
        (TypeError, "batch_size=None", one_path, [2], None, {"batch_size": None}),
        (KeyError, "weight_attr='w': one.gids has no edges", one_path, [2], None, {"weight_attr": "w"}),
        (ValueError, "subgraph_type='both' must be", one_path, [2], None, {"subgraph_type": "both"}),
        (ValueError, "'induced' is not supported with device='cuda'", one_path, [2], None, on_gpu),
        (KeyError, "no table 'z'", one_path, [2], None, {"tables": ["z"]}),
    ):
        with pytest.raises(error, match=message):
            open_loader(path, counts, nodes, **options)


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
        with gids.pyg.NeighborLoader(path, [2], seeds, batch_size=6, memory="64MB") as loader:
            [batch] = loader
            assert loader.data.num_nodes == {"paper": 6, "train": 6}
        assert torch.equal(batch["paper"].n_id[:6], expected)
    with pytest.raises(ValueError, match=r"a split and a node type.*give \('train', None\)"):
        gids.pyg.NeighborLoader(path, [2], "train")
    with pytest.raises(TypeError, match=r"NeighborLoader\(data, num_neighbors, input_nodes\)"):
        gids.pyg.NeighborLoader(path, ids, [2, 2])
