"""The cache in device memory, beyond the contract: rounds, host lines, preloading, errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_runs import Make, check, gathered, make_rows, random_batches, run
from datasets import same_bits
from emulator import EmulatedDevice
from raw_table import RawTable, write_raw_table

from gids import _core
from gids.cuda.device import Device
from gids.errors import MemoryBudgetError, StorageError


@pytest.fixture
def make(device: Device) -> Iterator[Make]:
    with Make(device) as made:
        yield made


@pytest.mark.parametrize(("staged", "planned", "host_lines"), [(4, 1, 0), (20, 3, 20)])
def test_rows_equal_the_source_when_a_minibatch_takes_many_rounds(
    tmp_path: Path, make: Make, device: Device, staged: int, planned: int, host_lines: int
) -> None:
    """staged: pages in flight, which four rounds share."""
    rng = np.random.default_rng(planned)
    table = write_raw_table(tmp_path, make_rows(500, 128), page_bytes=512, shards=3)
    cache = make(table, 60, host_lines, staging_bytes=staged * 512)
    check(cache, table, random_batches(rng, table, 5, 200), 5, planned)
    if isinstance(device, EmulatedDevice):
        assert "copy_from_host" in device.launches
        assert "gids_take_round" in device.launches


@pytest.mark.parametrize("bad", [-1, 64])
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
    [("kvikio", "static"), ("engine, with checksums", "lookahead")],
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
    check(cache, table, random_batches(rng, table, 6, 150), 4, 2)
    if host_policy == "static":
        words = cache.page_words(table.name)
        assert all(words[p] >> np.uint64(63) for p in resident[lines >= 30])


def test_lines_that_are_never_replaced_are_filled_even_without_heat(tmp_path: Path, make: Make) -> None:
    table = write_raw_table(tmp_path, make_rows(50, 128), page_bytes=512)
    cache = make(table, 0, 20, host_policy="static")
    assert np.count_nonzero(cache.page_words(table.name) >> np.uint64(63)) == 20
    check(cache, table, [{table.name: torch.arange(50)}], 0, 1)
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
    check(cache, table, [{table.name: torch.from_numpy(np.flatnonzero(heat))}], 0, 1)
    assert cache.stats()[table.name]["misses"] == 0


@pytest.mark.parametrize("damage", ["the file is cut off", "a wrong checksum"])
def test_a_hot_page_that_cannot_be_read_stays_out_of_the_cache(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    table = write_raw_table(tmp_path, make_rows(50, 128), page_bytes=512)
    pages = np.fromfile(table.shard_paths[0], np.uint8).reshape(50, 512)
    sums = _core.crc32c(pages)
    table.checksums = lambda: sums  # type: ignore[attr-defined]
    if damage == "a wrong checksum":
        pages[40:, 100] ^= 1
    pages[: 50 if damage == "a wrong checksum" else 40].tofile(table.shard_paths[0])
    heat = {table.name: np.full(50, 3, np.uint8)}
    cache = make(table, 45, 5, heats=heat, check_crc=damage == "a wrong checksum")
    assert np.count_nonzero(cache.page_words(table.name) >> np.uint64(63)) == 40
    [warning] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith("10 of the hottest pages of table '_N.feat' cannot be read")
    cache.audit()
    check(cache, table, [{table.name: torch.arange(40)}], 0, 1)
    [(_, error)] = gathered(cache, [{table.name: torch.tensor([41])}], 0, 1)
    assert isinstance(error, StorageError)


def test_a_cache_larger_than_free_device_memory_is_refused_with_the_sum(
    tmp_path: Path, make: Make, device: Device
) -> None:
    table = write_raw_table(tmp_path, make_rows(400, 100), shards=2)
    lines = device.memory_info()[0] // 4096 + 1
    with pytest.raises(MemoryBudgetError, match=r"lines .* \+ page tables .* free") as caught:
        make(table, lines)
    assert f"{lines * 4096 + 8 * table.page_count + 8 * lines} bytes" in str(caught.value)


def test_a_closed_cache_returns_its_memory(tmp_path: Path) -> None:
    table = write_raw_table(tmp_path, make_rows(400, 100), shards=2)
    device, ids = EmulatedDevice(), {table.name: torch.arange(100)}
    device.empty(123_456, torch.uint8)  # which torch keeps, for whoever uses torch
    with Make(device, staging_bytes=32 * 4096) as make:
        cache = make(table, 12)
        list(run(cache, [ids] * 3, 2, 2))
        lines_bytes, free = cache.memory()["lines"], device.memory.unreserved_bytes
        cache.close()
        device.memory.collect()
        assert device.memory.unreserved_bytes == free + lines_bytes > free, "lines go back to the driver"
        assert device.memory.kept_bytes > 123_456, "what torch has cached stays with torch"
        for call in (lambda: cache.enter(0, ids), lambda: cache.read_through(ids)):
            with pytest.raises(RuntimeError, match="this cache is closed"):
                call()
