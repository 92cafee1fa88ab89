"""Scratch: where it goes, what it refuses, how large it may be, and reads= itself."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from packs_example import WAYS, assert_same, open_loader, open_source, scratch_files

import gids
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


@pytest.mark.parametrize("way", [*WAYS, "auto"])
def test_a_dataset_that_cannot_be_written_is_read_at_random(
    path: Path, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(directory: Path) -> None:
        raise StorageError(errno.EROFS, "cannot make a scratch file: Read-only file system", directory)

    monkeypatch.setattr("gids.loader.feature_loader.LEAST_BYTES", 0)
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
    told = [r.getMessage() for r in caplog.records if "no scratch files" in r.getMessage()]
    assert len(told) == 1
    assert "Read-only file system" in told[0]
    assert "scratch=DIRECTORY" in told[0]


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


@pytest.mark.parametrize("reads", ["packs", "", None, 3, ["pack"]])
def test_other_reads_are_refused(path: Path, reads: Any) -> None:
    with pytest.raises(ValueError, match="reads must be one of auto, random, sweep, pack"):
        open_source(path, reads)


def test_a_sweep_on_a_device_is_refused(path: Path) -> None:
    with (
        gids.open(path, reads="sweep") as source,
        pytest.raises(ValueError, match=r"reads='sweep'.*device='cpu'"),
    ):
        gids.FeatureLoader(source, ["paper.feat"], device="cuda")


def test_a_sweep_on_a_device_is_refused_before_it_is_opened(path: Path) -> None:
    with (
        gids.open(path, reads="sweep") as source,
        pytest.raises(ValueError, match=r"reads='sweep'.*device='cpu'"),
    ):
        gids.NodeLoader(source, {"paper": torch.arange(5)}, [2], device="cuda")
