"""How fast does the device read pinned host memory, and do streams hold each other up? Called by gpu.py.

bus: the ceilings of every path over the bus. Copies by the copy engine, and loads by multiprocessors with
more and more blocks: the fewest blocks that reach full speed leave the most of the GPU to training. Sums are
compared.

streams: one stream waits for a word in host memory (wait "stream" of the request queue). It holds up other
streams that share its hardware channel: which ones? Run with CUDA_DEVICE_MAX_CONNECTIONS=8 and 32.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import torch
from gpu_harness import Bench, device_seconds

from gids.cuda import Device
from gids.cuda.host_memory import host_memory

SIZES = {
    "nbytes": (256 << 20, 1 << 16),  # of one copy
    "blocks": ((8, 16, 32, 64, 128, 512), (1, 3)),  # of the loading kernel
    "repeats": (5, 1),
    "streams": (31, 3),  # of each kind
    "wait_s": (1.0, 0.5),  # after which a stream that did nothing counts as held up
}
_UNIT = str(Path(__file__).with_name("gpu_bus.cu"))
_THREADS = 256


@contextmanager
def pinned(device: Device, nbytes: int) -> Iterator[tuple[np.ndarray, int]]:
    """Host memory as int64 words, and its address on the device."""
    memory = np.frombuffer(host_memory(nbytes), np.int64)
    with device.map_host(memory.ctypes.data, nbytes, memory=memory) as mapping:
        yield memory, mapping.device_address


def bus(bench: Bench) -> None:
    device, sizes = bench.device, bench.sizes
    device.preload(_UNIT)
    stream = device.new_stream()
    with pinned(device, sizes.nbytes) as (memory, address):
        memory[:] = np.arange(len(memory)) * 0x9E3779B97F4A7C1
        source = torch.from_numpy(memory)
        out, total = device.empty(len(memory), torch.int64), device.zeros(1, torch.int64)
        device.current_stream().synchronize()

        def speed(work: object) -> float:
            """GB/s; the first run is not measured."""
            seconds = [device_seconds(device, stream, work) for _ in range(sizes.repeats + 1)]
            return sizes.nbytes / median(seconds[1:]) / 1e9

        def load(blocks: int) -> None:
            total.zero_()
            count = sizes.nbytes // 16
            device.launch(stream, _UNIT, "gids_bench_load", blocks, _THREADS, address, count, total)

        copies = speed(lambda: out.copy_(source, non_blocking=True))
        assert torch.equal(out.cpu(), source), "the copy differs"
        bench.figures.add("copy engine, pinned host memory to device", copies, "GB/s")
        for blocks in sizes.blocks:
            loads = speed(lambda blocks=blocks: load(blocks))
            assert int(total) == int(memory.sum()), "other words than the host's"
            name = f"loads from pinned host memory, {blocks} blocks of {_THREADS}"
            bench.figures.add(name, loads, "GB/s")


def streams(bench: Bench) -> None:
    device, sizes = bench.device, bench.sizes
    device.preload(_UNIT)
    kinds = {"training": [device.current_stream()]}
    kinds["other streams of gids"] = [device.new_stream() for _ in range(sizes.streams)]
    if device.torch_device.type == "cuda":
        kinds["torch.cuda.Stream()"] = [torch.cuda.Stream(device.torch_device) for _ in range(sizes.streams)]
    total = device.zeros(1, torch.int64)
    waiting = device.new_stream()
    with pinned(device, 4096) as (memory, address):
        device.current_stream().synchronize()
        try:
            waits = device.wait_value(waiting, address, 1)
            bench.figures.add("a stream can wait for a word in host memory", float(waits), "")
            time.sleep(0.01)  # until it waits
            events = {kind: [] for kind in kinds}
            for kind, group in kinds.items():
                for stream in group:
                    device.launch(stream, _UNIT, "gids_bench_load", 1, 32, address + 16, 4, total)
                    events[kind].append(stream.record_event())
            end = time.monotonic() + sizes.wait_s
            while time.monotonic() < end and not all(e.query() for group in events.values() for e in group):
                time.sleep(0.005)
            free = {kind: [event.query() for event in group] for kind, group in events.items()}
        finally:
            memory[0] = 1
            for stream in (waiting, *(stream for group in kinds.values() for stream in group)):
                stream.synchronize()
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    for kind, went_on in free.items():
        name = f"streams that run beside one that waits, {kind}, {connections} connections"
        bar = 1.0 if kind == "training" else None
        share = sum(went_on) / len(went_on)
        bench.figures.add(name, share, "of them", bar=bar, note=f"{len(went_on)} streams")
