from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# Here, and in the processes that tests start, torch's threads sleep while they wait. By default they spin, at
# the expense of the other test processes. It must be set before torch is imported.
os.environ["OMP_WAIT_POLICY"] = "passive"

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # datasets.py, emulator.py

import emulator
from host_allocator import HostAllocator

from gids import cuda, io
from gids.cuda.device import Device
from gids.cuda.driver import ask_driver

collect_ignore = []
spec = importlib.util.find_spec("dgl")
# There is no DGL for Python 3.13. The folder tests/dgl, if it is on the path, has no origin.
if spec is None or spec.origin is None:
    collect_ignore += ["dgl", "graphbolt", "bench_command/test_epoch.py"]

SYNCS = {name: getattr(os, name) for name in ("fsync", "fdatasync")}
"""What waits for a disk. Tests write small datasets by the thousand, and none of them survives a power cut;
test_kills.py has processes of its own, whose calls it records."""


def _only_check(fd: int) -> None:
    """In place of these, for tests that do not ask for on_disk."""
    os.fstat(fd)


for name in SYNCS:
    setattr(os, name, _only_check)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slowest-files", type=int, default=0, metavar="N", help="print the slowest files")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests wait for the disk or other processes a quarter of the time."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The slowest files, as the table in CONTRIBUTING.md."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration  # type: ignore[assignment]
    for file, sum_s in seconds.most_common(config.getoption("--slowest-files")):
        terminalreporter.write_line(f"| {file} | {sum_s:.0f} s |")


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.has_plugin("cacheprovider"):
        emulator.folder = config.cache.mkdir("emulator")  # type: ignore[union-attr]


LONGEST = [
    "distributed",
    "native/test_native.py",
    "torture/test_every_loader.py",
    "native/test_nvrtc.py",
    "write/test_kills.py",
    "test_gpu_pack.py",
    "dgl/test_dgl_processes.py",
    "cache/test_cache_contract.py",
    "examples/test_examples.py",
    "pyg/test_pyg_lightning.py",
    "bench_command/test_epoch.py",
    "test_bench.py",
    "cache/test_device_order.py",
    "pyg/test_pyg_stores.py",
    "test_gpu_check.py",
    "test_bench_gpu.py",
    "cuda/test_late_loaders.py",
    "dgl/test_dgl_samplers.py",
    "test_imports.py",
    "pyg/test_pyg_links.py",
]
"""Files, and a folder, that take more than about 20 s if slow tests run, and those of a few long tests. They
start first: at the end, one process would run them alone."""
TOGETHER = "tests/distributed/"
"""A folder whose tests one process runs: they share ranks, which take seconds to start, and mostly wait."""
APART = "tests/test_bench.py"
"""A file of minutes in all, whose tests share nothing: each process takes the next test."""


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """For `--dist loadfile`, when all tests run."""
    if config.option.dist != "loadfile" or config.args_source != pytest.Config.ArgsSource.TESTPATHS:
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(TOGETHER):
                return TOGETHER
            return nodeid if nodeid.startswith(APART) else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each process of pytest-xdist takes the next file: the longest ones, then those of the most tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    tests = Counter(item.path for item in items)
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}

    def place(path: Path) -> int:
        return places.get(path, places.get(path.parent, len(LONGEST)))

    items.sort(key=lambda item: (place(item.path), -tests[item.path], item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Importing tests leaves no garbage that is worth looking for."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Garbage collection, which many tests ask for, need not look at what was imported."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws does not depend on those before it."""
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A LateDevice that was not closed goes on checking torch's calls."""
    while torch._C._len_torch_function_stack():
        torch.overrides._pop_mode()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models on small tensors: torch's threads would wait for each other, above all on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a cold page cache does: files are synced. Skips where temporary files are in memory
    for good."""
    for name, sync in SYNCS.items():
        monkeypatch.setattr(os, name, sync)
    (tmp_path / "probed").touch()
    file_system = io.probe(tmp_path / "probed")["file_system"]
    (tmp_path / "probed").unlink()
    if file_system in ("tmpfs", "ramfs"):
        pytest.skip(f"{tmp_path}: a {file_system} has no cold files")


@pytest.fixture
def gpu() -> Device:
    """The GPU, for tests marked so. Skips without a driver and a device; whatever else is missing fails."""
    if fault := ask_driver().fault:
        pytest.skip(f"no CUDA device: {fault}")
    return cuda.open_device("cuda")


@pytest.fixture
def emulator_seed(request: pytest.FixtureRequest) -> int:
    """The order in which the emulator runs threads, by test. $GIDS_EMULATOR_SEED, a number, changes all."""
    seed = zlib.crc32(request.node.nodeid.encode()) + int(os.environ.get("GIDS_EMULATOR_SEED", "0"))
    print(f"emulator seed {seed}")
    return seed


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device that runs kernels: the emulator, and a GPU where there is one."""
    if request.param == "cuda":
        yield request.getfixturevalue("gpu")
        return
    emulated = emulator.EmulatedDevice(request.getfixturevalue("emulator_seed"))
    yield emulated
    assert not emulated.mapped, "host memory is still mapped"


@pytest.fixture
def cuda_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], None]:
    """cuda_is(device): from now on gids.cuda.open_device() opens that device, whatever it is asked for."""

    def patch(device: Device) -> None:
        monkeypatch.setattr(cuda, "open_device", lambda name="cuda": device)

    return patch


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> HostAllocator:
    """A stand-in for torch's pinned memory."""
    allocator = HostAllocator()
    allocator.replace_torchs(monkeypatch)
    return allocator


@pytest.fixture(scope="session")
def written_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from datasets import write_dataset

    return write_dataset(tmp_path_factory.mktemp("written") / "mag.gids")


@pytest.fixture
def dataset(tmp_path: Path, written_dataset: Path) -> Path:
    """A copy of datasets.write_dataset's, unless a folder has its own."""
    return Path(shutil.copytree(written_dataset, tmp_path / "mag.gids"))
