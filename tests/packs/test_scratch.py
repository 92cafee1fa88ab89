"""Scratch: where it goes, what it refuses, how large it may be, and reads= itself."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packs_example import (
    open_source,
    scratch_files,
)

import gids
import gids.pyg
from gids import _core
from gids.errors import StorageError
from gids.io import open_engine
from gids.packs import Scratch, ScratchFull, find_scratch, scratch
from gids.packs.scratch import BLOCK, ScratchFile


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


def test_files_stay_within_the_limit_together(tmp_path: Path) -> None:
    whole = find_scratch([str(tmp_path)], 100_000, ())
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
    assert os.fstat(one.fds[0]).st_blocks * 512 >= 61_440
    one.close()
    one.close()
    assert whole.taken_bytes == 0
    assert not scratch_files(tmp_path)


def test_a_file_that_is_dropped_gives_its_space_back(tmp_path: Path) -> None:
    whole = Scratch([tmp_path], 1 << 20)
    file = whole.open()
    file.reserve(1 << 19)
    del file
    assert whole.taken_bytes == 0
    assert not scratch_files(tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.EDQUOT, "quota"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_cut_is_closed(
    several: list[Path], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Btrfs, where a quota is used up; or because of Ctrl-C."""

    def cut(*_: int) -> None:
        raise error

    file = Scratch(several, 1 << 20).open()
    fds = list(file.fds)
    monkeypatch.setattr(os, "ftruncate", cut)
    with suppress(KeyboardInterrupt):
        file.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


class Interrupt(BaseException):
    """In place of KeyboardInterrupt, which would end pytest."""


def test_ctrl_c_that_comes_while_a_file_is_opened_leaves_it_to_nobody(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupt

    whole, before = Scratch([tmp_path], 1 << 20), signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(20):
            files = list[ScratchFile]()
            with suppress(Interrupt):
                signal.setitimer(signal.ITIMER_REAL, 2e-3)
                for _ in range(2000):
                    files.append(whole.open())
            while files:
                files.pop().close()
    finally:
        signal.signal(signal.SIGALRM, before)
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


@pytest.mark.parametrize("reads", ["packs", "sweep", "", None, 3, ["pack"]])
def test_other_reads_are_refused(path: Path, reads: Any) -> None:
    with pytest.raises(ValueError, match="reads must be one of auto, random, pack"):
        open_source(path, reads)


def scratch_of(source: gids.Source, table: str) -> Scratch | None:
    """Where the packs of a table go."""
    return source.lender.scratch(source.options, source.store.table(table).shard_paths)


def test_loaders_of_a_source_share_the_limit(path: Path) -> None:
    with open_source(path, "pack", scratch_bytes=1 << 30) as source:
        one, other = (scratch_of(source, name) for name in ("paper.feat", "author.feat"))
        assert one is other is not None


@pytest.fixture
def long_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of any length count as long."""
    monkeypatch.setattr(scratch, "_LONG_BYTES", 1)


def inode(file: ScratchFile) -> int:
    return os.fstat(file.fds[0]).st_ino


@pytest.mark.usefixtures("long_files")
def test_a_long_file_is_kept_for_one_of_about_its_length(tmp_path: Path) -> None:
    whole = Scratch([tmp_path], 100 * BLOCK)
    file = whole.open(40 * BLOCK)
    file.reserve(40 * BLOCK)
    first = inode(file)
    file.close(keep=True)
    file.close(keep=True)
    assert (whole.taken_bytes, whole.free_bytes()) == (0, 100 * BLOCK)
    assert len(scratch_files(tmp_path)) == 1
    short = whole.open(19 * BLOCK)
    assert inode(short) != first
    again = whole.open(20 * BLOCK)
    assert (inode(again), again.nbytes) == (first, 40 * BLOCK)
    again.reserve(50 * BLOCK)
    again.close(keep=True)
    del short
    whole.wait_for_space()
    assert not scratch_files(tmp_path)


@pytest.mark.usefixtures("long_files")
@pytest.mark.parametrize("full", ["limit", "disk", "quota"])
def test_the_file_that_is_kept_makes_room_for_others(
    tmp_path: Path, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Scratch([tmp_path], 100 * BLOCK if full == "limit" else 1 << 30)
    kept, other = whole.open(60 * BLOCK), whole.open()
    kept.reserve(60 * BLOCK)
    kept.close(keep=True)
    allocate = os.posix_fallocate

    def allocate_if_alone(fd: int, begin: int, nbytes: int) -> None:
        if len(scratch_files(tmp_path)) > 1:
            raise OSError(errno.ENOSPC if full == "disk" else errno.EDQUOT, "full")
        allocate(fd, begin, nbytes)

    if full != "limit":
        monkeypatch.setattr(os, "posix_fallocate", allocate_if_alone)
    other.reserve(50 * BLOCK)
    assert len(scratch_files(tmp_path)) == 1
    assert other.nbytes == 50 * BLOCK


def test_a_file_counts_before_it_gets_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may reserve meanwhile."""
    whole = Scratch([tmp_path], 100 * BLOCK)
    one, other = whole.open(), whole.open()
    allocate = os.posix_fallocate

    def reserve_meanwhile(fd: int, begin: int, nbytes: int) -> None:
        with pytest.raises(ScratchFull):
            other.reserve(60 * BLOCK)
        allocate(fd, begin, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", reserve_meanwhile)
    one.reserve(60 * BLOCK)
    assert (whole.taken_bytes, other.nbytes) == (60 * BLOCK, 0)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: os.open(tmp_path / "none", 0))
    with pytest.raises(StorageError):
        other.reserve(10 * BLOCK)
    assert whole.taken_bytes == 60 * BLOCK


def test_the_garbage_collector_may_close_a_file_while_others_are_counted(tmp_path: Path) -> None:
    whole = Scratch([tmp_path], 100 * BLOCK)
    with whole._lock:
        assert whole._lock.acquire(blocking=False)
        whole._lock.release()


@pytest.mark.usefixtures("long_files")
def test_another_thread_may_wait_for_space_while_a_file_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Scratch([tmp_path], 100 * BLOCK)
    file, start = whole.open(), threading.Thread.start
    file.reserve(BLOCK)

    def wait_before(thread: threading.Thread) -> None:
        whole.wait_for_space()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", wait_before)
    file.close()
    whole.wait_for_space()
    assert not scratch_files(tmp_path)


@pytest.mark.usefixtures("long_files")
def test_a_forked_child_does_not_write_to_the_file_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Scratch([tmp_path], 1 << 30)
    file = whole.open(BLOCK)
    file.reserve(BLOCK)
    first, copy = inode(file), os.dup(file.fds[0])
    file.close(keep=True)
    pid = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: pid + 1)
        assert inode(whole.open(BLOCK)) != first
    assert os.fstat(copy).st_blocks  # the parent's
    os.close(copy)


def test_options_of_scratch_hold_for_each_loader(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with open_source(path, "pack", scratch=tmp_path, scratch_bytes=1 << 30) as source:
        other = source.with_options(scratch=str(tmp_path / "other"), scratch_bytes=1 << 20)
        for taken, directory, limit in ((source, tmp_path, 1 << 30), (other, tmp_path / "other", 1 << 20)):
            space = scratch_of(taken, "paper.feat")
            assert (space.directories, space.limit_bytes) == ((directory,), limit)


def test_a_file_is_striped_over_its_directories(several: list[Path]) -> None:
    """Reads of packs and a ScratchFile agree where each byte is; the writer, in the epochs below."""
    rng = np.random.default_rng(0)
    whole = Scratch(several, 32 << 20)
    file = whole.open()
    file.reserve(nbytes := (7 << 20) + (3 << 12))
    assert whole.taken_bytes == nbytes
    assert [os.fstat(fd).st_size for fd in file.fds] == [3 << 20, (2 << 20) + (3 << 12), 2 << 20]
    model = rng.integers(0, 256, nbytes, np.uint8)
    done = 0
    for number, offset, n in file.stripes(0, nbytes):
        assert os.pwrite(file.fds[number], aligned(model[done : done + n]), offset) == n
        done += n
    with open_engine(file.paths, direct=file.direct, max_read_bytes=256 << 10) as engine:
        engine.inject_faults([(1, 1 << 20, errno.EIO, 1 << 30)])  # of the fifth stripe
        to, priority = _core.PackMemory.create(nbytes), _core.Priority.create()
        begin, n = 4096 * 100, nbytes - 4096 * 200
        read = _core.PackRead(engine.native, priority, 0, begin, to, 4096, n, files=3)
        [(first, end, code)] = read.wait()
    assert (begin + first, code) == (4 << 20, errno.EIO)
    assert file.directory_of(begin + first) == several[1]
    expected, found = model[begin : begin + n], to.bytes()[4096 : 4096 + n]
    assert (found[:first] == expected[:first]).all()
    assert (found[end:] == expected[end:]).all()
    file.close()
    assert not whole.taken_bytes


def aligned(data: np.ndarray) -> mmap.mmap:
    """A copy for direct I/O."""
    memory = mmap.mmap(-1, len(data))
    memory[:] = data.tobytes()
    return memory


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


def test_a_wrong_directory_of_several_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="scratch= must be a directory") as caught:
        open_source(path, "pack", scratch=[tmp_path, tmp_path / "none"])
    assert caught.value.filename == str(tmp_path / "none")
    with pytest.raises(ValueError, match="scratch is an empty list: give a directory, or several"):
        open_source(path, "pack", scratch=[])


@pytest.fixture
def several(tmp_path: Path) -> list[Path]:
    """Three directories."""
    directories = [tmp_path / name for name in ("a", "b", "c")]
    for directory in directories:
        directory.mkdir()
    return directories
