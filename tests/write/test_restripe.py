"""restripe moves the shards. Rows do not change, and the dataset stays valid whatever happens."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import gids
from gids import FeatureLoader, NodeLoader
from gids.errors import FormatError, StorageError
from gids.store import FeatureStore, verify
from gids.write import DatasetWriter, restripe
from gids.write.page_sink import PageSink

ROWS = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)
ORDER = np.random.default_rng(1).permutation(500)


@pytest.fixture
def disks(tmp_path):
    found = [tmp_path / f"ssd{i}" for i in range(3)]
    for disk in found:
        disk.mkdir()
    return found


@pytest.fixture
def dataset(tmp_path, disks):
    path = tmp_path / "a.gids"
    with DatasetWriter(path, stripe=disks[:2], page_bytes=512) as writer:
        writer.write_table("node", "_N", "feat", ROWS, order=ORDER)
        writer.write_table("node", "_N", "one", ROWS[:, :1])
        writer.write_graph(("_N", "_E", "_N"), np.arange(501), np.arange(500)[::-1].copy())
    return path


def check(path, disks):
    """Whole, in as many shards as disks, and nothing else is left anywhere."""
    assert not list(verify(path, allow_dirs=disks))
    store = FeatureStore(path, allow_dirs=disks)
    ids = np.random.default_rng(2).integers(0, 500, 900)
    assert np.array_equal(store.table("feat").read_rows(ids).numpy(), ROWS[ids])
    assert np.array_equal(store.table("one").read_rows(ids).numpy(), ROWS[ids, :1])
    named = {p for t in store.tables.values() for p in t.shard_paths}
    return named, {p for root in path.parent.iterdir() for p in root.rglob("shard-*.bin")}


@pytest.mark.slow
def test_shards_move_to_the_given_directories(dataset, disks):
    for stripe in ([disks[2]], disks, [disks[1], disks[0]], [], [], disks[:2]):
        restripe(dataset, stripe, allow_dirs=disks, workers=2)
        named, there = check(dataset, disks)
        assert named == there
        assert len(named) == 2 * max(1, len(stripe))
        assert all(any(p.is_relative_to(d) for d in stripe or [dataset]) for p in named)
        for i, disk in enumerate(stripe):
            assert len(list(disk.iterdir())) == 1, i
    assert not list(disks[2].iterdir())


def test_invalid_arguments_raise_and_change_nothing(dataset, disks, tmp_path, monkeypatch):
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="given twice"):
        restripe(dataset, [disks[0], disks[1] / "../ssd0"], allow_dirs=disks)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        restripe(dataset, [tmp_path / "nowhere"], allow_dirs=disks)
    with pytest.raises(FileNotFoundError, match="no dataset at"):
        restripe(tmp_path / "b.gids", disks)
    with pytest.raises(FormatError, match="is outside the dataset"):
        restripe(dataset, disks[:1])
    store = FeatureStore(dataset, allow_dirs=disks)
    with pytest.raises(FormatError, match=r"a\.gids is open in this or another process"):
        restripe(dataset, disks, allow_dirs=disks)
    del store
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(PermissionError, match="not writable"):
            restripe(dataset, disks, allow_dirs=disks)
    with monkeypatch.context() as patch:
        full = os.statvfs_result((4096, 4096, 10, 1, 1, 9, 9, 9, 0, 255))
        patch.setattr("gids.write.space.os.statvfs", lambda _: full)
        with pytest.raises(StorageError, match="not enough room"):
            restripe(dataset, disks, allow_dirs=disks)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("stage", ["PageSink.store", "sync_tree", "replace_manifest", "make_shard_folder"])
def test_failure_leaves_the_dataset_unchanged(dataset, disks, tmp_path, monkeypatch, stage):
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def fail(*_):
        raise OSError(errno.ENOSPC, "full")

    for stripe in (disks, []):
        with monkeypatch.context() as patch:
            patch.setattr(f"gids.write.restriping.{stage}", fail)
            if stripe or stage in ("PageSink.store", "replace_manifest"):
                with pytest.raises(StorageError, match="the dataset is unchanged"):
                    restripe(dataset, stripe, allow_dirs=disks)
                assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_damaged_page_is_not_copied(dataset, disks):
    shard = FeatureStore(dataset, allow_dirs=disks).table("feat").shard_paths[1]
    data = bytearray(shard.read_bytes())
    data[700] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StorageError, match=r"page 3 of '_N\.feat' fails its CRC32C"):
        restripe(dataset, disks[2:], allow_dirs=disks)
    assert not list(disks[2].iterdir())


def test_dataset_cannot_be_opened_while_it_is_moved(dataset, disks, monkeypatch):
    store = PageSink.store
    refused = []

    def write(*arguments):
        with pytest.raises(FormatError, match="is being restriped: open it when that is done"):
            FeatureStore(dataset, allow_dirs=disks)
        refused.append(True)
        store(*arguments)

    monkeypatch.setattr(PageSink, "store", write)
    restripe(dataset, disks, allow_dirs=disks)
    assert refused
    check(dataset, disks)


CHILD = """
import os, signal, sys
from gids.write import restripe
module = sys.modules[restripe.__module__]
moment, path, disks = sys.argv[1], sys.argv[2], sys.argv[3:]
replace_manifest = module.replace_manifest
def die(*arguments):
    if moment == "after":
        replace_manifest(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
module.replace_manifest = die
restripe(path, disks, allow_dirs=disks)
"""


def killed(moment, dataset, disks):
    done = subprocess.run([sys.executable, "-P", "-c", CHILD, moment, dataset, *disks], check=False)
    assert done.returncode == -9


@pytest.mark.few(1)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("next_stripe", [[0, 1, 2], [2], []])
def test_killed_restripe_leaves_a_valid_dataset_and_the_next_one_cleans_up(
    dataset, disks, moment, next_stripe
):
    killed(moment, dataset, disks)
    named, there = check(dataset, disks)
    assert named < there
    assert len(named) == (6 if moment == "after" else 4)
    restripe(dataset, [disks[i] for i in next_stripe], allow_dirs=disks)
    named, there = check(dataset, disks)
    assert named == there
    assert not (dataset / "leftovers.json").exists()


def test_shards_of_a_renamed_dataset_are_kept(dataset, disks, tmp_path):
    restripe(dataset, disks, allow_dirs=disks)
    moved = dataset.rename(tmp_path / "b.gids")
    with DatasetWriter(dataset, stripe=disks[:1]) as writer:
        writer.write_table("node", "_N", "feat", -ROWS)
    restripe(dataset, disks, allow_dirs=disks)
    for path, rows in ((moved, ROWS), (dataset, -ROWS)):
        assert not list(verify(path, allow_dirs=disks))
        assert np.array_equal(FeatureStore(path, allow_dirs=disks).table("feat").read_rows([7]), rows[7:8])


def test_listed_leftovers_that_a_dataset_uses_are_kept(dataset, disks, tmp_path):
    folders = [str(folder) for disk in disks for folder in disk.iterdir()]
    (tmp_path / "x.shards-1").mkdir()
    (tmp_path / "x.shards-1/letter.txt").write_text("mine")
    with DatasetWriter(tmp_path / "b.gids") as writer:
        writer.write_table("node", "_N", "feat", ROWS)
    hostile = [*folders, str(tmp_path / "x.shards-1"), str(tmp_path), "/", 7]
    (tmp_path / "b.gids/leftovers.json").write_text(json.dumps(hostile))
    restripe(tmp_path / "b.gids", [disks[2]])
    assert (tmp_path / "x.shards-1/letter.txt").exists()
    assert not list(verify(dataset, allow_dirs=disks))


def test_closed_loader_releases_the_dataset(dataset, disks):
    restripe(dataset, [], allow_dirs=disks)
    for loader in (
        FeatureLoader(dataset, ["feat"]),
        NodeLoader(dataset, torch.arange(4), [2], batch_size=2, tables=[]),
    ):
        with pytest.raises(FormatError, match="is open in"):
            restripe(dataset, disks)
        loader.close()
        restripe(dataset, [])
    store = FeatureStore(dataset)
    with FeatureLoader(gids.open(store, memory="64MiB"), ["feat"]):
        pass
    with pytest.raises(FormatError, match="is open in"):  # it is the caller's
        restripe(dataset, disks)
    store.close()
    store.close()
    restripe(dataset, disks)
