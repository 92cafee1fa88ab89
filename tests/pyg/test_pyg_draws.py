"""PyG's replace and weight_attr: which edges are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pyg_model import CITES, PAPERS
from torch_geometric.data import Data

import gids.pyg
from gids.write import DatasetWriter
from gids.write.edges import edge_list


def test_with_replacement_every_node_draws_as_many(one: Data, tmp_path: Path) -> None:
    """Edges without weight are drawn for nodes that have no others."""
    weights = (torch.arange(one.num_edges) % 6).float()
    with DatasetWriter(tmp_path / "one.gids") as writer:
        writer.write_table("edge", CITES, "w", weights[:, None])
        writer.write_edges(CITES, edge_list(*one.edge_index, num_src=PAPERS, num_dst=PAPERS))
    options: dict[str, Any] = {"weight_attr": "w", "replace": True, "batch_size": PAPERS, "seed": 0}
    with gids.pyg.NeighborLoader(tmp_path / "one.gids", [7], **options) as loader:
        [batch] = loader
    destinations = one.edge_index[1]
    degrees = torch.bincount(destinations, minlength=PAPERS)
    drawn = torch.bincount(batch.edge_index[1], minlength=PAPERS)[:PAPERS]
    assert torch.equal(drawn, 7 * (degrees > 0))
    assert torch.equal(batch.n_id[batch.edge_index], one.edge_index[:, batch.e_id])
    totals = torch.zeros(PAPERS).index_add(0, destinations, weights)
    assert ((weights[batch.e_id] > 0) | (totals[destinations[batch.e_id]] == 0)).all()


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
