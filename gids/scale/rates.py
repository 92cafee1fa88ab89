"""Bandwidths of a rank; those of storage may be measured. Called by `gids scale`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gids.bench.probe import direct_works
from gids.packs.costs import measure_rates
from gids.store import Table

_DEPTH = 256


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
