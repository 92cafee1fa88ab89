"""What do the window and a buffer in host memory save on a GPU, with a table of 50 times the cache? Called by
gpu.py.

gids.NodeLoader with features on disk, a row a page, the cache in device memory; the consumer does nothing.
The first minibatches of a run fill the cache and are not measured; then rows per second, sampling included,
and hits. The last minibatch is compared with the dataset.

windows: policies by window, figures 11 and 12 of Park et al., "GIDS", PVLDB 17(6), 2024.

buffer: figure 10: a cache of two minibatches in device memory, and shares of the features in pinned host
memory: none; the pages with the most expected visits by reverse PageRank, as published
(host_policy="static"); and lines that look-ahead replaces (host_policy="lookahead").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median

import numpy as np
import torch
from gpu_harness import TABLE, Bench, assert_same_rows, host_seconds, open_loader
from graphs import make_dataset
from harness import alternate

import gids
from gids.convert.synthetic import GraphSpec
from gids.heat import reverse_pagerank, write_heat
from gids.sampler import Neighbor, Topology
from gids.store import FeatureStore
from gids.store.names import NODE, RELATION

SIZES = {
    "feature_bytes": (2 << 30, 1 << 20),
    "dim": (128, 128),
    "degree": (15.0, 6.0),
    "batch_size": (128, 8),
    "fanouts": ((10, 5, 5), (3, 2)),
    "minibatches": (30, 3),
    "caches": ((2, 5), (2,)),  # in minibatches
    "shares": ((10, 20), (20,)),  # percent of the features in host memory
    "rounds": (2, 1),
    "staging_bytes": (256 << 20, 1 << 20),
}
POLICIES = [
    *(("random", 0), ("window-pin", 4), ("window-pin", 8), ("window-pin", 16)),
    *(("lookahead", 8), ("lookahead", 16)),
]
_LINE_METADATA_BYTES = 64  # more than a line's
_OUTPUTS = 8  # minibatches whose rows are in device memory


@dataclass(frozen=True)
class Run:
    """hits: percent of the pages, of lines on the device and in host memory. bytes_read: from files."""

    rows_per_s: float
    hits: float
    bytes_read: float


class Loading:
    """A dataset, and how many rows its minibatches have."""

    def __init__(self, bench: Bench) -> None:
        self._sizes, self._bench = bench.sizes, bench
        rows = self._sizes.feature_bytes // (4 * self._sizes.dim)
        spec = GraphSpec(rows, degree=self._sizes.degree, dim=self._sizes.dim, train_count=rows // 4)
        page_bytes = 4 * self._sizes.dim
        store = make_dataset(bench.directory, spec, page_bytes=page_bytes)
        train = {NODE: store.split("train").numpy()}
        write_heat(store.path, "reverse-pagerank", reverse_pagerank(store, train))
        self.store = FeatureStore(store.path)
        self.table, self._seeds = self.store.table(TABLE), self.store.split("train")
        seeds = self._seeds[: self._sizes.batch_size]
        drawn = Neighbor(self._sizes.fanouts).sample(Topology(store.graph(RELATION)), seeds, seed=0)
        self.rows = len(drawn.input_nodes)

    def run(self, *, cache_rows: int, warm: int, host_rows: int = 0, window: int = 8, **tuning: str) -> Run:
        sizes, page_bytes = self._sizes, self.table.page_bytes
        line_bytes = page_bytes + _LINE_METADATA_BYTES
        made = open_loader(
            self.store,
            self._seeds,
            sizes,
            window=window,
            memory=sizes.staging_bytes + host_rows * line_bytes if host_rows else None,
            device_memory=(cache_rows + _OUTPUTS * 4 * self.rows) * line_bytes + (1 << 30),
            tuning=gids.Tuning(cache=cache_rows * page_bytes, staging=sizes.staging_bytes, **tuning),
        )
        with closing(made) as loader:
            minibatches = islice(loader, warm + sizes.minibatches)
            for _ in islice(minibatches, warm):
                pass
            before, counts = loader.stats(), []

            def consume() -> None:
                nonlocal minibatch
                for minibatch in minibatches:
                    counts.append(len(minibatch.input_nodes))

            minibatch = None
            seconds = host_seconds(self._bench.device.current_stream(), consume)
            after = loader.stats()
            expected = self.table.read_rows(minibatch.input_nodes.cpu())
            assert_same_rows(minibatch.features[TABLE], expected.view(torch.int32))
        hits, pages, read = (after[key] - before[key] for key in ("hits", "pages", "bytes_read"))
        return Run(sum(counts) / seconds, 100 * hits / max(1, pages), read / len(counts))


def windows(bench: Bench) -> None:
    loading = Loading(bench)
    for size in bench.sizes.caches:
        sides = {
            f"{policy} {window}": partial(
                loading.run, cache_rows=size * loading.rows, warm=2 * size, window=window, policy=policy
            )
            for policy, window in POLICIES
        }
        runs = _tell(bench, f"a cache of {size} minibatches", sides)
        share = 100 * size * loading.rows / loading.table.row_count
        bench.figures.add(f"a cache of {size} minibatches: share of the table", share, "%")
        for better in ("window-pin 4", "window-pin 8", "window-pin 16", "lookahead 8", "lookahead 16"):
            name = f"a cache of {size} minibatches, {better} over random"
            _compare(bench, name, runs[better], runs["random 0"])


def buffer(bench: Bench) -> None:
    loading = Loading(bench)
    common = {"cache_rows": 2 * loading.rows, "warm": bench.sizes.minibatches}
    sides: dict[str, Callable[[], Run]] = {"none": partial(loading.run, **common)}
    for share in bench.sizes.shares:
        for policy in ("static", "lookahead"):
            host_rows = loading.table.row_count * share // 100
            sides[f"{share} % {policy}"] = partial(
                loading.run, **common, host_rows=host_rows, host_policy=policy
            )
    runs = _tell(bench, "a buffer in host memory", sides)
    for side in list(sides)[1:]:
        _compare(bench, f"a buffer in host memory, {side} over none", runs[side], runs["none"])


def _tell(bench: Bench, name: str, sides: Mapping[str, Callable[[], Run]]) -> dict[str, list[Run]]:
    runs = alternate(sides, bench.sizes.rounds)
    for side, of_side in runs.items():
        note = f"{of_side[0].hits:.1f} % hits, {np.mean([r.bytes_read for r in of_side]) / 1e6:.2f} MB read"
        rate = median(run.rows_per_s for run in of_side)
        bench.figures.add(f"{name}, {side}", rate, "rows/s", note=f"{note} a minibatch")
    return runs


def _compare(bench: Bench, name: str, better: list[Run], worse: list[Run]) -> None:
    rates = ([run.rows_per_s for run in side] for side in (better, worse))
    bench.figures.ratio(f"{name}: rows/s", *rates)
    bench.figures.add(f"{name}: hits", better[0].hits / max(1e-9, worse[0].hits), "x")
