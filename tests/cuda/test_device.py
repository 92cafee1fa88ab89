"""The contract of every device: launches, intrinsics, streams, mapped memory, waits."""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from gids.cuda.device import Device

UNIT = str(Path(__file__).parent / "kernels.cu")


@pytest.fixture
def host_words() -> tuple[int, torch.Tensor]:
    """Page-aligned host memory: its address, and int64[512] on it."""
    memory = mmap.mmap(-1, 4096)
    buffer = (ctypes.c_char * 4096).from_buffer(memory)
    return ctypes.addressof(buffer), torch.frombuffer(memory, dtype=torch.int64)


def launch(device: Device, kernel: str, blocks: int, threads: int, *args: object) -> None:
    stream = device.current_stream()
    device.launch(stream, UNIT, kernel, blocks, threads, *args)  # type: ignore[arg-type]
    stream.synchronize()


def on(device: Device, values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device.torch_device)


def test_arguments_arrive_in_their_sizes(device: Device) -> None:
    to, source = device.zeros(4, torch.int64), on(device, [1, 2, 3, 1 << 62])
    scalars = (1 << 40, np.uint32(1 << 31), np.int32(-5), np.float32(3.5))
    launch(device, "add_arguments", 1, 32, to, source, *scalars)
    extra = (1 << 40) + (1 << 31) - 5 + 3
    assert to.tolist() == [1 + extra, 2 + extra, 3 + extra, (1 << 62) + extra]
    launch(
        device, "add_arguments", 2, 32, to.data_ptr(), source, -1, np.uint32(0), np.int32(0), np.float32(0)
    )
    assert to.tolist() == [0, 1, 2, (1 << 62) - 1], "-1 is 64 bits of ones, and an address may be an int"


def test_warp_intrinsics(device: Device) -> None:
    values = [(i * 37 + 11) % 101 for i in range(128)]
    to = device.zeros((128, 7), torch.int64)
    launch(device, "ask_warp", 2, 64, to, on(device, values, torch.int32), np.uint32(128))
    high = 1 << 40
    for i, row in enumerate(to.tolist()):
        lane, first = i % 32, i // 32 * 32
        warp = values[first : first + 32]
        assert row[0] == warp[lane * 7 % 32] + high
        assert row[1] == warp[lane + 3 if lane < 29 else lane] + high
        assert row[2] == warp[lane - 2 if lane % 8 >= 2 else lane]
        assert row[3] == warp[lane ^ 5]
        assert row[4] == sum(1 << k for k, v in enumerate(warp) if v % 3 == 0)
        assert row[5] == (7 in warp) + 2 * (max(warp) < 90)
        assert row[6] == sum(1 << k for k, v in enumerate(warp) if v % 4 == warp[lane] % 4)


def test_atomics_of_many_blocks_lose_nothing(device: Device) -> None:
    words = on(device, [99, 0, 0, 0, 0], torch.int32)
    wide, narrow = device.zeros(1, torch.int64), device.zeros(1, torch.int32)
    launch(device, "try_atomics", 20, 256, words, wide, narrow)
    last = 20 * 256 - 1
    assert words[:4].tolist() == [0, last, 2 * 20 * 256, 1]
    assert 1 <= words[4].item() <= last + 1
    assert wide.item() == last << 33
    assert narrow.item() == -last


def test_mapped_memory_is_seen_from_both_sides(device: Device, host_words: tuple[int, torch.Tensor]) -> None:
    address, words = host_words
    with device.map_host(address, 4096, memory=None) as mapping:
        launch(device, "write_word", 1, 32, mapping.device_address + 8, 1 << 50)
        assert words[:3].tolist() == [0, 1 << 50, 0]
    mapping.close()
    with device.map_host(address, 4096, memory=None):
        pass


@pytest.mark.parametrize("wait", ["stream", "kernel"])
def test_a_stream_waits_for_a_word_of_the_host(
    device: Device, host_words: tuple[int, torch.Tensor], wait: str
) -> None:
    address, words = host_words
    stream, seen = device.new_stream(), device.zeros(1, torch.int64)
    stream.wait_stream(device.current_stream())
    with device.map_host(address, 4096, memory=None) as mapping:
        writer = threading.Timer(0.05, lambda: words.__setitem__(0, 7))
        writer.start()
        waits = wait == "stream" and device.wait_value(stream, mapping.device_address, 6)
        assert waits or wait == "kernel" or device.torch_device.type == "cuda"
        device.launch(stream, UNIT, "await_word", 1, 32, mapping.device_address, 0 if waits else 6, seen)
        stream.synchronize()
        writer.join()
        assert seen.item() == 7


def test_streams_order_their_work(device: Device) -> None:
    first, second = device.new_stream(), device.new_stream()
    word = device.zeros(1, torch.int64)
    first.wait_stream(device.current_stream())
    with device.use(first):
        assert device.current_stream() == first
        values = device.empty(1000, torch.int64).fill_(3)
        assert values.device == device.torch_device
    device.launch(first, UNIT, "write_word", 1, 32, word, 1)
    done = first.record_event()
    second.wait_event(done)
    device.launch(second, UNIT, "write_word", 1, 32, word, 2)
    device.hand_over(values, first, second)
    with device.use(second):
        total = values.sum()
    second.synchronize()
    done.synchronize()
    assert done.query()
    assert word.item() == 2
    assert total.item() == 3000
    free, total_bytes = device.memory_info()
    assert 0 < free <= total_bytes


def test_wrong_kernel_arguments_are_refused(device: Device) -> None:
    to = device.zeros((4, 4), torch.int64)
    for bad, error, message in [
        (to.t(), ValueError, r"argument 0 has strides \(1, 4\)"),
        (torch.zeros(4, device="meta"), ValueError, "got meta"),
        (1 << 64, ValueError, "must fit in 64 bits"),
        (1.5, TypeError, r"must be a tensor, an int .*\(got float\)"),
        (True, TypeError, "got bool"),
        (np.float16(1), TypeError, "got float16"),
    ]:
        with pytest.raises(error, match=message):
            launch(device, "write_word", 1, 32, bad, 1)
    for blocks, threads in [(1, 48), (1, 2048), (1, 0), (-1, 32)]:
        with pytest.raises(ValueError, match="write_word"):
            launch(device, "write_word", blocks, threads, to, 1)
    with pytest.raises(KeyError, match="no kernel 'nothing'"):
        launch(device, "nothing", 1, 32)


def test_a_copy_to_the_host_is_complete_after_its_event(device: Device) -> None:
    stream, words = device.new_stream(), device.zeros(4, torch.int64)
    device.current_stream().synchronize()
    with device.use(stream):
        for value in (5, 6):
            device.launch(stream, UNIT, "write_word", 1, 32, words, value)
            copy, copied = device.to_host(words)
    del words
    copied.synchronize()
    assert copy.device.type == "cpu"
    assert copy[0] == 6
