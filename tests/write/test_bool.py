"""Tables and labels of bool: True and False from the source to torch.bool, and back."""

import numpy as np
import pytest
import torch

from gids import FeatureStore, FormatError
from gids.cli import main
from gids.errors import StorageError
from gids.store import verify
from gids.write import DatasetWriter

RNG = np.random.default_rng(20)
FLAGS = RNG.random((500, 7)) < 0.5


def convert(source, target, *arguments):
    assert main(["convert", str(source), str(target), "--quiet", *arguments]) == 0
    assert list(verify(target)) == []
    return FeatureStore(target)


@pytest.mark.parametrize("kind", ["npy", "npz", "raw"])
def test_other_bytes_in_a_bool_source_are_true(tmp_path, kind):
    """Such an array is what .view(bool) of numbers gives."""
    odd = np.where(FLAGS, RNG.integers(1, 256, FLAGS.shape), 0).astype(np.uint8)
    source, arguments = tmp_path / f"s.{kind}", ["--dtype", "bool", "--shape", "-1,7"] * (kind == "raw")
    if kind == "raw":
        odd.tofile(source)
    elif kind == "npy":
        np.save(source, odd.view(bool))
    else:
        np.savez_compressed(source, feat=odd.view(bool))
    table = convert(source, tmp_path / "d.gids", *arguments).table("feat")
    assert (table.dtype, table.stored_dtype, table.row_bytes) == (torch.bool, torch.bool, 7)
    assert torch.equal(table.read_rows(range(500)), torch.from_numpy(FLAGS))
    if kind != "raw":
        numbers = convert(source, tmp_path / "u.gids", "--dtype", "uint8").table("feat")
        assert torch.equal(numbers.read_rows(range(500)), torch.from_numpy(FLAGS.astype(np.uint8)))


def test_bool_table_is_written_in_blocks(tmp_path):
    odd = np.full((100, 7), 2, np.uint8).view(bool)
    with DatasetWriter(tmp_path / "d.gids") as writer:
        with writer.open_table("node", "n", "flag", (500, 7), torch.bool) as table:
            table.write(FLAGS[:300])
            table.write(FLAGS[300:400].astype(np.int64))
            with pytest.raises(FormatError, match="2 is not exact"):
                table.write(np.full((1, 7), 2))
            table.write(torch.from_numpy(odd))
    assert list(verify(tmp_path / "d.gids")) == []
    found = FeatureStore(tmp_path / "d.gids").table("flag").read_rows(range(500))
    assert torch.equal(found[:400], torch.from_numpy(FLAGS[:400]))
    assert (found[400:].view(torch.uint8) == 1).all()


def test_labels_of_several_columns_stay_bools(tmp_path):
    np.savez(tmp_path / "s.npz", x=np.ones((500, 2), np.float32), y=FLAGS)
    store = convert(tmp_path / "s.npz", tmp_path / "d.gids", "--split", "none")
    assert torch.equal(store.labels["_N"], torch.from_numpy(FLAGS))
    np.savez(tmp_path / "s.npz", x=np.ones((500, 2), np.float32), y=FLAGS[:, 0])
    store = convert(tmp_path / "s.npz", tmp_path / "one.gids", "--split", "none")
    assert store.labels["_N"].tolist() == FLAGS[:, 0].astype(int).tolist()  # classes
    assert store.labels["_N"].dtype == torch.int64


@pytest.mark.parametrize("name", ["train_idx", "indices", "edge_index"])
def test_bools_are_refused_as_ids(tmp_path, capsys, name):
    arrays = {"feat": np.ones((9, 2)), name: np.ones((2, 9) if name == "edge_index" else 9, bool)}
    if name == "indices":
        arrays["indptr"] = np.arange(10)
    np.savez(tmp_path / "s.npz", **arrays)
    assert main(["convert", str(tmp_path / "s.npz"), str(tmp_path / "d.gids")]) == 2
    said = capsys.readouterr().err
    assert "is a mask: rename it to train_mask" in said or "must be whole numbers" in said
    torch.save({"x": torch.ones(9, 2), "train_idx": torch.ones(9) > 0}, tmp_path / "s.pt")
    assert main(["convert", str(tmp_path / "s.pt"), str(tmp_path / "d.gids")]) == 2
    assert "is a mask: rename it to train_mask" in capsys.readouterr().err


@pytest.fixture
def dataset(tmp_path):
    with DatasetWriter(tmp_path / "d.gids") as writer:
        writer.write_table("node", "n", "flag", torch.from_numpy(FLAGS))
        writer.write_labels("n", torch.from_numpy(FLAGS[:, :3]))
    return tmp_path / "d.gids"


def test_other_bytes_in_a_bool_table_are_a_fault_and_are_read_as_true(dataset):
    for file in ("tables/n.flag/shard-00.bin", "nodes/n.label.npy"):
        path = dataset / file
        data = path.read_bytes()
        at = data.index(b"\x01\x00\x01", 200)
        path.write_bytes(data[:at] + b"\xfe\x00\x03" + data[at + 3 :])
        faults = list(verify(dataset))
        assert any("CRC32C" in fault for fault in faults)
        assert any("a bool must be 0 or 1; other bytes are read as 1" in fault for fault in faults)
        store = FeatureStore(dataset)
        if "label" in file:  # labels are compared with their checksum
            with pytest.raises(StorageError, match="checksum"):
                store.labels["n"]
            path.write_bytes(data)
            continue
        read = [store.table("flag").read_rows(range(500)), store.labels["n"]]
        read += [torch.cat([rows for _, rows in store.table("flag").scan(100)])]
        for rows, expected in zip(read, [FLAGS, FLAGS[:, :3], FLAGS], strict=True):
            assert np.array_equal(rows.view(torch.uint8), expected.astype(np.uint8))
        path.write_bytes(data)
