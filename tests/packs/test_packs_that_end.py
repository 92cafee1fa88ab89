"""Ends of a packed epoch: closed, dropped, interrupted, killed. No thread and no scratch file is left."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from children import ended, status
from full_disk import fail_at
from open_options import tuned
from packs_example import (
    assert_same,
    background_threads,
    cut_small,
    open_loader,
    open_source,
    scratch_files,
    wait_until_all_has_ended,
)

import gids
import gids.distributed
from gids.packs import Superbatch, memory, spool
from gids.sampler import Minibatch
from gids.write import DatasetWriter


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """51 MB of rows of 512 bytes."""
    path = tmp_path_factory.mktemp("large") / "large.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.ones(100_000, 128))
    return path


def sweep_long(patch: pytest.MonkeyPatch) -> None:
    share = memory.PackBudget.share
    patch.setattr(memory.PackBudget, "share", lambda *args: replace(share(*args), piece_bytes=4096))


def call_when_it_sweeps(patch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call this, in place of what follows, once reads and writes of a long sweep are under way."""

    def begin(*_: Any, **__: Any) -> None:
        end = time.monotonic() + 10
        while not {"gids-sweep", "gids-write"} <= set(background_threads()):
            assert time.monotonic() < end
        call()

    sweep_long(patch)
    patch.setattr(Superbatch, "begin", begin)


def open_large(large: Path, scratch: Path) -> gids.Source:
    return open_source(large, "pack", 64 << 20, scratch=scratch)


def read_large(source: gids.Source) -> Any:
    batches = [{"paper.feat": torch.randint(100_000, (4000,))} for _ in range(20)]
    return gids.FeatureLoader(source, ["paper.feat"]).attach(batches, lambda ids: ids, count=20)


def test_an_error_in_mid_sweep_ends_it_while_its_traceback_is_there(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    call_when_it_sweeps(monkeypatch, fail)
    with open_large(large, tmp_path) as source:
        with pytest.raises(KeyboardInterrupt) as caught:
            next(read_large(source))
        wait_until_all_has_ended(tmp_path)
        assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("when", ["sweeping", "training"])
def test_ctrl_c(large: Path, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def interrupt() -> None:
        while not ("gids-sweep" in background_threads() if when == "sweeping" else len(steps) > 3):
            time.sleep(1e-3)
        os.kill(os.getpid(), signal.SIGINT)

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if when == "sweeping":
            sweep_long(monkeypatch)
        threading.Thread(target=interrupt, daemon=True).start()
        with open_large(large, tmp_path) as source:
            try:
                while True:
                    steps.extend(len(ids) for ids, _ in read_large(source))
            except KeyboardInterrupt as error:  # whose traceback keeps the frames of the loader
                if any(frame.name == "__next__" for frame in traceback.extract_tb(error.__traceback__)):
                    wait_until_all_has_ended(tmp_path)
            wait_until_all_has_ended(tmp_path)  # also if this test was interrupted, which has the iterator

    ended(work)


def test_a_killed_process_leaves_no_file(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        assert scratch_files(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        call_when_it_sweeps(monkeypatch, die)
        with open_large(large, tmp_path) as source:
            next(read_large(source))

    assert os.WTERMSIG(status(work)) == signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def taken() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def take_some(loader: gids.NodeLoader, end: str) -> None:
    """An epoch that is whole, or closed or left at the sixth minibatch."""
    epoch = iter(loader)
    for step, _ in enumerate(epoch):
        if end != "whole" and step == 5:
            break
    if end == "closed":
        epoch.close()


@pytest.mark.parametrize(
    ("turn", "pack_bytes"), [(1, 2_000_000), (2, 2_000_000), (3, 2_000_000), (40, 350_000)]
)
def test_a_pack_that_cannot_be_read_gives_way_to_random_reads(
    path: Path,
    expected: list[Minibatch],
    turn: int,
    pack_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also in the middle of a minibatch of which other packs have the first rows."""
    cut_small(monkeypatch, pack_bytes=pack_bytes)
    fail_at(monkeypatch, Superbatch, "_load", turn)
    with open_source(path, "pack") as source:
        loader = open_loader(source)
        epoch = iter(loader)
        for step, minibatch in enumerate(expected):
            assert_same(next(epoch), minibatch)
            assert loader.state_dict()["step"] == (step + 1) % len(loader)
        assert list(epoch) == []
        by_packs = loader.stats()["packs"]["minibatches"]  # the second pack is loaded with the first
        assert 0 < by_packs < len(expected) if turn > 2 else by_packs == 0
        ways = {choice["way"]: choice["returned"] for choice in loader.stats()["packs"]["choices"]}
        assert ways == {"pack": by_packs, "random": len(expected) - by_packs}
    assert len(caplog.records) == 1


def test_the_garbage_collector_may_end_an_epoch_in_a_thread_of_its_own(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, dropped = spool._read, threading.Event()
    reads = 0

    def read_and_collect(*args: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads > before + 1:  # of a minibatch that is not due yet
            assert dropped.wait(60)
            gc.collect()
        return read(*args)

    with open_source(path, "pack", scratch=tmp_path) as source:
        loader = open_loader(source)
        epoch: Any = iter(loader)
        next(epoch)
        next(epoch)
        before = 1 << 60
        monkeypatch.setattr(spool, "_read", read_and_collect)
        before = reads - 1
        next(epoch)
        cycle: list[Any] = [epoch]
        cycle.append(cycle)
        del epoch, cycle
        dropped.set()
        wait_until_all_has_ended(tmp_path)
        monkeypatch.undo()
        assert len(list(loader)) == len(loader)


@pytest.mark.parametrize(("reads", "ranks"), [("pack", False), ("random", False), ("random", True)])
def test_closed_loaders_keep_no_thread_and_no_descriptor(path: Path, reads: str, ranks: bool) -> None:
    """Whether or not Python's garbage collector runs."""

    def run(end: str) -> None:
        options: dict[str, Any] = {"memory": 16 << 20, "reads": reads, "queue_depth": 16, "window": 4}
        open_path = gids.distributed.open if ranks else gids.open
        with open_path(path, **tuned(options)) as source, open_loader(source) as loader:
            take_some(loader, end)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run("whole")
        gc.collect()
        gc.disable()
        before = taken()
        for end in ("whole", "closed", "left"):
            run(end)
        assert taken() == before
    finally:
        gc.enable()
        dist.destroy_process_group()
