"""PyG's replace and weight_attr: how often which edge is drawn. Seeds are fixed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyg_model import CITES, PAPERS, WRITES, assert_drawn_by_weight, heterogeneous, homogeneous, write
from scipy import stats
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader as PygNodeLoader
from torch_geometric.sampler import NodeSamplerInput

import gids.pyg
from gids.cuda import Device
from gids.write import DatasetWriter
from gids.write.edges import edge_list

UNLIKELY = 1e-3  # one correct sampler in a thousand fails; these seeds do not


@pytest.fixture(scope="module")
def data() -> Data:
    """Edges with weights, every fifth of none."""
    data = homogeneous()
    weights = np.random.default_rng(0).integers(1, 6, data.edge_index.shape[1])
    weights[::5] = 0
    data.w = torch.from_numpy(weights)
    return data


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, data: Data) -> Path:
    path = tmp_path_factory.mktemp("draws") / "one.gids"
    row, col = data.edge_index
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", data.x)
        writer.write_table("edge", CITES, "w", data.w.float()[:, None])
        edges = edge_list(row.numpy(), col.numpy(), num_src=PAPERS, num_dst=PAPERS)
        writer.write_edges(CITES, edges)
    return path


def assert_in_proportion(data: Data, drawn: list[torch.Tensor], epochs: int) -> None:
    """drawn: the ids of the edges of many epochs, in each of which every node drew one."""
    counts = np.bincount(torch.cat(drawn).numpy(), minlength=data.w.numel())
    ends, weights = data.edge_index[1].numpy(), data.w.numpy().astype(float)
    totals = np.bincount(ends, weights, PAPERS)[ends]
    assert_drawn_by_weight(torch.cat(drawn), data.w, data.edge_index[1])
    free = (weights > 0) & (weights < totals)
    expected = epochs * weights[free] / totals[free]
    statistic = ((counts[free] - expected) ** 2 / expected).sum()
    freedom = free.sum() - len(np.unique(ends[free]))
    assert stats.chi2.sf(statistic, freedom) > UNLIKELY


@pytest.mark.parametrize("replace", [False, True])
def test_a_device_draws_by_weight_what_the_cpu_does(
    path: Path, device: Device, cuda_is: Callable[[Device], None], replace: bool
) -> None:
    """Hops have samplers of their own, which share the weights in memory."""
    cuda_is(device)
    options: dict[str, Any] = {"weight_attr": "w", "replace": replace, "batch_size": 100, "tables": []}
    with gids.pyg.NeighborLoader(path, [3, 2, -1], **options) as loader:
        expected = list(loader)
        edges = loader.store.graph().num_edges
    with gids.pyg.NeighborLoader(path, [3, 2, -1], device="cuda", topology_on="device", **options) as loader:
        for batch, same in zip(loader, expected, strict=True):
            for name in ("n_id", "e_id", "edge_index"):
                assert torch.equal(batch[name].cpu(), same[name])
        memory = loader.stats()["memory"]
        assert memory["topology on the device"] == 8 * (PAPERS + 1) + (4 + 4) * edges


def test_pygs_node_loader_draws_by_weight_too(data: Data, path: Path) -> None:
    torch.manual_seed(0)
    for source in (data, path):
        sampler = gids.pyg.NeighborSampler(source, [1], weight_attr="w", threads=1)
        sampler = pickle.loads(pickle.dumps(sampler))
        loader = PygNodeLoader(data, sampler, batch_size=PAPERS)
        drawn = [batch.e_id for _ in range(100) for batch in loader]
        assert_in_proportion(data, drawn, 100)


def test_with_replacement_every_node_draws_as_many(data: Data, path: Path) -> None:
    degrees = np.bincount(data.edge_index[1], minlength=PAPERS)
    for options in ({}, {"weight_attr": "w"}):
        given = {"tables": [], "batch_size": PAPERS, **options}
        (batch,) = gids.pyg.NeighborLoader(path, [7], None, replace=True, **given)
        drawn = np.bincount(batch.edge_index[1], minlength=PAPERS)[:PAPERS]
        assert drawn.tolist() == np.where(degrees > 0, 7, 0).tolist()
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        if options:
            assert_drawn_by_weight(batch.e_id, data.w, data.edge_index[1])


def star(path: Path, weights: list[float]) -> tuple[Data, Path]:
    """Node 0 with an edge of each weight, in memory and as a dataset."""
    count = len(weights)
    row, col = torch.arange(1, count + 1), torch.zeros(count, dtype=torch.int64)
    data = Data(x=torch.zeros(count + 1, 1), edge_index=torch.stack([row, col]), w=torch.tensor(weights))
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", data.x)
        writer.write_table("edge", CITES, "w", data.w[:, None])
        writer.write_edges(CITES, edge_list(row, col, num_src=count + 1, num_dst=count + 1))
    return data, path


def drawn_of_star(source: Data | Path, fanout: int, times: int, *, replace: bool = False) -> list[set[int]]:
    """The edges drawn, so many times."""
    sampler = gids.pyg.NeighborSampler(source, [fanout], replace=replace, weight_attr="w", threads=1)
    node = NodeSamplerInput(None, torch.tensor([0]))
    return [set(sampler.sample_from_nodes(node).edge.tolist()) for _ in range(times)]


def test_edges_of_weight_0_are_taken_where_pyg_lib_takes_them(tmp_path: Path) -> None:
    """pyg-lib: all edges if they are no more than the fanout, else torch.multinomial of the weights."""
    torch.manual_seed(0)
    for source in star(tmp_path / "star.gids", [0, 0, 1, 0, 0.5]):
        for fanout in (-1, 5, 9):
            assert drawn_of_star(source, fanout, 1) == [{0, 1, 2, 3, 4}]
        several = drawn_of_star(source, 3, 40)
        assert all(len(edges) == 3 and {2, 4} < edges for edges in several)
        assert set.union(*several) == {0, 1, 2, 3, 4}
        assert drawn_of_star(source, 2, 40) == [{2, 4}] * 40
        assert set.union(*drawn_of_star(source, 9, 9, replace=True)) == {2, 4}
    for source in star(tmp_path / "zero.gids", [0, 0, 0]):  # pyg-lib raises RuntimeError
        for replace in (False, True):
            assert set.union(*drawn_of_star(source, 1, 40, replace=replace)) == {0, 1, 2}


def test_relations_without_weights_are_drawn_from_uniformly(tmp_path: Path) -> None:
    data = heterogeneous()
    data[WRITES].edge_attr = torch.arange(data[WRITES].edge_index.shape[1]).remainder(2).float()[:, None]
    path = write(tmp_path / "several.gids", data)
    sampler = gids.pyg.NeighborSampler(data, [1], weight_attr="edge_attr", threads=1)
    torch.manual_seed(0)
    for loader in (
        gids.pyg.NeighborLoader(path, [1], "paper", weight_attr="edge_attr", batch_size=PAPERS),
        PygNodeLoader(data, sampler, input_nodes="paper", batch_size=PAPERS),
    ):
        (batch,) = loader
        writes = data[WRITES]
        assert_drawn_by_weight(batch[WRITES].e_id, writes.edge_attr.view(-1), writes.edge_index[1])
        assert set((batch[CITES].e_id % 2).tolist()) == {0, 1}


def test_a_state_of_other_weights_is_refused(path: Path) -> None:
    with (
        gids.pyg.NeighborLoader(path, [1], weight_attr="w", tables=[]) as one,
        gids.pyg.NeighborLoader(path, [1], replace=True, tables=[]) as other,
    ):
        assert "replace=True" in str(other.state_dict()["made_with"])
        with pytest.raises(ValueError, match="make the loader with the same arguments"):
            other.load_state_dict(one.state_dict())


def test_wrong_weights_are_refused(data: Data, path: Path) -> None:
    other = data.clone()
    other.text, other.bools = "heavy", data.w > 0
    for name, error, said in (
        ("v", KeyError, "the data has no edges with an attribute"),
        ("edge_attr", ValueError, "one number for each of the"),
        ("text", TypeError, "is not a tensor of numbers"),
        ("bools", TypeError, "is bool; weights must be numbers: give 1 and 0"),
    ):
        with pytest.raises(error, match=said):
            gids.pyg.NeighborSampler(other, [1], weight_attr=name)
    other.w = -data.w
    with pytest.raises(ValueError, match="must be 0 or more"):
        next(iter(PygNodeLoader(data, gids.pyg.NeighborSampler(other, [1], weight_attr="w"))))
