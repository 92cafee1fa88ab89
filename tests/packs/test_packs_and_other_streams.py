"""A packed epoch beside other streams: validation in mid-epoch, loaders that take turns, damage, errors."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from children import ended
from datasets import same_bits
from packs_example import PAPERS, assert_all_same, assert_same, cut_small, open_loader, open_source
from test_packs_on_a_bad_disk import check_error, flip_bit, needs, place

import gids
from gids.errors import MemoryBudgetError, StorageError
from gids.loader.readers import CacheReader
from gids.sampler import Minibatch

Ids = dict[str, torch.Tensor]


def validation(source: gids.Source, tables: list[str] | None = None) -> gids.NodeLoader:
    seeds = {"paper": torch.arange(1, PAPERS, 9)}
    return gids.NodeLoader(
        source, seeds, [3, 2], tables=tables or list(source.store.tables), batch_size=40, seed=0
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("check_crc", [False, True])
def test_validation_in_mid_epoch(
    path: Path, expected: list[Minibatch], check_crc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_source(path, "random") as source:
        other = validation(source)
        validated = [list(other) for _ in range(4)]
    cut_small(monkeypatch, minibatches=5, packs=2)
    passes = iter(validated)
    with open_source(path, "pack", check_crc=check_crc) as source:
        loader, other = open_loader(source), validation(source)
        for step, (a, b) in enumerate(zip(expected, loader, strict=True)):
            assert_same(a, b)
            if step in (0, 6, 20):
                assert_all_same(next(passes), other)
        before = other.stats()["packs"]["minibatches"]
        assert_all_same(next(passes), other)  # now with packs of its own
        assert other.stats()["packs"]["minibatches"] == before + len(other)


def test_a_cache_that_another_stream_builds_while_packs_are_made_is_freed(path: Path) -> None:
    with open_source(path, "pack", 16 << 20) as source:
        loader = gids.FeatureLoader(source, ["paper.feat"])
        rows = source.store.table("paper.feat").read_rows(range(PAPERS))
        ids = [torch.arange(i, PAPERS, 90) for i in range(60)]
        inner = loader.attach([{"paper.feat": i} for i in ids], lambda m: m)

        def minibatches() -> Iterator[Ids]:
            for number, of_one in enumerate(ids):
                if number == 20:
                    assert same_bits(next(inner)[1]["paper.feat"], rows[ids[0]])
                yield {"paper.feat": of_one}

        outer = loader.attach(minibatches(), lambda m: m, count=len(ids))
        for minibatch, features in outer:
            assert same_bits(features["paper.feat"], rows[minibatch["paper.feat"]])
            assert loader._packs.machine is None or loader._placement.cache is None
        assert loader.stats()["packs"]["minibatches"] == len(ids)


@pytest.mark.parametrize("of", ["source", "loader", "epoch", "sampler", "scratch"])
def test_a_child_that_is_forked_while_a_thread_has_a_lock_has_its_own(path: Path, of: str) -> None:
    with open_source(path, "pack") as source, open_loader(source) as loader:
        epoch = iter(loader)
        next(epoch)
        scratch = loader.feature_loader._packs.scratch
        assert scratch is not None
        locks = {"source": source.lender.lock, "loader": loader._beginning, "epoch": epoch._stream._lock}
        locks |= {"sampler": loader.sampler._lock, "scratch": scratch._lock}
        locked, forked = threading.Event(), threading.Event()

        def hold() -> None:
            with locks[of]:
                locked.set()
                forked.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        locked.wait()

        def use() -> None:
            signal.alarm(10)
            loader.stats()
            loader.sampler.sample(loader._topology, {"paper": torch.arange(9)}, seed=0)
            iter(loader)
            loader.close()

        ended(use)
        forked.set()
        thread.join()


@pytest.mark.parametrize("batch_size", [40, PAPERS])
def test_minibatches_that_do_not_fit_beside_packs_are_warned_of(
    path: Path, caplog: pytest.LogCaptureFixture, batch_size: int
) -> None:
    with open_source(path, "pack") as source:
        seeds = {"paper": torch.arange(1, PAPERS, 9)}
        other = gids.NodeLoader(
            source,
            seeds,
            [3, 2],
            tables=list(source.store.tables),
            batch_size=batch_size,
            seed=0,
        )
        epoch = iter(open_loader(source))
        next(epoch)
        caplog.clear()
        assert len(list(other)) == -(-len(seeds["paper"]) // batch_size)
        said = [r.getMessage() for r in caplog.records if "more than its memory budget" in r.getMessage()]
        assert len(said) == (batch_size > 40)


def test_loaders_of_one_source_take_turns(path: Path, expected: list[Minibatch]) -> None:
    with open_source(path, "random") as source:
        other = validation(source, ["paper.text"])
        second = [list(other) for _ in range(2)][1]
    with open_source(path, "pack") as source:
        loaders = [open_loader(source), validation(source, ["paper.text"])]
        first = iter(loaders[0])
        assert_same(next(first), expected[0])
        with pytest.raises(MemoryBudgetError, match="epoch"):
            next(iter(loaders[1]))  # its first epoch
        assert_all_same(expected[1:], first)
        assert_all_same(second, loaders[1])
        assert loaders[0].stats()["packs"]["minibatches"] == len(expected)
        assert len(list(loaders[0])) == len(expected)


@pytest.mark.parametrize("in_between", [False, True])
def test_an_epoch_that_is_left_counts(path: Path, in_between: bool) -> None:
    """For its loader, also if another one reads between its last minibatch and the end."""
    with open_source(path, "pack") as source:
        loader, other = open_loader(source), validation(source)
        epoch = iter(loader)
        next(epoch)
        early = loader.stats()
        next(epoch)
        if in_between:
            next(iter(other))
        before = other.stats()
        del epoch
        packs = loader.stats()["packs"]
        assert early["packs"]["bytes_written"] > 0
        assert 0 < early["packs"]["bytes_read"] < packs["bytes_read"]
        assert early["seconds"]["gather"] > 0
        assert other.stats()["packs"] == before["packs"]
        assert packs["bytes_read"] == source.stats()["packs"]["bytes_read"]


@pytest.mark.parametrize("held", [False, True], ids=["", "while another thread has the lock"])
def test_a_stream_that_the_garbage_collector_ends_counts_for_its_own_loader(
    path: Path, held: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another loader reads, whose counters go on. It may run anywhere, so it waits for no lock."""

    with open_source(path, "random") as source:
        loader, other = open_loader(source), validation(source)
        left: list[object] = [iter(other)]
        next(left[0])  # type: ignore[call-overload]
        gc.disable()
        request.addfinalizer(gc.enable)
        left.append(left)  # a cycle, so that only the collector ends it
        next(iter(loader))
        own, before = loader.stats(), other.stats()
        del left
        if held:
            collecting = threading.Thread(target=gc.collect, daemon=True)
            with source.lender.lock:
                collecting.start()
                collecting.join(30)
                assert not collecting.is_alive()
        plan = CacheReader.plan
        monkeypatch.setattr(CacheReader, "plan", lambda reader: (plan(reader), gc.collect()))
        next(iter(loader))
        assert loader.stats()["pages"] > own["pages"]
        assert other.stats()["pages"] == before["pages"]


def test_a_forked_child_is_refused(path: Path, expected: list[Minibatch]) -> None:
    """It has the descriptors of an open epoch, and neither its threads nor its memory."""
    with open_source(path, "pack") as source:
        epoch = iter(open_loader(source))
        assert_same(next(epoch), expected[0])

        def use() -> None:
            signal.alarm(60)
            with pytest.raises(RuntimeError, match="before a fork"):
                next(epoch)

        ended(use)
        assert_all_same(expected[1:], epoch)


@pytest.mark.parametrize("damage", ["checksum", "truncated"])
def test_a_second_stream_sees_damage_too(path: Path, rows: Ids, tmp_path: Path, damage: str) -> None:
    copy = shutil.copytree(path, tmp_path / "copy.gids")
    rng, name = np.random.default_rng(1), "paper.text"
    with open_source(copy, "pack", check_crc=damage == "checksum") as source:
        table = source.store.table(name)
        bad = table.page_count - 4
        shard, offset = place(source.store, name, bad)
        loader = gids.FeatureLoader(source, [name])
        many = [{name: torch.arange(i, i + 100)} for i in range(10)]
        first = loader.attach(many, lambda ids: ids, count=10)
        next(first)
        if damage == "truncated":
            os.truncate(shard, offset)
        else:
            flip_bit(Path(shard), offset + 1)
        batches = [{name: torch.from_numpy(rng.integers(0, PAPERS, rng.integers(0, 150)))} for _ in range(40)]
        stream = loader.attach(batches, lambda ids: ids, count=len(batches))
        pages = [bad] if damage == "checksum" else range(bad, table.page_count, len(table.shard_paths))
        lost = {(name, page) for page in pages}
        code, failed = errno.EBADMSG if damage == "checksum" else errno.ENODATA, 0
        for batch in batches:
            if (needed := needs(source.store, batch)) & lost:
                failed += 1
                with pytest.raises(StorageError) as caught:
                    next(stream)
                check_error(source.store, caught.value, needed, lost, code)
            else:
                _, features = next(stream)
                assert same_bits(features[name], rows[name][batch[name]])
        assert 0 < failed < len(batches)
        assert len(list(first)) == 9  # swept before the damage
