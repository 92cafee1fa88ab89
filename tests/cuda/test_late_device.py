"""The emulated device shows wrong lifetimes, wrong order and too much memory."""

from __future__ import annotations

import ctypes
import gc
from functools import partial
from pathlib import Path

import pytest
import torch
from emulator import EmulatedDevice
from late_device import LateDevice, LateStream

UNIT = str(Path(__file__).parent / "kernels.cu")
SEEDS = range(12)


def write(device: EmulatedDevice, stream: object, to: torch.Tensor, value: int) -> None:
    device.launch(stream, UNIT, "write_word", 1, 32, to, value)  # type: ignore[arg-type]


def read_after_release(seed: int, *, handed_over: bool) -> int:
    """The word that a second stream reads from a tensor that was released before it ran."""
    device = LateDevice(seed, lazy=1.0)
    first, second = device.new_stream(), device.new_stream()
    with device.use(first):
        tensor = device.empty(8, torch.int64)
    write(device, first, tensor, 7)
    second.wait_stream(first)
    seen: list[int] = []
    address = tensor.data_ptr()
    second.put(lambda: seen.append(ctypes.c_int64.from_address(address).value))
    if handed_over:
        device.hand_over(tensor, first, second)
    del tensor
    with device.use(first):
        device.zeros(8, torch.int64)  # takes the memory, unless a stream still uses it
    device.close()
    return seen[0]


def test_a_missing_hand_over_gives_wrong_values() -> None:
    assert {read_after_release(seed, handed_over=True) for seed in SEEDS} == {7}
    assert {read_after_release(seed, handed_over=False) for seed in SEEDS} - {7}


@pytest.mark.parametrize("late", [False, True])
def test_released_memory_is_poisoned_and_given_out_again(late: bool) -> None:
    device = LateDevice(0) if late else EmulatedDevice()
    stream = device.new_stream()
    with device.use(stream):
        tensor = device.zeros(1000, torch.uint8)
        address = tensor.data_ptr()
        del tensor
        again = device.empty(1000, torch.uint8)
        assert again.data_ptr() == address
        assert again.unique().tolist() == [0xA5]
    with device.use(device.new_stream()):
        assert device.empty(1000, torch.uint8).data_ptr() != address, "memory belongs to its stream"


def test_memory_that_a_stream_still_uses_is_not_given_out() -> None:
    device = LateDevice(0, lazy=1.0, total_bytes=3000)
    first, second = device.new_stream(), device.new_stream()
    with device.use(first):
        tensor = device.empty(2000, torch.uint8)
    device.hand_over(tensor, first, second)
    trained: list[int] = []
    second.put(lambda: trained.append(1))
    del tensor
    device.memory.collect()
    assert (device.memory.tensor_bytes, device.memory.waiting_bytes, trained) == (0, 2000, [])
    with device.use(first):
        device.empty(2000, torch.uint8)  # no room beside it: waits for the second stream
    assert trained == [1]


def test_free_memory_is_accounted() -> None:
    device = EmulatedDevice(total_bytes=10_000)
    tensor = device.empty(6000, torch.uint8)
    assert device.memory_info() == (4000, 10_000)
    with pytest.raises(torch.OutOfMemoryError, match="5000 bytes on the emulated device: 4000 of 10000"):
        device.empty(5000, torch.uint8)
    del tensor
    gc.collect()
    assert device.memory_info() == (10_000, 10_000)
    assert device.memory.kept_bytes == 6000
    device.empty(5000, torch.uint8)  # unmaps the kept memory first
    device.trim()
    assert device.memory.kept_bytes == 0


def test_streams_run_in_every_order_that_events_allow() -> None:
    orders = set()
    for seed in range(200):
        device = LateDevice(seed)
        streams = [device.new_stream() for _ in range(3)]
        order: list[str] = []
        for stream, name in zip(streams, "abc", strict=True):
            stream.put(partial(order.append, name))
        streams[2].wait_stream(streams[0])
        streams[2].put(partial(order.append, "d"))
        device.close()
        assert order.index("a") < order.index("d")
        assert order.index("c") < order.index("d")
        orders.add("".join(order))
    assert len(orders) == 8, "of 24, those with a and c before d"


def test_zeros_are_written_in_the_order_of_the_stream() -> None:
    device = LateDevice(0, lazy=1.0)
    stream, other = device.new_stream(), device.new_stream()
    with device.use(stream):
        words = device.zeros(4, torch.int64)
    write(device, other, words, 5)
    other.synchronize()
    assert words.tolist()[1] != 0, "another stream does not wait for them"
    stream.synchronize()
    assert words.tolist() == [0, 0, 0, 0]
    with device.use(stream):
        words.fill_(3)
        assert words.tolist() == [3] * 4
    assert isinstance(stream, LateStream)


def test_the_same_seed_repeats_the_order() -> None:
    def order(seed: int) -> list[int]:
        device, done = LateDevice(seed), []
        streams = [device.new_stream() for _ in range(4)]
        for i in range(100):
            streams[i % 4].put(partial(done.append, i))
        device.close()
        return done

    assert order(5) == order(5) != order(6)


def test_a_copy_to_the_host_comes_late_and_in_order() -> None:
    device = LateDevice(0, lazy=1.0)
    stream, words = device.new_stream(), torch.zeros(4, dtype=torch.int64)
    with device.use(stream):
        write(device, stream, words, 5)
        copy, copied = device.to_host(words)
        write(device, stream, words, 6)
    assert not copied.passed
    copied.synchronize()
    assert copy[0] == 5
    device.close()
