"""The cache against the source rows, bit for bit: every policy, engine, geometry and cache size."""

from __future__ import annotations

import errno
import gc
import itertools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from children import interrupted
from datasets import same_bits
from raw_table import RawTable, write_raw_table, write_scaled_table

import gids
from gids import _core
from gids.cache import POLICIES, FeatureCache
from gids.io import open_engine

ENGINES = ["uring", "threads", "mmap"]


def make_rows(n: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 256, (n, dim * torch.empty(0, dtype=dtype).element_size()), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).view(n, dim)


def make_cache(tables: list[RawTable], lines: int, **options: object) -> FeatureCache:
    kind = str(options.pop("engine", "auto"))
    depth = int(options.pop("depth", 64))  # type: ignore[call-overload]
    engine = open_engine(
        [p for t in tables for p in t.shard_paths],
        kind,
        depth=depth,
        max_read_bytes=max(t.page_bytes for t in tables),
    )
    return FeatureCache(engine, tables, lines={t.name: lines for t in tables}, heats={}, **options)  # type: ignore[arg-type]


@pytest.fixture(params=[False, True], ids=["output-at-plan", "output-at-gather"])
def late(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def run(
    cache: FeatureCache, table: RawTable, batches: list[torch.Tensor], window: int, planned: int
) -> Iterator[torch.Tensor]:
    """The loader's order: plan ahead of gathering."""
    first = entered = planned_to = cache.next_step
    for t in range(first, first + len(batches)):
        while planned_to < min(first + len(batches), t + planned):
            while entered < min(first + len(batches), planned_to + 1 + window):
                cache.enter(entered, {table.name: batches[entered - first]})
                entered += 1
            cache.plan(planned_to)
            planned_to += 1
        features, error = cache.gather(t)
        assert error is None
        cache.retire(t)
        yield features[table.name]


def random_batches(
    rng: np.random.Generator, rows: int, count: int, size: int, *, repeat: bool = True
) -> list[torch.Tensor]:
    out = []
    for _ in range(count):
        ids = (rows * rng.random(rng.integers(0, size + 1)) ** 2).astype(np.int64)
        if not repeat:
            ids = rng.permutation(np.unique(ids))
        out.append(torch.from_numpy(ids))
    return out


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lines", [0, 1, 40, 10_000])
def test_rows_equal_the_source_for_every_engine_policy_and_size(
    tmp_path: Path, engine: str, policy: str, lines: int, late: bool
) -> None:
    rng = np.random.default_rng(lines)
    table = write_raw_table(tmp_path, make_rows(700, 128), page_bytes=1024, shards=2)
    cache = make_cache([table], lines, engine=engine, policy=policy, threads=2, late_outputs=late)
    batches = random_batches(rng, 700, 25, 300)
    for ids, got in zip(batches, run(cache, table, batches, window=6, planned=3), strict=True):
        assert same_bits(got, table.rows[ids])
        cache.audit()
    assert not np.any(cache.page_words(table.name) & np.uint64(0xFFFFFF))


@pytest.mark.parametrize(
    ("dim", "dtype", "page_bytes"),
    [
        (1024, torch.float32, 4096),  # a row is a page: read straight into the output
        (100, torch.float32, 4096),  # ten rows to a page, with padding
        (602, torch.float32, 4096),  # one row and padding
        (3, torch.int8, 512),  # 170 rows to a page
        (1500, torch.float64, 4096),  # a row longer than a page
        (768, torch.bfloat16, 512),  # longer than a page, 512-aligned
        (1, torch.int64, 512),
    ],
)
@pytest.mark.parametrize("repeat", [True, False])
def test_every_geometry(tmp_path: Path, dim: int, dtype: torch.dtype, page_bytes: int, repeat: bool) -> None:
    rng = np.random.default_rng(dim)
    table = write_raw_table(tmp_path, make_rows(900, dim, dtype), page_bytes=page_bytes, shards=3)
    for lines in (0, 30, 900):
        cache = make_cache([table], lines, threads=2)
        batches = random_batches(rng, 900, 12, 400, repeat=repeat)
        for ids, got in zip(batches, run(cache, table, batches, window=3, planned=2), strict=True):
            assert same_bits(got, table.rows[ids])
        cache.audit()


FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("scale", ["row", "column"])
@pytest.mark.parametrize(("dim", "page_bytes"), [(1, 512), (7, 512), (130, 512), (128, 4096), (1020, 1024)])
def test_int8_rows_are_widened_as_numpy_does(
    tmp_path: Path, to: torch.dtype, scale: str, dim: int, page_bytes: int
) -> None:
    rng = np.random.default_rng(dim)
    steps = rng.integers(-127, 128, (900, dim), np.int8)
    table = write_scaled_table(tmp_path, steps, scale, page_bytes=page_bytes, shards=2)
    expected = table.rows.to(to)
    for lines, engine in ((0, "uring"), (30, "threads"), (900, "mmap")):
        cache = make_cache([table], lines, threads=2, engine=engine, output_dtype=to)
        batches = random_batches(rng, 900, 10, 400)
        for ids, got in zip(batches, run(cache, table, batches, window=3, planned=2), strict=True):
            assert same_bits(got, expected[ids])
        (through, error) = cache.read_through({table.name: batches[0]})
        assert error is None
        assert same_bits(through[table.name], expected[batches[0]])


def test_large_outputs_of_int8_rows_are_the_same(tmp_path: Path) -> None:
    """Written past the processor's cache, from 8 MB on."""
    steps = np.random.default_rng(0).integers(-127, 128, (3000, 768), np.int8)
    for scale in ("row", "column"):
        table = write_scaled_table(tmp_path, steps, scale)
        for to in FLOATS:
            cache = make_cache([table], table.page_count, threads=2, output_dtype=to)
            ids = torch.arange(3000).repeat(3)
            (got,) = run(cache, table, [ids], window=0, planned=1)
            assert same_bits(got, table.rows.to(to)[ids])


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [128, 7])
def test_converted_rows_equal_torch(tmp_path: Path, dtype: torch.dtype, to: torch.dtype, dim: int) -> None:
    if dtype == torch.float32:
        draw = torch.Generator().manual_seed(1)
        bits = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), generator=draw).to(torch.int32)
        halfway = torch.randint(0x32000000, 0x48000000, (1 << 16,), generator=draw).to(torch.int32) & ~0xFFF
        values = torch.cat([bits, halfway]).view(torch.float32)
    else:
        values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)  # all of them
    rows = values[: len(values) // dim * dim].reshape(-1, dim).clone()
    table = write_raw_table(tmp_path, rows)
    cache = make_cache([table], table.page_count // 2, output_dtype=to)
    (got,) = run(cache, table, [torch.arange(len(rows))], 0, 1)
    expected = rows.to(to)
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    zeros = torch.zeros((), dtype=to)
    assert same_bits(torch.where(nan, zeros, got), torch.where(nan, zeros, expected))


def test_a_page_without_a_line_is_read_straight_into_the_output(tmp_path: Path) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 1024))
    cache = make_cache([table], 0)
    ids = torch.arange(64)
    (got,) = run(cache, table, [ids], window=0, planned=1)
    assert same_bits(got, table.rows)
    stats = cache.stats()[table.name]
    assert stats["bypasses"] == 64
    assert stats["loads"] == 0


def test_outputs_stay_right_however_long_they_are_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    table = write_raw_table(tmp_path, make_rows(400, 256))
    cache = make_cache([table], 50, keep_output_bytes=1 << 30)
    batches = random_batches(rng, 400, 40, 200)
    kept = list(run(cache, table, batches, window=4, planned=2))
    for ids, got in zip(batches, kept, strict=True):
        assert same_bits(got, table.rows[ids])


def test_outputs_of_growing_minibatches_share_buffers(tmp_path: Path) -> None:
    """Where it is known how large they become, and where not."""
    table = write_raw_table(tmp_path, make_rows(2000, 1024))
    growing = [torch.arange(1000 + 10 * n) for n in range(40)]
    for output_rows in (None, {table.name: 1500}):
        cache = make_cache([table], 0, keep_output_bytes=1 << 30, output_rows=output_rows)
        for ids, got in zip(growing, run(cache, table, growing, window=0, planned=2), strict=True):
            assert same_bits(got, table.rows[ids])
        assert cache.memory()["outputs"] <= 3 * 4096 * 1500  # one with the consumer, and two planned


def test_an_output_is_used_again_only_when_its_last_view_is_gone(tmp_path: Path) -> None:
    table = write_raw_table(tmp_path, make_rows(400, 256))
    cache = make_cache([table], 400, keep_output_bytes=1 << 30)
    ids = torch.arange(300)
    (first,) = run(cache, table, [ids], window=0, planned=1)
    where, view = first.data_ptr(), first[5:7]
    del first
    gc.collect()
    (second,) = run(cache, table, [ids], window=0, planned=1)
    assert second.data_ptr() != where
    assert same_bits(view, table.rows[5:7])
    del view
    gc.collect()
    (third,) = run(cache, table, [ids], window=0, planned=1)
    assert third.data_ptr() == where


@pytest.mark.parametrize("lines", [0, 16])
def test_a_page_that_cannot_be_read_is_an_error_of_the_minibatches_that_need_it(
    tmp_path: Path, lines: int, late: bool
) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 1024), shards=2)
    cache = make_cache([table], lines, late_outputs=late)
    path, offset = table.shard_of(7)
    file = table.shard_paths.index(path)
    cache._engine.inject_faults([(file, offset, errno.EIO, 1 << 30)])
    batches = [torch.tensor([1, 2]), torch.tensor([6, 7]), torch.tensor([8, 9]), torch.tensor([7])]
    for step, ids in enumerate(batches):
        cache.enter(step, {table.name: ids})
        cache.plan(step)
    for step, ids in enumerate(batches):
        features, error = cache.gather(step)
        if 7 in ids.tolist():
            assert error is not None
            assert (error.errno, error.filename, error.offset) == (errno.EIO, str(path), offset)
        else:
            assert error is None
            assert same_bits(features[table.name], table.rows[ids])
        cache.retire(step)
    cache.audit()
    # The line that the failed page had is in use again, and so is the page once the device recovers.
    cache._engine.inject_faults([])
    (got,) = run(cache, table, [torch.arange(64)], window=0, planned=1)
    assert same_bits(got, table.rows)


@pytest.mark.parametrize("lines", [0, 64])
def test_a_read_that_fails_once_is_read_again(tmp_path: Path, lines: int, late: bool) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 1024))
    cache = make_cache([table], lines, late_outputs=late)
    cache._engine.inject_faults([(0, 4096 * 3, errno.EIO, 1)])
    (got,) = run(cache, table, [torch.arange(8)], window=0, planned=1)
    assert same_bits(got, table.rows[:8])
    assert cache.stats()[table.name]["failures"] == 0 or cache.audit() is None


@pytest.mark.parametrize("check_crc", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dim", [128, 37])  # of 512 B, and of 148 B, which no sector's edge is an edge of
def test_of_a_lone_page_without_a_line_only_the_wanted_rows_are_read(
    tmp_path: Path, dim: int, shards: int, check_crc: bool
) -> None:
    table = write_raw_table(tmp_path, make_rows(900, dim), shards=shards)
    at, row_bytes, most = table.rows_per_page, table.row_bytes, 2048 // table.row_bytes
    sums = np.empty(table.page_count, np.uint32)
    for shard, path in enumerate(table.shard_paths):
        sums[shard::shards] = _core.crc32c(np.fromfile(path, np.uint8).reshape(-1, 4096))
    table.checksums = lambda: sums  # type: ignore[attr-defined]
    cache = make_cache([table], 0, check_crc=check_crc)
    parts = [[at + 1 + most - 1, at + 1, at + 1], [6 * at + 3], [11 * at - 1]]  # half a page, and lone rows
    whole = [[20 * at, 20 * at + most], [25 * at + 2, (25 + shards) * at + 1]]  # more; neighbours in a file
    ids = torch.tensor(list(itertools.chain(*parts, *whole)))
    ids = ids[torch.randperm(len(ids))]
    (got,) = run(cache, table, [ids], window=0, planned=1)
    assert same_bits(got, table.rows[ids])
    sector, expected = cache._engine.alignment, 3 * 4096
    for rows in parts:
        begin, end = min(rows) % at * row_bytes, (max(rows) % at + 1) * row_bytes
        expected += -(-end // sector) * sector - begin // sector * sector
    assert cache._engine.stats()["bytes_read"] == (6 * 4096 if check_crc else expected)


def test_a_fault_beside_the_wanted_rows_costs_nobody(tmp_path: Path, late: bool) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 128))  # 8 rows a page
    cache = make_cache([table], 16, late_outputs=late)
    cache._engine.inject_faults([(0, 4096 * 3 + 512 * 2, errno.EIO, 1 << 30)])  # row 26
    for wanted, readable in (([25, 24], True), ([27, 30], True), ([25, 27], False), ([26], False)):
        cache.enter(step := cache.next_step, {table.name: torch.tensor(wanted)})
        cache.plan(step)
        features, error = cache.gather(step)
        cache.retire(step)
        if readable:
            assert error is None
            assert same_bits(features[table.name], table.rows[wanted])
        else:
            assert isinstance(error, gids.StorageError)
            assert (error.errno, error.offset) == (errno.EIO, 4096 * 3)
    cache.audit()


def test_more_rows_than_are_read_at_a_time_into_late_outputs(tmp_path: Path) -> None:
    """Among them pages whose reads fail once, and one that cannot be read."""
    table = write_raw_table(tmp_path, make_rows(200_000, 4), page_bytes=512, shards=2)  # 32 rows a page
    ids = torch.from_numpy(np.random.default_rng(5).integers(0, 200_000, 150_000))
    cache = make_cache([table], 100, late_outputs=True, threads=2)
    cache._engine.inject_faults([(0, 512 * 1000, errno.EIO, 1), (1, 512 * 2000, errno.EIO, 1)])
    for _ in range(2):
        (got,) = run(cache, table, [ids], window=0, planned=1)
        assert same_bits(got, table.rows[ids])
    cache._engine.inject_faults([(0, 512 * 1000, errno.EIO, 1 << 30)])
    cache.enter(step := cache.next_step, {table.name: ids})
    cache.plan(step)
    features, error = cache.gather(step)
    cache.retire(step)
    assert error is not None
    assert (error.errno, error.offset) == (errno.EIO, 512 * 1000)
    readable = ids // 32 != 2 * 1000  # pages alternate between the shards
    assert same_bits(features[table.name][readable], table.rows[ids[readable]])
    through, error = cache.read_through({table.name: ids[readable]})
    assert error is None
    assert same_bits(through[table.name], table.rows[ids[readable]])
    cache.audit()


@pytest.mark.parametrize("lines", [0, 200, 3000])
@pytest.mark.parametrize("page_bytes", [512, 4096])
def test_minibatches_take_no_more_memory_than_is_set_aside(
    tmp_path: Path, page_bytes: int, lines: int, late: bool
) -> None:
    """Pages take 4 bytes each; requests, and memory to plan in, what the budget counts for each row."""
    rows, size, window, planned = 40_000, 3000, 5, 3
    table = write_raw_table(tmp_path, make_rows(rows, 128), page_bytes=page_bytes)
    cache = make_cache([table], lines, late_outputs=late)
    rng = np.random.default_rng(lines)
    batches = [torch.from_numpy(rng.permutation(rows)[:size]) for _ in range(20)]
    at_once = size * (planned * _core.PLANNED_ROW_BYTES + _core.PLANNING_ROW_BYTES)
    if late:
        at_once = size * _core.PLANNED_ROW_BYTES + size * _core.PLANNING_ROW_BYTES + lines * _core.LOAD_BYTES
    else:
        at_once += min(lines, size) * 16
    for _ in run(cache, table, batches, window, planned):
        memory = cache.memory()
        assert memory["window"] <= 4 * size * (window + planned)
        assert 0 < memory["requests"] <= at_once + 100 * planned
    assert memory["window"] > 0


def test_a_wrong_checksum_is_found_when_asked_for(tmp_path: Path) -> None:
    table = write_raw_table(tmp_path, make_rows(32, 1024))
    pages = np.fromfile(table.shard_paths[0], np.uint8).reshape(-1, 4096)
    sums = _core.crc32c(pages)
    table.checksums = lambda: sums  # type: ignore[attr-defined]
    cache = make_cache([table], 8, check_crc=True)
    (got,) = run(cache, table, [torch.arange(32)], window=0, planned=1)
    assert same_bits(got, table.rows)

    pages[5, 77] ^= 1
    table.shard_paths[0].write_bytes(pages.tobytes())
    cache = make_cache([table], 8, check_crc=True)
    cache.enter(0, {table.name: torch.tensor([4, 5])})
    cache.plan(0)
    _, error = cache.gather(0)
    assert error is not None
    assert error.offset == 5 * 4096
    assert "checksum" in str(error)
    cache.retire(0)


def test_reading_through_needs_no_step_and_changes_no_word(tmp_path: Path) -> None:
    table = write_raw_table(tmp_path, make_rows(300, 128), page_bytes=1024)
    cache = make_cache([table], 20)
    cache.enter(0, {table.name: torch.arange(100)})
    cache.plan(0)
    cache.gather(0)
    words = cache.page_words(table.name)
    ids = torch.tensor([299, 0, 5, 5, 120, 64])
    features, error = cache.read_through({table.name: ids})
    assert error is None
    assert same_bits(features[table.name], table.rows[ids])
    assert np.array_equal(words, cache.page_words(table.name))
    with pytest.raises(IndexError, match="-3"):
        cache.read_through({table.name: torch.tensor([-3])})
    cache.retire(0)


def test_reading_through_two_tables_at_once_shares_the_workers(tmp_path: Path) -> None:
    tables = [write_raw_table(tmp_path, make_rows(2000, 1024, seed=i), name=f"t{i}") for i in range(2)]
    cache = make_cache(tables, 2000, threads=4)
    everything = {t.name: torch.arange(2000) for t in tables}
    cache.enter(0, everything)
    cache.plan(0)
    cache.gather(0)
    cache.retire(0)
    wrong: list[str] = []

    def read_all(table: RawTable) -> None:
        for _ in range(30):
            features, error = cache.read_through({table.name: everything[table.name]})
            if error or not same_bits(features[table.name], table.rows):
                wrong.append(table.name)

    readers = [threading.Thread(target=read_all, args=(t,)) for t in tables]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not wrong


def run_script(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own, for what forks or takes signals."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", textwrap.dedent(script)]
    arguments = (Path(__file__).parents[1], *arguments)
    return subprocess.Popen(
        [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_ends_reading_through(tmp_path: Path) -> None:
    script = """
        import signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        import torch
        from children import go_once
        from raw_table import RawTable
        from gids.cache import FeatureCache
        from gids.io import open_engine
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
        pages = 1_000_000
        path = Path(sys.argv[2])
        path.touch()
        with path.open("r+b") as file:
            file.truncate(512 * pages)
        table = RawTable("t", torch.zeros(1, 1).expand(pages * 128, 1), 512, 128, [path])
        engine = open_engine([path], "threads", depth=1, direct=False, max_read_bytes=512, max_merge_bytes=0)
        cache = FeatureCache(engine, [table], lines={"t": 0}, heats={})
        ids = torch.arange(pages) * 128
        go_once(lambda: engine.stats()["reads"] > 0)
        try:
            cache.read_through({"t": ids})
        except KeyboardInterrupt:
            io = engine.stats()
            print("interrupted", io["reads"] < pages, io["errors"] > 0, io["in_flight"])
        features, error = cache.read_through({"t": ids[:10]})
        assert error is None and not features["t"].any()
    """
    status, output, errors = interrupted(run_script(script, tmp_path / "sparse.bin"))
    assert status == 0, errors
    assert output == "interrupted True True 0\n"


def test_a_forked_child_is_refused_and_ends(tmp_path: Path) -> None:
    script = """
        import os, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        import torch
        from raw_table import write_raw_table
        from gids.cache import FeatureCache
        from gids.io import open_engine
        table = write_raw_table(Path(sys.argv[2]), torch.arange(2000.0).view(500, 4).repeat(1, 128))
        engine = open_engine(table.shard_paths, max_read_bytes=table.page_bytes)
        cache = FeatureCache(engine, [table], lines={table.name: 100}, heats={}, threads=2)
        ids = {table.name: torch.arange(80)}
        for step in range(3):
            cache.enter(step, ids)
        cache.plan(0)
        cache.gather(0)
        cache.plan(1)
        if (child := os.fork()) == 0:
            refused = 0
            for call in (
                lambda: cache.enter(3, ids),
                lambda: cache.plan(2),
                lambda: cache.gather(1),
                lambda: cache.retire(0),
                lambda: cache.read_through(ids),
                lambda: cache.page_words(table.name),
                cache.audit,
            ):
                try:
                    call()
                except RuntimeError as error:
                    assert "before a fork" in str(error), error
                    refused += 1
            cache.stats(), cache.memory(), engine.stats(), engine.note
            cache.close()
            del cache
            sys.exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        features, error = cache.gather(1)
        assert error is None and torch.equal(features[table.name], table.rows[:80])
        cache.cancel()
        cache.audit()
    """
    with run_script(script, tmp_path) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors


def test_a_step_that_cannot_be_submitted_leaves_no_page_loading(tmp_path: Path) -> None:
    table = write_raw_table(tmp_path, make_rows(300, 1024))
    cache = make_cache([table], 100)
    cache.enter(0, {table.name: torch.arange(150)})
    cache._engine.close()
    with pytest.raises(RuntimeError, match="the I/O engine is closed"):
        cache.plan(0)
    cache.cancel()
    cache.audit()
    assert not np.any(cache.page_words(table.name))


def test_an_engine_for_shorter_reads_is_refused(tmp_path: Path) -> None:
    table = write_raw_table(tmp_path, make_rows(30, 1024))
    with (
        open_engine(table.shard_paths, max_read_bytes=2048) as engine,
        pytest.raises(ValueError, match=r"pages of 4096 B.*2048 B at most \(max_read_bytes\)"),
    ):
        FeatureCache(engine, [table], lines={table.name: 3}, heats={})


def test_cancel_takes_every_mark_back_while_reads_are_in_flight(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    table = write_raw_table(tmp_path, make_rows(2000, 1024))
    cache = make_cache([table], 300, depth=4)
    for _ in range(5):
        first = cache.next_step
        for step, ids in enumerate(random_batches(rng, 2000, 10, 500), first):
            cache.enter(step, {table.name: ids})
        for step in range(first, first + 4):
            cache.plan(step)
        cache.cancel()
        cache.audit()
        assert not np.any(cache.page_words(table.name) & np.uint64(0xFFFFFF))
    batches = random_batches(rng, 2000, 5, 500)
    for ids, got in zip(batches, run(cache, table, batches, window=2, planned=2), strict=True):
        assert same_bits(got, table.rows[ids])


def test_a_cache_may_be_dropped_while_reads_are_in_flight(tmp_path: Path) -> None:
    table = write_raw_table(tmp_path, make_rows(2000, 1024))
    for _ in range(10):
        cache = make_cache([table], 300, depth=8)
        cache.enter(0, {table.name: torch.arange(0, 2000, 2)})
        cache.plan(0)
        del cache
        gc.collect()


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([1], dtype=torch.int32), TypeError, "int32"),
        (torch.tensor([[1]]), ValueError, "one dimension"),
        (torch.tensor([1], device="meta"), ValueError, "expected cpu"),
        ([1], TypeError, "list"),
        (torch.tensor([64]), IndexError, "id 64 at position 0 is out of range for a table of 64 rows"),
    ],
)
def test_bad_ids_say_what_is_wrong(
    tmp_path: Path, ids: torch.Tensor, error: type[Exception], message: str
) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 16))
    cache = make_cache([table], 4)
    with pytest.raises(error, match=message):
        cache.enter(0, {table.name: ids})
    cache.enter(0, {table.name: torch.tensor([1])})  # nothing was entered
    with pytest.raises(KeyError, match="no table 'other'"):
        cache.enter(1, {"other": torch.tensor([1])})
