"""What the GPU benchmarks share: a question's surroundings, timing, tables of rows, comparing minibatches.

The tests run these benchmarks on an emulated device, which has no clock: then the host's is used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import Figures

import gids
import gids.io
from gids import NodeLoader
from gids.cache.device import DeviceFeatureCache
from gids.cuda import Device, Stream
from gids.io import open_engine
from gids.io.device.kvikio_reader import open_kvikio_reader
from gids.sampler import Minibatch
from gids.store import FeatureStore, Table
from gids.store.names import NODE
from gids.write import DatasetWriter

TABLE = f"{NODE}.feat"
_AHEAD_CYCLES = 2_000_000
"""About a millisecond, in which the host enqueues the measured work."""


@dataclass
class Bench:
    """directory: an empty folder on the disk to measure. sizes: those of the question."""

    device: Device
    directory: Path
    sizes: SimpleNamespace
    figures: Figures


def device_seconds(device: Device, stream: Stream, work: Callable[[], object]) -> float:
    """Run work, which enqueues on stream; the seconds from its first kernel to its last. Blocks.

    Inside, stream is torch's current one. Work must not wait for the device, or the host's time counts too.
    """
    with device.use(stream):
        if device.torch_device.type != "cuda":
            return host_seconds(stream, work)
        stream.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_AHEAD_CYCLES)
        first.record()
        work()
        with device.batch(stream):
            pass  # enqueues what work() holds for the next batch
        last.record()
        last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3


def host_seconds(stream: Stream, work: Callable[[], object]) -> float:
    """Run work; the seconds until what it enqueued on stream is done. Blocks."""
    stream.synchronize()
    begun = time.perf_counter()
    work()
    stream.synchronize()
    return time.perf_counter() - begun


def make_table(directory: Path, row_bytes: int, total_bytes: int) -> tuple[Table, torch.Tensor]:
    """A dataset of rows that all differ: its table, and the rows as int32[n, words]."""
    words = torch.arange(total_bytes // 4, dtype=torch.int64).to(torch.int32).view(-1, row_bytes // 4)
    path = directory / f"rows-{row_bytes}.gids"
    with DatasetWriter(path, workers=8) as writer:
        writer.write_table("node", NODE, "feat", words.view(torch.float32))
    return FeatureStore(path).table(TABLE), words


@contextlib.contextmanager
def open_cache(device: Device, table: Table, **options: Any) -> Iterator[DeviceFeatureCache]:
    """options: of DeviceFeatureCache. Pages that it holds from the start are read into device memory."""
    with open_engine(table.shard_paths, max_read_bytes=table.page_bytes) as engine:
        with open_kvikio_reader(device, table.shard_paths) or contextlib.nullcontext() as kvikio:
            cache = DeviceFeatureCache(device, engine, [table], kvikio=kvikio, **options)
        with contextlib.closing(cache):
            yield cache


def open_loader(
    store: FeatureStore, seeds: torch.Tensor, sizes: SimpleNamespace, *, device: str = "cuda", **options: Any
) -> NodeLoader:
    """A loader with a cold page cache. sizes: has its fanouts and batch_size. options: of gids.open()."""
    gids.io.drop_page_cache(store.path)
    source = gids.open(store.path, reads="random", **options)
    return NodeLoader(
        source, seeds, sizes.fanouts, tables=[TABLE], batch_size=sizes.batch_size, seed=0, device=device
    )


def assert_same_rows(found: torch.Tensor, words: torch.Tensor) -> None:
    """found: float32 rows on any device. words: int32 rows on the host, with the same bits."""
    assert torch.equal(found.view(torch.int32).cpu(), words), "other rows than the source's"


def assert_same_minibatch(a: Minibatch, b: Minibatch) -> None:
    """Two homogeneous minibatches must have the same nodes and edges in the same order."""
    pairs = [(a.input_nodes, b.input_nodes), (a.seeds, b.seeds)]
    for x, y in zip(a.blocks, b.blocks, strict=True):
        pairs += [(x.indptr, y.indptr), (x.indices, y.indices), (x.positions, y.positions)]
    assert all(torch.equal(p.cpu(), q.cpu()) for p, q in pairs), "other minibatches"
