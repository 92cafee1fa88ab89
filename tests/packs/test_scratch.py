"""Scratch: where it goes, what it refuses, how large it may be, and reads= itself."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from packs_example import open_source, scratch_files

from gids.errors import StorageError
from gids.packs import Scratch, ScratchFull, find_scratch, scratch


def test_a_directory_that_does_not_exist_or_is_a_file_is_named(path: Path, tmp_path: Path) -> None:
    missing, file = tmp_path / "none", tmp_path / "file"
    file.touch()
    for given, wrong in ((missing, missing), (file, file), ([tmp_path, missing], missing)):
        with pytest.raises(StorageError, match="scratch= must be a directory") as caught:
            open_source(path, "auto", scratch=given)
        assert caught.value.errno == errno.ENOTDIR
        assert caught.value.filename == str(wrong)
        open_source(path, "random", scratch=given).close()  # which needs none
    with pytest.raises(ValueError, match="scratch is an empty list: give a directory, or several"):
        open_source(path, "pack", scratch=[])
    with pytest.raises(ValueError, match="reads must be one of auto, random, pack"):
        open_source(path, "packs")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs at /dev/shm")
def test_a_directory_in_memory_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"/dev/shm is on tmpfs, which is memory: scratch= must be"):
        open_source(path, "pack", scratch="/dev/shm")


def test_files_stay_within_the_limit_together(tmp_path: Path) -> None:
    whole = find_scratch([str(tmp_path)], 100_000, ())
    one, other = whole.open(), whole.open()
    one.reserve(40_960)
    other.reserve(40_960)
    assert whole.free_bytes == 100_000 - 81_920
    with pytest.raises(ScratchFull, match="scratch_bytes=100000 is used up"):
        one.reserve(61_440)
    one.reserve(20_480)  # is longer already
    other.close()
    one.reserve(61_440)
    assert whole.free_bytes == 100_000 - 61_440
    assert os.fstat(one.fds[0]).st_blocks * 512 >= 61_440
    one.close()
    one.close()
    assert whole.free_bytes == 100_000
    assert not scratch_files(tmp_path)


def test_a_file_system_that_reserves_nothing(several: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(*_: int) -> None:  # ext2 and ext3, where a file is direct
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    file = Scratch(several, 2 << 20).open()
    if not file.direct:
        pytest.skip("no direct I/O here")
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    file.reserve(5 << 18)
    assert [os.fstat(fd).st_size for fd in file.fds] == [1 << 20, 1 << 18, 0]
    file.close()


def test_each_directory_takes_as_much(several: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(devices: str, *free: int) -> int:
        names = list(map(str, several))
        monkeypatch.setattr(scratch, "device_of", lambda p: devices[names.index(str(p))])
        monkeypatch.setattr(
            "gids.packs.scratch.os.statvfs",
            lambda p: SimpleNamespace(f_frsize=1, f_bavail=free[names.index(str(p))]),
        )
        made = find_scratch(names, None, (), ranks=2)
        return made.limit_bytes

    assert limit("abc", 400, 800, 1200) == 3 * 100
    assert limit("aab", 800, 800, 300) == 3 * 75
    assert limit("aab", 240, 240, 300) == 3 * 30
    assert find_scratch(list(map(str, several)), 77, ()).limit_bytes == 77  # type: ignore[union-attr]


def test_loaders_of_a_source_share_the_limit_of_a_rank(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with open_source(path, "pack") as source:
        shards = [source.store.table(name).shard_paths for name in ("paper.feat", "author.feat")]
        one, other = (source.lender.scratch(source.options, paths) for paths in shards)
        whole = find_scratch(None, None, shards[0])
    assert one is other
    assert one.limit_bytes == pytest.approx(whole.limit_bytes / 4, rel=0.1)  # type: ignore[union-attr]


@pytest.fixture
def several(tmp_path: Path) -> list[Path]:
    """Three directories."""
    directories = [tmp_path / name for name in ("a", "b", "c")]
    for directory in directories:
        directory.mkdir()
    return directories
