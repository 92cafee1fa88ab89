"""MATLAB files with an adjacency matrix, such as Facebook100's."""

import numpy as np
import pytest
from reader_example import assert_dataset, convert, refused, truncate

from gids.convert.readers import matlab
from gids.store.rows import read_range

io = pytest.importorskip("scipy.io")
sparse = pytest.importorskip("scipy.sparse")
RNG = np.random.default_rng(10)
N = 80
A = sparse.random(N, N, 0.1, "csc", random_state=1)
HOMOGENEOUS = ("_N", "_E", "_N")


def one_hot(info):
    """As in PyG's LINKXDataset: a column per value of every column but gender."""
    columns = [info[:, i] for i in range(info.shape[1]) if i != 1]
    return np.concatenate([c[:, None] == np.unique(c)[None] for c in columns], axis=1).astype(np.float32)


def edges_of(matrix):
    """Edges in order of destination, then source, as in the file's columns."""
    coo = matrix.tocsc().tocoo()
    order = np.lexsort((coo.row, coo.col))
    return np.stack([coo.row[order], coo.col[order]])


def facebook(path, **changes):
    info = RNG.integers(0, 4, (N, 7)).astype(np.uint16)
    io.savemat(path, {"A": (A != 0).astype(float), "local_info": info, **changes}, do_compression=True)
    return info


@pytest.mark.slow
def test_facebook100(tmp_path):
    info = facebook(tmp_path / "reed.mat")
    assert_dataset(
        convert(tmp_path / "reed.mat", tmp_path / "r.gids", "--split", "none"),
        tables={"_N.feat": one_hot(info)},
        edges={HOMOGENEOUS: edges_of(A)},
        labels={"_N": info[:, 1].astype(np.int64) - 1},
    )
    rows = matlab._one_hot(np.delete(info, 1, axis=1))
    assert np.array_equal(read_range(rows, 30, 50), one_hot(info)[30:50])


@pytest.mark.slow
def test_other_names_weights_and_sparse_features(tmp_path, capsys):
    attributes = sparse.random(N, 9, 0.3, "csr", random_state=2)
    arrays = {"Network": A, "Attributes": attributes, "Label": np.arange(N)[:, None] % 3, "Class": ["x"]}
    io.savemat(tmp_path / "b.mat", arrays | {"dense": np.arange(N * 2.0).reshape(N, 2)})
    store = convert(tmp_path / "b.mat", tmp_path / "b.gids", "--split", "none", "--from", "matlab")
    assert_dataset(
        store,
        tables={
            "_N.Attributes": attributes.toarray(),
            "_N.dense": np.arange(N * 2.0).reshape(N, 2),
            "_N._E._N.weight": A.data,
        },
        edges={HOMOGENEOUS: edges_of(A)},
        labels={"_N": np.arange(N) % 3},
    )
    assert "left out 'Class'" in capsys.readouterr().err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"A": np.eye(3)}, "must have one square sparse matrix; it has 0"),
        (
            {"A": sparse.eye(N, format="csc"), "adj": sparse.eye(N, format="csc")},
            "must have one square sparse matrix; it has 2",
        ),
        ({"local_info": np.zeros((N - 1, 7))}, "it must have a row per node"),
        ({"local_info": np.zeros((N, 1))}, "it must have a row per node"),
        ({"label": np.arange(N) + 0.5}, "a class must be a whole number"),
    ],
)
def test_bad_file_prints_one_line(tmp_path, capsys, changes, message):
    facebook(tmp_path / "x.mat", **changes)
    assert message in refused(capsys, tmp_path / "x.mat", tmp_path / "x.gids")


def test_damaged_or_newer_file_prints_one_line(tmp_path, capsys):
    facebook(tmp_path / "x.mat")
    truncate(tmp_path / "x.mat")
    assert "x.mat cannot be read" in refused(capsys, tmp_path / "x.mat", tmp_path / "x.gids")
    header = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM"
    (tmp_path / "x.mat").write_bytes(header + bytes(384))
    assert "has MATLAB format 7.3 (HDF5)" in refused(capsys, tmp_path / "x.mat", tmp_path / "x.gids")
