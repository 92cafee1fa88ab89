"""The cache in device memory against the source rows, bit for bit: emulated, and on a GPU if there is one."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import same_bits
from raw_table import RawTable, write_raw_table, write_scaled_table

from gids.cache.device import DeviceFeatureCache
from gids.cuda.device import Device
from gids.io import Engine, open_engine

POLICIES = ["lookahead", "window-pin", "random", "static"]
Make = Callable[..., DeviceFeatureCache]


def make_rows(n: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 256, (n, dim * torch.empty(0, dtype=dtype).element_size()), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).view(n, dim)


@pytest.fixture
def make(device: Device) -> Iterator[Make]:
    """make(tables, lines, **options): a cache, closed at the end."""
    opened: list[tuple[DeviceFeatureCache, Engine]] = []

    def build(
        tables: RawTable | list[RawTable], lines: int, host_lines: int = 0, **options: object
    ) -> DeviceFeatureCache:
        tables = [tables] if isinstance(tables, RawTable) else tables
        engine = open_engine(
            [p for t in tables for p in t.shard_paths],
            depth=64,
            max_read_bytes=max(t.page_bytes for t in tables),
        )
        options = {"staging_bytes": 1 << 20, "heats": {}} | options
        cache = DeviceFeatureCache(
            device,
            engine,
            tables,  # type: ignore[arg-type]
            lines={t.name: lines for t in tables},
            host_lines={t.name: host_lines for t in tables},
            **options,  # type: ignore[arg-type]
        )
        opened.append((cache, engine))
        return cache

    yield build
    for cache, engine in opened:
        cache.close()
        engine.close()


def run(
    cache: DeviceFeatureCache, batches: list[dict[str, torch.Tensor]], window: int, planned: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The loader's order: plan ahead of gathering."""
    first = entered = planned_to = cache.next_step
    for t in range(first, first + len(batches)):
        while planned_to < min(first + len(batches), t + planned):
            while entered < min(first + len(batches), planned_to + 1 + window):
                cache.enter(entered, batches[entered - first])
                entered += 1
            cache.plan(planned_to)
            planned_to += 1
        features, error = cache.gather(t)
        assert error is None
        cache.retire(t)
        yield features


def random_batches(
    rng: np.random.Generator, table: RawTable, count: int, size: int
) -> list[dict[str, torch.Tensor]]:
    """Skewed, with repeats; some are empty."""
    out = []
    for _ in range(count):
        ids = (table.row_count * rng.random(rng.integers(0, size + 1)) ** 2).astype(np.int64)
        out.append({table.name: torch.from_numpy(ids)})
    return out


def check(
    cache: DeviceFeatureCache, tables: list[RawTable], batches: list[dict[str, torch.Tensor]], w: int, d: int
) -> None:
    by_name = {t.name: t for t in tables}
    for ids, got in zip(batches, run(cache, batches, w, d), strict=True):
        assert set(got) == set(ids)
        for name, rows in got.items():
            assert same_bits(rows, by_name[name].rows[ids[name]])
        cache.audit()
    for t in tables:
        assert not np.any(cache.page_words(t.name) & np.uint64(0xFFFFFF))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("lines", "host_lines"), [(0, 0), (1, 0), (0, 3), (40, 0), (30, 20), (1000, 0)])
def test_rows_equal_the_source_for_every_policy_and_size(
    tmp_path: Path, make: Make, policy: str, lines: int, host_lines: int
) -> None:
    rng = np.random.default_rng(lines)
    table = write_raw_table(tmp_path, make_rows(700, 128), page_bytes=1024, shards=2)
    cache = make(table, lines, host_lines, policy=policy)
    check(cache, [table], random_batches(rng, table, 12, 300), 6, 3)


@pytest.mark.parametrize("wait", ["stream", "warp"])
@pytest.mark.parametrize("planned", [1, 2, 3, 4])
@pytest.mark.parametrize("pairs", [1, 2])
def test_rows_equal_the_source_when_a_minibatch_takes_many_rounds(
    tmp_path: Path, make: Make, wait: str, planned: int, pairs: int
) -> None:
    rng = np.random.default_rng(planned)
    table = write_raw_table(tmp_path, make_rows(500, 128), page_bytes=512, shards=3)
    rounds_max = int(rng.integers(1, 5))
    cache = make(table, 60, staging_bytes=64 * 512, rounds_max=rounds_max, wait=wait, pairs=pairs)
    assert cache._queue.round_max <= 64
    check(cache, [table], random_batches(rng, table, 8, 300), 5, planned)


@pytest.mark.parametrize(
    ("dim", "dtype", "page_bytes"),
    [
        (1024, torch.float32, 4096),  # a row is a page
        (100, torch.float32, 4096),  # ten rows to a page, with padding
        (301, torch.float32, 4096),  # three rows, 4 bytes to an item
        (3, torch.int8, 512),  # 170 rows to a page, single bytes
        (1, torch.float16, 512),  # rows of 2 bytes
        (1100, torch.float64, 4096),  # a row longer than a page
        (768, torch.bfloat16, 512),  # longer than a page, three sectors
        (1, torch.int64, 512),
    ],
)
def test_every_geometry(tmp_path: Path, make: Make, dim: int, dtype: torch.dtype, page_bytes: int) -> None:
    rng = np.random.default_rng(dim)
    table = write_raw_table(tmp_path, make_rows(600, dim, dtype), page_bytes=page_bytes, shards=3)
    for lines, host_lines in ((0, 0), (20, 10), (600, 0)):
        cache = make(table, lines, host_lines)
        check(cache, [table], random_batches(rng, table, 6, 300), 3, 2)
        stats = cache.stats()[table.name]
        assert stats["bypasses"] > 0 if lines == 0 else stats["loads"] > 0


FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [128, 7])
def test_converted_rows_equal_torch_bit_for_bit(
    tmp_path: Path, make: Make, dtype: torch.dtype, to: torch.dtype, dim: int
) -> None:
    if dtype == torch.float32:
        edges = torch.tensor([0x0, 0x1, 0x33000000, 0x33000001, 0x33800000, 0x387FFFFF, 0x38800000,
                              0x477FEFFF, 0x477FF000, 0x477FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7F7F8000,
                              0x3F808000, 0x3F818000, 0x7F800001, 0x7FC00000], dtype=torch.int32)  # fmt: skip
        draw = torch.Generator().manual_seed(1)
        any_bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=draw).to(torch.int32)
        magnitudes = torch.randint(0x32000000, 0x48000000, (1 << 15,), generator=draw).to(torch.int32)
        bits = torch.cat([edges, edges | -(1 << 31), any_bits, magnitudes])
        values = bits.view(torch.float32)
    else:
        values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)  # all of them
    rows = values[: len(values) // dim * dim].reshape(-1, dim).clone()
    table = write_raw_table(tmp_path, rows)
    cache = make(table, table.page_count // 2, output_dtype=to)
    ids = torch.arange(len(rows))
    ((got,),) = (tuple(f.values()) for f in run(cache, [{table.name: ids}], 0, 1))
    expected = rows.to(to)
    got = got.cpu()
    assert got.dtype == to
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    zeros = torch.zeros((), dtype=to)
    assert same_bits(torch.where(nan, zeros, got), torch.where(nan, zeros, expected))


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("scale", ["row", "column"])
@pytest.mark.parametrize(("dim", "page_bytes"), [(7, 512), (128, 4096), (1020, 1024)])
def test_int8_rows_are_widened_as_numpy_does(
    tmp_path: Path, make: Make, to: torch.dtype, scale: str, dim: int, page_bytes: int
) -> None:
    """From lines on the device, from lines in host memory, preloaded or not, and from staging."""
    rng = np.random.default_rng(dim)
    steps = rng.integers(-127, 128, (300, dim), np.int8)
    table = write_scaled_table(tmp_path, steps, scale, page_bytes=page_bytes, shards=2)
    wanted = RawTable(table.name, table.rows.to(to), 0, 1, [])
    heat = {table.name: np.full(table.page_count, 9, np.uint8)}
    for lines, host_lines, wait in ((0, 0, "warp"), (0, 6, "stream"), (8, 4, "stream"), (300, 0, "stream")):
        cache = make(table, lines, host_lines, output_dtype=to, wait=wait, heats=heat if host_lines else {})
        check(cache, [wanted], random_batches(rng, table, 4, 200), 2, 2)
        through, error = cache.read_through({table.name: torch.arange(300)})
        assert error is None
        assert same_bits(through[table.name], wanted.rows)


def test_streams_that_cannot_wait_for_a_word_poll(
    tmp_path: Path, device: Device, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "wait_value", lambda *args: False)
    table = write_raw_table(tmp_path, make_rows(500, 128), page_bytes=512, shards=3)
    batches = random_batches(np.random.default_rng(1), table, 6, 300)
    check(make(table, 60, staging_bytes=64 * 512), [table], batches, 5, 3)


def test_integers_are_never_converted(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(50, 8, torch.int32))
    cache = make(table, 4, output_dtype=torch.float16)
    ((got,),) = (tuple(f.values()) for f in run(cache, [{table.name: torch.arange(50)}], 0, 1))
    assert same_bits(got, table.rows)


@pytest.mark.parametrize("wait", ["stream", "warp"])
def test_several_tables_share_one_queue(tmp_path: Path, make: Make, wait: str) -> None:
    rng = np.random.default_rng(5)
    tables = [
        write_raw_table(tmp_path, make_rows(300, 128), page_bytes=512, name="paper.feat", shards=2),
        write_raw_table(tmp_path, make_rows(90, 9, torch.float16), page_bytes=1024, name="author.feat"),
        write_raw_table(tmp_path, make_rows(40, 700), page_bytes=512, name="venue.feat", shards=3),
    ]
    cache = make(tables, 25, 5, staging_bytes=64 * 3072, wait=wait)
    batches = []
    for _ in range(12):
        chosen = [t for t in tables if rng.random() < 0.7]
        batches.append(
            {t.name: torch.from_numpy(rng.integers(0, t.row_count, rng.integers(0, 120))) for t in chosen}
        )
    check(cache, tables, batches, 4, 3)


def test_both_waits_give_the_same_rows_and_counters(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(400, 50), page_bytes=512)
    batches = random_batches(np.random.default_rng(9), table, 10, 300)
    for lines in (15, 400):
        counters, rows = [], []
        for wait in ("stream", "warp"):
            cache = make(table, lines, wait=wait, staging_bytes=64 * 512)
            rows.append([f[table.name].cpu() for f in run(cache, batches, 4, 2)])
            stats = cache.stats()[table.name]
            counters.append(
                [stats[k] for k in ("steps", "pages", "hits", "misses", "loads", "bypasses", "failures")]
            )
        assert all(same_bits(a, b) for a, b in zip(*rows, strict=True))
        # Of equal pages the fastest warps' stay, so counters agree where nothing has to go.
        assert lines < 400 or counters[0] == counters[1]


def test_ids_in_host_memory_and_on_the_device_are_the_same(
    tmp_path: Path, device: Device, make: Make
) -> None:
    table = write_raw_table(tmp_path, make_rows(400, 50), page_bytes=512)
    cache = make(table, 15)
    for batch in random_batches(np.random.default_rng(2), table, 6, 300):
        there = {name: ids.to(device.torch_device) for name, ids in batch.items()}
        a, b = run(cache, [batch, there], 1, 2)
        assert same_bits(a[table.name], b[table.name])
        assert a[table.name].device == device.torch_device


@pytest.mark.parametrize("wait", ["stream", "warp"])
def test_a_page_that_cannot_be_read_is_an_error_of_the_minibatches_that_need_it(
    tmp_path: Path, make: Make, wait: str
) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 1024), shards=2)
    batches = [torch.tensor([1, 2]), torch.tensor([6, 7]), torch.tensor([8, 9]), torch.tensor([7])]
    path, offset = table.shard_of(7)
    for lines in (0, 16):
        cache = make(table, lines, wait=wait)
        cache._host._engine.inject_faults([(table.shard_paths.index(path), offset, errno.EIO, 1 << 30)])
        for step, ids in enumerate(batches):
            cache.enter(step, {table.name: ids})
            cache.plan(step)
        for step, ids in enumerate(batches):
            features, error = cache.gather(step)
            if 7 in ids.tolist():
                assert isinstance(error, OSError)
                assert (error.errno, error.filename, error.offset) == (errno.EIO, str(path), offset)  # type: ignore[attr-defined]
            else:
                assert error is None
                assert same_bits(features[table.name], table.rows[ids])
            cache.retire(step)
        cache.audit()
        assert cache.stats()[table.name]["failures"] > 0
        # The line that the failed page had is in use again, and so is the page once the disk recovers.
        cache._host._engine.inject_faults([])
        check(cache, [table], [{table.name: torch.arange(64)}], 0, 1)


def test_a_read_that_fails_once_is_read_again(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 1024))
    cache = make(table, 64, output_dtype=torch.float16)
    cache._host._engine.inject_faults([(0, 4096 * 3, errno.EIO, 1)])
    ((got,),) = (tuple(f.values()) for f in run(cache, [{table.name: torch.arange(8)}], 0, 1))
    assert torch.allclose(got.cpu(), table.rows[:8].half(), equal_nan=True)
    assert cache.stats()[table.name]["failures"] == 1


def test_a_wrong_checksum_is_found_when_asked_for(tmp_path: Path, make: Make) -> None:
    from gids import _core

    table = write_raw_table(tmp_path, make_rows(32, 1024))
    pages = np.fromfile(table.shard_paths[0], np.uint8).reshape(-1, 4096)
    sums = _core.crc32c(pages)
    table.checksums = lambda: sums  # type: ignore[attr-defined]
    heat = {table.name: np.full(32, 9, np.uint8)}
    check(make(table, 8, 8, check_crc=True), [table], [{table.name: torch.arange(32)}], 0, 1)
    pages[5, 100] ^= 1
    pages.tofile(table.shard_paths[0])
    cache = make(table, 8, 8, check_crc=True, heats=heat)
    check(cache, [table], [{table.name: torch.arange(5)}], 0, 1)
    step = cache.next_step
    cache.enter(step, {table.name: torch.arange(8)})
    cache.plan(step)
    _, error = cache.gather(step)
    assert isinstance(error, OSError)
    assert error.errno == errno.EBADMSG
    cache.retire(step)


@pytest.mark.parametrize("bad", [-1, 64, 1 << 40, -(1 << 62)])
def test_an_id_out_of_range_is_the_error_of_its_minibatch_and_marks_nothing(
    tmp_path: Path, make: Make, bad: int
) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 1024))
    cache = make(table, 8)
    cache.enter(0, {table.name: torch.tensor([3, 5, bad, 4, bad])})
    cache.enter(1, {table.name: torch.tensor([3])})
    assert np.flatnonzero(cache.page_words(table.name) & np.uint64(1)).tolist() == [3, 4, 5]
    cache.plan(0)
    cache.plan(1)
    _, error = cache.gather(0)
    assert isinstance(error, IndexError)
    assert f"table '_N.feat': id {bad} at position 2 is out of range for a table of 64 rows" in str(error)
    cache.retire(0)
    features, error = cache.gather(1)
    assert error is None
    assert same_bits(features[table.name], table.rows[3:4])
    cache.retire(1)
    with pytest.raises(IndexError, match="position 1"):
        cache.read_through({table.name: torch.tensor([3, bad])})
    cache.audit()


def test_wrong_ids_are_refused_at_once(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 1024))
    cache = make(table, 8)
    for ids, kind, text in [
        (torch.zeros(3, dtype=torch.int32), TypeError, "torch.int64"),
        (torch.zeros(3, 1, dtype=torch.int64), ValueError, "one dimension"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), ValueError, "on meta; expected"),
        ([1, 2], TypeError, "list"),
    ]:
        with pytest.raises(kind, match=text):
            cache.enter(0, {table.name: ids})  # type: ignore[dict-item]
    with pytest.raises(KeyError, match="no table 'x'"):
        cache.enter(0, {"x": torch.zeros(3, dtype=torch.int64)})
    assert not cache.page_words(table.name).any()


def test_steps_out_of_order_and_a_25th_live_one_are_refused(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(64, 1024))
    cache, one = make(table, 8), {table.name: torch.tensor([1])}
    for step in range(24):
        cache.enter(step, one)
    with pytest.raises(RuntimeError, match="24"):
        cache.enter(24, one)
    with pytest.raises(RuntimeError, match="order"):
        cache.plan(1)
    with pytest.raises(RuntimeError, match="order"):
        cache.retire(1)
    with pytest.raises(RuntimeError, match="not planned"):
        cache.gather(0)
    with pytest.raises(RuntimeError, match="not live"):
        cache.plan(30)
    cache.cancel()
    with pytest.raises(RuntimeError, match="not live"):
        cache.gather(0)


@pytest.mark.parametrize("wait", ["stream", "warp"])
def test_a_cancelled_stream_leaves_no_mark_and_loses_no_line(tmp_path: Path, make: Make, wait: str) -> None:
    rng = np.random.default_rng(7)
    table = write_raw_table(tmp_path, make_rows(300, 128), page_bytes=512)
    cache = make(table, 80, staging_bytes=64 * 512, wait=wait)
    for _ in range(8):
        batches = random_batches(rng, table, 24, 150)
        entered = int(rng.integers(1, 25))
        planned = int(rng.integers(0, min(entered, 5) + 1))
        gathered = int(rng.integers(0, planned + 1))
        step = cache.next_step
        for i in range(entered):
            cache.enter(step + i, batches[i])
        for i in range(planned):
            cache.plan(step + i)
        for i in range(gathered):
            features, error = cache.gather(step + i)
            assert error is None
            assert same_bits(features[table.name], table.rows[batches[i][table.name]])
            cache.retire(step + i)
        cache.cancel()
        assert cache.next_step == step + entered
        words = cache.page_words(table.name)
        assert not np.any(words & np.uint64(0xFFFFFF))
        assert not np.any(words >> np.uint64(62) == 1), "a page is LOADING for ever"
        cache.audit()
    check(cache, [table], random_batches(rng, table, 5, 300), 3, 2)


def test_reading_through_takes_rows_from_lines_and_from_disk_and_leaves_no_mark(
    tmp_path: Path, make: Make
) -> None:
    rng = np.random.default_rng(11)
    table = write_raw_table(tmp_path, make_rows(300, 100), page_bytes=4096)
    cache = make(table, 12)
    for batch in run(cache, random_batches(rng, table, 3, 200), 2, 2):
        assert batch
    before = cache.page_words(table.name)
    reads = cache._host._engine.stats()["reads"]
    for ids in (torch.arange(300), torch.tensor([], dtype=torch.int64), torch.tensor([7, 7, 299])):
        features, error = cache.read_through({table.name: ids})
        assert error is None
        assert same_bits(features[table.name], table.rows[ids])
    assert cache._host._engine.stats()["reads"] - reads < 2 * table.page_count
    assert np.array_equal(before, cache.page_words(table.name))
    cache._host._engine.inject_faults([(0, 0, errno.EIO, 1 << 30)])
    absent = np.flatnonzero(before >> np.uint64(62) == 0)
    cache._host._engine.inject_faults([(0, int(absent[0]) * 4096, errno.EIO, 1 << 30)])
    _, error = cache.read_through({table.name: torch.tensor([int(absent[0]) * 10])})
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO


@pytest.mark.parametrize("host_policy", ["lookahead", "static"])
@pytest.mark.parametrize("crc", [False, True])
def test_the_hottest_pages_are_there_from_the_start(
    tmp_path: Path, make: Make, host_policy: str, crc: bool
) -> None:
    from gids import _core

    rng = np.random.default_rng(3)
    table = write_raw_table(tmp_path, make_rows(200, 128), page_bytes=512, shards=3)
    if crc:
        sums = _core.crc32c(np.ascontiguousarray(table.rows.view(torch.uint8).numpy()))
        table.checksums = lambda: sums  # type: ignore[attr-defined]
    heat = rng.integers(0, 256, 200).astype(np.uint8)
    cache = make(table, 30, 25, heats={table.name: heat}, host_policy=host_policy, check_crc=crc)
    words = cache.page_words(table.name)
    resident = np.flatnonzero(words >> np.uint64(63))
    assert len(resident) == 55
    lines = (words[resident] >> np.uint64(32) & np.uint64((1 << 30) - 1)).astype(int)
    near, far = heat[resident[lines < 30]], heat[resident[lines >= 30]]
    out = np.delete(heat, resident)
    assert near.min() >= far.max()
    assert far.min() >= out.max()
    cache.audit()
    check(cache, [table], random_batches(rng, table, 10, 200), 4, 2)
    if host_policy == "static":
        words = cache.page_words(table.name)
        assert all(words[p] >> np.uint64(63) for p in resident[lines >= 30])


def test_lines_that_are_never_replaced_are_filled_without_heat_too(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(50, 128), page_bytes=512)
    cache = make(table, 0, 20, host_policy="static")
    assert np.count_nonzero(cache.page_words(table.name) >> np.uint64(63)) == 20
    check(cache, [table], [{table.name: torch.arange(50)}], 0, 1)
    assert cache.stats()[table.name]["hits"] == 20


def test_a_hot_page_that_cannot_be_read_stays_out_of_the_cache(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(50, 128), page_bytes=512)
    table.shard_paths[0].write_bytes(table.shard_paths[0].read_bytes()[: 40 * 512])
    cache = make(table, 50, heats={table.name: np.full(50, 3, np.uint8)})
    assert np.count_nonzero(cache.page_words(table.name) >> np.uint64(63)) == 40
    cache.audit()
    check(cache, [table], [{table.name: torch.arange(40)}], 0, 1)
