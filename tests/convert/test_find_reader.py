"""The reader of a source is found by content or by name."""

import numpy as np
import pytest
from datasets import save_arrays
from reader_example import convert

from gids.cli import main
from gids.convert.readers import READERS, find_reader


def test_list_option_explains_every_reader(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["convert", "--list"])
    out = capsys.readouterr().out
    assert all(f"\n{reader.name}: {reader.summary}\n" in f"\n{out}" for reader in READERS)
    assert len({reader.name for reader in READERS}) == len(READERS)


def test_reader_is_found_by_content(tmp_path):
    with open(tmp_path / "a.data", "wb") as file:
        np.save(file, np.zeros(3))
    np.savez(tmp_path / "b.npz", x=np.zeros(3))
    (tmp_path / "c.data").write_bytes(b"123")
    save_arrays(tmp_path / "d", x=np.zeros(3))
    save_arrays(tmp_path / "e", edges=np.zeros((2, 3), int))
    found = {p.name: find_reader(p).name for p in tmp_path.iterdir()}
    assert found == {"a.data": "npy", "b.npz": "npz", "c.data": "raw", "d": "directory", "e": "edges"}


def test_a_file_that_may_be_edges_or_a_table_is_read_as_chosen(tmp_path):
    edges = np.array([[0, 1], [1, 2], [2, 0]])
    np.save(tmp_path / "edges.npy", edges)
    assert convert(tmp_path / "edges.npy", tmp_path / "x.gids", "--from", "npy").table("feat").row_count == 3
    assert convert(tmp_path / "edges.npy", tmp_path / "y.gids", "--from", "edges").num_edges() == 3
