"""Reads that fail in a sweep or in scratch: random reads go on, and no row is wrong."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import damage, same_bits
from packs_example import cut_small, open_source

import gids
from gids import _core
from gids.errors import StorageError
from gids.io import Engine
from gids.packs import Spool, superbatch
from gids.store import FeatureStore
from gids.stored_file import AnyFile

Ids = dict[str, torch.Tensor]
Pages = set[tuple[str, int]]  # (table, page)
Fault = tuple[int, int, int, int]

PACK_BYTES = 1_500_000
PARTS = {"pack_bytes": 600_000}  # most minibatches are cut into several packs
CUTS: list[dict[str, int]] = [{}, PARTS, {"minibatches": 6}, {"packs": 2}, {"minibatches": 7, "packs": 1}]


def minibatches(store: FeatureStore, count: int, rng: np.random.Generator) -> list[Ids]:
    def rows(name: str, most: int) -> torch.Tensor:
        total = store.table(name).row_count
        return torch.from_numpy((total * rng.random(rng.integers(0, most)) ** 3).astype(np.int64))

    found = []
    for _ in range(count):
        papers = rows("paper.feat", 900)
        edges = rows("author.writes.paper.year", 50)
        found.append(
            {
                "paper.feat": papers,
                "paper.text": papers,
                "author.feat": rows("author.feat", 40),
                "author.writes.paper.year": edges,
            }
        )
    return found


def needs(store: FeatureStore, minibatch: Ids) -> Pages:
    return {
        (name, page)
        for name, ids in minibatch.items()
        for page in (ids // store.table(name).rows_per_page).tolist()
    }


def results(loader: gids.FeatureLoader, batches: list[Ids], rows: Ids) -> Iterator[StorageError | None]:
    """For each minibatch its error, or None; then every row was right."""
    stream = loader.attach(batches, lambda ids: ids, count=len(batches))
    for batch in batches:
        try:
            found, features = next(stream)
        except StorageError as error:
            yield error
            continue
        assert all(torch.equal(found[name], ids) for name, ids in batch.items())
        assert features.keys() == batch.keys()
        for name, ids in batch.items():
            assert same_bits(features[name], rows[name][ids]), name
        yield None
    with pytest.raises(StopIteration):
        next(stream)


def faulty(monkeypatch: pytest.MonkeyPatch, faults_of: Callable[[int, list[str]], list[Fault]]) -> None:
    """Inject faults into the engines of superbatches. faults_of: (number of the engine, its files)."""
    original, opened = superbatch.open_engine, 0

    def opening(paths: list[AnyFile], *args: Any, **options: Any) -> Engine:
        nonlocal opened
        engine = original(paths, *args, **options)
        engine.inject_faults(faults_of(opened, [os.fspath(path) for path in paths]))
        opened += 1
        return engine

    monkeypatch.setattr(superbatch, "open_engine", opening)


def place(store: FeatureStore, name: str, page: int) -> tuple[str, int]:
    """The shard that has a page of a table, and its offset there."""
    table = store.table(name)
    shards = table.shard_paths
    return str(shards[page % len(shards)]), page // len(shards) * table.page_bytes


def flip_bit(file: Path, offset: int) -> None:
    damage(file, bytes([file.read_bytes()[offset] ^ 4]), offset)


def check_error(store: FeatureStore, error: StorageError, needed: Pages, bad: Pages, code: int) -> None:
    """The error is one of the bad pages that the minibatch needs."""
    assert error.errno == code
    page_at = (error.offset or 0) // 4096 * 4096
    assert (error.filename, page_at) in [place(store, *page) for page in needed & bad]


def random_reads_went_on(loader: gids.FeatureLoader, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """Packs ended early, and one warning says why."""
    stats = loader.stats()["packs"]
    assert stats["minibatches"] < sum(choice["returned"] for choice in stats["choices"])
    assert stats["choices"][-1]["way"] == "random"
    [warning] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said in warning


@pytest.mark.few(2)
@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_page_that_a_sweep_cannot_read_ends_packs(
    path: Path,
    rows: Ids,
    cut: dict[str, int],
    turn: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """turn: the sweep that fails, if there are so many."""
    rng = np.random.default_rng(turn)
    cut_small(monkeypatch, **{"pack_bytes": PACK_BYTES, **cut})
    with open_source(path, "pack") as source:
        shard, offset = place(source.store, "paper.text", 0)

        def faults_of(engine: int, paths: list[str]) -> list[Fault]:
            return [(paths.index(shard), offset + 3, errno.EIO, 1 << 30)] if engine == turn else []

        faulty(monkeypatch, faults_of)
        batches = minibatches(source.store, 30, rng)
        loader = gids.FeatureLoader(source, list(source.store.tables))
        assert list(results(loader, batches, rows)) == [None] * len(batches)
        if turn == 0 or loader.stats()["packs"]["choices"][-1]["way"] == "random":
            random_reads_went_on(loader, "cannot read a page", caplog)
            assert shard in caplog.text


@pytest.mark.parametrize("cut", CUTS[:3], ids=str)
def test_a_minibatch_that_cannot_be_read_from_the_spool_is_the_only_one_that_fails(
    path: Path, rows: Ids, cut: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first and the last one of a pack, and one that is in several packs."""
    cut_small(monkeypatch, **{"pack_bytes": PACK_BYTES, **cut})
    take, taken = Spool.take, 0

    def lose(spool: Spool, index: int) -> Any:
        nonlocal taken
        taken += 1
        if taken % 3 == 1:
            raise StorageError(errno.EIO, "cannot read a sampled minibatch", "scratch", index)
        return take(spool, index)

    monkeypatch.setattr(Spool, "take", lose)
    with open_source(path, "pack") as source:
        batches = minibatches(source.store, 30, np.random.default_rng(3))
        loader = gids.FeatureLoader(source, list(source.store.tables))
        errors = results(loader, batches, rows)
        assert [error is not None for error in errors] == [step % 3 == 0 for step in range(30)]


@pytest.mark.parametrize("cut", CUTS[:3], ids=str)
@pytest.mark.parametrize("kind", ["truncated", "checksum"])
def test_a_shard_that_is_damaged_after_opening(
    path: Path,
    rows: Ids,
    tmp_path: Path,
    kind: str,
    cut: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(5)
    copy = tmp_path / "copy.gids"
    shutil.copytree(path, copy)
    cut_small(monkeypatch, **{"pack_bytes": PACK_BYTES, **cut})
    with open_source(copy, "pack", check_crc=kind == "checksum") as source:
        table = source.store.table("paper.text")
        shards = len(table.shard_paths)
        first = table.page_count * 3 // 4
        shard, offset = place(source.store, table.name, first)
        loader = gids.FeatureLoader(source, list(source.store.tables))
        if kind == "truncated":
            code, bad = errno.ENODATA, {(table.name, p) for p in range(first, table.page_count, shards)}
            with open(shard, "r+b") as file:
                file.truncate(offset + 100)
        else:
            code, bad = errno.EBADMSG, {(table.name, first)}
            flip_bit(Path(shard), offset + 100)
        batches = minibatches(source.store, 30, rng)
        failed = [
            (batch, error)
            for batch, error in zip(batches, results(loader, batches, rows), strict=True)
            if error is not None
        ]
        for batch, error in failed:
            check_error(source.store, error, needs(source.store, batch), bad, code)
        assert len(failed) == sum(bool(needs(source.store, batch) & bad) for batch in batches)
        assert 0 < len(failed) < len(batches)


@pytest.mark.parametrize("turn", [1, 2, 4])
def test_a_sweep_whose_thread_ends_early_gives_way_to_random_reads(
    path: Path,
    rows: Ids,
    turn: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No minibatch gets rows that were not swept."""
    original, count = _core.Sweep, 0

    def sweep(*args: Any, **options: Any) -> _core.Sweep:
        nonlocal count
        count += 1
        made = original(*args, **options)
        if count >= turn:
            made.cancel()
            assert made.wait()["error"] == errno.ECANCELED
        return made

    monkeypatch.setattr(_core, "Sweep", sweep)
    cut_small(monkeypatch, pack_bytes=PACK_BYTES, packs=2)
    with open_source(path, "pack") as source:
        batches = minibatches(source.store, 40, np.random.default_rng(7))
        loader = gids.FeatureLoader(source, list(source.store.tables))
        assert list(results(loader, batches, rows)) == [None] * len(batches)
        assert count >= turn
        assert loader.stats()["packs"]["minibatches"] < len(batches)
    assert len(caplog.records) == 1
