"""`gids bench bandwidth`: figures, series, ceilings, bad input. Nothing is asserted about speed."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.figure
import pytest
import torch

from gids.bench import aggregation, bandwidth, bandwidth_plot, limited, probe
from gids.bench.aggregation import Measured
from gids.bench.report import Report
from gids.errors import StorageError
from gids.measure.isolation import FreshProcessOutOfMemory
from gids.measure.sides import why_no_limit
from gids.write import DatasetWriter

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
    for engine in ("raw probe", "threads"):
        (figure,) = figures(report, engine)
        assert figure["setting"]["state"] == "warm"
        assert "of_ceiling" not in figure["metrics"]  # memory has another


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
        (["--rows", "9"], "nothing is sampled: leave out --fanouts, --batch-size"),
        (["--extents", "1MiB"], "--extents are read beside kvikio, which --engines does not name"),
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
def test_a_small_file_is_read_again_until_its_time_says_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    path = tmp_path / "shard.bin"
    path.write_bytes(bytes(8 * 4096))
    assert probe.random_reads([path], page_bytes=4096, seconds=seconds).passes == 1 or seconds > 0
    assert probe.random_reads([path], page_bytes=4096, seconds=0.05).passes > 1


def plotted(run_count: int) -> tuple[Report, Any]:
    """A report of runs at two depths, cold and warm, and its figure."""
    report = Report("bandwidth", ["gids"])
    for depth in (8, 64):
        setting = {"batch": None, "depth": depth, "cache": None, "window": None, "state": "cold"}
        report.figure(engine="raw probe", **setting).add(device_bytes_per_s=depth * 1e6)
    for number in range(run_count):
        setting = {
            "engine": ("uring", "threads")[number % 2],
            "batch": f"{number // 8} seeds",
            "depth": (8, 64)[number // 2 % 2],
            "cache": "1 MB",
            "window": 16,
            "state": ("cold", "warm")[number // 4 % 2],
        }
        rates = [1e6 * (number + step) for step in range(20)]
        values = {"effective_bytes_per_s": rates, "device_bytes_per_s": rates}
        report.figure(**setting).add(**{name: found[0] for name, found in values.items()})
        report.series.append({"name": "first", "setting": setting, "values": values})
    figure = matplotlib.figure.Figure(figsize=bandwidth_plot.size(report))
    bandwidth_plot.draw(report, figure)
    return report, figure


@pytest.mark.parametrize(
    ("run_count", "panels", "said"), [(2, 2, ""), (7, 2, ""), (32, 8, " (8 of 32 settings)")]
)
def test_no_line_of_the_figure_is_cut_off_and_many_settings_get_panels(
    run_count: int, panels: int, said: str
) -> None:
    report, figure = plotted(run_count)
    above, below = figure.subfigs
    assert above.get_suptitle() == f"First iterations{said}"
    assert len(above.axes) == panels
    for panel in above.axes:
        assert panel.get_ylabel() == "MB/s"
        lines = [line.get_ydata() for line in panel.lines]
        assert 0 <= panel.get_ylim()[0] <= min(map(min, lines))
        assert panel.get_ylim()[1] >= max(map(max, lines))
        colours = {(line.get_color(), line.get_marker()) for line in panel.lines}
        assert len(colours) == len(lines)  # told apart
    (bars,) = below.axes
    assert len(bars.get_yticks()) == run_count
    assert len({label.get_text() for label in bars.get_yticklabels()}) == run_count
    assert bandwidth_plot.size(report)[0] == 8  # fits on a page


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 MB of rows."""
    path = tmp_path_factory.mktemp("large") / "x.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "_N", "feat", torch.arange(25_600 * 1024).reshape(-1, 1024).float())
    return path


ROOM = "note: the page cache has room for the whole table, so figures of mmap are of memory"


def test_mmap_of_a_table_that_fits_into_memory_is_said_to_be_memory_above_the_table(
    dataset: Path, bench: Bench, on_disk: None
) -> None:
    status, said, report = bench("bandwidth", dataset, *SMALL, "--engines", "threads,mmap")
    assert status == 0, said
    assert 0 < said.index(ROOM) < said.index("raw probe")
    assert "--memory-limit BYTES compares under less memory" in " ".join(said.split())
    assert sum("page cache has room" in note for note in report["notes"]) == 1


def test_engines_that_read_past_the_page_cache_have_no_such_note(
    dataset: Path, bench: Bench, on_disk: None
) -> None:
    status, said, report = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert status == 0, said
    assert not any("page cache has room" in note for note in report["notes"])


def test_threads_that_may_not_read_directly_have_it(
    dataset: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"direct": False, "direct_note": "refused", "file_system": "none"}
    monkeypatch.setattr("gids.io.engine.probe", lambda _: found)
    status, said, _ = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert status == 0, said
    assert "so figures of threads are of memory" in said


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
    assert not any("page cache has room" in note for note in report["notes"])
    assert len(figures(report, "raw probe")) == 1
    assert {series["setting"]["engine"] for series in report["series"]} == {"threads", "mmap"}
    for engine in ("threads", "mmap"):
        (figure,) = figures(report, engine)
        metrics = {name: values["median"] for name, values in figure["metrics"].items()}
        assert metrics["iterations"] == 100
        # 205 MB of rows are asked for. With room for all 105 MB of the table, half of them would be read.
        assert metrics["device_bytes_per_s"] > 0.6 * metrics["effective_bytes_per_s"]


def test_a_measurement_that_needs_more_than_its_limit_says_what_to_do(
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


def test_a_memory_limit_without_the_right_to_set_one_is_refused(
    dataset: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "why_no_limit", lambda: "no memory control group: Permission denied")
    status, said, _ = bench("bandwidth", dataset, *SMALL, "--memory-limit", "50MB")
    assert status == 2
    assert "--memory-limit: memory cannot be bounded here: no memory control group: Permission denied" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--memory-limit", "1MB"],
            "--memory-limit 1.0 MB: the cache alone takes 1.2 MB of it; give a larger",
        ),
        (
            ["--memory-limit", "1GB", "--states", "warm"],
            "--states warm fills the page cache, which --memory-limit",
        ),
    ],
)
def test_a_memory_limit_that_makes_no_sense_is_refused(
    dataset: Path, bench: Bench, args: list[str], said: str
) -> None:
    if reason := why_no_limit():
        pytest.skip(reason)
    status, text, _ = bench("bandwidth", dataset, *SMALL, *args)
    assert status == 2
    assert said in text


def test_percentiles_are_those_of_the_histogram() -> None:
    import numpy as np

    ends = np.array([1e-6, 2e-6, 3e-6, 4e-6])
    found = Measured(latencies=(ends, np.array([50, 40, 0, 10])))
    assert [found.percentile(share) for share in (0.1, 0.5, 0.9, 0.99)] == [1e-6, 1e-6, 2e-6, 4e-6]
    assert Measured(latencies=(ends, np.zeros(4, np.int64))).percentile(0.5) is None
