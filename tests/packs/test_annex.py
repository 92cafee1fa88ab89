"""The annex against obvious models: every row read from it, which copies it has, and how long they live."""

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
from gids.errors import StorageError
from gids.io import Engine, open_engine
from gids.packs import Scratch, ScratchFull
from gids.packs.annex import Annex, RowUses, Superbatch

Steps = Sequence[np.ndarray]
AHEAD = 2
"""Steps that are planned before one is gathered."""


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


@contextmanager
def planned(
    table: RawTable,
    steps: Steps,
    scratch: Scratch,
    *,
    capacity_rows: int | None,
    lines: int = 0,
    threads: int = 2,
    pages: int = 4096,
    buffer_bytes: int = 1 << 22,
    kind: str = "auto",
    sweep: bool = True,
) -> Iterator[Planned]:
    """A superbatch in the annex of a table."""
    workers = _core.Workers.create(threads)
    uses = RowUses(table, scratch)
    annex = Annex(table, scratch, pages * table.page_bytes)
    engine = open_engine(
        [*table.shard_paths, *annex.paths], kind, depth=16, max_read_bytes=1 << 17, staging_slots=2
    )
    try:
        for rows in steps:
            uses.append(rows)
        sizes = {"lines": lines, "ahead": AHEAD + 1, "capacity_rows": capacity_rows}
        superbatch = annex.plan(uses, workers=workers, buffer_bytes=buffer_bytes, **sizes)
        if sweep:
            annex.finish(annex.sweep(superbatch, engine, workers=workers))
        yield Planned(table, annex, engine, workers, superbatch)
    finally:
        engine.close()
        annex.close()
        uses.close()


def cache_of(p: Planned, lines: int, policy: str = "lookahead") -> _core.PageCache:
    return _core.PageCache(
        p.engine.native,
        p.workers,
        row_count=p.table.row_count,
        row_bytes=p.table.row_bytes,
        page_bytes=p.table.page_bytes,
        rows_per_page=p.table.rows_per_page,
        shard_count=len(p.table.shard_paths),
        first_file=0,
        lines=lines,
        policy=policy,
        annex_pages=p.annex.pages,
        annex_file=len(p.table.shard_paths),
        annex_files=len(p.annex.paths),
    )


def play(cache: _core.PageCache, p: Planned, steps: Steps, first_step: int = 0) -> int:
    """Read every step and compare its rows. Returns the most pages of the annex that had lines at a time."""
    batch, entered, planned, most = p.superbatch, 0, 0, 0
    outs: dict[int, np.ndarray] = {}
    positions: dict[int, np.ndarray] = {}
    for t, rows in enumerate(steps):
        while planned < min(len(steps), t + AHEAD):
            while entered < min(len(steps), planned + 1 + AHEAD):
                cache.expect(*batch.run(entered))
                positions[entered] = batch.positions(entered, cache.annex_row)
                cache.enter(first_step + entered, positions[entered])
                entered += 1
            outs[planned] = np.empty((len(steps[planned]), p.table.row_bytes), np.uint8)
            cache.plan(first_step + planned, positions[planned], outs[planned])
            planned += 1
        cache.gather_ready(first_step + t)
        cache.wait(first_step + t)
        assert cache.gather_rest(first_step + t) == []
        np.testing.assert_array_equal(outs.pop(t), p.table.rows.numpy()[rows])
        lines = int(np.count_nonzero(cache.words()[p.table.page_count :] >> np.uint64(62)))
        most = max(most, lines)
        cache.retire(first_step + t)
        cache.forget(batch.first_page, batch.dying(t))
        cache.audit()
    assert not np.any(cache.words()[p.table.page_count :] >> np.uint64(62))  # every line was given back
    return most


def misses_of_ranges(steps: Steps, rows: int, capacity: int) -> list[int]:
    """Misses of an offline cache that drops, of the farthest next use, the last range of rows at a time."""
    ranges = min(rows, _core.ANNEX_RANGES)
    scale = (ranges << 40) // rows
    cached: dict[int, int] = {}  # next use by row
    uses = [sorted({t for t, ids in enumerate(steps) if row in ids}) for row in range(rows)]
    misses = []
    for t, ids in enumerate(steps):
        distinct = np.unique(ids).tolist()
        misses.append(sum(row not in cached for row in distinct))
        for row in distinct:
            later = [s for s in uses[row] if s > t]
            if later:
                cached[row] = later[0]
            else:
                cached.pop(row, None)
        while len(cached) > capacity:
            worst = max((step, row * scale >> 40) for row, step in cached.items())
            cached = {row: step for row, step in cached.items() if (step, row * scale >> 40) != worst}
    return misses


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


def slots_of(p: Planned) -> list[np.ndarray]:
    return [
        p.superbatch.positions(t, 0) - p.superbatch.first_page * p.table.rows_per_page
        for t in range(len(p.superbatch))
    ]


def check_lives(p: Planned, steps: Steps) -> None:
    """Runs, deaths and lines are what the positions say."""
    plan, per_page = p.superbatch.plan, p.table.rows_per_page
    first, deaths, missed = plan.first_pages().astype(int), plan.deaths(), plan.missed()
    slots = slots_of(p)
    seen: set[int] = set()
    row_of: dict[int, int] = {}
    expected = np.zeros(len(deaths), int)
    for t, (ids, at) in enumerate(zip(steps, slots, strict=True)):
        for row, slot in zip(ids.tolist(), at.tolist(), strict=True):
            assert row_of.setdefault(slot, row) == row
        pairs = {(row, slot) for row, slot in zip(ids.tolist(), at.tolist(), strict=True)}
        assert len(pairs) == len(set(ids.tolist()))  # a row has one position in a step
        new = set(at.tolist()) - seen
        seen |= new
        begin = first[t] * per_page
        assert new == set(range(begin, begin + int(missed[t])))  # at once, and without a gap
        np.maximum.at(expected, at // per_page, t)
    assert len(seen) == plan.copies
    used = np.zeros(len(deaths), bool)
    used[[slot // per_page for slot in seen]] = True
    np.testing.assert_array_equal(deaths[used], expected[used])
    born = np.searchsorted(first, np.arange(len(deaths)), side="right") - 1
    for t in range(len(steps)):
        np.testing.assert_array_equal(plan.dying(t), np.flatnonzero((deaths == t) & (born < t) & used))
    for ahead in (0, AHEAD):
        kept = deaths > born
        alive = [np.count_nonzero(kept & (born <= t + ahead) & (deaths >= t)) for t in range(len(steps))]
        assert plan.lines_needed(ahead) == max(alive, default=0)


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return Scratch([folder], 1 << 30)


LAYOUTS = [
    (4, 4096, 1),
    (8, 512, 3),
    (100, 4096, 2),
    (512, 512, 1),
    (512, 4096, 1),
    (600, 1536, 2),
    (4096, 4096, 2),
    (5000, 4096, 1),
]


@pytest.mark.parametrize(("row_bytes", "page_bytes", "shards"), LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_every_row_of_every_step(
    tmp_path: Path, scratch: Scratch, row_bytes: int, page_bytes: int, shards: int, seed: int
) -> None:
    rng = np.random.default_rng([seed, row_bytes])
    rows = int(rng.integers(1, 250))
    table = table_of(tmp_path, rows, row_bytes, page_bytes=page_bytes, shards=shards)
    steps = draw_steps(rng, rows, int(rng.integers(1, 30)), int(rng.integers(1, 2 * rows + 2)))
    capacity = int(rng.integers(0, rows + 2))
    with planned(table, steps, scratch, capacity_rows=capacity, threads=1 + seed) as p:
        plan = p.superbatch.plan
        check_lives(p, steps)
        assert plan.missed().tolist() == misses_of_ranges(steps, rows, capacity)
        assert plan.copies == misses_of_belady(steps, capacity)  # every range is one row
        lines = plan.lines_needed(AHEAD + 1)
        cache = cache_of(p, lines + seed)
        most = play(cache, p, steps)
        assert most <= lines
        stats = cache.stats()
        if seed < 2:
            read = plan.first_pages()[-1]
            assert stats["loads"] + stats["bypasses"] <= read  # no page is read twice
        assert stats["evictions"] == stats["loads"]


@pytest.mark.parametrize("policy", ["lookahead", "window-pin", "random", "lru", "static", "pinned"])
def test_too_few_lines_are_slow_and_not_wrong(tmp_path: Path, scratch: Scratch, policy: str) -> None:
    rng = np.random.default_rng(3)
    table = table_of(tmp_path, 400, 64, page_bytes=512)
    steps = draw_steps(rng, 400, 25, 200)
    with planned(table, steps, scratch, capacity_rows=300) as p:
        lines = p.superbatch.plan.lines_needed(0) // 3
        assert play(cache_of(p, lines, policy), p, steps) <= lines


@pytest.mark.parametrize(("row_bytes", "page_bytes"), [(512, 512), (100, 4096)])
def test_the_plan_fits_the_lines(tmp_path: Path, scratch: Scratch, row_bytes: int, page_bytes: int) -> None:
    """Without a sample exactly, and with one of every fourth row nearly."""
    rng = np.random.default_rng(7)
    table = table_of(tmp_path, 300, row_bytes, page_bytes=page_bytes)
    steps = draw_steps(rng, 300, 20, 250)
    for lines in (0, 1, 5, 40, 10_000):
        with planned(table, steps, scratch, capacity_rows=None, lines=lines, sweep=False) as p:
            assert p.superbatch.plan.lines_needed(AHEAD + 1) <= lines
    large = table_of(tmp_path, 120_000, row_bytes, page_bytes=page_bytes)
    steps = [np.unique((120_000 * rng.random(30_000) ** 3).astype(np.uint32)) for _ in range(16)]
    lines = 34_000 // large.rows_per_page
    with planned(
        large,
        steps,
        scratch,
        capacity_rows=None,
        lines=lines,
        sweep=False,
        pages=(1 << 28) // page_bytes,
        buffer_bytes=1 << 24,
    ) as p:
        assert 0.9 * lines < p.superbatch.plan.lines_needed(AHEAD + 1) < 1.03 * lines


def test_large_steps_are_planned_in_slices(tmp_path: Path, scratch: Scratch) -> None:
    """Slices of several threads, with rows that repeat across them; more rows than ranges."""
    rng = np.random.default_rng(4)
    rows = 30_000
    table = table_of(tmp_path, rows, 16, page_bytes=512)
    steps = [(rows * rng.random(20_000) ** 2).astype(np.uint32) for _ in range(6)]
    steps[2:2] = [np.unique(steps[0]), np.empty(0, np.uint32), np.zeros(10_000, np.uint32)]
    with planned(
        table, steps, scratch, capacity_rows=5000, threads=3, pages=1 << 16, buffer_bytes=1 << 18
    ) as p:
        check_lives(p, steps)
        most = play(cache_of(p, p.superbatch.plan.lines_needed(AHEAD + 1)), p, steps)
        assert most <= p.superbatch.plan.lines_needed(AHEAD + 1)
        copies = p.superbatch.plan.copies
        ideal = misses_of_belady(steps, 5000)
        assert ideal <= copies <= 1.03 * ideal


def test_random_reads_before_between_and_after(tmp_path: Path, scratch: Scratch) -> None:
    """Two superbatches and steps that read the table share a cache; lines of the table give way."""
    rng = np.random.default_rng(5)
    table = table_of(tmp_path, 2000, 64, shards=2)
    first, second = draw_steps(rng, 2000, 12, 600), draw_steps(rng, 2000, 9, 900)
    with planned(table, first, scratch, capacity_rows=500) as p:
        cache = cache_of(p, p.superbatch.plan.lines_needed(AHEAD + 1) + 5)

        def at_random(step: int) -> None:
            ids = rng.integers(0, 2000, 300)
            out = np.empty((300, 64), np.uint8)
            cache.enter(step, ids)
            cache.plan(step, ids, out)
            cache.gather_ready(step)
            cache.wait(step)
            assert cache.gather_rest(step) == []
            cache.retire(step)
            np.testing.assert_array_equal(out, table.rows.numpy()[ids])

        at_random(0)
        play(cache, p, first, 1)
        at_random(13)
        uses = RowUses(table, scratch)
        for rows in second:
            uses.append(rows)
        batch = p.annex.plan(
            uses, workers=p.workers, lines=0, ahead=0, capacity_rows=500, buffer_bytes=1 << 20
        )
        assert batch.first_page == p.superbatch.pages
        p.annex.finish(p.annex.sweep(batch, p.engine, workers=p.workers))
        p.annex.release()
        p.superbatch = batch
        play(cache, p, second, 14)
        at_random(23)
        with pytest.raises(IndexError, match=r"id 2048 .* 2000 rows"):
            cache.check(np.array([2048]))  # a position of the annex is no id
        uses.close()


def test_a_stream_that_ends_early_leaves_no_line_behind(tmp_path: Path, scratch: Scratch) -> None:
    rng = np.random.default_rng(8)
    table = table_of(tmp_path, 3000, 512, page_bytes=512)
    steps = draw_steps(rng, 3000, 8, 3000)
    with planned(table, steps, scratch, capacity_rows=1000) as p:
        cache = cache_of(p, p.superbatch.plan.lines_needed(AHEAD + 1))
        positions = [p.superbatch.positions(t, cache.annex_row) for t in range(3)]
        outs = [np.empty((len(rows), 512), np.uint8) for rows in positions]
        for t in range(3):
            cache.expect(*p.superbatch.run(t))
            cache.enter(t, positions[t])
        for t in range(2):
            cache.plan(t, positions[t], outs[t])
        cache.cancel()
        cache.forget_all(p.superbatch.first_page, p.superbatch.pages)
        cache.audit()
        assert not np.any(cache.words()[table.page_count :])
        play(cache, p, steps, first_step=3)


@pytest.mark.parametrize("page", [3, 100])
def test_an_error_belongs_to_the_rows_of_its_page(tmp_path: Path, scratch: Scratch, page: int) -> None:
    """Of pages that are read together, those that can be read are read again."""
    table = table_of(tmp_path, 600, 512, page_bytes=512)
    steps = [np.arange(600, dtype=np.uint32), np.arange(0, 600, 2, dtype=np.uint32)]
    with planned(table, steps, scratch, capacity_rows=300) as p:
        p.engine.inject_faults([(1, page * 512, errno.EIO, 1 << 20)])
        cache = cache_of(p, 600)
        lost = 0
        for t, rows in enumerate(steps):
            cache.expect(*p.superbatch.run(t))
            positions, out = p.superbatch.positions(t, cache.annex_row), np.empty((len(rows), 512), np.uint8)
            cache.enter(t, positions)
            cache.plan(t, positions, out)
            cache.gather_ready(t)
            cache.wait(t)
            good = positions - cache.annex_row != page
            assert cache.gather_rest(t) == ([] if good.all() else [(1, page * 512, errno.EIO)])
            np.testing.assert_array_equal(out[good], table.rows.numpy()[rows[good]])
            lost += int(np.count_nonzero(~good))
            cache.retire(t)
            cache.forget(p.superbatch.first_page, p.superbatch.dying(t))
            cache.audit()
        assert lost > 0


def test_pages_that_a_step_has_are_not_forgotten(tmp_path: Path, scratch: Scratch) -> None:
    table = table_of(tmp_path, 100, 512)
    steps = [np.arange(100, dtype=np.uint32)] * 2
    with planned(table, steps, scratch, capacity_rows=100) as p:
        cache = cache_of(p, 20)
        cache.expect(*p.superbatch.run(0))
        cache.enter(0, p.superbatch.positions(0, cache.annex_row))
        with pytest.raises(RuntimeError, match="in use"):
            cache.forget(0, np.zeros(1, np.uint32))
        with pytest.raises(IndexError, match="the annex does not have this page"):
            cache.forget(p.annex.pages, np.zeros(1, np.uint32))
        cache.cancel()
        cache.forget_all(0, p.superbatch.pages)


def test_the_ring_is_reused_and_bounded(tmp_path: Path, scratch: Scratch) -> None:
    table = table_of(tmp_path, 100, 4096)
    with planned(table, [np.arange(4, dtype=np.uint32)], scratch, capacity_rows=0, pages=10) as p:

        def add(count: int) -> int:
            uses = RowUses(table, scratch)
            uses.append(np.arange(count, dtype=np.uint32))
            sizes = {"lines": 0, "ahead": 0, "capacity_rows": 0}
            return p.annex.plan(uses, workers=p.workers, **sizes).first_page

        assert p.superbatch.first_page == 0
        assert add(4) == 4
        with pytest.raises(ScratchFull, match="room for 0 of the 4 pages"):
            add(4)
        p.annex.release()
        assert add(4) == 0
        with pytest.raises(ScratchFull, match="room for 0 of the 1 pages"):
            add(1)
        p.annex.release()
        assert add(3) == 4
        with pytest.raises(ScratchFull):
            Annex(table, scratch, 2 << 30)


@pytest.mark.parametrize("checked", [False, True])
def test_a_page_that_cannot_be_read_ends_the_sweep(tmp_path: Path, scratch: Scratch, checked: bool) -> None:
    table = table_of(tmp_path, 1000, 512)
    steps = [np.arange(0, 1000, 3, dtype=np.uint32)]
    with planned(table, steps, scratch, capacity_rows=0, sweep=False) as p:
        checksums = None
        if checked:
            checksums = np.zeros(table.page_count, np.uint32)
        else:
            p.engine.inject_faults([(0, 4096, errno.EIO, 1 << 20)])
        with pytest.raises(StorageError) as caught:
            p.annex.finish(p.annex.sweep(p.superbatch, p.engine, workers=p.workers, checksums=checksums))
        assert caught.value.errno == (errno.EBADMSG if checked else errno.EIO)
        assert caught.value.filename == str(table.shard_paths[0])


def test_a_sweep_ends_when_cancelled(tmp_path: Path, scratch: Scratch) -> None:
    table = table_of(tmp_path, 20_000, 512)
    steps = [np.arange(20_000, dtype=np.uint32)]
    with planned(table, steps, scratch, capacity_rows=0, sweep=False) as p:
        sweep = p.annex.sweep(p.superbatch, p.engine, workers=p.workers)
        sweep.cancel()
        assert sweep.wait()["error"] in (0, errno.ECANCELED)
        with pytest.raises(RuntimeError, match="swept already"):
            p.annex.sweep(p.superbatch, p.engine, workers=p.workers)


def test_rows_outside_the_table_and_too_many_steps_are_refused(tmp_path: Path, scratch: Scratch) -> None:
    table = table_of(tmp_path, 10, 4)
    uses = RowUses(table, scratch)
    with pytest.raises(IndexError, match="row 10 is outside a table of 10 rows"):
        uses.append(np.array([3, 10], np.uint32))
    assert len(uses) == 0
    with pytest.raises(TypeError):
        uses.append(np.array([3]))  # type: ignore[arg-type]
    for _ in range(_core.ANNEX_MOST_STEPS):
        uses.append(np.empty(0, np.uint32))
    with pytest.raises(ValueError, match="at most 32767 minibatches"):
        uses.append(np.empty(0, np.uint32))
    uses.close()


@pytest.mark.parametrize("kind", ["uring", "threads"])
def test_engines_and_two_directories(tmp_path: Path, kind: str) -> None:
    if kind == "uring" and _core.why_no_uring():
        pytest.skip(_core.why_no_uring())
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    rng = np.random.default_rng(6)
    table = table_of(tmp_path, 3000, 2048)
    steps = draw_steps(rng, 3000, 6, 2500)
    with planned(table, steps, Scratch(folders, 1 << 30), capacity_rows=1000, kind=kind) as p:
        assert len(p.annex.paths) == 2
        assert p.superbatch.plan.nbytes > 2 << 20  # several stripes
        play(cache_of(p, p.superbatch.plan.lines_needed(AHEAD + 1)), p, steps)
