"""A dataset is published completely or not at all, whatever fails."""

import errno
import os
import subprocess

import numpy as np
import pytest
import torch
from children import ended
from datasets import needs_unsigned, write_dataset
from full_disk import small_disk

from gids import FeatureStore, FormatError, StorageError
from gids.store import GeneratedRows
from gids.write import DatasetWriter, edge_list

ROWS = torch.arange(2000, dtype=torch.float32)[:, None].repeat(1, 256)


def test_every_file_is_synced_before_the_dataset_appears(tmp_path, monkeypatch):
    """tests/write/test_kills.py shows the order of all syncs, for every command, if slow tests run."""
    path, synced = tmp_path / "a.gids", set()
    (tmp_path / "ssd").mkdir()

    def recorded(sync):
        def called(fd):
            assert not path.exists() or not os.path.isfile(f"/proc/self/fd/{fd}")
            synced.add(os.fstat(fd).st_ino)
            sync(fd)

        return called

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, recorded(getattr(os, name)))
    write_dataset(path, stripe=[tmp_path / "ssd"])
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.name.startswith("shard") for file in written)
    assert [file for file in written if file.stat().st_size and file.stat().st_ino not in synced] == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path, error):
    (tmp_path / "ssd").mkdir()

    def fail(writer):
        writer.write_table("node", "n", "k", ROWS)
        raise error

    with pytest.raises(error), DatasetWriter(tmp_path / "a.gids", stripe=[tmp_path / "ssd"]) as writer:
        fail(writer)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["ssd"]


def test_an_error_of_the_source_reaches_the_caller(tmp_path):
    def fill(start, out):
        if start > 500:
            raise StorageError(errno.EIO, "cannot read", "features.npy", start)
        out.zero_()

    with pytest.raises(StorageError, match=r"features\.npy at byte"):
        with DatasetWriter(tmp_path / "a.gids", workers=3, memory_bytes=1 << 20) as writer:
            writer.write_table("node", "n", "k", GeneratedRows(ROWS.shape, ROWS.dtype, fill))
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_exists_is_replaced(tmp_path):
    path = write_dataset(tmp_path / "a.gids")
    before = (path / "manifest.json").read_bytes()
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("all of it")
    (tmp_path / "link.gids").symlink_to("nowhere")
    for taken in (path, tmp_path / "home", tmp_path / "link.gids"):
        with pytest.raises(FileExistsError) as caught:
            DatasetWriter(taken)
        cure = "choose another name, or remove it first"
        assert str(caught.value) == f"{taken} already exists, and a dataset never changes: {cure}"
    with pytest.raises(ValueError, match=r"x\.gids is inside the dataset .*a\.gids, which never changes"):
        DatasetWriter(path / "tables/x.gids")
    assert (path / "manifest.json").read_bytes() == before
    (tmp_path / "b.gids.partial").mkdir()
    (tmp_path / "b.gids.partial/notes.txt").write_text("mine")
    (tmp_path / "c.gids.partial").symlink_to("nowhere")
    for name in ("b.gids", "c.gids"):
        with pytest.raises(FileExistsError, match="exists and does not belong to a conversion"):
            DatasetWriter(tmp_path / name)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["a.gids", "b.gids.partial", "c.gids.partial", "home", "link.gids"]


def test_a_forked_child_that_ends_leaves_the_work_of_its_parent(tmp_path):
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "n", "k", ROWS[:1000])
        ended(lambda: writer.__exit__(None, None, None))
        assert not (tmp_path / "a.gids").exists()
        writer.write_table("node", "m", "k", ROWS)
    assert torch.equal(FeatureStore(tmp_path / "a.gids").read_rows(range(2000), "m.k"), ROWS)


def test_two_writers_of_one_dataset_are_refused(tmp_path):
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "n", "k", ROWS)
        with pytest.raises(FileExistsError) as caught:
            DatasetWriter(tmp_path / "a.gids")
        assert str(caught.value) == (
            f"another writer, of this or another process, is writing {tmp_path / 'a.gids'}: wait for it, or "
            "choose another name"
        )
    assert FeatureStore(tmp_path / "a.gids").num_nodes() == 2000


LOOPS = ("n", "r", "n")


def put(writer, values, ntype="n"):
    writer.write_table("node", ntype, "k", values)


def edges_of(node):
    return edge_list(torch.tensor([node]), torch.tensor([node]), num_src=3, num_dst=3)


def splits(writer, *split):
    writer.add_nodes("n", 3)
    writer.write_split("n", *split)


@needs_unsigned
@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda w: [w.add_nodes("n", 3), put(w, ROWS)], FormatError, "'n' has 3 nodes in one part of the "),
        (lambda w: put(w, torch.zeros(())), FormatError, "single number"),
        (lambda w: put(w, torch.zeros(3, 0)), FormatError, "table 'n.k': rows have 0 bytes"),
        (lambda w: put(w, ROWS.cfloat()), FormatError, "table 'n.k': tables cannot hold complex64: cast"),
        (lambda w: put(w, [1.0]), TypeError, r"array of NumPy, a dense tensor of torch, .* \(got list\)"),
        (lambda w: put(w, torch.eye(3).to_sparse()), TypeError, r"\(got a sparse tensor\)"),
        (lambda w: put(w, np.ma.masked_equal(np.arange(3), 1)), TypeError, r"masked: give values\.filled"),
        (lambda w: put(w, ROWS, "n" * 121), FormatError, "too long"),
        (lambda w: put(w, ROWS, "é" * 40), FormatError, "would have 242 bytes, at most 200"),
        (lambda w: [put(w, ROWS), put(w, ROWS)], FormatError, "table 'n.k' occurs twice"),
        (lambda w: [w.write_labels("n", ROWS) for _ in range(2)], FormatError, "label of 'n' occurs twice"),
        (lambda w: w.write_labels("n", np.uint64([1, 1 << 63])), FormatError, "labels of 'n': a label is 9"),
        (lambda w: w.write_labels("n", ROWS[:2, 0].cfloat()), FormatError, r"'n' are complex64\[2\]; save "),
        (lambda w: [w.write_edges(LOOPS, edges_of(1)) for _ in "12"], FormatError, "'n.r.n' occurs twice"),
        (lambda w: w.write_split("n", "train", torch.tensor([1])), FormatError, "number of 'n' nodes is not"),
        (lambda w: splits(w, "val", torch.tensor([3])), FormatError, r"val_idx\[0\] is 3"),
        (lambda w: splits(w, "val", torch.tensor([0.5])), FormatError, "must be node ids"),
        (lambda w: splits(w, "valid", [0]), ValueError, "no split 'valid': choose 'train', 'val', 'test'"),
    ],
)
def test_what_a_dataset_cannot_hold_is_refused_and_nothing_is_left(tmp_path, write, error, message):
    with pytest.raises(error, match=message), DatasetWriter(tmp_path / "a.gids") as writer:
        write(writer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"page_bytes": 1000}, FormatError, "multiple of 512"),
        ({"stripe": 0}, ValueError, "must be 1 or more shards"),
        ({"stripe": "/tmp"}, TypeError, r"must be a list of directories: give \['/tmp'\]"),
        ({"stripe": ["/proc/nonexistent"]}, FileNotFoundError, "directory /proc/nonexistent does not exist"),
        ({"workers": 0}, ValueError, "at least 1"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        DatasetWriter(tmp_path / "a.gids", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_writer_is_refused(tmp_path):
    with DatasetWriter(tmp_path / "a.gids") as writer:
        put(writer, ROWS)
    with pytest.raises(ValueError, match=r"the writer of a\.gids is closed"):
        put(writer, ROWS, "other")


class Slices:
    """Rows by slices only, at most `most` at a time."""

    def __init__(self, values, most):
        self._values, self._most = values, most
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, rows):
        assert rows.stop - rows.start <= self._most
        return self._values[rows]


@pytest.mark.parametrize(("dtype", "order"), [("float32", 1), ("uint16", None), ("bool", None)])
def test_anything_with_slices_is_written_by_blocks(tmp_path, dtype, order):
    values = (np.arange(3000 * 500).reshape(3000, 500) % 251).astype(dtype)
    positions = None if order is None else np.random.default_rng(order).permutation(3000)
    with DatasetWriter(tmp_path / "a.gids", memory_bytes=1 << 20) as writer:
        writer.write_table("node", "n", "k", Slices(values, 2999), order=positions)
        writer.write_labels("n", Slices(values[:, :1], 3000))
    store = FeatureStore(tmp_path / "a.gids")
    assert np.array_equal(store.table("n.k").read_rows(range(3000)).numpy(), values)
    assert store.labels["n"].shape == (3000, 1)


@pytest.mark.parametrize("key", [None, {"source": 1}])
def test_full_disk_raises_and_publishes_nothing(key):
    with small_disk("1m") as place:
        writer = DatasetWriter(place / "a.gids", resume_key=key)
        with (
            pytest.raises(StorageError, match=r"No space left .* while writing table n\.k") as caught,
            writer,
        ):
            writer.write_table("node", "n", "k", ROWS)
        assert caught.value.errno == errno.ENOSPC
        assert not (place / "a.gids").exists()
        if key is None:
            assert "nothing was published" in str(caught.value)
            assert list(place.iterdir()) == []
        else:
            assert "free space and try again" in str(caught.value)  # nothing was on disk yet to resume from
            subprocess.run(["mount", "-o", "remount,size=8m", place], check=True)
            with DatasetWriter(place / "a.gids", resume_key=key) as again:
                again.write_table("node", "n", "k", ROWS)
            assert torch.equal(FeatureStore(place / "a.gids").read_rows(range(2000)), ROWS)


def test_error_names_the_full_disk_among_several(tmp_path):
    with small_disk("64k") as place:
        (place / "else").write_bytes(bytes(64 << 10))
        message = f"while writing table n.k \\(0 B free on the disk of {place}\\); "
        with pytest.raises(StorageError, match=message):
            with DatasetWriter(tmp_path / "a.gids", stripe=[tmp_path, place]) as writer:
                writer.write_table("node", "n", "k", ROWS)
        assert [p.name for p in place.iterdir()] == ["else"]
    assert not (tmp_path / "a.gids.partial").exists()
