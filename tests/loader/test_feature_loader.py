"""The loader: every value equals the source's, whatever the window, policy, engine and memory."""

from __future__ import annotations

import gc
import itertools
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import resident_bytes
from loader_example import ROWS, TABLES, Ids, check, ids_of, minibatches
from open_options import feature_loader, tuned

import gids
from gids import _core
from gids.io.speed import DiskSpeed
from gids.loader.memory import KEPT_HEAT


@pytest.mark.few(3)
@pytest.mark.parametrize("engine", ["uring", "threads", "mmap"])
@pytest.mark.parametrize("cache_bytes", [0, 4096, None])
def test_every_engine_with_no_a_tiny_and_a_full_cache(
    path: Path, source: Ids, engine: str, cache_bytes: int | None
) -> None:
    with feature_loader(
        path, TABLES, memory=1 << 30, check_crc=True, engine=engine, cache=cache_bytes
    ) as loader:
        for epoch in range(2):
            for minibatch, features in loader.attach(minibatches(20, epoch), ids_of):
                check(source, minibatch, features)
        stats = loader.stats()
        assert stats["engine"]["name"] == engine
        if cache_bytes is None:
            assert stats["bypasses"] == stats["evictions"] == 0
            pages = {
                name: np.unique(
                    np.concatenate([m[name].numpy() for e in (0, 1) for m in minibatches(20, e)]) // per_page
                )
                for name, per_page in (("paper.feat", 4), ("author.feat", 2))
            }
            assert stats["misses"] == sum(map(len, pages.values()))
        if cache_bytes == 0:
            assert stats["loads"] == 0


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


def test_hits_do_not_depend_on_timing(path: Path) -> None:
    counts = set()
    for depth in (1, 64, 256):
        with feature_loader(
            path, TABLES, memory=1 << 30, cache=200_000, queue_depth=depth, planned=2
        ) as loader:
            for epoch in range(2):
                for _ in loader.attach(minibatches(30, epoch), ids_of):
                    pass
            stats = loader.stats()
            counts.add((stats["pages"], stats["hits"], stats["bypasses"], stats["evictions"]))
    assert len(counts) == 1


def test_too_little_memory_is_refused_with_the_sum(path: Path) -> None:
    with feature_loader(path, TABLES, memory=3 << 20) as loader:
        with pytest.raises(
            gids.MemoryBudgetError, match=r"page tables .* bounce pool .* outputs .* window .* = \d+ bytes"
        ):
            next(loader.attach([{"paper.feat": torch.arange(3000)}] * 3, ids_of))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"window": 23, "planned": 2},
            r"window \+ planned must be at most 24 \(got 23 \+ 2\): lower one of them",
        ),
        ({"window": 24}, "at most 23"),
        ({"window": -1}, r"window must be 0 or more \(got -1\)"),
        ({"planned": 0}, r"planned must be 1 to 8 \(got 0\)"),
        ({"planned": 9}, r"planned must be 1 to 8 \(got 9\)"),
        ({"policy": "mru"}, "policy must be one of lookahead, window-pin, random, lru, static"),
        ({"threads": 0}, r"threads must be 1 or more \(got 0\)"),
        ({"device": "mps"}, "'cpu' or 'cuda'"),
        ({"dtype": torch.int8}, "torch.float32, torch.float16, torch.bfloat16"),
    ],
)
def test_bad_options_are_refused_with_the_reason(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        feature_loader(path, TABLES, **options)


def test_a_missing_table_names_what_there_is(path: Path) -> None:
    with pytest.raises(KeyError, match=r"venue.feat.*paper.feat.*author.feat"):
        gids.FeatureLoader(path, ["venue.feat"])


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


@pytest.mark.parametrize("policy", ["lookahead", "window-pin", "lru", "random"])
def test_hits_do_not_depend_on_the_speed_of_the_disk(
    path: Path, source: Ids, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, planned = set(), set()
    for pending in (1, 100, 1e6):
        let_disks_need(pending, monkeypatch)
        options: Any = {"memory": 1 << 30, "cache": 1_200_000, "policy": policy, "reads": "random"}
        with feature_loader(path, ["paper.feat"], **options) as loader:
            for epoch in range(3):
                small = [{"paper.feat": b["paper.feat"][:20]} for b in minibatches(40, epoch)]
                for minibatch, features in loader.attach(small, ids_of):
                    check(source, minibatch, features)
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
        kept[::7] = True
        kept[12:] &= torch.arange(12, table.page_count) < 80
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
    assert [r.message for r in caplog.records].count(
        "window lowered from 16 to 3 minibatches: few file descriptors"
    ) == 1


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
    everything = [{"paper.feat": torch.arange(ROWS)}]
    stream = loader.attach(everything, ids_of)
    list(stream)
    stats = loader.stats()
    held = resident_bytes()
    loader.close()
    assert loader.stats()["hits"] == stats["hits"]
    assert resident_bytes() < held - stats["memory"]["lines"] // 2


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_loaders_that_take_turns_give_the_memory_of_their_caches_back(path: Path, engine: str) -> None:
    everything = [{"paper.feat": torch.arange(ROWS)}]
    with gids.open(path, memory=1 << 30, tuning=gids.Tuning(engine=engine)) as source:
        loaders = [gids.FeatureLoader(source, ["paper.feat"], dtype=t) for t in (None, torch.float16)]

        def turns(count: int) -> None:
            for _ in range(count):
                for loader in loaders:
                    list(loader.attach(everything, ids_of))

        turns(2)
        held, lines = resident_bytes(), loaders[1].stats()["memory"]["lines"]
        turns(8)
        end = time.monotonic() + 10  # the threads of the engine give it back
        while resident_bytes() > held + 4 * lines and time.monotonic() < end:
            time.sleep(0.01)
        assert resident_bytes() <= held + 4 * lines


def warnings_of_size(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "minibatch_rows=" in r.getMessage()]


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
    [said] = warnings_of_size(caplog)
    assert said.startswith("a minibatch of 900 rows is larger than memory was divided for")
    assert "than memory=4194304. Give minibatch_rows=900, " in said
    caplog.clear()
    for foretold in (900, {"paper.feat": 900}):
        assert max(memory_after(batches, batches, minibatch_rows=foretold)) <= given
    assert max(memory_after([{"paper.feat": torch.arange(n)} for n in (800, 990, 1000)])) <= given
    assert not warnings_of_size(caplog), "a quarter more has room"


def test_outputs_of_growing_minibatches_do_not_pile_up(path: Path) -> None:
    with feature_loader(path, ["paper.feat"], memory=32 << 20, queue_depth=16) as loader:
        growing = [{"paper.feat": torch.arange(1000 + 12 * i)} for i in range(20)]
        for _minibatch, _features in loader.attach(growing, ids_of):
            pass
        assert loader.stats()["memory"]["outputs"] <= 3 * (1250 * 1024 + 4096)  # two are planned


def test_memory_is_divided_the_same_way_after_another_loader_had_it(path: Path) -> None:
    with gids.open(path, **tuned({"memory": 3 << 20, "queue_depth": 16, "window": 0})) as source:
        loader, other = (gids.FeatureLoader(source, [name]) for name in TABLES)
        lines = []
        for rows in (100, 2900, 3):
            list(loader.attach([{"paper.feat": torch.arange(rows)}], ids_of))
            lines.append(loader.stats()["memory"]["lines"])
            list(other.attach([{"author.feat": torch.arange(3)}], ids_of))  # takes the memory
        assert lines[0] == lines[1] == lines[2] > 0


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


def test_memory_of_larger_sampled_minibatches_is_told(path: Path) -> None:
    with feature_loader(path, ["paper.feat"], memory=1 << 26, window=2) as loader:
        sizes = [1000, 5_000_000, 2000]
        ids = {"paper.feat": torch.arange(10)}
        list(loader.attach(sizes, lambda _: ids, bytes_of=lambda size: size))
        assert loader.stats()["memory"]["window"] >= 4 * 5_000_000


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (-1, ValueError, "must be 0 or more"),
        (2.5, TypeError, "give a number of rows"),
        ({"paper.feat": "9"}, TypeError, "give a number of rows"),
        ({"paper.x": 9}, KeyError, "names 'paper.x', and the tables are 'paper.feat', 'author.feat'"),
    ],
)
def test_what_is_no_number_of_rows_is_refused(
    path: Path, given: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        gids.FeatureLoader(path, TABLES, minibatch_rows=given)


def test_an_epoch_ends_with_a_line_in_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gids")
    with feature_loader(path, TABLES, memory=1 << 26) as loader:
        for count, sampled in ((6, 6), (4, 4), (2, 9)):
            caplog.clear()
            stream = loader.attach(minibatches(sampled), ids_of)
            assert len(list(itertools.islice(stream, count))) == count
            stream.close()
            lines = [r.getMessage() for r in caplog.records if "minibatches in" in r.getMessage()]
            assert len(lines) == 1
            assert lines[0].startswith(f"{count} minibatches in ")


FORKED = """
import os, sys
from pathlib import Path
sys.path += [sys.argv[1], str(Path(sys.argv[1]).parent)]
import loader_example
import gids

source = gids.open(sys.argv[2], window=4, tuning=gids.Tuning(planned=2))
loader = gids.FeatureLoader(source, loader_example.TABLES)
stream = loader.attach(iter(loader_example.minibatches(12)), loader_example.ids_of)
next(stream), next(stream)
for closes in (True, False):
    if (child := os.fork()) == 0:
        if closes:
            loader.close()
        sys.exit(7)  # the end of a process closes the loader, too
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
rows = loader_example.make_source()
for minibatch, features in stream:
    loader_example.check(rows, minibatch, features)
loader.close()
"""


@pytest.mark.slow
def test_children_forked_in_mid_epoch_end_and_the_parent_goes_on(path: Path) -> None:
    command = [sys.executable, "-P", "-W", "ignore", "-c", FORKED, Path(__file__).parent, path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_error_says_what_to_do_without_memory(path: Path) -> None:
    def fail() -> Iterator[Ids]:
        yield from minibatches(3)
        raise MemoryError

    with feature_loader(path, TABLES, memory=1 << 24) as loader:
        with pytest.raises(MemoryError) as raised:
            list(loader.attach(fail(), ids_of))
    assert "ulimit -v" in raised.value.__notes__[-1]


def test_planned_minibatches_adapt_in_a_new_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_disks_need(600, monkeypatch)
    rows = [{"paper.feat": torch.arange(4 * i, 4 * i + 20)} for i in range(20)]
    source = gids.open(path, memory=16 << 20, window=2)
    with gids.FeatureLoader(source, ["paper.feat"]) as loader, gids.FeatureLoader(source, TABLES) as other:
        for _ in range(3):
            list(loader.attach(rows, ids_of))
        before = loader.stats()["planned"]
        list(other.attach(minibatches(1), ids_of))  # takes the memory
        planned = [loader.stats()["planned"] for _ in loader.attach(rows, ids_of)]
        assert planned[-1] == before > 2


def test_pages_that_are_kept_take_half_of_the_lines(path: Path, source: Ids) -> None:
    with feature_loader(path, ["paper.feat"], memory=3 << 20, window=2) as loader:
        [table] = loader.tables
        loader.keep_pages(table.name, np.ones(table.page_count, np.bool_))
        for minibatch, features in loader.attach(minibatches(6), lambda m: {table.name: m[table.name]}):
            assert torch.equal(features[table.name], source[table.name][minibatch[table.name]])
        heats = (loader._cache.page_words(table.name) >> np.uint64(_core.HEAT_SHIFT)) % _core.HEAT_LEVELS
        lines = loader.stats()["tables"][table.name]["lines"]
        assert 0 < lines < table.page_count
        assert np.count_nonzero(heats == KEPT_HEAT) == lines // 2
