"""Scratch that is full or fails: the epoch goes on by random reads, once told, and every row is right."""

from __future__ import annotations

import errno
import gc
import os
import resource
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from full_disk import fail_at
from packs_example import (
    assert_all_same,
    assert_same,
    consider_packs,
    cut_small,
    open_loader,
    open_source,
    scratch_files,
    take_over_at,
)

import gids
from gids.packs import DiskRates, PackMachine, Scratch, ScratchFull, Spool, Superbatch, spool
from gids.sampler import Minibatch


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("of", "method", "turn", "cut"),
    [
        (Superbatch, "prepare", 1, {"minibatches": 5}),
        (Superbatch, "begin", 2, {"minibatches": 5}),
        (Superbatch, "begin", 1, {"packs": 2}),
        (Superbatch, "prepare", 3, {"packs": 2}),
        (Superbatch, "begin", 3, {"minibatches": 7, "packs": 1}),
        (Spool, "rows", 1, {"minibatches": 5}),
        (Spool, "rows", 60, {"minibatches": 5}),
        (Spool, "begin_put", 7, {"minibatches": 7, "packs": 1}),
        # In the background, while other minibatches are sampled.
        (Spool, "_write", 1, {"packs": 2}),
        (Spool, "_write", 15, {"packs": 2}),
        (Spool, "_write", 15, {"minibatches": 5}),
        (Spool, "_write", 16, {"minibatches": 5}),
        (Spool, "_write", 16, {"minibatches": 7}),
        (Scratch, "open", 2, {"minibatches": 5}),
        (Scratch, "open", 6, {"minibatches": 5}),
    ],
)
def test_a_disk_that_fills_up_loses_and_repeats_no_minibatch(
    path: Path,
    expected: list[Minibatch],
    of: type,
    method: str,
    turn: int,
    cut: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cut_small(monkeypatch, pack_bytes=2_000_000, **cut)
    machines: weakref.WeakSet[PackMachine] = weakref.WeakSet()
    make = PackMachine.__init__

    def noted(self: PackMachine, *args: Any, **options: Any) -> None:
        machines.add(self)
        make(self, *args, **options)

    monkeypatch.setattr(PackMachine, "__init__", noted)
    request.addfinalizer(gc.enable)
    gc.disable()  # the memory of packs does not wait for it
    with open_source(path, "pack") as source:
        loader = open_loader(source)
        loader._features._packs.rates()  # not in the midst of the epoch, where it makes a file of its own
        fail_at(monkeypatch, of, method, turn)
        for a, b in zip(expected, loader, strict=True):
            assert_same(a, b)
            # The cache of random reads does not come beside the memory of packs.
            assert not machines or not loader._features._cache  # type: ignore[union-attr]
        packs, warned = loader.stats()["packs"], len(warnings_of(caplog))
        assert warned <= 1
        assert packs["minibatches"] == len(expected) or warned == 1
        if of is Superbatch:
            assert warned == 1
            assert packs["superbatches"] == turn - 1
            assert 0 < packs["minibatches"] < len(expected) or turn == 1
            assert loader._features._cache  # type: ignore[union-attr]
            assert loader.stats()["memory"].keys() & {"lines"}  # the memory is the cache's now
            assert len(list(loader)) == len(expected)  # which does not try again
            assert len(warnings_of(caplog)) == 1
    assert not scratch_files(path)


@pytest.mark.parametrize(("reads", "is_memory"), [("auto", False), ("pack", False), ("pack", True)])
def test_a_scratch_directory_that_is_gone_after_opening(
    path: Path,
    epochs: list[list[Minibatch]],
    reads: str,
    is_memory: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if reads == "auto":
        consider_packs(monkeypatch, DiskRates(4096, 10.0, 1e9, 1e9), early=2)
        take_over_at(monkeypatch, 3)
    directory = tmp_path / "scratch"
    directory.mkdir()
    with open_source(path, reads, scratch=directory) as source, open_loader(source) as loader:
        if is_memory:  # was mounted there
            monkeypatch.setattr(
                "gids.packs.scratch._IN_MEMORY", {gids.io.probe(path / "manifest.json")["file_system"]}
            )
        else:
            directory.rmdir()
        for expected in epochs[:2]:
            assert_all_same(expected, loader)
    [warning] = warnings_of(caplog)
    assert "packs cannot be used" in warning
    assert str(directory) in warning


def test_a_minibatch_for_whose_copy_there_is_no_memory_is_not_lost(
    path: Path, expected: list[Minibatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with open_source(path, "pack") as source:
        monkeypatch.setattr(spool, "mmap", SimpleNamespace(mmap=fail))
        assert_all_same(expected, open_loader(source))


@pytest.mark.parametrize("cut", [{}, {"minibatches": 5}, {"packs": 2}], ids=str)
def test_a_disk_that_fills_up_in_mid_sweep(
    path: Path,
    expected: list[Minibatch],
    cut: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Files cannot be reserved here, and become too large when they are written."""
    cut_small(monkeypatch, pack_bytes=2_000_000, **cut)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    prepare, before = Superbatch.prepare, resource.getrlimit(resource.RLIMIT_FSIZE)

    def with_little_room(superbatch: Superbatch) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
        prepare(superbatch)

    monkeypatch.setattr(Superbatch, "prepare", with_little_room)
    try:
        with open_source(path, "pack") as source:
            loader = open_loader(source)
            found = iter(loader)
            for expected_one in expected:
                assert_same(expected_one, next(found))
            assert loader.stats()["packs"]["minibatches"] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (warning,) = warnings_of(caplog)
    assert os.strerror(errno.EFBIG) in warning
    assert not scratch_files(path)


def test_minibatches_that_could_not_be_written_come_before_an_id_out_of_range(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [{"paper.feat": torch.tensor([step if step != 10 else 1 << 40])} for step in range(20)]
    write, calls = spool._write, 0

    def write_some(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= 9:
            raise ScratchFull(errno.ENOSPC, "no room", "somewhere")
        write(*args)

    with open_source(path, "pack") as source:
        loader = gids.FeatureLoader(source, ["paper.feat"])
        loader._packs.rates()
        monkeypatch.setattr(spool, "_write", write_some)
        stream = loader.attach(batches, lambda ids: ids, count=20)
        for step in range(10):
            assert next(stream)[0]["paper.feat"].item() == step
        with pytest.raises(IndexError):
            next(stream)
