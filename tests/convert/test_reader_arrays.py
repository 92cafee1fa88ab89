"""Arrays in .npy and .npz files, in a directory, in HDF5, and in raw binary."""

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


@pytest.mark.parametrize(
    ("name", "table", "shape"),
    [("paper.emb", "paper.emb", "--shape=-1,7"), ("emb", "_N.emb", "--shape=50,7")],
)
def test_raw_binary_and_the_name_of_its_table(tmp_path, name, table, shape):
    FEAT.tofile(tmp_path / "x.bin")
    options = ("--dtype", "float32", "--table", name, shape)
    assert_table(convert(tmp_path / "x.bin", tmp_path / "x.gids", *options), table, FEAT)


def test_a_tensor_in_a_file_of_torch(tmp_path):
    torch.save(torch.from_numpy(FEAT), tmp_path / "x.pt")
    assert_table(convert(tmp_path / "x.pt", tmp_path / "x.gids", "--table", "emb"), "_N.emb", FEAT)


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


def test_one_of_several_splits(tmp_path, capsys):
    masks = (np.arange(150).reshape(50, 3) % 7 == 0).astype(np.uint32)
    save_arrays(tmp_path / "s", feat=FEAT, train_mask=masks, val_mask=masks[:, :1], label=np.zeros(50))
    store = convert(tmp_path / "s", tmp_path / "x.gids", "--split-column", "2")
    assert store.splits["_N"]["train"].tolist() == np.flatnonzero(masks[:, 2]).tolist()
    assert store.splits["_N"]["val"].tolist() == np.flatnonzero(masks[:, 0]).tolist()
    assert "at random" not in capsys.readouterr().err


def test_members_of_hdf5_are_read_by_all_links_left_out_or_skipped_by_name(tmp_path, capsys):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["feat"] = FEAT
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.update({"edge_index": EDGES, "num_nodes": 50, "title": "cora", "names": ["a"] * 50, "rate": 0.5})
        file["group/feat"], file["pos"] = FEAT[:, :2], h5py.ExternalLink("f.h5", "/feat")
        file["y"] = np.arange(50) % 3
        file["soft"], file["group/above"] = h5py.SoftLink("/y"), file["/"]
        file["gone"] = h5py.ExternalLink("gone.h5", "/feat")
        file["pairs"] = np.zeros(50, [("a", "f4"), ("b", "i4")])
    error = refused(capsys, tmp_path / "a.h5", tmp_path / "x.gids")
    assert "leave it out with --skip gone --skip pairs: 'gone' of a.h5: a link to nothing" in error
    assert "'pairs' of a.h5: of type [('a', '<f4'), " in error
    options = ("--skip", "pairs", "--skip", "gone", "--quiet", "--split", "none")
    assert_dataset(
        convert(tmp_path / "a.h5", tmp_path / "a.gids", *options),
        tables={"_N.group/feat": FEAT[:, :2], "_N.pos": FEAT, "_N.soft": np.arange(50) % 3},
        edges={HOMOGENEOUS: EDGES},
        labels={"_N": np.arange(50) % 3},
    )
    left_out = [line.split("'")[1] for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert left_out == ["names", "rate", "title"]


def test_files_of_torch_in_a_directory(tmp_path):
    save_arrays(tmp_path / "s", edge_index=EDGES, num_nodes=np.array(50))
    (tmp_path / "s/other.h5").touch()  # which cannot be read
    torch.save({"train_idx": torch.arange(5), "val_mask": [True] * 50, "n": 3}, tmp_path / "s/splits.pt")
    torch.save(torch.from_numpy(FEAT), tmp_path / "s/feat.pt")
    store = convert(tmp_path / "s", tmp_path / "s.gids", "--skip", "other.h5")
    assert_table(store, "_N.feat", FEAT)
    assert {k: len(v) for k, v in store.splits["_N"].items()} == {"train": 5, "val": 50}


def test_a_sparse_matrix_of_scipy_is_a_graph_or_features_in_which_duplicates_add_up(tmp_path):
    scipy = pytest.importorskip("scipy.sparse")
    scipy.save_npz(tmp_path / "x.npz", scipy.csr_matrix(([1.0, 2, 4], [1, 1, 0], [0, 2, 3]), (2, 3)))
    features = np.array([[0.0, 3, 0], [4, 0, 0]])
    assert_table(convert(tmp_path / "x.npz", tmp_path / "x.gids"), "feat", features)
    save_arrays(tmp_path / "s", feat=FEAT)
    scipy.save_npz(tmp_path / "s/graph.npz", scipy.csr_matrix((np.ones(3), ([0, 1, 4], [2, 2, 3])), (50, 50)))
    assert convert(tmp_path / "s", tmp_path / "s.gids").graph().indices.tolist() == [0, 1, 4]
