"""Epochs by packs: the minibatches and rows of random reads, bit for bit, with little memory and scratch."""

from __future__ import annotations

import errno
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from packs_example import (
    PAPERS,
    SLOW_AT_RANDOM,
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
from gids import _core
from gids.errors import MemoryBudgetError, StorageError
from gids.loader import pack_reads, pack_switch
from gids.packs import DiskRates, Spool
from gids.sampler import Minibatch


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["uring", "threads", "mmap"])
def test_minibatches_and_rows_are_those_of_random_reads(
    path: Path, epochs: list[list[Minibatch]], engine: str
) -> None:
    with open_source(path, "pack", engine=engine, check_crc=True) as source:
        loader = open_loader(source)
        for epoch in epochs[:2]:
            assert_all_same(epoch, list(loader))
        stats = loader.stats()["packs"]
        assert stats["minibatches"] == 2 * len(loader)
        assert [c["way"] for c in stats["choices"]] == ["pack", "pack"]
        assert stats["bytes_written"] > 0
    assert not scratch_files(path)


def test_packs_are_where_direct_reads_need_no_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int, int]] = []
    read = _core.PackRead

    def noted(*args: Any, files: int) -> Any:
        _, _, _, offset, _, at, nbytes = args
        reads.append((offset, at, nbytes))
        return read(*args, files=files)

    cut_small(monkeypatch, pack_bytes=2_469_135)
    with open_source(path, "pack", 12_345_678) as source:
        loader = open_loader(source)
        list(loader)  # the first one measures the disk by such reads
        monkeypatch.setattr(_core, "PackRead", noted)
        list(loader)
    assert len(reads) > 2
    assert all(n % 4096 == 0 for one in reads for n in one)


@pytest.mark.few(3)
@pytest.mark.parametrize("packs", [None, 40])
@pytest.mark.parametrize("pack_bytes", [300_000, 400_000, 800_000])
def test_a_minibatch_that_does_not_fit_in_a_pack_is_cut(
    path: Path, pack_bytes: int, packs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a sweep fills few packs, and where a run goes on in the middle of an epoch."""
    cut_small(monkeypatch, pack_bytes=pack_bytes, packs=packs)
    with open_source(path, "random", 64 << 20) as random, open_source(path, "pack") as packed:
        one, other = (open_loader(source, batch_size=200) for source in (random, packed))
        for _ in range(2):
            assert_all_same(one, other)
        stats = other.stats()["packs"]
        assert stats["packs"] > stats["minibatches"]
        assert packs is None or stats["superbatches"] > 2
        expected, state = list(one), one.state_dict()
        state["step"], state["epoch"] = 3, state["epoch"] - 1
        other.load_state_dict(state)
        assert_all_same(expected[3:], other)


def test_too_little_memory_for_packs_names_what_to_do(path: Path) -> None:
    with (
        open_source(path, "pack", 8 << 20) as source,
        pytest.raises(MemoryBudgetError, match="reads='random'") as error,
    ):
        list(open_loader(source, batch_size=1334))
    advised = re.search(r"Give memory=([\d_]+) to gids.open", str(error.value))
    assert advised is not None
    with open_source(path, "pack", int(advised[1])) as source:
        loader = open_loader(source, batch_size=1334)
        count = len(list(loader))
        assert loader.stats()["packs"]["minibatches"] == count


def test_memory_that_other_loaders_keep_all_of_is_too_little_for_packs(path: Path) -> None:
    tuning = gids.Tuning(queue_depth=512)
    with gids.open(path, reads="pack", memory=1 << 20, window=2, tuning=tuning) as source:
        loader, _other = [
            gids.NodeLoader(source, {"paper": torch.arange(64)}, [4], tables=[name], seed=0)
            for name in ("paper.feat", "paper.text")
        ]
        with pytest.raises(MemoryBudgetError, match="Give memory="):
            list(loader)


def test_random_reads_begin_at_once_where_a_sweep_takes_too_long(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_switch, "EARLY", 3)
    monkeypatch.setattr(pack_switch, "LEAST_WAIT_S", 0.0)
    take_over_at(monkeypatch, 0)
    monkeypatch.setattr(pack_reads.PackReads, "rates", lambda _: DiskRates(4096, 1e5, 1e6, 1e13))
    put = []
    begin_put = Spool.begin_put

    def noted(self: Spool, *args: Any, **options: Any) -> Any:
        put.append(1)
        return begin_put(self, *args, **options)

    monkeypatch.setattr(Spool, "begin_put", noted)
    with open_source(path, "random") as random, open_source(path, "auto", 2_700_000) as auto:
        loader = open_loader(auto, batch_size=8, every=12)
        for _ in range(2):
            assert_all_same(open_loader(random, batch_size=8, every=12), loader)
            loader.epoch = 0
        (choice,) = loader.stats()["packs"]["choices"]
    assert len(put) == 3
    assert choice["way"] == "random"
    assert choice["minibatches"] == choice["returned"] == len(loader)


@pytest.mark.parametrize("early", [2, 16])
def test_packs_that_are_refused_lose_no_minibatch_of_the_window(
    path: Path, monkeypatch: pytest.MonkeyPatch, early: int
) -> None:
    """Also those that were in the window, and not among the first ones that packs are judged by."""
    consider_packs(monkeypatch, DiskRates(4096, 1e9, 1e3, 1e3), early)
    with open_source(path, "random") as random, open_source(path, "auto") as auto:
        loader = open_loader(auto, batch_size=32)
        assert_all_same(open_loader(random, batch_size=32), loader)
        (choice,) = loader.stats()["packs"]["choices"]
    assert choice["way"] == "random"
    assert choice["returned"] == len(loader) - early


@pytest.mark.parametrize(
    ("least_wait_s", "has_scratch", "by_packs"),
    [(1e6, True, False), (1e-6, True, True), (1e-6, False, False)],
)
def test_packs_are_considered_if_the_first_minibatches_wait_long(
    path: Path, monkeypatch: pytest.MonkeyPatch, least_wait_s: float, has_scratch: bool, by_packs: bool
) -> None:
    """These are read at random. Nothing is measured or written for an epoch that is read fast enough."""
    measured, waiting = [], set()

    def measure(*_: Any, **__: Any) -> DiskRates:
        measured.append(1)
        return SLOW_AT_RANDOM

    consider_packs(monkeypatch, SLOW_AT_RANDOM, pack_switch.EARLY, least_wait_s)
    monkeypatch.setattr(pack_reads, "measure_rates", measure)
    if not has_scratch:
        monkeypatch.setattr(pack_reads.PackReads, "scratch", None)
    with open_source(path, "random") as random, open_source(path, "auto") as auto:
        loader = open_loader(auto, batch_size=32)
        for a, b in zip(open_loader(random, batch_size=32), loader, strict=True):
            assert_same(a, b)
            waiting.add(loader.feature_loader.waiting_batches)
        found = loader.stats()["packs"]
    assert found["minibatches"] == (len(loader) - pack_switch.EARLY if by_packs else 0)
    assert {choice["way"] for choice in found["choices"]} == ({"pack"} if by_packs else set())
    assert bool(measured) == by_packs
    assert len(waiting) == 1 or not by_packs  # minibatches that are sampled together


@pytest.mark.parametrize("failing", ["sampling 16", "sampling 17", "ids 17"])
def test_a_minibatch_that_fails_while_packs_take_over_is_the_only_one_lost(
    path: Path, rows: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Number 16 is the first that comes back from the window."""
    consider_packs(monkeypatch, SLOW_AT_RANDOM, pack_switch.EARLY)
    names, lost, asked = ["paper.text", "paper.feat"], int(failing[-2:]), Counter[int]()

    class Source:
        number = -1

        def __iter__(self) -> Source:
            return self

        def __next__(self) -> int:
            self.number += 1
            if self.number == 60:
                raise StopIteration
            if failing.startswith("sampling") and self.number == lost:
                raise StorageError(errno.EIO, "cannot sample", "edges")
            return self.number

    def ids_of(number: int) -> dict[str, torch.Tensor]:
        asked[number] += 1
        if failing.startswith("ids") and number == lost and asked[number] == 2:
            raise StorageError(errno.EIO, "cannot read ids", "ids")
        generator = torch.Generator().manual_seed(number)
        return {name: torch.randint(PAPERS, (50,), generator=generator) for name in names}

    returned = []
    with open_source(path, "auto") as source, gids.FeatureLoader(source, names) as loader:
        stream = loader.attach(Source(), ids_of, count=60)
        for number in range(60):
            if number == lost:
                with pytest.raises(StorageError):
                    next(stream)
                continue
            minibatch, features = next(stream)
            returned.append(minibatch)
            for name, ids in ids_of(minibatch).items():
                assert torch.equal(features[name], rows[name][ids])
        assert next(stream, None) is None
        assert loader.stats()["packs"]["minibatches"] >= 43
    assert returned == [number for number in range(60) if number != lost]


@pytest.mark.parametrize("parts", [False, True])
def test_a_later_minibatch_is_larger_than_those_that_cuts_are_tried_on(
    path: Path, rows: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, parts: bool
) -> None:
    """Many resident rows are best for the first minibatches; then a pack has no room for the last one."""
    cut_small(monkeypatch, pack_bytes=1 << 20)
    if not parts:
        monkeypatch.setattr("gids.packs.cut.LEAST_PART_BYTES", 1 << 40)
    batches = [torch.arange(i, i + 1000, 10) for i in range(40)]
    batches.append(torch.arange(1100, 2000))
    with open_source(path, "pack") as source, gids.FeatureLoader(source, ["paper.text"]) as loader:
        stream = loader.attach(batches, lambda ids: {"paper.text": ids}, count=len(batches))
        for expected, (ids, features) in zip(batches, stream, strict=True):
            assert torch.equal(ids, expected)
            assert torch.equal(features["paper.text"], rows["paper.text"][ids])
        (choice,) = loader.stats()["packs"]["choices"]
    assert choice["returned"] == len(batches)
    assert bool(choice["resident_rows"]) == parts
