"""Layers get the rows of their blocks' edges: layer by layer equals the graph in memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_model import (
    MEMORY,
    EdgeSage,
    Rows,
    check_memory,
    close,
    in_memory,
    uneven_in_edges,
)

import gids
from gids import FeatureStore, MemoryBudgetError
from gids.cuda import Device
from gids.inference import layerwise
from gids.store.names import RELATION
from gids.write import DatasetWriter


def write(path: Path, nodes: torch.Tensor, edges: Rows, *, with_ids: bool) -> FeatureStore:
    """One type. edges: tables of edges by key. with_ids: edges have ids."""
    indptr, indices = uneven_in_edges(len(nodes), len(nodes), 1)
    ids = np.random.default_rng(7).permutation(len(indices)) if with_ids else None
    with DatasetWriter(path) as writer:
        writer.write_table("node", "_N", "feat", nodes)
        writer.write_graph(RELATION, indptr, indices, edge_ids=ids)
        for key, rows in edges.items():
            writer.write_table("edge", RELATION, key, rows)
    return FeatureStore(path)


def edge_rows(dim: int, nodes: int = 1500) -> torch.Tensor:
    count = len(uneven_in_edges(nodes, nodes, 1)[1])
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(9))


def expected_of(store: FeatureStore, model: list[Any], nodes: torch.Tensor, edges: torch.Tensor) -> Any:
    return in_memory(model, {RELATION: store.graph()}, {"_N": nodes}, {RELATION: edges})["_N"]


def sage(edge_dim: int, *dims: int) -> list[Any]:
    return [EdgeSage(a, b, edge_dim, seed) for seed, (a, b) in enumerate(pairwise(dims))]


@pytest.mark.parametrize("with_ids", [False, True])
def test_one_type_equals_the_graph_in_memory(tmp_path: Path, rows: Rows, with_ids: bool) -> None:
    edges = edge_rows(6)
    store = write(tmp_path / "one.gids", rows["paper"], {"w": edges}, with_ids=with_ids)
    model = sage(6, 100, 16, 5)
    expected = expected_of(store, model, rows["paper"], edges)
    options: dict[str, Any] = {"memory": MEMORY, "window": 16}
    result = layerwise(model, gids.open(store, **options), edge_tables=["_N._E._N.w"])
    close(result.values, expected)
    assert result.layers[0]["blocks"] > 1
    check_memory(result.layers, MEMORY)
    nodes = torch.tensor([1400, 2, 77, 2])
    some = layerwise(model, gids.open(store, **options), edge_tables={"any": "_N._E._N.w"}, nodes=nodes)
    close(some.values, expected[nodes])


@pytest.mark.parametrize(
    ("key", "dtype", "feature_dtype"),
    [("w", torch.float32, torch.float16), ("half", torch.bfloat16, None)],
)
def test_every_layer_gets_the_same_rows(
    tmp_path: Path, rows: Rows, key: str, dtype: torch.dtype, feature_dtype: torch.dtype | None
) -> None:
    count = len(edge_rows(1))
    tables = {"w": edge_rows(3), "half": edge_rows(3).half()}
    store = write(tmp_path / "one.gids", rows["paper"], tables, with_ids=True)
    expected = tables[key].to(feature_dtype) if feature_dtype else tables[key]
    seen = []

    def layer(i: int, block: Any, h: torch.Tensor, of_edges: torch.Tensor) -> torch.Tensor:
        assert of_edges.dtype == expected.dtype
        assert torch.equal(of_edges, expected[block.edge_ids])
        assert h.dtype == [feature_dtype or torch.float32, torch.float16, torch.float64][i]
        seen.append(block.num_edges)
        return h[: block.num_dst].to([torch.float16, torch.float64, torch.float64][i])

    result = layerwise(
        layer,
        gids.open(store, memory=MEMORY),
        layer_count=3,
        edge_tables=[f"_N._E._N.{key}"],
        dtype=dtype,
        feature_dtype=feature_dtype,
    )
    assert sum(seen) == 3 * count
    assert torch.equal(result.values, rows["paper"].half().to(dtype).double())


def test_memory_counts_more_edges_than_nodes(tmp_path: Path) -> None:
    """One row per edge is read, even if all edges come from few nodes."""
    degrees = np.full(60, 100)
    degrees[40] = 5000
    nodes, edges = torch.randn(60, 2), torch.randn(int(degrees.sum()), 128)
    with DatasetWriter(tmp_path / "dense.gids") as writer:
        writer.write_table("node", "_N", "feat", nodes)
        indices = np.random.default_rng(0).integers(0, 60, len(edges))
        writer.write_graph(RELATION, np.concatenate([[0], degrees.cumsum()]), indices)
        writer.write_table("edge", RELATION, "w", edges)
    store, model = FeatureStore(tmp_path / "dense.gids"), sage(128, 2, 3)
    options: dict[str, Any] = {"edge_tables": ["_N._E._N.w"]}
    with pytest.raises(MemoryBudgetError, match="node 40 and its in-neighbors are up to 5001 rows"):
        layerwise(model, gids.open(store, memory=14 << 20), **options)
    result = layerwise(model, gids.open(store, memory=40 << 20), **options)
    close(result.values, expected_of(store, model, nodes, edges))
    check_memory(result.layers, 40 << 20)
    assert result.layers[0]["blocks"] > 1


def test_layers_get_rows_on_the_device(
    tmp_path: Path, device: Device, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(device)
    nodes, edges = torch.randn(300, 8), edge_rows(4, nodes=300)
    store = write(tmp_path / "one.gids", nodes, {"w": edges}, with_ids=True)
    wanted = torch.tensor([7, 200])
    expected = expected_of(store, sage(4, 8, 6, 3), nodes, edges)[wanted]
    found = layerwise(
        [layer.to(device.torch_device) for layer in sage(4, 8, 6, 3)],
        gids.open(
            store, device_memory=48 << 20, window=2, tuning=gids.Tuning(staging=1 << 20, queue_depth=32)
        ),
        edge_tables=["_N._E._N.w"],
        nodes=wanted,
        device="cuda",
    ).values
    close(found, expected)


def test_tables_that_do_not_fit_are_refused(tmp_path: Path, rows: Rows) -> None:
    edges = edge_rows(1)
    store = write(tmp_path / "one.gids", rows["paper"], {"w": edges, "v": edges}, with_ids=False)
    w, v = "_N._E._N.w", "_N._E._N.v"
    with pytest.raises(ValueError, match=r"_N\._E\._N\.w is a table of edges: pass it as edge_tables="):
        layerwise(sage(1, 100, 3), store, tables=[w])
    with pytest.raises(ValueError, match=r"are tables of the same '_N\._E\._N' edges"):
        layerwise(sage(1, 100, 3), store, edge_tables=[w, v])


def test_pyg_layers_equal_the_graph_in_memory(tmp_path: Path, rows: Rows) -> None:
    """As docs/inference.md shows, with features of edges."""
    pytest.importorskip("torch_geometric")
    from torch_geometric.nn import GATv2Conv

    edges = edge_rows(3)
    store = write(tmp_path / "one.gids", rows["paper"], {"w": edges}, with_ids=False)
    convs = [GATv2Conv(a, b, edge_dim=3, add_self_loops=False).eval() for a, b in ((100, 16), (16, 4))]

    def layer(i: int, block: Any, h: torch.Tensor, of_edges: torch.Tensor) -> torch.Tensor:
        return convs[i]((h, h[: block.num_dst]), torch.stack(block.coo()), of_edges)

    graph, x = store.graph(), rows["paper"]
    dst = torch.arange(graph.num_dst).repeat_interleave(torch.from_numpy(np.diff(graph.indptr)))
    ends = torch.stack([torch.from_numpy(graph.indices.astype(np.int64)), dst])
    with torch.no_grad():
        for conv in convs:
            x = conv((x, x), ends, edges)
    source = gids.open(store, memory=MEMORY)
    close(layerwise(layer, source, layer_count=2, edge_tables=["_N._E._N.w"]).values, x)


def test_a_node_type_may_have_the_name_of_a_relation(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "named.gids") as writer:
        for ntype in ("a", "a.to.a"):
            writer.write_table("node", ntype, "feat", torch.full((4, 2), len(ntype)))
            writer.write_graph((ntype, "to", "a"), torch.arange(5), torch.arange(4), num_src=4)
        writer.write_table("edge", ("a", "to", "a"), "w", torch.full((4, 2), 9))

    def layer(block: Any, h: Rows, of_edges: Any) -> Rows:
        for rows, expected in ((h["a"], 1), (h["a.to.a"], 6), (of_edges["a", "to", "a"], 9)):
            assert (rows == expected).all()
        return {"a": h["a"][: block["a", "to", "a"].num_dst]}

    source = gids.open(tmp_path / "named.gids", memory=MEMORY)
    layerwise([layer], source, edge_tables=["a.to.a.w"])
