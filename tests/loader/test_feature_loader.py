"""FeatureLoader: what it reads when, what it keeps, and how much memory it takes."""

from __future__ import annotations

import gc
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import resident_bytes
from loader_example import ROWS, TABLES, Ids, check, ids_of, minibatches
from open_loaders import feature_loader

import gids
from gids.io.speed import DiskSpeed


def test_a_cache_that_holds_all_rows_reads_each_page_once(path: Path) -> None:
    epochs = [minibatches(20, epoch) for epoch in (0, 1)]
    with feature_loader(path, TABLES, memory=1 << 30) as loader:
        for epoch in epochs:
            list(loader.attach(epoch, ids_of))
        stats = loader.stats()
    assert stats["bypasses"] == stats["evictions"] == 0
    for name, rows_per_page in (("paper.feat", 4), ("author.feat", 2)):
        ids = np.concatenate([m[name].numpy() for epoch in epochs for m in epoch])
        assert stats["tables"][name]["misses"] == len(np.unique(ids // rows_per_page))


def test_the_first_minibatch_comes_after_one_is_sampled(path: Path) -> None:
    pulled: list[int] = []

    def sample() -> Iterator[Ids]:
        for i, minibatch in enumerate(minibatches(40)):
            pulled.append(i)
            yield minibatch

    with feature_loader(path, TABLES, window=8, memory=1 << 30, planned=2) as loader:
        stream = loader.attach(sample(), ids_of)
        next(stream)
        assert len(pulled) == 1
        for handed_out in range(2, 40):
            next(stream)
            assert len(pulled) <= handed_out + 8 + 1
            if 10 < handed_out < 30:
                assert len(pulled) == handed_out + 8 + 1  # the window beyond the two planned


def test_too_little_memory_is_refused_with_the_sum(path: Path) -> None:
    with feature_loader(path, TABLES, memory=3 << 20) as loader:
        with pytest.raises(
            gids.MemoryBudgetError, match=r"page tables .* bounce pool .* outputs .* window .* = \d+ bytes"
        ):
            next(loader.attach([{"paper.feat": torch.arange(3000)}] * 3, ids_of))


def let_disks_need(pending: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many pending reads keep the disks busy."""
    speed = DiskSpeed(pending / 49 * 1e4, 1e-4)  # 0.98 / (1 - 0.98) = 49
    assert speed.pending() == pytest.approx(pending)
    monkeypatch.setattr("gids.loader.feature_loader.known_speed", lambda *_, **__: speed)


def test_planned_minibatches_adapt_within_and_between_epochs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_disks_need(3.9, monkeypatch)
    small = [{"paper.feat": torch.arange(4 * i, 4 * i + 4)} for i in range(40)]  # one missing page each
    with feature_loader(path, ["paper.feat"], memory=1 << 30, cache=0) as loader:
        counts = [loader.stats()["planned"] for _ in loader.attach(small, ids_of)]
        changed = counts.index(4)  # one page each
        assert counts == [2] * changed + [4] * (40 - changed)
        assert changed <= 17
        large = [{"paper.feat": torch.arange(4 * i, 4 * i + 20)} for i in range(10)]
        assert [loader.stats()["planned"] for _ in loader.attach(small[:12], ids_of)] == [4] * 12
        list(loader.attach(large, ids_of))
        assert [loader.stats()["planned"] for _ in loader.attach(large, ids_of)] == [2] * 10


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_hits_do_not_depend_on_the_speed_of_the_disk(
    path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, planned = set(), set()
    for pending in (1, 100, 1e6):
        let_disks_need(pending, monkeypatch)
        options: Any = {"memory": 1 << 30, "cache": 1_200_000, "policy": policy, "reads": "random"}
        with feature_loader(path, ["paper.feat"], **options) as loader:
            for epoch in range(3):
                small = [{"paper.feat": b["paper.feat"][:20]} for b in minibatches(40, epoch)]
                for _ in loader.attach(small, ids_of):
                    planned.add(loader.stats()["planned"])
            stats = loader.stats()
            counts.add(tuple(stats[key] for key in ("pages", "hits", "bypasses", "loads", "evictions")))
    assert {2, 7} < planned
    assert stats["evictions"] > 0
    assert len(counts) == 1


def test_pages_to_keep_are_never_evicted(path: Path, source: Ids) -> None:
    few_lines = gids.open(path, memory=1 << 30, window=2, tuning=gids.Tuning(cache=400_000))
    with gids.FeatureLoader(few_lines, TABLES) as loader:
        table = loader.store.table("paper.feat")
        kept = torch.zeros(table.page_count, dtype=torch.bool)
        kept[:80:7] = True
        loader.keep_pages(table.name, kept.numpy())
        rows = kept[torch.arange(table.row_count) // table.rows_per_page]
        read = torch.zeros(table.row_count, dtype=torch.bool)
        for minibatch, features in loader.attach(minibatches(30), ids_of):
            check(source, minibatch, features)
            read[minibatch[table.name]] = True
        assert loader.stats()["evictions"] > 0
        assert not (rows & read & ~loader.cached_rows(table.name)).any()
        assert (rows & read).any()


def test_a_loader_is_not_pickled_and_not_used_when_closed(path: Path) -> None:
    loader = feature_loader(path, TABLES, memory=1 << 30)
    with pytest.raises(TypeError, match="FeatureStore"):
        pickle.dumps(loader)
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        loader.attach([], ids_of)


def test_the_window_can_be_lowered_while_it_runs(
    path: Path, source: Ids, caplog: pytest.LogCaptureFixture
) -> None:
    with feature_loader(path, TABLES, window=16, memory=1 << 30) as loader:
        stream = loader.attach(minibatches(40), ids_of)
        for i, (minibatch, features) in enumerate(stream):
            check(source, minibatch, features)
            if i == 10:
                stream.limit_window(3, "few file descriptors")
                stream.limit_window(3, "few file descriptors")
    [said] = [r.message for r in caplog.records if "window" in r.message]
    assert said == "window lowered from 16 to 3 minibatches: few file descriptors"


def test_outputs_go_back_without_the_garbage_collector(path: Path) -> None:
    with feature_loader(path, TABLES, memory=1 << 30) as loader:
        gc.disable()
        try:
            largest = 0
            for epoch in range(8):
                for _, features in loader.attach(minibatches(10, epoch), ids_of):
                    largest = max(largest, sum(rows.nbytes for rows in features.values()))
                del _, features
            stats = loader.stats()
            assert stats["memory"]["outputs"] < 1.25 * (stats["planned"] + 3) * largest < 20 * largest
        finally:
            gc.enable()


def test_closing_frees_the_cache_and_keeps_the_counters(path: Path) -> None:
    loader = feature_loader(path, ["paper.feat"], memory=1 << 30)
    stream = loader.attach([{"paper.feat": torch.arange(ROWS)}], ids_of)
    list(stream)
    stats = loader.stats()
    held = resident_bytes()
    loader.close()
    assert loader.stats()["hits"] == stats["hits"]
    assert resident_bytes() < held - stats["memory"]["lines"] // 2


def test_memory_that_the_machine_does_not_have_is_warned_of_once(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gids.loader.memory.available_bytes", lambda: 1 << 20)
    with feature_loader(path, ["paper.feat"], memory="1TB") as loader:
        for _ in range(2):
            list(loader.attach([{"paper.feat": torch.arange(900)}], ids_of))
            loader.release_cache()
    [said] = [r.getMessage() for r in caplog.records if "give a smaller memory=" in r.getMessage()]
    assert "1.0 MB are available" in said


def test_a_minibatch_larger_than_planned_for_goes_above_the_memory_with_one_warning(
    path: Path, source: Ids, caplog: pytest.LogCaptureFixture
) -> None:
    given = 4 << 20  # a minibatch of 900 rows is 1 MB
    options = {"memory": given, "queue_depth": 16, "window": 0, "planned": 1, "reads": "random"}
    batches = [{"paper.feat": torch.arange(n)} for n in (3, 3, 900, 700, 900)]

    def memory_after(*epochs: list[Ids], minibatch_rows: Any = None) -> list[int]:
        with feature_loader(path, ["paper.feat"], minibatch_rows=minibatch_rows, **options) as loader:
            used = []
            for epoch in epochs:
                for minibatch, features in loader.attach(epoch, ids_of):
                    check(source, minibatch, features)
                used.append(sum(loader.stats()["memory"].values()))
            return used

    assert min(memory_after(batches, batches)) > given
    [said] = [r.getMessage() for r in caplog.records if "minibatch_rows=" in r.getMessage()]
    assert said.startswith("a minibatch of 900 rows is larger than memory was divided for")
    assert "than memory=4194304. Give minibatch_rows=900, " in said
    caplog.clear()
    for foretold in (900, {"paper.feat": 900}):
        assert max(memory_after(batches, batches, minibatch_rows=foretold)) <= given
    assert max(memory_after([{"paper.feat": torch.arange(n)} for n in (800, 990, 1000)])) <= given
    assert not [r for r in caplog.records if "minibatch_rows=" in r.getMessage()], "a quarter more has room"


def test_a_first_minibatch_that_does_not_fit_leaves_no_trace(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"memory": 3 << 20, "queue_depth": 16, "window": 0, "heat": "none", "reads": "random"}
    with feature_loader(path, ["paper.feat"], **options) as loader:
        for sampled in ((2900, 0), (3, 8 << 20)):  # rows, and memory of the sampled minibatch
            stream = loader.attach(
                [sampled], lambda s: {"paper.feat": torch.arange(s[0])}, bytes_of=lambda s: s[1]
            )
            with pytest.raises(gids.MemoryBudgetError, match="or use smaller minibatches"):
                next(stream)
        assert len(list(loader.attach([{"paper.feat": torch.arange(3)}] * 2, ids_of))) == 2
        assert loader.stats()["memory"]["lines"] > 1 << 20
    assert not caplog.records


def test_an_epoch_ends_with_a_line_in_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gids")
    with feature_loader(path, TABLES, memory=1 << 26) as loader:
        for count, sampled in ((4, 4), (2, 9)):
            caplog.clear()
            stream = loader.attach(minibatches(sampled), ids_of)
            assert len(list(itertools.islice(stream, count))) == count
            stream.close()
            [line] = [r.getMessage() for r in caplog.records if "minibatches in" in r.getMessage()]
            assert line.startswith(f"{count} minibatches in ")


def test_the_error_says_what_to_do_without_memory(path: Path) -> None:
    def fail() -> Iterator[Ids]:
        yield from minibatches(3)
        raise MemoryError

    with feature_loader(path, TABLES, memory=1 << 24) as loader:
        with pytest.raises(MemoryError) as raised:
            list(loader.attach(fail(), ids_of))
    assert "ulimit -v" in raised.value.__notes__[-1]
