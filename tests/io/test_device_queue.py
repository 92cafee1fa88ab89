"""DeviceQueue: kernels post, the service reads with a real engine, every page and every error is copied.

The kernels run on the emulator, and on a GPU where there is one. The service thread alone, on a controller
that loses and holds back completions, is tested in tests/native.
"""

from __future__ import annotations

import contextlib
import errno
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import URING
from raw_table import RawTable, write_raw_table

from gids import _core
from gids.cuda.device import Device, on_host
from gids.io import Engine, open_engine
from gids.io.device.device_queue import DeviceQueue, QueueTable

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

    @staticmethod
    def _pages(table: RawTable) -> np.ndarray:
        pages = np.empty((table.page_count, table.page_bytes), np.uint8)
        for page in range(table.page_count):
            path, offset = table.shard_of(page)
            pages[page] = np.fromfile(path, np.uint8, table.page_bytes, offset=offset)
        return pages

    def queue_tables(self) -> list[QueueTable]:
        first, tables = 0, []
        for table in self.raw:
            tables.append(QueueTable(table.page_count, first, len(table.shard_paths), table.page_bytes))
            first += len(table.shard_paths)
        return tables


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


class Setup:
    """A device, a stream, the tables, random numbers, and queues and engines that are closed at the end."""

    def __init__(self, device: Device, tables: Tables, seed: str, opened: contextlib.ExitStack) -> None:
        self.device, self.tables, self._opened = device, tables, opened
        self.stream = device.new_stream()
        self._kept: list[torch.Tensor] = []
        self.rng = np.random.default_rng(zlib.crc32(seed.encode()))

    def engine(self, depth: int = 64, paths: list[Path] | None = None) -> Engine:
        return self._opened.enter_context(open_files(paths or self.tables.paths, depth=depth))

    def queue(
        self,
        round_max: int = 64,
        engine: Engine | None = None,
        tables: list[QueueTable] | None = None,
        **more: Any,
    ) -> DeviceQueue:
        """Of both tables. engine: None opens one for it."""
        tables = self.tables.queue_tables() if tables is None else tables
        options = {"stream": self.stream, "staging_bytes": 4 * round_max * SLOT} | more
        return self._opened.enter_context(
            DeviceQueue(self.device, engine or self.engine(), tables, **options)
        )

    def on_device(self, values: Any) -> torch.Tensor:
        """int64[n], kept until the end, as kernels may read it at any time."""
        with self.device.use(self.stream):
            tensor = torch.as_tensor(values, dtype=torch.int64).to(self.device.torch_device)
        self._kept.append(tensor)
        return tensor

    def post(self, queue: DeviceQueue, pages: Any, table: int = 0, first: int = 0, *, more: int = 0) -> None:
        """more: requests that are in the array and not counted."""
        pages = np.asarray(pages, np.int64)
        requests = self.on_device(np.append(pages, np.full(more, 1 << 40)))
        queue.post(table, requests, self.on_device([len(pages)]), first)

    def take(self, queue: DeviceQueue, size: int, page_bytes: int = SLOT) -> tuple[np.ndarray, np.ndarray]:
        """(pages, errors) of the oldest round."""
        round = queue.take(size)
        with self.device.use(self.stream):
            pages, answer = on_host(round.pages).numpy().copy(), on_host(round.answer).numpy().copy()
        return pages[: size * page_bytes].reshape(size, page_bytes), outcome(answer, round.number, size)

    def read(
        self, queue: DeviceQueue, pages: Any, table: int = 0, page_bytes: int = SLOT
    ) -> tuple[np.ndarray, np.ndarray]:
        """(pages, errors), in as many rounds as it takes."""
        came: list[tuple[np.ndarray, np.ndarray]] = []
        for first in range(0, len(pages), queue.round_max):
            self.post(queue, pages, table, first)
            came.append(self.take(queue, min(len(pages) - first, queue.round_max), page_bytes))
        rows, errors = (np.concatenate(parts) for parts in zip(*came, strict=True))
        return rows, errors

    def check(self, pages: Any, rows: np.ndarray, errors: np.ndarray, table: int = 0) -> None:
        fine = errors == 0
        assert np.array_equal(rows[fine], self.tables.pages[table][np.asarray(pages)[fine]])


def outcome(answer: np.ndarray, number: int, size: int) -> np.ndarray:
    """queue::outcome() of each request."""
    word = int(answer[0])
    if word >= 1 << 62:
        return np.full(size, errno.ECANCELED)
    if word >> _core.QUEUE_COUNT_BITS != number + 1:
        return np.full(size, errno.ETIMEDOUT)
    errors = answer[1:].view(np.int32)[:size]
    failed = word & (1 << _core.QUEUE_COUNT_BITS) - 1
    assert failed == np.count_nonzero(errors)
    return errors


@pytest.fixture
def setup(device: Device, tables: Tables, request: pytest.FixtureRequest) -> Iterator[Setup]:
    with contextlib.ExitStack() as opened:
        yield Setup(device, tables, request.node.name, opened)


@pytest.mark.parametrize("table", [0, 1])
def test_every_page_comes_back(setup: Setup, engine: Engine, table: int) -> None:
    raw = setup.tables.raw[table]
    pages = setup.rng.permutation(raw.page_count)
    queue = setup.queue(50, engine)
    rows, errors = setup.read(queue, pages, table, raw.page_bytes)
    assert not errors.any()
    setup.check(pages, rows, errors, table)
    stats = queue.stats()
    assert stats["taken"] == len(pages)
    assert stats["rounds"] == stats["posted"] == -(-len(pages) // 50)
    assert stats["failed"] == stats["late"] == stats["timed_out"] == stats["untaken"] == 0


def test_tiny_rings_go_round_many_times(setup: Setup) -> None:
    pages = setup.rng.integers(0, 301, 40)
    rows, errors = setup.read(setup.queue(1), pages)
    assert not errors.any()
    setup.check(pages, rows, errors)


@pytest.mark.parametrize("table_count", [1, 5])
def test_rounds_of_any_size_are_posted_ahead_and_taken_in_order(setup: Setup, table_count: int) -> None:
    """Random posts and takes against a model; counts below, at and above round_max, and zero."""
    rng = setup.rng
    tables = [setup.tables.queue_tables()[min(i, 1)] for i in range(table_count)]
    rounds_max = max(4, 2 * table_count)
    queue = setup.queue(16, tables=tables, staging_bytes=rounds_max * 16 * SLOT)
    assert (queue.rounds_max, queue.round_max) == (rounds_max, 16)
    posted: list[tuple[np.ndarray, int]] = []
    seen = 0
    while seen < 500 or posted:
        if seen >= 500 or queue.room == 0 or (posted and rng.random() < 0.4):
            pages, table = posted.pop(0)
            size = 0 if rng.random() < 0.2 else len(pages)  # its pages are no longer wanted
            rows, errors = setup.take(queue, size, tables[table].page_bytes)
            assert not errors.any()
            setup.check(pages[:size], rows, errors, min(table, 1))
            seen += len(pages)
            continue
        table = int(rng.integers(table_count))
        count = int(rng.choice([0, 1, 15, 16, 17, 50]))
        first = int(rng.choice([0, 0, 1, count, count + 3]))
        pages = rng.integers(0, tables[table].page_count, count)
        setup.post(queue, pages, table, first, more=int(rng.integers(0, 20)))
        posted.append((pages[first : first + 16], table))
    assert queue.stats()["taken"] == seen


def test_pages_stay_until_the_take_after_the_next(setup: Setup) -> None:
    queue = setup.queue(8)
    for first in (0, 8, 16):
        setup.post(queue, np.arange(first, first + 8))
    rounds = [queue.take(8), queue.take(8)]
    with setup.device.use(setup.stream):
        for round, first in zip(rounds, (0, 8), strict=True):
            pages = on_host(round.pages).numpy().reshape(8, SLOT)
            assert np.array_equal(pages, setup.tables.pages[0][first : first + 8])
    setup.check(np.arange(16, 24), *setup.take(queue, 8))


def test_without_a_waiting_stream_a_kernel_polls(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.device, "wait_value", lambda stream, address, value: False)
    pages = setup.rng.integers(0, 301, 100)
    rows, errors = setup.read(setup.queue(16), pages)
    assert not errors.any()
    setup.check(pages, rows, errors)


def test_injected_faults_belong_to_their_own_requests(setup: Setup, engine: Engine) -> None:
    rng = setup.rng
    bad = rng.permutation(301)[:20].tolist()
    codes = [(errno.EIO, errno.EINTR, errno.ENOMEM)[i % 3] for i in range(20)]
    engine.inject_faults(
        (page % 3, page // 3 * 4096 + int(rng.integers(4096)), code, 1)
        for page, code in zip(bad, codes, strict=True)
    )
    pages = rng.permutation(301)
    queue = setup.queue(64, engine)
    rows, errors = setup.read(queue, pages)
    setup.check(pages, rows, errors)
    # An interrupted read is retried.
    expected = {page: code for page, code in zip(bad, codes, strict=True) if code != errno.EINTR}
    assert errors.tolist() == [expected.get(page, 0) for page in pages.tolist()]
    _, errors = setup.read(queue, pages)
    assert not errors.any(), "the queue continues"


def test_wrong_requests_and_truncated_files_get_their_own_errors(setup: Setup, tmp_path: Path) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(setup.tables.pages[0][:10].tobytes()[: 6 * SLOT + 100])
    queue = setup.queue(8, setup.engine(paths=[path]), [QueueTable(10, 0, 1, SLOT)])
    _, errors = setup.read(queue, np.arange(12))
    assert errors.tolist() == [0] * 6 + [errno.ENODATA] * 4 + [errno.EINVAL] * 2


def test_closing_with_requests_in_flight_cancels_them(setup: Setup) -> None:
    """With one slow reader of one page at a time, closing comes long before the end."""
    slow_down(engine := setup.engine(depth=1))
    queue = setup.queue(4096, engine)
    for _ in range(2):
        setup.post(queue, setup.rng.integers(0, 301, 4096))
    with setup.device.use(setup.stream):  # which enqueues what is held
        pass
    while queue.stats()["taken"] == 0:
        time.sleep(1e-4)
    queue.close()
    queue.close()
    stats = queue.stats()
    assert 0 < stats["failed"] <= stats["taken"] <= 8192
    assert stats["timed_out"] == 0
    for call in (lambda: setup.post(queue, [1]), lambda: queue.take(0)):
        with pytest.raises(RuntimeError, match="the request queue is closed"):
            call()


def test_a_kernel_that_gives_up_breaks_the_queue(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.device, "wait_value", lambda stream, address, value: False)
    pages = setup.rng.integers(0, 301, 200)
    slow_down(engine := setup.engine(depth=1))
    queue = setup.queue(256, engine, spin_limit_s=0.0001)
    _, errors = setup.read(queue, pages)
    assert (errors == errors[0]).all()
    assert errors[0] in (errno.ETIMEDOUT, errno.ECANCELED)
    with pytest.raises(RuntimeError, match=r"broken.*make a new one"):
        setup.read(queue, pages)
    rows, errors = setup.read(setup.queue(256, engine), pages)
    assert not errors.any()
    setup.check(pages, rows, errors)


def test_a_launch_that_fails_ends_the_queue(setup: Setup) -> None:
    queue = setup.queue()
    with pytest.raises(ValueError, match="strides"):
        queue.post(0, setup.on_device(range(8))[::2], setup.on_device([4]), 0)
    with pytest.raises(RuntimeError, match="closed"):
        setup.read(queue, np.arange(4))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("4 rounds of at least a page of 4096 B need 16384", {"staging_bytes": 9000}),
        ("reads of 1048576 B at most", {"tables": [QueueTable(8, 0, 1, 1 << 21)], "round_max": 8192}),
        ("8 pages and 3 checksums", {"tables": [QueueTable(8, 0, 1, 512, np.zeros(3, np.uint32))]}),
    ],
)
def test_arguments_that_do_not_fit_are_refused(setup: Setup, text: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        setup.queue(**options)
