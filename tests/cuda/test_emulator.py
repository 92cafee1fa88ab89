"""The emulator detects errors that a GPU would leave to chance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from emulator import EmulatedDevice

UNIT = str(Path(__file__).parent / "faulty.cu")
SEEDS = range(4)


def launch(device: EmulatedDevice, kernel: str, blocks: int, threads: int, *args: object) -> None:
    device.launch(device.current_stream(), UNIT, kernel, blocks, threads, *args)  # type: ignore[arg-type]


def words(device: EmulatedDevice, count: int) -> torch.Tensor:
    return device.zeros(count, torch.int32)


def test_a_missing_barrier_gives_wrong_results() -> None:
    for seed in SEEDS:
        device = EmulatedDevice(seed)
        source, to = torch.arange(64, dtype=torch.int32), words(device, 64)
        launch(device, "reverse", 1, 64, to, source, np.uint32(1))
        assert torch.equal(to, source.flip(0))
        launch(device, "reverse", 1, 64, to, source, np.uint32(0))
        assert not torch.equal(to, source.flip(0))


def test_lanes_do_not_run_in_lockstep() -> None:
    for seed in SEEDS:
        device = EmulatedDevice(seed)
        values = torch.arange(32, dtype=torch.int32)
        launch(device, "rotate", 1, 32, values, np.uint32(1))
        assert values.tolist() == [*range(1, 32), 0]
        launch(device, "rotate", 1, 32, values, np.uint32(0))
        assert values.tolist() != [*range(2, 32), 0, 1]


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("part_at_barriers", r"block 0: thread \d+ is at a barrier, but .* \(faulty.cu:\d+\)"),
        ("leave_a_lane_out", r"can go on:(.|\n)* 31 from thread 0 wait at faulty.cu:\d+ in __ballot"),
        ("ask_with_a_foreign_mask", r"calls __ballot_sync with the mask 0x0000ffff, which lacks its"),
        ("give_up", r"kernel give_up, block 0: thread \d+ __trap\(\)"),
    ],
)
def test_threads_that_do_not_meet_end_the_launch(kernel: str, message: str) -> None:
    device = EmulatedDevice()
    with pytest.raises(RuntimeError, match=message):
        launch(device, kernel, 1, 64, words(device, 64))
    launch(device, "reverse", 1, 64, words(device, 64), words(device, 64), np.uint32(1))


def test_an_endless_wait_is_ended() -> None:
    device = EmulatedDevice(limit_s=0.1)
    with pytest.raises(RuntimeError, match="longer than the emulator's time limit"):
        launch(device, "wait_for_ever", 2, 64, words(device, 1))
    with pytest.raises(RuntimeError, match="time limit, and never waits"):
        launch(device, "watch_for_ever", 3, 64, words(device, 1))
    launch(device, "reverse", 1, 64, words(device, 64), words(device, 64), np.uint32(1))


@pytest.mark.parametrize("write", [0, 1])
@pytest.mark.parametrize("nbytes", [16, 10_000])
def test_access_beyond_a_tensor_ends_the_launch(write: int, nbytes: int) -> None:
    device = EmulatedDevice()
    memory = device.empty(nbytes, torch.uint8)
    assert memory.unique().tolist() == [0xA5], "memory that was never written is not 0"
    launch(device, "touch", 1, 32, memory, nbytes - 1, np.uint32(write))
    with pytest.raises(RuntimeError, match=rf"thread 7 accesses byte {nbytes} of a tensor of {nbytes} bytes"):
        launch(device, "touch", 1, 32, memory, nbytes, np.uint32(write))
    before = -(1 << 12) - nbytes % 4096
    with pytest.raises(RuntimeError, match=rf"accesses \d+ bytes before a tensor of {nbytes} bytes"):
        launch(device, "touch", 1, 32, memory, before, np.uint32(write))


def test_undefined_behaviour_ends_the_launch() -> None:
    device = EmulatedDevice()
    to = device.zeros(4, torch.int32)
    with pytest.raises(RuntimeError, match=r"not aligned to its type \(faulty.cu:\d+\)"):
        launch(device, "copy_vector", 1, 32, to, to.data_ptr() + 4)
    with pytest.raises(RuntimeError, match=r"shifts by more than the type has bits \(faulty.cu:\d+\)"):
        launch(device, "shift", 1, 32, to, np.uint32(32))
    with pytest.raises(RuntimeError, match="kernel call_deeply, block 0: thread"):
        launch(device, "call_deeply", 1, 32, to, np.uint32(10_000))
