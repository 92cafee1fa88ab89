"""PyG's saved graphs, read without torch_geometric. Only tensors are unpickled."""

import sys
import types

import numpy as np
import pytest
import torch
from reader_example import assert_dataset, convert, needs_torch_2_6, refused, truncate

pytestmark = needs_torch_2_6
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


@pytest.fixture
def pyg(monkeypatch, geometric):
    """PyG's classes, and that of torch_sparse, which need not be installed."""
    module = types.ModuleType("torch_sparse.tensor")
    module.SparseTensor = type("SparseTensor", (), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, "torch_sparse", types.ModuleType("torch_sparse"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(
        Data=geometric.data.Data, HeteroData=geometric.data.HeteroData, SparseTensor=module.SparseTensor
    )


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


@pytest.mark.parametrize("kind", ["data", "dictionary", "in-memory dataset", "older in-memory dataset"])
def test_homogeneous_graph(tmp_path, pyg, kind):
    saved = {
        "data": pyg.Data.from_dict(tensors()),
        "dictionary": tensors(),
        "in-memory dataset": (tensors(), None, pyg.Data),
        "older in-memory dataset": (pyg.Data.from_dict(tensors()), None),
    }[kind]
    torch.save(saved, tmp_path / "data.pt")
    assert_homogeneous(convert(tmp_path / "data.pt", tmp_path / "p.gids"))


def hetero(pyg):
    """A HeteroData and its edges. Institutions have num_nodes only, and topics nothing."""
    counts = {"paper": N, "author": 40, "institution": 5, "topic": 8}
    relations = {
        ("author", "writes", "paper"): 100,
        ("author", "at", "institution"): 50,
        ("paper", "on", "topic"): 60,
    }
    edges = {r: RNG.integers(0, [[counts[r[0]]], [counts[r[2]]]], (2, n)) for r, n in relations.items()}
    edges["paper", "on", "topic"][1, 0] = 7
    made = pyg.HeteroData()
    made["paper"].update({"x": torch.from_numpy(X), "y": torch.arange(N), "train_idx": torch.tensor([4, 2])})
    made["author"].x = torch.from_numpy(X[:40]).half()
    made["institution"].num_nodes = 5
    for relation, ends in edges.items():
        made[relation].edge_index = torch.from_numpy(ends)
    return made, edges


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_heterogeneous_graph(tmp_path, pyg, capsys, as_dictionary):
    graph, edges = hetero(pyg)
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


def adj_t(layout, values):
    """The edges as adj_t, whose rows are destinations, and their order in it."""
    sources, destinations = PAIRS
    order = np.lexsort((sources, destinations))
    indices = torch.from_numpy(np.stack([destinations, sources])[:, order])
    coo = torch.sparse_coo_tensor(indices, values, (N, N, *values.shape[1:]), check_invariants=True)
    if layout == torch.sparse_coo:
        return coo, order
    pointers = torch.from_numpy(np.concatenate([[0], np.cumsum(np.bincount(indices[0], minlength=N))]))
    return torch.sparse_csr_tensor(pointers, indices[1].contiguous(), values, coo.shape), order


sparse = pytest.mark.filterwarnings("ignore:Sparse")


@sparse
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_adjacency_between_types_with_weights_of_several_columns_and_a_table(tmp_path, layout):
    weights = torch.rand(PAIRS.shape[1], 2)
    adjacency, order = adj_t(layout, weights)
    relation, share = ("a", "to", "b"), torch.rand(PAIRS.shape[1])
    torch.save({"a": {}, "b": {}, relation: {"adj_t": adjacency, "share": share}}, tmp_path / "a.pt")
    tables = {"a.to.b.weight": weights, "a.to.b.share": share}
    store = convert(tmp_path / "a.pt", tmp_path / "p.gids")
    assert_dataset(store, tables=tables, edges={relation: PAIRS[:, order]})


@sparse
def test_repeated_entries_of_a_sparse_tensor_stay_separate_edges(tmp_path):
    indices, weights = torch.tensor([[2, 0, 2], [1, 0, 1]]), torch.tensor([0.5, 2, 4])
    adjacency = torch.sparse_coo_tensor(indices, weights, (3, 3), check_invariants=True)
    torch.save({"adj_t": adjacency}, tmp_path / "a.pt")
    store = convert(tmp_path / "a.pt", tmp_path / "p.gids")
    edges = {HOMOGENEOUS: indices.numpy()[::-1]}
    assert_dataset(store, tables={"_N._E._N.weight": weights}, edges=edges)


@sparse
def test_files_of_to_sparse_tensor(tmp_path, geometric):
    edge_index = torch.from_numpy(PAIRS[:, RNG.permutation(PAIRS.shape[1])])
    weight, share = torch.rand(PAIRS.shape[1]), torch.rand(PAIRS.shape[1])
    data = geometric.data.Data(x=torch.from_numpy(X), edge_index=edge_index, edge_weight=weight, share=share)
    by_edge = {pair: i for i, pair in enumerate(zip(*edge_index.tolist(), strict=True))}
    for layout in (torch.sparse_coo, torch.sparse_csr):
        data_t = geometric.transforms.ToSparseTensor(layout=layout)(data.clone())
        torch.save(data_t.to_dict(), tmp_path / "a.pt")
        store = convert(tmp_path / "a.pt", tmp_path / f"{layout}.gids")
        graph = store.graph()
        assert graph.edge_ids is None
        destinations = np.repeat(np.arange(N), np.diff(graph.indptr)).tolist()
        ids = [by_edge[pair] for pair in zip(graph.indices.tolist(), destinations, strict=True)]
        for key, values in (("weight", weight), ("share", share)):
            assert torch.equal(store.table(key).read_rows(range(len(ids))), values[ids])


def adjacency():
    return adj_t(torch.sparse_csr, torch.ones(PAIRS.shape[1]))[0]


@sparse
@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda: tensors(adj_t=adjacency()), "'_N._E._N' must have one graph, edge_index or adj_t; leave"),
        (lambda: {"adj": torch.ones(N, N).to_sparse_coo()}, "save adj.t() as adj_t"),
        (lambda: {"adj_t": torch.ones(N, N)}, "is a 2-dimensional tensor of layout torch.strided; save edge"),
        (lambda: {"adj_t": torch.ones(N, N).to_sparse_csc()}, "of layout torch.sparse_csc; save edge_index"),
        (lambda: {"adj_t": torch.ones(3, N, N).to_sparse_coo()}, "is a 3-dimensional tensor of layout"),
    ],
)
def test_adjacency_that_is_not_one_graph_is_refused(tmp_path, capsys, saved, message):
    torch.save(saved(), tmp_path / "d.pt")
    assert message in refused(capsys, tmp_path / "d.pt", tmp_path / "x.gids")


@sparse
def test_skipped_arrays_are_not_read(tmp_path):
    more = {"adj_t": adjacency(), "stray": torch.ones(N + 3, 2)}
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


@pytest.mark.few(6)
@pytest.mark.parametrize("edge_count", [200, N, N - 1])
@pytest.mark.parametrize("counted_by", ["x", "num_nodes", "the edges"])
@pytest.mark.parametrize("seed", range(4))
def test_node_and_edge_attributes_are_separated_as_in_pyg(tmp_path, geometric, edge_count, counted_by, seed):
    rng = np.random.default_rng(seed)
    edges = torch.from_numpy(rng.integers(0, N, (2, edge_count)))
    edges[0, 0] = N - 1
    data = geometric.data.Data(edge_index=edges)
    if counted_by == "x":
        data.x = torch.from_numpy(X)
    elif counted_by == "num_nodes":
        data.num_nodes = N
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


@pytest.mark.parametrize("split_labels", [False, True])
def test_random_link_split(tmp_path, capsys, geometric, split_labels):
    edges = torch.from_numpy(EDGES)
    data = geometric.data.Data(
        x=torch.from_numpy(X), edge_index=edges, weight=torch.rand(E), time=torch.arange(E)
    )
    transform = geometric.transforms.RandomLinkSplit(is_undirected=False, split_labels=split_labels)
    for name, split in zip(("train", "val", "test"), transform(data), strict=True):
        torch.save(split, tmp_path / f"{name}.pt")
        left_out = [k for k in split.to_dict() if "edge_label" in k]
        assert len(left_out) == (2 if not split_labels else 4)
        skips = [word for left in left_out for word in ("--skip", left)]
        error = refused(capsys, tmp_path / f"{name}.pt", tmp_path / "x.gids")
        assert f"leave it out with {' '.join(skips)}: " in error
        assert error.count("a dataset has no pairs to predict") == len(left_out)
        store = convert(tmp_path / f"{name}.pt", tmp_path / f"{name}.gids", *skips)
        assert_dataset(
            store,
            tables={"_N.x": X, "_N._E._N.weight": split.weight, "_N._E._N.time": split.time},
            edges={HOMOGENEOUS: split.edge_index.numpy()},
        )
    torch.save(transform(data), tmp_path / "all.pt")
    error = refused(capsys, tmp_path / "all.pt", tmp_path / "x.gids")
    assert "all.pt holds 3 graphs; save one graph per file" in error


class Hostile:
    """Unpickling it leaves a mark."""

    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda pyg: tensors(adj_t=pyg.SparseTensor()), "it asks for torch_sparse.tensor.SparseTensor"),
        (lambda pyg: tensors(transform=Hostile()), "it asks for print"),
        (
            lambda pyg: tensors(names=np.array([{}])),
            "needs unpickling of other classes, which could run any code",
        ),
        (lambda pyg: (tensors(), {"x": torch.tensor([0, 30, 60])}, pyg.Data), "holds several graphs in one"),
        (
            lambda pyg: tensors(edge_index=torch.from_numpy(EDGES + 1)),
            f"is {N}; it must be from 0 to {N - 1}",
        ),
        (
            lambda pyg: tensors(edge_attr=torch.rand(E - 1, 2)),
            f"{E} edges, but its table 'edge_attr' has {E - 1} rows; leave it out with --skip edge_attr",
        ),
        (lambda pyg: tensors(y=torch.arange(N - 1)), "there are 60 (from 'x' of"),
        (lambda pyg: tensors(num_nodes=60.0), "d.pt is 60.0; it must be a whole number from 0"),
        (lambda pyg: tensors(num_nodes=np.int64(61)), "there are 61 (from num_nodes of '_N')"),
        (lambda pyg: tensors(num_nodes=np.array(61)), "there are 61 (from num_nodes of '_N')"),
        (
            lambda pyg: {"_N": {"x": torch.zeros(9), "num_nodes": [8]}, ("_N", "_E", "_N"): {}},
            "there are 8 (from",
        ),
    ],
)
def test_bad_file_prints_one_line(tmp_path, pyg, capsys, saved, message):
    torch.save(saved(pyg), tmp_path / "d.pt")
    assert message in refused(capsys, tmp_path / "d.pt", tmp_path / "x.gids")
    assert "unpickled" not in capsys.readouterr().out


def test_a_truncated_file_is_refused(tmp_path, capsys):
    torch.save(tensors(), tmp_path / "d.pt")
    truncate(tmp_path / "d.pt")
    assert "or is truncated" in refused(capsys, tmp_path / "d.pt", tmp_path / "x.gids")


def test_old_torch_reads_dictionaries_only(tmp_path, pyg, capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    torch.save(tensors(), tmp_path / "d.pt")
    assert_homogeneous(convert(tmp_path / "d.pt", tmp_path / "p.gids"))
    torch.save(pyg.Data.from_dict(tensors()), tmp_path / "d.pt")
    error = refused(capsys, tmp_path / "d.pt", tmp_path / "x.gids")
    assert "torch 2.6 or newer reads NumPy arrays and PyG's own classes" in error


@needs_torch_2_6
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("x", [[1.0], [2.0, 3.0]] * (N // 2), "a list"),
        ("x", torch.zeros(N, 2, dtype=torch.complex64), "complex64[60, 2], which tables cannot hold"),
        ("x", torch.zeros(N, 2, 2).to_sparse(), "a 3-dimensional tensor of layout torch.sparse_coo"),
        ("y", {"a": torch.zeros(N)}, "a dict"),
        ("y", 3, "a single number"),
        ("train_mask", "all", "a str"),
        ("extra", {"a": torch.zeros(N)}, "a dict"),
        ("edge_index", torch.ones(N, N).to_sparse(), "not a dense tensor; save one of shape (2, E)"),
        ("A", torch.eye(N), "a matrix of edges: save edge_index, (2, E), or SciPy's CSR matrix as adj.npz"),
        ("matrix", torch.eye(N).to_sparse(), "a matrix of edges: save edge_index"),
        ("edge_label_index", torch.zeros(2, 3, dtype=torch.int64), "a dataset has no pairs to predict"),
    ],
)
def test_what_training_may_need_is_converted_or_skipped_by_name(tmp_path, capsys, name, value, said):
    torch.save(tensors(**{name: value}, num_nodes=N), tmp_path / "d.pt")
    error = refused(capsys, tmp_path / "d.pt", tmp_path / "x.gids")
    assert f"leave it out with --skip {name}: {name!r} of " in error
    assert said in error
    convert(tmp_path / "d.pt", tmp_path / "x.gids", "--skip", name)


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
