"""`gids bench bandwidth`: figures, series, ceilings, bad input. Nothing is asserted about speed."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gids.bench import aggregation, bandwidth, probe
from gids.bench.aggregation import Measured
from gids.errors import StorageError
from gids.store import DatasetWriter

Bench = Callable[..., tuple[int, str, dict[str, Any]]]
SMALL = ("--batch-size", "8", "--fanouts", "3,3", "--iterations", 24, "--seconds", 30)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_PROBE_S", 0.05)
    monkeypatch.setattr("gids.bench.fio.shutil", SimpleNamespace(which=lambda _: None))


def figures(report: dict[str, Any], engine: str) -> list[dict[str, Any]]:
    return [f for f in report["figures"] if f["setting"]["engine"] == engine]


def test_each_engine_is_measured_beside_the_ceiling(
    dataset: Path, bench: Bench, tmp_path: Path, on_disk: None
) -> None:
    plot = tmp_path / "bandwidth.png"
    engines = ("threads", "mmap")
    args = ("--engines", ",".join(engines), "--states", "cold,warm", "--repeat", 2, "--plot", plot)
    status, said, report = bench("bandwidth", dataset, *SMALL, *args)
    assert status == 0, said
    assert "fio is not installed" in said
    assert plot.read_bytes().startswith(b"\x89PNG")
    (raw,) = figures(report, "raw probe")
    assert raw["metrics"]["of_ceiling"]["median"] == 1
    for engine in engines:
        assert len(figures(report, engine)) == 2  # cold, warm
        for figure in figures(report, engine):
            metrics = figure["metrics"]
            assert len(metrics["effective_bytes_per_s"]["values"]) == 2
            assert metrics["iterations"]["median"] == 24
            assert 0 < metrics["hit_ratio"]["median"] < 1
            assert metrics["latency_p50_s"]["median"] <= metrics["latency_p99_s"]["median"]
            assert ("of_ceiling" in metrics) == (figure["setting"]["state"] == "cold")
    assert len(report["series"]) == 4
    for series in report["series"]:
        assert {len(values) for values in series["values"].values()} == {bandwidth.FIRST_ITERATIONS}
        assert series["values"]["hit_ratio"][0] == 0  # the cache began empty


def test_without_topology_rows_are_drawn_uniformly(bench: Bench, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "rows.gids", page_bytes=4096, stripe=2) as writer:
        writer.write_table("node", "_N", "feat", torch.randn(2000, 200))
    args = ("--engines", "threads", "--cache", "100%", "--depth", "16,32")
    status, said, report = bench("bandwidth", tmp_path / "rows.gids", "--iterations", 3, *args)
    assert status == 0, said
    assert "minibatches are of uniform rows" in said
    assert "holds the whole table" in said
    assert report["subject"]["shards"] == 2
    assert [f["setting"]["depth"] for f in figures(report, "threads")] == [16, 32]


def test_figures_are_marked_warm_where_the_page_cache_cannot_be_dropped(
    dataset: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(probe, "drop_page_cache", refuse)
    status, said, report = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert status == 0
    assert "figures are WARM: the page cache could not be emptied" in said
    assert [f["setting"]["state"] for f in figures(report, "threads")] == ["warm"]


def test_a_wrong_row_is_found_before_anything_is_timed(
    dataset: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids), 1024)

    monkeypatch.setattr("gids.store.table.Table.read_rows", wrong)
    monkeypatch.setattr(aggregation, "aggregate", None)
    status, said, _ = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert status == 2
    assert "engine 'threads' hands out rows of '_N.feat' that differ" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--engines", "spdk"], "no engine 'spdk' (there are uring, threads, mmap and, on CUDA, kvikio)"),
        (["--engines", "kvikio"], "kvikio reads into GPU memory: give --device cuda"),
        (["--policy", "best"], "no policy 'best' (there are lookahead"),
        (["--states", "hot"], "no state 'hot' of the page cache (there are cold, warm)"),
        (["--cache", "5x"], "--cache 5x: write 2% of the pages, or 4GB of lines"),
        (["--cache", "900TB"], "more than half of the memory"),
        (["--window", "24"], "live minibatches"),
    ],
)
def test_bad_options_are_refused_with_the_reason(
    dataset: Path, bench: Bench, args: list[str], said: str
) -> None:
    status, text, _ = bench("bandwidth", dataset, *SMALL, *args)
    assert status == 2
    assert said in text


def test_a_shard_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard.bin"
    path.write_bytes(bytes(8 * 4096))
    sizes = iter([1 << 20])
    monkeypatch.setattr("os.path.getsize", lambda _: next(sizes, 8 * 4096))  # as if cut since then
    with pytest.raises(StorageError, match=r"shard\.bin at byte"):
        probe.random_reads([path], page_bytes=4096, seconds=1)


def test_percentiles_are_those_of_the_histogram() -> None:
    import numpy as np

    ends = np.array([1e-6, 2e-6, 3e-6, 4e-6])
    found = Measured(latencies=(ends, np.array([50, 40, 0, 10])))
    assert [found.percentile(share) for share in (0.1, 0.5, 0.9, 0.99)] == [1e-6, 1e-6, 2e-6, 4e-6]
    assert Measured(latencies=(ends, np.zeros(4, np.int64))).percentile(0.5) is None
