"""gids.pyg.FeatureStore, GraphStore and NeighborSampler: PyG's interfaces, and PyG's own loaders on them."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyg_model import AUTHORS, CITES, PAPERS, WRITES, WRITTEN, assert_part_of
from torch_geometric.data import Data, HeteroData, TensorAttr
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import NegativeSampling
from torch_geometric.sampler import NeighborSampler as PygNeighborSampler

import gids
import gids.pyg
from gids.write import DatasetWriter
from gids.write.partition import partition


def both(path: Path) -> tuple[gids.pyg.FeatureStore, gids.pyg.GraphStore]:
    store = gids.FeatureStore(path)
    return gids.pyg.FeatureStore(store), gids.pyg.GraphStore(store)


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
        (-1, x[-1]),
        (torch.tensor(-2), x[-2]),
        (torch.tensor([-1, 3]), x[[-1, 3]]),
        (slice(-3, None), x[-3:]),
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
    assert [(a.group_name, a.attr_name) for a in features.get_all_tensor_attrs()] == [
        (None, "x"),
        (None, "y"),
    ]
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


@pytest.mark.parametrize("workers", [0, 2])
def test_pygs_node_loader_runs_on_the_stores(one: Data, one_path: Path, workers: int) -> None:
    data = both(one_path)
    sampler = gids.pyg.NeighborSampler(data, [4, 3])
    if workers:
        sampler.sample_from_nodes(next(iter([_input(torch.arange(3))])))  # threads that no fork inherits
    loader = NodeLoader(
        data, sampler, input_nodes=torch.arange(0, PAPERS, 3), batch_size=50, num_workers=workers
    )
    torch.manual_seed(0)
    batches = list(loader)
    assert len(batches) == 4
    for batch in batches:
        assert torch.equal(batch.x, one.x[batch.n_id])
        assert torch.equal(batch.y, one.y[batch.n_id])
        assert torch.equal(batch.n_id[batch.edge_index], one.edge_index[:, batch.e_id])
        assert len(batch.num_sampled_nodes) == 3
    torch.manual_seed(0)
    for batch, again in zip(batches, loader, strict=True):
        assert torch.equal(batch.n_id, again.n_id)


def _input(nodes: torch.Tensor) -> Any:
    from torch_geometric.sampler import NodeSamplerInput

    return NodeSamplerInput(None, nodes)


def test_pygs_node_loader_runs_on_stores_of_several_types(several: HeteroData, several_path: Path) -> None:
    data = both(several_path)
    sampler = gids.pyg.NeighborSampler(data, [4, 3])
    for batch in NodeLoader(data, sampler, input_nodes="author", batch_size=60):
        assert_part_of(batch, several)


def test_pygs_link_loader_runs_on_the_sampler(one: Data, several: HeteroData) -> None:
    sampler = gids.pyg.NeighborSampler(one, [3])
    pairs = one.edge_index[:, :100]
    loader = LinkLoader(one, sampler, pairs, neg_sampling=NegativeSampling("binary"), batch_size=20)
    for step, batch in enumerate(loader):
        found = batch.n_id[batch.edge_label_index[:, :20]]
        assert torch.equal(found, pairs[:, 20 * step : 20 * step + 20])
        assert batch.edge_label.tolist() == [1.0] * 20 + [0.0] * 20
    sampler = gids.pyg.NeighborSampler(several, [3, 2])
    pairs = several[WRITES].edge_index[:, :50]
    for batch in LinkLoader(several, sampler, (WRITES, pairs), batch_size=50):
        row, col = batch[WRITES].edge_label_index
        assert torch.equal(torch.stack([batch["author"].n_id[row], batch["paper"].n_id[col]]), pairs)


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


def test_stores_of_two_datasets_are_not_one_dataset(tmp_path: Path) -> None:
    path, stores = tmp_path / "a.gids", []
    for value in (0.0, 1.0):
        if path.exists():
            path.rename(tmp_path / "old.gids")
        with DatasetWriter(path) as writer:
            writer.write_table("node", "paper", "x", torch.full((6, 2), value))
            writer.write_graph(CITES, np.arange(7), np.arange(6), num_src=6)
        stores.append(gids.FeatureStore(path))
    features = gids.pyg.FeatureStore(stores[0])
    with pytest.raises(ValueError, match="are not of one gids dataset"):
        gids.pyg.NeighborLoader((features, gids.pyg.GraphStore(stores[1])), [2], batch_size=2)
    assert gids.pyg.GraphStore(stores[1]).get_edge_index(CITES, "csc")[0].tolist() == list(range(6))
    assert gids.pyg.GraphStore(stores[0]).get_edge_index(CITES, "csc")[0].tolist() == list(range(6))


class OwnSampler(gids.pyg.NeighborSampler):
    """A sampler of a user, with a constructor and attributes of its own."""

    def __init__(self, path: Path, count: int) -> None:
        self.count = count
        super().__init__(str(path), [count, count])
        self.name = "mine"


def test_stores_and_samplers_can_be_sent_to_processes(several_path: Path) -> None:
    features, graphs = pickle.loads(pickle.dumps(both(several_path)))
    assert len(features.get_tensor("author", "x", index=None)) == AUTHORS
    assert len(graphs.get_all_edge_attrs()) == 3
    sampler = pickle.loads(pickle.dumps(gids.pyg.NeighborSampler((features, graphs), [2])))
    assert repr(sampler.hops).startswith("HopSampler")
    own = pickle.loads(pickle.dumps(OwnSampler(several_path, 3)))
    assert (type(own), own.count, own.name, own.num_neighbors.values) == (OwnSampler, 3, "mine", [3, 3])


SPAWN = """
import sys
from functools import partial
import gids.pyg, torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import NodeSamplerInput

def sample(sampler, worker):
    sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(9)))

if __name__ == "__main__":
    store = gids.FeatureStore(sys.argv[1])
    on_disk = gids.pyg.FeatureStore(store), gids.pyg.GraphStore(store)
    in_memory = Data(x=torch.ones(9, 2), edge_index=torch.randint(9, (2, 40)))
    samplers = [gids.pyg.NeighborSampler(data, [3, 2]) for data in (on_disk, in_memory)]
    loader = NodeLoader(
        on_disk, samplers[0], torch.arange(9), batch_size=5, num_workers=1, multiprocessing_context="spawn",
        worker_init_fn=partial(sample, samplers[1]),
    )
    print("minibatches:", len([batch.x for batch in loader]))
"""


@pytest.mark.slow
def test_workers_that_are_spawned_leave_nothing_behind(one_path: Path, tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    run = subprocess.run([sys.executable, script, one_path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "minibatches: 2\n"
    assert "nanobind: leaked" not in run.stderr


def test_seeds_with_times_need_a_sampler_by_time(one: Data, several: HeteroData) -> None:
    times, sampler = torch.arange(PAPERS), gids.pyg.NeighborSampler(one, [3])
    said = r"seeds have times \(input_time= or edge_label_time=\).*give it time_attr=, or leave them out"
    typed, pairs = gids.pyg.NeighborSampler(several, [3]), (WRITES, several[WRITES].edge_index[:, :9])
    for loader in (
        NodeLoader(one, sampler, input_time=times),
        LinkLoader(one, sampler, one.edge_index[:, :9], edge_label_time=times[:9]),
        NodeLoader(several, typed, input_nodes="paper", input_time=times),
        LinkLoader(several, typed, pairs, edge_label_time=times[:9]),
    ):
        with pytest.raises(ValueError, match=said):
            next(iter(loader))
    assert len(list(NodeLoader(one, sampler, input_time=None, batch_size=PAPERS))) == 1


def test_every_argument_of_pygs_sampler_is_taken_or_refused(one: Data) -> None:
    """With its default it is taken; another value changes what is drawn, or nothing, or is refused."""
    ours = inspect.signature(gids.pyg.NeighborSampler.__init__).parameters
    pygs = inspect.signature(PygNeighborSampler.__init__).parameters
    assert list(pygs) == list(ours)[: len(pygs)]
    assert {n: p.default for n, p in pygs.items()} == {n: ours[n].default for n in pygs}
    data = Data(edge_index=one.edge_index[:, one.edge_index[1].argsort()], num_nodes=PAPERS)
    data.w, data.t = torch.rand(data.num_edges), torch.arange(data.num_edges)
    torch.manual_seed(0)
    nodes = _input(torch.arange(9))
    plain = gids.pyg.NeighborSampler(data, [3]).sample_from_nodes(nodes)
    changes: dict[str, tuple[Any, bool]] = {
        "subgraph_type": ("bidirectional", True),
        "replace": (True, True),
        "disjoint": (True, True),
        "weight_attr": ("w", True),
        "is_sorted": (True, False),
        "share_memory": (True, False),
    }
    for name, (value, changed) in changes.items():
        torch.manual_seed(0)
        found = gids.pyg.NeighborSampler(data, [3], **{name: value}).sample_from_nodes(nodes)
        assert (str(found) != str(plain)) == changed, name
    nodes.time = torch.full((9,), 50)
    for strategy in ("uniform", "last"):
        sampler = gids.pyg.NeighborSampler(data, [3], time_attr="t", temporal_strategy=strategy)
        found = sampler.sample_from_nodes(nodes)
        assert len(found.edge)
        assert (data.t[found.edge] <= 50).all()
    with pytest.warns(UserWarning, match="use subgraph_type='induced'"):
        sampler = gids.pyg.NeighborSampler(data, [3], directed=False)
    assert sampler.subgraph_type.value == "induced"
    for name, value, said in (
        ("subgraph_type", "both", r"subgraph_type='both' must be one of \('directional'"),
        ("temporal_strategy", "first", r"temporal_strategy='first' must be one of \('uniform', 'last'\)"),
        ("temporal_strategy", "last", "temporal_strategy='last' needs time_attr="),
        ("time_attr", "x", "time_attr='x': neither nodes nor edges of the data have an attribute"),
    ):
        with pytest.raises((ValueError, KeyError), match=said):
            gids.pyg.NeighborSampler(data, [3], **{name: value})
    for options in ({}, {"time_attr": "t"}):
        with pytest.raises(NotImplementedError, match="sample_direction='backward' is not supported, only"):
            gids.pyg.NeighborSampler(data, [3], sample_direction="backward", **options)
    with pytest.raises(ValueError, match=r"is_sorted=True: edge_index of .* is not sorted by destination"):
        gids.pyg.NeighborSampler(one, [3], is_sorted=True)


def test_wrong_arguments_of_stores_and_samplers_are_refused(
    one: Data, one_path: Path, several_path: Path
) -> None:
    features, graphs = both(several_path)
    get, sampler, put = features.get_tensor, gids.pyg.NeighborSampler, torch.zeros(3)
    wrong_mask, no_paper = torch.ones(3, dtype=torch.bool), torch.tensor([PAPERS])

    def leading(*ends: list[int]) -> Data:
        return Data(x=one.x, edge_index=torch.tensor(ends), num_nodes=PAPERS)

    for error, said, call in (
        (KeyError, r"no 'z' of 'paper' \(it has 'paper' 'x'", lambda: get("paper", "z", index=None)),
        (IndexError, "out of range", lambda: get("paper", "x", index=no_paper)),
        *((IndexError, "out of range", lambda n=n: get("paper", n, index=-PAPERS - 1)) for n in "xy"),
        *((IndexError, "the mask has shape", lambda n=n: get("paper", n, index=wrong_mask)) for n in "xy"),
        (TypeError, "cannot be changed", lambda: features.put_tensor(put, "paper", "x", index=None)),
        (TypeError, "cannot be changed", lambda: features.remove_tensor("paper", "x", index=None)),
        (TypeError, "cannot be changed", lambda: graphs.put_edge_index((put, put), EdgeAttr(CITES, "coo"))),
        (TypeError, "cannot be changed", lambda: graphs.remove_edge_index(CITES, "csc")),
        (KeyError, "no relation", lambda: graphs.get_edge_index(("paper", "x", "paper"), "csc")),
        (ValueError, "not of one gids dataset", lambda: sampler((features, both(one_path)[1]), [2])),
        (TypeError, "argument 'num_neighbours'", lambda: sampler(one, [2], num_neighbours=[2])),
        (TypeError, "give its edges as edge_index", lambda: sampler(Data(x=one.x, adj=one.edge_index), [2])),
        (ValueError, "has 2 node types and 3 edge", lambda: gids.pyg.FeatureStore(several_path, typed=False)),
        (IndexError, "ids run from 0", lambda: sampler(leading([0], [PAPERS]), [2])),
        (IndexError, "ids run from 0", lambda: sampler(leading([PAPERS], [0]), [2])),
        (IndexError, "seed", lambda: sampler(one, [2]).sample_from_nodes(_input(no_paper))),
    ):
        with pytest.raises(error, match=said):
            call()


def test_a_part_of_a_dataset_is_refused(one_path: Path, tmp_path: Path) -> None:
    partition(one_path, tmp_path / "parts", 2)
    for open_part in (
        gids.pyg.FeatureStore,
        gids.pyg.GraphStore,
        partial(gids.pyg.NeighborLoader, num_neighbors=[3], input_nodes=None),
    ):
        with pytest.raises(ValueError, match=r"part-000\.gids is part 0 of 2: .*open\(\)"):
            open_part(tmp_path / "parts/part-000.gids")
