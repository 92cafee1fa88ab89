"""The loader on a device: the rows, errors and counters of the loader on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import ended
from datasets import random_in_edges
from emulator import EmulatedDevice, EmulatedStream
from late_device import WITHOUT_MEMORY, LateDevice, LateEvent
from loader_example import ROWS, Ids, check, ids_of, minibatches
from open_options import feature_loader, node_loader
from torch.overrides import TorchFunctionMode
from waits import Waits

import gids
from gids.cuda.device import Device, MadeOn
from gids.errors import MemoryBudgetError
from gids.loader.sampling import SampleStream
from gids.sampler import Minibatch
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


def test_a_forked_child_can_take_no_minibatch(
    path: Path, source: Ids, cuda_is: Callable[[Device], None]
) -> None:
    """Without an iterator, with an open one, and with one that reads without lookahead."""
    cuda_is(EmulatedDevice())
    options: dict[str, Any] = {"device_memory": 1 << 25, "reads": "random", **STAGING}
    with feature_loader(path, list(source), device="cuda", **options) as loader:
        slow, fast, new = (loader.attach(minibatches(4, most=100), ids_of) for _ in range(3))
        for stream in (slow, fast):
            next(stream)

        def take() -> None:
            for stream in (slow, fast, new):
                with pytest.raises(RuntimeError, match="a forked child opens its own source"):
                    next(stream)

        ended(take)
        for stream in (fast, slow):
            for minibatch, features in stream:
                check(source, minibatch, features)


@pytest.mark.parametrize("host_policy", ["lookahead", "static"])
def test_a_tier_in_host_memory_saves_reads(on: Device, path: Path, source: Ids, host_policy: Any) -> None:
    misses = {}
    for host_cache_bytes in (0, 2 << 20):
        with feature_loader(
            path,
            ["paper.feat"],
            device="cuda",
            device_memory=1 << 25,
            memory=host_cache_bytes + (1 << 20),
            cache=1 << 18,
            host_policy=host_policy,
            staging=1 << 20,
        ) as loader:
            batches = [{"paper.feat": m["paper.feat"]} for m in minibatches(12, most=300)]
            for minibatch, features in loader.attach(batches, ids_of):
                check(source, minibatch, features)
            stats = loader.stats()
            assert stats["memory"]["host lines"] <= host_cache_bytes
            misses[host_cache_bytes] = stats["misses"]
    assert misses[2 << 20] < misses[0] / 2


def test_device_memory_is_what_was_given_and_is_told_by_purpose(on: Device, path: Path, source: Ids) -> None:
    memory_bytes = 1 << 23
    with feature_loader(path, list(source), device="cuda", device_memory=memory_bytes, **STAGING) as loader:
        for _minibatch, _features in loader.attach(minibatches(20), ids_of):
            memory = loader.stats()["memory"]
            on_device = sum(n for purpose, n in memory.items() if purpose not in ("host lines", "staging"))
            assert on_device <= memory_bytes
        assert {"lines", "page tables", "line owners", "window", "outputs", "scratch", "queue"} <= set(memory)
        assert memory["page tables"] == 8 * sum(t.page_count for t in loader.tables)


@pytest.mark.parametrize("tables", [1, 3])
def test_device_memory_has_room_for_a_request_queue_of_short_pages(
    on: Device, tmp_path: Path, tables: int
) -> None:
    names = [f"f{i}" for i in range(tables)]
    with DatasetWriter(tmp_path / "short.gids") as writer:
        for name in names:
            writer.write_table("node", "paper", name, torch.randn(100, 100), page_bytes=512)
    options = {**STAGING, "device_memory": 1 << 23}
    ids = {f"paper.{name}": torch.arange(50) for name in names}
    with feature_loader(tmp_path / "short.gids", list(ids), device="cuda", **options) as loader:
        next(loader.attach([ids], ids_of))
        assert loader.stats()["memory"]["queue"] <= loader._placement._budget.bounce_bytes


def test_minibatches_larger_than_the_first_are_warned_of_unless_foretold(
    on: Device, path: Path, source: Ids, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**STAGING, "device_memory": 6 << 20, "window": 1}
    batches = [{"paper.feat": torch.arange(n)} for n in (3, 3, 700, 3)]
    for foretold in (None, {"paper.feat": 700}):
        caplog.clear()
        with feature_loader(
            path, ["paper.feat"], device="cuda", minibatch_rows=foretold, **options
        ) as loader:
            for minibatch, features in loader.attach(batches, ids_of):
                check(source, minibatch, features)
            lines = loader.stats()["tables"]["paper.feat"]["lines_bytes"]
        warned = [r for r in caplog.records if "minibatch_rows=700" in r.getMessage()]
        assert len(warned) == (0 if foretold else 1)
        assert (lines < ROWS * 1024) == bool(foretold)  # else the whole table is in lines


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
    for given in (5 << 20, None) * 3:
        trained = device.empty(3 << 20, torch.uint8)  # torch keeps this memory when it is released
        del trained
        with feature_loader(path, ["paper.feat"], device="cuda", device_memory=given, **STAGING) as loader:
            for minibatch, features in loader.attach([{"paper.feat": torch.arange(50)}], ids_of):
                check(source, minibatch, features)
            lines.append(loader.stats()["memory"]["lines"])
    assert lines == lines[:2] * 3
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
    device = EmulatedDevice(total_bytes=10 << 20)
    cuda_is(device)
    options: dict[str, Any] = {"device_memory": 5 << 20, "window": 2} | STAGING
    batches = [{"paper.feat": torch.arange(50 * i, 50 * i + 50)} for i in range(4)]
    with (
        feature_loader(path, ["paper.feat"], device="cuda", **options) as one,
        feature_loader(path, ["paper.feat"], device="cuda", **options) as other,
    ):
        for (minibatch, features), (_, same) in zip(
            one.attach(batches, ids_of), other.attach(batches, ids_of), strict=True
        ):
            check(source, minibatch, features)
            check(source, minibatch, same)
        with pytest.raises(MemoryBudgetError, match="device_memory=5242880"):
            feature_loader(path, ["paper.feat"], device="cuda", **options)
    with feature_loader(path, ["paper.feat"], device="cuda", **options):
        pass


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


@pytest.mark.parametrize("window", [0, 3])
def test_a_minibatch_does_not_wait_for_what_is_sampled_after_it(
    papers: Path, cuda_is: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """The sampling of a later minibatch never ends, and those that are due meanwhile are complete."""
    rows, weights = (rows_of(papers, name) for name in ("paper.feat", "paper.cites.paper.weight"))
    device = LateDevice(0)
    cuda_is(device)
    sampled, endless = LateEvent(device), 4 + window
    start = gids.sampler.Neighbor.start

    def never_end(sampler: Any, *args: Any, step: int, epoch: int, **options: Any) -> Any:
        if (epoch, step) == (0, endless):
            device.current_stream().wait_event(sampled)
        return start(sampler, *args, step=step, epoch=epoch, **options)

    monkeypatch.setattr(gids.sampler.Neighbor, "start", never_end)
    options: dict[str, Any] = {"device_memory": 1 << 23, "memory": 64 << 20, "window": window, "planned": 1}
    training = device.new_stream()
    with (
        node_loader(
            papers,
            torch.arange(600),
            [3, 3],
            tables=["paper.feat", "paper.cites.paper.weight"],
            labels=True,
            batch_size=20,
            device="cuda",
            **options | STAGING,
        ) as loader,
        device.use(training),
    ):
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


def test_a_minibatch_from_the_spool_does_not_wait_for_what_is_sampled_ahead() -> None:
    """It is a copy that the sampling stream does not know: it waits for the minibatch finished last."""
    device, seeds = LateDevice(0), torch.arange(3)
    sampling, sampled, training = SampleStream(device), LateEvent(device), device.new_stream()
    sampling.finished(Minibatch(seeds, seeds, []), lambda minibatch: {"feat": seeds})
    with sampling.use():
        device.current_stream().wait_event(sampled)
    with device.use(training):
        sampling.hand_over(Minibatch(seeds, seeds, []))
        training.synchronize()
    sampled.passed = True
    device.close()


class Working(TorchFunctionMode):
    """Lists torch's functions that would launch a kernel, copy or wait if their tensors were on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        view = name == "__getitem__" and isinstance(args[1], int | slice)
        self.calls += [name] * (not view and name not in WITHOUT_MEMORY)
        return function(*args, **(kwargs or {}))


def test_a_minibatch_enters_the_driver_nine_times_to_enqueue_and_four_times_to_wait(
    tmp_path: Path, cuda_is: Callable[[Device], None]
) -> None:
    """Whatever the number of its kernels. torch works on the host only: it reads sizes and takes seeds."""
    fanouts = [3, 3, 3]
    rows, (indptr, sources) = torch.randn(3000, 32), random_in_edges(3000, 3000, 1)
    with DatasetWriter(tmp_path / "one.gids") as writer:
        writer.write_table("node", "paper", "feat", rows)
        writer.write_graph(("paper", "cites", "paper"), indptr, sources, num_src=3000)
    device = EmulatedDevice()
    cuda_is(device)
    made: list[EmulatedStream] = [device.current_stream()]
    new_stream = device.new_stream
    device.new_stream = lambda *args: made.append(new_stream(*args)) or made[-1]  # type: ignore[method-assign, func-returns-value]
    options: dict[str, Any] = {"device_memory": 1 << 23, "cache": 200 << 10, "window": 4} | STAGING
    with node_loader(
        tmp_path / "one.gids",
        torch.arange(3000),
        fanouts,
        batch_size=15,
        device="cuda",
        topology_on="host",
        **options,
    ) as loader:
        epoch, seen = iter(loader), []
        for number in range(22):
            launched = len(device.launches)
            for stream in made:
                stream.entries = stream.waits = 0
            queue = loader.feature_loader._cache._queue if number else None  # type: ignore[union-attr]
            posted = queue.stats()["posted"] if queue else 0
            with Working() as working:
                minibatch = next(epoch)
            assert torch.equal(minibatch.features["paper.feat"], rows[minibatch.input_nodes])
            if queue:
                entries = sum(stream.entries for stream in made) + queue.stats()["posted"] - posted
                waits = sum(stream.waits for stream in made)
                seen.append((entries, waits, working.calls, len(device.launches) - launched))
    print(seen)
    for entries, waits, torch_calls, launches in seen[15:]:  # the window is full
        assert entries <= 8, "and the copy of the seeds to a GPU"
        assert waits <= 4
        assert len(torch_calls) <= 3, "torch 2.2 does not report the second one"
        assert set(torch_calls) | {"__getitem__"} == {"tolist", "__getitem__", "contiguous"}
        assert launches >= 10 + 8 * len(fanouts)


class Blocking(TorchFunctionMode):
    """Counts torch's calls that wait for a GPU. copies: host memory, which may be read."""

    def __init__(self, copies: list[torch.Tensor]) -> None:
        super().__init__()
        self.copies, self.calls = copies, 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        host = any(args and args[0] is copy for copy in self.copies)
        self.calls += name in ("tolist", "item", "__bool__") and not host
        self.calls += name == "to" and not (kwargs or {}).get("non_blocking")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("labels", [False, True])
def test_sampling_is_waited_for_a_minibatch_later(
    papers: Path, cuda_is: Callable[[Device], None], labels: bool
) -> None:
    device = Waits()
    cuda_is(device)
    options: dict[str, Any] = {"device_memory": 1 << 23, "window": 0, "planned": 1} | STAGING
    with node_loader(
        papers,
        torch.arange(180),
        [5, 5],
        tables=["paper.feat"],
        batch_size=30,
        labels=labels,
        device="cuda",
        topology_on="host",
        **options,
    ) as loader:
        epoch, calls = iter(loader), []
        for number in range(6):
            with Blocking(device.copies) as blocking:
                minibatch = next(epoch)
            calls.append(blocking.calls)
            device.said.append(("returned", number))
            assert minibatch.seeds.tolist() == list(range(30 * number, 30 * number + 30))  # type: ignore[union-attr]
            if labels:
                assert minibatch.labels.tolist() == minibatch.seeds.tolist()  # type: ignore[union-attr]
    assert calls[1:] == [0] * 5, "the first one builds the cache"
    steps = [[("wait", t), ("copy", t + 1), ("returned", t)] for t in range(6)]
    assert device.said == [("copy", 0), *(said for step in steps for said in step if said != ("copy", 6))]


@pytest.mark.parametrize("window", [0, 3])
def test_an_error_of_sampling_comes_after_the_minibatches_before_it(
    on: Device, papers: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    start = gids.sampler.Neighbor.start

    def fail(sampler: Any, *args: Any, step: int, **options: Any) -> Any:
        if step == 3:
            raise ValueError("too many edges")
        return start(sampler, *args, step=step, **options)

    monkeypatch.setattr(gids.sampler.Neighbor, "start", fail)
    options: dict[str, Any] = {"device_memory": 1 << 23, "window": window} | STAGING
    with node_loader(papers, torch.arange(600), [5], batch_size=100, device="cuda", **options) as loader:
        epoch = iter(loader)
        assert [next(epoch).step for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="too many edges"):
            next(epoch)
        with pytest.raises(RuntimeError, match="ended this epoch after 3 of 6"):
            next(epoch)


def test_policy_lru_is_refused_on_a_device(path: Path) -> None:
    with pytest.raises(ValueError, match=r"policy='lru' works on device='cpu' only"):
        feature_loader(path, ["paper.feat"], device="cuda", policy="lru")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_without_a_gpu_the_error_says_what_to_install(path: Path) -> None:
    with pytest.raises(RuntimeError, match="pip install torch --index-url"):
        gids.FeatureLoader(path, ["paper.feat"], device="cuda")
