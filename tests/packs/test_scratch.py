"""Scratch: where it goes, what it refuses, how large it may be, and reads= itself."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from packs_example import PAPERS, assert_same, open_loader, open_source, scratch_files

import gids
import gids.pyg
from gids.errors import StorageError
from gids.packs import Scratch, ScratchFull, find_scratch, scratch


def test_a_directory_that_does_not_exist_or_is_a_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(StorageError, match="scratch= must be a directory") as caught:
            open_source(path, "auto", scratch=wrong)
        assert caught.value.errno == errno.ENOTDIR
        assert caught.value.filename == str(wrong)
        open_source(path, "random", scratch=wrong).close()  # which needs none


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs at /dev/shm")
def test_a_directory_in_memory_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"/dev/shm is on tmpfs, which is memory: scratch= must be"):
        open_source(path, "pack", scratch="/dev/shm")


def test_packs_go_to_the_directory_that_was_given(path: Path, tmp_path: Path) -> None:
    with open_source(path, "pack", scratch=tmp_path) as source:
        epoch = iter(open_loader(source))
        next(epoch)
        assert len(set(scratch_files(tmp_path))) == 2  # sampled minibatches, and packs
        assert not scratch_files(path)
        epoch.close()
        assert not scratch_files(tmp_path)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["pack", "auto"])
def test_a_dataset_that_cannot_be_written_is_read_at_random(
    path: Path, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(directory: Path) -> None:
        raise StorageError(errno.EROFS, "cannot make a scratch file: Read-only file system", directory)

    monkeypatch.setattr("gids.loader.feature_loader.LEAST_BYTES", 0)
    monkeypatch.setattr("gids.loader.pack_switch.LEAST_WAIT_S", 0.0)
    monkeypatch.setattr(scratch, "_try", refused)
    caplog.set_level(logging.INFO)
    with open_source(path, "random") as source:
        expected = list(open_loader(source))
    # Less than the tables, so that packs are considered.
    with open_source(path, way, 2_700_000 if way == "auto" else 16 << 20) as source:
        loader = open_loader(source, batch_size=64 if way != "auto" else 8)
        found = [list(loader) for _ in range(2)]
        if way != "auto":
            for a, b in zip(expected, found[0], strict=True):
                assert_same(a, b)
        assert loader.stats()["packs"]["choices"] == []
    [told] = [r for r in caplog.records if "no scratch files, so no packs" in r.getMessage()]
    assert told.levelname == ("WARNING" if way == "pack" else "INFO")
    assert "Read-only file system" in told.getMessage()
    assert "scratch=DIRECTORY" in told.getMessage()


def test_files_stay_within_the_limit_together(tmp_path: Path) -> None:
    whole = find_scratch(tmp_path, 100_000, ())
    assert whole is not None
    one, other = whole.open(), whole.open()
    one.reserve(40_960)
    other.reserve(40_960)
    assert whole.taken_bytes == 81_920
    with pytest.raises(ScratchFull, match="scratch_bytes=100000 is used up"):
        one.reserve(61_440)
    one.reserve(20_480)  # is longer already
    other.close()
    one.reserve(61_440)
    assert whole.taken_bytes == 61_440
    assert os.fstat(one.fd).st_blocks * 512 >= 61_440
    one.close()
    one.close()
    assert whole.taken_bytes == 0
    assert not scratch_files(tmp_path)


def test_a_file_that_is_dropped_gives_its_space_back(tmp_path: Path) -> None:
    whole = Scratch(tmp_path, 1 << 20)
    file = whole.open()
    file.reserve(1 << 19)
    del file
    assert whole.taken_bytes == 0
    assert not scratch_files(tmp_path)


def test_half_of_the_free_space_without_a_limit(tmp_path: Path) -> None:
    found = find_scratch(tmp_path, None, ())
    assert found is not None
    of = os.statvfs(tmp_path)
    free = of.f_bavail * of.f_frsize
    assert 0.3 * free < found.limit_bytes < 0.7 * free


@pytest.mark.parametrize("reads", ["packs", "sweep", "", None, 3, ["pack"]])
def test_other_reads_are_refused(path: Path, reads: Any) -> None:
    with pytest.raises(ValueError, match="reads must be one of auto, random, pack"):
        open_source(path, reads)


@pytest.mark.few(4)
@pytest.mark.parametrize("reads", ["pack", "auto"])
@pytest.mark.parametrize("scratch_bytes", [0, 1, 4096])
@pytest.mark.parametrize("kind", ["node", "features", "pyg"])
def test_scratch_without_room_loses_no_minibatch(
    path: Path,
    reads: str,
    scratch_bytes: int,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("gids.loader.pack_switch.LEAST_WAIT_S", 0.0)
    monkeypatch.setattr(
        gids.FeatureLoader, "may_use_packs", lambda self, learned, count: not learned.random(count)
    )
    with open_source(path, "random") as source:
        expected = list(open_loader(source))
    with open_source(path, reads, scratch_bytes=scratch_bytes) as source:
        if kind == "features":
            ids = [{"paper.feat": torch.arange(i, i + 100)} for i in range(20)]
            loader = gids.FeatureLoader(source, ["paper.feat"])
            for _ in range(2):
                for minibatch, features in loader.attach(iter(ids), lambda ids: ids):
                    rows = source.store.table("paper.feat").read_rows(minibatch["paper.feat"].tolist())
                    assert torch.equal(features["paper.feat"], rows)
                assert torch.equal(minibatch["paper.feat"], ids[-1]["paper.feat"])
        elif kind == "pyg":
            loader = gids.pyg.NeighborLoader(
                source, [4, 4], ("paper", torch.arange(0, PAPERS, 3)), batch_size=64
            )
            for _ in range(2):
                assert len(list(loader)) == len(expected)
        else:
            loader = open_loader(source)
            for a, b in zip(expected, loader, strict=True):
                assert_same(a, b)
            assert len(list(loader)) == len(expected)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 or (scratch_bytes == 4096 and not warnings)
    assert all(f"scratch_bytes={scratch_bytes}" in warning for warning in warnings)


def test_loaders_of_a_source_share_the_limit(path: Path) -> None:
    with open_source(path, "pack", scratch_bytes=1 << 30) as source:
        one, other = (gids.FeatureLoader(source, [name]) for name in ("paper.feat", "author.feat"))
        assert one._packs.scratch is other._packs.scratch is not None


def test_a_forked_child_keeps_no_scratch(path: Path, tmp_path: Path) -> None:
    """A child that was forked in mid-epoch, as a worker of a DataLoader is, has the descriptors, too."""
    with open_source(path, "pack", scratch=tmp_path) as source:
        epoch = iter(open_loader(source))
        next(epoch)
        files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        unnamed = [fd for fd in files if os.path.islink(fd) and str(tmp_path) in os.readlink(fd)]
        assert any(os.stat(fd).st_blocks for fd in unnamed)
        copies = [os.dup(int(Path(fd).name)) for fd in unnamed]  # as the child has them
        epoch.close()
        assert not any(os.fstat(fd).st_blocks for fd in copies)
        for fd in copies:
            os.close(fd)


def test_options_of_scratch_hold_for_each_loader(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with open_source(path, "pack", scratch=tmp_path, scratch_bytes=1 << 30) as source:
        other = source.with_options(scratch=str(tmp_path / "other"), scratch_bytes=1 << 20)
        for taken, directory, limit in ((source, tmp_path, 1 << 30), (other, tmp_path / "other", 1 << 20)):
            space = gids.FeatureLoader(taken, ["paper.feat"])._packs.scratch
            assert space is not None
            assert (space.directory, space.limit_bytes) == (directory, limit)
