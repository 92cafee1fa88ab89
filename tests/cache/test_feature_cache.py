"""The cache in host memory beyond the contract of both caches: engines, outputs, memory, forks, Ctrl-C."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_runs import Make, check, make_rows, rows_of, run
from children import ended, resident_bytes
from datasets import same_bits
from raw_table import RawTable, write_raw_table, write_scaled_table

import gids
from gids import _core
from gids.cache import FeatureCache
from gids.cache.output_dtype import check_out_dtype
from gids.io import open_engine


@pytest.fixture
def make() -> Iterator[Make]:
    with Make(None) as made:
        yield made


def test_lines_take_memory_as_they_are_used(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(700, 128), page_bytes=1024)
    before = resident_bytes()
    cache = make(table, 100_000)
    check(cache, table, [{table.name: torch.arange(700)}], 1, 1)
    assert resident_bytes() - before < 50_000 * 1024


def test_large_outputs_of_int8_rows_are_the_same(tmp_path: Path, make: Make) -> None:
    """Outputs of 8 MB or more are written past the processor's cache."""
    steps = np.random.default_rng(0).integers(-127, 128, (3000, 768), np.int8)
    ids = torch.arange(3000).repeat(2)
    for scale, to in (("row", torch.bfloat16), ("column", torch.float32)):
        table = write_scaled_table(tmp_path, steps, scale)
        cache = make(table, table.page_count, threads=2, output_dtype=to)
        assert same_bits(rows_of(cache, table, ids), table.rows.to(to)[ids])


def test_an_output_is_used_again_only_when_its_last_view_is_gone(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(400, 256))
    cache = make(table, 400, keep_output_bytes=1 << 30)
    ids = torch.arange(300)
    first = rows_of(cache, table, ids)
    where, view = first.data_ptr(), first[5:7]
    del first
    second = rows_of(cache, table, ids)
    assert second.data_ptr() != where
    assert same_bits(view, table.rows[5:7])
    del view
    third = rows_of(cache, table, ids)
    assert third.data_ptr() == where


@pytest.mark.parametrize(("dim", "shards", "check_crc"), [(128, 1, False), (37, 3, False), (37, 3, True)])
def test_only_the_wanted_rows_of_a_single_page_without_a_line_are_read(
    tmp_path: Path, make: Make, dim: int, shards: int, check_crc: bool
) -> None:
    """Rows of 512 B, and of 148 B, which are not aligned to sectors."""
    table = write_raw_table(tmp_path, make_rows(900, dim), shards=shards)
    at, row_bytes, most = table.rows_per_page, table.row_bytes, 2048 // table.row_bytes
    sums = np.empty(table.page_count, np.uint32)
    for shard, path in enumerate(table.shard_paths):
        sums[shard::shards] = _core.crc32c(np.fromfile(path, np.uint8).reshape(-1, 4096))
    table.checksums = lambda: sums  # type: ignore[attr-defined]
    cache = make(table, 0, check_crc=check_crc)
    parts = [[at + 1 + most - 1, at + 1, at + 1], [6 * at + 3], [11 * at - 1]]  # half a page, and lone rows
    whole = [[20 * at, 20 * at + most], [25 * at + 2, (25 + shards) * at + 1]]  # more; neighbors in a file
    ids = torch.tensor(list(itertools.chain(*parts, *whole)))
    ids = ids[torch.randperm(len(ids))]
    assert same_bits(rows_of(cache, table, ids), table.rows[ids])
    sector, expected = make.engine.alignment, 3 * 4096
    for rows in parts:
        begin, end = min(rows) % at * row_bytes, (max(rows) % at + 1) * row_bytes
        expected += -(-end // sector) * sector - begin // sector * sector
    assert make.engine.stats()["bytes_read"] == (6 * 4096 if check_crc else expected)


def test_a_bad_sector_beside_the_wanted_rows_is_not_an_error(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 128))  # 8 rows a page
    cache = make(table, 16)
    make.engine.inject_faults([(0, 4096 * 3 + 512 * 2, errno.EIO, 1 << 30)])  # row 26
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


def test_more_rows_than_one_part_are_read_past_the_cache(tmp_path: Path, make: Make) -> None:
    """With pages whose reads fail once, and one that cannot be read."""
    table = write_raw_table(tmp_path, make_rows(200_000, 4), page_bytes=512, shards=2)  # 32 rows a page
    ids = torch.from_numpy(np.random.default_rng(5).integers(0, 200_000, 150_000))
    cache = make(table, 100, threads=2)
    make.engine.inject_faults([(0, 512 * 1000, errno.EIO, 1), (1, 512 * 2000, errno.EIO, 1)])
    assert same_bits(rows_of(cache, table, ids), table.rows[ids])
    make.engine.inject_faults([(0, 512 * 1000, errno.EIO, 1 << 30)])
    features, error = cache.read_through({table.name: ids})
    assert isinstance(error, gids.StorageError)
    assert (error.errno, error.offset) == (errno.EIO, 512 * 1000)
    readable = ids // 32 != 2 * 1000  # pages alternate between the shards
    assert same_bits(features[table.name][readable], table.rows[ids[readable]])
    through, error = cache.read_through({table.name: ids[readable]})
    assert error is None
    assert same_bits(through[table.name], table.rows[ids[readable]])
    cache.audit()


@pytest.mark.parametrize("lines", [0, 1000])
def test_minibatches_stay_within_their_memory(tmp_path: Path, make: Make, lines: int) -> None:
    """4 bytes per page; requests and memory to plan in as the budget counts them per row."""
    rows, size, window, planned = 10_000, 1000, 5, 3
    table = write_raw_table(tmp_path, make_rows(rows, 128), page_bytes=512)
    cache = make(table, lines)
    rng = np.random.default_rng(lines)
    batches = [{table.name: torch.from_numpy(rng.permutation(rows)[:size])} for _ in range(10)]
    at_once = size * (planned * _core.PLANNED_ROW_BYTES + _core.PLANNING_ROW_BYTES)
    at_once += min(lines, size) * 16
    for _ in run(cache, batches, window, planned):
        memory = cache.memory()
        assert memory["window"] <= 4 * size * (window + planned)
        assert 0 < memory["requests"] <= at_once + 100 * planned
    assert memory["window"] > 0


def test_ctrl_c_ends_reading_through(tmp_path: Path) -> None:
    pages, path = 1_000_000, tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(512 * pages)
    table = RawTable("t", torch.zeros(1, 1).expand(pages * 128, 1), 512, 128, [path])

    def read() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine = open_engine([path], "threads", depth=1, direct=False, max_read_bytes=512, max_merge_bytes=0)
        cache = FeatureCache(engine, [table], lines={"t": 0}, heats={})  # type: ignore[list-item]

        def interrupt() -> None:
            while not engine.stats()["reads"]:
                time.sleep(1e-3)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        ids = torch.arange(pages) * 128
        with pytest.raises(KeyboardInterrupt):
            cache.read_through({"t": ids})
        io = engine.stats()
        assert io["reads"] < pages
        assert io["errors"] == io["in_flight"] == 0
        features, error = cache.read_through({"t": ids[:10]})
        assert error is None
        assert not features["t"].any()

    ended(read)


def test_a_forked_child_is_refused_and_ends(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(500, 512))
    cache, ids = make(table, 100, threads=2), {table.name: torch.arange(80)}
    for step in range(3):
        cache.enter(step, ids)
    cache.plan(0)
    cache.gather(0)
    cache.plan(1)

    def use() -> None:
        for call in (lambda: cache.enter(3, ids), lambda: cache.gather(1), lambda: cache.read_through(ids)):
            with pytest.raises(RuntimeError, match="before a fork"):
                call()
        assert cache.stats()
        cache.close()

    ended(use)
    features, error = cache.gather(1)
    assert error is None
    assert same_bits(features[table.name], table.rows[:80])
    cache.cancel()
    cache.audit()


def test_a_step_that_cannot_be_submitted_leaves_no_page_loading(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(300, 1024))
    cache = make(table, 100)
    cache.enter(0, {table.name: torch.arange(150)})
    make.engine.close()
    with pytest.raises(RuntimeError, match="the I/O engine is closed"):
        cache.plan(0)
    cache.cancel()
    cache.audit()
    assert not np.any(cache.page_words(table.name))


def test_a_cache_may_be_dropped_while_reads_are_in_flight(tmp_path: Path) -> None:
    table = write_raw_table(tmp_path, make_rows(2000, 1024))
    for _ in range(2):
        engine = open_engine(table.shard_paths, depth=8, max_read_bytes=table.page_bytes)
        cache = FeatureCache(engine, [table], lines={table.name: 300}, heats={})  # type: ignore[list-item]
        cache.enter(0, {table.name: torch.arange(0, 2000, 2)})
        cache.plan(0)
        del cache, engine
    gc.collect()


def test_rows_are_converted_to_floats_only() -> None:
    with pytest.raises(ValueError, match=r"one of torch.float32, .* torch.bfloat16.*\(got torch.float64\)"):
        check_out_dtype(torch.float64)
