"""Tables and labels of bool: True and False from the source to torch.bool, and back."""

import numpy as np
import pytest
import torch
from commands import gids

from gids import FeatureStore
from gids.errors import StorageError
from gids.store import verify
from gids.write import DatasetWriter

RNG = np.random.default_rng(20)
FLAGS = RNG.random((500, 7)) < 0.5


def test_other_bytes_in_a_bool_source_are_true(tmp_path):
    """Such an array is what .view(bool) of numbers gives. Labels of one column are classes."""
    odd = np.where(FLAGS, RNG.integers(1, 256, FLAGS.shape), 0).astype(np.uint8).view(bool)
    np.savez(tmp_path / "s.npz", x=odd, y=odd)
    np.savez(tmp_path / "one.npz", x=odd, y=odd[:, 0])
    gids("convert", tmp_path / "s.npz", tmp_path / "s.gids", "--quiet", "--split", "none")
    gids("convert", tmp_path / "one.npz", tmp_path / "one.gids", "--quiet", "--dtype", "uint8")
    table, numbers = (FeatureStore(tmp_path / f"{name}.gids").table("x") for name in ("s", "one"))
    assert (table.dtype, table.stored_dtype, table.row_bytes) == (torch.bool, torch.bool, 7)
    assert torch.equal(table.read_rows(range(500)), torch.from_numpy(FLAGS))
    assert torch.equal(numbers.read_rows(range(500)), torch.from_numpy(FLAGS.astype(np.uint8)))
    assert torch.equal(FeatureStore(tmp_path / "s.gids").labels["_N"], torch.from_numpy(FLAGS))
    classes = FeatureStore(tmp_path / "one.gids").labels["_N"]
    assert torch.equal(classes, torch.from_numpy(FLAGS[:, 0].astype(np.int64)))


def test_other_bytes_in_a_bool_table_are_a_fault_and_are_read_as_true(tmp_path):
    with DatasetWriter(tmp_path / "d.gids") as writer:
        writer.write_table("node", "n", "flag", torch.from_numpy(FLAGS))
        writer.write_labels("n", torch.from_numpy(FLAGS[:, :3]))
    for file in ("tables/n.flag/shard-00.bin", "nodes/n.label.npy"):
        path = tmp_path / "d.gids" / file
        data = path.read_bytes()
        at = data.index(b"\x01\x00\x01", 200)
        path.write_bytes(data[:at] + b"\xfe\x00\x03" + data[at + 3 :])
        faults = "\n".join(verify(tmp_path / "d.gids"))
        assert "CRC32C" in faults
        assert "a bool must be 0 or 1; other bytes are read as 1" in faults
    store = FeatureStore(tmp_path / "d.gids")
    with pytest.raises(StorageError, match="checksum"):
        store.labels["n"]
    table = store.table("flag")
    for rows in (table.read_rows(range(500)), torch.cat([rows for _, rows in table.scan(100)])):
        assert np.array_equal(rows.view(torch.uint8), FLAGS.astype(np.uint8))
