"""Bandwidths of a rank, given or measured. Called by `gids scale`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gids.bench.probe import direct_works
from gids.packs.costs import measure_rates
from gids.store import Table

_DEPTH = 256
_PROBE_BYTES = 16 << 20
_ROUNDS = 8


@dataclass(frozen=True)
class Rates:
    """Of each rank, in bytes per second unless the name says otherwise.

    network: sent, while as much comes in. latency_s: of a message. memory: reads and writes together.
    flops: multiplications and additions per second.
    """

    storage: float = 6e9
    reads_per_s: float = 1e6
    network: float = 12.5e9
    latency_s: float = 10e-6
    memory: float = 100e9
    flops: float = 20e12

    def with_storage_of(self, tables: Sequence[Table]) -> Rates:
        """The same with the rates of the disks of these tables, measured in less than a second."""
        paths = [path for table in tables for path in table.shard_paths]
        disk = measure_rates(
            paths,
            None,
            page_bytes=max(t.page_bytes for t in tables),
            depth=_DEPTH,
            direct=direct_works(paths),
            engine="auto",
        )
        return replace(self, storage=disk.read_bytes_per_s, reads_per_s=disk.random_reads_per_s)

    def with_network_of_group(self) -> Rates:
        """The same with the network of the process group, measured by exchanges of all ranks. Collective."""
        size = dist.get_world_size()
        nbytes = _PROBE_BYTES // size * size
        large = _seconds(nbytes)
        small = _seconds(size)
        away = nbytes * (size - 1) / size
        latency = small / max(1, size - 1)
        return replace(self, network=away / max(large - small, 1e-9), latency_s=latency)


def _seconds(nbytes: int) -> float:
    """The time of an exchange of so many bytes per rank, on the slowest rank."""
    sent, came = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(_ROUNDS):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_to_all_single(came, sent)
        best = min(best, time.perf_counter() - begun)
    slowest = torch.tensor(best)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
