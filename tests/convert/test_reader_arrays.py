"""Arrays in .npy and .npz files, in a directory, and in raw binary."""

import re

import numpy as np
import pytest
import torch
from datasets import save_arrays
from reader_example import assert_dataset, assert_table, convert, refused

RNG = np.random.default_rng(42)
FEAT = RNG.standard_normal((50, 7), np.float32)
EDGES = RNG.integers(0, 50, (2, 300))
HOMOGENEOUS = ("_N", "_E", "_N")


def in_edges(edges):
    """indptr, indices and edge_ids of a directory of arrays."""
    order = np.argsort(edges[1], kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(edges[1], minlength=50))])
    return {"indptr": indptr, "indices": edges[0, order], "edge_ids": order}


@pytest.mark.parametrize(
    ("name", "table"), [("paper.emb", "paper.emb"), ("emb", "_N.emb"), ("a.b.emb", "a.b.emb")]
)
@pytest.mark.parametrize("shape", [["--shape=50,7"], ["--shape=-1,7"], ["--shape", "-1,7"]])
def test_raw_binary_and_the_name_of_its_table(tmp_path, name, table, shape):
    FEAT.tofile(tmp_path / "x.bin")
    options = ("--dtype", "float32", "--table", name, *shape)
    assert_table(convert(tmp_path / "x.bin", tmp_path / "x.gids", *options), table, FEAT)


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_tables_are_stored_in_fewer_bits_and_rounding_is_reported(tmp_path, capsys, name):
    if name == "x.npz":  # a stream, which is read twice for the scales of columns
        np.savez_compressed(
            tmp_path / name, feat=FEAT, pos=FEAT[:, :3].astype(np.float64), year=np.arange(50)
        )
        options = ["--dtype", "int8", "--scale", "column", "--scale", "_N.pos=row"]
    else:
        np.save(tmp_path / name, FEAT.T.copy().T)  # Fortran order
        options = ["--dtype", "feat=int8", "--scale", "feat=column"]
    store = convert(tmp_path / name, tmp_path / "x.gids", *options)
    told = [line for line in capsys.readouterr().err.splitlines() if "stored as" in line]
    assert re.match(
        r"_N\.feat: float32 stored as int8 with a scale per column, largest error [\d.]+ \(bound ", told[0]
    )
    scales = np.abs(FEAT).max(0) / np.float32(127)
    assert_table(store, "_N.feat", np.rint(FEAT / scales) * scales)
    if name == "x.npz":
        assert told[1].startswith("_N.pos: float64 stored as int8 with a scale per row, ")
        assert len(told) == 2
        assert store.table("year").stored_dtype == torch.int8  # whole numbers, as they are
        assert store.table("year").scale is None
        assert store.table("year").read_rows(range(50)).tolist() == list(range(50))


def test_sparse_duplicates_add_up_and_weights_are_kept(tmp_path):
    np.savez(
        tmp_path / "x.npz",
        attr_data=np.array([1.0, 2.0, 4.0]),
        attr_indices=np.array([1, 1, 0]),
        attr_indptr=np.array([0, 2, 3]),
        attr_shape=np.array([2, 2]),
        adj_data=np.array([0.5, 2.0]),
        adj_indices=np.array([1, 0]),
        adj_indptr=np.array([0, 1, 2]),
        adj_shape=np.array([2, 2]),
    )
    tables = {"_N.feat": np.array([[0.0, 3], [4, 0]]), "_N._E._N.weight": np.array([0.5, 2])}
    store = convert(tmp_path / "x.npz", tmp_path / "x.gids")
    assert_dataset(store, tables=tables, edges={HOMOGENEOUS: ([0, 1], [1, 0])})


def test_a_directory(tmp_path):
    source = tmp_path / "s"
    arrays = {
        "feat": FEAT,
        "pos": FEAT.astype(np.float64)[:, :2],
        **in_edges(EDGES),
        "labels": np.arange(50) % 3,
        "train_idx": np.arange(9, dtype=np.int32),
        "test_idx": np.array([40]),
    }
    save_arrays(source, **arrays)
    (source / "README.txt").write_text("hello")
    assert_dataset(
        convert(source, tmp_path / "s.gids"),
        tables={"_N.feat": FEAT, "_N.pos": arrays["pos"]},
        edges={HOMOGENEOUS: EDGES},
        labels={"_N": np.arange(50) % 3},
        splits={"_N": {"train": range(9), "test": [40]}},
    )


def test_a_heterogeneous_directory(tmp_path):
    """Authors without features write papers; papers cite papers; an odd type name."""
    writes = np.stack([RNG.integers(0, 80, 99), RNG.integers(0, 50, 99)])
    weight = RNG.standard_normal((99, 2))
    arrays = {
        "nodes/paper/feat": FEAT,
        "nodes/paper/label": np.arange(50),
        "nodes/author/num_nodes": np.array(80),
        "nodes/a%2Fb/feat": FEAT[:5],
        "edges/author.writes.paper/edge_index": writes,
        "edges/author.writes.paper/weight": weight,
        **{f"edges/paper.cites.paper/{name}": values for name, values in in_edges(EDGES).items()},
    }
    save_arrays(tmp_path / "s", **arrays)
    store = convert(tmp_path / "s", tmp_path / "s.gids", "--page-bytes", "512", "--split", "none")
    assert store.num_nodes("author") == 80
    assert_dataset(
        store,
        tables={"paper.feat": FEAT, "a/b.feat": FEAT[:5], "author.writes.paper.weight": weight},
        edges={("author", "writes", "paper"): writes, ("paper", "cites", "paper"): EDGES},
        labels={"paper": np.arange(50)},
    )
    assert np.array_equal(store.out_degrees("author"), np.bincount(writes[0], minlength=80))
    skips = ("--skip", "nodes/paper/feat.npy", "--skip", "edges/author.writes.paper")
    store = convert(tmp_path / "s", tmp_path / "t.gids", *skips)
    assert (list(store.tables), store.relations) == (["a/b.feat"], [("paper", "cites", "paper")])


BAD_DIRECTORIES = {
    "lengths differ": ({"feat": FEAT, "pos": FEAT[:9]}, "'pos' of"),
    "indices alone": ({"feat": FEAT, "indices": np.zeros(0, int)}, "has indices but lacks indptr"),
    "a matrix": ({"feat": FEAT, "adj_t": np.ones((50, 50))}, "with --skip adj_t: 'adj_t' of "),
    "edges of another name": (
        {"feat": FEAT, "edge_list": EDGES},
        "table '_N._E._N.list', which may be its edges: call this array edge_index, or leave it out",
    ),
    "two topologies": (
        {"feat": FEAT, "indptr": np.zeros(51, int), "indices": np.zeros(0, int), "edge_index": EDGES},
        "both edge_index and indptr",
    ),
    "edges of nodes that are not": ({"feat": FEAT, "edge_index": EDGES + 20}, "it must be from 0 to 49"),
    "edges and no nodes": ({"edge_index": EDGES}, "the number of '_N' nodes is unknown"),
    "two labels": ({"feat": FEAT, "label": np.ones(50), "y": np.ones(50)}, "both 'label' and 'y'"),
    "a split of others": ({"feat": FEAT, "train_idx": np.array([50])}, "train_idx[0] is 50"),
    "a split without _idx": (
        {"feat": FEAT, "train": np.arange(20)},
        "; call it train_idx if these are the ids of a split, or else --skip train",
    ),
    "mask and idx": (
        {"feat": FEAT, "val_mask": np.ones(50, bool), "val_idx": np.ones(2, int)},
        "is a second val split",
    ),
    "a strange relation": (
        {"nodes/a/feat": FEAT, "edges/ab/edge_index": EDGES},
        "must be SOURCE.RELATION.DESTINATION",
    ),
    "dates": ({"feat": FEAT, "day": np.zeros(50, "M8[s]")}, "leave it out with --skip day: 'day' of "),
    "a mask of text": ({"feat": FEAT, "test_mask": np.array(["a"] * 50)}, "with --skip test_mask: "),
    "a short mask": (
        {"feat": FEAT, "train_mask": np.ones(45, bool)},
        "gives 45 '_N' nodes, but there are 50 (from 'feat' of ",
    ),
    "a mask of numbers": (
        {"feat": FEAT, "train_mask": np.arange(50) % 3},
        "is 2 at node 2; a mask must be bool, or 0 and 1",
    ),
    "ids that are a mask": (
        {"feat": FEAT, "train_idx": np.ones(50, bool)},
        "is a mask: rename it to train_mask",
    ),
}
BAD_FILES = {
    "text": (np.array(["a"]), "is of type <U1, not numbers"),
    "no header": (b"\x93NUMPY\x01\x00\x10\x00not a dictionary", "cannot be read"),
    "raw": (b"12345678", "for raw binary --dtype float32 --shape ROWS,DIM"),
    "broken zip": (b"PK\x03\x04 and no more", "cannot be read"),
    "nothing": (None, "no such file or directory: "),
    "empty directory": ({}, "has no features and no graph"),
}
BAD = BAD_FILES | BAD_DIRECTORIES


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_invalid_source_prints_one_line_and_leaves_nothing(tmp_path, capsys, content, message):
    source = tmp_path / "bad.npy"
    if isinstance(content, dict):
        source.mkdir()
        save_arrays(source, **content)
    elif isinstance(content, bytes):
        source.write_bytes(content)
    elif content is not None:
        np.save(source, content)
    assert message in refused(capsys, source, tmp_path / "x.gids")


@pytest.mark.parametrize("dtype", ["bool", "uint16", "uint32", "uint64"])
def test_one_of_several_splits(tmp_path, capsys, dtype):
    masks = (np.arange(150).reshape(50, 3) % 7 == 0).astype(dtype)
    save_arrays(tmp_path / "s", feat=FEAT, train_mask=masks, val_mask=masks[:, :1], label=np.zeros(50))
    store = convert(tmp_path / "s", tmp_path / "x.gids", "--split-column", "2")
    assert store.splits["_N"]["train"].tolist() == np.flatnonzero(masks[:, 2]).tolist()
    assert store.splits["_N"]["val"].tolist() == np.flatnonzero(masks[:, 0]).tolist()
    assert "at random" not in capsys.readouterr().err


@pytest.mark.parametrize("values", [FEAT.astype(object), FEAT + 1j])
def test_features_that_cannot_be_stored_are_refused_or_reported(tmp_path, capsys, values):
    np.savez(tmp_path / "x.npz", feat=values, edge_index=EDGES, num_nodes=50)
    error = refused(capsys, tmp_path / "x.npz", tmp_path / "x.gids", "--quiet")
    assert "correct it, or leave it out with --skip feat: 'feat' of x.npz: " in error
    store = convert(tmp_path / "x.npz", tmp_path / "x.gids", "--skip", "feat", "--quiet")
    assert (list(store.tables), store.num_edges()) == ([], 300)
    np.savez(tmp_path / "y.npz", emb=FEAT.astype(object), edge_index=EDGES)
    assert "num_nodes.npy; 'emb' of y.npz: Python objects" in refused(
        capsys, tmp_path / "y.npz", tmp_path / "y.gids", "--quiet"
    )


def test_all_links_of_hdf5_are_followed(tmp_path, capsys):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["feat"] = FEAT
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"], file["pos"] = np.arange(50) % 3, h5py.ExternalLink("f.h5", "/feat")
        file["y"], file["soft"], file["group/above"] = file["a"], h5py.SoftLink("/a"), file["/"]
        file["gone"] = h5py.ExternalLink("gone.h5", "/feat")
    error = refused(capsys, tmp_path / "a.h5", tmp_path / "a.gids")
    assert "--skip gone: 'gone' of a.h5: a link to nothing" in error
    store = convert(tmp_path / "a.h5", tmp_path / "a.gids", "--skip", "gone")
    assert sorted(store.tables) == ["_N.a", "_N.pos", "_N.soft"]
    assert store.labels["_N"].tolist() == store.table("a").read_rows(range(50)).tolist()
    assert_table(store, "_N.pos", FEAT)


def test_members_of_hdf5_without_rows_are_left_out_or_must_be_skipped(tmp_path, capsys):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.update({"edge_index": EDGES, "num_nodes": 50, "title": "cora", "names": ["a"] * 50, "rate": 0.5})
        file["group/feat"] = FEAT
        file["none"] = h5py.Empty("f4")
        file["pairs"] = np.zeros(50, [("a", "f4"), ("b", "i4")])
    error = refused(capsys, tmp_path / "a.h5", tmp_path / "x.gids")
    assert "leave it out with --skip pairs: 'pairs' of a.h5: of type [('a', '<f4'), " in error
    store = convert(tmp_path / "a.h5", tmp_path / "a.gids", "--skip", "pairs", "--quiet")
    assert store.num_nodes() == 50
    assert_table(store, "_N.group/feat", FEAT)
    assert [line.split("'")[1] for line in capsys.readouterr().err.splitlines()] == [
        "names",
        "none",
        "rate",
        "title",
    ]


def test_files_of_a_directory_that_training_needs_are_read_or_named(tmp_path, capsys):
    save_arrays(tmp_path / "s", edge_index=EDGES, num_nodes=np.array(50))
    (tmp_path / "s/feat.npy").write_bytes(FEAT.tobytes())
    error = refused(capsys, tmp_path / "s", tmp_path / "x.gids")
    assert "--skip feat: 'feat' of " in error
    assert "without the header of .npy" in error
    (tmp_path / "s/other.h5").touch()  # which cannot be read
    convert(tmp_path / "s", tmp_path / "x.gids", "--skip", "other.h5", "--skip", "feat")
    (tmp_path / "s/other.h5").unlink()
    (tmp_path / "s/feat.npy").unlink()
    torch.save({"train_idx": torch.arange(5), "val_mask": [True] * 50, "n": 3}, tmp_path / "s/splits.pt")
    torch.save(torch.from_numpy(FEAT), tmp_path / "s/feat.pt")
    store = convert(tmp_path / "s", tmp_path / "s.gids")
    assert_table(store, "_N.feat", FEAT)
    assert {k: len(v) for k, v in store.splits["_N"].items()} == {"train": 5, "val": 50}


def test_a_tensor_of_the_shape_of_edges_must_have_a_name(tmp_path, capsys):
    torch.save(torch.from_numpy(EDGES), tmp_path / "x.pt")
    assert "may be edges or a table" in refused(capsys, tmp_path / "x.pt", tmp_path / "x.gids")


def test_scipys_sparse_files(tmp_path, capsys):
    scipy = pytest.importorskip("scipy.sparse")
    features = scipy.csr_matrix(np.where(FEAT > 1, FEAT, 0))
    scipy.save_npz(tmp_path / "x.npz", features)
    assert_table(convert(tmp_path / "x.npz", tmp_path / "x.gids"), "feat", features.toarray())
    graph = scipy.csr_matrix((np.ones(3), ([0, 1, 4], [2, 2, 3])), (50, 50))
    (tmp_path / "s").mkdir()
    scipy.save_npz(tmp_path / "s/adj.npz", graph)
    np.save(tmp_path / "s/feat.npy", FEAT)
    store = convert(tmp_path / "s", tmp_path / "s.gids")
    assert store.graph().indices.tolist() == [0, 1, 4]
    assert_table(store, "_N.feat", FEAT)
    (tmp_path / "s/adj.npz").rename(tmp_path / "s/graph.npz")
    assert convert(tmp_path / "s", tmp_path / "t.gids").graph().indices.tolist() == [0, 1, 4]
    scipy.save_npz(tmp_path / "x.npz", graph.tocoo())
    assert "in coo form; write it as CSR: save_npz('x.npz', matrix.tocsr())" in refused(
        capsys, tmp_path / "x.npz", tmp_path / "y.gids"
    )
