"""Rows by packs: every value, where packs begin and end, and what happens if they cannot be made."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packs_example import assert_all_same, assert_same, open_loader, open_source, scratch_files

import gids
from gids.loader import packer, superbatch
from gids.loader.stats import describe_choices
from gids.sampler import Minibatch
from gids.write import DatasetWriter

MIB = 1 << 20


@pytest.fixture
def packs_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """reads="auto" considers packs for any epoch, and finds that they pay."""
    monkeypatch.setattr(packer, "LEAST_WAIT_S", 1e-9)
    monkeypatch.setattr(superbatch, "predict", lambda *_, **__: {"random": 2.0, "pack": 1.0})


@pytest.fixture
def one_warning(caplog: pytest.LogCaptureFixture) -> Callable[[str], None]:
    """Check that one warning was logged, with this text."""

    def check(text: str) -> None:
        warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        warnings = [text for text in warnings if "for the cache, and a minibatch reads" not in text]
        assert len(warnings) == 1, warnings
        assert text in warnings[0]

    return check


def ways(loader: Any) -> list[tuple[str, int]]:
    return [(c["way"], c["returned"]) for c in loader.stats()["packs"]["choices"]]


def test_epochs_are_those_of_random_reads(path: Path, epochs: list[list[Minibatch]]) -> None:
    with open_source(path, "pack", check_crc=True) as source, open_loader(source) as loader:
        for epoch in epochs[:2]:
            assert_all_same(epoch, loader)
        stats = loader.stats()["packs"]
        assert stats["minibatches"] == sum(map(len, epochs[:2]))
        assert stats["bytes_written"] > 0
        assert sum(choice["actual_s"] for choice in stats["choices"]) >= stats["seconds"]["wait"] > 0
        assert all(way == "pack" for way, _ in ways(loader))
        assert 2 <= len(ways(loader)) <= stats["superbatches"]
    assert scratch_files(path) == []


def test_a_long_epoch_goes_over_to_packs(path: Path, packs_pay: None) -> None:
    with open_source(path, "auto", 2 * MIB) as source, open_loader(source, every=6, batch_size=16) as loader:
        expected = open_loader(open_source(path, "random"), every=6, batch_size=16)
        assert_all_same(expected, loader)
        (first, at_random), *packed = ways(loader)
        assert first == "random"
        assert 1 <= at_random < len(loader)  # fewer than 16 on a slow disk
        assert {way for way, _ in packed} == {"pack"}
        assert at_random + sum(count for _, count in packed) == len(loader)


def test_random_reads_that_are_faster_stay(
    path: Path, packs_pay: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superbatch, "predict", lambda *_, **__: {"random": 1.0, "pack": 2.0})
    with open_source(path, "auto", 2 * MIB) as source, open_loader(source, every=6, batch_size=16) as loader:
        expected = open_loader(open_source(path, "random"), every=6, batch_size=16)
        for _ in range(2):
            assert_all_same(expected, loader)
        assert {way for way, _ in ways(loader)} == {"random"}
        assert loader.stats()["packs"]["bytes_written"] == 0


def test_an_epoch_that_is_interrupted_goes_on_at_random(
    path: Path, expected: list[Minibatch], one_warning: Callable[[str], None]
) -> None:
    with open_source(path, "pack") as source, open_loader(source) as loader:
        found = iter(loader)
        for minibatch in expected[:5]:
            assert_same(minibatch, next(found))
        with open_loader(source, every=50) as other:
            assert len(list(other)) == len(other)
            assert_all_same(expected[5:], found)
    one_warning("open a second source")


class Unpicklable:
    """A minibatch that does not pickle."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids, self.function = ids, lambda: None


def attached(path: Path, minibatches: Any, **options: Any) -> Any:
    source = open_source(path, "pack", **options)
    loader = gids.FeatureLoader(source, ["paper.feat"])
    return loader.attach(minibatches, lambda m: {"paper.feat": m.ids if hasattr(m, "ids") else m}), loader


def test_minibatches_that_do_not_pickle(
    path: Path, rows: dict[str, torch.Tensor], one_warning: Callable[[str], None]
) -> None:
    ids = [torch.arange(i, 4000, 7) for i in range(6)]
    stream, _ = attached(path, [ids[0], ids[1], *map(Unpicklable, ids[2:])])
    for of_minibatch, (_, features) in zip(ids, stream, strict=True):
        assert torch.equal(features["paper.feat"], rows["paper.feat"][of_minibatch])
    one_warning("Unpicklable does not pickle")


def test_an_error_of_the_sampler_or_a_wrong_id_comes_in_its_place(
    path: Path, rows: dict[str, torch.Tensor]
) -> None:
    def sampler() -> Iterator[torch.Tensor]:
        yield torch.arange(5)
        yield torch.arange(7)
        raise LookupError("no more seeds")

    stream, _ = attached(path, sampler())
    for count in (5, 7):
        assert torch.equal(next(stream)[1]["paper.feat"], rows["paper.feat"][:count])
    with pytest.raises(LookupError, match="no more seeds"):
        next(stream)
    stream, _ = attached(path, [torch.arange(5), torch.tensor([4000]), torch.arange(7)])
    assert torch.equal(next(stream)[1]["paper.feat"], rows["paper.feat"][:5])
    with pytest.raises(IndexError, match="4000"):
        next(stream)


class Forgetful:
    """A minibatch that reads other rows once it was unpickled."""

    def __init__(self, ids: torch.Tensor, become: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.ids, self._become = ids, become

    def __reduce__(self) -> Any:
        return _forgetful, (self._become(self.ids),)


def _forgetful(ids: torch.Tensor) -> Forgetful:
    if not len(ids):
        raise LookupError("forgot all")
    return Forgetful(ids, torch.clone)


@pytest.mark.parametrize(
    ("become", "said"),
    [
        (lambda ids: ids.flip(0), r"minibatch 0 reads other rows of 'paper\.feat'.*in another order"),
        (lambda ids: ids[:0], r"cannot be read back: LookupError\('forgot all'\); let its sampler"),
    ],
    ids=["order", "none"],
)
def test_a_minibatch_that_changes_when_it_is_pickled(path: Path, become: Any, said: str) -> None:
    stream, _ = attached(path, [Forgetful(torch.arange(5), become)])
    with pytest.raises(RuntimeError, match=said):
        next(stream)


def test_empty_minibatches_and_tables_that_one_does_not_read(
    path: Path, rows: dict[str, torch.Tensor]
) -> None:
    source = open_source(path, "pack")
    loader = gids.FeatureLoader(source, ["paper.feat", "paper.text"])
    asked = [{}, {"paper.text": torch.arange(9)}, {"paper.feat": torch.empty(0, dtype=torch.int64)}]
    asked += [{"paper.feat": torch.tensor([3, 3, 1]), "paper.text": torch.tensor([8])}]
    for (ids, features), wanted in zip(loader.attach(asked, lambda ids: ids), asked, strict=True):
        assert features.keys() == ids.keys() == wanted.keys()
        assert all(torch.equal(features[name], rows[name][wanted[name]]) for name in wanted)
    source.close()


def test_scratch_that_is_full(
    path: Path, expected: list[Minibatch], one_warning: Callable[[str], None]
) -> None:
    with open_source(path, "pack", scratch_bytes=6 * MIB) as source:
        with open_loader(source) as loader:
            assert_all_same(expected, loader)
    one_warning(f"scratch_bytes={6 * MIB} is used up")
    assert scratch_files(path) == []


def test_scratch_that_has_room_for_one_superbatch_and_a_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one is shorter, or waits for the first one's scratch."""
    monkeypatch.setattr(packer, "MOST_STEPS", 20)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(2000, 1024, generator=generator)
    with DatasetWriter(tmp_path / "long.gids") as writer:
        writer.write_table("node", "_N", "feat", rows)
    asked = list(torch.randint(0, 2000, (60, 500), generator=generator))
    with open_source(tmp_path / "long.gids", "pack", 8 * MIB, scratch_bytes=50 * MIB) as source:
        loader = gids.FeatureLoader(source, ["_N.feat"])
        found = loader.attach(asked, lambda ids: {"_N.feat": ids}, count=len(asked))
        for ids, features in found:
            assert torch.equal(features["_N.feat"], rows[ids])
        (way, first), *later = ways(loader)
    assert (way, first) == ("pack", 20)
    assert {way for way, _ in later} == {"pack"}
    assert first + sum(count for _, count in later) == len(asked)
    assert not caplog.records


def test_memory_that_is_too_small(
    path: Path, expected: list[Minibatch], one_warning: Callable[[str], None]
) -> None:
    with open_source(path, "pack", memory=2850 << 10) as source, open_loader(source) as loader:
        assert_all_same(expected, loader)
    one_warning("are too little for")


def test_a_table_that_is_too_long_to_plan(path: Path) -> None:
    with open_source(path, "pack", memory=40_000) as source, open_loader(source) as loader:
        with pytest.raises(ValueError, match="packs can be planned for 3,333 with memory=40000: give more"):
            next(iter(loader))


def test_a_page_that_cannot_be_read(
    path: Path, rows: dict[str, torch.Tensor], one_warning: Callable[[str], None]
) -> None:
    """The superbatch is read at random, so that the error comes with its minibatch."""
    asked = [torch.arange(100), torch.arange(4000), torch.arange(50)]
    stream, loader = attached(path, asked)
    loader.engine.inject_faults([(2, 8192, errno.EIO, 1 << 20)])
    assert torch.equal(next(stream)[1]["paper.feat"], rows["paper.feat"][:100])
    with pytest.raises(OSError, match="cannot read a page"):
        next(stream)
    one_warning("cannot read a page")


def test_memory_is_what_stats_says(path: Path) -> None:
    with open_source(path, "pack", 8 * MIB) as source, open_loader(source) as loader:
        list(loader)  # a first epoch prepares no second one
        found = iter(loader)
        for _ in range(5):
            next(found)
        memory = source.stats() and loader.stats()["memory"]
        assert 4 * MIB < sum(memory.values()) <= 8 * MIB
        assert {"lines", "pieces", "outputs", "next superbatch"} <= memory.keys()


def test_choices_are_described_and_added_up_by_way() -> None:
    def choice(way: str, minibatches: int, actual_s: float, **predicted_s: float) -> dict[str, Any]:
        return {"way": way, "minibatches": minibatches, "predicted_s": predicted_s, "actual_s": actual_s}

    packs = [choice("pack", 1250, 21.25, pack=20.0, random=31.5), choice("pack", 10, 0.25, pack=0.5)]
    at_random = choice("random", 9, 1.5, random=1.0, pack=2.0)
    assert describe_choices([packs[0], at_random, packs[1]]) == (
        "1,260 minibatches by pack reads, took 21.5 s (predicted: pack 20.5 s); "
        "9 minibatches by random reads, took 1.5 s (predicted: random 1.0 s, pack 2.0 s)"
    )
