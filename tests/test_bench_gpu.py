"""The GPU benchmarks run at their small sizes and verify their results: emulated, and on a GPU."""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from emulator import EmulatedDevice, EmulatedEvent, EmulatedStream

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import gpu
import gpu_check

from gids.io.device.device_queue import DeviceQueue


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("bus", "loads from pinned host memory, 3 blocks of 256"),
        ("gather", "gather of 512 B rows, all hits, over device copy"),
        ("planning", "planning, over the planner on the CPU"),
        ("queue", "queue path, wait stream, over the engine on the host"),
        ("extents", "extents of 1024 KiB, engine into host memory"),
        ("packs", "epoch of 512 B rows on the device, packs over random reads"),
        ("sampling", "neighbor sampling 3,2, by NodeLoader"),
        ("overlap", "training beside reads, transfer copy, over alone"),
        ("life", "smallest over first cache of 5 loaders without a size"),
        ("large", "seeds whose neighbors are right, 4,096 edges"),
        ("training", "training rows/s, cuda over mapped, moved"),
    ],
)
def test_gpu_benchmark_runs(device, cuda_is, tmp_path, question, said):
    cuda_is(device)
    figures = tmp_path / "figures.json"
    assert gpu.main([question, "--small", "--dir", str(tmp_path), "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())["figures"]
    assert any(f["name"].startswith(said) for f in found)
    assert all(f["value"] >= 0 for f in found)


def test_the_gpu_check_asks_every_question():
    steps = {step.partition("-")[0] for part in gpu_check.PARTS_S.values() for step in part}
    assert gpu.QUESTIONS.keys() <= steps


@pytest.mark.parametrize("wait", ["stream", "warp"])
def test_a_wrong_byte_in_the_last_round_of_the_queue_is_found(device, cuda_is, tmp_path, monkeypatch, wait):
    cuda_is(device)
    calls = 0

    def read_pages(queue, *args):
        nonlocal calls
        read(queue, *args)
        if queue.wait_kind == wait:
            calls += 1
            if calls == 2:  # a warm-up, and one round
                args[0].synchronize()
                args[4][-1, -1] += 1

    read = DeviceQueue.read_pages
    monkeypatch.setattr(DeviceQueue, "read_pages", read_pages)
    with pytest.raises(AssertionError, match=f"wait {wait}: 1 of 300 pages are wrong"):
        gpu.main(["queue", "--small", "--dir", str(tmp_path)])
    assert calls == 2


class Channel(EmulatedStream):
    """A hardware channel: does its work in order, when the host looks, and stops at a word not yet written.

    Streams that share a channel are the same object.
    """

    def __init__(self):
        super().__init__()
        self._work: deque[Callable[[], bool]] = deque()  # each returns False until it is done

    def add(self, work):
        self._work.append(work)

    def run(self):
        """Do what can be done. Whether that was all."""
        while self._work and self._work[0]():
            self._work.popleft()
        return not self._work

    def synchronize(self):
        assert self.run(), "the host waits for a word that it has not written"

    def record_event(self, *, counts=True):
        event, passed = EmulatedEvent(), []
        self.add(lambda: passed.append(True) is None)
        event.query = lambda: self.run() or bool(passed)  # type: ignore[method-assign]
        return event


class ChannelDevice(EmulatedDevice):
    """An emulated device whose new_stream() takes one of `channels` in turn."""

    def __init__(self, channels):
        super().__init__()
        self._channels = itertools.cycle([Channel() for _ in range(channels)])

    def new_stream(self, *_):
        return next(self._channels)

    def launch(self, stream, *args):
        if not isinstance(stream, Channel):
            super().launch(stream, *args)
            return
        stream.add(lambda: super(ChannelDevice, self).launch(EmulatedStream(), *args) is None)

    def wait_value(self, stream, address, value):
        assert isinstance(stream, Channel)
        stream.add(lambda: ctypes.c_int64.from_address(address).value >= value)
        return True


def streams_that_ran(tmp_path):
    figures = tmp_path / "figures.json"
    assert gpu.main(["streams", "--small", "--dir", str(tmp_path), "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())["figures"]
    return {
        name.partition(", ")[2].partition(",")[0] or name: f["value"] for f in found if (name := f["name"])
    }


@pytest.mark.gpu
def test_training_runs_beside_a_stream_that_waits(gpu, cuda_is, tmp_path):
    cuda_is(gpu)
    assert "training" in streams_that_ran(tmp_path)


@pytest.mark.parametrize(("channels", "ran"), [(4, 1.0), (3, 2 / 3), (1, 0.0)])
def test_streams_that_a_waiting_one_holds_up_are_counted(cuda_is, tmp_path, channels, ran):
    """Three streams, then the one that waits."""
    cuda_is(ChannelDevice(channels))
    found = streams_that_ran(tmp_path)
    assert found["a stream can wait for a word in host memory"] == 1
    assert found["training"] == 1
    assert found["other streams of gids"] == pytest.approx(ran)
