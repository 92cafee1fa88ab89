"""Layers of DGL and of PyG run as docs/inference.md shows, and equal their own full-graph inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gids
from gids import FeatureStore
from gids.inference import layerwise
from gids.write import DatasetWriter

Rows = dict[str, torch.Tensor]
MEMORY = 20 << 20


def edges_of(graph: Any) -> tuple[torch.Tensor, torch.Tensor]:
    indptr = torch.from_numpy(np.array(graph.indptr))
    dst = torch.arange(graph.num_dst).repeat_interleave(indptr.diff())
    return torch.from_numpy(np.array(graph.indices, np.int64)), dst


def test_dgl_layers_equal_the_graph_in_memory(one_type: Path, rows: Rows) -> None:
    pytest.importorskip("gids.dgl", exc_type=ImportError)
    import dgl
    from dgl.nn import SAGEConv

    torch.manual_seed(0)
    layers = torch.nn.ModuleList([SAGEConv(100, 16, "mean"), SAGEConv(16, 4, "mean")]).eval()

    def layer(i: int, block: Any, h: torch.Tensor) -> torch.Tensor:
        edges: Any = ("csc", (block.indptr, block.indices, []))
        dgl_block = dgl.create_block(edges, num_src_nodes=block.num_src, num_dst_nodes=block.num_dst)
        found = layers[i](dgl_block, (h, h[: block.num_dst]))
        return torch.relu(found) if i == 0 else found

    whole = dgl.graph(edges_of(FeatureStore(one_type).graph()), num_nodes=1500)
    with torch.no_grad():
        expected = layers[1](whole, torch.relu(layers[0](whole, rows["paper"])))
    found = layerwise(layer, gids.open(one_type, memory=MEMORY), layer_count=2).values
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_pyg_layers_with_edge_features_equal_the_graph_in_memory(one_type: Path, rows: Rows) -> None:
    pytest.importorskip("torch_geometric")
    from torch_geometric.nn import GATv2Conv

    store = FeatureStore(one_type)
    edge_attr = torch.randn(store.graph().num_edges, 3)
    weights = one_type.with_name("w.gids")
    with DatasetWriter(weights) as writer:
        writer.add_nodes("_N", 1500)
        writer.write_graph(store.relations[0], store.graph().indptr, store.graph().indices)
        writer.write_table("edge", store.relations[0], "w", edge_attr)
    torch.manual_seed(0)
    convs = [GATv2Conv(a, b, edge_dim=3, add_self_loops=False).eval() for a, b in ((100, 16), (16, 4))]

    def layer(i: int, block: Any, h: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        return convs[i]((h, h[: block.num_dst]), torch.stack(block.coo()), edge_attr)

    edges, x = torch.stack(edges_of(store.graph())), rows["paper"]
    with torch.no_grad():
        for conv in convs:
            x = conv((x, x), edges, edge_attr)
    source = gids.open([one_type, weights], memory=MEMORY)
    found = layerwise(layer, source, layer_count=2, edge_tables=["_N._E._N.w"]).values
    torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-5)
