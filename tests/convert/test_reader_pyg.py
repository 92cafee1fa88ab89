"""PyG's saved graphs, read without torch_geometric. Only tensors are unpickled."""

import sys
import types
import zipfile

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
        labels={"_N": np.arange(N) % 5},
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


def matrix(key, layout, values, pairs=PAIRS):
    """The edges as adj (rows are sources) or adj_t (rows are destinations), and their order in it."""
    lines, columns = pairs if key == "adj" else pairs[::-1]
    order = np.lexsort((lines, columns) if layout == torch.sparse_csc else (columns, lines))
    indices = torch.from_numpy(np.stack([lines, columns])[:, order])
    coo = torch.sparse_coo_tensor(indices, values, (N, N, *values.shape[1:]), check_invariants=True)
    if layout == torch.sparse_coo:
        return coo, order
    by_row = layout == torch.sparse_csr
    counts = np.bincount(indices[0 if by_row else 1], minlength=N)
    pointers = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))
    make = torch.sparse_csr_tensor if by_row else torch.sparse_csc_tensor
    others = indices[1 if by_row else 0].contiguous()
    return make(pointers, others, values, coo.shape, check_invariants=True), order


sparse = pytest.mark.filterwarnings("ignore:Sparse")


@sparse
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_adjacency_between_types_with_weights_of_several_columns_and_a_table(tmp_path, layout):
    weights = torch.rand(PAIRS.shape[1], 2)
    adjacency, order = matrix("adj_t", layout, weights)
    relation, share = ("a", "to", "b"), torch.rand(PAIRS.shape[1])
    torch.save({"a": {}, "b": {}, relation: {"adj_t": adjacency, "share": share}}, tmp_path / "a.pt")
    tables = {"a.to.b.weight": weights, "a.to.b.share": share}
    store = convert(tmp_path / "a.pt", tmp_path / "p.gids")
    assert_dataset(store, tables=tables, edges={relation: PAIRS[:, order]})


@sparse
def test_repeated_entries_of_a_sparse_tensor_stay_separate_edges(tmp_path):
    indices, weights = torch.tensor([[2, 0, 2], [1, 0, 1]]), torch.tensor([0.5, 2, 4])
    adjacency = torch.sparse_coo_tensor(indices, weights, (3, 3), check_invariants=True)
    torch.save({"adj": adjacency}, tmp_path / "a.pt")
    store = convert(tmp_path / "a.pt", tmp_path / "p.gids")
    edges = {HOMOGENEOUS: indices.numpy()}
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


def adjacency_in(layout):
    return matrix("adj_t", layout, torch.ones(PAIRS.shape[1]))[0]


@sparse
@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            lambda: tensors(adj_t=adjacency_in(torch.sparse_csr)),
            "'_N._E._N' has the graphs edge_index and adj_t: leave one out with --skip adj_t",
        ),
        (
            lambda: {"x": torch.from_numpy(X), "adj": torch.ones(N, N)},
            "'adj' of '_N._E._N' is a 2-dimensional tensor of layout torch.strided; save one matrix as",
        ),
        (
            lambda: {"adj": torch.ones(N, N).to_sparse_bsr((2, 2))},
            "is a 2-dimensional tensor of layout torch.sparse_bsr; save one matrix as adj.to_sparse_csr()",
        ),
        (
            lambda: {"adj": torch.ones(3, N, N).to_sparse_coo()},
            "is a 3-dimensional tensor of layout torch.sparse_coo",
        ),
        (
            lambda: {"adj_t": adjacency_in(torch.sparse_csc), "edge_attr": torch.ones(PAIRS.shape[1])},
            "'edge_attr' of '_N._E._N' has an unknown order",
        ),
    ],
)
def test_adjacency_that_is_not_one_graph_is_refused(tmp_path, capsys, saved, message):
    torch.save(saved(), tmp_path / "d.pt")
    assert message in refused(capsys, tmp_path / "d.pt", tmp_path / "x.gids")


@sparse
def test_skipped_arrays_are_not_read(tmp_path):
    more = {"adj_t": adjacency_in(torch.sparse_csr), "stray": torch.ones(N + 3, 2)}
    torch.save(tensors(**more), tmp_path / "d.pt")
    assert_homogeneous(convert(tmp_path / "d.pt", tmp_path / "p.gids", "--skip", "adj_t", "--skip", "stray"))


def test_attribute_that_is_not_a_tensor_is_left_out_with_a_warning(tmp_path, capsys):
    torch.save(tensors(name="cora", size=torch.tensor(5)), tmp_path / "d.pt")
    assert_homogeneous(convert(tmp_path / "d.pt", tmp_path / "p.gids", "--quiet"))
    assert "left out 'name' of '_N': a str" in capsys.readouterr().err


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
@pytest.mark.parametrize("key", ["edge_label", "link"])
def test_random_link_split(tmp_path, capsys, geometric, split_labels, key):
    edges = torch.from_numpy(EDGES)
    data = geometric.data.Data(
        x=torch.from_numpy(X), edge_index=edges, weight=torch.rand(E), time=torch.arange(E)
    )
    transform = geometric.transforms.RandomLinkSplit(is_undirected=False, key=key, split_labels=split_labels)
    for name, split in zip(("train", "val", "test"), transform(data), strict=True):
        torch.save(split, tmp_path / f"{name}.pt")
        store = convert(tmp_path / f"{name}.pt", tmp_path / f"{name}.gids")
        assert_dataset(
            store,
            tables={"_N.x": X, "_N._E._N.weight": split.weight, "_N._E._N.time": split.time},
            edges={HOMOGENEOUS: split.edge_index.numpy()},
        )
        said = capsys.readouterr().err
        left_out = [k for k in split.to_dict() if key in k and k != "edge_index"]
        assert len(left_out) == (2 if not split_labels else 4)
        for left in left_out:
            assert f"left out {left!r} of ('_N', '_E', '_N'): a dataset has no pairs to predict" in said
    torch.save(transform(data), tmp_path / "all.pt")
    error = refused(capsys, tmp_path / "all.pt", tmp_path / "x.gids")
    assert "all.pt holds 3 graphs; save one graph per file" in error


@pytest.mark.parametrize("by_name", [False, True])
def test_random_link_split_of_several_types(tmp_path, capsys, geometric, monkeypatch, by_name):
    def by_attribute(self, _):
        return getattr, (type(self), self.name)

    if by_name:  # as early releases of Python 3.11 write a member of an Enum
        monkeypatch.setattr("torch_geometric.data.graph_store.EdgeLayout.__reduce_ex__", by_attribute)
        monkeypatch.setattr("torch_geometric.data.storage.AttrType.__reduce_ex__", by_attribute)
    data, relation = geometric.data.HeteroData(), ("author", "writes", "paper")
    data["paper"].x, data["author"].num_nodes = torch.from_numpy(X), 40
    data[relation].edge_index = torch.from_numpy(RNG.integers(0, 40, (2, 200)))
    split, *_ = geometric.transforms.RandomLinkSplit(edge_types=[relation])(data)
    torch.save(split, tmp_path / "d.pt")
    store, edges = convert(tmp_path / "d.pt", tmp_path / "d.gids"), split[relation].edge_index.numpy()
    assert_dataset(store, tables={"paper.x": X}, edges={relation: edges})
    assert "left out 'edge_label_index' of ('author', 'writes', 'paper')" in capsys.readouterr().err


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
        (lambda pyg: torch.zeros(3), "holds a Tensor, not a PyG graph"),
        (
            lambda pyg: tensors(edge_index=torch.from_numpy(EDGES + 1)),
            f"is {N}; it must be from 0 to {N - 1}",
        ),
        (lambda pyg: tensors(edge_index=torch.rand(2, 5)), "edges must be whole numbers"),
        (lambda pyg: tensors(edge_index=torch.zeros(5, 2).long()), "whole numbers of shape (2, E)"),
        (
            lambda pyg: tensors(edge_attr=torch.rand(E - 1, 2)),
            f"{E} edges, but its table 'edge_attr' has {E - 1} rows; leave it out with --skip edge_attr",
        ),
        (lambda pyg: tensors(y=torch.arange(N - 1)), "there are 60 (from 'x' of"),
        (lambda pyg: tensors(stray=torch.ones(N + 3, 2)), "; leave it out with --skip stray"),
        (lambda pyg: tensors(num_nodes=N + 1), f"gives {N} '_N' nodes"),
    ],
)
def test_bad_file_prints_one_line(tmp_path, pyg, capsys, saved, message):
    torch.save(saved(pyg), tmp_path / "d.pt")
    assert message in refused(capsys, tmp_path / "d.pt", tmp_path / "x.gids")
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.parametrize(("is_new", "fault"), [(True, "or is truncated"), (False, "d.pt cannot be read")])
def test_truncated_files_and_those_of_torch_before_1_6(tmp_path, pyg, capsys, is_new, fault):
    path, new = tmp_path / "d.pt", {"_use_new_zipfile_serialization": is_new}
    torch.save(pyg.Data.from_dict(tensors()), path, **new)
    assert_homogeneous(convert(path, tmp_path / "p.gids", "--from", "pyg"))
    truncate(path)
    assert fault in refused(capsys, path, tmp_path / "x.gids", "--from", "pyg")
    torch.save(tensors(transform=Hostile()), path, **new)
    assert "could run any code" in refused(capsys, path, tmp_path / "x.gids", "--from", "pyg")
    assert "unpickled" not in capsys.readouterr().out


def test_file_of_a_big_endian_machine(tmp_path):
    """Its numbers have their bytes swapped, as its member "byteorder" says."""
    saved = {"x": torch.from_numpy(X).double(), "edge_index": torch.from_numpy(EDGES)}
    torch.save(saved, tmp_path / "little.pt")
    with zipfile.ZipFile(tmp_path / "little.pt") as little, zipfile.ZipFile(tmp_path / "d.pt", "w") as big:
        for name in little.namelist():
            data = b"big" if name.endswith("/byteorder") else little.read(name)
            if "/data/" in name:
                data = np.frombuffer(data, np.int64).byteswap().tobytes()
            big.writestr(name, data)
    store = convert(tmp_path / "d.pt", tmp_path / "d.gids")
    assert_dataset(store, tables={"_N.x": X.astype(np.float64)}, edges={HOMOGENEOUS: EDGES})


def test_old_torch_reads_dictionaries_only(tmp_path, pyg, capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    torch.save(tensors(), tmp_path / "d.pt")
    assert_homogeneous(convert(tmp_path / "d.pt", tmp_path / "p.gids"))
    torch.save(pyg.Data.from_dict(tensors()), tmp_path / "d.pt")
    error = refused(capsys, tmp_path / "d.pt", tmp_path / "x.gids")
    assert "torch 2.6 or newer reads NumPy arrays and PyG's own classes" in error


def test_mask_with_several_columns(tmp_path, capsys):
    masks = torch.rand(N, 10) < 0.3
    torch.save(tensors(train_mask=masks), tmp_path / "d.pt")
    error = refused(capsys, tmp_path / "d.pt", tmp_path / "x.gids")
    assert f"has shape ({N}, 10): choose one of its 10 splits with --split-column, 0 to 9" in error
    store = convert(tmp_path / "d.pt", tmp_path / "x.gids", "--split-column", "4")
    assert store.splits["_N"]["train"].tolist() == torch.nonzero(masks[:, 4])[:, 0].tolist()
