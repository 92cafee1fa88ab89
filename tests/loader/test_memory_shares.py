"""Loaders with little memory work, their cache gets a fair part of it, and the log says how it is divided."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import in_edges
from open_options import feature_loader, node_loader

import gids
from gids.cache import POLICIES
from gids.cuda import Device
from gids.sampler import Minibatch, Neighbor
from gids.write import DatasetWriter

ROWS, DIM = 40_000, 128  # 20 MB of rows of 512 B
TABLE = "_N.feat"
Ids = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def source() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=[512, 4096])
def page_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, source: torch.Tensor, page_bytes: int) -> Path:
    path = tmp_path_factory.mktemp("memory") / "g.gids"
    rng = np.random.default_rng(1)
    edges = in_edges(rng.integers(0, 31, ROWS), ROWS, rng, power=3)
    with DatasetWriter(path, page_bytes=page_bytes) as writer:
        writer.write_table("node", "_N", "feat", source)
        writer.write_graph(("_N", "_E", "_N"), *edges, num_src=ROWS)
    return path


def reads(rows: int, count: int) -> list[Ids]:
    """Minibatches that read mostly popular rows, each once."""
    found = []
    for n in range(count):
        drawn = (ROWS * np.random.default_rng(n).random(6 * rows) ** 2).astype(np.int64)
        _, first = np.unique(drawn, return_index=True)
        found.append({TABLE: torch.from_numpy(drawn[np.sort(first)][:rows])})
    assert all(len(ids[TABLE]) == rows for ids in found)
    return found


def same(ids: Ids) -> Ids:
    return ids


def read_all(loader: gids.FeatureLoader, batches: list[Ids], source: torch.Tensor, given: int) -> None:
    for ids, features in loader.attach(batches, same, bytes_of=lambda ids: 32 * len(ids[TABLE])):
        assert torch.equal(features[TABLE], source[ids[TABLE]])
        assert sum(loader.stats()["memory"].values()) <= given


@pytest.mark.few(1)
@pytest.mark.parametrize(("rows", "least_lines"), [(1330, 1_500_000), (4150, 0)])
def test_a_quarter_of_the_rows_bytes_is_enough_and_most_of_it_is_cache(
    path: Path, source: torch.Tensor, rows: int, least_lines: int
) -> None:
    """A hundredth of a table of 2 GB with 512 MB, and minibatches of 133,000 or 415,000 rows."""
    given = 5_120_000
    with feature_loader(path, [TABLE], memory=given, queue_depth=4, reads="random") as loader:
        read_all(loader, reads(rows, 40), source, given)
        stats = loader.stats()
    assert stats["memory"]["lines"] >= least_lines
    assert stats["window"] < 16
    if least_lines:
        assert stats["hit_ratio"] > (0.3 if loader.tables[0].page_bytes == 512 else 0.15)


def least_memory(path: Path, batches: list[Ids], **options: Any) -> int:
    """What the error says is enough."""
    with feature_loader(path, [TABLE], memory=1000, **options) as loader:
        with pytest.raises(gids.MemoryBudgetError, match="is too small") as caught:
            next(loader.attach(batches, same))
    found = re.search(r"Give memory=([\d_]+) or more", str(caught.value))
    return int(found[1])


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("window", [0, 7, 22])
def test_rows_are_right_in_any_memory_that_is_enough(
    path: Path, source: torch.Tensor, policy: str, window: int
) -> None:
    batches = reads(250, 26)
    options: dict[str, Any] = {"policy": policy, "window": window, "queue_depth": 64, "reads": "random"}
    least = least_memory(path, batches, **options)
    windows = []
    for times in (1, 1.2, 1.6, 40):
        given = int(times * least)
        with feature_loader(path, [TABLE], memory=given, **options) as loader:
            read_all(loader, batches, source, given)
            read_all(loader, batches[:2], source, given)  # another epoch
            windows.append(loader.stats()["window"])
            assert loader.stats()["planned"] <= 2 or times > 5
    assert windows[-1] == window
    if window > 1:
        assert windows[0] < window


def fingerprint(minibatch: Minibatch) -> list[list[int]]:
    lists = [minibatch.seeds, minibatch.input_nodes]
    for block in minibatch.blocks:
        lists += [block.indptr, block.indices, block.positions]  # type: ignore[union-attr]
    return [t.tolist() for t in lists]  # type: ignore[union-attr]


class Counting(Neighbor):
    """Notes how many minibatches each call samples together."""

    calls: list[int]

    def sample_bulk(self, graphs: Any, seeds_of_steps: Any, **numbers: Any) -> list[Minibatch]:
        self.calls.append(len(seeds_of_steps))
        return super().sample_bulk(graphs, seeds_of_steps, **numbers)


def test_minibatches_do_not_depend_on_the_memory(path: Path, source: torch.Tensor) -> None:
    """But how many wait in the window, and how many are sampled together, does."""
    found, windows, calls = [], [], []
    for given in (1_600_000, 3_000_000, 1 << 30):
        sampler = Counting([5, 5], threads=2)
        sampler.calls = []
        with node_loader(
            path, torch.arange(600), sampler, batch_size=40, memory=given, queue_depth=4
        ) as loader:
            minibatches = []
            for minibatch in loader:
                assert torch.equal(minibatch.features[TABLE], source[minibatch.input_nodes])
                minibatches.append(fingerprint(minibatch))
            windows.append(loader.stats()["window"])
        found.append(minibatches)
        calls.append(sampler.calls)
    assert found[0] == found[1] == found[2]
    assert windows[0] < windows[2] == 16
    assert calls[0] == []
    assert max(calls[2]) == 4


def test_the_sampler_is_not_told_twice(path: Path) -> None:
    """Buffers of the minibatches in the window come back to the sampler when the epoch ends."""
    with node_loader(path, torch.arange(4000), [10, 10], batch_size=200, memory=1 << 28) as loader:
        epoch = iter(loader)
        nbytes = 0
        for _ in range(3):
            minibatch = next(epoch)
            nbytes = max(nbytes, minibatch.nbytes)
        within = loader.stats()["memory"]
        del minibatch
        epoch.close()
        after = loader.stats()["memory"]
    assert after["sampler"] <= within["sampler"] + 2 * nbytes
    assert within["window"] > 16 * nbytes // 2


def test_the_log_says_once_how_memory_is_divided(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gids")
    with feature_loader(path, [TABLE], memory=5_120_000, queue_depth=4, reads="random") as loader:
        for _ in range(2):
            list(loader.attach(reads(1330, 6), same, bytes_of=lambda ids: 32 * len(ids[TABLE])))
        window = loader.stats()["window"]
    [said] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory of ")]
    assert re.match(r"memory of 5.1 MB: page tables [\d.]+ kB, bounce pool .*, lines [\d.]+ MB, ", said)
    assert said.endswith(f"with a window of {window} minibatches")


@pytest.mark.few(1)
def test_a_device_with_little_memory_has_a_shorter_window(
    path: Path, source: torch.Tensor, device: Device, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(device)
    batches, given = reads(1330, 4), 5_120_000
    windows = []
    for memory_bytes in (given, 1 << 26):
        with feature_loader(
            path, [TABLE], device="cuda", device_memory=memory_bytes, staging=1 << 20
        ) as loader:
            for ids, features in loader.attach(batches, same):
                assert torch.equal(features[TABLE].cpu(), source[ids[TABLE]])
            windows.append(loader.stats()["window"])
    assert windows[0] < windows[1] == 16


def test_fewer_requests_are_in_flight_for_long_rows(tmp_path: Path) -> None:
    """256 requests for rows of 1 MB would take four times the memory."""
    rows = torch.arange(10.0)[:, None].repeat(1, 1 << 18)
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "_N", "feat", rows)
    with feature_loader(tmp_path / "a.gids", [TABLE], memory=64 << 20) as loader:
        read_all(loader, [{TABLE: torch.tensor([i, 9 - i])} for i in range(10)], rows, 64 << 20)
        assert loader.engine.depth == 8
    with feature_loader(tmp_path / "a.gids", [TABLE], memory="64MB", queue_depth=3) as loader:
        assert loader.engine.depth == 3


def test_few_lines_are_warned_of_once_with_the_memory_that_is_enough(
    path: Path, source: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    batches = reads(1330, 3)

    def warnings_of(memory: int, **options: Any) -> list[str]:
        caplog.clear()
        options = {"queue_depth": 4, "reads": "random"} | options
        with feature_loader(path, [TABLE], memory=memory, **options) as loader:
            for _ in range(2):
                read_all(loader, batches, source, memory)
        return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]

    page_bytes = feature_loader(path, [TABLE]).tables[0].page_bytes
    short = 2_200_000 if page_bytes == 512 else 3_300_000
    [said] = warnings_of(short)
    enough = re.search(rf"memory={short} leaves .* for the cache, .* Give memory=([\d_]+) or more", said)
    assert enough
    assert short < int(enough[1]) < 4 * short
    assert warnings_of(int(enough[1])) == []
    assert warnings_of(short, cache=0) == []


@pytest.mark.parametrize("reads", ["random", "auto"])
def test_memory_that_is_far_too_small_is_one_warning(
    path: Path, source: torch.Tensor, caplog: pytest.LogCaptureFixture, reads: str
) -> None:
    """Not also one that packs do not fit, and one of each minibatch that is a little larger."""
    batches = [{TABLE: torch.arange(n) * 11 % len(source)} for n in (1300, 1300, 1400, 1560)]
    options: dict[str, Any] = {"queue_depth": 4, "reads": reads}
    memory = least_memory(path, batches, **options)
    with feature_loader(path, [TABLE], memory=memory, **options) as loader:
        for _ in range(2):
            for ids, features in loader.attach(batches, same, count=len(batches)):
                assert torch.equal(features[TABLE], source[ids[TABLE]])
        [few] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert "for the cache" in few
        list(loader.attach([{TABLE: torch.arange(2600)}], same))
        [_, larger] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert "larger than memory was divided for" in larger


def test_stats_always_have_lines_and_packs(path: Path) -> None:
    source = gids.open(path, memory="16MB", reads="random")
    assert source.stats()["packs"]["superbatches"] == 0
    for tables in ([], [TABLE]):
        loader = gids.NodeLoader(source, torch.arange(90), [2], tables=tables, batch_size=30)
        for stats in (loader.stats(), [loader.stats() for _ in loader][1], loader.stats()):
            assert stats["packs"]["superbatches"] == 0
            assert stats["memory"]["lines"] == 0 or tables
