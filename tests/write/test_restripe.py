"""restripe moves the shards. Rows do not change, and the dataset stays valid whatever happens."""

import errno
import os
from functools import partial

import numpy as np
import pytest
import torch
from children import killed
from datasets import contents, has_open

import gids
from gids import FeatureLoader, NodeLoader
from gids.errors import FormatError, StorageError
from gids.store import FeatureStore, verify
from gids.write import DatasetWriter, restripe, workplace

ROWS = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)
ORDER = np.random.default_rng(1).permutation(500)


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
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="given twice"):
        restripe(dataset, [disks[0], disks[1] / "../ssd0"], allow_dirs=disks)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        restripe(dataset, [tmp_path / "nowhere"], allow_dirs=disks)
    with pytest.raises(FileNotFoundError, match="no dataset at"):
        restripe(tmp_path / "b.gids", disks)
    with pytest.raises(FormatError, match="is outside the dataset"):
        restripe(dataset, disks[:1])
    writer = DatasetWriter(dataset, overwrite=True)
    with pytest.raises(FileExistsError, match="another writer"):
        restripe(dataset, disks, allow_dirs=disks)
    writer.close(discard=True)
    with monkeypatch.context() as patch:
        full = os.statvfs_result((4096, 4096, 10, 1, 1, 9, 9, 9, 0, 255))
        patch.setattr("gids.write.files.os.statvfs", lambda _: full)
        with pytest.raises(StorageError, match="not enough room"):
            restripe(dataset, disks, allow_dirs=disks)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "stage", ["page_sink.PageSink.store", "workplace.sync_tree", "workplace.put_in_place"]
)
def test_failure_leaves_the_dataset_unchanged(dataset, disks, tmp_path, monkeypatch, stage):
    before = contents(tmp_path)

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "full")

    for stripe in (disks, []):
        with monkeypatch.context() as patch:
            patch.setattr(f"gids.write.{stage}", fail)
            with pytest.raises(StorageError, match=r"nothing was published|the dataset is unchanged"):
                restripe(dataset, stripe, allow_dirs=disks)
        assert contents(tmp_path) == before


def test_a_damaged_page_is_not_copied(dataset, disks):
    shard = FeatureStore(dataset, allow_dirs=disks).table("feat").shard_paths[1]
    data = bytearray(shard.read_bytes())
    data[700] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StorageError, match=r"page 3 of '_N\.feat' fails its CRC32C"):
        restripe(dataset, disks[2:], allow_dirs=disks)
    assert not list(disks[2].iterdir())


def test_arrays_are_copied_where_the_file_system_has_no_links(dataset, disks, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    restripe(dataset, disks, allow_dirs=disks)
    check(dataset, disks)


@pytest.mark.few(1)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("next_stripe", [[0, 1, 2], [2], []])
def test_killed_restripe_leaves_a_valid_dataset_and_the_next_one_cleans_up(
    dataset, disks, moment, next_stripe
):
    work = partial(restripe, dataset, disks, allow_dirs=disks)
    killed(work, workplace, "put_in_place", after=moment == "after")
    named, there = check(dataset, disks)
    assert named < there
    assert len(named) == (6 if moment == "after" else 4)
    restripe(dataset, [disks[i] for i in next_stripe], allow_dirs=disks)
    named, there = check(dataset, disks)
    assert named == there
    assert not dataset.with_name("a.gids.partial").exists()


def test_closed_loader_releases_the_dataset(dataset, disks):
    restripe(dataset, [], allow_dirs=disks)
    for open_loader in (
        lambda: FeatureLoader(dataset, ["feat"]),
        lambda: NodeLoader(dataset, torch.arange(4), [2], batch_size=2, tables=[]),
    ):
        loader = open_loader()
        assert has_open(dataset)
        loader.close()
        assert not has_open(dataset)
    store = FeatureStore(dataset)
    with FeatureLoader(gids.open(store, memory="64MiB"), ["feat"]):
        pass
    assert has_open(dataset)  # it is the caller's
    store.close()
    store.close()
    assert not has_open(dataset)
