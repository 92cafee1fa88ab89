"""DeviceQueue: kernels post, the service reads with a real engine, every page and every error comes back.

The kernels run on the emulator, and on a GPU where there is one. The service thread alone, on a controller
that loses and holds back completions, is tested in tests/native.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from engines import URING
from raw_table import RawTable, write_raw_table

from gids import _core
from gids.cuda.device import Device, Stream
from gids.io import Engine, open_engine
from gids.io.device import DeviceQueue, QueueTable, Round, requests_of

WAITS = ["stream", "warp"]
SLOT = 4096


class Tables:
    """Two tables: pages of 4096 B over three shards, and of 512 B in one; and the contents of each page."""

    def __init__(self, folder: Path) -> None:
        generator = torch.Generator().manual_seed(5)
        draw = [torch.randint(256, (n, 512), generator=generator, dtype=torch.uint8) for n in (8 * 301, 77)]
        self.raw: list[RawTable] = [
            write_raw_table(folder, draw[0], page_bytes=4096, shards=3, name="long"),
            write_raw_table(folder, draw[1], page_bytes=512, name="short"),
        ]
        self.paths = [path for table in self.raw for path in table.shard_paths]
        self.pages = [self._pages(table) for table in self.raw]
        self.sums = [_core.crc32c(pages) for pages in self.pages]

    @staticmethod
    def _pages(table: RawTable) -> np.ndarray:
        pages = np.empty((table.page_count, table.page_bytes), np.uint8)
        for page in range(table.page_count):
            path, offset = table.shard_of(page)
            pages[page] = np.fromfile(path, np.uint8, table.page_bytes, offset=offset)
        return pages

    def queue_tables(self, sums: list[np.ndarray] | None = None) -> list[QueueTable]:
        first, tables = 0, []
        for i, table in enumerate(self.raw):
            shards = len(table.shard_paths)
            tables.append(
                QueueTable(table.page_count, first, shards, table.page_bytes, sums[i] if sums else None)
            )
            first += shards
        return tables

    def requests(self, rng: np.random.Generator, count: int) -> torch.Tensor:
        """Random requests to both tables, with repeats."""
        table = rng.integers(0, 4, count) == 0
        pages = np.where(table, rng.integers(0, 77, count), rng.integers(0, 301, count))
        return torch.from_numpy(pages | table.astype(np.int64) << 48)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return Tables(tmp_path_factory.mktemp("queue"))


@pytest.fixture(params=[URING, "threads"])
def engine(request: pytest.FixtureRequest, tables: Tables) -> Iterator[Engine]:
    with open_files(tables.paths, request.param) as engine:
        yield engine


@contextlib.contextmanager
def open_files(paths: list[Path], kind: str = "threads", depth: int = 64) -> Iterator[Engine]:
    """Opened for direct reads, or buffered if the file system has no direct I/O."""
    try:
        engine = open_engine(paths, kind, depth=depth, threads=4 if kind == "threads" else 0)
    except OSError:
        engine = open_engine(paths, kind, depth=depth, threads=4 if kind == "threads" else 0, direct=False)
    with engine:
        yield engine


OpenQueue = Callable[..., DeviceQueue]


@pytest.fixture
def open_queue(device: Device, tables: Tables) -> Iterator[OpenQueue]:
    """open_queue(slots, engine, **options): a queue for both tables. engine: None opens one for it."""
    with contextlib.ExitStack() as opened:

        def make(
            slots: int, engine: Engine | None = None, sums: list[np.ndarray] | None = None, **options: Any
        ) -> DeviceQueue:
            engine = opened.enter_context(open_files(tables.paths)) if engine is None else engine
            queue = DeviceQueue(
                device, engine, tables.queue_tables(sums), staging_bytes=slots * SLOT, **options
            )
            return opened.enter_context(queue)

        yield make


def slow_down(engine: Engine) -> None:
    """Make each read take almost a millisecond: it searches the faults of other reads."""
    engine.inject_faults([(0, 1 << 40, errno.EIO, 1)] * 200_000)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    seed = zlib.crc32(request.node.name.encode())
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@functools.cache  # never freed, as kernels may read it at any time
def count_of(device: Device, count: int) -> torch.Tensor:
    return torch.tensor([count], dtype=torch.int64, device=device.torch_device)


def read(
    device: Device,
    queue: DeviceQueue,
    requests: torch.Tensor,
    count: int | None = None,
    rows: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(pages, errors) of read_pages(); rows that were not written hold 170, errors -1."""
    rows = len(requests) if rows is None else rows
    to = torch.full((rows, SLOT), 170, dtype=torch.uint8, device=device.torch_device)
    errors = torch.full((rows,), -1, dtype=torch.int32, device=device.torch_device)
    on_device = requests.to(device.torch_device)
    on_count = count_of(device, len(requests) if count is None else count)
    stream = device.new_stream()
    stream.wait_stream(device.current_stream())
    queue.read_pages(stream, on_device, on_count, 0, to, errors)
    stream.synchronize()
    return to.cpu().numpy(), errors.cpu().numpy()


def check_pages(tables: Tables, requests: torch.Tensor, to: np.ndarray, errors: np.ndarray) -> None:
    """Pages without an error are right; rows with one are untouched."""
    for request, row, error in zip(requests.tolist(), to, errors, strict=True):
        if error:
            assert (row == 170).all()
            continue
        page = tables.pages[request >> 48][request & (1 << 48) - 1]
        assert np.array_equal(row[: len(page)], page), f"request {request:#x}"


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("pairs", [1, 3])
def test_every_page_comes_back(
    open_queue: OpenQueue,
    device: Device,
    engine: Engine,
    tables: Tables,
    rng: np.random.Generator,
    wait: str,
    pairs: int,
) -> None:
    everything = [requests_of(i, torch.arange(t.page_count)) for i, t in enumerate(tables.raw)]
    requests = torch.cat(everything)[torch.from_numpy(rng.permutation(301 + 77))]
    queue = open_queue(192, engine, pairs=pairs, wait=wait)
    assert queue.slot_bytes == SLOT
    assert queue.depth == {1: 128, 3: 64}[pairs]
    to, errors = read(device, queue, requests)
    assert not errors.any()
    check_pages(tables, requests, to, errors)
    stats = queue.stats()
    assert stats["taken"] == len(requests)
    assert stats["failed"] == stats["late"] == stats["timed_out"] == stats["uncollected"] == 0


@pytest.mark.few(3)
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("slots", [4, 8])
def test_tiny_rings_go_round_many_times(
    open_queue: OpenQueue,
    device: Device,
    engine: Engine,
    tables: Tables,
    rng: np.random.Generator,
    wait: str,
    slots: int,
) -> None:
    requests = tables.requests(rng, 100)
    queue = open_queue(slots, engine, rounds_max=4, wait=wait)
    assert queue.depth == slots
    assert queue.round_max == slots // 4 if wait == "stream" else queue.depth
    to, errors = read(device, queue, requests)
    assert not errors.any()
    check_pages(tables, requests, to, errors)


@pytest.mark.parametrize("pairs", [1, 2, 3])
@pytest.mark.parametrize("rounds_max", [1, 2, 5, 8])
def test_rounds_of_any_size_are_posted_ahead_and_collected_in_order(
    open_queue: OpenQueue,
    device: Device,
    tables: Tables,
    rng: np.random.Generator,
    rounds_max: int,
    pairs: int,
) -> None:
    """Random posts and collections against a model; counts below, at and above round_max, and zero."""
    streams = [device.new_stream() for _ in range(3)]
    posted: list[tuple[Round, torch.Tensor, int, int]] = []
    seen = 0
    queue = open_queue(64 * pairs, rounds_max=rounds_max, pairs=pairs)
    assert queue.round_max == 64 // -(-rounds_max // pairs) or queue.round_max & (queue.round_max - 1)

    def finish() -> None:
        nonlocal seen
        round, requests, count, first = posted.pop(0)
        expected = min(max(count - first, 0), queue.round_max)
        rows = expected + int(rng.integers(0, 3))
        to = torch.full((rows, SLOT), 170, dtype=torch.uint8, device=device.torch_device)
        errors = torch.full((rows,), -1, dtype=torch.int32, device=device.torch_device)
        on = streams[rng.integers(3)]
        on.wait_stream(device.current_stream())
        queue.wait(on, round)
        queue.collect(on, round, count_of(device, count), first, to, errors)
        queue.collected(round)
        on.synchronize()
        assert (errors[expected:] == -1).all()
        assert (errors[:expected] == 0).all()
        wanted = requests[first : first + expected]
        check_pages(tables, wanted.cpu(), to[:expected].cpu().numpy(), errors[:expected].cpu().numpy())
        seen += expected

    for _ in range(40):
        if len(posted) == rounds_max or (posted and rng.random() < 0.4):
            finish()
            continue
        count = int(rng.choice([0, 1, queue.round_max - 1, queue.round_max, queue.round_max + 1, 150]))
        first = int(rng.choice([0, 0, 1, count, count + 3]))
        requests = tables.requests(rng, max(count, 1)).to(device.torch_device)
        on = streams[rng.integers(3)]
        on.wait_stream(device.current_stream())
        device.current_stream().synchronize()
        posted.append((queue.post(on, requests, count_of(device, count), first), requests, count, first))
    while posted:
        finish()
    assert queue.stats()["taken"] == seen


def test_a_post_beyond_rounds_max_is_refused_until_the_oldest_is_collected(
    device: Device, tables: Tables, rng: np.random.Generator
) -> None:
    stream = device.current_stream()
    requests = tables.requests(rng, 16).to(device.torch_device)
    count = count_of(device, 16)
    with (
        open_files(tables.paths) as engine,
        DeviceQueue(device, engine, tables.queue_tables(), staging_bytes=1 << 20, rounds_max=3) as queue,
    ):
        rounds = [queue.post(stream, requests, count, 0) for _ in range(queue.room)]
        assert (len(rounds), queue.room) == (3, 0)
        with pytest.raises(RuntimeError, match="rounds_max=3 rounds are posted and not collected"):
            queue.post(stream, requests, count, 0)
        with pytest.raises(RuntimeError, match=r"call wait\(\) before collected"):
            queue.collected(rounds[1])
        for i in (1, 2):  # collecting later ones does not help
            queue.wait(stream, rounds[i])
            queue.collected(rounds[i])
            with pytest.raises(RuntimeError, match="rounds_max=3 rounds"):
                queue.post(stream, requests, count, 0)
        queue.wait(stream, rounds[0])
        queue.collected(rounds[0])
        queue.collected(rounds[0])
        with pytest.raises(RuntimeError, match="already collected"):
            queue.wait(stream, rounds[0])
        again = queue.post(stream, requests, count, 0)
        assert (again.number, queue.stats()["uncollected"]) == (3, 1)
        with DeviceQueue(device, engine, tables.queue_tables(), staging_bytes=1 << 20) as other:
            with pytest.raises(ValueError, match="belongs to another queue"):
                other.wait(stream, again)


def test_without_a_waiting_stream_a_kernel_polls(
    open_queue: OpenQueue,
    device: Device,
    engine: Engine,
    tables: Tables,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "wait_value", lambda stream, address, value: False)
    launched: list[str] = []
    launch = device.launch
    monkeypatch.setattr(
        device,
        "launch",
        lambda stream, unit, kernel, *rest: launched.append(kernel) or launch(stream, unit, kernel, *rest),
    )
    requests = tables.requests(rng, 100)
    queue = open_queue(64, engine, pairs=2)
    to, errors = read(device, queue, requests)
    assert not errors.any()
    check_pages(tables, requests, to, errors)
    assert launched.count("gids_await_round") == launched.count("gids_post_round") == -(-100 // 16)


@pytest.mark.parametrize("wait", WAITS)
def test_fewer_requests_than_rows_leave_the_rest_untouched(
    open_queue: OpenQueue, device: Device, tables: Tables, rng: np.random.Generator, wait: str
) -> None:
    requests = tables.requests(rng, 50)
    queue = open_queue(64, wait=wait)
    for count, rows in [(0, 50), (17, 50), (50, 33), (50, 0)]:
        to, errors = read(device, queue, requests, count, rows)
        got = min(count, rows)
        assert (errors[:got] == 0).all()
        assert (errors[got:] == -1).all()
        check_pages(tables, requests[:got], to[:got], errors[:got])
    assert queue.stats()["taken"] == 17 + 33


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("page_bytes", [16, 520, 4096, 12288])
def test_pages_of_any_length_land_at_any_address(
    device: Device, tmp_path: Path, rng: np.random.Generator, wait: str, page_bytes: int
) -> None:
    content = rng.integers(0, 256, (2, 30, page_bytes), dtype=np.uint8)
    paths = [tmp_path / f"{i}.bin" for i in range(2)]
    for path, pages in zip(paths, content, strict=True):
        path.write_bytes(pages.tobytes())
    pages = torch.from_numpy(rng.permutation(60))
    with (
        open_files(paths) as engine,
        DeviceQueue(
            device, engine, [QueueTable(60, 0, 2, page_bytes)], staging_bytes=1 << 18, wait=wait
        ) as queue,
    ):
        for shift, nbytes in [(0, page_bytes), (1, page_bytes), (3, 13), (16, 16), (0, 0)]:
            flat = torch.full((shift + 60 * nbytes,), 170, dtype=torch.uint8, device=device.torch_device)
            to, errors = flat[shift:].view(60, nbytes), torch.full_like(pages, -1, dtype=torch.int32)
            errors, requests = errors.to(device.torch_device), requests_of(0, pages).to(device.torch_device)
            stream = device.new_stream()
            stream.wait_stream(device.current_stream())
            queue.read_pages(stream, requests, count_of(device, 60), 0, to, errors)
            stream.synchronize()
            assert not errors.any()
            wanted = content[pages % 2, pages // 2, :nbytes]
            assert np.array_equal(to.cpu().numpy(), wanted)
            assert (flat[:shift] == 170).all()


@pytest.mark.parametrize("wait", WAITS)
def test_injected_faults_belong_to_their_own_requests(
    open_queue: OpenQueue, device: Device, engine: Engine, tables: Tables, rng: np.random.Generator, wait: str
) -> None:
    bad = rng.permutation(301)[:20]
    faults = []
    for i, page in enumerate(bad.tolist()):
        code = [errno.EIO, errno.EINTR, errno.ENOMEM][i % 3]
        faults.append((page % 3, page // 3 * 4096 + int(rng.integers(4096)), code, 1))
    engine.inject_faults(faults)
    requests = requests_of(0, torch.from_numpy(rng.permutation(301)))
    queue = open_queue(64, engine, wait=wait)
    to, errors = read(device, queue, requests)
    expected = dict.fromkeys(range(301), 0)
    expected |= {p: code for p, (_, _, code, _) in zip(bad.tolist(), faults, strict=True)}
    for request, error in zip(requests.tolist(), errors.tolist(), strict=True):
        wanted = expected[request]
        assert error == (0 if wanted == errno.EINTR else wanted)  # an interrupted read is retried
    check_pages(tables, requests, to, errors)
    to, errors = read(device, queue, requests)
    assert not errors.any(), "the queue continues"
    check_pages(tables, requests, to, errors)


@pytest.mark.parametrize("wait", WAITS)
def test_wrong_requests_and_truncated_files_get_their_own_errors(
    device: Device, tmp_path: Path, wait: str
) -> None:
    path = tmp_path / "short.bin"
    content = np.random.default_rng(3).integers(0, 256, 10 * SLOT, dtype=np.uint8)
    path.write_bytes(content.tobytes()[: 6 * SLOT + 100])
    requests = torch.cat([requests_of(0, torch.arange(12)), requests_of(1, torch.arange(1))])
    with (
        open_files([path]) as engine,
        DeviceQueue(device, engine, [QueueTable(10, 0, 1, SLOT)], staging_bytes=8 * SLOT, wait=wait) as queue,
    ):
        to, errors = read(device, queue, requests)
    assert errors.tolist() == [0] * 6 + [errno.ENODATA] * 4 + [errno.EINVAL] * 3
    assert np.array_equal(to[:6].reshape(-1), content[: 6 * SLOT])
    assert (to[6:] == 170).all()


@pytest.mark.parametrize("wait", WAITS)
def test_a_page_with_a_wrong_checksum_is_an_error(
    open_queue: OpenQueue, device: Device, engine: Engine, tables: Tables, rng: np.random.Generator, wait: str
) -> None:
    sums = [s.copy() for s in tables.sums]
    wrong = {(0, 7), (0, 300), (1, 20)}
    for table, page in wrong:
        sums[table][page] ^= np.uint32(1 << int(rng.integers(32)))
    requests = torch.cat([requests_of(i, torch.arange(t.page_count)) for i, t in enumerate(tables.raw)])
    queue = open_queue(64, engine, wait=wait, sums=sums)
    del sums
    gc.collect()
    to, errors = read(device, queue, requests)
    assert queue.stats()["corrupt"] == queue.stats()["failed"] == 3
    failed = {(r >> 48, r & (1 << 48) - 1) for r, e in zip(requests.tolist(), errors, strict=True) if e}
    assert failed == wrong
    assert set(errors.tolist()) == {0, errno.EBADMSG}
    check_pages(tables, requests, to, errors)


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_requests_that_take_too_long_time_out_and_the_queue_goes_on(
    open_queue: OpenQueue, device: Device, tables: Tables, wait: str
) -> None:
    """With one reader and a time-out of a millisecond, reads at the end of the queue come late."""
    requests = requests_of(0, torch.arange(301).repeat(20))
    with open_files(tables.paths, depth=1) as engine:
        queue = open_queue(8192, engine, wait=wait, rounds_max=1, timeout_s=0.001, spin_limit_s=600)
        for _ in range(3):
            to, errors = read(device, queue, requests)
            assert set(errors.tolist()) <= {0, errno.ETIMEDOUT}
            check_pages(tables, requests, to, errors)
        stats = queue.stats()
        if wait == "stream":  # a round is taken as a whole; with `warp`, few pages are in flight at once
            assert stats["timed_out"] > 0
        assert stats["timed_out"] <= stats["failed"]


def test_kernels_that_poll_take_a_quarter_of_the_multiprocessors(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = emulator.EmulatedDevice()
    device.sm_count = 132
    grids: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        device,
        "launch",
        lambda stream, unit, kernel, *grid_and_more: grids.append((kernel, *grid_and_more[:2])),
    )
    with (
        open_files(tables.paths) as engine,
        DeviceQueue(device, engine, tables.queue_tables(), staging_bytes=8192 * SLOT, wait="warp") as queue,
    ):
        for rows in (1, 33, 8192):
            requests, count = device.zeros(rows, torch.int64), device.zeros(1, torch.int64)
            to, errors = device.empty((rows, 16), torch.uint8), device.empty(rows, torch.int32)
            queue.read_pages(device.current_stream(), requests, count, 0, to, errors)
    assert grids == [("gids_read_pages", blocks, 1024) for blocks in (1, 2, 33)]


def test_a_kernel_that_collects_over_the_bus_takes_32_blocks(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = emulator.EmulatedDevice()
    device.sm_count = 132
    grids: dict[str, int] = {}
    launch = device.launch

    def record(stream: Stream, unit: str, kernel: str, blocks: int, *more: Any) -> None:
        grids[kernel] = blocks
        launch(stream, unit, kernel, blocks, *more)

    monkeypatch.setattr(device, "launch", record)
    with (
        open_files(tables.paths) as engine,
        DeviceQueue(device, engine, tables.queue_tables(), staging_bytes=8192 * SLOT) as queue,
    ):
        rows = queue.round_max
        requests, count = device.zeros(rows, torch.int64), device.zeros(1, torch.int64)
        to, errors = device.empty((rows, 16), torch.uint8), device.empty(rows, torch.int32)
        queue.read_pages(device.current_stream(), requests, count, 0, to, errors)
    assert rows > 32 * 8, "more pages than 32 blocks take at once"
    assert grids["gids_collect_round"] == 32


def test_closing_with_requests_in_flight_releases_the_streams_that_wait(
    device: Device, tables: Tables, rng: np.random.Generator
) -> None:
    """With one slow reader of one page at a time, closing comes long before the end."""
    requests = tables.requests(rng, 8192).to(device.torch_device)
    count = count_of(device, 8192)
    stream = device.new_stream()
    stream.wait_stream(device.current_stream())
    with open_files(tables.paths, depth=1) as engine:
        slow_down(engine)
        queue = DeviceQueue(device, engine, tables.queue_tables(), staging_bytes=8192 * SLOT, rounds_max=2)
        rounds = [queue.post(stream, requests, count, first) for first in (0, 4096)]
        waits = threading.Thread(target=lambda: queue.wait(stream, rounds[0]))
        waits.start()  # enqueues a wait; on the emulator it waits
        while queue.stats()["taken"] == 0:
            time.sleep(1e-4)
        queue.close()
        waits.join()
        queue.close()
        stats = queue.stats()
        assert 0 < stats["failed"] <= stats["taken"] <= 8192
        assert stats["timed_out"] == stats["rounds"] == 0
        for call in (lambda: queue.post(stream, requests, count, 0), lambda: queue.wait(stream, rounds[1])):
            with pytest.raises(RuntimeError, match="the request queue is closed"):
                call()


def test_closing_waits_for_a_thread_that_is_reading_a_round(
    device: Device, tables: Tables, rng: np.random.Generator
) -> None:
    requests, count, stream = tables.requests(rng, 40), count_of(device, 40), device.current_stream()
    to = torch.full((40, SLOT), 170, dtype=torch.uint8, device=device.torch_device)
    errors = torch.full((40,), -1, dtype=torch.int32, device=device.torch_device)
    with open_files(tables.paths) as engine:
        queue = DeviceQueue(device, engine, tables.queue_tables(), staging_bytes=256 * SLOT)
        round = queue.post(stream, requests.to(device.torch_device), count, 0)
        closes = threading.Thread(target=queue.close)
        with queue.reading(stream, round):
            closes.start()
            closes.join(0.05)
            assert queue._end.alive, "the pages are mapped"
            queue.collect(stream, round, count, 0, to, errors)
        closes.join()
        stream.synchronize()
        assert not queue._end.alive
        assert queue.stats()["uncollected"] == 0
    check_pages(tables, requests, to.cpu().numpy(), errors.cpu().numpy())


def test_garbage_collection_closes_a_queue(device: Device, tables: Tables, rng: np.random.Generator) -> None:
    with open_files(tables.paths) as engine:
        queue = DeviceQueue(device, engine, tables.queue_tables(), staging_bytes=64 * SLOT)
        end = queue._end
        round = queue.post(
            device.current_stream(), tables.requests(rng, 4).to(device.torch_device), count_of(device, 4), 0
        )
        assert round.number == 0
        del queue
        gc.collect()
        assert not end.alive


def test_an_engine_may_be_closed_first(device: Device, tables: Tables, rng: np.random.Generator) -> None:
    with open_files(tables.paths) as engine:
        queue = DeviceQueue(device, engine, tables.queue_tables(), staging_bytes=64 * SLOT)
    _, errors = read(device, queue, tables.requests(rng, 20))
    assert (errors == errno.ECANCELED).all()
    queue.close()


@pytest.mark.parametrize("wait", WAITS)
def test_a_kernel_that_gives_up_breaks_the_queue(
    open_queue: OpenQueue,
    device: Device,
    tables: Tables,
    rng: np.random.Generator,
    wait: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "wait_value", lambda stream, address, value: False)
    requests = tables.requests(rng, 200)
    with open_files(tables.paths, depth=1) as engine:
        slow_down(engine)
        queue = open_queue(256, engine, rounds_max=1, wait=wait, spin_limit_s=0.0001)
        to, errors = read(device, queue, requests)
        assert set(errors.tolist()) <= {0, errno.ETIMEDOUT, errno.ECANCELED, errno.EAGAIN}
        assert errors.any()
        check_pages(tables, requests, to, errors)
        with pytest.raises(RuntimeError, match=r"broken.*make a new one"):
            read(device, queue, requests)
        queue = open_queue(256, engine, wait=wait)
        to, errors = read(device, queue, requests)
        assert not errors.any()


def test_a_launch_that_fails_ends_the_queue(
    open_queue: OpenQueue,
    device: Device,
    tables: Tables,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = open_queue(64)
    with monkeypatch.context() as patch:
        patch.setattr(device, "launch", lambda *args: (_ for _ in ()).throw(ValueError("no grid")))
        with pytest.raises(ValueError, match="no grid"):
            read(device, queue, tables.requests(rng, 4))
    with pytest.raises(RuntimeError, match="closed"):
        read(device, queue, tables.requests(rng, 4))


FORKED = """
import os, sys
from pathlib import Path
from typing import Any
sys.path.insert(0, sys.argv[1])
import torch, emulator
from gids.io import open_engine
from gids.io.device import DeviceQueue, QueueTable, requests_of

emulator.folder = Path(sys.argv[2])
device = emulator.EmulatedDevice()
engine = open_engine([sys.argv[3]], "threads", direct=False)
queue = DeviceQueue(device, engine, [QueueTable(10, 0, 1, 4096)], staging_bytes=1 << 18)
stream, count = device.current_stream(), torch.tensor([10])
to, errors = torch.empty((10, 4096), dtype=torch.uint8), torch.full((10,), -1, dtype=torch.int32)
child = os.fork()
if child == 0:
    try:
        queue.read_pages(stream, requests_of(0, torch.arange(10)), count, 0, to, errors)
    except RuntimeError as error:
        assert "before a fork" in str(error), error
        queue.close()
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
queue.read_pages(stream, requests_of(0, torch.arange(10)), count, 0, to, errors)
assert not errors.any()
print("fine", len(device.mapped))
"""


@pytest.mark.slow
def test_a_forked_child_is_refused_and_ends(tmp_path: Path) -> None:
    """Runs in a separate process, whose end closes everything."""
    path = tmp_path / "file.bin"
    path.write_bytes(os.urandom(10 * 4096))
    built = emulator.folder or tmp_path
    command = [sys.executable, "-P", "-W", "ignore", "-c", FORKED, str(Path(__file__).parents[1]), str(built)]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "fine 1"


def test_arguments_that_do_not_fit_are_refused(device: Device, tables: Tables) -> None:
    with open_files(tables.paths) as engine:

        def make(given: list[QueueTable] | None = None, **options: object) -> DeviceQueue:
            chosen = tables.queue_tables() if given is None else given
            return DeviceQueue(device, engine, chosen, **options)  # type: ignore[arg-type]

        refused: list[tuple[str, Callable[[], DeviceQueue]]] = [
            ("must be 'stream' or 'warp'", lambda: make(wait="thread")),
            ("at least one table", lambda: make([])),
            (r"pairs must be .*got 0", lambda: make(pairs=0)),
            (r"rounds_max must be .*got 65", lambda: make(rounds_max=65)),
            (r"rounds_max must be .*got 0", lambda: make(rounds_max=0)),
            (r"timeout_s must be .*got 0", lambda: make(timeout_s=0)),
            ("2 pairs of at least 2 pages of 4096 B need 16384", lambda: make(staging_bytes=9000, pairs=2)),
            (r"staging_bytes must be .*got -1", lambda: make(staging_bytes=-1)),
            ("the engine has 4", lambda: make([QueueTable(8, 3, 2, 4096)])),
            ("reads of 1048576 B at most", lambda: make([QueueTable(8, 0, 1, 1 << 21)])),
            ("8 pages and 3 checksums", lambda: make([QueueTable(8, 0, 1, 512, np.zeros(3, np.uint32))])),
            ("table 0 has no files", lambda: make([QueueTable(1, 0, 0, 512)])),
        ]
        for text, call in refused:
            with pytest.raises(ValueError, match=text):
                call()

        with make(staging_bytes=64 * SLOT, wait="warp") as queue:
            with pytest.raises(RuntimeError, match="needs a queue with wait='stream'"):
                queue.post(
                    device.current_stream(),
                    tables.requests(np.random.default_rng(), 4),
                    count_of(device, 4),
                    0,
                )


def test_memory_is_reported_and_freed_when_unused(
    open_queue: OpenQueue, device: Device, tables: Tables
) -> None:
    with open_files(tables.paths) as engine:
        queue = open_queue(256, engine, pairs=2)
        memory = queue.memory()
        slots = 2 * queue.depth
        assert memory["staging"] - (1 << 20) - 16 * slots <= 2 * (2048 + 2 * 4096)
        assert memory["queue"] <= 8 * slots + 2 * 2048
        assert "128 slots" in repr(queue)


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_a_hundred_thousand_requests(
    device: Device, tables: Tables, rng: np.random.Generator, wait: str
) -> None:
    """Every request gets its own page once: compares the first bytes of all rows."""
    count, bytes = 100_000, 32
    requests = tables.requests(rng, count)
    to = torch.empty((count, bytes), dtype=torch.uint8, device=device.torch_device)
    errors = torch.full((count,), -1, dtype=torch.int32, device=device.torch_device)
    with (
        open_files(tables.paths, "mmap") as engine,
        DeviceQueue(
            device, engine, tables.queue_tables(), staging_bytes=4096 * SLOT, pairs=2, wait=wait
        ) as queue,
    ):
        on_device, on_count = requests.to(device.torch_device), count_of(device, count)
        stream = device.new_stream()
        stream.wait_stream(device.current_stream())
        step = count if wait == "stream" else 20_000  # the emulator limits the time of a launch
        for first in range(0, count, step):
            part = slice(first, first + step)
            queue.read_pages(stream, on_device, on_count, first, to[part], errors[part])
        stream.synchronize()
        assert queue.stats()["taken"] == count
    assert not errors.any()
    heads = [torch.from_numpy(pages[:, :bytes].copy()) for pages in tables.pages]
    table, page = requests >> 48, requests & (1 << 48) - 1
    wanted = torch.empty((count, bytes), dtype=torch.uint8)
    for i, head in enumerate(heads):
        wanted[table == i] = head[page[table == i]]
    assert torch.equal(to.cpu(), wanted)
