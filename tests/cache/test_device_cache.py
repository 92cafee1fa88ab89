"""The cache in device memory, beyond the contract: rounds, host lines, preloading, errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_runs import Make, check, make_rows, random_batches, run
from datasets import same_bits
from emulator import EmulatedDevice
from raw_table import RawTable, write_raw_table

from gids import _core
from gids.cuda.device import Device
from gids.errors import StorageError


@pytest.fixture
def make(device: Device) -> Iterator[Make]:
    with Make(device) as made:
        yield made


@pytest.mark.few(4)
@pytest.mark.parametrize("host_lines", [0, 20])
@pytest.mark.parametrize("planned", [1, 2, 3, 4])
@pytest.mark.parametrize("staged", [4, 20, 64])
def test_rows_equal_the_source_when_a_minibatch_takes_many_rounds(
    tmp_path: Path, make: Make, device: Device, host_lines: int, planned: int, staged: int
) -> None:
    """staged: pages in flight, which four rounds share."""
    rng = np.random.default_rng(planned)
    table = write_raw_table(tmp_path, make_rows(500, 128), page_bytes=512, shards=3)
    cache = make(table, 60, host_lines, staging_bytes=staged * 512)
    check(cache, [table], random_batches(rng, table, 8, 300), 5, planned)
    if isinstance(device, EmulatedDevice):
        assert "copy_from_host" in device.launches
        assert "gids_take_round" in device.launches


def test_tables_with_pages_of_different_lengths_share_the_staging(tmp_path: Path, make: Make) -> None:
    rng = np.random.default_rng(2)
    dims = {"long": (1024, 4096), "short": (128, 512), "middle": (384, 1536)}
    tables = [
        write_raw_table(tmp_path, make_rows(300, dim, seed=dim), page_bytes=page_bytes, name=name, shards=2)
        for name, (dim, page_bytes) in dims.items()
    ]
    cache = make(tables, 25, staging_bytes=30 * 4096)
    batches = [
        {name: ids for table in tables for name, ids in random_batches(rng, table, 1, 200)[0].items()}
        for _ in range(8)
    ]
    check(cache, tables, batches, 4, 3)


def test_a_page_gets_a_host_line_between_the_two_kernels_that_read_through(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gathers rows in host lines, the other one the rest. The garbage collector may close a dropped
    stream meanwhile, which cancels a planned step."""
    table, ids = write_raw_table(tmp_path, make_rows(60, 128), page_bytes=512), torch.arange(60)
    cache = make(table, 0, 60)
    cache.enter(0, {table.name: ids})
    cache.plan(0)
    gather = cache._kernels._gather

    def and_the_step(kernel: str, *args: Any, **options: Any) -> None:
        gather(kernel, *args, **options)
        if kernel == "gids_gather_host_lines":
            cache.cancel()

    monkeypatch.setattr(cache._kernels, "_gather", and_the_step)
    rows, error = cache.read_through({table.name: ids})
    assert error is None
    assert same_bits(rows[table.name], table.rows)
    assert cache.next_step == 1


def test_rows_are_right_after_a_cancelled_stream(tmp_path: Path, make: Make, device: Device) -> None:
    rng = np.random.default_rng(1)
    table = write_raw_table(tmp_path, make_rows(500, 128), page_bytes=512)
    cache = make(table, 60, staging_bytes=64 * 512)
    for _ in range(3):
        first = cache.next_step
        for step, ids in enumerate(random_batches(rng, table, 3, 200), first):
            cache.enter(step, ids)
            cache.plan(step)
        cache.cancel()
        assert cache.stats()[table.name]["failures"] == 0, "a page that nobody wants any more is no failure"
        if isinstance(device, EmulatedDevice):
            device.launches.clear()
        check(cache, [table], random_batches(rng, table, 4, 300), 5, 2)
        if isinstance(device, EmulatedDevice):
            assert "copy_from_host" in device.launches


def test_a_device_that_cannot_wait_for_a_word_polls(
    tmp_path: Path, device: Device, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "wait_value", lambda *args: False)
    table = write_raw_table(tmp_path, make_rows(500, 128), page_bytes=512, shards=3)
    batches = random_batches(np.random.default_rng(1), table, 6, 300)
    check(make(table, 60, staging_bytes=64 * 512), [table], batches, 5, 3)


def test_a_hot_page_with_a_wrong_checksum_is_not_preloaded(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(32, 1024))
    pages = np.fromfile(table.shard_paths[0], np.uint8).reshape(-1, 4096)
    sums = _core.crc32c(pages)
    table.checksums = lambda: sums  # type: ignore[attr-defined]
    heat = {table.name: np.full(32, 9, np.uint8)}
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


def test_reading_through_does_not_read_pages_that_have_lines(tmp_path: Path, make: Make) -> None:
    rng = np.random.default_rng(11)
    table = write_raw_table(tmp_path, make_rows(300, 100), page_bytes=4096)
    cache = make(table, 12)
    for batch in run(cache, random_batches(rng, table, 3, 200), 2, 2):
        assert batch
    reads = make.engine.stats()["reads"]
    for ids in (torch.arange(300), torch.tensor([7, 7, 299])):
        _, error = cache.read_through({table.name: ids})
        assert error is None
    assert make.engine.stats()["reads"] - reads < 2 * table.page_count


class GpuDirect:
    """In place of a KvikioReader for one table. fails_at: number of the read() that fails."""

    def __init__(self, table: RawTable, threshold: int, fails_at: int = -1) -> None:
        self.threshold, self.lengths = threshold, list[int]()
        self._contents = [np.fromfile(path, np.uint8) for path in table.shard_paths]
        self._fails_at = fails_at

    def read(
        self,
        files: np.ndarray,
        offsets: np.ndarray,
        lengths: np.ndarray,
        out: torch.Tensor,
        out_offsets: np.ndarray,
    ) -> None:
        self._fails_at -= 1
        for file, offset, length, at in zip(files, offsets, lengths, out_offsets, strict=True):
            part = torch.from_numpy(self._contents[file][offset : offset + length])
            if self._fails_at == 0:
                out[at : at + length] = 99
                raise StorageError(errno.EIO, "no GPUDirect Storage any more", "shard-0", int(offset))
            out[at : at + length] = part.to(out.device)
            self.lengths.append(int(length))


@pytest.mark.parametrize(
    ("by", "host_policy"),
    [("kvikio", "lookahead"), ("engine", "static"), ("engine, with checksums", "lookahead")],
)
def test_the_hottest_pages_are_preloaded(tmp_path: Path, make: Make, by: str, host_policy: str) -> None:
    rng = np.random.default_rng(3)
    table = write_raw_table(tmp_path, make_rows(200, 128), page_bytes=512, shards=3)
    crc = "checksums" in by
    if crc:
        sums = _core.crc32c(np.ascontiguousarray(table.rows.view(torch.uint8).numpy()))
        table.checksums = lambda: sums  # type: ignore[attr-defined]
    heat = rng.integers(0, 256, 200).astype(np.uint8)
    options = {"kvikio": GpuDirect(table, 512)} if by == "kvikio" else {"check_crc": crc}
    cache = make(table, 30, 25, heats={table.name: heat}, host_policy=host_policy, **options)
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


def test_lines_that_are_never_replaced_are_filled_even_without_heat(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(50, 128), page_bytes=512)
    cache = make(table, 0, 20, host_policy="static")
    assert np.count_nonzero(cache.page_words(table.name) >> np.uint64(63)) == 20
    check(cache, [table], [{table.name: torch.arange(50)}], 0, 1)
    assert cache.stats()[table.name]["hits"] == 20


@pytest.mark.parametrize("fails", [False, True])
def test_gpudirect_reads_long_runs_and_the_engine_the_others_and_all_after_an_error(
    tmp_path: Path, make: Make, fails: bool
) -> None:
    table = write_raw_table(tmp_path, make_rows(300, 128), page_bytes=512, shards=3)
    heat = np.zeros(300, np.uint8)
    heat[30:60] = 9  # 10 neighbors in each shard
    heat[[90, 93, 96, 99]] = 9  # 4 neighbors
    heat[[120, 123, 126, 202, 250]] = 9  # 3 neighbors, and two alone
    gds = GpuDirect(table, 4 * 512, fails_at=1 if fails else -1)
    cache = make(table, 60, heats={table.name: heat}, kvikio=gds)
    assert sorted(gds.lengths) == ([] if fails else [4 * 512, *[10 * 512] * 3])
    assert make.engine.stats()["reads"] == (39 if fails else 5)
    words = cache.page_words(table.name)
    assert np.array_equal(np.flatnonzero(words >> np.uint64(63)), np.flatnonzero(heat))
    cache.audit()
    check(cache, [table], [{table.name: torch.from_numpy(np.flatnonzero(heat))}], 0, 1)
    assert cache.stats()[table.name]["misses"] == 0


def test_after_an_error_the_engine_goes_on_where_gpudirect_was(tmp_path: Path, make: Make) -> None:
    """At the 33rd page: 32 MiB are read at once."""
    table = write_raw_table(tmp_path, make_rows(40, 1 << 18), page_bytes=1 << 20)
    heat = np.ones(40, np.uint8)
    heat[3] = 0
    gds = GpuDirect(table, 1 << 20, fails_at=2)
    cache = make(table, 39, heats={table.name: heat}, kvikio=gds, staging_bytes=16 << 20)
    assert make.engine.stats()["reads"] == 7
    words = cache.page_words(table.name)
    assert np.array_equal(np.flatnonzero(words >> np.uint64(63)), np.flatnonzero(heat))
    check(cache, [table], [{table.name: torch.tensor([0, 2, 4, 32, 33, 39])}], 0, 1)
    assert cache.stats()[table.name]["misses"] == 0


def test_a_hot_page_that_cannot_be_read_stays_out_of_the_cache(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    table = write_raw_table(tmp_path, make_rows(50, 128), page_bytes=512)
    table.shard_paths[0].write_bytes(table.shard_paths[0].read_bytes()[: 40 * 512])
    cache = make(table, 45, 5, heats={table.name: np.full(50, 3, np.uint8)})
    assert np.count_nonzero(cache.page_words(table.name) >> np.uint64(63)) == 40
    [warning] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith("10 of the hottest pages of table '_N.feat' cannot be read")
    cache.audit()
    check(cache, [table], [{table.name: torch.arange(40)}], 0, 1)
