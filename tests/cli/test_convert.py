"""`gids convert`: every source is converted bit for bit; an error is one line with the reason."""

import errno
import io
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from commands import gids
from datasets import save_arrays, sorted_edges

from gids import FeatureStore
from gids.cli import main
from gids.sizes import parse_bytes
from gids.store import verify

RNG = np.random.default_rng(42)
FEAT = RNG.standard_normal((50, 7), np.float32)
EDGES = RNG.integers(0, 50, (2, 300))


def convert(*arguments):
    """Run the command; the dataset, checked."""
    arguments = [str(a) for a in arguments]
    gids("convert", *arguments)
    assert list(verify(arguments[1], allow_dirs=[os.path.dirname(arguments[1])])) == []
    return FeatureStore(arguments[1], allow_dirs=[os.path.dirname(arguments[1])])


def rows(store, table="feat"):
    found = store.table(table)
    return found.read_rows(range(found.row_count)).numpy()


def assert_graph(graph, indptr, indices, edge_ids=None):
    assert np.array_equal(graph.indptr, indptr)
    assert np.array_equal(graph.indices, indices)
    if edge_ids is None:
        assert graph.edge_ids is None
    else:
        assert np.array_equal(graph.edge_ids, edge_ids)


def test_an_npy_of_one_dimension_or_version_two(tmp_path):
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array(file, FEAT[:, 0], version=(2, 0))
    assert np.array_equal(rows(convert(tmp_path / "x.npy", tmp_path / "x.gids")), FEAT[:, 0])


@pytest.mark.parametrize(
    ("name", "table"), [("paper.emb", "paper.emb"), ("emb", "_N.emb"), ("a.b.emb", "a.b.emb")]
)
def test_a_table_can_be_named(tmp_path, name, table):
    np.save(tmp_path / "x.npy", FEAT)
    assert list(convert(tmp_path / "x.npy", tmp_path / "x.gids", "--table", name).tables) == [table]


@pytest.mark.parametrize("shape", [["--shape=50,7"], ["--shape=-1,7"], ["--shape", "-1,7"]])
def test_raw_binary(tmp_path, shape):
    FEAT.tofile(tmp_path / "x.bin")
    store = convert(tmp_path / "x.bin", tmp_path / "x.gids", "--dtype", "float32", *shape)
    assert np.array_equal(rows(store), FEAT)


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
    assert np.array_equal(rows(store), np.rint(FEAT / scales) * scales)
    if name == "x.npz":
        assert told[1].startswith("_N.pos: float64 stored as int8 with a scale per row, ")
        assert len(told) == 2
        assert store.table("year").stored_dtype == torch.int8  # whole numbers, as they are
        assert store.table("year").scale is None
        assert rows(store, "year").tolist() == list(range(50))


def test_values_that_cannot_be_stored_in_fewer_bits_leave_nothing(tmp_path, refused):
    values = FEAT * 1e6
    values[31, 2] = np.nan
    np.save(tmp_path / "x.npy", values)
    for options, said in (
        (
            ["--dtype", "int8"],
            "table '_N.feat': row 31, column 2 is nan, which int8 with a scale cannot hold",
        ),
        (["--dtype", "int8", "--scale", "column"], "row 31, column 2 is nan"),
        (["--dtype", "float16"], "whose largest value is 65504: use bfloat16 or float32"),
    ):
        assert said in refused("convert", tmp_path / "x.npy", tmp_path / "x.gids", *options)
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


def test_features_can_be_cast(tmp_path):
    save_arrays(tmp_path / "s", a=FEAT, b=FEAT, year=np.arange(50, dtype=np.uint16))
    arguments = ("--dtype", "float16", "--dtype", "b=float64,_N.year=int32")
    store = convert(tmp_path / "s", tmp_path / "s.gids", *arguments)
    assert {t.key: t.dtype for t in store.tables.values()} == {
        "a": torch.float16,
        "b": torch.float64,
        "year": torch.int32,
    }
    assert np.array_equal(rows(store, "a"), FEAT.astype(np.float16))
    assert np.array_equal(rows(store, "year"), np.arange(50))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_sparse_npz(tmp_path, save):
    """The format of the citation datasets: CSR features and adjacency, labels, texts."""
    scipy = pytest.importorskip("scipy.sparse")
    attr = scipy.random_array((50, 30), density=0.1, format="csr", dtype=np.float32, rng=RNG)
    adj = scipy.csr_array((np.ones(300, np.float32), (EDGES[0], EDGES[1])), (50, 50))
    adj.sum_duplicates()
    adj.data[:] = 1
    parts = {
        f"{n}_{p}": getattr(m, p)
        for n, m in (("attr", attr), ("adj", adj))
        for p in ("data", "indices", "indptr")
    }
    shapes = {"attr_shape": np.array(attr.shape), "adj_shape": np.array(adj.shape)}
    labels = RNG.integers(-1, 4, 50).astype(np.int8)
    save(tmp_path / "x.npz", **parts, **shapes, labels=labels, names=np.array(["a", "b"]))
    store = convert(tmp_path / "x.npz", tmp_path / "x.gids")
    assert np.array_equal(rows(store), attr.toarray())
    coo = adj.tocoo()
    indptr, indices, order = sorted_edges(coo.row, coo.col, 50)
    assert_graph(store.graph(), indptr, indices, order)
    assert np.array_equal(store.labels["_N"], labels)
    assert list(store.tables) == ["_N.feat"], "weights that are all 1 are left out"
    split = np.concatenate([ids.numpy() for ids in store.splits["_N"].values()])
    assert np.array_equal(np.sort(split), np.flatnonzero(labels >= 0))


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
    store = convert(tmp_path / "x.npz", tmp_path / "x.gids")
    assert rows(store).tolist() == [[0, 3], [4, 0]]
    assert store.table("_N._E._N.weight").read_rows([0, 1]).tolist() == [0.5, 2.0]
    assert_graph(store.graph(), [0, 1, 2], [1, 0], [1, 0])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_a_dense_npz_with_edges(tmp_path, order, dtype):
    edges = np.asarray(EDGES.astype(dtype), order=order)
    mask = np.arange(50) % 3 == 0
    weight = RNG.standard_normal(300)
    np.savez(tmp_path / "x.npz", x=FEAT, edge_index=edges, edge_weight=weight, y=np.arange(50), val_mask=mask)
    store = convert(tmp_path / "x.npz", tmp_path / "x.gids", "--index-dtype", "int32")
    assert np.array_equal(rows(store, "x"), FEAT)
    assert np.array_equal(rows(store, "weight"), weight)
    assert_graph(store.graph(), *sorted_edges(*EDGES, 50))
    assert store.graph().indices.dtype == np.int32
    assert {split: ids.tolist() for split, ids in store.splits["_N"].items()} == {
        "val": list(range(0, 50, 3))
    }
    assert np.array_equal(store.out_degrees(), np.bincount(EDGES[0], minlength=50))


def test_a_directory(tmp_path):
    source = tmp_path / "s"
    indptr, indices, _ = sorted_edges(*EDGES, 50)
    arrays = {
        "feat": FEAT,
        "pos": FEAT.astype(np.float64)[:, :2],
        "indptr": indptr,
        "indices": indices.astype(np.int32),
        "labels": np.arange(50) % 3,
        "train_idx": np.arange(9, dtype=np.int32),
        "test_idx": np.array([40]),
    }
    save_arrays(source, **arrays)
    FEAT.tofile(source / "raw.bin")
    (source / "README.txt").write_text("hello")
    store = convert(source, tmp_path / "s.gids", "--dtype", "float32", "--shape=-1,7")
    assert list(store.tables) == ["_N.feat", "_N.pos", "_N.raw"]
    assert np.array_equal(rows(store, "raw"), FEAT)
    assert_graph(store.graph(), indptr, indices)
    assert {split: ids.tolist() for split, ids in store.splits["_N"].items()} == {
        "train": list(range(9)),
        "test": [40],
    }


def write_heterogeneous(source):
    """Authors without features write papers; papers cite papers; an odd type name."""
    arrays = {
        "nodes/paper/feat": FEAT,
        "nodes/paper/label": np.arange(50, dtype=np.float32),
        "nodes/author/num_nodes": np.array(80),
        "nodes/a%2Fb/feat": FEAT[:5],
        "edges/author.writes.paper/edge_index": np.stack([RNG.integers(0, 80, 99), RNG.integers(0, 50, 99)]),
        "edges/author.writes.paper/weight": RNG.standard_normal((99, 2)),
        "edges/paper.cites.paper/indptr": sorted_edges(*EDGES, 50)[0],
        "edges/paper.cites.paper/indices": sorted_edges(*EDGES, 50)[1],
        "edges/paper.cites.paper/edge_ids": sorted_edges(*EDGES, 50)[2],
    }
    save_arrays(source, **arrays)
    return arrays


def test_a_heterogeneous_directory(tmp_path):
    arrays = write_heterogeneous(tmp_path / "s")
    store = convert(tmp_path / "s", tmp_path / "s.gids", "--page-bytes", "512", "--split", "none")
    assert store.num_nodes("author") == 80
    assert np.array_equal(rows(store, "paper.feat"), FEAT)
    assert np.array_equal(rows(store, "a/b.feat"), FEAT[:5])
    assert store.labels["paper"].dtype == torch.float32
    assert dict(store.splits) == {}
    edges = arrays["edges/author.writes.paper/edge_index"]
    assert_graph(store.graph(("author", "writes", "paper")), *sorted_edges(*edges, 50))
    assert np.array_equal(rows(store, "weight"), arrays["edges/author.writes.paper/weight"])
    assert_graph(store.graph(("paper", "cites", "paper")), *sorted_edges(*EDGES, 50))
    assert np.array_equal(store.out_degrees("author"), np.bincount(edges[0], minlength=80))


def test_edge_ids_can_be_left_out(tmp_path):
    np.savez(tmp_path / "x.npz", x=FEAT, edge_index=EDGES)
    store = convert(tmp_path / "x.npz", tmp_path / "x.gids", "--no-edge-ids")
    assert_graph(store.graph(), *sorted_edges(*EDGES, 50)[:2])


def test_pages_are_striped_over_directories(tmp_path):
    np.save(tmp_path / "x.npy", FEAT)
    for name in "ab":
        (tmp_path / name).mkdir()
    arguments = ("--stripe", tmp_path / "a", tmp_path / "b", "--page-bytes", "512")
    store = convert(tmp_path / "x.npy", tmp_path / "x.gids", *arguments)
    assert [p.parents[2].name for p in store.table("feat").shard_paths] == ["a", "b"]
    assert np.array_equal(rows(store), FEAT)


BAD_DIRECTORIES = {
    "lengths differ": ({"feat": FEAT, "pos": FEAT[:9]}, "'pos' of"),
    "indptr of others": (
        {"feat": FEAT, "indptr": np.zeros(9, int), "indices": np.zeros(0, int)},
        "but there are 8",
    ),
    "indices alone": ({"feat": FEAT, "indices": np.zeros(0, int)}, "has indices but lacks indptr"),
    "two topologies": (
        {"feat": FEAT, "indptr": np.zeros(51, int), "indices": np.zeros(0, int), "edge_index": EDGES},
        "both edge_index and indptr",
    ),
    "edges of nodes that are not": ({"feat": FEAT, "edge_index": EDGES + 20}, "it must be from 0 to 49"),
    "edge_index the wrong way": ({"feat": FEAT, "edge_index": EDGES.T}, "of shape (2, E)"),
    "edge features of others": (
        {"feat": FEAT, "edge_index": EDGES, "edge_w": np.ones(3)},
        "300 edges, but its table 'w' has 3",
    ),
    "edges and no nodes": ({"edge_index": EDGES}, "the number of '_N' nodes is unknown"),
    "two labels": ({"feat": FEAT, "label": np.ones(50), "y": np.ones(50)}, "both 'label' and 'y'"),
    "a split of others": ({"feat": FEAT, "train_idx": np.array([50])}, "train_idx[0] is 50"),
    "mask and idx": (
        {"feat": FEAT, "val_mask": np.ones(50, bool), "val_idx": np.ones(2, int)},
        "is a second val split",
    ),
    "only labels": ({"label": np.ones(50)}, "has no features and no graph"),
    "a strange relation": (
        {"nodes/a/feat": FEAT, "edges/ab/edge_index": EDGES},
        "must be SOURCE.RELATION.DESTINATION",
    ),
    "an unknown end": (
        {"nodes/a/feat": FEAT, "edges/a.b.c/edge_index": EDGES},
        "number of 'c' nodes is unknown",
    ),
    "int16": ({"feat": FEAT.astype(np.int16)}, "cannot hold int16: cast it (--dtype)"),
    "a short mask": (
        {"feat": FEAT, "train_mask": np.ones(45, bool)},
        "gives 45 '_N' nodes, but there are 50 (from 'feat' of ",
    ),
    "a long mask": ({"feat": FEAT, "train_mask": np.ones(55, bool)}, "gives 55 '_N' nodes, but there are 50"),
    "a mask of numbers": (
        {"feat": FEAT, "train_mask": np.arange(50) % 3},
        "is 2 at node 2; a mask must be bool, or 0 and 1",
    ),
    "three masks": (
        {"feat": FEAT, "train_mask": np.ones((50, 3), bool)},
        "has shape (50, 3): choose one of its 3 splits with --split-column, 0 to 2",
    ),
    "few labels": (
        {"feat": FEAT, "label": np.zeros(49)},
        "gives 50 '_N' nodes, but there are 49 (from 'label' of ",
    ),
    "ids that are a mask": (
        {"feat": FEAT, "train_idx": np.ones(50, bool)},
        "is a mask: rename it to train_mask",
    ),
    "uint16": ({"a": FEAT, "b": np.ones((50, 1), np.uint16)}, "table '_N.b': tables cannot hold uint16"),
    "no columns": ({"a": FEAT, "b": np.ones((50, 0))}, "table '_N.b': rows have 0 bytes"),
}
BAD_FILES = {
    "text": (np.array(["a"]), "is of type <U1, not numbers"),
    "objects": (np.array([{}], dtype=object), "which need unpickling"),
    "scalar": (np.array(1.0), "is a single number"),
    "no header": (b"\x93NUMPY\x01\x00\x10\x00not a dictionary", "not a valid .npy file"),
    "version 9": (b"\x93NUMPY\x09\x00", "version (9, 0)"),
    "raw": (b"12345678", "for raw binary give --dtype float32 --shape ROWS,DIM"),
    "broken zip": (b"PK\x03\x04 and no more", "not a valid .npz file"),
    "nothing": (None, "no such file or directory: "),
    "empty directory": ({}, "has no features and no graph"),
}
BAD = BAD_FILES | BAD_DIRECTORIES


@pytest.mark.parametrize("kind", BAD)
def test_invalid_source_prints_one_line_and_leaves_nothing(tmp_path, refused, kind):
    content, message = BAD[kind]
    source = tmp_path / "bad.npy"
    if isinstance(content, dict):
        source.mkdir()
        save_arrays(source, **content)
    elif isinstance(content, bytes):
        source.write_bytes(content)
    elif content is not None:
        np.save(source, content)
    before = sorted(tmp_path.rglob("*"))
    last = refused("convert", source, tmp_path / "x.gids").splitlines()[-1]
    assert last.startswith("gids convert: ")
    assert message in last
    assert sorted(tmp_path.rglob("*")) == before


def test_a_truncated_file_is_refused(tmp_path, refused):
    np.save(tmp_path / "x.npy", FEAT)
    os.truncate(tmp_path / "x.npy", 500)
    assert "is truncated: 500 bytes" in refused("convert", tmp_path / "x.npy", tmp_path / "x.gids")
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


OF_AN_ARRAY = [
    (["--page-bytes", "1000"], "page_bytes is 1000; it must be a multiple of 512"),
    (["--dtype", "float17"], "unknown dtype 'float17'"),
    (["--dtype", "color=float16"], "--dtype: no table 'color'; the source has _N.feat, feat"),
    (["--dtype", "uint8"], "would cut their fractions"),
    (["--dtype", "int8", "--scale", "page"], "--scale is 'page'; it must be 'row' or 'column'"),
    (["--scale", "row"], "--scale row is for floating features stored as int8: add --dtype int8"),
    (["--scale", "color=row"], "--scale: no table 'color'; the source has _N.feat, feat"),
    (["--stripe", "/proc/nonexistent"], "stripe directory /proc/nonexistent does not exist"),
    (["--memory", "1k"], "1 MiB"),
    (["--shape", "3,4"], "--shape has no effect"),
    (["--num-nodes", "50"], "feat.npy is read as npy, and the option is for parquet, csv, edges"),
    (["--labels", "2K"], "the option is for igb, matlab"),
    (["--skip", "feat"], "--skip has no effect"),
    (["--reverse-edges", "--dedup"], "--reverse-edges, --dedup: the source has no edges"),
    (["--self-loops"], "--self-loops: the source has no edges"),
    (
        ["--split-column", "1"],
        "--split-column has no effect: the source has no masks of shape (nodes, splits)",
    ),
]
OF_A_DIRECTORY = [
    (["--num-nodes", "20"], "the option is for parquet, csv, edges"),
    (["--labels", "2K"], "the option is for igb, matlab"),
    (["--table", "paper.x"], "the option is for npy, raw"),
    (["--shape", "4,4"], "--shape is for raw binary, but"),
    (["--skip", "pos"], "has no array of that name"),
    (["--split", "0.5,0.5,0"], "but the source has no labels: leave it out"),
]


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [*(("feat.npy", *case) for case in OF_AN_ARRAY), *((".", *case) for case in OF_A_DIRECTORY)],
)
def test_invalid_options_print_one_line_and_leave_nothing(tmp_path, refused, source, arguments, message):
    save_arrays(tmp_path / "s", feat=FEAT)
    assert message in refused("convert", tmp_path / "s" / source, tmp_path / "x.gids", *arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize(
    "arguments", [["--shape", "a,b"], ["--split", "half"], ["--memory", "lots"], ["--index-dtype", "int8"]]
)
def test_unreadable_options_print_the_usage(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["convert", "x.npy", "x.gids", *arguments])
    assert "usage: gids convert" in capsys.readouterr().err


def test_one_of_several_splits(tmp_path, capsys):
    masks = np.arange(150).reshape(50, 3) % 7 == 0
    save_arrays(tmp_path / "s", feat=FEAT, train_mask=masks, val_mask=masks[:, :1], label=np.zeros(50))
    store = convert(tmp_path / "s", tmp_path / "x.gids", "--split-column", "2")
    assert store.splits["_N"]["train"].tolist() == np.flatnonzero(masks[:, 2]).tolist()
    assert store.splits["_N"]["val"].tolist() == np.flatnonzero(masks[:, 0]).tolist()
    assert "at random" not in capsys.readouterr().err


def test_split_of_a_source_that_has_one_is_an_error(tmp_path, refused):
    save_arrays(tmp_path / "s", feat=FEAT, label=np.arange(50), train_idx=np.arange(3))
    command = ("convert", tmp_path / "s", tmp_path / "x.gids", "--split")
    assert "the source has splits already" in refused(*command, "0.5,0.5,0")
    gids(*command, "none")


def test_help_fits_on_a_screen_and_another_shows_all(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    pages = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            main(["convert", option])
        pages.append(capsys.readouterr().out)
    assert len(pages[0].splitlines()) <= 42
    for group in ("input:", "storage:", "graph:", "splits:", "run:"):
        assert f"\n{group}\n" in pages[0]
    for rare in ("--skip", "--scale", "--dedup", "--split-column"):
        assert rare not in pages[0].replace("--skip-", "")
        assert rare in pages[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convrt"], "unknown command 'convrt' (did you mean convert?)"),
        (["info", "a.gids", "c.gids"], "one argument too many: 'c.gids'; it takes"),
        (["convert", "a", "b", "--overwite"], "--overwite (did you mean --overwrite?)"),
        (["convert", "a", "b", "--skp", "x"], "(did you mean --skip?)"),
        (["bench", "epoch", "a", "--bach-size", "3"], "(did you mean --batch-size?)"),
    ],
)
def test_unknown_words_are_answered_with_similar_ones(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


def test_random_split_and_float64_are_reported(tmp_path, capsys):
    save_arrays(tmp_path / "s", feat=FEAT.astype(np.float64), label=np.arange(50) - 10)
    convert(tmp_path / "s", tmp_path / "x.gids", "--seed", "3")
    told = capsys.readouterr().err
    assert "drew train 24, val 8, test 8 labelled nodes at random with seed 3" in told
    assert "_N.feat is float64, twice the bytes of float32" in told
    convert(tmp_path / "s", tmp_path / "y.gids", "--dtype", "float32")
    assert "float64: twice" not in capsys.readouterr().err


def test_floating_labels_below_0_are_no_labels_if_they_are_whole_numbers(tmp_path, capsys):
    labels = np.arange(50, dtype=np.float32) % 4
    labels[:20] = -1
    save_arrays(tmp_path / "s", feat=FEAT, label=labels)
    store = convert(tmp_path / "s", tmp_path / "x.gids")
    assert "labels of '_N' are whole numbers with gaps: stored as int64" in capsys.readouterr().err
    assert store.labels["_N"].tolist() == labels.tolist()
    split = np.concatenate([ids.numpy() for ids in store.splits["_N"].values()])
    assert np.array_equal(np.sort(split), np.arange(20, 50))
    save_arrays(tmp_path / "t", feat=FEAT, label=labels - 0.5)  # a measure, and -1.5 is one of its values
    split = np.concatenate(
        [i.numpy() for i in convert(tmp_path / "t", tmp_path / "y.gids").splits["_N"].values()]
    )
    assert np.array_equal(np.sort(split), np.arange(50))


@pytest.mark.parametrize("values", [FEAT.astype(object), FEAT + 1j])
def test_features_that_cannot_be_stored_are_refused_or_reported(tmp_path, refused, values):
    np.savez(tmp_path / "x.npz", feat=values, edge_index=EDGES, num_nodes=50)
    assert "cast it, or give --skip feat" in refused(
        "convert", tmp_path / "x.npz", tmp_path / "x.gids", "--quiet"
    )
    store = convert(tmp_path / "x.npz", tmp_path / "x.gids", "--skip", "feat", "--quiet")
    assert (list(store.tables), store.num_edges()) == ([], 300)
    np.savez(tmp_path / "y.npz", emb=FEAT.astype(object), edge_index=EDGES)
    assert "num_nodes.npy; left out 'emb' of y.npz: Python objects" in refused(
        "convert", tmp_path / "y.npz", tmp_path / "y.gids", "--quiet"
    )


def test_scipys_sparse_files(tmp_path, refused):
    scipy = pytest.importorskip("scipy.sparse")
    features = scipy.csr_matrix(np.where(FEAT > 1, FEAT, 0))
    scipy.save_npz(tmp_path / "x.npz", features)
    assert np.array_equal(rows(convert(tmp_path / "x.npz", tmp_path / "x.gids")), features.toarray())
    graph = scipy.csr_matrix((np.ones(3), ([0, 1, 4], [2, 2, 3])), (50, 50))
    (tmp_path / "s").mkdir()
    scipy.save_npz(tmp_path / "s/adj.npz", graph)
    np.save(tmp_path / "s/feat.npy", FEAT)
    store = convert(tmp_path / "s", tmp_path / "s.gids")
    assert store.graph().indices.tolist() == [0, 1, 4]
    assert np.array_equal(rows(store), FEAT)
    (tmp_path / "s/adj.npz").rename(tmp_path / "s/graph.npz")
    assert "call it adj.npz (graph) or attr.npz" in refused("convert", tmp_path / "s", tmp_path / "y.gids")
    scipy.save_npz(tmp_path / "x.npz", graph.tocoo())
    assert "in coo form; write it as CSR: save_npz('x.npz', matrix.tocsr())" in refused(
        "convert", tmp_path / "x.npz", tmp_path / "y.gids"
    )


def test_conversion_to_several_disks_prints_how_to_open_the_dataset(tmp_path, capsys, refused):
    np.save(tmp_path / "x.npy", np.ones((5000, 8), np.float32))
    stripes = [tmp_path / "disk a", tmp_path / "b"]
    for stripe in stripes:
        stripe.mkdir()
    target = tmp_path / "x.gids"
    gids("convert", tmp_path / "x.npy", target, "--stripe", *stripes)
    how = capsys.readouterr().out.splitlines()[-1]
    assert f"allow_dirs={[str(s) for s in stripes]}" in how
    assert f"--allow-dir '{stripes[0]}' --allow-dir {stripes[1]}" in how
    assert f"(or gids ... --allow-dir {stripes[1]} --allow-dir '{stripes[0]}')" in refused("info", target)
    with pytest.raises(SystemExit):
        main(["convert", "--stripe", *map(str, stripes), str(tmp_path / "x.npy"), str(target)])
    assert "usage: gids convert SRC [SRC ...] DST [option ...]" in capsys.readouterr().err


def test_damaged_torch_file_is_recognized(tmp_path, refused):
    torch.save({"x": torch.ones(4, 100)}, tmp_path / "d.pt")
    os.truncate(tmp_path / "d.pt", 300)
    assert "is not a file of torch.save, or is truncated" in refused(
        "convert", tmp_path / "d.pt", tmp_path / "y.gids"
    )


def test_ctrl_c_prints_how_to_resume(tmp_path, capsys, monkeypatch):
    np.savez(tmp_path / "x.npz", x=FEAT, edge_index=EDGES)
    source, target = str(tmp_path / "x.npz"), tmp_path / "x.gids"

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gids.write.dataset_writer.DatasetWriter.write_table", interrupt)  # after the graph
        assert main(["convert", source, str(target)]) == 130
    assert (
        f"interrupted; run the same command again to resume from {target}.partial" in capsys.readouterr().err
    )
    convert(source, target)
    assert "resuming an unfinished conversion" in capsys.readouterr().err


@pytest.mark.slow
def test_closed_output_is_no_error():
    command = f"{sys.executable} -m gids convert --list | head -1"
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert "Error" not in done.stderr


def test_characters_that_the_output_lacks_are_no_error(tmp_path, monkeypatch):
    errors = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stderr", errors)
    assert main(["info", str(tmp_path / "é.gids")]) == 2
    errors.seek(0)
    assert "?.gids" in errors.read()


def test_full_disk_leaves_only_what_can_be_resumed(tmp_path, capsys, monkeypatch):
    np.save(tmp_path / "x.npy", FEAT)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gids.write.journal.Journal.record", full)
    assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids")]) == 2
    error = capsys.readouterr().err
    assert "No space left on device while writing x.gids" in error
    assert f"free space and try again, at: {tmp_path / 'x.gids'}" in error
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.parametrize("begun", [False, True])
def test_error_of_a_full_disk_at_the_start_says_what_to_do(tmp_path, capsys, monkeypatch, begun):
    np.save(tmp_path / "x.npy", FEAT)
    if begun:  # by an earlier command, whose work stays
        (tmp_path / "x.gids.partial").mkdir()
        (tmp_path / "x.gids.partial" / "journal").touch()
    before = sorted(tmp_path.rglob("*"))

    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("gids.write.workplace.Journal" if begun else "os.mkdir", full)
    assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids")]) == 2
    error = capsys.readouterr().err
    assert "No space left on device while writing x.gids (" in error
    assert " free); nothing was published; free space and try again, at: " in error
    assert str(tmp_path / "x.gids") in error
    assert sorted(tmp_path.rglob("*")) == before


def test_dataset_is_only_replaced_with_overwrite(tmp_path, refused):
    np.save(tmp_path / "x.npy", FEAT)
    convert(tmp_path / "x.npy", tmp_path / "x.gids")
    np.save(tmp_path / "x.npy", -FEAT)
    assert "x.gids already exists: choose another name, or replace it (--overwrite" in refused(
        "convert", tmp_path / "x.npy", tmp_path / "x.gids"
    )
    assert np.array_equal(rows(convert(tmp_path / "x.npy", tmp_path / "x.gids", "--overwrite")), -FEAT)
    save_arrays(tmp_path / "mine", feat=FEAT)
    for options in ([], ["--overwrite"]):
        assert "mine exists and is not a gids dataset, so it is not replaced: choose another name" in refused(
            "convert", tmp_path / "x.npy", tmp_path / "mine", *options
        )


def test_free_space_is_checked_before_anything_is_written(tmp_path, capsys):
    header = np.lib.format.header_data_from_array_1_0(FEAT) | {"shape": (1 << 30, 1024)}
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + (1 << 42))
    assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids")]) == 2
    error = capsys.readouterr().err
    found = re.search(
        r"not enough room, and nothing more was written: (.*) needed, (.*) free on the disk of: (.*)", error
    )
    assert parse_bytes(found[1]) > (1 << 42) > parse_bytes(found[2])
    assert found[3] == str(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


def test_a_quiet_conversion_prints_only_what_is_left_out(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("gids.convert.run.direct_alignment", lambda _: 512)
    monkeypatch.setattr("gids.convert.page_sizes._alignment_of", lambda _: 512)
    np.savez(tmp_path / "x.npz", x=FEAT)
    convert(tmp_path / "x.npz", tmp_path / "x.gids", "--quiet")
    assert capfd.readouterr() == ("", "")
    np.savez(tmp_path / "x.npz", x=FEAT, names=np.array(["a"]))
    convert(tmp_path / "x.npz", tmp_path / "z.gids", "--quiet")
    assert capfd.readouterr() == ("", "left out 'names' of x.npz: of type <U1, not numbers\n")
    convert(tmp_path / "x.npz", tmp_path / "y.gids")
    out, err = capfd.readouterr()
    assert out == (
        f"{tmp_path}/y.gids: 1 table, 1.5 kB; _N.x in pages of 512 B: 18 rows of 28 B each, the size that is "
        "cached best\n"
    )
    assert err.splitlines() == [
        "convert: reading the source",
        "left out 'names' of x.npz: of type <U1, not numbers",
        "convert: table _N.x",
        "convert: publishing",
    ]
