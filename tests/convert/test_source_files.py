"""Files that are no good: pickles and truncated files are refused in one line, and nothing is left behind."""

import os
import pickle
import re
import sys

import numpy as np
import pytest
import torch
from datasets import save_arrays
from reader_example import convert, needs_torch_2_6, refused, truncate, write_csv

FEAT = np.arange(12, dtype=np.float32).reshape(4, 3)


class Payload:
    """Unpickling it makes a directory called executed."""

    def __reduce__(self):
        return (os.mkdir, ("executed",))


def npy_with(path, shape, data=b""):
    """A .npy file whose header claims a shape of float32."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        file.write(data)


def pickled(path):
    path.write_bytes(pickle.dumps(Payload()))


def sparse_npz(path):
    parts = {"indices": np.array([0, 9]), "indptr": np.array([0, 1, 2]), "data": np.ones(2)}
    np.savez(path, format=np.array("csr"), shape=np.array([2, 4]), **parts)


@needs_torch_2_6
@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.npy", lambda p: np.save(p, np.array([Payload()]), allow_pickle=True), "which need unpickling"),
        ("a.npz", lambda p: np.savez(p, feat=np.array([Payload()])), "which need unpickling"),
        ("d.pt", lambda p: torch.save(Payload(), p), "it asks for posix.mkdir"),
        (
            "d.pt",
            lambda p: torch.save({}, p, _use_new_zipfile_serialization=False),
            "torch.save (1.6 or newer)",
        ),
        ("d.pt", pickled, "is not a file of torch.save"),
        ("d.pkl", pickled, "has an unknown format"),
        ("a.npy", lambda p: npy_with(p, (4, 3), bytes(47)), "is truncated"),
        ("a.npy", lambda p: npy_with(p, (1 << 60, 3)), "a length must be 0 to"),
        ("a.npy", lambda p: npy_with(p, (1 << 40, 3)), "is truncated"),
        ("a.npy", lambda p: np.save(p, FEAT.astype(">f4")), "is big-endian (>f4)"),
        ("a.npz", sparse_npz, "has column 9; it must be from 0 to 3"),
        ("e.csv.gz", lambda p: p.write_bytes(b"\x1f\x8b and no more"), "e.csv.gz cannot be read"),
        ("t.parquet", lambda p: p.write_bytes(b"PAR1" + bytes(64) + b"PAR1"), "t.parquet cannot be read"),
        ("t.arrow", lambda p: p.write_bytes(b"ARROW1\0\0" + bytes(64)), "t.arrow cannot be read"),
    ],
)
def test_pickles_and_truncated_files_are_refused(tmp_path, capsys, monkeypatch, name, write, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name)
    assert message in refused(capsys, tmp_path / name, tmp_path / "x.gids")
    assert os.listdir(tmp_path) == [name]


def test_sizes_are_compared_before_anything_is_written(tmp_path, capsys):
    save_arrays(tmp_path / "s", feat=FEAT, label=np.zeros(5, int))
    assert "gives 4 '_N' nodes, but there are 5" in refused(capsys, tmp_path / "s", tmp_path / "x.gids")
    save_arrays(tmp_path / "s", label=np.zeros(4, int), edge_index=np.full((2, 5), (1 << 64) - 1, np.uint64))
    assert "18446744073709551615 near position 0" in refused(capsys, tmp_path / "s", tmp_path / "x.gids")
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "s.npz", feat=np.random.default_rng(0).standard_normal((40, 6)))
        data = (tmp_path / "s.npz").read_bytes()
        (tmp_path / "s.npz").write_bytes(data[: len(data) // 2] + data[len(data) // 2 + 50 :])
        error = refused(capsys, tmp_path / "s.npz", tmp_path / "x.gids")
        assert re.search(r"s\.npz(, member feat\.npy,)? cannot be read", error)
        truncate(tmp_path / "s.npz")
        assert "s.npz cannot be read" in refused(capsys, tmp_path / "s.npz", tmp_path / "x.gids")


def test_text_without_pyarrow_says_what_to_install(tmp_path, capsys, monkeypatch):
    edges = write_csv(tmp_path / "edges.csv", src=[0, 1], dst=[1, 0])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.compute", None)
        error = refused(capsys, edges, tmp_path / "x.gids")
    assert "edges.csv needs pyarrow: pip install 'gids-loader[parquet]'" in error
    assert convert(edges, tmp_path / "x.gids").num_edges() == 2
