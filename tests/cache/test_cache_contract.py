"""The contract of both caches with the loader: the Cache protocol of gids/loader/rows.py.

Every test runs on the cache in host memory and on the cache in device memory, emulated and on a GPU where
there is one.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from cache_runs import (
    FLOATS,
    Make,
    check,
    gathered,
    loading,
    make_rows,
    marked,
    random_batches,
    rows_of,
)
from datasets import same_bits
from raw_table import RawTable, write_raw_table, write_scaled_table

from gids import _core
from gids.cuda import Device
from gids.errors import StorageError


@pytest.fixture(
    params=[
        "host",
        "emulated",
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    device: Device | None = None
    if request.param == "cuda":
        device = request.getfixturevalue("gpu")
    elif request.param == "emulated":
        device = emulator.EmulatedDevice(request.getfixturevalue("emulator_seed"))
    options: dict[str, Any] = {"threads": 2} if device is None else {}
    with Make(device, **options) as made:
        yield made
    if isinstance(device, emulator.EmulatedDevice):
        assert not device.mapped, "host memory is still mapped"


@pytest.mark.parametrize("scale", ["row", "column"])
def test_int8_rows_are_widened_as_numpy_does(tmp_path: Path, make: Make, scale: str) -> None:
    """From lines, on a device or below it, preloaded or not, and without a line."""
    places = [(0, 0, 0), (300, 0, 0), (8, 4, 9)]
    for turn, (dim, page_bytes) in enumerate([(1, 512), (130, 512), (1020, 1024)], scale == "row"):
        rng = np.random.default_rng(dim)
        steps = rng.integers(-127, 128, (100, dim), np.int8)
        table = write_scaled_table(tmp_path, steps, scale, page_bytes=page_bytes, shards=2, name=f"_N.{dim}")
        to = FLOATS[turn % 3]
        wanted = RawTable(table.name, table.rows.to(to), 0, 1, [])
        lines, host_lines, heat = places[turn % 3]
        heats = {table.name: np.full(table.page_count, heat, np.uint8)} if heat else {}
        cache = make(table, lines, host_lines, output_dtype=to, heats=heats)
        check(cache, wanted, random_batches(rng, table, 3, 60), 3, 2)
        through, error = cache.read_through({table.name: torch.arange(100)})
        assert error is None
        assert same_bits(through[table.name], wanted.rows)


@pytest.mark.parametrize(("dtype", "to"), [(a, b) for a in FLOATS for b in FLOATS if a != b])
def test_converted_rows_equal_torch_bit_for_bit(
    tmp_path: Path, make: Make, dtype: torch.dtype, to: torch.dtype
) -> None:
    dim = 128 if to == torch.float32 else 7
    if dtype == torch.float32:
        edges = torch.tensor([0x0, 0x1, 0x33000000, 0x33000001, 0x33800000, 0x387FFFFF, 0x38800000,
                              0x477FEFFF, 0x477FF000, 0x477FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7F7F8000,
                              0x3F808000, 0x3F818000, 0x7F800001, 0x7FC00000], dtype=torch.int32)  # fmt: skip
        draw = torch.Generator().manual_seed(1)
        any_bits = torch.randint(-(1 << 31), 1 << 31, (1 << 13,), generator=draw).to(torch.int32)
        magnitudes = torch.randint(0x32000000, 0x48000000, (1 << 13,), generator=draw).to(torch.int32)
        halfway = magnitudes & ~0xFFF
        bits = torch.cat([edges, edges | -(1 << 31), any_bits, magnitudes, halfway])
        values = bits.view(torch.float32)
    else:
        values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)  # all of them
    rows = values[: len(values) // dim * dim].reshape(-1, dim).clone()
    table = write_raw_table(tmp_path, rows)
    cache, ids = make(table, table.page_count // 2, output_dtype=to), {table.name: torch.arange(len(rows))}
    [(features, error)] = gathered(cache, [ids], 0, 1)
    got, expected = features[table.name].cpu(), rows.to(to)
    assert got.dtype == to
    assert (type(error) is OverflowError) == bool((expected.isinf() & rows.isfinite()).any())
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    zeros = torch.zeros((), dtype=to)
    assert same_bits(torch.where(nan, zeros, got), torch.where(nan, zeros, expected))


OVERFLOWS = [
    (torch.float32, torch.float16, 65519.0, False),
    (torch.float32, torch.float16, -65520.0, True),
    (torch.bfloat16, torch.float16, 3e38, True),
    (torch.float32, torch.bfloat16, 3.4e38, True),
    (torch.bfloat16, torch.float16, float("-inf"), False),
    (torch.float32, torch.float16, float("nan"), False),
]
"""Stored and wanted dtype, a value, and whether it is finite and becomes infinite."""


@pytest.mark.parametrize(("lines", "host_lines"), [(0, 0), (4, 5)])
def test_a_value_that_does_not_fit_is_an_error_of_the_minibatches_that_have_it(
    tmp_path: Path, make: Make, lines: int, host_lines: int
) -> None:
    for number, (stored, to, value, fails) in enumerate(OVERFLOWS):
        dim = [8, 7, 20][number % 3]
        rows = torch.linspace(-9, 9, 60 * dim).view(60, dim).to(stored)
        rows[41, number % dim] = value
        table = write_raw_table(tmp_path, rows, page_bytes=512, name=f"_N.{number}")
        cache = make(table, lines, host_lines, output_dtype=to)
        wanted = [[3, 41], [0, 1, 2], range(60), [40, 42], [], [41]]
        batches = [{table.name: torch.tensor(list(ids), dtype=torch.int64)} for ids in wanted]
        for ids, (_, error) in zip(wanted, gathered(cache, batches, 2, 2), strict=True):
            assert (type(error) is OverflowError) == (fails and 41 in ids)
            assert error is None or f"{table.name!r} has a value that does not fit in {to}" in str(error)
        for ids, batch in zip(wanted, batches, strict=True):
            assert (type(cache.read_through(batch)[1]) is OverflowError) == (fails and 41 in ids)


def test_integers_are_never_converted(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(50, 8, torch.int32))
    assert same_bits(rows_of(make(table, 4, output_dtype=torch.float16), table, torch.arange(50)), table.rows)


@pytest.mark.parametrize("lines", [0, 16])
def test_a_page_that_cannot_be_read_is_an_error_of_the_minibatches_that_need_it(
    tmp_path: Path, make: Make, lines: int
) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 1024), shards=2)
    batches = [torch.tensor([1, 2]), torch.tensor([6, 7]), torch.tensor([8, 9]), torch.tensor([7])]
    cache = make(table, lines)
    make.engine.inject_faults(table.faults(7, errno.EIO))
    path, offset = table.shard_of(7)
    for step, ids in enumerate(batches):
        cache.enter(step, {table.name: ids})
        cache.plan(step)
    for step, ids in enumerate(batches):
        features, error = cache.gather(step)
        if 7 in ids.tolist():
            assert isinstance(error, StorageError)
            assert (error.errno, error.filename, error.offset) == (errno.EIO, str(path), offset)
        else:
            assert error is None
            assert same_bits(features[table.name], table.rows[ids])
        cache.retire(step)
    cache.audit()
    stats = cache.stats()[table.name]
    assert "host_lines" not in stats or stats["failures"] > 0, "of a device"
    # The line of the failed page is in use again, and so is the page once the disk recovers.
    make.engine.inject_faults([])
    check(cache, table, [{table.name: torch.arange(64)}], 0, 1)


def test_a_read_that_fails_once_is_read_again(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 1024))
    for lines in (0, 64):
        cache = make(table, lines)
        make.engine.inject_faults([(0, 4096 * 3, errno.EIO, 1)])
        assert same_bits(rows_of(cache, table, torch.arange(8)), table.rows[:8])
        cache.audit()


def test_a_wrong_checksum_is_found_when_asked_for(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(32, 1024))
    pages = np.fromfile(table.shard_paths[0], np.uint8).reshape(-1, 4096)
    sums = _core.crc32c(pages)
    table.checksums = lambda: sums  # type: ignore[attr-defined]
    check(make(table, 8, check_crc=True), table, [{table.name: torch.arange(32)}], 0, 1)
    pages[5, 77] ^= 1
    pages.tofile(table.shard_paths[0])
    cache = make(table, 8, check_crc=True)
    cache.enter(0, {table.name: torch.tensor([4, 5])})
    cache.plan(0)
    _, error = cache.gather(0)
    assert isinstance(error, StorageError)
    assert (error.errno, error.offset) == (errno.EBADMSG, 5 * 4096)
    assert "checksum" in str(error)
    cache.retire(0)


def test_reading_through_needs_no_step_and_changes_no_word(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(300, 100))
    cache = make(table, 12)
    cache.enter(0, {table.name: torch.arange(100)})
    cache.plan(0)
    cache.gather(0)
    words = cache.page_words(table.name)
    for ids in (torch.arange(300), torch.tensor([], dtype=torch.int64), torch.tensor([299, 0, 5, 5, 120])):
        features, error = cache.read_through({table.name: ids})
        assert error is None
        assert same_bits(features[table.name], table.rows[ids])
    assert np.array_equal(words, cache.page_words(table.name))
    with pytest.raises(IndexError, match="id -3 at position 1 is out of range"):
        cache.read_through({table.name: torch.tensor([3, -3])})
    absent = int(np.flatnonzero(words >> np.uint64(62) == 0)[0])
    make.engine.inject_faults(table.faults(absent, errno.EIO))
    _, error = cache.read_through({table.name: torch.tensor([absent * table.rows_per_page])})
    assert isinstance(error, StorageError)
    assert error.errno == errno.EIO
    cache.retire(0)


def test_cancel_takes_every_mark_back_while_reads_are_in_flight(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(300, 128), page_bytes=512)
    cache, rng = make(table, 80, depth=4), np.random.default_rng(7)
    for entered, planned, done in ((24, 5, 3), (9, 4, 0), (1, 0, 0), (13, 2, 2)):
        batches, step = random_batches(rng, table, 24, 150), cache.next_step
        for i in range(entered):
            cache.enter(step + i, batches[i])
        for i in range(planned):
            cache.plan(step + i)
        for i in range(done):
            features, error = cache.gather(step + i)
            assert error is None
            assert same_bits(features[table.name], table.rows[batches[i][table.name]])
            cache.retire(step + i)
        cache.cancel()
        assert cache.next_step == step + entered
        assert not marked(cache, table)
        assert not loading(cache, table)
        cache.audit()
    assert cache.stats()[table.name]["failures"] == 0, "a page that nobody wants any more is no failure"
    check(cache, table, random_batches(rng, table, 5, 300), 3, 2)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([1], dtype=torch.int32), TypeError, "are torch.int32; expected torch.int64"),
        (torch.tensor([[1]]), ValueError, "one dimension"),
        (torch.tensor([1], device="meta"), ValueError, "on meta; expected"),
        ([1], TypeError, "list"),
    ],
)
def test_wrong_ids_are_refused_and_nothing_is_marked(
    tmp_path: Path, make: Make, ids: torch.Tensor, error: type[Exception], message: str
) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 16))
    cache = make(table, 4)
    with pytest.raises(error, match=message):
        cache.enter(0, {table.name: ids})
    with pytest.raises(KeyError, match="no table 'other'"):
        cache.enter(0, {"other": torch.tensor([1])})
    assert not marked(cache, table)
    cache.enter(0, {table.name: torch.tensor([1])})  # step 0 was not entered
    cache.cancel()


def test_counters_add_up_and_memory_is_listed_by_purpose(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(400, 100), shards=2)
    cache = make(table, 12)
    batches = random_batches(np.random.default_rng(0), table, 10, 150)
    check(cache, table, batches, 4, 2)
    stats = cache.stats()[table.name]
    assert stats["steps"] == 10
    assert stats["pages"] == sum(len({i // 10 for i in b[table.name].tolist()}) for b in batches)
    assert stats["pages"] == stats["hits"] + stats["misses"]
    assert stats["misses"] == stats["loads"] + stats["bypasses"]
    assert stats["failures"] == 0
    assert 0 < stats["loads"] - stats["evictions"] <= 12
    assert all(stats[f"{stage}_s"] > 0 for stage in ("enter", "plan", "gather", "retire"))
    assert stats["wait_s"] >= 0
    memory = cache.memory()
    assert memory["lines"] == stats["lines_bytes"] == 12 * 4096
    assert memory["page tables"] >= 8 * table.page_count
    cache.enter(cache.next_step, {table.name: torch.arange(100)})
    assert cache.memory()["window"] > 0
