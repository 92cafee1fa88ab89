"""The loader on a device: its memory, what it waits for, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import random_in_edges
from emulator import EmulatedDevice
from late_device import LateDevice, LateEvent
from loader_example import ROWS, Ids, check, ids_of, minibatches, write
from open_loaders import feature_loader, node_loader

import gids
from gids.cuda.device import Device, MadeOn
from gids.errors import MemoryBudgetError
from gids.sampler import Neighbor
from gids.write import DatasetWriter

STAGING: dict[str, Any] = {"staging": 1 << 20}  # 256 MiB take a while to pin


@pytest.fixture
def on(device: Device, cuda_is: Callable[[Device], None]) -> Device:
    """What device="cuda" opens in the test."""
    cuda_is(device)
    return device


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 papers that cite each other. A paper's label is its id."""
    path = tmp_path_factory.mktemp("papers") / "one.gids"
    indptr, sources = random_in_edges(600, 600, 1)
    generator = torch.Generator().manual_seed(1)
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(600, 32, generator=generator))
        writer.write_graph(("paper", "cites", "paper"), indptr, sources, num_src=600)
        writer.write_table("edge", ("paper", "cites", "paper"), "weight", torch.randn(len(sources), 8))
        writer.write_labels("paper", torch.arange(600))
    return path


def rows_of(path: Path, table: str) -> torch.Tensor:
    with gids.open(path) as source:
        return source.store.table(table).read_rows(range(source.store.table(table).row_count))


def test_a_tier_in_host_memory_saves_reads(on: Device, path: Path, source: Ids) -> None:
    misses = {}
    for tier in (0, 2 << 20):
        memory: Any = {"device_memory": 1 << 25, "memory": tier + (1 << 20), "cache": 1 << 18}
        with feature_loader(path, ["paper.feat"], device="cuda", **memory, **STAGING) as loader:
            batches = [{"paper.feat": m["paper.feat"]} for m in minibatches(12, most=300)]
            for minibatch, features in loader.attach(batches, ids_of):
                check(source, minibatch, features)
            stats = loader.stats()
            assert tier - (64 << 10) <= stats["memory"]["host lines"] <= tier
            misses[tier] = stats["misses"]
    assert misses[2 << 20] < misses[0] / 2
    with gids.open(path, memory="1MB", tuning=gids.Tuning(staging="1MiB")) as small:
        with pytest.raises(ValueError, match="staging=1048576 is more than memory=1000000"):
            gids.FeatureLoader(small, ["paper.feat"], device="cuda")


@pytest.mark.parametrize("page_bytes", [512, 4096])
def test_device_memory_is_what_was_given_and_is_told_by_purpose(
    on: Device, tmp_path: Path, source: Ids, page_bytes: int
) -> None:
    """Also with short pages, for which the request queue needs more of it."""
    path, memory_bytes = write(tmp_path / "two.gids", source, page_bytes=page_bytes), 1 << 23
    with feature_loader(path, list(source), device="cuda", device_memory=memory_bytes, **STAGING) as loader:
        for minibatch, features in loader.attach(minibatches(8), ids_of):
            check(source, minibatch, features)
            memory = loader.stats()["memory"]
            on_device = sum(n for purpose, n in memory.items() if purpose not in ("host lines", "staging"))
            assert on_device <= memory_bytes
        assert {"lines", "page tables", "line owners", "window", "outputs", "scratch", "queue"} <= set(memory)
        assert memory["page tables"] == 8 * sum(t.page_count for t in loader.tables)


def test_more_memory_than_is_free_says_what_is_free(path: Path, cuda_is: Callable[[Device], None]) -> None:
    cuda_is(EmulatedDevice(total_bytes=3 << 20))
    for options in ({"cache": 4 << 20}, {"device_memory": 4 << 20}):
        with pytest.raises(MemoryBudgetError, match=r"=4194304 \(4.2 MB\), but emulated has 3.1 MB free"):
            feature_loader(path, ["paper.feat"], device="cuda", **options)  # type: ignore[arg-type]


def test_a_loader_of_a_large_cache_opens_again_and_again(
    path: Path, source: Ids, cuda_is: Callable[[Device], None]
) -> None:
    device = EmulatedDevice(total_bytes=6 << 20)
    cuda_is(device)
    lines = []
    for given in (5 << 20, None) * 2:
        trained = device.empty(3 << 20, torch.uint8)  # torch keeps this memory when it is released
        del trained
        with feature_loader(path, ["paper.feat"], device="cuda", device_memory=given, **STAGING) as loader:
            for minibatch, features in loader.attach([{"paper.feat": torch.arange(50)}], ids_of):
                check(source, minibatch, features)
            lines.append(loader.stats()["memory"]["lines"])
    assert lines == lines[:2] * 2
    assert lines[1] > 1 << 20


def test_a_minibatch_inside_the_capture_of_a_graph_is_refused(
    path: Path, source: Ids, cuda_is: Callable[[Device], None]
) -> None:
    device = EmulatedDevice()
    cuda_is(device)
    with feature_loader(path, ["paper.feat"], device="cuda", **STAGING) as loader:
        minibatches = iter(loader.attach([{"paper.feat": torch.arange(50)}] * 2, ids_of))
        check(source, *next(minibatches))
        device.capturing = True
        with pytest.raises(RuntimeError, match=r"inside torch\.cuda\.graph\(\): take it before the capture"):
            next(minibatches)


def test_two_loaders_at_once_share_the_free_memory(
    path: Path, source: Ids, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(EmulatedDevice(total_bytes=10 << 20))
    options: dict[str, Any] = {"device_memory": 5 << 20, "window": 2} | STAGING
    batches = [{"paper.feat": torch.arange(50 * i, 50 * i + 50)} for i in range(3)]
    with (
        feature_loader(path, ["paper.feat"], device="cuda", **options) as one,
        feature_loader(path, ["paper.feat"], device="cuda", **options) as other,
    ):
        for found in zip(one.attach(batches, ids_of), other.attach(batches, ids_of), strict=True):
            for minibatch, features in found:
                check(source, minibatch, features)
        with pytest.raises(MemoryBudgetError, match="device_memory=5242880"):
            feature_loader(path, ["paper.feat"], device="cuda", **options)


@pytest.mark.slow
def test_device_memory_stays_in_the_budget_while_training_lags(
    path: Path, source: Ids, cuda_is: Callable[[Device], None]
) -> None:
    device = LateDevice(0, lazy=1.0)
    cuda_is(device)
    sampling, training = device.new_stream(), device.new_stream()
    training.slow = True
    batches = [{"paper.feat": torch.randint(0, ROWS, (300,))} for _ in range(25)]
    options: dict[str, Any] = {"device_memory": 4 << 20, "window": 4} | STAGING
    with feature_loader(path, ["paper.feat"], device="cuda", **options) as loader:
        with device.use(training):
            for _minibatch, _features in loader.attach(batches, lambda ids: MadeOn(ids, device, sampling)):
                training.put(lambda: None)  # training, which never synchronizes
            del _features
    device.close()
    assert 3 << 20 < device.memory.peak_bytes <= 4 << 20


def test_a_minibatch_does_not_wait_for_what_is_sampled_after_it(
    papers: Path, cuda_is: Callable[[Device], None]
) -> None:
    """The sampling of a later minibatch never ends, and those that are due meanwhile are complete."""
    rows, weights = (rows_of(papers, name) for name in ("paper.feat", "paper.cites.paper.weight"))
    device = LateDevice(0)
    cuda_is(device)
    sampled, window = LateEvent(device), 3

    class Endless(Neighbor):
        def start(self, *args: Any, step: int, **options: Any) -> Any:
            if step == 4 + window:
                device.current_stream().wait_event(sampled)
            return super().start(*args, step=step, **options)

    options: dict[str, Any] = {"device_memory": 1 << 23, "memory": 64 << 20, "window": window, "planned": 1}
    options |= {"tables": ["paper.feat", "paper.cites.paper.weight"], "labels": True, "device": "cuda"}
    training = device.new_stream()
    sampler = Endless([3, 3])
    with node_loader(papers, torch.arange(600), sampler, batch_size=20, **options | STAGING) as loader:
        with device.use(training):
            epoch = iter(loader)
            for number in range(4):
                minibatch = next(epoch)
                training.synchronize()
                assert minibatch.seeds.tolist() == list(range(20 * number, 20 * number + 20))
                assert torch.equal(minibatch.labels, minibatch.seeds)
                assert torch.equal(minibatch.features["paper.feat"], rows[minibatch.input_nodes])
                edges = torch.cat([block.positions for block in minibatch.blocks])
                assert torch.equal(minibatch.features["paper.cites.paper.weight"], weights[edges])
            sampled.passed = True
            del minibatch, edges
    device.close()


def test_an_error_of_sampling_comes_after_the_minibatches_before_it(on: Device, papers: Path) -> None:
    class Failing(Neighbor):
        def start(self, *args: Any, step: int, **options: Any) -> Any:
            if step == 3:
                raise ValueError("too many edges")
            return super().start(*args, step=step, **options)

    options: dict[str, Any] = {"device": "cuda", "device_memory": 1 << 23, "window": 3} | STAGING
    with node_loader(papers, torch.arange(600), Failing([5]), batch_size=100, **options) as loader:
        epoch = iter(loader)
        assert [next(epoch).step for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="too many edges"):
            next(epoch)
        with pytest.raises(RuntimeError, match="ended this epoch after 3 of 6"):
            next(epoch)


def test_the_topology_may_be_on_the_host_with_its_offsets_on_the_device(on: Device, papers: Path) -> None:
    def run(**options: Any) -> tuple[list[Any], dict[str, int]]:
        seeds = torch.arange(0, 600, 4)
        with node_loader(papers, seeds, [3, 4], batch_size=50, tables=[], **options) as loader:
            found = [[t.cpu().tolist() for t in (*m.tensors(),)] for m in loader]
            return found, loader.stats()["memory"]

    found, memory = run(device="cuda", topology_on="indptr", **STAGING)
    assert found == run()[0]
    assert memory["topology on the device"] == 601 * 8
    assert memory["topology"] > 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_without_a_gpu_the_error_says_what_to_install(path: Path) -> None:
    with pytest.raises(RuntimeError, match="pip install torch --index-url"):
        gids.FeatureLoader(path, ["paper.feat"], device="cuda")
