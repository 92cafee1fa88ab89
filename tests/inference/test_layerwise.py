"""Layer by layer from disk equals the graph in memory, within the given memory, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import random_in_edges
from inference_model import (
    MEMORY,
    RELATIONS,
    HeteroSage,
    Rows,
    Sage,
    check_memory,
    close,
    in_memory,
)

import gids
from gids import FeatureStore, FormatError, MemoryBudgetError
from gids.cuda import Device
from gids.inference import layerwise
from gids.store import verify
from gids.store.names import RELATION, Relation
from gids.write import DatasetWriter


def sage(*dims: int) -> list[Any]:
    return [Sage(a, b, seed) for seed, (a, b) in enumerate(pairwise(dims))]


def check_nothing_left(dataset: Path) -> None:
    """The dataset is as it was, and there is nothing beside it."""
    assert [p.name for p in dataset.parent.iterdir()] == [dataset.name]
    assert [p.name for p in (dataset / "tables").iterdir()] == ["_N.feat"]


def expected_of_one(path: Path, model: list[Any], rows: Rows) -> torch.Tensor:
    graph = FeatureStore(path).graph()
    return in_memory(model, {RELATION: graph}, {"_N": rows["paper"]})["_N"]


def test_one_type_equals_the_graph_in_memory(one_type: Path, rows: Rows) -> None:
    model = sage(100, 40, 16, 5)
    seen = []
    result = layerwise(
        model,
        gids.open(one_type, memory=MEMORY, window=0),
        progress=lambda *at: seen.append(at),
    )
    close(result.values, expected_of_one(one_type, model, rows))
    assert [layer["nodes"] for layer in result.layers] == [1500] * 3
    assert result.layers[0]["blocks"] > 1
    check_memory(result.layers, MEMORY)
    assert [at[1] for at in seen if at[0] == 2] == sorted(at[1] for at in seen if at[0] == 2)
    assert [at for at in seen if at[1] == at[2]] == [(0, 1500, 1500), (1, 1500, 1500), (2, 1500, 1500)]
    check_nothing_left(one_type)


def test_memory_bounds_the_blocks_and_the_cache(one_type: Path, rows: Rows) -> None:
    model = sage(100, 40, 5)
    expected = expected_of_one(one_type, model, rows)
    blocks = []
    for memory_bytes in (13 << 20, 19 << 20, 71 << 20):
        result = layerwise(model, gids.open(one_type, memory=memory_bytes))
        close(result.values, expected)
        check_memory(result.layers, memory_bytes)
        blocks.append(result.layers[0]["blocks"])
    assert blocks[0] > blocks[1] > blocks[2]
    with pytest.raises(MemoryBudgetError, match=r"'_N' node 40 and its in-neighbors are up to 301 rows"):
        layerwise(model, gids.open(one_type, memory=1000 << 10))
    with pytest.raises(MemoryBudgetError, match="too small for blocks of four rows"):
        layerwise(model, gids.open(one_type, memory=1000))
    check_nothing_left(one_type)


def test_several_types_equal_the_graphs_in_memory(several_types: Path, rows: Rows) -> None:
    """Edges of one relation have floats, of one integers, of the others nothing."""
    cites, _, has, written, _ = RELATIONS
    store = FeatureStore(several_types)
    graphs = {relation: store.graph(relation) for relation in RELATIONS}
    edges: dict[Relation, torch.Tensor] = {r: torch.rand(graphs[r].num_edges, 1) for r in (cites, written)}
    edges[has] = torch.randint(0, 9, (graphs[has].num_edges, 1))
    with DatasetWriter(several_types.with_name("w.gids")) as writer:
        for relation, values in edges.items():
            for ntype in (relation[0], relation[2]):
                writer.add_nodes(ntype, store.num_nodes(ntype))
            if (graph := graphs[relation]).edge_ids is None:  # else the number of edges is enough
                writer.write_graph(relation, graph.indptr, graph.indices, num_src=graph.num_src)
            writer.write_table("edge", relation, "w", values)
    source = gids.open([store, several_types.with_name("w.gids")], memory=MEMORY)
    dims = {t: r.shape[1] for t, r in rows.items()}
    model = [
        HeteroSage(dims, store.relations, 12, 1),
        HeteroSage({"paper": 12, "author": 12}, store.relations, 3, 2),  # nothing leads to the others
    ]
    given: list[Any] = []

    def layer(i: int, blocks: Any, h: Rows, of_edges: dict[Relation, torch.Tensor]) -> Rows:
        given.append((i, h.keys(), {relation: values.dtype for relation, values in of_edges.items()}))
        assert all(len(values) == blocks[r].num_edges for r, values in of_edges.items())
        return model[i](blocks, h, of_edges)

    tables = [".".join((*relation, "w")) for relation in edges]
    run = partial(layerwise, layer, source, layer_count=2, edge_tables=tables)
    expected, result = in_memory(model, graphs, rows, edges), run()
    assert result.values.keys() == expected.keys() == {"paper", "author"}
    for ntype, values in expected.items():
        close(result.values[ntype], values)
    check_memory(result.layers, MEMORY)
    dtypes = {item for _, _, of_call in given for item in of_call.items()}
    assert dtypes == {(cites, torch.float32), (written, torch.float32), (has, torch.int64)}
    some = {"paper": torch.tensor([40, 3, 1499, 3]), "author": torch.tensor([], dtype=torch.int64)}
    found = run(nodes=some).values
    close(found["paper"], expected["paper"][some["paper"]])
    assert found["author"].shape == (0, 3)
    given.clear()
    run(nodes={"author": torch.tensor([5])})
    assert [keys for i, keys, _ in given if i == 1] == [{"paper", "author"}], "one block, and none of papers"
    only = run(nodes={"author": None}, output=several_types.with_name("h.gids"))
    assert list(only.tables) == ["author"]
    close(only.tables["author"].read_rows(torch.arange(400)), expected["author"])
    with pytest.raises(ValueError, match="layer 0 returned no rows for 'field' nodes"):
        run(nodes={"field": None})


def test_only_needed_nodes_are_computed(one_type: Path, rows: Rows) -> None:
    model = sage(100, 40, 16, 5)
    expected = expected_of_one(one_type, model, rows)
    nodes = torch.tensor([1400, 2, 77, 2])  # 2 has no edges
    result = layerwise(model, gids.open(one_type, memory=MEMORY), nodes=nodes)
    close(result.values, expected[nodes])
    counts = [layer["nodes"] for layer in result.layers]
    assert counts[2] == 3
    assert 3 < counts[1] < counts[0] < 1500


def test_output_goes_to_a_new_dataset(one_type: Path, rows: Rows, tmp_path: Path) -> None:
    model = sage(100, 40, 5)
    expected = expected_of_one(one_type, model, rows)
    before = {p: p.read_bytes() for p in one_type.rglob("*") if p.is_file()}
    result = layerwise(model, gids.open(one_type, memory=MEMORY), output=tmp_path / "h.gids", key="h")
    assert result.values is None
    table = result.store.table("_N.h")
    assert result.tables == {"_N": table}
    close(table.read_rows(torch.arange(1500)), expected)
    assert list(verify(tmp_path / "h.gids")) == []
    assert {p: p.read_bytes() for p in one_type.rglob("*") if p.is_file()} == before
    with pytest.raises(FileExistsError, match=r"h\.gids already exists, and a dataset never changes"):
        layerwise(model, one_type, output=tmp_path / "h.gids")
    layerwise(model[:1], gids.open(one_type, memory=MEMORY), output=tmp_path / "half.gids")
    both = gids.open([one_type, tmp_path / "half.gids"], memory=MEMORY)
    onward = layerwise(model[1:], both, tables=["output"])  # the output is an input
    close(onward.values, expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h.gids", "half.gids", "one.gids"]


def test_a_function_gets_the_layer_index_and_ids_of_types_without_a_table(one_type: Path) -> None:
    embedding = torch.randn(1500, 8)

    def layer(i: int, block: Any, h: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        if i == 0:
            assert h.dtype == torch.int64
            return embedding[h[: block.num_dst]]
        return h[: block.num_dst] + i

    result = layerwise(layer, gids.open(one_type, memory=MEMORY), layer_count=3, tables=[])
    close(result.values, embedding + 3)


def test_rows_of_any_shape_and_of_integers(one_type: Path) -> None:
    def layer(i: int, block: Any, h: torch.Tensor) -> torch.Tensor:
        if i == 0:
            return torch.full((block.num_dst, 2, 3), float("nan"))
        assert bool(h.isnan().all())
        assert h.shape[1:] == (2, 3)
        return block.indptr.diff()

    output = one_type.with_name("degree.gids")
    result = layerwise(layer, gids.open(one_type, memory=MEMORY), layer_count=2, output=output)
    found = result.tables["_N"].read_rows(torch.arange(1500))
    assert found.dtype == torch.int64
    assert torch.equal(found, torch.from_numpy(np.diff(FeatureStore(one_type).graph().indptr)))


class Stop(Exception):
    pass


def failing(at: int) -> Callable[[int, Any, Any], torch.Tensor]:
    calls = []

    def layer(i: int, block: Any, h: torch.Tensor) -> torch.Tensor:
        calls.append(i)
        if len(calls) == at:
            raise Stop
        return h[: block.num_dst]

    return layer


@pytest.mark.parametrize("at", [1, 9])
def test_a_model_that_raises_leaves_nothing_behind(one_type: Path, at: int) -> None:
    source, output = gids.open(one_type, memory=9 << 20), one_type.with_name("h.gids")
    for options in ({}, {"output": output}):
        with pytest.raises(Stop):
            layerwise(failing(at), source, layer_count=3, **options)
    check_nothing_left(one_type)


def test_a_source_that_is_closed_meanwhile_raises(one_type: Path) -> None:
    source = gids.open(one_type, memory=9 << 20)
    with pytest.raises(ValueError, match="FeatureLoader is closed"):
        layerwise(failing(0), source, layer_count=2, progress=lambda i, *_: source.close() if i else None)


def grows(i: int, block: Any, h: torch.Tensor) -> torch.Tensor:
    return torch.zeros(block.num_dst, 3 if int(block.num_dst) % 2 else 4)


def test_layers_that_return_no_output_raise(one_type: Path) -> None:
    large = lambda i, b, h: torch.full((b.num_dst, 1), 1e30)  # noqa: E731
    for layer, error, message in (
        (lambda i, b, h: h, ValueError, r"layer 0 returned \[\d+, 100\] for \d+ '_N' nodes; it must"),
        (lambda i, b, h: h.sum(), ValueError, r"layer 0 returned \[\] for"),
        (lambda i, b, h: None, TypeError, "layer 0 returned NoneType for '_N' nodes; it must return a"),
        (grows, ValueError, r"layer 0 returned rows of shape \[\d\] for '_N' nodes, but "),
        (large, FormatError, r"rows of '_N': row 0, column 0: 1.*e\+30 does not fit in torch.float16"),
    ):
        with pytest.raises(error, match=message):
            layerwise(layer, gids.open(one_type, memory=14 << 20), layer_count=2, dtype=torch.float16)
    check_nothing_left(one_type)


def test_wrong_arguments_are_refused(one_type: Path) -> None:
    usual: dict[str, Any] = {"model": sage(100, 8, 2), "source": gids.open(one_type, memory=MEMORY)}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tables": ["none"]}, KeyError, r"no table 'none' in one\.gids"),
        ({"tables": "feat"}, TypeError, r"give a list, \['feat'\]"),
        ({"nodes": torch.tensor([1500])}, IndexError, "nodes of '_N' run from 1500 to 1500; ids"),
        ({"nodes": torch.tensor([1.0])}, TypeError, r"must be a tensor, int64\[n\]"),
        ({"nodes": torch.tensor([1]), "output": "h.gids"}, ValueError, "output= needs all nodes, but"),
        ({"model": 5}, TypeError, r"model must be a list of layers or a function \(got int\)"),
        ({"model": lambda i, b, h: h}, ValueError, "give layer_count as well"),
        ({"layer_count": 3}, ValueError, "layer_count=3, but the model has 2 layers: leave it out"),
        ({"output": "h", "key": ""}, FormatError, "key= must be a non-empty text, not ''"),
        ({"output": "h", "key": "é" * 40}, FormatError, r"'_N\..* would have 243 bytes, at most 200"),
        ({"device": "tpu"}, RuntimeError, "tpu"),
        ({"edge_tables": ["feat"]}, ValueError, r"_N\.feat is a table of nodes: pass it as tables="),
        ({"edge_tables": "w"}, TypeError, "give a list"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            layerwise(**usual | arguments)
    check_nothing_left(one_type)


def test_with_several_types_dictionaries_are_required(several_types: Path, tmp_path: Path) -> None:
    for name, tables in (("bare", ["feat"]), ("two", ["a", "b"])):
        with DatasetWriter(tmp_path / f"{name}.gids") as writer:
            for key in tables:
                writer.write_table("node", "_N", key, torch.zeros(4, 4))
            if name == "two":
                writer.write_graph(RELATION, torch.tensor([0, 1, 1, 1, 1]), torch.tensor([3]))
    for source, nodes, error, said in (
        (several_types, None, TypeError, "layer 0 returned Tensor; with several types it must return a dict"),
        (several_types, torch.tensor([1]), TypeError, r"nodes must be a dictionary.*\(got Tensor\)"),
        (several_types, {"venue": None}, KeyError, "nodes of type 'venue': no relation has it"),
        (tmp_path / "bare.gids", None, FormatError, "topology"),
        (tmp_path / "two.gids", None, ValueError, r"_N\.a and _N\.b are tables of the same '_N' nodes"),
    ):
        with pytest.raises(error, match=said):
            layerwise([lambda b, h: h["paper"]], source, nodes=nodes)


def test_a_model_in_training_mode_gives_a_warning(one_type: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.ModuleList(sage(100, 8))
    layerwise(model, gids.open(one_type, memory=MEMORY))
    assert "call model.eval() first" in caplog.text
    caplog.clear()
    layerwise(model.eval(), gids.open(one_type, memory=MEMORY))
    assert caplog.text == ""


def test_blocks_leave_room_for_the_buffers_of_a_device(
    tmp_path: Path, device: Device, cuda_is: Callable[[Device], None], caplog: Any
) -> None:
    cuda_is(device)
    rows = torch.randn(1000, 256)
    with DatasetWriter(tmp_path / "one.gids") as writer:
        writer.write_table("node", "_N", "feat", rows)
        writer.write_graph(RELATION, *random_in_edges(1000, 1000, 1))
    tuning = gids.Tuning(staging=2 << 20)
    source = gids.open(tmp_path / "one.gids", device_memory=4 << 20, window=2, tuning=tuning)
    result = layerwise([lambda block, h: h[: block.num_dst, :3]], source, device="cuda")
    assert torch.equal(result.values, rows[:, :3])
    assert "minibatch_rows" not in caplog.text, "an argument that layerwise does not have"


def add_neighbors(block: Any, h: Any) -> Any:
    """Each row plus those of its in-neighbors, for types that no relation leads to as well."""
    counts = {t: len(rows) for t, rows in h.items()} | {r[2]: each.num_dst for r, each in block.items()}
    out = {t: rows[: counts[t]].clone() for t, rows in h.items()}
    for relation, each in block.items():
        src, dst = each.coo()
        out[relation[2]].index_add_(0, dst, h[relation[0]][src])
    return out


def test_node_types_without_in_relations(tmp_path: Path) -> None:
    relations = [("user", "buys", "item"), ("item", "also", "item"), ("tag", "of", "item")]
    counts, rows = {"user": 12, "item": 9, "tag": 4}, {}
    path = tmp_path / "a.gids"
    with DatasetWriter(path) as writer:
        for ntype, count in counts.items():
            rows[ntype] = torch.arange(3.0 * count).view(count, 3)
            writer.write_table("node", ntype, "x", rows[ntype])
        for src, name, dst in relations:
            edges = random_in_edges(counts[src], counts[dst], 30)
            writer.write_graph((src, name, dst), *edges, num_src=counts[src])
    expected = rows
    for _ in range(2):
        before, expected = expected, {t: h.clone() for t, h in expected.items()}
        for graph in map(FeatureStore(path).graph, relations):
            dst = torch.repeat_interleave(torch.from_numpy(np.diff(graph.indptr)))
            sources = before[graph.relation[0]][torch.from_numpy(graph.indices.astype(np.int64))]
            expected[graph.relation[2]].index_add_(0, dst, sources)
    found = layerwise([add_neighbors] * 2, gids.open(path, memory=MEMORY)).values
    assert found.keys() == rows.keys()
    for ntype, values in expected.items():
        assert torch.equal(found[ntype], values)
    some = {"item": torch.tensor([7, 2])}
    one = layerwise([add_neighbors] * 2, gids.open(path, memory=MEMORY), nodes=some).values
    assert torch.equal(one["item"], expected["item"][[7, 2]])


def test_a_layer_that_misses_the_rows_of_a_type_is_told_why(tmp_path: Path) -> None:
    path = tmp_path / "a.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "user", "x", torch.ones(5, 2))
        writer.write_table("node", "item", "x", torch.ones(4, 2))
        writer.write_graph(("user", "buys", "item"), *random_in_edges(5, 4, 9), num_src=5)

    def only_items(block: Any, h: Any) -> Any:
        return {"item": h["user"][: block["user", "buys", "item"].num_dst]}

    with pytest.raises(KeyError, match="user") as error:
        layerwise([only_items] * 2, str(path))
    assert "no rows of type 'user', because the layer before returned none" in error.value.__notes__[0]
