"""Scratch: where it goes, what it refuses, how large it may be, and reads= itself."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import signal
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packs_example import (
    PAPERS,
    assert_all_same,
    assert_same,
    cut_small,
    open_loader,
    open_source,
    scratch_files,
)

import gids
import gids.pyg
from gids import _core
from gids.errors import StorageError
from gids.io import open_engine
from gids.packs import Scratch, ScratchFull, find_scratch, memory, scratch, superbatch
from gids.packs.scratch import BLOCK, ScratchFile
from gids.sampler import Minibatch


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


@pytest.mark.parametrize("way", ["pack", "auto"])
def test_a_dataset_that_cannot_be_written_is_read_at_random(
    path: Path,
    expected: list[Minibatch],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(directory: Path) -> None:
        raise StorageError(errno.EROFS, "cannot make a scratch file: Read-only file system", directory)

    monkeypatch.setattr("gids.loader.pack_switch.LEAST_WAIT_S", 0.0)
    monkeypatch.setattr(scratch, "_try", refused)
    caplog.set_level(logging.INFO)
    # Less than the tables, so that packs are considered.
    with open_source(path, way, 2_700_000 if way == "auto" else 16 << 20) as source:
        loader = open_loader(source, batch_size=64 if way != "auto" else 8)
        found = [list(loader) for _ in range(2)]
        if way != "auto":
            assert_all_same(expected, found[0])
        assert loader.stats()["packs"]["choices"] == []
    [told] = [r for r in caplog.records if "no scratch files, so no packs" in r.getMessage()]
    assert told.levelname == ("WARNING" if way == "pack" else "INFO")
    assert "Read-only file system" in told.getMessage()
    assert "scratch=DIRECTORY" in told.getMessage()


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


@pytest.mark.few(4)
@pytest.mark.parametrize("reads", ["pack", "auto"])
@pytest.mark.parametrize("scratch_bytes", [0, 1, 4096])
@pytest.mark.parametrize("kind", ["node", "features", "pyg"])
def test_scratch_without_room_loses_no_minibatch(
    path: Path,
    expected: list[Minibatch],
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
                source,
                [4, 4],
                ("paper", torch.arange(0, PAPERS, 3)),
                batch_size=64,
                seed=0,
            )
            for _ in range(2):
                assert len(list(loader)) == len(expected)
        else:
            loader = open_loader(source)
            assert_all_same(expected, loader)
            assert len(list(loader)) == len(expected)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 or (scratch_bytes == 4096 and not warnings)
    assert all(f"scratch_bytes={scratch_bytes}" in warning for warning in warnings)


@pytest.mark.parametrize("reads", ["pack", "auto"])
def test_minibatches_that_were_sampled_for_packs_are_forgotten_without_them(
    path: Path, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise their rows stay in memory to the end of the epoch."""
    monkeypatch.setattr("gids.loader.pack_switch.LEAST_WAIT_S", 1e-6)
    if reads == "auto":
        monkeypatch.setattr(Scratch, "open", no_file)
    with open_source(path, reads, 2_700_000 if reads == "auto" else 16 << 20, scratch_bytes=1) as source:
        loader, alive = open_loader(source, batch_size=8), []
        for step, minibatch in enumerate(loader):
            alive.append(weakref.ref(minibatch.features["paper.feat"]))
            assert [i for i, rows in enumerate(alive) if rows() is not None] == [step]
        assert len(alive) > 100


def no_file(*_: Any, **__: Any) -> ScratchFile:
    raise StorageError(errno.ENOENT, "cannot make a scratch file", "/gone")


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
def test_no_file_is_kept_for_a_loader_that_is_closed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch, pack_bytes=1 << 18)
    with open_source(path, "pack", scratch=tmp_path) as source, open_loader(source):  # of the same tables
        with open_loader(source) as loader:
            list(loader)
            whole = loader.feature_loader._packs.scratch  # type: ignore[union-attr]
            assert whole._kept is not None
        whole.wait_for_space()
        assert whole._kept is None
        assert not scratch_files(tmp_path)


def test_the_directory_stays_if_the_process_changes_its_own(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    with open_source(path, "pack", scratch="scratch") as source, open_loader(source) as loader:
        monkeypatch.chdir("/")
        assert len(list(loader)) == loader.stats()["packs"]["minibatches"] == 21


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


@pytest.mark.usefixtures("long_files")
def test_epochs_that_reuse_the_file_of_packs_have_the_same_rows(
    path: Path, tmp_path: Path, epochs: list[list[Minibatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reused, open_file = list[bool](), Scratch.open

    def noted(whole: Scratch, *arguments: Any, **options: Any) -> ScratchFile:
        file = open_file(whole, *arguments, **options)
        reused.append(file.nbytes > 0)
        return file

    monkeypatch.setattr(Scratch, "open", noted)
    cut_small(monkeypatch, minibatches=9)
    with open_source(path, "pack", scratch=tmp_path) as source:
        loader = open_loader(source)
        validation = open_loader(source, every=40, shuffle=False)
        for epoch in epochs:
            assert_all_same(loader, epoch)
            list(validation)
        assert sum(reused) >= 3
        loader.close()
        validation.close()
        source.lender.scratch(source.options, [path]).wait_for_space()  # type: ignore[union-attr]
        assert not scratch_files(tmp_path)


def test_options_of_scratch_hold_for_each_loader(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with open_source(path, "pack", scratch=tmp_path, scratch_bytes=1 << 30) as source:
        other = source.with_options(scratch=str(tmp_path / "other"), scratch_bytes=1 << 20)
        for taken, directory, limit in ((source, tmp_path, 1 << 30), (other, tmp_path / "other", 1 << 20)):
            space = gids.FeatureLoader(taken, ["paper.feat"])._packs.scratch
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


def test_packs_over_several_directories_are_those_of_random_reads(
    path: Path, expected: list[Minibatch], several: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch, pack_bytes=1_000_000)
    depths = depths_of(monkeypatch)
    monkeypatch.setattr(Scratch, "disks", 3)
    with open_source(path, "pack", memory=512 << 20, scratch=several, scratch_bytes=64 << 20) as source:
        loader = open_loader(source)
        epoch = iter(loader)
        assert_same(expected[0], next(epoch))
        for directory in several:
            assert len(set(scratch_files(directory))) == 2  # sampled minibatches, and packs
        assert_all_same(expected[1:], epoch)
        packs = loader.stats()["packs"]
        assert packs["packs"] > 4
        assert packs["bytes_written"] > 3 << 20
        assert packs["scratch"] == list(map(str, several))
        assert set(depths) == {3 * memory.READS}
    assert not any(map(scratch_files, several))


def depths_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests in flight of the engines of superbatches."""
    depths: list[int] = []
    opened = superbatch.open_engine

    def noted(*args: Any, **options: Any) -> Any:
        depths.append(options["depth"])
        return opened(*args, **options)

    monkeypatch.setattr(superbatch, "open_engine", noted)
    return depths


@pytest.mark.parametrize("fails", ["reserved", "written", "read"])
def test_a_directory_that_fails_is_named(
    path: Path,
    expected: list[Minibatch],
    several: list[Path],
    fails: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    """Its file is replaced by one in memory that is sealed. The epoch goes on by random reads."""
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    seals = {"reserved": fcntl.F_SEAL_GROW, "written": fcntl.F_SEAL_WRITE, "read": 0}
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, seals[fails])
    opened, reserve = superbatch.open_engine, ScratchFile.reserve

    def seal(file_path: str) -> None:
        os.dup2(sealed, int(Path(file_path).name))

    def opening(paths: list[Any], *args: Any, **options: Any) -> Any:
        engine = opened(paths, *args, **options)
        if fails == "written":
            seal(paths[-2])
        elif fails == "read":
            engine.inject_faults([(len(paths) - 2, 0, errno.EIO, 1 << 30)])
        return engine

    def reserved(file: ScratchFile, nbytes: int) -> None:
        if fails == "reserved":
            seal(file.paths[1])
        reserve(file, nbytes)

    monkeypatch.setattr(superbatch, "open_engine", opening)
    monkeypatch.setattr(ScratchFile, "reserve", reserved)
    cut_small(monkeypatch, pack_bytes=1_000_000)
    with open_source(path, "pack", scratch=several) as source:
        for a, b in zip(expected, open_loader(source), strict=True):
            assert_same(a, b)
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert str(several[1]) in warning
    os.close(sealed)


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
