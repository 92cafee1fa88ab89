"""gids.pyg.MappedFeatures and GraphStore: PyG's interfaces, and PyG's own loaders on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyg_model import AUTHORS, CITES, PAPERS, WRITES, WRITTEN, AllNeighbors, stores
from torch_geometric.data import Data, HeteroData, TensorAttr
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import NeighborSampler as PygNeighborSampler

import gids
import gids.pyg


def both(path: Path) -> tuple[gids.pyg.MappedFeatures, gids.pyg.MappedGraph]:
    store = gids.FeatureStore(path)
    return gids.pyg.MappedFeatures(store), gids.pyg.MappedGraph(store)


def test_tensors_are_the_rows_of_the_source(several: HeteroData, several_path: Path) -> None:
    features, _ = both(several_path)
    ids = torch.tensor([5, 0, 5, PAPERS - 1])
    mask = torch.zeros(PAPERS, dtype=torch.bool)
    mask[[3, 9]] = True
    x = several["paper"].x
    for index, expected in (
        (ids, x[ids]),
        (mask, x[mask]),
        (slice(10, 20, 3), x[10:20:3]),
        (None, x),
        (7, x[7]),
        (torch.tensor([-1, 3]), x[[-1, 3]]),
        (slice(9, 3, -2), x.flip(0)[PAPERS - 10 : PAPERS - 4 : 2]),
        (torch.empty(0, dtype=torch.int64), x[:0]),
    ):
        assert torch.equal(features.get_tensor("paper", "x", index=index), expected)
    assert torch.equal(features["paper", "y", ids], several["paper"].y[ids])
    assert torch.equal(features["author"].x[:], several["author"].x)
    assert torch.equal(features.get_tensor(WRITES, "edge_attr", index=ids), several[WRITES].edge_attr[ids])
    assert features.get_tensor_size("author", "x") == (AUTHORS, 7)
    assert features.get_tensor_size("paper", "y") == (PAPERS,)
    attrs = [TensorAttr("paper", "x", ids), TensorAttr("author", "x", ids[:3])]
    assert [len(t) for t in features.multi_get_tensor(attrs)] == [4, 3]
    assert {(a.group_name, a.attr_name) for a in features.get_all_tensor_attrs()} == {
        ("paper", "x"),
        ("author", "x"),
        (WRITES, "edge_attr"),
        ("paper", "y"),
    }


def test_a_homogeneous_dataset_has_no_group_names(one: Data, one_path: Path) -> None:
    features, graphs = both(one_path)
    attrs = features.get_all_tensor_attrs()
    assert [(a.group_name, a.attr_name) for a in attrs] == [(None, "x"), (None, "y")]
    assert torch.equal(features.get_tensor(None, "x", index=None), one.x)
    assert torch.equal(features.get_tensor(None, "edge_attr", index=None), one.edge_attr)
    (attr,) = graphs.get_all_edge_attrs()
    assert (attr.edge_type, attr.layout, attr.size) == (None, EdgeLayout.CSC, (PAPERS, PAPERS))


def test_topology_in_every_layout(one: Data, one_path: Path, several: HeteroData, several_path: Path) -> None:
    """Permutations lead back to the source's edges."""
    _, graphs = both(several_path)
    assert {a.edge_type for a in graphs.get_all_edge_attrs()} == {CITES, WRITES, WRITTEN}
    for layout in ("csc", "csr", "coo"):
        rows, cols, orders = getattr(graphs, layout)()
        for relation in (CITES, WRITES, WRITTEN):
            row, col, order = rows[relation], cols[relation], orders[relation]
            assert row.dtype == col.dtype == torch.int64
            if layout == "csc":
                col = torch.arange(len(col) - 1).repeat_interleave(col.diff())
            if layout == "csr":
                row = torch.arange(len(row) - 1).repeat_interleave(row.diff())
            assert torch.equal(torch.stack([row, col]), several[relation].edge_index[:, order])
            assert len(order.unique()) == len(order)
    _, graph = both(one_path)
    row, colptr = graph.get_edge_index(None, "csc")
    assert len(colptr) == PAPERS + 1
    assert len(row) == one.edge_index.shape[1]
    with pytest.raises(KeyError, match="not found"):
        graph.get_edge_index(None, "coo")


def test_pygs_own_loaders_run_on_the_stores(
    one: Data, one_path: Path, several: HeteroData, several_path: Path
) -> None:
    """With a sampler of somebody's own, in a worker too."""
    for path, data, nodes, workers in (
        (one_path, one, torch.arange(0, PAPERS, 3), 1),
        (several_path, several, ("author", torch.arange(50)), 0),
    ):
        sampler = AllNeighbors(gids.FeatureStore(path), [None, None])
        options: dict[str, Any] = {"input_nodes": nodes, "batch_size": 100}
        found = list(NodeLoader(both(path), sampler, num_workers=workers, **options))
        for batch, same in zip(found, NodeLoader(data, sampler, **options), strict=True):
            assert_rows_and_edges_are_the_same(batch, same)
    edges = WRITES, several[WRITES].edge_index[:, :50]
    [batch] = LinkLoader(both(several_path), sampler, edges, batch_size=50)
    [same] = LinkLoader(several, sampler, edges, batch_size=50)
    assert_rows_and_edges_are_the_same(batch, same)
    assert torch.equal(batch[WRITES].edge_label_index, same[WRITES].edge_label_index)


def assert_rows_and_edges_are_the_same(batch: Any, same: Any) -> None:
    """PyG reads no features of edges from stores."""
    for key, storage in stores(same).items():
        for name in {"x", "y", "n_id", "edge_index", "e_id"} & set(storage.keys()):
            assert torch.equal(stores(batch)[key][name], storage[name]), (key, name)


def test_pygs_own_sampler_reads_the_graph_store(one_path: Path, several_path: Path) -> None:
    """pyg-lib samples what its constructor prepares."""
    with pytest.warns(UserWarning, match="pyg-lib"):
        sampler = PygNeighborSampler(both(one_path), [2])
    graph = gids.FeatureStore(one_path).graph()
    assert np.array_equal(sampler.colptr, graph.indptr)
    assert np.array_equal(sampler.row, graph.indices)
    assert np.array_equal(sampler.edge_permutation, graph.edge_ids)
    with pytest.warns(UserWarning, match="pyg-lib"):
        sampler = PygNeighborSampler(both(several_path), [2])
    assert sampler.num_nodes == {"paper": PAPERS, "author": AUTHORS}
    assert len(sampler.colptr_dict) == 3
