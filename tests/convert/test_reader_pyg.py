"""PyG's saved graphs, read without torch_geometric. Only tensors are unpickled."""

import numpy as np
import pytest
import torch
from reader_example import assert_dataset, convert, needs_torch_2_6, refused

pytestmark = [needs_torch_2_6, pytest.mark.filterwarnings("ignore:Sparse")]
RNG = np.random.default_rng(6)
N, E = 60, 300
EDGES = RNG.integers(0, N, (2, E))
X = RNG.standard_normal((N, 9), np.float32)
ATTR = RNG.standard_normal((E, 3), np.float32)
MASK = np.arange(N) % 3 == 0
HOMOGENEOUS = ("_N", "_E", "_N")


@pytest.fixture(scope="module")
def geometric():
    return pytest.importorskip("torch_geometric")


def tensors(**more):
    return {
        "x": torch.from_numpy(X),
        "edge_index": torch.from_numpy(EDGES),
        "edge_attr": torch.from_numpy(ATTR),
        "y": torch.arange(N).reshape(N, 1) % 5,
        "train_mask": torch.from_numpy(MASK),
        **more,
    }


def assert_homogeneous(store):
    assert_dataset(
        store,
        tables={"_N.x": X, "_N._E._N.edge_attr": ATTR},
        edges={HOMOGENEOUS: EDGES},
        labels={"_N": np.arange(N).reshape(N, 1) % 5},
        splits={"_N": {"train": np.flatnonzero(MASK)}},
    )


@pytest.mark.parametrize("kind", ["data", "sparse features", "in-memory dataset", "older in-memory dataset"])
def test_homogeneous_graph(tmp_path, geometric, kind):
    Data = geometric.data.Data
    saved = {
        "data": Data.from_dict(tensors()),
        "sparse features": tensors(x=torch.from_numpy(X).to_sparse()),
        "in-memory dataset": (tensors(), None, Data),
        "older in-memory dataset": (Data.from_dict(tensors()), None),
    }[kind]
    torch.save(saved, tmp_path / "data.pt")
    assert_homogeneous(convert(tmp_path / "data.pt", tmp_path / "p.gids"))


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_heterogeneous_graph(tmp_path, geometric, capsys, as_dictionary):
    """Institutions have num_nodes only, and topics nothing."""
    counts = {"paper": N, "author": 40, "institution": 5, "topic": 8}
    relations = {
        ("author", "writes", "paper"): 100,
        ("author", "at", "institution"): 50,
        ("paper", "on", "topic"): 60,
    }
    edges = {r: RNG.integers(0, [[counts[r[0]]], [counts[r[2]]]], (2, n)) for r, n in relations.items()}
    edges["paper", "on", "topic"][1, 0] = 7
    graph = geometric.data.HeteroData()
    graph["paper"].update({"x": torch.from_numpy(X), "y": torch.arange(N), "train_idx": torch.tensor([4, 2])})
    graph["author"].x = torch.from_numpy(X[:40]).half()
    graph["institution"].num_nodes = 5
    for relation, ends in edges.items():
        graph[relation].edge_index = torch.from_numpy(ends)
    torch.save(graph.to_dict() if as_dictionary else graph, tmp_path / "hetero.pt")
    store = convert(tmp_path / "hetero.pt", tmp_path / "p.gids", "--from", "pyg")
    assert_dataset(
        store,
        tables={"paper.x": X, "author.x": X[:40].astype(np.float16)},
        edges=edges,
        labels={"paper": np.arange(N)},
        splits={"paper": {"train": [4, 2]}},
    )
    assert (store.num_nodes("institution"), store.num_nodes("topic")) == (5, 8)
    assert "'topic' nodes have no features and no count: assuming 8 nodes" in capsys.readouterr().err


PAIRS = np.unique(EDGES, axis=1)  # sparse tensors have an entry once


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_files_of_to_sparse_tensor(tmp_path, geometric, layout):
    """adj_t, whose rows are destinations, with weights, and a table in the order of its entries."""
    edge_index = torch.from_numpy(PAIRS[:, RNG.permutation(PAIRS.shape[1])])
    weight, share = torch.rand(PAIRS.shape[1]), torch.rand(PAIRS.shape[1])
    data = geometric.data.Data(x=torch.from_numpy(X), edge_index=edge_index, edge_weight=weight, share=share)
    by_edge = {pair: i for i, pair in enumerate(zip(*edge_index.tolist(), strict=True))}
    torch.save(geometric.transforms.ToSparseTensor(layout=layout)(data).to_dict(), tmp_path / "a.pt")
    store = convert(tmp_path / "a.pt", tmp_path / "a.gids")
    graph = store.graph()
    assert graph.edge_ids is None
    destinations = np.repeat(np.arange(N), np.diff(graph.indptr)).tolist()
    ids = [by_edge[pair] for pair in zip(graph.indices.tolist(), destinations, strict=True)]
    for key, values in (("weight", weight), ("share", share)):
        assert torch.equal(store.table(key).read_rows(range(len(ids))), values[ids])


def test_repeated_entries_of_a_sparse_tensor_stay_separate_edges(tmp_path):
    """Here of types, with weights of two columns."""
    indices, weights = torch.tensor([[2, 0, 2], [1, 0, 1]]), torch.tensor([[0.5, 1], [2, 3], [4, 5]])
    adjacency = torch.sparse_coo_tensor(indices, weights, (3, 3, 2), check_invariants=True)
    torch.save({"a": {}, "b": {}, ("a", "to", "b"): {"adj_t": adjacency}}, tmp_path / "a.pt")
    edges = {("a", "to", "b"): indices.numpy()[::-1]}
    store = convert(tmp_path / "a.pt", tmp_path / "p.gids")
    assert_dataset(store, tables={"a.to.b.weight": weights}, edges=edges)


def test_skipped_arrays_are_not_read(tmp_path):
    more = {"adj_t": torch.ones(N, N).to_sparse_csr(), "stray": torch.ones(N + 3, 2)}
    torch.save(tensors(**more), tmp_path / "d.pt")
    assert_homogeneous(convert(tmp_path / "d.pt", tmp_path / "p.gids", "--skip", "adj_t", "--skip", "stray"))


NAMES = [
    "weight",
    "edge_kind",
    "node_kind",
    "time",
    "y",
    "feat",
    "pos",
    "edge_weight",
    "train_mask",
    "is_edge",
]


@pytest.mark.parametrize("edge_count", [200, N, N - 1])
@pytest.mark.parametrize("counted_by", ["x", "the edges"])
def test_node_and_edge_attributes_are_separated_as_in_pyg(tmp_path, geometric, edge_count, counted_by):
    rng = np.random.default_rng(edge_count)
    edges = torch.from_numpy(rng.integers(0, N, (2, edge_count)))
    edges[0, 0] = N - 1
    data = geometric.data.Data(edge_index=edges)
    if counted_by == "x":
        data.x = torch.from_numpy(X)
    for name in rng.permutation(NAMES).tolist():
        if name in ("feat", "pos", "node_kind", "edge_weight"):  # tell PyG a count
            count = edge_count if name == "edge_weight" else N
        else:
            count = int(rng.choice([N, edge_count]))
        values = rng.random((count, 2)) if name != "train_mask" else rng.random(count) < 0.5
        data[name] = torch.from_numpy(values.astype(bool if name == "train_mask" else np.float32))
    torch.save(data, tmp_path / "d.pt")
    store = convert(tmp_path / "d.pt", tmp_path / "d.gids", "--split", "none")
    found = {"node": set(), "edge": {"edge_index"}}
    for table in store.tables.values():
        found[table.kind].add(table.key)
        assert torch.equal(table.read_rows(range(table.row_count)), data[table.key])
    found["node"] |= {"y"} if store.labels else set()
    found["node"] |= {"train_mask"} if store.splits else set()
    assert found == {"node": set(data.node_attrs()), "edge": set(data.edge_attrs())}


def test_random_link_split(tmp_path, capsys, geometric):
    edges = torch.from_numpy(EDGES)
    data = geometric.data.Data(x=torch.from_numpy(X), edge_index=edges, time=torch.arange(E))
    transform = geometric.transforms.RandomLinkSplit(is_undirected=False)
    parts = transform(data)
    torch.save(parts[0], tmp_path / "train.pt")
    skips = ("--skip", "edge_label", "--skip", "edge_label_index")
    error = refused(capsys, tmp_path / "train.pt", tmp_path / "x.gids")
    assert f"leave it out with {' '.join(skips)}: " in error
    assert error.count("a dataset has no pairs to predict") == 2
    assert_dataset(
        convert(tmp_path / "train.pt", tmp_path / "x.gids", *skips),
        tables={"_N.x": X, "_N._E._N.time": parts[0].time},
        edges={HOMOGENEOUS: parts[0].edge_index.numpy()},
    )
    torch.save(parts, tmp_path / "all.pt")
    error = refused(capsys, tmp_path / "all.pt", tmp_path / "all.gids")
    assert "all.pt holds 3 graphs; save one graph per file" in error


def test_numbers_and_text_are_left_out_with_a_warning(tmp_path, capsys):
    more = {"name": "cora", "classes": 7, "words": ["a"] * N, "colors": {"a": 1}, "nothing": None}
    torch.save(tensors(**more), tmp_path / "d.pt")
    assert_homogeneous(convert(tmp_path / "d.pt", tmp_path / "p.gids", "--quiet"))
    left_out = [line.split("'")[1] for line in capsys.readouterr().err.splitlines()]
    assert left_out == ["name", "classes", "words", "colors"]


def test_attributes_n_id_e_id_and_batch_keep_their_values_in_minibatches(tmp_path, geometric):
    import gids
    from gids.pyg import NeighborLoader

    more = {"n_id": torch.arange(N) + 100, "e_id": torch.arange(E) + 7, "batch": torch.arange(N) % 3}
    torch.save(tensors(**more), tmp_path / "d.pt")
    convert(tmp_path / "d.pt", tmp_path / "p.gids", "--quiet")
    with gids.open(tmp_path / "p.gids", memory="20MB") as source:
        minibatch = next(iter(NeighborLoader(source, [-1], torch.arange(N), batch_size=9)))
    nodes = minibatch.n_id - 100
    assert torch.equal(minibatch.batch, nodes % 3)
    assert np.array_equal(minibatch.x, X[nodes])
    edges = EDGES[:, minibatch.e_id - 7]
    assert np.array_equal(nodes[minibatch.edge_index], edges)
    assert minibatch.y.shape == (len(nodes), 1)
