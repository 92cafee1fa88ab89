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
from open_loaders import feature_loader

import gids
from gids.cuda import Device
from gids.write import DatasetWriter

ROWS, DIM = 40_000, 128  # 20 MB of rows of 512 B
TABLE = "_N.feat"
Ids = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def source() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, source: torch.Tensor) -> Path:
    path = tmp_path_factory.mktemp("memory") / "g.gids"
    edges = in_edges([9] * 900 + [0] * (ROWS - 900), ROWS, 1, power=3)
    with DatasetWriter(path, page_bytes=512) as writer:
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


def test_a_quarter_of_the_rows_bytes_is_enough_and_most_of_it_is_cache(
    path: Path, source: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """A hundredth of a table of 2 GB with 512 MB, and minibatches of 133,000 rows. The log says it once."""
    caplog.set_level("INFO", "gids")
    given = 5_120_000
    with feature_loader(path, [TABLE], memory=given, queue_depth=4, reads="random") as loader:
        read_all(loader, reads(1330, 20), source, given)
        read_all(loader, reads(1330, 20), source, given)
        stats = loader.stats()
    assert stats["memory"]["lines"] >= 1_500_000
    assert stats["window"] < 16
    assert stats["hit_ratio"] > 0.3
    [said] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory of ")]
    assert re.match(r"memory of 5.1 MB: page tables [\d.]+ kB, bounce pool .*, lines [\d.]+ MB, ", said)
    assert said.endswith(f"with a window of {stats['window']} minibatches")


def least_memory(path: Path, batches: list[Ids], **options: Any) -> int:
    """What the error says is enough."""
    with feature_loader(path, [TABLE], memory=1000, **options) as loader:
        with pytest.raises(gids.MemoryBudgetError, match="is too small") as caught:
            next(loader.attach(batches, same))
    found = re.search(r"Give memory=([\d_]+) or more", str(caught.value))
    return int(found[1])


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_rows_are_right_in_the_memory_that_the_error_says_is_enough(
    path: Path, source: torch.Tensor, policy: str
) -> None:
    batches = reads(250, 26)
    options: dict[str, Any] = {"policy": policy, "window": 7, "queue_depth": 64, "reads": "random"}
    least = least_memory(path, batches, **options)
    windows = []
    for given in (least, 40 * least):
        with feature_loader(path, [TABLE], memory=given, **options) as loader:
            read_all(loader, batches, source, given)
            read_all(loader, batches[:2], source, given)  # another epoch
            windows.append(loader.stats()["window"])
    assert windows[0] < windows[1] == 7


def test_a_device_with_little_memory_has_a_shorter_window(
    path: Path, source: torch.Tensor, device: Device, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(device)
    batches, given = reads(1330, 3), 5_120_000
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
        read_all(loader, [{TABLE: torch.tensor([i, 9 - i])} for i in range(4)], rows, 64 << 20)
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

    short = 2_200_000
    [said] = warnings_of(short)
    enough = re.search(rf"memory={short} leaves .* for the cache, .* Give memory=([\d_]+) or more", said)
    assert enough
    assert short < int(enough[1]) < 4 * short
    assert warnings_of(int(enough[1])) == []
    assert warnings_of(short, cache=0) == []


def test_memory_that_is_far_too_small_is_one_warning(
    path: Path, source: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """Not also one that packs do not fit, and one of each minibatch that is a little larger."""
    batches = [{TABLE: torch.arange(n) * 11 % len(source)} for n in (1300, 1300, 1400, 1560)]
    options: dict[str, Any] = {"queue_depth": 4, "reads": "auto"}
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
