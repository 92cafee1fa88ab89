"""The next epoch is sampled and swept while one is trained. Its rows are right, whatever comes in between."""

from __future__ import annotations

import errno
import gc
import signal
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import ended
from datasets import same_bits
from packs_example import (
    PAPERS,
    assert_all_same,
    assert_same,
    background_threads,
    cut_small,
    open_source,
    scratch_files,
    wait_until_all_has_ended,
)
from packs_example import open_loader as open_large_loader

import gids
from gids.errors import StorageError
from gids.loader import pack_reads
from gids.loader.sampled_ahead import SampledAhead
from gids.packs import DiskRates, PackMachine, Spool, Superbatch, Work
from gids.sampler import Labor, LocalityBias, Minibatch, Neighbor

EPOCHS = 5
MEMORY = 32 << 20


def open_loader(source: gids.Source, **options: Any) -> gids.NodeLoader:
    """12 minibatches an epoch."""
    return open_large_loader(source, every=9, **{"batch_size": 40} | options)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[Minibatch]]:
    with open_source(path, "random") as source:
        loader = open_loader(source)
        return [list(loader) for _ in range(EPOCHS)]


@pytest.fixture
def loader(path: Path, tmp_path: Path) -> Iterator[gids.NodeLoader]:
    """A loader whose first epochs are over; the third one is prepared."""
    with open_source(path, "pack", MEMORY, scratch=tmp_path) as source, open_loader(source) as loader:
        list(loader)
        assert loader._learned.next_epoch is None  # nobody knows that there will be another one
        list(loader)
        assert loader._learned.next_epoch is not None
        yield loader
    assert not scratch_files(tmp_path)
    assert not background_threads()


def check(loader: gids.NodeLoader, expected: list[list[Minibatch]], first: int = 2) -> None:
    """Compare two epochs, this one first."""
    for epoch in range(first, min(first + 2, EPOCHS)):
        assert_all_same(expected[epoch], loader)


def was_prepared(loader: gids.NodeLoader) -> bool:
    """Whether the next epoch begins with packs that are made."""
    coming = loader._learned.next_epoch
    next(iter(loader))
    return coming is not None and coming.machine is loader.feature_loader._packs.machine


@pytest.mark.few(2)
@pytest.mark.parametrize("reads", ["pack", "auto"])
@pytest.mark.parametrize("minibatches", [None, 5], ids=["", "superbatches"])
def test_epochs_are_prepared(
    path: Path,
    expected: list[list[Minibatch]],
    reads: str,
    minibatches: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if minibatches is not None:
        cut_small(monkeypatch, minibatches=minibatches)
    monkeypatch.setattr(gids.FeatureLoader, "may_use_packs", lambda self, *_: True)
    monkeypatch.setattr(pack_reads, "measure_rates", lambda *_, **__: DiskRates(4096, 10.0, 1e9, 1e9))
    with open_source(path, reads, MEMORY) as source, open_loader(source) as loader:
        loader._learned.by_packs = True
        for epoch in expected:
            for a, b in zip(epoch, loader, strict=True):
                assert_same(a, b)
                assert sum(loader.stats()["memory"].values()) <= MEMORY + (1 << 20)
        packs = loader.stats()["packs"]
        assert packs["minibatches"] == sum(map(len, expected))
        assert loader._learned.next_epoch is not None


def test_a_prepared_epoch_begins_with_packs_that_are_made(
    loader: gids.NodeLoader, expected: list[list[Minibatch]]
) -> None:
    assert was_prepared(loader)
    check(loader, expected, first=3)


@pytest.mark.few(2)
@pytest.mark.parametrize("stop", [0, 1, 10])
def test_a_break_in_mid_epoch(loader: gids.NodeLoader, expected: list[list[Minibatch]], stop: int) -> None:
    epoch = iter(loader)
    for minibatch in expected[2][:stop]:
        assert_same(next(epoch), minibatch)
    epoch.close()
    check(loader, expected, first=3 if stop else 2)


@pytest.mark.parametrize("epoch", [0, 4])
def test_another_epoch_is_set(loader: gids.NodeLoader, expected: list[list[Minibatch]], epoch: int) -> None:
    loader.epoch = epoch
    check(loader, expected, first=epoch)


def test_a_state_is_loaded(loader: gids.NodeLoader, expected: list[list[Minibatch]]) -> None:
    state = loader.state_dict()
    loader.load_state_dict(state)  # the same place
    assert was_prepared(loader)
    loader.load_state_dict({**state, "step": 7})
    assert_all_same(expected[2][7:], loader)
    check(loader, expected, first=3)


@pytest.mark.few(2)
@pytest.mark.parametrize("reads", ["through the cache", "by random reads", "by packs"])
def test_a_validation_in_between(
    loader: gids.NodeLoader, expected: list[list[Minibatch]], reads: str
) -> None:
    source = loader.source.with_options(reads="random") if reads == "by random reads" else loader.source
    with open_loader(source, batch_size=100) as valid:
        assert (valid.feature_loader is loader.feature_loader) == (reads != "by random reads")
        for epoch in range(2, EPOCHS):
            if reads != "through the cache":
                nodes = [minibatch.input_nodes for minibatch in valid]
                valid.epoch = 0
                assert sum(loader.stats()["memory"].values()) <= MEMORY + (1 << 20)
                assert was_prepared(loader)
                loader.epoch = epoch
            for step, (a, b) in enumerate(zip(expected[epoch], loader, strict=True)):
                assert_same(a, b)
                if step == 5 and reads == "through the cache":
                    nodes = [minibatch.input_nodes for minibatch in valid]
                    valid.epoch = 0
            assert len(nodes) == len(valid)


def test_a_second_stream_of_the_same_loader(loader: gids.NodeLoader, expected: list[list[Minibatch]]) -> None:
    """It is the epoch that is being prepared."""
    first = iter(loader)
    for minibatch in expected[2][:8]:
        assert_same(next(first), minibatch)
    assert_all_same(expected[3], loader)
    assert_all_same(expected[2][8:], first)
    check(loader, expected, first=4)


@pytest.mark.parametrize("changed", ["sampler", "fanouts", "weights", "seed", "shuffle"])
def test_what_the_user_changes_counts(path: Path, loader: gids.NodeLoader, changed: str) -> None:
    def change(loader: Any) -> None:
        if changed == "weights":
            repr(loader.sampler)  # which has a digest of them
            loader.sampler.weights = weights_of(loader.store)
            assert "weights={" in repr(loader.sampler)
        elif changed == "sampler":
            loader.sampler = Labor([4, 4])
        elif changed == "fanouts":
            loader.sampler.fanouts[0] = 2
        elif changed == "seed":
            loader.seed = 9
        else:
            loader.shuffle = False

    change(loader)
    with open_source(path, "random") as source, open_loader(source) as other:
        change(other)
        other.epoch = 2
        assert_all_same(other, loader)


@pytest.mark.parametrize("changed", ["negatives", "exclude"])
def test_what_the_user_changes_of_an_edge_loader_counts(path: Path, changed: str) -> None:
    epochs, relation = {}, ("paper", "cites", "paper")
    for reads in ("random", "pack"):
        with open_source(path, reads, 2 * MEMORY) as source:
            graph = source.store.graph(relation)
            targets = np.repeat(np.arange(PAPERS), np.diff(graph.indptr))
            edges = torch.from_numpy(np.stack([graph.indices, targets]).astype(np.int64)[:, ::16])
            loader = gids.EdgeLoader(
                source,
                edges,
                [4, 4],
                relation=relation,
                tables=["paper.feat"],
                batch_size=256,
                negatives=1,
                seed=0,
            )
            list(loader), list(loader)
            assert (loader._learned.next_epoch is not None) == (reads == "pack")
            setattr(loader, changed, {"negatives": 3, "exclude": "self"}[changed])
            epochs[reads] = list(loader)
    assert_all_same(*epochs.values())


def test_a_sampler_that_may_change_is_not_sampled_early_if_it_is_set_before_an_epoch_begins(
    path: Path,
) -> None:
    epochs = {}
    for reads in ("random", "pack"):
        with open_source(path, reads, MEMORY) as source, open_loader(source) as loader:
            list(loader), list(loader)
            epoch = iter(loader)
            weights = weights_of(loader.store)
            loader.sampler = Neighbor([4, 4], weights=weights)
            list(epoch)
            assert loader._learned.next_epoch is None
            for of_relation in weights.values():
                of_relation[::3] = 0
            epochs[reads] = list(loader)
    assert_all_same(*epochs.values())


def weights_of(store: gids.FeatureStore) -> dict[Any, np.ndarray]:
    rng = np.random.default_rng(0)
    return {r: rng.random(store.num_edges(r), np.float32) for r in store.relations}


@pytest.mark.few(1)
@pytest.mark.parametrize("scratch_bytes", [3 << 19, 2 << 20])
def test_an_epoch_takes_the_scratch_of_what_is_prepared_for_another_one(
    path: Path, expected: list[list[Minibatch]], scratch_bytes: int
) -> None:
    with (
        open_source(path, "pack", MEMORY, scratch_bytes=scratch_bytes) as source,
        open_loader(source) as loader,
        open_loader(source, batch_size=80, shuffle=False) as valid,
    ):
        for epoch in expected:
            assert_all_same(epoch, loader)
            assert len(list(valid)) == len(valid)
        assert (loader._learned.why_random, valid._learned.why_random) == ("", "")
        counted = [each.stats()["packs"]["minibatches"] for each in (loader, valid, source)]
        trained, validated = sum(map(len, expected)), len(expected) * len(valid)
        assert counted == [trained, validated, trained + validated]


def test_a_child_that_is_forked_while_packs_are_made_does_not_wait_for_them(
    path: Path, expected: list[list[Minibatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, may_end = Work.choose, threading.Event()

    def waits(self: Work, *resident: Any) -> Any:
        if resident:
            may_end.wait(60)
        return choose(self, *resident)

    monkeypatch.setattr(Work, "choose", waits)
    # A child does not have the memory of outputs.
    copies = [{name: rows.clone() for name, rows in m.features.items()} for m in expected[2]]
    with open_source(path, "pack", MEMORY) as source, open_loader(source) as loader:
        list(loader), list(loader)
        assert loader._learned.next_epoch is not None

        def use() -> None:
            signal.alarm(30)
            for features, minibatch in zip(copies, loader, strict=True):
                assert all(same_bits(features[name], rows) for name, rows in minibatch.features.items())

        ended(use)
        may_end.set()
        check(loader, expected)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("again", MemoryError("none")),
        ("choose", MemoryError("none")),
        ("prepare", StorageError(errno.EIO, "scratch fails", "somewhere")),
        ("finish_sweep", StorageError(errno.EIO, "scratch fails", "somewhere")),
        ("__init__", StorageError(errno.EIO, "scratch fails", "somewhere")),
    ],
)
def test_a_failure_costs_no_minibatch(
    path: Path, expected: list[list[Minibatch]], where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the packs of the next epoch are made."""
    owner: Any = {"again": PackMachine, "choose": Work}.get(where, Superbatch)
    original, failed = getattr(owner, where), []

    def fails(self: Any, *args: Any, **options: Any) -> Any:
        beside = options.get("beside") or getattr(self, "_from_scratch", False) or len(args) == 1
        beside = beside or where == "again"
        if beside and not failed:
            failed.append(where)
            raise error
        return original(self, *args, **options)

    with open_source(path, "pack", MEMORY) as source, open_loader(source) as loader:
        for epoch, minibatches in enumerate(expected):
            if epoch == 1:
                monkeypatch.setattr(owner, where, fails)
            assert_all_same(minibatches, loader)
    assert failed
    assert not scratch_files(path)


class Interrupt(BaseException):
    """In place of KeyboardInterrupt, which would end pytest."""


@pytest.mark.parametrize("error", [Interrupt(), ValueError("of an observer")])
def test_what_is_prepared_is_dropped_where_ctrl_c_or_an_error_interrupted_that(
    loader: gids.NodeLoader,
    expected: list[list[Minibatch]],
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epoch = iter(loader)
    assert_same(expected[2][0], next(epoch))

    def interrupt(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "begin_put", interrupt)
        with pytest.raises(type(error)):
            list(epoch)
    check(loader, expected, 3)


def test_a_loader_that_is_dropped_leaves_nothing(path: Path, tmp_path: Path) -> None:
    with open_source(path, "pack", MEMORY, scratch=tmp_path) as source:
        for end in ("drop", "close"):
            loader = open_loader(source)
            with open_loader(source, batch_size=100) as other:  # the loaders share a FeatureLoader
                list(loader), list(loader)
                assert scratch_files(tmp_path)
                list(other)
                if end == "close":
                    loader.close()
                del loader
                gc.collect()
                wait_until_all_has_ended(tmp_path)


def test_a_loader_that_is_collected_where_a_lock_is_held(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The thread that makes packs waits for that lock, so the collector must not wait for the thread."""
    choose, may_end = Work.choose, threading.Event()

    def waits(self: Work, *resident: Any) -> Any:
        assert not resident or may_end.wait(60)
        return choose(self, *resident)

    monkeypatch.setattr(Work, "choose", waits)
    with open_source(path, "pack", MEMORY, scratch=tmp_path) as source:
        loader: Any = open_loader(source)
        list(loader), list(loader)
        lock = loader.feature_loader._packs.scratch._lock
        gc.disable()
        request.addfinalizer(gc.enable)
        loader.itself = loader
        del loader

        def collect() -> None:
            with lock:
                may_end.set()
                gc.collect()

        collecting = threading.Thread(target=collect, daemon=True)
        collecting.start()
        collecting.join(30)
        assert not collecting.is_alive()
        wait_until_all_has_ended(tmp_path)


def test_a_source_that_is_dropped_with_its_loader_leaves_nothing(path: Path, tmp_path: Path) -> None:
    source = open_source(path, "pack", MEMORY, scratch=tmp_path)
    loader = open_loader(source)
    vars(loader.sampler)["loader"] = loader  # as a sampler of the user's may have it
    list(loader), list(loader)
    coming = loader._learned.next_epoch
    assert coming is not None
    futures.wait([coming._making])  # its thread has the loader
    assert scratch_files(tmp_path)
    del source, loader, coming
    gc.collect()
    wait_until_all_has_ended(tmp_path)


class Mine(Neighbor):
    """A sampler of somebody else."""


@pytest.mark.parametrize("sampler", ["mine", "weights", "locality"])
def test_what_may_change_between_epochs_is_not_sampled_early(path: Path, sampler: str) -> None:
    with open_source(path, "pack", MEMORY) as source:
        mask = {"paper": torch.zeros(PAPERS, dtype=torch.bool)}
        made = {
            "mine": lambda: Mine([4, 4]),
            "weights": lambda: Neighbor([4, 4], weights=weights_of(source.store)),
            "locality": lambda: Neighbor([4, 4], locality=LocalityBias(mask, 2.0)),
        }[sampler]()
        loader = gids.NodeLoader(
            source,
            {"paper": torch.arange(0, PAPERS, 3)},
            made,
            tables=["paper.feat"],
            batch_size=64,
            seed=0,
        )
        for _ in range(3):
            list(loader)
        assert loader._learned.next_epoch is None


@pytest.mark.few(2)
@pytest.mark.parametrize("closed", ["loader", "source"])
@pytest.mark.parametrize("ended", [False, True], ids=["cancelled", ""])
@pytest.mark.parametrize("read_between", [False, True])
def test_what_is_made_for_an_epoch_that_nobody_reads_counts(
    loader: gids.NodeLoader, read_between: bool, ended: bool, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its loader, after another one of the source read, too. ended: the pass over the features."""
    source, coming = loader.source, loader._learned.next_epoch
    other = open_loader(source, seed=4)
    assert coming is not None
    superbatch = coming._making.result()
    while not superbatch.ready:
        time.sleep(0.001)
    written = superbatch.file.nbytes
    if read_between:
        list(other)
    before = [each.stats()["packs"] for each in (loader, other)]
    if not ended:
        monkeypatch.setattr(Superbatch, "ready", False)
    (loader if closed == "loader" else source).close()
    own, others = (each.stats()["packs"] for each in (loader, other))
    assert own["bytes_written"] - before[0]["bytes_written"] >= written // 2 > 0
    assert own["bytes_read"] - before[0]["bytes_read"] >= written // 2
    for name in ("bytes_written", "bytes_read"):
        assert others[name] == before[1][name]
        assert own[name] + others[name] == source.stats()["packs"][name]


def test_memory_that_is_too_small_for_two_epochs(path: Path, expected: list[list[Minibatch]]) -> None:
    """Packs of one are larger then."""
    with open_source(path, "pack", 4 << 20) as source, open_loader(source) as loader:
        for epoch in expected:
            assert_all_same(epoch, loader)
        assert loader._learned.next_epoch is None


def test_another_thread_may_drop_it_while_it_is_sampled(
    loader: gids.NodeLoader, expected: list[list[Minibatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a second iterator of the same loader."""
    note, dropped = SampledAhead._note, []

    def note_and_drop(ahead: SampledAhead[Minibatch], ids: Any) -> None:
        note(ahead, ids)
        coming = loader._learned.next_epoch
        if coming is not None and coming.sampled is ahead and not dropped:
            thread = threading.Thread(target=lambda: next(iter(loader)))
            thread.start()
            thread.join()
            dropped.append(not coming.open)

    monkeypatch.setattr(SampledAhead, "_note", note_and_drop)
    assert_all_same(expected[2], loader)
    assert dropped == [True]
