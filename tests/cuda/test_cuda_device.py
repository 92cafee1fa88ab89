"""The CUDA device without a GPU: its calls to a libcuda that records them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from array import array
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gids.cuda.cuda_device as opening
from gids.cuda.compiler import Sources
from gids.cuda.cuda_device import CudaDevice
from gids.cuda.driver import CudaError, Libcuda

HERE = Path(__file__).parent
STREAM: Any = SimpleNamespace(cuda_stream=0xABC)
Record = Callable[[], list[str]]
Load = Callable[[str], Any]
CONTEXT = "1064"  # of device 0, as the stub names it
KERNELS = """
extern "C" __global__ void first(const int* a, unsigned b, float c) {}
extern "C" __global__ __launch_bounds__(256) void second(const int* a, unsigned b, float c) {}
"""


class FakeCompiler:
    version = (13, 0)

    def __init__(self, root: Path) -> None:
        (root / "noun").mkdir()
        (root / "noun" / "unit.cu").write_text(KERNELS)
        self.sources = Sources(root)
        self.compiled: list[tuple[str, str]] = []

    def target(self, capability: tuple[int, int]) -> str:
        assert capability == (9, 0)
        return "sm_90"

    def compile(self, unit: Any, target: str) -> bytes:
        self.compiled.append((unit.name, target))
        return b"\x7fELF of a unit"


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """tests/cuda/libcuda.c, against NVIDIA's cuda.h where it is installed."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    spec = find_spec("nvidia")
    folders = [Path(f) / "cu13" / "include" for f in spec.submodule_search_locations or []] if spec else []
    header = [f"-I{folder}" for folder in folders if (folder / "cuda.h").is_file()]
    flags = [*header, "-DHAVE_CUDA_H"] if header else []
    library = tmp_path_factory.mktemp("libcuda") / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags]
    subprocess.run([*command, str(HERE / "libcuda.c"), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.stub_record.restype = ctypes.c_char_p
    return loaded


@pytest.fixture
def driver(stub: ctypes.CDLL) -> Libcuda:
    stub.stub_clear()
    stub.stub_parameters(3, (ctypes.c_size_t * 3)(8, 4, 4))

    def load(name: str) -> ctypes.CDLL:
        assert name == "libcuda.so.1"
        return stub

    return Libcuda(load)


@pytest.fixture
def compiler(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path)


class OwnStream:
    """torch.cuda.ExternalStream without CUDA."""

    def __init__(self, handle: int, device: torch.device) -> None:
        self.cuda_stream, self.device = handle, device


@pytest.fixture
def made(driver: Libcuda, compiler: Any, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    monkeypatch.setattr(torch.cuda, "ExternalStream", OwnStream)
    return CudaDevice(0, driver, compiler)


@pytest.fixture
def record(stub: ctypes.CDLL) -> Record:
    """The driver calls since the last call of record()."""

    def look() -> list[str]:
        lines: str = stub.stub_record().decode()
        stub.stub_clear()
        return lines.splitlines()

    return look


def test_a_launch_passes_grid_stream_and_arguments(made: CudaDevice, compiler: Any, record: Record) -> None:
    arguments = (0x123456789A, np.uint32(0xFFFFFFFF), np.float32(1))
    made.launch(STREAM, "noun/unit.cu", "second", 7, 96, *arguments)
    assert record() == [
        f"load ELF in {CONTEXT}",
        "ready first",
        "ready second",
        f"launch second <7 1 1, 96 1 1, 0> stream abc in {CONTEXT}: 123456789a ffffffff 3f800000",
    ]
    made.launch(STREAM, "noun/unit.cu", "first", 0, 96, *arguments)
    assert record() == [], "0 blocks"
    made.launch(STREAM, "noun/unit.cu", "first", 1, 32, -2, np.int32(-1), np.float32(0))
    assert record() == [
        f"launch first <1 1 1, 32 1 1, 0> stream abc in {CONTEXT}: fffffffffffffffe ffffffff 0"
    ]
    assert compiler.compiled == [("noun/unit.cu", "sm_90")]


def test_host_memory_is_registered_and_released_once(made: CudaDevice, record: Record) -> None:
    with made.map_host(0x7000, 12288, memory=None) as mapping:
        assert mapping.device_address == 0x1000000007000
        assert record() == [f"register 7000 12288 flags 3 in {CONTEXT}", "pointer 7000 flags 0"]
    mapping.close()
    assert record() == [f"unregister 7000 in {CONTEXT}"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (2, "cannot pin 4096 bytes of host memory at 0x7000: free host memory, or raise the memory limit"),
        (712, "part of it is already mapped; close that mapping first"),
    ],
)
def test_memory_that_cannot_be_pinned_says_why(
    made: CudaDevice, stub: ctypes.CDLL, status: int, message: str
) -> None:
    stub.stub_fail_next(status)
    with pytest.raises(RuntimeError, match=message):
        made.map_host(0x7000, 4096, memory=None)
    for address, nbytes in [(0x7001, 4096), (0x7000, 0)]:
        with pytest.raises(ValueError, match=r"cannot map \d+ bytes"):
            made.map_host(address, nbytes, memory=None)


def test_closing_a_mapping_after_the_end_of_cuda_is_no_error(made: CudaDevice, stub: ctypes.CDLL) -> None:
    for status, outcome in [(4, contextlib.nullcontext()), (1, pytest.raises(CudaError))]:
        mapping = made.map_host(0x7000, 4096, memory=None)
        stub.stub_fail_next(status)
        with outcome:
            mapping.close()


def test_a_forked_child_leaves_mappings_alone(
    made: CudaDevice, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping = made.map_host(0x7000, 4096, memory=None)
    record()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    mapping.close()
    assert record() == []


def test_no_two_owners_have_the_same_stream(made: CudaDevice, record: Record) -> None:
    streams: list[Any] = [made.new_stream(priority) for priority in (-3, -2, -1, -1) for _ in range(40)]
    assert len({stream.cuda_stream for stream in streams}) == 160
    assert record()[::40] == [f"stream flags 1 priority {p} in {CONTEXT}" for p in (-3, -2, -1, -1)]
    assert streams[0].external.device == torch.device("cuda:0")
    freed = streams.pop(0).cuda_stream
    other: Any = made.new_stream(-2)
    again: Any = made.new_stream(-3)
    assert again.cuda_stream == freed != other.cuda_stream, "a stream without an owner is used again"
    assert len(record()) == 1


def test_a_batch_is_enqueued_in_order(
    made: CudaDevice, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    monkeypatch.setattr(made, "torch_device", torch.device("cpu"))
    stream, other = made.new_stream(), made.new_stream()
    earlier, words = other.record_event(), torch.zeros(3, dtype=torch.int64)
    made.preload("noun/unit.cu")
    record()
    own, at = stream.cuda_stream, words.data_ptr()
    with made.batch(stream):
        stream.wait_event(earlier)
        with made.batch(stream):
            made.launch(stream, "noun/unit.cu", "first", 2, 64, words, np.uint32(7), np.float32(1))
        made.fill(stream, words, 0xFF)
        made.copy(stream, words[:1], words[2:])
        assert made.wait_value(stream, 0x1000000007008, 9)
        made.copy_from_host(stream, words, 0x7008)
        done = stream.record_event()
        assert record() == [f"event flags 3 in {CONTEXT}"]
    waited, recorded = (event.cuda_event & 0xF for event in (earlier, done))
    assert record() == [
        f"wait stream {own:x} for {waited:x} flags 0 in {CONTEXT}",
        f"launch first <2 1 1, 64 1 1, 0> stream {own:x} in {CONTEXT}: {at:x} 7 3f800000",
        f"fill 24 of {at:x} with ff stream {own:x} in {CONTEXT}",
        f"copy 8 from {at + 16:x} to {at:x} stream {own:x} in {CONTEXT}",
        f"wait stream {own:x} 1000000007008 >= 9 flags 0 in {CONTEXT}",
        f"copy 24 from 7008 to {at:x} stream {own:x} in {CONTEXT}",
        f"record {recorded:x} stream {own:x} in {CONTEXT}",
    ]
    done.synchronize()
    done.synchronize()
    assert record() == [f"await {recorded:x}"], "what the host has seen once is not asked for again"


def test_held_work_is_enqueued_before_somebody_waits_for_it(made: CudaDevice, record: Record) -> None:
    stream, words = made.new_stream(), (0, np.uint32(1), np.float32(0))
    made.preload("noun/unit.cu")
    waits: list[Callable[[Any], object]] = [
        lambda event: event.synchronize(),
        lambda event: event.query(),
        lambda event: event.wait(STREAM),  # torch's Stream.wait_event()
        lambda event: made.new_stream().wait_event(event),
        lambda event: made.launch(stream, "noun/unit.cu", "second", 1, 32, *words),
    ]
    for wait in waits:
        record()
        with made.batch(stream, hold=True):
            made.launch(stream, "noun/unit.cu", "first", 1, 32, *words)
            event = stream.record_event()
        assert not any(line.startswith("launch") for line in record())
        wait(event)
        said = [line.split()[0] for line in record() if not line.startswith("stream")]
        assert said[:2] == ["launch", "record"]
        assert len(said) == 3


def test_a_failure_in_a_batch_names_the_function(made: CudaDevice, stub: ctypes.CDLL) -> None:
    stream = made.new_stream()
    event = stream.record_event()
    with made.batch(stream, hold=True):
        stream.wait_event(event)
    stub.stub_fail_next(700)
    with pytest.raises(CudaError, match=r"cuStreamWaitEvent: a failure \(CUDA error 700\)"):
        stream.flush()
    for words in ([6], [0, 1, 2], [0, 1, 1, 32, 65, *[0] * 65]):
        with pytest.raises(ValueError, match=r"enqueue: "):
            made.enqueue(1, array("Q", words))


def test_a_tensor_of_the_host_needs_no_hand_over(made: CudaDevice) -> None:
    """torch refuses to record a stream for it. Loaders hand over all tensors of a minibatch."""
    made.hand_over(torch.zeros(3), STREAM, STREAM)


def test_large_memory_is_the_drivers_and_torch_keeps_its_own(
    made: CudaDevice, stub: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: memory)  # which keeps the memory
    memory: Any = made.allocate(4096)
    array = {"shape": (4096,), "typestr": "|u1", "data": (0x7F0000000000, False), "version": 2}
    assert memory.__cuda_array_interface__ == array
    assert record() == [f"allocate 4096 in {CONTEXT}"]
    del memory
    assert (record(), emptied) == ([f"free 7f0000000000 in {CONTEXT}"], [])
    stub.stub_fail_next(2)
    assert made.allocate(4096) is not None
    assert emptied == [1], "only where there is no other memory"
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: stub.stub_fail_next(2))
    stub.stub_fail_next(2)
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"4096 bytes on Stub 100: cuMemAlloc_v2: out of"):
        made.allocate(4096)


# --- opening ---


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch, stub: ctypes.CDLL, compiler: Any) -> Load:
    """torch, CuPy and a driver with two devices, all for CUDA 13. Returns the loader."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(opening, "_open", {})
    monkeypatch.setattr(opening, "open_compiler", lambda sources, package: compiler)
    return lambda name: stub


def test_a_device_is_opened_once_for_each_index(with_cuda: Load) -> None:
    first = opening.open_cuda("cuda:0", load=with_cuda)
    assert first is opening.open_cuda(torch.device("cuda", 0), load=with_cuda)
    second = opening.open_cuda("cuda", load=with_cuda)
    assert second.torch_device == torch.device("cuda:1"), "torch's current device"
    assert second is opening.open_cuda(None, load=with_cuda)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", r"device must be 'cuda' or 'cuda:0' \(got 'gpu'\)"),
        ("cuda:2", "no device cuda:2: the driver has cuda:0 Stub 100, cuda:1 Stub 101; CUDA_VISIBLE_DEVICES"),
    ],
)
def test_an_unknown_device_name_is_refused(with_cuda: Load, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opening.open_cuda(name, load=with_cuda)


def no_driver(name: str) -> Any:
    raise OSError(name)


def test_the_error_names_what_is_missing(
    with_cuda: Load, compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"no CUDA device: no NVIDIA driver .*`gids info --system`"):
        opening.open_cuda("cuda", load=no_driver)
    monkeypatch.setattr(compiler, "version", (14, 0))
    with pytest.raises(RuntimeError, match=r"supports CUDA 13\.1; CuPy compiles with CUDA 14\.0: update the"):
        opening.open_cuda("cuda", load=with_cuda)
    monkeypatch.setattr(torch.version, "cuda", "14.2")
    with pytest.raises(RuntimeError, match=r"supports CUDA 13\.1; torch was built with CUDA 14\.2"):
        opening.open_cuda("cuda", load=with_cuda)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match=r"needs a CUDA build of torch; this is .*: pip install torch"):
        opening.open_cuda("cuda", load=with_cuda)
