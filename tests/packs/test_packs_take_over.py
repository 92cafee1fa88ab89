"""Packs take over from random reads at any minibatch, and give back to them, without a wrong row."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import same_bits
from packs_example import (
    SLOW_AT_RANDOM,
    assert_all_same,
    assert_same,
    background_threads,
    consider_packs,
    cut_small,
    open_loader,
    open_source,
    scratch_files,
    take_over_at,
    wait_until_all_has_ended,
)

import gids
from gids.errors import StorageError
from gids.loader import pack_chooser, pack_reads, pack_switch, sampled_ahead
from gids.loader.framework_epoch import FrameworkEpoch
from gids.loader.learned import Choice, Learned
from gids.packs import Spool, Superbatch, memory
from gids.sampler import Minibatch

BATCH = 64
COUNT = 21


@pytest.fixture
def _packs_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of any size count as large, and packs win. They are considered after one minibatch."""
    consider_packs(monkeypatch, SLOW_AT_RANDOM, 3)
    take_over_at(monkeypatch, 1)


def papers(minibatch: Minibatch) -> dict[str, torch.Tensor]:
    return {"paper.feat": minibatch.input_nodes["paper"]}  # type: ignore[index]


def read(path: Path, expected: list[Minibatch], epochs: int = 1, **options: Any) -> dict[str, Any]:
    """Compare epochs; return what was counted."""
    with open_source(path, "auto", **options) as source:
        loader = open_loader(source)
        assert len(loader) == COUNT
        for _ in range(epochs):
            loader.epoch = 0
            assert_all_same(expected, loader)
        loader.close()
        assert not scratch_files(path)
        found: dict[str, Any] = loader.stats()
        return found


@pytest.mark.usefixtures("_packs_pay")
def test_minibatches_of_unknown_number_need_no_memory_for_a_next_epoch(
    path: Path, expected: list[Minibatch], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = memory.PackBudget.share

    def share_without_overlap(*arguments: Any) -> Any:
        return None if arguments[-1] else share(*arguments)

    monkeypatch.setattr(memory.PackBudget, "share", share_without_overlap)
    with open_source(path, "auto") as source:
        loader = gids.FeatureLoader(source, ["paper.feat"])
        for _ in range(3):
            before = loader.stats()["packs"]["minibatches"]
            for minibatch, features in loader.attach(iter(expected), papers):
                assert torch.equal(features["paper.feat"], minibatch.features["paper.feat"])
            assert loader.stats()["packs"]["minibatches"] > before
        loader.close()
    assert "too small" not in caplog.text


@pytest.mark.few(4)
@pytest.mark.usefixtures("_packs_pay")
@pytest.mark.parametrize("most", [COUNT + 1, 8])
@pytest.mark.parametrize("first", [0, 2, 8, 15, 21])
def test_packs_take_over_at_any_minibatch(
    path: Path, expected: list[Minibatch], first: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if superbatches are shorter than the epoch."""
    monkeypatch.setattr(sampled_ahead, "MOST_MINIBATCHES", most)
    take_over_at(monkeypatch, first)
    found = read(path, expected)["packs"]
    assert found["minibatches"] == COUNT - first
    assert {choice["way"] for choice in found["choices"]} == ({"pack"} if first < COUNT else set())


@pytest.mark.usefixtures("_packs_pay")
@pytest.mark.parametrize("way", ["pack", "random"])
def test_the_log_counts_each_minibatch_once(
    path: Path,
    expected: list[Minibatch],
    way: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_over_at(monkeypatch, 5)  # one more is planned then
    if way == "random":
        monkeypatch.setattr(pack_chooser, "_pays", lambda *_: False)
    caplog.set_level("INFO", "gids")
    choices = read(path, expected)["packs"]["choices"]
    assert {choice["way"] for choice in choices} == {way}
    lines = [r.getMessage() for r in caplog.records if " minibatches in " in r.getMessage()]
    assert [line.split()[0] for line in lines] == [str(COUNT)]


@pytest.mark.usefixtures("_packs_pay")
def test_choices_are_json_if_only_packs_fit_in_memory(
    path: Path, expected: list[Minibatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gids.FeatureLoader, "lines_for", lambda *_: None)
    choices = read(path, expected)["packs"]["choices"]
    assert [sorted(choice["predicted_s"]) for choice in choices] == [["pack"]]
    json.dumps(choices, allow_nan=False)


@pytest.mark.usefixtures("_packs_pay")
@pytest.mark.parametrize("tables", [["paper.feat"], ["paper.feat", "paper.text"]])
def test_a_larger_minibatch_that_no_cache_has_room_for_ends_no_epoch(
    path: Path, rows: dict[str, torch.Tensor], tables: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Packs are considered and do not fit. The cache was freed for them. The log says how much memory they
    need, unless all features fit into that: then packs would not be used."""
    ids = [
        dict(zip(tables, (torch.arange(900 if i else 20), torch.arange(1)), strict=False)) for i in range(8)
    ]
    with open_source(path, "auto", memory=250_000, queue_depth=2) as source:
        loader = gids.FeatureLoader(source, tables)
        for minibatch, features in loader.attach(ids, lambda minibatch: minibatch, count=len(ids)):
            for name in tables:
                assert same_bits(features[name], rows[name][minibatch[name]])
        loader.close()
    *too_small, larger = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "in later epochs too: give more memory" in larger
    assert len(too_small) == len(tables) - 1
    for message in too_small:
        assert "is too small for packs, so rows are read at random: with memory=" in message


@pytest.mark.usefixtures("_packs_pay")
def test_neither_does_one_of_a_later_epoch(
    path: Path, rows: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier epoch built the cache. The log's advice about memory must also come to an end."""
    caplog.set_level(logging.INFO, "gids")
    tables = ["paper.feat", "paper.text"]
    with gids.open(path, reads="auto", memory=400_000, window=4, tuning=gids.Tuning(queue_depth=2)) as source:
        loader = gids.FeatureLoader(source, tables)
        for sizes in ([200] * 8, [1, 1, 232, 3836, 2862, 1, 1114, 1], [200, 2500, 200, 1646, 109, 400]):
            generator = torch.Generator().manual_seed(1)
            ids = [torch.randperm(4000, generator=generator)[:count] for count in sizes]
            for of_one, features in loader.attach(
                ids, lambda of_one: dict.fromkeys(tables, of_one), count=len(ids)
            ):
                for name in tables:
                    assert same_bits(features[name], rows[name][of_one])
    assert "inf" not in caplog.text


@pytest.mark.usefixtures("_packs_pay")
@pytest.mark.parametrize(("reads_per_s", "begins"), [(10.0, "pack"), (1e9, "random"), (None, "random")])
def test_on_a_slow_disk_packs_are_not_kept_waiting_by_the_first_minibatch(
    path: Path,
    expected: list[Minibatch],
    reads_per_s: float | None,
    begins: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """reads_per_s: of the disk; None: it cannot be measured."""

    def measured(*_: object, **__: object) -> float:
        if reads_per_s is None:
            raise StorageError(errno.EIO, "cannot be read", str(path))
        return reads_per_s

    monkeypatch.setattr(pack_reads, "measure_random", measured)
    monkeypatch.setattr(pack_switch, "LEAST_WAIT_S", 4.0)
    monkeypatch.setattr(pack_switch, "_MANY_ROWS", 1)
    assert read(path, expected)["packs"]["minibatches"] == (COUNT if begins == "pack" else COUNT - 1)
    monkeypatch.setattr(pack_switch, "_MANY_ROWS", 1 << 20)  # it is not measured then
    assert read(path, expected)["packs"]["minibatches"] == COUNT - 1


@pytest.mark.parametrize(
    ("waits", "at"),
    [
        ([0.45, 0.0, 0.0, 0.1, 0.0, 0.0, 0.4], 7),  # packs are considered at the second burst
        ([0.45, 0.0, 0.0, 0.1] + 12 * [0.0], None),  # the cache was empty at first
        (4 * [0.1] + 12 * [0.09], 6),
    ],
)
def test_waits_that_come_in_bursts_show_later_how_long_an_epoch_waits(
    path: Path, waits: list[float], at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    consider_packs(monkeypatch, SLOW_AT_RANDOM, pack_switch.EARLY, pack_switch.LEAST_WAIT_S)
    with open_source(path, "auto") as source, gids.FeatureLoader(source, ["paper.feat"]) as loader:
        stream = loader.attach([{"paper.feat": torch.arange(9)}] * 60, lambda ids: ids, count=60)
        next(stream)
        switch = stream._switch
        assert switch is not None
        considered = None
        for done in range(1, len(waits) + 1):
            if switch._waits is not None and switch._waits_long(stream, waits[:done]):
                considered = done
        assert considered == at
        assert switch._waits is None
        stream.close()


@pytest.mark.usefixtures("_packs_pay")
def test_later_epochs_begin_with_packs(path: Path, expected: list[Minibatch]) -> None:
    assert read(path, expected, epochs=3)["packs"]["minibatches"] >= 2 * COUNT


def test_epochs_that_are_left_before_packs_save_time_read_at_random(
    path: Path, expected: list[Minibatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    consider_packs(monkeypatch, SLOW_AT_RANDOM, 3)
    monkeypatch.setattr(pack_switch, "_SOON_S", 1e-9)
    monkeypatch.setattr(Choice, "random_s", 0.0, raising=False)
    with open_source(path, "auto") as source:
        loader = open_loader(source)
        by_packs = []
        for left in (8, 8, COUNT, COUNT, COUNT):
            before, loader.epoch = loader.stats()["packs"]["minibatches"], 0
            assert_all_same(expected[:left], itertools.islice(loader, left))
            by_packs.append(loader.stats()["packs"]["minibatches"] - before)
    assert by_packs == [7, 0, COUNT - 8, COUNT, COUNT]


def test_who_takes_only_the_first_minibatch_again_and_again_makes_packs_once(
    path: Path, expected: list[Minibatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as by next(iter(loader)), on a disk so slow that packs come first."""
    consider_packs(monkeypatch, SLOW_AT_RANDOM, 3)
    monkeypatch.setattr(pack_reads, "measure_random", lambda *_, **__: 1e-3)
    monkeypatch.setattr(pack_switch, "_MANY_ROWS", 1)
    monkeypatch.setattr(Choice, "random_s", 0.0, raising=False)
    with open_source(path, "auto") as source:
        loader = open_loader(source)
        for _ in range(3):
            loader.epoch = 0
            assert_all_same(expected[:1], itertools.islice(loader, 1))
        assert loader.stats()["packs"]["superbatches"] == 1


@pytest.mark.parametrize(
    ("sampling_s", "consumer_s", "random_s", "most", "pays"),
    [
        (0.0, 0.0, 0.25, 4, True),  # the first superbatch does, the second one not yet
        (0.05, 0.0, 0.1, COUNT, False),  # what is sampled for the rest of the epoch is lost
        (0.0, 0.1, 0.12, COUNT, False),  # random reads go on while the consumer works
        (0.0, 0.05, 1.0, COUNT, True),
    ],
)
def test_what_packs_save_counts_all_that_the_consumer_waits_for(
    path: Path,
    sampling_s: float,
    consumer_s: float,
    random_s: float,
    most: int,
    pays: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """random_s: of a minibatch, as predicted. pays: whether the next epoch begins with packs."""
    consider_packs(monkeypatch, SLOW_AT_RANDOM, 3)
    monkeypatch.setattr(pack_switch, "_SOON_S", 1e-9)
    monkeypatch.setattr(sampled_ahead, "MOST_MINIBATCHES", most)
    monkeypatch.setattr(pack_chooser, "_pays", lambda *_: True)
    monkeypatch.setattr(pack_chooser.PackChooser, "random_s", lambda _, ahead: random_s * len(ahead.spool))
    share, begin = memory.PackBudget.share, Superbatch.begin
    monkeypatch.setattr(memory.PackBudget, "share", lambda *args: None if args[-1] else share(*args))
    monkeypatch.setattr(Superbatch, "begin", lambda *args: (time.sleep(0.26), begin(*args))[1])

    def sampled() -> Iterator[torch.Tensor]:
        for first in range(COUNT):
            time.sleep(sampling_s)
            yield torch.arange(first, first + 9)

    with open_source(path, "auto") as source, gids.FeatureLoader(source, ["paper.feat"]) as loader:
        by_packs = []
        for _ in range(2):
            before = loader.stats()["packs"]["minibatches"]
            stream = loader.attach(sampled(), lambda ids: {"paper.feat": ids}, count=COUNT)
            for _ in itertools.islice(stream, 6):
                time.sleep(consumer_s)
            stream.close()
            by_packs.append(loader.stats()["packs"]["minibatches"] - before)
    assert by_packs == [5, 6 if pays else 0]


@pytest.mark.few(5)
@pytest.mark.usefixtures("_packs_pay")
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("where", ["put", "rows_of", "prepare", "finish_sweep", "_load"])
def test_scratch_that_fails_loses_no_minibatch(
    path: Path,
    expected: list[Minibatch],
    where: str,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While minibatches are sampled, cut, swept, and when the first pack is read."""
    take_over_at(monkeypatch, first)
    owner, name = {"put": (Spool, "begin_put"), "rows_of": (Spool, "rows_of")}.get(where, (Superbatch, where))
    original, calls = getattr(owner, name), 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > (5 if where == "put" else 0):
            raise StorageError(errno.EIO, "scratch fails", str(path))
        return original(*args, **options)

    monkeypatch.setattr(owner, name, failing)
    found = read(path, expected, epochs=2)["packs"]
    assert found["minibatches"] <= 5
    assert "scratch fails" in caplog.text


def test_scratch_with_room_for_one_superbatch(
    path: Path, expected: list[Minibatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packs of the next one are made once the present one is trained."""
    monkeypatch.setattr(sampled_ahead, "MOST_MINIBATCHES", 2)
    with open_source(path, "pack", scratch_bytes=1_000_000) as source, open_loader(source) as loader:
        assert_all_same(expected, loader)
        packs = loader.stats()["packs"]
        assert packs["minibatches"] == COUNT
        assert [choice["returned"] for choice in packs["choices"]] == [2] * (COUNT // 2) + [1]


@pytest.mark.few(4)
@pytest.mark.usefixtures("_packs_pay")
@pytest.mark.parametrize("stop", [0, 2, 6, 8, 20])
def test_a_break_ends_all(
    path: Path, expected: list[Minibatch], tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before packs take over, and after it; the rest of the epoch is the same."""
    take_over_at(monkeypatch, 7)
    with open_source(path, "auto", scratch=tmp_path) as source:
        loader = open_loader(source)
        epoch = iter(loader)
        for minibatch in expected[:stop]:
            assert_same(next(epoch), minibatch)
        state = loader.state_dict()
        epoch.close()
        wait_until_all_has_ended(tmp_path)
        loader.load_state_dict(state)
        assert_all_same(expected[stop:], loader)
    assert not background_threads()


@pytest.mark.usefixtures("_packs_pay")
@pytest.mark.parametrize("failing", [0, 4, 10])
def test_the_error_of_a_minibatch_comes_when_it_is_due(
    path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id out of range, whether packs took over before it or not."""
    take_over_at(monkeypatch, 5)
    generator = torch.Generator().manual_seed(1)
    batches = [{"paper.feat": torch.randint(4000, (300,), generator=generator)} for _ in range(12)]
    batches[failing] = {"paper.feat": torch.tensor([4000])}
    with open_source(path, "auto") as source, gids.FeatureLoader(source, ["paper.feat"]) as loader:
        stream = loader.attach(batches, lambda ids: ids, count=12)
        for _ in range(failing):
            next(stream)
        with pytest.raises(IndexError):
            next(stream)


@pytest.mark.usefixtures("_packs_pay")
@pytest.mark.parametrize("first", [0, 3])
def test_a_superbatch_that_scratch_has_no_room_for_in_one_go(
    path: Path, expected: list[Minibatch], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_over_at(monkeypatch, first)
    cut_small(monkeypatch, pack_bytes=600_000)
    monkeypatch.setattr(pack_chooser.PackChooser, "room_bytes", lambda *_: 500_000)
    assert (
        read(path, expected)["packs"]["superbatches"] == 0
    )  # a sweep would be for fewer than 16 minibatches
    monkeypatch.setattr(pack_chooser, "EARLY", 0)
    found = read(path, expected)["packs"]
    assert found["superbatches"] > 2
    assert found["minibatches"] >= COUNT // 3


@pytest.mark.usefixtures("_packs_pay")
def test_a_slow_first_step_does_not_count(
    path: Path, expected: list[Minibatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training warms up in it: it says nothing about how long an epoch trains."""
    take_over_at(monkeypatch, 1)
    with open_source(path, "auto") as source:
        loader = open_loader(source)
        for step, (a, b) in enumerate(zip(expected, loader, strict=True)):
            assert_same(a, b)
            assert loader._learned.consumer_s < 0.5
            if step == 0:
                time.sleep(0.6)
        assert loader.stats()["packs"]["minibatches"] == COUNT - 1


@pytest.mark.usefixtures("_packs_pay")
@pytest.mark.parametrize(("at", "steps"), [(0, 0), (2, 1), (3, 0), (8, 1)])
def test_a_stream_that_another_one_set_aside_loses_no_minibatch(
    path: Path, expected: list[Minibatch], at: int, steps: int
) -> None:
    """steps: that it goes on without lookahead. Before and after packs are considered."""
    with open_source(path, "auto") as source:
        train, other = (open_loader(source, batch_size=size) for size in (BATCH, 300))
        for step, (a, b) in enumerate(zip(expected, train, strict=True)):
            assert_same(a, b)
            if step == at:
                second = iter(other)
                next(second)
            if step == at + steps:
                second.close()


@pytest.mark.parametrize(("sampling_s", "way"), [(None, "pack"), (1e6, "random")])
def test_packs_are_not_used_where_sampling_in_workers_takes_longer(
    path: Path, monkeypatch: pytest.MonkeyPatch, sampling_s: float | None, way: str
) -> None:
    """Packs wait until minibatches are sampled. sampling_s: of a minibatch; None: as it is measured."""
    consider_packs(monkeypatch, SLOW_AT_RANDOM, 3, 1e-9)
    monkeypatch.setattr(pack_switch, "_SOON_S", 0.0)
    early, judged = pack_chooser.PackChooser.choose_early, list[float | None]()
    end, begun = pack_switch.PackSwitch._end_random, list[int]()
    monkeypatch.setattr(
        pack_switch.PackSwitch,
        "_end_random",
        lambda self, stream, done: (begun.append(done), end(self, stream, done)),
    )

    def noted(self: Any, sampled: Any, *args: Any) -> bool:
        judged.append(sampled.beside_s)
        return early(self, sampled, *args)

    monkeypatch.setattr(pack_chooser.PackChooser, "choose_early", noted)
    if sampling_s is not None:
        monkeypatch.setattr(sampled_ahead.SampledAhead, "beside_s", sampling_s)
    minibatches = [torch.arange(i, i + 3000) for i in range(COUNT)]
    with open_source(path, "auto") as source:
        rows = source.store.read_rows(range(3000 + COUNT), "paper.feat")
        loader, learned = gids.FeatureLoader(source, ["paper.feat"]), Learned()
        epoch = FrameworkEpoch(
            loader,
            iter(minibatches),
            lambda ids: {"paper.feat": ids},
            bytes_of=lambda ids: ids.nbytes,
            in_workers=True,
            learned=learned,
        )
        for ids, features in epoch:
            assert torch.equal(features["paper.feat"], rows[ids])
        assert loader.stats_of(learned)["packs"]["choices"][-1]["way"] == way
    assert begun == [3]  # not after the first minibatch, which found an empty cache
    [seconds] = judged
    assert seconds == sampling_s if sampling_s else 0 < seconds < 1  # type: ignore[operator]
