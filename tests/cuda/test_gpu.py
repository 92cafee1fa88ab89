"""Tests of the device layer that need a GPU. test_device.py has the contract of every device."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from pathlib import Path

import pytest
import torch

from gids.cuda.compiler import installed_sources, open_compiler
from gids.cuda.cuda_device import CudaDevice
from gids.cuda.device import CACHE_PRIORITY, SAMPLING_PRIORITY, Device
from gids.cuda.driver import Libcuda, ask_driver

pytestmark = pytest.mark.gpu

UNIT = str(Path(__file__).parent / "kernels.cu")


def test_every_installed_unit_loads(gpu: Device) -> None:
    sources = installed_sources()
    units = sorted(path.relative_to(sources.root).as_posix() for path in sources.root.glob("*/*.cu"))
    assert units
    gpu.preload(*units)


def test_a_capture_is_noticed(gpu: Device) -> None:
    values, graph = gpu.zeros(8, torch.int64), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values += 1
        with pytest.raises(RuntimeError, match=r"inside torch\.cuda\.graph"):
            gpu.check_not_capturing()
    gpu.check_not_capturing()
    graph.replay()
    torch.cuda.synchronize()
    assert values.tolist() == [1] * 8


def test_work_after_a_wait_does_not_run_before_the_word_is_written(gpu: Device) -> None:
    memory = mmap.mmap(-1, 4096)
    words = torch.frombuffer(memory, dtype=torch.int64)
    address = ctypes.addressof((ctypes.c_char * 4096).from_buffer(memory))
    stream, other = gpu.new_stream(CACHE_PRIORITY), gpu.new_stream(SAMPLING_PRIORITY)
    done = gpu.zeros(1, torch.int64)
    gpu.preload(UNIT)  # loading a kernel may wait for the stream that waits
    gpu.current_stream().synchronize()
    with gpu.map_host(address, 4096, memory=None) as mapping:
        if not gpu.wait_value(stream, mapping.device_address, 5):
            pytest.skip(f"streams of {gpu.name} cannot wait for a word")
        try:
            gpu.launch(stream, UNIT, "write_word", 1, 32, done, 1)
            behind = stream.record_event()
            time.sleep(0.2)
            assert not behind.query()
            gpu.launch(other, UNIT, "write_word", 1, 32, mapping.device_address + 8, 3)
            beside, end = other.record_event(), time.monotonic() + 5
            while not beside.query():  # synchronize() would never return
                assert time.monotonic() < end, "no other stream makes progress"
                time.sleep(0.01)
            assert words[1].item() == 3
            words[0] = 4
            time.sleep(0.2)
            assert not behind.query()
        finally:
            words[0] = 1 << 40
            stream.synchronize()
        assert done.item() == 1


def test_a_thread_that_never_used_cuda_launches(gpu: Device) -> None:
    word, stream, failures = gpu.zeros(1, torch.int64), gpu.new_stream(), []
    gpu.current_stream().synchronize()

    def work() -> None:
        try:
            gpu.launch(stream, UNIT, "write_word", 1, 32, word, 9)
            stream.synchronize()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert word.item() == 9


def test_ptx_runs_without_machine_code_for_the_device(gpu: Device) -> None:
    compiler = open_compiler(installed_sources())
    if (ask_driver().version or (0, 0)) < compiler.version:
        pytest.skip("the driver does not know the PTX of a newer toolkit")
    target = compiler.target
    compiler.target = lambda capability: target(capability).replace("sm_", "compute_")  # type: ignore[method-assign]
    device = CudaDevice(gpu.torch_device.index, Libcuda(), compiler)
    word = gpu.zeros(1, torch.int64)
    device.launch(gpu.current_stream(), UNIT, "write_word", 1, 32, word, 7)
    assert word.item() == 7
