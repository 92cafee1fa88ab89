"""The bench commands with cache, rows and topology on a device: emulated, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gids
from gids.bench import bandwidth, device_extents
from gids.cuda import Device
from gids.io import Engine
from gids.io.device.kvikio_probe import KvikioProbe, probe_kvikio
from gids.io.device.pinned_reader import PinnedExtentReader
from gids.store import FeatureStore
from gids.trace import Trace, record

Bench = Callable[..., tuple[int, str, dict[str, Any]]]


def test_rows_are_aggregated_on_the_device(
    dataset: Path,
    bench: Bench,
    device: Device,
    cuda_is: Callable[[Device], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda_is(device)
    monkeypatch.setattr(bandwidth, "_PROBE_S", 0.05)
    monkeypatch.setattr("gids.bench.fio.shutil", SimpleNamespace(which=lambda _: None))
    small = ("--batch-size", 4, "--fanouts", "2,2", "--iterations", 4, "--engines", "threads", "--depth", 16)
    status, said, report = bench("bandwidth", dataset, *small, "--window", 2, "--device", "cuda")
    assert status == 0, said
    (figure,) = (f for f in report["figures"] if f["setting"]["engine"] == "threads")
    assert figure["metrics"]["iterations"]["median"] == 4
    assert report["subject"]["device"] == "cuda"


EXTENTS = ("--engines", "threads,kvikio", "--device", "cuda", "--extents", "16KiB,1GB", "--depth", "8,16")
SHORT = ("--batch-size", 4, "--fanouts", "2,2", "--iterations", 2, "--window", 1)


def extent_figures(report: dict[str, Any]) -> dict[tuple[str, str, int | None], dict[str, Any]]:
    found = [f for f in report["figures"] if "extents" in (f["setting"]["batch"] or "")]
    keys = ("engine", "batch", "depth")
    return {tuple(f["setting"][key] for key in keys): f["metrics"] for f in found}  # type: ignore[misc]


@pytest.fixture
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_PROBE_S", 0.05)
    monkeypatch.setattr(bandwidth, "_EXTENTS_S", 0.05)
    monkeypatch.setattr("gids.bench.fio.shutil", SimpleNamespace(which=lambda _: None))


@pytest.mark.usefixtures("short_probes")
def test_extents_are_read_by_kvikio_and_by_pinned_staging(
    dataset: Path,
    bench: Bench,
    device: Device,
    cuda_is: Callable[[Device], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Where kvikio does not work, a reader of ours stands for it, so that the command's part is tested."""
    cuda_is(device)

    class Stand(PinnedExtentReader):
        name = "kvikio (GDS)"  # type: ignore[assignment]

    def open_reader(device: Device, engine: Engine, paths: Any, *, kind: str) -> PinnedExtentReader:
        return (Stand if kind == "kvikio" else PinnedExtentReader)(device, engine, paths)

    monkeypatch.setattr(device_extents, "open_extent_reader", open_reader)
    plot = tmp_path / "extents.png"
    status, said, report = bench("bandwidth", dataset, *SHORT, *EXTENTS, "--repeat", 2, "--plot", plot)
    assert status == 0, said
    assert "their figures are not comparable" in said
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = extent_figures(report)
    readers = [("threads+pinned", 8), ("threads+pinned", 16), ("kvikio (GDS)", None)]
    sizes = ["16 KiB extents", "12000 KiB extents"]  # a GB is more than the shard has
    assert list(found) == [(name, size, depth) for size in sizes for name, depth in readers]
    for metrics in found.values():
        assert len(metrics["device_bytes_per_s"]["values"]) == 2
        assert metrics["device_bytes_per_s"] == metrics["effective_bytes_per_s"]

    def read_nothing(self: Any, *_: Any) -> None:
        pass

    monkeypatch.setattr(Stand, "read", read_nothing)
    status, said, report = bench("bandwidth", dataset, *SHORT, *EXTENTS)
    assert status == 2
    assert "kvikio (GDS) reads extents into device memory that differ from the files" in said
    assert report == {}


@pytest.mark.usefixtures("short_probes")
def test_kvikio_that_is_not_there_is_said(
    dataset: Path,
    bench: Bench,
    device: Device,
    cuda_is: Callable[[Device], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda_is(device)
    probe = KvikioProbe(None, False, False, "kvikio is not installed")
    monkeypatch.setattr("gids.io.device.kvikio_probe.probe_kvikio", lambda *_: probe)
    status, said, _ = bench("bandwidth", dataset, *SHORT, *EXTENTS)
    assert status == 2
    assert "kvikio is not installed: pip install kvikio-cu13" in said


@pytest.mark.usefixtures("short_probes")
def test_kvikio_itself_reads_extents(
    dataset: Path, bench: Bench, device: Device, cuda_is: Callable[[Device], None]
) -> None:
    pytest.importorskip("kvikio")
    if device.torch_device.type != "cuda":
        pytest.skip("kvikio needs a CUDA device")
    found = probe_kvikio(FeatureStore(dataset).table("feat").shard_paths[0], device.torch_device.index or 0)
    if not (found.gds or found.compat):
        pytest.skip(found.reason)
    cuda_is(device)
    only = ("--engines", "kvikio", "--device", "cuda", "--extents", "64KiB")
    status, said, report = bench("bandwidth", dataset, *SHORT, *only)
    assert status == 0, said
    assert [name.partition(" ")[0] for name, _, _ in extent_figures(report)][-1] == "kvikio"


def test_minibatches_are_sampled_on_the_device(
    dataset: Path, bench: Bench, device: Device, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(device)
    small = ("--batch-size", 4, "--fanouts", "2,2", "--batches", 2)
    status, said, report = bench("sampling", dataset, *small, "--device", "cuda", "--place", "host")
    assert status == 0, said
    (figure,) = report["figures"]
    _, _, on_host = bench("sampling", dataset, *small, "--threads", 1)
    for name in ("nodes_per_batch", "edges_per_batch"):
        assert figure["metrics"][name] == on_host["figures"][0]["metrics"][name]


def test_a_run_on_the_device_is_recorded(
    dataset: Path, bench: Bench, device: Device, cuda_is: Callable[[Device], None], tmp_path: Path
) -> None:
    cuda_is(device)
    path = tmp_path / "run.trace"
    seeds = torch.arange(0, 600, 10)
    options: dict[str, Any] = {"device_memory": 64 << 20, "cache": 1 << 20, "window": 4}
    with gids.NodeLoader(
        gids.open(dataset, **options), seeds, [2, 2], batch_size=8, device="cuda", topology_on="host"
    ) as loader:
        with record(loader, path):
            for _ in loader:
                pass
        pages = loader.stats()["pages"]
    with Trace(path) as trace:
        assert trace.device == "cuda"
        assert trace.batch_count == 8
        assert int(trace.page_counts().sum()) == pages
    status, said, _ = bench("hit-ratio", "--replay", path, "--cache", "10%", "--policies", "lookahead")
    assert status == 0, said
    assert "the run was on cuda" in said
