"""The emulated device shows wrong lifetimes, wrong order and too much memory."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from emulator import EmulatedDevice
from late_device import LateDevice, LateEvent

from gids.cuda.device import MadeOn, on_host

UNIT = str(Path(__file__).parent / "kernels.cu")
SEEDS = range(6)


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


@pytest.mark.parametrize("written", ["by a kernel", "by a copy", "by torch", "zeros"])
def test_a_tensor_is_not_read_before_its_stream_was_waited_for(written: str) -> None:
    device = LateDevice(0, lazy=0.0)  # the work is done at once, which is luck
    stream, other = device.new_stream(), device.new_stream()
    host = np.full(4096, 7, np.uint8)
    with device.use(stream):
        words = device.zeros(4, torch.int64)
        if written != "zeros":
            stream.synchronize()
        if written == "by a kernel":
            write(device, stream, words, 5)
        elif written == "by torch":
            words.fill_(3)
    if written == "by a copy":
        device.mapped[host.ctypes.data] = 4096
        device.copy_from_host(stream, words, host.ctypes.data)
    for read in (words.cpu, words.numpy, words[1].item, words.clone):
        with pytest.raises(RuntimeError, match=r"torch.int64\[4?\], that another stream may still write"):
            read()
    with device.use(device.new_stream()), pytest.raises(RuntimeError, match="may still write"):
        words.cpu()
    with pytest.raises(RuntimeError, match="write_word uses a tensor"):
        write(device, other, words, 6)
    other.wait_stream(stream)
    write(device, other, words, 6)
    event = other.record_event()
    other.record_event()
    with pytest.raises(RuntimeError, match="that another stream may still write"):
        words.tolist()
    event.synchronize()
    words.tolist()
    device.close()


def test_ids_reach_the_host_after_their_event_and_wait_for_nothing_else() -> None:
    device = LateDevice(0, lazy=1.0)
    sampling, training, trained = device.new_stream(), device.new_stream(), LateEvent(device)
    with device.use(sampling):
        words = device.zeros(4, torch.int64)
    write(device, sampling, words, 5)
    ids = MadeOn({"one": words, "other": words, "part": words[:1]}, device, sampling)
    for stream in (sampling, training):
        stream.wait_event(trained)
    with device.use(training):
        copies = on_host(ids)
    assert [copies[name].tolist()[0] for name in ids] == [5, 5, 5]
    assert copies["one"] is copies["other"]
    trained.passed = True
    device.close()


@pytest.mark.parametrize("late", [False, True])
def test_held_work_comes_before_later_work(late: bool) -> None:
    device = LateDevice(1) if late else EmulatedDevice()
    stream = device.new_stream()
    with device.use(stream):
        words = device.zeros(4, torch.int64)
    for wait in ("work", "event", "torch"):
        with device.batch(stream, hold=True):
            device.fill(stream, words, 2)
            held = stream.record_event()
        assert not held.passed
        if wait == "work":
            device.fill(stream, words[:1], 0)
        elif wait == "event":
            held.synchronize()
            assert words[0].item() == 0x0202020202020202
        else:
            with device.use(stream):
                words += 1
        stream.synchronize()
        assert held.passed
        assert words[1].item() == 0x0202020202020202 + (wait == "torch")
    if late:
        device.close()
