"""The annex against obvious models: every row read from it, and which copies it has."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from raw_table import RawTable, write_raw_table

from gids import _core
from gids.cache.output_dtype import row_form
from gids.errors import StorageError
from gids.io import Engine, open_engine
from gids.packs import Scratch, ScratchFull
from gids.packs.annex import Annex, RowUses, Superbatch

Steps = Sequence[np.ndarray]


def table_of(
    directory: Path, rows: int, row_bytes: int, *, page_bytes: int = 4096, shards: int = 1
) -> RawTable:
    values = torch.randint(
        0, 256, (rows, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    return write_raw_table(directory, values, page_bytes=page_bytes, shards=shards)


def draw_steps(rng: np.random.Generator, rows: int, steps: int, most: int) -> list[np.ndarray]:
    """Skewed, of different lengths, some empty, some with rows that repeat."""
    found = []
    for step in range(steps):
        count = int(rng.integers(0, most + 1)) if step % 5 else 0
        ids = (rows * rng.random(count) ** 2).astype(np.uint32)
        found.append(ids if step % 3 == 0 else rng.permutation(np.unique(ids)))
    return found


@dataclass
class Planned:
    table: RawTable
    annex: Annex
    engine: Engine
    workers: _core.Workers
    superbatch: Superbatch

    def sweep(self) -> None:
        self.annex.sweep(self.superbatch, self.engine, workers=self.workers)

    def reader(self, memory: _core.RunMemory) -> _core.RunReader:
        return self.annex.reader(self.superbatch, memory, row_form(self.table, None), workers=self.workers)


@contextmanager
def planned(
    table: RawTable,
    steps: Steps,
    scratch: Scratch,
    *,
    lines: int,
    threads: int = 2,
    sweep: bool = True,
) -> Iterator[Planned]:
    """A superbatch in the annex of a table."""
    workers = _core.Workers.create(threads)
    uses = RowUses(table, scratch)
    annex = Annex(table, scratch)
    engine = open_engine(table.shard_paths, depth=16, max_read_bytes=1 << 17)
    try:
        for rows in steps:
            uses.append(rows)
        superbatch = annex.plan(uses, workers=workers, lines=lines, work_bytes=4 << 20)
        found = Planned(table, annex, engine, workers, superbatch)
        if sweep:
            found.sweep()
        yield found
    finally:
        engine.close()
        annex.release(found.superbatch)
        annex.close()


def memory_of(p: Planned, lines: int, pieces: int = 3, piece_bytes: int = 1 << 14) -> _core.RunMemory:
    return _core.RunMemory.create(
        lines=lines, row_bytes=p.table.row_bytes, pieces=pieces, piece_bytes=piece_bytes
    )


def play(p: Planned, steps: Steps, memory: _core.RunMemory) -> _core.RunReader:
    """Read every step, and compare its rows."""
    reader = p.reader(memory)
    for step, rows in enumerate(steps):
        assert reader.next_step == step
        out = np.empty((len(rows), p.table.row_bytes), np.uint8)
        assert reader.read(out) == (0, 0, 0, False)
        np.testing.assert_array_equal(out, p.table.rows.numpy()[rows])
    with pytest.raises(IndexError, match="all steps of the superbatch were read"):
        reader.read(out[:0])
    return reader


def misses_of_belady(steps: Steps, capacity: int) -> int:
    """The fewest misses that a cache of so many rows from step to step can have."""
    sets = [set(ids.tolist()) for ids in steps]
    cached: set[int] = set()
    misses = 0
    for t, ids in enumerate(sets):
        misses += len(ids - cached)
        later = {
            row: next((s for s in range(t + 1, len(sets)) if row in sets[s]), None) for row in ids | cached
        }
        useful = [row for row, step in later.items() if step is not None]
        cached = set(sorted(useful, key=lambda row: (later[row], row))[:capacity])
    return misses


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return Scratch([folder], 1 << 30)


LAYOUTS = [
    (4, 4096, 1),
    (8, 512, 3),
    (512, 512, 1),
    (4096, 4096, 2),
]


@pytest.mark.parametrize(("row_bytes", "page_bytes", "shards"), LAYOUTS)
@pytest.mark.parametrize("seed", range(2))
def test_every_row_of_every_step(
    tmp_path: Path, scratch: Scratch, row_bytes: int, page_bytes: int, shards: int, seed: int
) -> None:
    rng = np.random.default_rng([seed, row_bytes])
    rows = int(rng.integers(1, 250))
    table = table_of(tmp_path, rows, row_bytes, page_bytes=page_bytes, shards=shards)
    steps = draw_steps(rng, rows, int(rng.integers(1, 30)), int(rng.integers(1, 2 * rows + 2)))
    lines = int(rng.integers(0, rows + 2))
    with planned(table, steps, scratch, lines=lines, threads=1 + seed) as p:
        plan = p.superbatch.plan
        assert plan.copies == misses_of_belady(steps, lines)  # every range is one row
        reader = play(p, steps, memory_of(p, lines))
        assert reader.stats()["rows"] == sum(map(len, steps))
        assert reader.stats()["bytes_read"] == plan.nbytes
        play(p, steps, memory_of(p, lines + 3, pieces=1))


def test_the_plan_is_nearly_the_best(tmp_path: Path, scratch: Scratch) -> None:
    """Slices of several threads, with rows that repeat across them; more rows than ranges."""
    rng = np.random.default_rng(4)
    rows, lines = 30_000, 5000
    table = table_of(tmp_path, rows, 16, page_bytes=512)
    steps = [(rows * rng.random(20_000) ** 2).astype(np.uint32) for _ in range(6)]
    steps[2:2] = [np.unique(steps[0]), np.empty(0, np.uint32), np.zeros(10_000, np.uint32)]
    with planned(table, steps, scratch, lines=lines, threads=3) as p:
        play(p, steps, memory_of(p, lines))
        ideal = misses_of_belady(steps, lines)
        assert ideal <= p.superbatch.plan.copies <= 1.03 * ideal


def test_a_value_that_becomes_infinite_is_told(tmp_path: Path, scratch: Scratch) -> None:
    values = torch.ones(60, 8)
    values[7, 3] = 1e6
    table = write_raw_table(tmp_path, values, page_bytes=512)
    steps = [np.arange(n, dtype=np.uint32) for n in (5, 20, 6, 20)]  # from the run, then from a line
    with planned(table, steps, scratch, lines=60) as p:
        form = row_form(table, torch.float16)
        reader = p.annex.reader(p.superbatch, memory_of(p, 60), form, workers=p.workers)
        told = [reader.read(np.empty((len(rows), 16), np.uint8))[3] for rows in steps]
        assert told == [False, True, False, True]


def test_scratch_is_used_again_and_bounded(tmp_path: Path, scratch: Scratch) -> None:
    table = table_of(tmp_path, 100, 4096)
    with planned(table, [np.arange(40, dtype=np.uint32)], scratch, lines=0) as p:
        for count in (9, 60):
            p.annex.release(p.superbatch)
            uses = RowUses(table, scratch)
            uses.append(np.arange(count, dtype=np.uint32))
            p.superbatch = p.annex.plan(uses, workers=p.workers, lines=0, work_bytes=1 << 20)
            p.sweep()
            play(p, [np.arange(count)], memory_of(p, 0))
            assert scratch.free_bytes == (1 << 30) - (16 << 20) - max(40, count) * 4096
        scratch.limit_bytes = 16 << 20
        uses = RowUses(table, scratch)
        with pytest.raises(ScratchFull, match="is used up"):
            uses.append(np.arange(9, dtype=np.uint32))
        uses.close()
    assert scratch.free_bytes == 16 << 20


@pytest.mark.parametrize("checked", [False, True])
def test_a_page_that_cannot_be_read_ends_the_sweep(tmp_path: Path, scratch: Scratch, checked: bool) -> None:
    table = table_of(tmp_path, 1000, 512)
    steps = [np.arange(0, 1000, 3, dtype=np.uint32)]
    with planned(table, steps, scratch, lines=0, sweep=False) as p:
        checksums = None
        if checked:
            checksums = np.zeros(table.page_count, np.uint32)
        else:
            p.engine.inject_faults([(0, 4096, errno.EIO, 1 << 20)])
        with pytest.raises(StorageError) as caught:
            p.annex.sweep(p.superbatch, p.engine, workers=p.workers, checksums=checksums)
        assert caught.value.errno == (errno.EBADMSG if checked else errno.EIO)
        assert caught.value.filename == str(table.shard_paths[0])


def test_a_sweep_and_a_plan_end_when_cancelled(tmp_path: Path, scratch: Scratch) -> None:
    table = table_of(tmp_path, 20_000, 512)
    steps = [np.arange(20_000, dtype=np.uint32)]
    cancel = _core.Cancel.create()
    cancel.cancel()
    with planned(table, steps, scratch, lines=0, sweep=False) as p:
        for work in (
            lambda: p.annex.sweep(p.superbatch, p.engine, workers=p.workers, cancel=cancel),
            lambda: p.annex.plan(
                p.superbatch.uses, workers=p.workers, lines=0, work_bytes=1 << 20, cancel=cancel
            ),
        ):
            with pytest.raises(OSError) as caught:
                work()
            assert caught.value.errno == errno.ECANCELED


def test_what_does_not_fit_is_refused(tmp_path: Path, scratch: Scratch) -> None:
    table = table_of(tmp_path, 10, 4)
    uses = RowUses(table, scratch)
    with pytest.raises(IndexError, match="row 10 is outside a table of 10 rows"):
        uses.append(np.array([3, 10], np.uint32))
    assert len(uses) == 0
    for _ in range(_core.ANNEX_MOST_STEPS):
        uses.append(np.empty(0, np.uint32))
    with pytest.raises(ValueError, match="at most 32767 minibatches"):
        uses.append(np.empty(0, np.uint32))
    uses.close()
    steps = [np.arange(5, dtype=np.uint32)]
    with planned(table, steps, scratch, lines=3) as p:
        with pytest.raises(ValueError, match="the memory is for other rows"):
            p.reader(memory_of(p, 2))


def test_two_directories(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    rng = np.random.default_rng(6)
    table = table_of(tmp_path, 3000, 2048)
    steps = draw_steps(rng, 3000, 6, 2500)
    with planned(table, steps, Scratch(folders, 1 << 30), lines=1000) as p:
        assert p.superbatch.plan.nbytes > 2 << 20  # several stripes
        play(p, steps, memory_of(p, 1000, pieces=4, piece_bytes=3 << 20))
