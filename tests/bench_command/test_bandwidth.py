"""`gids bench bandwidth`: results, series, ceilings, bad input. Speed is not checked."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gids.bench import aggregation, bandwidth, limited, probe
from gids.bench.aggregation import Measured
from gids.errors import StorageError
from gids.measure.isolation import FreshProcessOutOfMemory
from gids.measure.sides import why_no_limit
from gids.write import DatasetWriter

Bench = Callable[..., tuple[int, str, dict[str, Any]]]
SMALL = ("--batch-size", "8", "--fanouts", "3,3", "--iterations", 24, "--seconds", 30)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_PROBE_S", 0.05)


def figures(report: dict[str, Any], engine: str) -> list[dict[str, Any]]:
    return [f for f in report["figures"] if f["setting"]["engine"] == engine]


def test_each_engine_is_compared_with_the_ceiling(
    dataset: Path, bench: Bench, tmp_path: Path, on_disk: None
) -> None:
    plot = tmp_path / "bandwidth.png"
    engines = ("threads", "mmap")
    args = ("--engines", ",".join(engines), "--states", "cold,warm", "--repeat", 2, "--plot", plot)
    status, said, report = bench("bandwidth", dataset, *SMALL, *args)
    assert status == 0, said
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
    assert "minibatches are uniform random rows" in said
    assert "holds the whole table" in said
    assert report["subject"]["shards"] == 2
    assert [f["setting"]["depth"] for f in figures(report, "threads")] == [16, 32]


def test_results_are_marked_warm_if_the_page_cache_cannot_be_dropped(
    dataset: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(probe, "drop_page_cache", refuse)
    status, said, report = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert status == 0
    assert "results are WARM: the page cache could not be emptied" in said
    for engine in ("raw probe", "threads"):
        (figure,) = figures(report, engine)
        assert figure["setting"]["state"] == "warm"
        assert "of_ceiling" not in figure["metrics"]  # memory has another


def test_a_wrong_row_is_found_before_the_measurement(
    dataset: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids), 1024)

    monkeypatch.setattr("gids.store.table.Table.read_rows", wrong)
    monkeypatch.setattr(aggregation, "aggregate", None)
    status, said, _ = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert status == 2
    assert "engine 'threads' reads rows of '_N.feat' that differ" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--engines", "spdk"], "no engine 'spdk' (there are uring, threads, mmap)"),
        (["--policy", "best"], "no policy 'best' (there are lookahead"),
        (["--states", "hot"], "no state 'hot' of the page cache (there are cold, warm)"),
        (["--cache", "5x"], "--cache 5x is not a cache size: use 2% (of the pages) or 4GB"),
        (["--cache", "900TB"], "more than half of the available memory"),
        (["--window", "24"], "live minibatches"),
        (["--rows", "9"], "samples nothing: remove --fanouts, --batch-size"),
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


@pytest.mark.parametrize("seconds", [-1.0, 0.001])
def test_a_small_file_is_read_several_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    path = tmp_path / "shard.bin"
    path.write_bytes(bytes(8 * 4096))
    assert probe.random_reads([path], page_bytes=4096, seconds=seconds).passes == 1 or seconds > 0
    assert probe.random_reads([path], page_bytes=4096, seconds=0.05).passes > 1


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 MB of rows."""
    path = tmp_path_factory.mktemp("large") / "x.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "_N", "feat", torch.arange(25_600 * 1024).reshape(-1, 1024).float())
    return path


ROOM = "note: the whole table fits into the page cache, so mmap measures memory"


def test_a_note_above_the_table_says_that_mmap_measures_memory(
    dataset: Path, bench: Bench, on_disk: None
) -> None:
    status, said, report = bench("bandwidth", dataset, *SMALL, "--engines", "threads,mmap")
    assert status == 0, said
    assert 0 < said.index(ROOM) < said.index("raw probe")
    assert "--memory-limit BYTES measures with less memory" in " ".join(said.split())
    assert sum("fits into the page cache" in note for note in report["notes"]) == 1


def test_direct_io_needs_no_note_about_the_page_cache(dataset: Path, bench: Bench, on_disk: None) -> None:
    status, said, report = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert status == 0, said
    assert not any("fits into the page cache" in note for note in report["notes"])


def test_a_note_says_that_threads_without_direct_io_measure_memory(
    dataset: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"direct": False, "direct_note": "refused", "file_system": "none"}
    monkeypatch.setattr("gids.io.engine.probe", lambda _: found)
    status, said, _ = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert status == 0, said
    assert "so threads measures memory" in said


@pytest.mark.slow  # where the disk reads far ahead
def test_under_a_memory_limit_the_page_cache_does_not_hold_the_table(
    large: Path, bench: Bench, on_disk: None
) -> None:
    if reason := why_no_limit():
        pytest.skip(reason)
    args = ("--rows", 500, "--iterations", 100, "--engines", "threads,mmap", "--cache", "5MB")
    status, said, report = bench("bandwidth", large, *args, "--memory-limit", "50MB")
    assert status == 0, said
    assert report["subject"]["memory_limit_bytes"] == 50_000_000
    assert not any("fits into the page cache" in note for note in report["notes"])
    assert len(figures(report, "raw probe")) == 1
    assert {series["setting"]["engine"] for series in report["series"]} == {"threads", "mmap"}
    for engine in ("threads", "mmap"):
        (figure,) = figures(report, engine)
        metrics = {name: values["median"] for name, values in figure["metrics"].items()}
        assert metrics["iterations"] == 100
        # 205 MB of rows are asked for. With room for all 105 MB of the table, half of them would be read.
        assert metrics["device_bytes_per_s"] > 0.6 * metrics["effective_bytes_per_s"]


def test_running_out_of_limited_memory_gives_advice(
    dataset: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise FreshProcessOutOfMemory(
            "killed", "needed more than 50.0 MB of memory and was killed by the kernel"
        )

    monkeypatch.setattr(limited, "run_fresh", fail)
    monkeypatch.setattr(limited, "MemoryGroup", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(limited, "why_no_limit", lambda: "")
    status, said, _ = bench("bandwidth", dataset, *SMALL, "--memory-limit", "50MB")
    assert status == 2
    assert "the measurement needed more than 50.0 MB of memory" in said
    assert "give a larger --memory-limit, or a smaller --cache" in said


def test_a_memory_limit_without_permission_is_refused(
    dataset: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "why_no_limit", lambda: "no memory control group: Permission denied")
    status, said, _ = bench("bandwidth", dataset, *SMALL, "--memory-limit", "50MB")
    assert status == 2
    assert "--memory-limit cannot limit memory here: no memory control group: Permission denied" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--memory-limit", "1MB"],
            "--memory-limit 1.0 MB: the cache alone takes 1.2 MB of it; give a larger",
        ),
        (
            ["--memory-limit", "1GB", "--states", "warm"],
            "--states warm fills the page cache, which --memory-limit limits",
        ),
    ],
)
def test_an_impossible_memory_limit_is_refused(
    dataset: Path, bench: Bench, args: list[str], said: str
) -> None:
    if reason := why_no_limit():
        pytest.skip(reason)
    status, text, _ = bench("bandwidth", dataset, *SMALL, *args)
    assert status == 2
    assert said in text


def test_percentiles_follow_the_histogram() -> None:
    import numpy as np

    ends = np.array([1e-6, 2e-6, 3e-6, 4e-6])
    found = Measured(latencies=(ends, np.array([50, 40, 0, 10])))
    assert [found.percentile(share) for share in (0.1, 0.5, 0.9, 0.99)] == [1e-6, 1e-6, 2e-6, 4e-6]
    assert Measured(latencies=(ends, np.zeros(4, np.int64))).percentile(0.5) is None
