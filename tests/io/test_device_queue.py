"""DeviceQueue: kernels post, the service reads with a real engine, every page and every error comes back.

The kernels run on the emulator, and on a GPU where there is one. The service thread alone, on a controller
that loses and holds back completions, is tested in tests/native.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import ended
from engines import URING
from raw_table import RawTable, write_raw_table

from gids import _core
from gids.cuda.device import Device, Stream
from gids.io import Engine, open_engine
from gids.io.device import DeviceQueue, QueueTable, Round, requests_of

SLOT = 4096
both_waits = pytest.mark.parametrize("wait", ["stream", "warp"])


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
    threads = 4 if kind == "threads" else 0
    try:
        engine = open_engine(paths, kind, depth=depth, threads=threads)
    except OSError:
        engine = open_engine(paths, kind, depth=depth, threads=threads, direct=False)
    with engine:
        yield engine


def slow_down(engine: Engine) -> None:
    """Make each read take almost a millisecond: it searches the faults of other reads."""
    engine.inject_faults([(0, 1 << 40, errno.EIO, 1)] * 200_000)


@functools.cache  # never freed, as kernels may read it at any time
def count_of(device: Device, count: int) -> torch.Tensor:
    return torch.tensor([count], dtype=torch.int64, device=device.torch_device)


class Setup:
    """A device, the tables, random numbers, and queues and engines that are closed at the end."""

    def __init__(self, device: Device, tables: Tables, seed: str, opened: contextlib.ExitStack) -> None:
        self.device, self.tables, self._opened = device, tables, opened
        self.rng = np.random.default_rng(zlib.crc32(seed.encode()))

    def engine(self, depth: int = 64, paths: list[Path] | None = None) -> Engine:
        return self._opened.enter_context(open_files(paths or self.tables.paths, depth=depth))

    def queue(
        self,
        slots: int = 256,
        engine: Engine | None = None,
        tables: list[QueueTable] | None = None,
        **more: Any,
    ) -> DeviceQueue:
        """Of both tables. engine: None opens one for it."""
        tables = self.tables.queue_tables() if tables is None else tables
        queue = DeviceQueue(
            self.device, engine or self.engine(), tables, **{"staging_bytes": slots * SLOT} | more
        )
        return self._opened.enter_context(queue)

    def requests(self, count: int) -> torch.Tensor:
        return self.tables.requests(self.rng, count).to(self.device.torch_device)

    def count(self, count: int) -> torch.Tensor:
        return count_of(self.device, count)

    def blank(self, rows: int, nbytes: int = SLOT) -> tuple[torch.Tensor, torch.Tensor]:
        """(to, errors): rows that are not written hold 170, errors -1."""
        to = torch.full((rows, nbytes), 170, dtype=torch.uint8, device=self.device.torch_device)
        return to, torch.full((rows,), -1, dtype=torch.int32, device=self.device.torch_device)

    def new_stream(self) -> Stream:
        """After the work on the current one."""
        stream = self.device.new_stream()
        stream.wait_stream(self.device.current_stream())
        return stream

    def read(
        self, queue: DeviceQueue, requests: torch.Tensor, count: int | None = None, rows: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(pages, errors) of read_pages(). Pages without an error are right; rows with one are untouched."""
        to, errors = self.blank(len(requests) if rows is None else rows)
        on_device = requests.to(self.device.torch_device)
        stream = self.new_stream()
        count = len(requests) if count is None else count
        queue.read_pages(stream, on_device, self.count(count), 0, to, errors)
        stream.synchronize()
        self.check(requests, to[:count], errors[:count])
        return to.cpu().numpy(), errors.cpu().numpy()

    def check(self, requests: torch.Tensor, to: torch.Tensor, errors: torch.Tensor) -> None:
        rows = zip(requests.tolist(), to.cpu().numpy(), errors.tolist(), strict=False)
        for request, row, error in rows:
            if error:
                assert (row == 170).all()
                continue
            page = self.tables.pages[request >> 48][request & (1 << 48) - 1]
            assert np.array_equal(row[: len(page)], page), f"request {request:#x}"


@pytest.fixture
def setup(device: Device, tables: Tables, request: pytest.FixtureRequest) -> Iterator[Setup]:
    with contextlib.ExitStack() as opened:
        yield Setup(device, tables, request.node.name, opened)


@both_waits
@pytest.mark.parametrize("pairs", [1, 3])
def test_every_page_comes_back(setup: Setup, engine: Engine, wait: str, pairs: int) -> None:
    everything = [requests_of(i, torch.arange(t.page_count)) for i, t in enumerate(setup.tables.raw)]
    requests = torch.cat(everything)[torch.from_numpy(setup.rng.permutation(301 + 77))]
    queue = setup.queue(192, engine, pairs=pairs, wait=wait)
    assert (queue.slot_bytes, queue.depth) == (SLOT, {1: 128, 3: 64}[pairs])
    _, errors = setup.read(queue, requests)
    assert not errors.any()
    stats = queue.stats()
    assert stats["taken"] == len(requests)
    assert stats["failed"] == stats["late"] == stats["timed_out"] == stats["uncollected"] == 0


@pytest.mark.few(2)
@both_waits
@pytest.mark.parametrize("slots", [4, 8])
def test_tiny_rings_go_round_many_times(setup: Setup, engine: Engine, wait: str, slots: int) -> None:
    queue = setup.queue(slots, engine, rounds_max=4, wait=wait)
    assert queue.depth == slots
    assert queue.round_max == slots // 4 if wait == "stream" else queue.depth
    _, errors = setup.read(queue, setup.requests(100))
    assert not errors.any()


@pytest.mark.few(5)
@pytest.mark.parametrize("pairs", [1, 2, 3])
@pytest.mark.parametrize("rounds_max", [1, 2, 5, 8])
def test_rounds_of_any_size_are_posted_ahead_and_collected_in_order(
    setup: Setup, rounds_max: int, pairs: int
) -> None:
    """Random posts and collections against a model; counts below, at and above round_max, and zero."""
    rng, device = setup.rng, setup.device
    streams = [device.new_stream() for _ in range(3)]
    posted: list[tuple[Round, torch.Tensor, int, int]] = []
    seen = 0
    queue = setup.queue(64 * pairs, rounds_max=rounds_max, pairs=pairs)
    assert queue.round_max == 64 // -(-rounds_max // pairs) or queue.round_max & (queue.round_max - 1)

    def any_stream() -> Stream:
        stream = streams[rng.integers(3)]
        stream.wait_stream(device.current_stream())
        return stream

    def finish() -> None:
        nonlocal seen
        round, requests, count, first = posted.pop(0)
        expected = min(max(count - first, 0), queue.round_max)
        to, errors = setup.blank(expected + int(rng.integers(0, 3)))
        on = any_stream()
        queue.wait(on, round)
        queue.collect(on, round, setup.count(count), first, to, errors)
        queue.collected(round)
        on.synchronize()
        assert (errors[expected:] == -1).all()
        assert (errors[:expected] == 0).all()
        setup.check(requests[first : first + expected], to, errors)
        seen += expected

    for _ in range(40):
        if len(posted) == rounds_max or (posted and rng.random() < 0.4):
            finish()
            continue
        count = int(rng.choice([0, 1, queue.round_max - 1, queue.round_max, queue.round_max + 1, 150]))
        first = int(rng.choice([0, 0, 1, count, count + 3]))
        requests = setup.requests(max(count, 1))
        device.current_stream().synchronize()
        posted.append((queue.post(any_stream(), requests, setup.count(count), first), requests, count, first))
    while posted:
        finish()
    assert queue.stats()["taken"] == seen


def test_a_post_beyond_rounds_max_is_refused_until_the_oldest_is_collected(setup: Setup) -> None:
    stream, queue = setup.device.current_stream(), setup.queue(rounds_max=3)
    requests, count = setup.requests(16), setup.count(16)
    rounds = [queue.post(stream, requests, count, 0) for _ in range(queue.room)]
    assert (len(rounds), queue.room) == (3, 0)
    refused = "rounds_max=3 rounds are posted and not collected"
    for post in (
        lambda: queue.post(stream, requests, count, 0),
        lambda: queue.read_pages(stream, requests, count, 0, *setup.blank(3)),
    ):
        with pytest.raises(RuntimeError, match=refused):
            post()
    with pytest.raises(RuntimeError, match=r"call wait\(\) before collected"):
        queue.collected(rounds[1])
    with pytest.raises(RuntimeError, match=r"call collect\(\) after wait\(\) and before collected\(\)"):
        queue.collect(stream, rounds[1], count, 0, *setup.blank(3))
    for i in (1, 2):  # collecting later ones does not help
        queue.wait(stream, rounds[i])
        queue.collected(rounds[i])
        with pytest.raises(RuntimeError, match=refused):
            queue.post(stream, requests, count, 0)
    queue.wait(stream, rounds[0])
    queue.collected(rounds[0])
    queue.collected(rounds[0])
    with pytest.raises(RuntimeError, match="already collected"):
        queue.wait(stream, rounds[0])
    again = queue.post(stream, requests, count, 0)
    assert (again.number, queue.stats()["uncollected"]) == (3, 1)
    with pytest.raises(ValueError, match="belongs to another queue"):
        setup.queue().wait(stream, again)


def test_without_a_waiting_stream_a_kernel_polls(
    setup: Setup, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.device, "wait_value", lambda stream, address, value: False)
    grids = launched(setup.device, monkeypatch)
    _, errors = setup.read(setup.queue(64, engine, pairs=2), setup.requests(100))
    assert not errors.any()
    kernels = [kernel for kernel, *_ in grids]
    assert kernels.count("gids_await_round") == kernels.count("gids_post_round") == -(-100 // 16)


def launched(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Kernel, blocks and threads of each launch from now on."""
    grids: list[tuple[str, int, int]] = []
    launch = device.launch

    def record(stream: Stream, unit: str, kernel: str, blocks: int, threads: int, *args: Any) -> None:
        grids.append((kernel, blocks, threads))
        launch(stream, unit, kernel, blocks, threads, *args)

    monkeypatch.setattr(device, "launch", record)
    return grids


@both_waits
def test_fewer_requests_than_rows_leave_the_rest_untouched(setup: Setup, wait: str) -> None:
    requests, queue = setup.requests(50), setup.queue(64, wait=wait)
    for count, rows in [(0, 50), (17, 50), (50, 33), (50, 0)]:
        _, errors = setup.read(queue, requests, count, rows)
        got = min(count, rows)
        assert (errors[:got] == 0).all()
        assert (errors[got:] == -1).all()
    assert queue.stats()["taken"] == 17 + 33


@both_waits
@pytest.mark.parametrize("page_bytes", [16, 520, 4096, 12288])
def test_pages_of_any_length_land_at_any_address(
    setup: Setup, tmp_path: Path, wait: str, page_bytes: int
) -> None:
    content = setup.rng.integers(0, 256, (2, 30, page_bytes), dtype=np.uint8)
    paths = [tmp_path / f"{i}.bin" for i in range(2)]
    for path, written in zip(paths, content, strict=True):
        path.write_bytes(written.tobytes())
    pages = torch.from_numpy(setup.rng.permutation(60))
    requests = requests_of(0, pages).to(setup.device.torch_device)
    queue = setup.queue(64, setup.engine(paths=paths), [QueueTable(60, 0, 2, page_bytes)], wait=wait)
    for shift, nbytes in [(0, page_bytes), (1, page_bytes), (3, 13), (16, 16), (0, 0)]:
        flat = setup.blank(1, shift + 60 * nbytes)[0].view(-1)
        to, errors = flat[shift:].view(60, nbytes), setup.blank(60, 0)[1]
        stream = setup.new_stream()
        queue.read_pages(stream, requests, setup.count(60), 0, to, errors)
        stream.synchronize()
        assert not errors.any()
        assert np.array_equal(to.cpu().numpy(), content[pages % 2, pages // 2, :nbytes])
        assert (flat[:shift] == 170).all()


@both_waits
def test_injected_faults_belong_to_their_own_requests(setup: Setup, engine: Engine, wait: str) -> None:
    rng = setup.rng
    bad = rng.permutation(301)[:20].tolist()
    codes = [(errno.EIO, errno.EINTR, errno.ENOMEM)[i % 3] for i in range(20)]
    engine.inject_faults(
        (page % 3, page // 3 * 4096 + int(rng.integers(4096)), code, 1)
        for page, code in zip(bad, codes, strict=True)
    )
    requests = requests_of(0, torch.from_numpy(rng.permutation(301)))
    queue = setup.queue(64, engine, wait=wait)
    _, errors = setup.read(queue, requests)
    # An interrupted read is retried.
    expected = {page: code for page, code in zip(bad, codes, strict=True) if code != errno.EINTR}
    assert errors.tolist() == [expected.get(request, 0) for request in requests.tolist()]
    _, errors = setup.read(queue, requests)
    assert not errors.any(), "the queue continues"


@both_waits
def test_wrong_requests_and_truncated_files_get_their_own_errors(
    setup: Setup, tmp_path: Path, wait: str
) -> None:
    path, pages = tmp_path / "short.bin", setup.tables.pages[0]
    path.write_bytes(pages[:10].tobytes()[: 6 * SLOT + 100])
    requests = torch.cat([requests_of(0, torch.arange(12)), requests_of(1, torch.arange(1))])
    queue = setup.queue(8, setup.engine(paths=[path]), [QueueTable(10, 0, 1, SLOT)], wait=wait)
    _, errors = setup.read(queue, requests)
    assert errors.tolist() == [0] * 6 + [errno.ENODATA] * 4 + [errno.EINVAL] * 3


@both_waits
def test_a_page_with_a_wrong_checksum_is_an_error(setup: Setup, engine: Engine, wait: str) -> None:
    sums = [s.copy() for s in setup.tables.sums]
    wrong = {(0, 7), (0, 300), (1, 20)}
    for table, page in wrong:
        sums[table][page] ^= np.uint32(1 << int(setup.rng.integers(32)))
    requests = torch.cat([requests_of(i, torch.arange(len(s))) for i, s in enumerate(sums)])
    queue = setup.queue(64, engine, setup.tables.queue_tables(sums), wait=wait)
    del sums
    gc.collect()
    _, errors = setup.read(queue, requests)
    assert queue.stats()["corrupt"] == queue.stats()["failed"] == 3
    failed = {(r >> 48, r & (1 << 48) - 1) for r, e in zip(requests.tolist(), errors, strict=True) if e}
    assert failed == wrong
    assert set(errors.tolist()) == {0, errno.EBADMSG}


@pytest.mark.slow
@both_waits
def test_requests_that_take_too_long_time_out_and_the_queue_goes_on(setup: Setup, wait: str) -> None:
    """With one reader and a time-out of a millisecond, reads at the end of the queue come late."""
    requests = requests_of(0, torch.arange(301).repeat(20))
    queue = setup.queue(8192, setup.engine(1), wait=wait, rounds_max=1, timeout_s=0.001, spin_limit_s=600)
    for _ in range(3):
        _, errors = setup.read(queue, requests)
        assert set(errors.tolist()) <= {0, errno.ETIMEDOUT}
    stats = queue.stats()
    if wait == "stream":  # a round is taken as a whole; with `warp`, few pages are in flight at once
        assert stats["timed_out"] > 0
    assert stats["timed_out"] <= stats["failed"]


def test_closing_with_requests_in_flight_releases_the_streams_that_wait(setup: Setup) -> None:
    """With one slow reader of one page at a time, closing comes long before the end."""
    requests, count, stream = setup.requests(8192), setup.count(8192), setup.new_stream()
    slow_down(engine := setup.engine(depth=1))
    queue = setup.queue(8192, engine, rounds_max=2)
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


def test_closing_waits_for_a_thread_that_is_reading_a_round(setup: Setup) -> None:
    requests, count, stream = setup.requests(40), setup.count(40), setup.device.current_stream()
    (to, errors), queue = setup.blank(40), setup.queue()
    round = queue.post(stream, requests, count, 0)
    closes = threading.Thread(target=queue.close)
    with queue.reading(stream, round):
        stream.synchronize()  # the pages have come: closing cancels requests that were not issued
        closes.start()
        closes.join(0.05)
        assert queue._end.alive, "the pages are mapped"
        queue.collect(stream, round, count, 0, to, errors)
    closes.join()
    stream.synchronize()
    assert not queue._end.alive
    assert queue.stats()["uncollected"] == 0
    assert not errors.any()
    setup.check(requests, to, errors)


def test_an_engine_may_be_closed_first(setup: Setup) -> None:
    queue = setup.queue(64, engine := setup.engine())
    engine.close()
    _, errors = setup.read(queue, setup.requests(20))
    assert (errors == errno.ECANCELED).all()
    queue.close()


@both_waits
def test_a_kernel_that_gives_up_breaks_the_queue(
    setup: Setup, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.device, "wait_value", lambda stream, address, value: False)
    requests = setup.requests(200)
    slow_down(engine := setup.engine(depth=1))
    queue = setup.queue(256, engine, rounds_max=1, wait=wait, spin_limit_s=0.0001)
    _, errors = setup.read(queue, requests)
    assert set(errors.tolist()) <= {0, errno.ETIMEDOUT, errno.ECANCELED, errno.EAGAIN}
    assert errors.any()
    with pytest.raises(RuntimeError, match=r"broken.*make a new one"):
        setup.read(queue, requests)
    _, errors = setup.read(setup.queue(256, engine, wait=wait), requests)
    assert not errors.any()


def test_a_launch_that_fails_ends_the_queue(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = setup.queue(64)
    with monkeypatch.context() as patch:
        patch.setattr(setup.device, "launch", lambda *args: (_ for _ in ()).throw(ValueError("no grid")))
        with pytest.raises(ValueError, match="no grid"):
            setup.read(queue, setup.requests(4))
    with pytest.raises(RuntimeError, match="closed"):
        setup.read(queue, setup.requests(4))


@pytest.mark.slow
def test_a_forked_child_is_refused_and_ends(setup: Setup) -> None:
    queue = setup.queue(64)

    def use() -> None:
        with pytest.raises(RuntimeError, match="before a fork"):
            setup.read(queue, setup.requests(4))
        queue.close()

    ended(use)
    _, errors = setup.read(queue, setup.requests(4))
    assert not errors.any()


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("2 pairs of at least 2 pages of 4096 B need 16384", {"staging_bytes": 9000, "pairs": 2}),
        ("1 pairs of at least 8 pages of 4096 B need 32768", {"staging_bytes": 28_672, "rounds_max": 5}),
        ("the engine has 4", {"tables": [QueueTable(8, 3, 2, 4096)]}),
        ("reads of 1048576 B at most", {"tables": [QueueTable(8, 0, 1, 1 << 21)], "slots": 8192}),
        ("8 pages and 3 checksums", {"tables": [QueueTable(8, 0, 1, 512, np.zeros(3, np.uint32))]}),
        ("table 0 has no files", {"tables": [QueueTable(1, 0, 0, 512)]}),
    ],
)
def test_arguments_that_do_not_fit_are_refused(setup: Setup, text: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        setup.queue(**options)


def test_rounds_need_a_queue_whose_streams_wait(setup: Setup) -> None:
    with pytest.raises(RuntimeError, match="needs a queue with wait='stream'"):
        setup.queue(64, wait="warp").post(setup.device.current_stream(), setup.requests(4), setup.count(4), 0)
