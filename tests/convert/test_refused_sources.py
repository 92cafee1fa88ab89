"""Sources that are refused: one line says what is wrong and what to do, and no file is left behind."""

import os
import pickle
import sys

import numpy as np
import pytest
import torch
from datasets import save_arrays
from reader_example import convert, needs_torch_2_6, refused, truncate, write_source
from user_sources import EDGES, FEAT, GAPS, MAG240M, SOURCES, E, N, csv, entry

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
scipy = pytest.importorskip("scipy.sparse")


class Payload:
    """Unpickling it makes a directory called executed."""

    def __reduce__(self):
        return (os.mkdir, ("executed",))


def npy_with(shape, data=b""):
    """A .npy file whose header claims a shape of float32."""

    def write(path):
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        with open(path, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.write(data)

    return write


def page_that_changed(path):
    values = np.random.default_rng(0).random(1000)
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"x": values}), path, **options)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def sparse_npz(path):
    parts = {"indices": np.array([0, 9]), "indptr": np.array([0, 1, 2]), "data": np.ones(2)}
    np.savez(path, format=np.array("csr"), shape=np.array([2, 4]), **parts)


def saved(**attributes):
    """A file of torch.save with a graph."""
    graph = {"x": torch.from_numpy(FEAT), "edge_index": torch.from_numpy(EDGES)}
    return lambda path: torch.save({k: v for k, v in (graph | attributes).items() if v is not None}, path)


UNPICKLED = [
    ("a.npy", lambda p: np.save(p, np.array([Payload()]), allow_pickle=True), "which need unpickling"),
    ("a.npz", lambda p: np.savez(p, feat=np.array([Payload()])), "which need unpickling"),
    ("d.pt", lambda p: torch.save(Payload(), p), "it asks for posix.mkdir"),
    ("d.pt", saved(transform=Payload()), "it asks for posix.mkdir"),
    ("d.pt", saved(names=np.array([{}])), "needs unpickling of other classes, which could run any code"),
    ("d.pkl", pickle.dumps(Payload()), "has an unknown format"),
]
DAMAGED = [
    ("d.pt", pickle.dumps(Payload()), "torch.save (1.6 or newer), or is truncated"),
    ("a.npy", npy_with((4, 3), bytes(47)), "is truncated"),
    ("a.npy", npy_with((1 << 60, 3)), "a length must be 0 to"),
    ("a.npy", b"\x93NUMPY\x01\x00\x10\x00not a dictionary", "a.npy cannot be read: Cannot parse header"),
    ("a.npy", FEAT.astype(">f4"), "is big-endian (>f4)"),
    ("a.npz", b"PK\x03\x04 and no more", "a.npz cannot be read: "),
    ("a.npz", sparse_npz, "has column 9; it must be from 0 to 3"),
    ("e.csv.gz", b"\x1f\x8b and no more", "e.csv.gz cannot be read"),
    ("t.arrow", b"ARROW1\0\0" + bytes(64), "t.arrow cannot be read"),
    ("nodes.parquet", page_that_changed, "nodes.parquet cannot be read: could not verify"),
    ("x.mat", b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM", "has MATLAB format 7.3"),
]
ARRAYS = [
    ("gone.npy", None, "no such file or directory: "),
    ("a.npy", np.array(["a"]), "is of type <U1, not numbers"),
    ("a.data", b"12345678", "for raw binary --dtype float32 --shape ROWS,DIM"),
    ("x.npz", lambda p: scipy.save_npz(p, scipy.eye(3, format="coo")), "in coo form; write it as CSR:"),
    ("x.pt", lambda p: torch.save(torch.from_numpy(EDGES), p), "may be edges or a table"),
    ("s", {}, "has no features and no graph"),
    ("s", {"feat.npy": FEAT, "pos.npy": FEAT[:9]}, "gives 9 '_N' nodes, but there are 60 ("),
    ("s", {"feat.npy": FEAT, "indices.npy": np.zeros(0, int)}, "has indices but lacks indptr"),
    ("s", {"feat.npy": FEAT, "edge_ids.npy": np.zeros(0, int)}, "has edge_ids but no indptr and indices"),
    ("s", {"feat.npy": FEAT, "adj_t.npy": np.ones((N, N))}, "with --skip adj_t: 'adj_t' of "),
    ("s", {"feat.npy": FEAT, "edge_list.npy": EDGES}, "which may be its edges: call this array edge_index"),
    ("s", {"edge_index.npy": EDGES, "indptr.npy": EDGES[0], "indices.npy": EDGES[1]}, "both edge_index and"),
    ("s", {"feat.npy": FEAT, "edge_index.npy": EDGES + 20}, "it must be from 0 to 59"),
    ("s", {"feat.npy": FEAT, "edge_index.npy": EDGES.T}, "edges must be whole numbers of shape (2, E)"),
    ("s", {"feat.npy": FEAT, "edge_index.npy": EDGES.astype("u8") - 80}, "is 18446744073709551584 near"),
    ("s", {"edge_index.npy": EDGES}, "the number of '_N' nodes is unknown"),
    ("s", {"feat.npy": FEAT, "label.npy": GAPS, "y.npy": GAPS}, "both 'label' and 'y'"),
    ("s", {"feat.npy": FEAT, "label.npy": np.zeros(5, int)}, "gives 60 '_N' nodes, but there are 5 ("),
    ("s", {"feat.npy": FEAT, "train_idx.npy": np.array([60])}, "train_idx[0] is 60"),
    ("s", {"feat.npy": FEAT, "train.npy": np.arange(20)}, "; call it train_idx if these are the ids of a"),
    ("s", {"feat.npy": FEAT, "val_mask.npy": FEAT[:, 0] > 0, "val_idx.npy": np.ones(2, int)}, "is a second"),
    ("s", {"feat.npy": FEAT, "train_mask.npy": np.arange(60) % 3}, "is 2 at node 2; a mask must be bool, or"),
    ("s", {"feat.npy": FEAT, "train_mask.npy": FEAT > 0}, "choose one of its 6 splits with --split-column"),
    ("s", {"feat.npy": FEAT, "train_idx.npy": FEAT[:, 0] > 0}, "is a mask: rename it to train_mask"),
    ("s", {"feat.npy": FEAT, "day.npy": np.zeros(60, "M8[s]")}, "leave it out with --skip day: 'day' of "),
    ("s", {"feat.npy": FEAT.tobytes(), "label.npy": GAPS}, "without the header of .npy"),
    ("s", {"edges": {"ab": {"edge_index.npy": EDGES}}}, "must be SOURCE.RELATION.DESTINATION"),
    ("s", {"nodes": {n: {"feat.npy": FEAT} for n in ("a", "%61")}}, "two files or directories are of 'a"),
]
EDGE_LISTS = [
    ("e.csv", "1,2,3,4\n", "has 4 columns; edges must have 2"),
    ("e.csv", "1.5,2\n", "has ids that are not whole numbers of int64; if the ends of edges are ids,"),
    ("e.csv", "# ids\n\nsrc,dst\n0,x\n", "'x' is no number ("),
    ("e.csv", "0,1\n# a comment\n2,3\n", "Expected 2 columns, got 1: # a comment; separate columns by"),
    ("e.csv", "0  1\n", "e.csv, line 1: separate columns by one tab, comma, semicolon or blank"),
    ("e.csv", "1,2\n-1,2\n", "is -1; it must be"),
    ("e.csv", "1,2\n5,2\n", "is 5; it must be from 0 to 4", "--num-nodes", "5"),
    ("e.csv", "1,2,1e400\n", "float64 of column 'weight' cannot hold '1e400'"),
    ("e.csv", "id_1,id_2\n1,2\n", "have the columns id_1, id_2; exactly one must be named src or source"),
    ("e.csv", "name,x\na,1\n", "if these are nodes, call the file nodes.csv, or give --id-column"),
    ("e.csv", "# nothing\n", "e.csv has no edges"),
    ("e.csv", "%%MatrixMarket matrix coordinate\n3 3 1\n1 2 .5\n", "is a matrix of Matrix Market"),
    ("e.npy", EDGES, "e.npy may be edges, npy: choose one with --from NAME"),
    ("e.npy", EDGES + 0.5, "edges must be whole numbers of shape", "--from", "edges"),
    ("d", {}, "must have one file edges.csv", "--from", "edges"),
    ("d", {"edges.csv": "0,9\n", "feat.npy": FEAT[:9]}, "it must be from 0 to 8"),
]
TWO = {"x": [1, 2]}
ONE_EDGE = {"src": [0], "dst": [1]}


def with_ids(ids, sources, destinations=None):
    """Tables of nodes with ids and of edges between them."""
    nodes = {"x": range(len(ids)), "id": ids}
    edges = {"src": sources, "dst": sources if destinations is None else destinations}
    return {"nodes.parquet": nodes, "edges.parquet": edges}


TABLES = [
    ("nodes.csv", {"a": [1]}, "--separate age: the tables have no column of that name", "--separate", "age"),
    ("nodes.csv", "id,x\na,1\nb\n", "nodes.csv cannot be read: CSV parse error: Row #3: Expected 2"),
    ("nodes.csv", "id,id\na,1\n", "has two columns 'id'"),
    ("nodes.csv", "id,x\na,9007199254740993\nb,0.5\n", "float64 of column 'x' cannot hold '900719"),
    ("nodes.csv", "id\na\n\nb\n", "nodes.csv, row 3: the node has no id"),
    ("n.parquet", {"id": ["a", None]}, "row 1 (the first is 0): the node has no id in column 'id'"),
    ("n.parquet", {"id": ["a", "b" * 1025]}, "has more than 1024 bytes"),
    ("n.parquet", {"feat": [[1], [2]], "columns": [[3], [4]], "a": [1, 2], "b": [1, 2]}, "'_N.columns':"),
    ("n.parquet", {"a": [1, 2], "label": pa.array([1 << 63, None], pa.uint64())}, "column 'label' of "),
    ("n.parquet", {"feat": [[1, 2], [1]]}, "row 1 (the first is 0): 'feat' is no list of 2, as others are;"),
    ("n.parquet", {"a": [1, None]}, "row 1 (the first is 0): 'a' is null; correct it, or leave it out with"),
    ("n.parquet", {"id": [1.5, 2.5], **TWO}, "is of type double: ids must be text or whole numbers"),
    ("n.parquet", {"id": [5, 9], "node_id": [0, 1]}, "has the columns id and node_id: choose the ids with"),
    ("n.parquet", {"id": [5, 9]}, "nodes have no column 'y'; they have 'id'", "--id-column=y"),
    ("n.parquet", {"id": [5]}, "paper=doi: there is no 'paper', only '_N'", "--id-column=paper=doi"),
    ("e.parquet", ONE_EDGE, "--src-column b=c: there is no 'b', only '_N._E._N'", "--src-column=b=c"),
    ("e.parquet", ONE_EDGE, "src, dst; exactly one must be named 'from'", "--src-column=from"),
    ("edges.parquet", TWO, "exactly one must be named src or source"),
    ("edges.parquet", {"src": [0.5], "dst": [1]}, "must be of whole numbers, but it is of type double, and"),
    ("s", with_ids(["a", "b"], [0, 1]), "is of type int64, but the ids of its nodes are text: make both"),
    ("s", with_ids([5, 9], ["5", "9"]), "is of type string, but the ids of its nodes are whole numbers"),
    ("s", with_ids([0, 1], [0, None]), "row 1 (the first is 0): 'src' is empty, which no '_N' node has"),
    ("s", with_ids([7, 0], [7, None]), "row 1 (the first is 0): 'src' is empty, which no '_N' node has"),
    ("s", with_ids([0, 1], [0, 2]), "'src' is 2, which no '_N' node has as its id"),
    ("s", {"nodes.parquet": TWO, "edges.parquet": {"src": ["a"], "dst": ["b"]}}, "'_N' nodes have no ids"),
    ("s", {"nodes.parquet": TWO, "edges.parquet": {"src": [0], "dst": [2]}}, "is 2; it must be from 0 to 1"),
    ("s", {"nodes.csv": TWO, "nodes.parquet": TWO}, "are both the table 'nodes'"),
    ("s", {"nodes": {"part-0.parquet": TWO, "part-1.csv": TWO}}, "the parts of a table must be of one kind"),
    ("s", {"nodes": {"part-0.parquet": TWO, "part-1.parquet": {"y": [1]}}}, "has different columns than"),
    ("s", {"nodes": {f"part-{i}-{n}.csv": TWO for i, n in ((0, "a"), (0, "b"))}}, "call them part-0,"),
]
BESIDE = {"feat.npy": FEAT, "edges.parquet": {"src": EDGES[0], "dst": EDGES[1]}}
TYPED = {"nodes": {"paper": {"feat.npy": FEAT}}, "edges.parquet": ONE_EDGE}
ARRAYS_AND_TABLES = [
    ("s", {**BESIDE, "nodes.csv": {"id": np.arange(N)[::-1]}}, "by which the arrays beside it number nodes"),
    ("s", {**BESIDE, "edge_index.npy": EDGES}, "has a second graph '_N._E._N': keep one"),
    ("s", {**BESIDE, "y.npy": GAPS, "nodes.csv": {"label": range(N)}}, "is a second array of labels: keep"),
    ("s", {**BESIDE, "e.parquet": lambda p: p.symlink_to("nowhere")}, "is a link to a file that is"),
    ("s", TYPED, "does not say which types of nodes its edges join"),
    ("s", {**BESIDE, "_delta_log": {"0.json": ""}}, "is of a Delta or Hudi table"),
    ("s", {"feat.npy": FEAT, "edges": {"day=2": {"0.parquet": ONE_EDGE}}}, "is in a folder"),
    ("s", {"raw": {"data.npz": ""}, "metadata.yaml": ""}, "may be ogb, graphbolt: choose one with --from"),
    ("s", {}, "unknown format 'hdf6'; choose gids, ogb, mag240m", "--from", "hdf6"),
]
MATRIX = torch.ones(N, N).to_sparse_coo()
GRAPHS = [
    ("d.pt", saved(edge_index=torch.from_numpy(EDGES + 1)), "is 60; it must be from 0 to 59"),
    ("d.pt", saved(edge_attr=torch.rand(E - 1, 2)), "has 299 rows; leave it out with --skip edge_attr"),
    ("d.pt", saved(y=torch.arange(N - 1)), "there are 60 (from 'x' of"),
    ("d.pt", saved(num_nodes=60.0), "d.pt is 60.0; it must be a whole number from 0"),
    ("d.pt", saved(adj_t=MATRIX), "'_N._E._N' must have one graph, edge_index or adj_t; leave"),
    ("d.pt", saved(x=None, edge_index=None, adj_t=torch.ones(N, N)), "of layout torch.strided; save"),
    ("d.pt", saved(edge_index=MATRIX, num_nodes=N), "not a dense tensor; save one of shape (2, E)"),
    ("d.pt", lambda p: torch.save(3, p), "holds a int, not a PyG graph; save data.to_dict()"),
    ("d.pt", saved(x=[[1.0], [2.0, 3.0]] * 30, num_nodes=N), "with --skip x: 'x' of '_N': a list"),
    ("d.pt", saved(x=torch.zeros(N, 2, dtype=torch.complex64)), "complex64[60, 2], which tables cannot hold"),
    ("d.pt", saved(x=torch.zeros(N, 2, 2).to_sparse(), num_nodes=N), "a 3-dimensional tensor of layout"),
    ("d.pt", saved(y=3), "--skip y: 'y' of '_N': a single number"),
    ("d.pt", saved(extra={"a": torch.zeros(N)}), "--skip extra: 'extra' of '_N': a dict"),
    ("d.pt", saved(A=torch.eye(N)), "a matrix of edges: save edge_index, (2, E), or SciPy's CSR matrix"),
    ("d.pt", lambda p: torch.save(({"x": MATRIX}, {"x": torch.tensor([0, 30])}), p), "holds several graphs"),
]
FILES = [*DAMAGED, *ARRAYS, *EDGE_LISTS, *TABLES, *ARRAYS_AND_TABLES, *GRAPHS]


@needs_torch_2_6
@pytest.mark.parametrize(
    ("name", "content", "message", "options"),
    [pytest.param(n, c, m, more, id=f"{n}: {m}") for n, c, m, *more in [*UNPICKLED, *FILES]],
)
def test_a_source_is_refused_in_one_line(tmp_path, capsys, monkeypatch, name, content, message, options):
    monkeypatch.chdir(tmp_path)  # where an object that is unpickled would leave its mark
    write_source(tmp_path / name, content)
    assert message in refused(capsys, tmp_path / name, tmp_path / "x.gids", *options)
    assert not (tmp_path / "executed").exists()


def data(**changes):
    """Other arrays in OGB's data.npz; None: without one."""

    def harm(root):
        arrays = dict(np.load(root / "raw/data.npz")) | changes
        np.savez_compressed(root / "raw/data.npz", **{k: v for k, v in arrays.items() if v is not None})

    return harm


def text(name, *rows):
    return lambda root: csv(root / "raw" / name, rows)


def meta(**changes):
    """Other fields of metadata.yaml."""

    def harm(root):
        yaml = pytest.importorskip("yaml")
        path = root / "metadata.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))

    return harm


def graph(**changes):
    return meta(graph={"nodes": [{"num": N}], "edges": [{"format": "csv", "path": "edges/e.csv"}], **changes})


def edge_file(path, **more):
    return graph(edges=[{"format": "csv", "path": path, **more}])


def feature(**more):
    return meta(feature_data=[entry("data/feat.npy", **{"domain": "node", "name": "x", **more})])


def train_set(parts):
    return meta(tasks=[{"name": "t", "train_set": parts}])


def variables(**changes):
    """Other variables in a MATLAB file."""

    def harm(path):
        io = pytest.importorskip("scipy.io")
        known = {k: v for k, v in io.loadmat(path).items() if not k.startswith("__")}
        io.savemat(path, known | changes)

    return harm


SEEDS, LABELS = entry("set/train_seeds.npy"), entry("set/train_labels.npy")
HARMED = [
    ("ogbn_papers100M", data(num_nodes_list=np.array([N, 3])), "is for 2 graphs"),
    ("ogbn_papers100M", data(num_edges_list=np.array([E + 1])), "has 300 edges, but num_edges_list gives"),
    ("ogbn_papers100M", data(edge_index=None), "lacks edge_index"),
    ("ogbn_papers100M", lambda r: truncate(r / "raw/data.npz"), "raw/data.npz cannot be read: "),
    ("ogbn_papers100M", lambda r: truncate(r / "split/time/test.csv.gz", 0.8), "test.csv.gz cannot be read"),
    ("ogbn_papers100M", lambda r: (r / "raw/x.jsonl").touch(), "is read as ogb, and 'raw/x.jsonl' would be"),
    ("ogbn_papers100M", lambda r: csv(r / "split/random/test", [1]), "keep one of them"),
    ("ogbn_products", text("edge", [1, 2], [3, 4], [5]), "Row #3: Expected 2 columns, got 1: 5"),
    ("ogbn_products", text("edge", [1, 2, 3]), "edges must be two columns of whole numbers"),
    ("ogbn_products", text("edge", ["dst", "src"], [1, 2]), "has the columns dst, src; the first must be"),
    ("ogbn_products", text("node-feat", *[[1e39]] * N), "float32 of column '0' cannot hold '1e+39'"),
    ("ogbn_products", text("node-feat", *[(1 << 63) + 1] * N), "cannot hold '9223372036854775809'"),
    ("ogbn_mag", text("triplet-type-list"), "lists no relation; is it truncated?"),
    ("mag240m", lambda r: torch.save({"paper": N}, r / MAG240M / "meta.pt"), "meta.pt is None; it must be a"),
    ("mag240m", lambda r: torch.save([1], r / MAG240M / "split_dict.pt"), "must be a dictionary of splits"),
    ("mag240m", lambda r: save_arrays(r / MAG240M / "processed/paper", node_label=GAPS / 2), "a class must"),
    ("igbh", lambda r: save_arrays(r / "processed/paper__topic__fos", edge_index=EDGES), "in IGB it must"),
    ("igbh", lambda r: (r / "processed/paper/node_feat.npy").write_bytes(b"x" * 4100), "not a multiple"),
    ("igbh", lambda r: None, "--labels 7: unknown; choose node_label_19, node_label_2K", "--labels", "7"),
    ("graphbolt", graph(nodes=[{"num": N + 1}]), "gives 60 '_N' nodes, but there are 61"),
    ("graphbolt", edge_file("gone.csv"), "gone.csv, which does not exist"),
    ("graphbolt", edge_file("x", type="a:b"), "must be SOURCE:RELATION:DESTINATION"),
    ("graphbolt", graph(edges="edges/e.csv"), "metadata.yaml cannot be read: "),
    ("graphbolt", feature(type="float32"), "is of type 'float32', but the graph has '_N'"),
    ("graphbolt", feature(domain="graph"), "with --skip x: feature 'x': its domain is 'graph'"),
    ("graphbolt", feature(format="parquet"), "format 'parquet'"),
    ("graphbolt", train_set([{"type": "user", "data": [SEEDS]}]), "is of type 'user', but the graph has"),
    ("graphbolt", train_set(2 * [{"data": [SEEDS]}]), "metadata.yaml lists the train_set of '_N' twice"),
    ("graphbolt", train_set([{"data": [SEEDS, LABELS]}]), "has two arrays 'seeds'"),
    (
        "graphbolt",
        train_set([{"data": [SEEDS, {**LABELS, "name": "label"}]}]),
        "--skip t: 'label' of task 't': only seeds and labels are read: call it so",
    ),
    ("graphbolt", lambda r: save_arrays(r / "set", test_labels=np.arange(3)), "have shape (3,); there are"),
    ("graphbolt", lambda r: save_arrays(r / "set", test_seeds=np.arange(57, 61)), "is 60; it must be from"),
    ("graphbolt", lambda r: (r / "metadata.yaml").write_text("graph_topology: {}"), "convert the directory"),
    ("reed.mat", variables(A=np.eye(3)), "must have one square sparse matrix; it has 0"),
    ("reed.mat", variables(local_info=np.zeros((N - 1, 7))), "it must have a row per node"),
    ("reed.mat", variables(label=np.arange(N) + 0.5), "a class must be a whole number"),
    ("reed.mat", truncate, "reed.mat cannot be read"),
]


@needs_torch_2_6
@pytest.mark.parametrize(
    ("name", "harm", "message", "options"),
    [pytest.param(n, harm, m, more, id=f"{n}: {m}") for n, harm, m, *more in HARMED],
)
def test_a_source_with_a_fault_is_refused_in_one_line(tmp_path, capsys, name, harm, message, options):
    SOURCES[name](tmp_path / name)
    harm(tmp_path / name)
    assert message in refused(capsys, tmp_path / name, tmp_path / "x.gids", *options)


def test_text_without_pyarrow_says_what_to_install(tmp_path, capsys, monkeypatch):
    edges = write_source(tmp_path / "edges.csv", ONE_EDGE)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.compute", None)
        error = refused(capsys, edges, tmp_path / "x.gids")
    assert "edges.csv needs pyarrow: pip install 'gids-loader[parquet]'" in error
    assert convert(edges, tmp_path / "x.gids").num_edges() == 1
