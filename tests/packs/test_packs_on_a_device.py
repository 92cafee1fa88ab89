"""Packs in device memory: minibatches and rows of random reads, in whatever order streams run."""

from __future__ import annotations

import ctypes
import errno
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import late_device
import numpy as np
import pytest
import torch
from children import ended
from datasets import random_in_edges, same_bits
from emulator import EmulatedDevice, EmulatedStream
from late_device import LateDevice, LateStream
from packs_example import (
    assert_all_same,
    assert_same,
    cut_small,
    scratch_files,
    take_over_at,
)
from packs_example import open_loader as open_large_loader
from packs_example import open_source as open_on_host
from test_packed_tables import random_minibatches
from test_packed_tables import write as write_random_tables
from test_packs_on_a_bad_disk import faulty, minibatches, random_reads_went_on, results

import gids
from gids import _core
from gids.cuda.device import Device, MadeOn
from gids.errors import MemoryBudgetError, StorageError
from gids.loader import pack_reads, pack_switch, sampled_ahead
from gids.packs import DiskRates, RowMemory, Superbatch, device_rows
from gids.packs import memory as pack_memory
from gids.packs.memory import Wanted
from gids.sampler import Minibatch
from gids.write import DatasetWriter

Ids = dict[str, torch.Tensor]
CUTS: list[dict[str, Any]] = [
    {"pack_bytes": 900_000},
    {"pack_bytes": 1_000_000, "minibatches": 5, "packs": 2},
]


@pytest.fixture
def on(device: Device, cuda_is: Callable[[Device], None]) -> Device:
    """What device="cuda" opens in the test."""
    cuda_is(device)
    return device


def open_source(
    path: Path,
    reads: str = "pack",
    memory: int | None = 16 << 20,
    device_memory: int = 16 << 20,
    **options: Any,
) -> gids.Source:
    return open_on_host(path, reads, memory, device_memory=device_memory, staging=1 << 20, **options)


def open_loader(source: gids.Source, **options: Any) -> gids.NodeLoader:
    """21 small minibatches an epoch: the emulator is slow."""
    return open_large_loader(source, every=12, **{"batch_size": 16} | options)


@pytest.fixture(scope="module")
def epochs(path: Path) -> list[list[Minibatch]]:
    """Two epochs of open_loader(), by random reads on the CPU."""
    with open_source(path, "random") as source, open_loader(source) as loader:
        return [list(loader) for _ in range(2)]


@pytest.fixture(scope="module")
def expected(epochs: list[list[Minibatch]]) -> list[Minibatch]:
    return epochs[0]


def loads_that_run() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gids-pack-load")]


def check_beside_training(device: LateDevice, expected: list[Any], loader: gids.NodeLoader) -> None:
    """An epoch's minibatches are these, while a stream of training is current."""
    training = device.new_stream()
    with device.use(training):
        for a, b in zip(expected, loader, strict=True):
            training.put(lambda: None)
            training.synchronize()
            assert_same(a, b)


@pytest.mark.few(1)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_minibatches_and_rows_are_those_of_random_reads_on_the_cpu(
    on: Device,
    path: Path,
    epochs: list[list[Minibatch]],
    cut: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_small(monkeypatch, **cut)
    with open_source(path, check_crc=True) as source:
        loader = open_loader(source, device="cuda")
        for epoch in epochs:
            assert_all_same(epoch, loader)
        stats = loader.stats()["packs"]
        assert stats["minibatches"] == 2 * len(loader)
        assert stats["packs"] > 4
        assert all(choice["way"] == "pack" for choice in stats["choices"])
        assert stats["choices"][0]["resident_rows"] > 0
    assert not scratch_files(path)
    assert not loads_that_run()


def test_a_homogeneous_graph_and_converted_features(
    on: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(1500, 20))
        writer.write_table("node", "paper", "text", torch.randn(1500, 33), dtype=torch.int8, scale="row")
        writer.write_graph(("paper", "cites", "paper"), *random_in_edges(1500, 1500, 1), num_src=1500)
    cut_small(monkeypatch, pack_bytes=120_000, minibatches=4)
    for dtype in (None, torch.float16, torch.bfloat16):
        options: dict[str, Any] = {"batch_size": 20, "shuffle": True, "dtype": dtype}
        with open_source(path, "random") as random, open_source(path) as source:
            one = gids.NodeLoader(random, torch.arange(0, 1500, 10), [3, 3], **{"seed": 0} | options)
            other = gids.NodeLoader(
                source, torch.arange(0, 1500, 10), [3, 3], device="cuda", **{"seed": 0} | options
            )
            assert_all_same(one, other)
            assert other.stats()["packs"]["minibatches"] == len(other)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(2))
def test_rows_are_those_of_the_table_whatever_runs_late(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, cuda_is: Callable[[Device], None]
) -> None:
    """Every dtype and order, ids that are sampled on a stream, training that lags."""
    rng = np.random.default_rng(seed)
    counts = {"paper": int(rng.integers(300, 1500)), "author": int(rng.integers(1, 300)), "one": 1}
    path = tmp_path / "a.gids"
    write_random_tables(path, rng, counts, random_in_edges(counts["paper"], counts["paper"], seed))
    if rng.random() < 0.8:
        few = int(rng.integers(1, 12))
        cut_small(monkeypatch, minibatches=few, packs=int(rng.integers(1, 4)), pack_bytes=8 << 20)
    monkeypatch.setattr(late_device, "PATIENCE_S", 0.002)
    device = LateDevice(seed)
    cuda_is(device)
    sampling, training = device.new_stream(), device.new_stream()
    training.slow = bool(rng.integers(2))
    on_current = seed % 2 == 1  # ids are made there, and not on a stream of their own
    scratch_bytes = int(rng.integers(1 << 20, 1 << 28))
    with open_source(path, "pack", 64 << 20, 64 << 20, scratch_bytes=scratch_bytes) as source:
        chosen = list(source.store.tables.values())
        dtype = [None, torch.float32, torch.bfloat16][rng.integers(3)]
        if dtype is not None:
            chosen = [t for t in chosen if t.dtype.is_floating_point and t.dtype.itemsize < 8] or chosen[:1]
        loader = gids.FeatureLoader(source, chosen, dtype=dtype, device="cuda")
        tables = {t.name: t for t in loader.tables}
        expected = {}
        for name, t in tables.items():
            table_rows = t.read_rows(range(t.row_count))
            converts = dtype is not None and t.dtype in (torch.float32, torch.float16, torch.bfloat16)
            expected[name] = table_rows.to(dtype) if converts else table_rows
        for _ in range(2):
            batches = random_minibatches(rng, {name: t.row_count for name, t in tables.items()})
            trained: list[Ids] = []
            with device.use(training):
                ids_of = partial(sampled_late, device=device, made_on=None if on_current else sampling)
                stream = loader.attach(batches, ids_of, count=len(batches))
                for _, features in stream:
                    trained.append({n: copied_late(rows, device, training) for n, rows in features.items()})
                del features
                training.synchronize()
            for asked, features in zip(batches, trained, strict=True):
                check(features, asked, expected)
        assert loader.stats()["packs"]["minibatches"] > 0
    device.close()
    assert not device.mapped


def test_a_forked_child_closes_a_loader(
    path: Path, expected: list[Minibatch], cuda_is: Callable[[Device], None]
) -> None:
    """It has neither the device nor the host's memory that the device uses."""
    cuda_is(EmulatedDevice())
    with open_source(path) as source:
        loader = open_loader(source, device="cuda")
        epoch = iter(loader)
        assert_same(next(epoch), expected[0])
        ended(loader.close)
        assert_all_same(expected[1:], epoch)


def test_another_stream_reads_between_a_minibatch_and_its_copy_to_the_spool(
    path: Path, monkeypatch: pytest.MonkeyPatch, cuda_is: Callable[[Device], None]
) -> None:
    """As in another thread. Its ids say nothing about that minibatch, which torch's current stream makes."""
    cut_small(monkeypatch, minibatches=3, packs=1, pack_bytes=1 << 20)
    device = LateDevice(0, lazy=1.0)
    cuda_is(device)
    sampling, training, validation = (device.new_stream() for _ in range(3))
    batches = [torch.arange(i, i + 40) for i in range(0, 400, 40)]
    others = [ids + 7 for ids in batches]
    with open_source(path) as source:
        name = next(name for name, t in source.store.tables.items() if t.kind == "node")
        loader = gids.FeatureLoader(source, [name], device="cuda")
        made_on = partial(sampled_late, device=device, made_on=sampling)
        other = loader.attach([{name: ids} for ids in batches], made_on)

        def between(_: object) -> int:
            with device.use(validation):
                next(other, None)
            return 1 << 10

        with device.use(training):
            both_of = zip(batches, others, strict=True)
            sampled = ((ids, copied_late(values, device, training)) for ids, values in both_of)
            count = len(batches)
            stream = loader.attach(sampled, lambda both: {name: both[0]}, bytes_of=between, count=count)
            for (ids, late), _ in stream:
                training.synchronize()
                assert torch.equal(late, ids + 7)
        other.close()
        assert loader.stats()["packs"]["minibatches"] == count
    device.close()


def sampled_late(ids: Ids, device: LateDevice, made_on: LateStream | None) -> Ids:
    """Ids that are there when the stream has done its work. made_on: None for torch's current stream."""
    on = made_on or device.current_stream()
    copies = {name: copied_late(of_table, device, on) for name, of_table in ids.items()}
    return copies if made_on is None else MadeOn(copies, device, made_on)


def copied_late(tensor: torch.Tensor, device: LateDevice, on: EmulatedStream) -> torch.Tensor:
    """A copy that the stream makes later, whether or not the tensor is released before."""
    copy = torch.zeros_like(tensor)
    on.put(partial(copy_bytes, copy, tensor.data_ptr()))
    device.note_written(on, [copy])
    return copy


def copy_bytes(to: torch.Tensor, source: int) -> None:
    ctypes.memmove(to.data_ptr(), source, to.nbytes)


def check(features: Ids, asked: Ids, expected: Ids) -> None:
    assert features.keys() == asked.keys()
    for name, ids in asked.items():
        assert same_bits(features[name], expected[name][ids]), name


@pytest.mark.slow
def test_a_run_resumes_inside_a_pack(
    on: Device, path: Path, expected: list[Minibatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch, pack_bytes=900_000)
    for stop, first, second in ((7, "cuda", "cpu"), (len(expected) - 1, "cpu", "cuda")):
        with open_source(path) as source:
            loader = open_loader(source, device=first)
            epoch = iter(loader)
            for _ in range(stop):
                next(epoch)
            state = loader.state_dict()
            epoch.close()
        with open_source(path) as source:
            resumed = open_loader(source, device=second)
            resumed.load_state_dict(state)
            assert_all_same(expected[stop:], resumed)


@pytest.mark.slow
def test_both_memories_hold(path: Path, monkeypatch: pytest.MonkeyPatch, cuda_is: Any) -> None:
    """Training lags, so that outputs are held as long as possible."""
    monkeypatch.setattr(late_device, "PATIENCE_S", 0.002)
    host_bytes, device_bytes = 10 << 20, 3 << 20
    device = LateDevice(0, lazy=1.0, total_bytes=1 << 30)
    cuda_is(device)
    training = device.new_stream()
    training.slow = True
    with open_source(path, "pack", host_bytes, device_bytes) as source:
        batches = minibatches(source.store, 40, np.random.default_rng(2))
        loader = gids.FeatureLoader(source, list(source.store.tables), device="cuda")
        with device.use(training):
            for _minibatch, _features in loader.attach(batches, lambda ids: ids, count=len(batches)):
                training.put(lambda: None)
            memory = loader.stats()["memory"]
            del _features
        assert loader.stats()["packs"]["minibatches"] == len(batches)
        there = {purpose: n for purpose, n in memory.items() if purpose in pack_memory.ON_DEVICE}
        assert 1 << 20 < there["packs"] < device.memory.peak_bytes <= sum(there.values())
        assert sum(there.values()) <= device_bytes
        assert sum(memory.values()) - sum(there.values()) <= host_bytes
        mapped = sum(device.mapped.values())
        assert memory["staging"] <= mapped <= memory["staging"] + 3 * 4096
    device.close()
    assert not device.mapped
    device.memory.collect()
    assert device.memory.tensor_bytes == 0


@pytest.mark.parametrize(("memory", "device_memory"), [(4 << 20, 16 << 20), (16 << 20, 1 << 20)])
def test_too_little_of_either_memory_says_so(
    path: Path, memory: int, device_memory: int, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(EmulatedDevice())
    with (
        open_source(path, "pack", memory, device_memory) as source,
        pytest.raises(MemoryBudgetError, match=rf"memory={memory} .*, or device_memory={device_memory} "),
    ):
        list(open_large_loader(source, device="cuda", batch_size=1334))


def consider_packs(monkeypatch: pytest.MonkeyPatch, rates: DiskRates) -> None:
    """With tables of any size, at once, for disks of these rates."""
    monkeypatch.setattr(pack_switch, "LEAST_WAIT_S", 1e-9)
    monkeypatch.setattr(pack_switch, "EARLY", 3)
    monkeypatch.setattr(pack_reads, "measure_rates", lambda *_, **__: rates)


SLOW_AT_RANDOM, FAST_AT_RANDOM = DiskRates(4096, 10.0, 1e9, 1e9), DiskRates(4096, 1e9, 1e6, 1e6)


def few_batches(count: int = 12) -> list[Ids]:
    generator = torch.Generator().manual_seed(5)
    return [{"paper.text": torch.randint(4000, (30,), generator=generator)} for _ in range(count)]


@pytest.mark.parametrize(("first", "most"), [(3, 20), (2, 5)])
def test_auto_changes_to_packs_at_any_minibatch(
    on: Device, path: Path, rows: Ids, first: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first epoch; the second one begins with packs."""
    consider_packs(monkeypatch, SLOW_AT_RANDOM)
    monkeypatch.setattr(sampled_ahead, "MOST_MINIBATCHES", most)
    take_over_at(monkeypatch, first)
    batches = few_batches()
    with open_source(path, "auto", device_memory=3 << 19) as source:
        loader = gids.FeatureLoader(source, ["paper.text"], device="cuda")
        for _ in range(2):
            assert not any(results(loader, batches, rows))
        packs = loader.stats()["packs"]
        assert packs["minibatches"] == 2 * len(batches) - first
        assert {choice["way"] for choice in packs["choices"]} == {"pack"}
    assert not scratch_files(path)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "most"), [(2, 7), (8, 22)])
def test_auto_changes_to_packs_whatever_runs_late(
    path: Path,
    epochs: list[list[Minibatch]],
    first: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
    cuda_is: Callable[[Device], None],
) -> None:
    """Sampling, reads and training."""
    consider_packs(monkeypatch, SLOW_AT_RANDOM)
    monkeypatch.setattr(sampled_ahead, "MOST_MINIBATCHES", most)
    monkeypatch.setattr(late_device, "PATIENCE_S", 0.002)
    cuda_is(device := LateDevice(first, lazy=0.7))  # else nothing is ever ready without a wait
    take_over_at(monkeypatch, first)
    with open_source(path, "auto", device_memory=2 << 20) as source:
        loader = open_loader(source, device="cuda")
        for epoch in epochs:
            check_beside_training(device, epoch, loader)
        assert loader.stats()["packs"]["minibatches"] >= 2 * len(loader) - first - 1 or first > most
    device.close()
    assert not scratch_files(path)


def test_auto_keeps_to_random_reads_that_are_faster(
    on: Device, path: Path, rows: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same rule as on the CPU, and by all lines: of the device and of the host."""
    consider_packs(monkeypatch, FAST_AT_RANDOM)
    lines: list[Any] = []
    lines_for = gids.FeatureLoader.lines_for
    monkeypatch.setattr(
        gids.FeatureLoader, "lines_for", lambda *args: lines.append(lines_for(*args)) or lines[-1]
    )
    with open_source(path, "auto", memory=3 << 19, device_memory=3 << 19) as source:
        loader = gids.FeatureLoader(source, ["paper.text"], device="cuda")
        assert not any(results(loader, few_batches(), rows))
        stats = loader.stats()
        assert stats["packs"]["minibatches"] == 0
        assert {choice["way"] for choice in stats["packs"]["choices"]} == {"random"}
        assert "queue" in stats["memory"]
        table = stats["tables"]["paper.text"]
        assert table["host_lines"] > 0
        assert lines[-1]["paper.text"] == pytest.approx(table["lines"] + table["host_lines"], rel=0.05)


@pytest.mark.parametrize("taken", ["host", "device"])
def test_auto_reads_at_random_where_others_have_the_memory_of_packs(
    on: Device, path: Path, rows: Ids, taken: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    consider_packs(monkeypatch, SLOW_AT_RANDOM)
    caplog.set_level("INFO", "gids")
    memory = None if taken == "host" else 16 << 20
    with open_source(path, "auto", memory, device_memory=3 << 19) as source:
        if taken == "host":
            other = iter(open_loader(source.with_options(reads="random")))
            next(other)
        else:
            monkeypatch.setattr(device_rows, "check_memory", no_memory)
        loader = gids.FeatureLoader(source, ["paper.text"], device="cuda")
        for _ in range(2):
            assert not any(results(loader, few_batches(), rows))
        assert loader.stats()["packs"]["minibatches"] == 0
    why = ".* has an open epoch" if taken == "host" else ".*: full"
    said = f"packs cannot be used, {why}"
    assert re.search(said, caplog.text)


def no_memory(*_: Any) -> None:
    raise MemoryBudgetError("full")


@pytest.mark.parametrize("where", ["resident", "pack"])
def test_scratch_that_cannot_be_read_ends_packs(
    on: Device,
    path: Path,
    rows: Ids,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cut_small(monkeypatch, pack_bytes=900_000)
    lost: list[int] = []
    prepare = Superbatch.prepare

    def prepared(superbatch: Superbatch) -> None:
        lost.append(10 if where == "resident" else superbatch._packs[1].at + 10)
        prepare(superbatch)

    monkeypatch.setattr(Superbatch, "prepare", prepared)
    faulty(monkeypatch, lambda i, files: [(len(files) - 1, lost[-1], errno.EIO, 1 << 30)] if i == 0 else [])
    with open_source(path) as source:
        batches = minibatches(source.store, 30, np.random.default_rng(6))
        loader = gids.FeatureLoader(source, list(source.store.tables), device="cuda")
        assert list(results(loader, batches, rows)) == [None] * len(batches)
        assert (loader.stats()["packs"]["minibatches"] > 0) == (where == "pack")
        random_reads_went_on(loader, "cannot read a pack", caplog)


@pytest.mark.few(1)
@pytest.mark.parametrize(("method", "turn"), [("begin", 2), ("prepare", 1)])
def test_a_full_disk_goes_on_by_random_reads(
    path: Path,
    expected: list[Minibatch],
    method: str,
    turn: int,
    cuda_is: Callable[[Device], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cut_small(monkeypatch, pack_bytes=900_000, minibatches=5)
    original, calls = getattr(Superbatch, method), 0

    def failing(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= turn:
            raise StorageError(errno.ENOSPC, "no room", "somewhere")
        original(*args, **options)

    monkeypatch.setattr(Superbatch, method, failing)
    device = LateDevice(turn)
    cuda_is(device)
    with open_source(path, device_memory=6 << 20) as source:
        loader = open_loader(source, device="cuda")
        check_beside_training(device, expected, loader)
        assert loader.stats()["packs"]["superbatches"] == turn - 1
        assert "queue" in loader.stats()["memory"]
    assert sum(r.levelname == "WARNING" for r in caplog.records) == 1
    device.close()
    assert not scratch_files(path)
    assert device.memory.peak_bytes < 8 << 20  # the cache came after the packs had gone; and the topology


def test_closing_does_not_wait_for_a_long_load(
    path: Path, cuda_is: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = EmulatedDevice()
    cuda_is(device)
    cut_small(monkeypatch, pack_bytes=900_000)
    read, slow, waited = _core.PackRead, threading.Event(), list[int]()

    class Slow:
        """A read that takes 0.2 s."""

        def __init__(self, *args: Any, files: int = 1) -> None:
            self._read = read(*args, files=files)

        def wait(self) -> list[tuple[int, int, int]]:
            if slow.is_set():
                time.sleep(0.2)
            waited.append(1)
            return self._read.wait()

    monkeypatch.setattr(_core, "PackRead", Slow)
    monkeypatch.setattr(pack_memory, "_LEAST_STAGING", 64 << 10)  # a pack takes 20 reads or more
    monkeypatch.setattr(pack_memory, "_STAGING_SHARE", 1 << 10)
    with open_source(path) as source:
        loader = open_loader(source, device="cuda")
        epoch = iter(loader)
        next(epoch)
        slow.set()
        while not loads_that_run():
            next(epoch)  # until the next pack is being read
        before = len(waited)
        epoch.close()
        assert len(waited) <= before + 2
        assert not loads_that_run()
    assert not device.mapped


def test_packs_that_are_striped_over_directories(
    on: Device, path: Path, expected: list[Minibatch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch, pack_bytes=900_000)
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    with open_source(path, scratch=directories) as source:
        loader = open_loader(source, device="cuda")
        assert_all_same(expected, loader)
        assert loader.stats()["packs"]["minibatches"] == len(expected)


def test_loads_go_on_while_a_graph_is_captured() -> None:
    device, array = LateDevice(3), np.arange(1 << 16, dtype=np.uint8)
    staging = device_rows.Staging(device, len(array))
    there = device.empty(array.shape, torch.uint8)

    def work(stopped: Any) -> Any:
        staging.write(array, there)  # waits for events and for a stream
        return [], []

    with device.capture():
        device_rows.DeviceLoad(device, work).wait()
    assert np.array_equal(there.numpy(), array)
    with ThreadPoolExecutor(1, "others") as others:
        with pytest.raises(RuntimeError, match=r"invalid: synchronize.* in thread others"):
            with device.capture(), pytest.raises(RuntimeError, match="operation not permitted"):
                others.submit(work, None).result()
    staging.mapping.close()
    device.close()


@pytest.mark.parametrize("reads", ["random", "pack"])
def test_minibatches_are_taken_outside_a_capture(
    path: Path, expected: list[Minibatch], cuda_is: Callable[[Device], None], reads: str
) -> None:
    device = EmulatedDevice()
    cuda_is(device)
    with open_source(path, reads) as source:
        epoch = iter(open_loader(source, device="cuda"))
        for minibatch in expected:
            with device.capture():
                with pytest.raises(RuntimeError, match=r"inside torch\.cuda\.graph\(\): take it"):
                    next(epoch)
            assert_same(minibatch, next(epoch))
        assert next(epoch, None) is None


def test_a_row_in_no_pack_raises(on: Device, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch, pack_bytes=1_500_000)
    monkeypatch.setattr(pack_switch, "EARLY", 2)
    found: list[RowMemory] = []
    make = device_rows.DeviceRows.__init__

    def noted(self: device_rows.DeviceRows, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        found.append(self)

    monkeypatch.setattr(device_rows.DeviceRows, "__init__", noted)
    with open_source(path) as source:
        batches = [{"paper.feat": torch.arange(i, i + 50)} for i in range(10)]
        loader = gids.FeatureLoader(source, ["paper.feat"], device="cuda")
        stream = loader.attach(batches, lambda ids: ids, count=10)
        next(stream)
        [rows] = found
        sets = (rows._resident[0], rows._halves[0][0])
        wanted = Wanted(loader.tables[0], np.array([3000], np.uint32), ((sets[0], 0), (sets[1], 0)))
        rows.gather([[wanted]])
        rows.stream.synchronize()
        with pytest.raises(AssertionError, match="row 3000 of a minibatch is in no pack"):
            next(stream)
