"""Do sizes and lifetimes hold that only a GPU can show? Called by gpu.py. Correctness, not speed.

life: loaders of an explicit size and of a default size are opened and closed five times, and two are open at
once, while little device memory is free. Each has to get the memory that the first one got.

large: rows in lines beyond 4 GiB, and neighbors of nodes whose edges are beyond number 2^31, are compared
with what they must be, bit for bit.
"""

from __future__ import annotations

from contextlib import ExitStack, closing

import numpy as np
import torch
from gpu_harness import TABLE, Bench, assert_same_minibatch, assert_same_rows, make_table, open_cache
from graphs import graph_of, make_dataset

import gids
from gids.convert.synthetic import GraphSpec
from gids.loader import NodeLoader
from gids.sampler import Neighbor, Topology
from gids.sampler.device import PinnedGraph

LIFE = {"feature_bytes": (1 << 30, 1 << 18), "free_bytes": (1600 << 20, 1 << 50)}
LARGE = {
    "table_bytes": ((9 << 29) + (1 << 20), 1 << 18),
    "row_bytes": (8192, 1024),
    "edges": ((1 << 31) + (1 << 24), 1 << 12),
    "degree": (1 << 10, 1 << 4),
    "rows": (1 << 17, 100),  # compared at a time
    "seeds": (4096, 20),
}
_TIMES = 5
_STAGING_BYTES = 256 << 20


def life(bench: Bench) -> None:
    device, sizes = bench.device, bench.sizes
    spec = GraphSpec(node_count=sizes.feature_bytes // 4096, degree=4.0, dim=1024, classes=4, train_count=64)
    store = make_dataset(bench.directory, spec)
    ballast = None
    if device.torch_device.type == "cuda":  # what the allocator keeps would hide in plenty of free memory
        ballast = device.empty(max(0, device.memory_info()[0] - sizes.free_bytes), torch.uint8)

    def open_loader(cache: int | None) -> NodeLoader:
        opened = gids.open(
            store.path, window=4, reads="random", tuning=gids.Tuning(cache=cache, staging=16 << 20)
        )
        options = {"tables": [TABLE], "batch_size": 16, "seed": 0, "device": "cuda"}
        return NodeLoader(opened, store.split("train"), (3, 2), **options)

    def use(loader: NodeLoader) -> int:
        """Read an epoch; the bytes of the cache's lines."""
        for minibatch in loader:
            expected = store.table(TABLE).read_rows(minibatch.input_nodes.cpu())
            assert_same_rows(minibatch.features[TABLE], expected.view(torch.int32))
        return int(loader.stats()["memory"]["lines"])

    explicit = int(0.6 * sizes.feature_bytes)
    for name, cache in (("of an explicit size", explicit), ("without a size", None)):
        lines = []
        for _ in range(_TIMES):
            with closing(open_loader(cache)) as loader:
                lines.append(use(loader))
        note = ", ".join(f"{n / 1e6:,.0f} MB" for n in lines)
        name = f"smallest over first cache of {_TIMES} loaders {name}"
        bench.figures.add(name, min(lines) / lines[0], "x", bar=0.98, note=note)
    with ExitStack() as stack:
        loaders = [stack.enter_context(closing(open_loader(explicit // 2))) for _ in range(2)]
        lines = [use(loader) for loader in loaders + loaders]
    name = "smallest over largest cache of two loaders at once"
    bench.figures.add(name, min(lines) / max(lines), "x", bar=0.98)
    del ballast


def large(bench: Bench) -> None:
    _lines(bench)
    _edges(bench)


def _lines(bench: Bench) -> None:
    table, rows = make_table(bench.directory, bench.sizes.row_bytes, bench.sizes.table_bytes)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(8))
    options = {"lines": {TABLE: table.page_count}, "heats": {TABLE: np.ones(table.page_count, np.uint8)}}
    with open_cache(bench.device, table, **options, staging_bytes=_STAGING_BYTES) as cache:
        for step, ids in enumerate(order.split(bench.sizes.rows)):
            cache.enter(step, {TABLE: ids.to(bench.device.torch_device)})
            cache.plan(step)
            features, error = cache.gather(step)
            assert error is None, error
            cache.retire(step)
            assert_same_rows(features[TABLE], rows[ids])
        hits, pages = (cache.stats()[TABLE][key] for key in ("hits", "pages"))
    assert hits == pages, "not every row was in a line"
    name = f"rows that are right, in lines of {table.page_count * table.page_bytes:,} B"
    bench.figures.add(name, len(rows), "rows")


def _edges(bench: Bench) -> None:
    sizes = bench.sizes
    nodes = sizes.edges // sizes.degree
    indices = np.empty(nodes * sizes.degree, np.int32)
    period = nodes - 1  # edge e comes from node e modulo period
    for first in range(0, len(indices), 64 * period):
        part = indices[first : first + 64 * period]
        part[:] = np.resize(np.arange(period, dtype=np.int32), len(part))
    indptr = np.arange(nodes + 1, dtype=np.int64) * sizes.degree
    graph = graph_of(indptr, indices)
    drawn = np.random.default_rng(9).permutation(nodes)[: sizes.seeds // 2]
    seeds = torch.from_numpy(np.union1d(drawn, np.arange(nodes - sizes.seeds // 2, nodes)))
    with closing(PinnedGraph(graph, bench.device, topology_on="host")) as pinned:
        sampler = Neighbor([8])
        assert_same_minibatch(*(sampler.sample(Topology(g), seeds, seed=3, step=0) for g in (graph, pinned)))
    beyond = int((indptr[seeds.numpy() + 1] > 1 << 31).sum())
    note = f"{beyond:,} of them have edges beyond number 2^31"
    name = f"seeds whose neighbors are right, {len(indices):,} edges"
    bench.figures.add(name, len(seeds), "seeds", note=note)
