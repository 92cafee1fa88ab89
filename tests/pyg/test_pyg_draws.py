"""PyG's replace and weight_attr: how often which edge is drawn. Seeds are fixed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pyg_model import CITES, PAPERS, homogeneous
from scipy import stats
from torch_geometric.data import Data

import gids.pyg
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
        writer.write_table("edge", CITES, "w", data.w.float()[:, None])
        edges = edge_list(row.numpy(), col.numpy(), num_src=PAPERS, num_dst=PAPERS)
        writer.write_edges(CITES, edges)
    return path


def assert_drawn_by_weight(data: Data, edges: torch.Tensor) -> None:
    """edges: ids of drawn edges. Those of weight 0 lead to nodes that have no others."""
    weights, destinations = data.w, data.edge_index[1]
    totals = torch.zeros(PAPERS).index_add(0, destinations, weights.float())
    assert ((weights[edges] > 0) | (totals[destinations[edges]] == 0)).all()


def test_a_loader_draws_by_weight(data: Data, path: Path) -> None:
    epochs = 60
    with gids.pyg.NeighborLoader(path, [1], weight_attr="w", tables=[], batch_size=PAPERS, seed=0) as loader:
        drawn = torch.cat([batch.e_id for _ in range(epochs) for batch in loader])
    assert_drawn_by_weight(data, drawn)
    counts = np.bincount(drawn.numpy(), minlength=data.w.numel())
    ends, weights = data.edge_index[1].numpy(), data.w.numpy().astype(float)
    totals = np.bincount(ends, weights, PAPERS)[ends]
    free = (weights > 0) & (weights < totals)
    expected = epochs * weights[free] / totals[free]
    statistic = ((counts[free] - expected) ** 2 / expected).sum()
    freedom = free.sum() - len(np.unique(ends[free]))
    assert stats.chi2.sf(statistic, freedom) > UNLIKELY


def test_with_replacement_every_node_draws_as_many(data: Data, path: Path) -> None:
    degrees = np.bincount(data.edge_index[1], minlength=PAPERS)
    given = {"tables": [], "batch_size": PAPERS, "weight_attr": "w", "seed": 0}
    (batch,) = gids.pyg.NeighborLoader(path, [7], None, replace=True, **given)
    drawn = np.bincount(batch.edge_index[1], minlength=PAPERS)[:PAPERS]
    assert drawn.tolist() == np.where(degrees > 0, 7, 0).tolist()
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    assert_drawn_by_weight(data, batch.e_id)


def star(path: Path, weights: list[float]) -> Path:
    """A dataset of node 0 with an edge of each weight."""
    count = len(weights)
    row, col = torch.arange(1, count + 1), torch.zeros(count, dtype=torch.int64)
    with DatasetWriter(path) as writer:
        writer.write_table("edge", CITES, "w", torch.tensor(weights)[:, None])
        writer.write_edges(CITES, edge_list(row, col, num_src=count + 1, num_dst=count + 1))
    return path


def drawn_of_star(path: Path, fanout: int, times: int, *, replace: bool = False) -> list[set[int]]:
    """The edges drawn, so many times."""
    with gids.pyg.NeighborLoader(
        path, [fanout], [0], weight_attr="w", tables=[], replace=replace, seed=0
    ) as loader:
        return [set(batch.e_id.tolist()) for _ in range(times) for batch in loader]


def test_edges_of_weight_0_are_taken_where_pyg_lib_takes_them(tmp_path: Path) -> None:
    """pyg-lib: all edges if they are no more than the fanout, else torch.multinomial of the weights."""
    path = star(tmp_path / "star.gids", [0, 0, 1, 0, 0.5])
    for fanout in (-1, 5, 9):
        assert drawn_of_star(path, fanout, 1) == [{0, 1, 2, 3, 4}]
    several = drawn_of_star(path, 3, 20)
    assert all(len(edges) == 3 and {2, 4} < edges for edges in several)
    assert set.union(*several) == {0, 1, 2, 3, 4}
    assert drawn_of_star(path, 2, 20) == [{2, 4}] * 20
    assert set.union(*drawn_of_star(path, 9, 9, replace=True)) == {2, 4}
    path = star(tmp_path / "zero.gids", [0, 0, 0])  # pyg-lib raises RuntimeError
    for replace in (False, True):
        assert set.union(*drawn_of_star(path, 1, 20, replace=replace)) == {0, 1, 2}
