"""Do sizes and lifetimes hold that only a GPU can show? Called by gpu.py. Correctness, not speed.

life: loaders of an explicit size and of a default size are opened and closed five times, and two are open at
once, while little device memory is free. Each has to get the memory that the first one got.

large: rows in lines beyond 4 GiB, and neighbors of nodes whose edges are beyond number 2^31, are compared
with what they must be, bit for bit.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from figures import Figures
from gpu_cache import CacheSizes, open_cache
from gpu_sampling import same_minibatch

import gids
from gids.cli import main as gids_command
from gids.convert.synthetic import GraphSpec, write_graph
from gids.cuda import Device
from gids.loader import NodeLoader
from gids.sampler import Neighbor, Topology
from gids.sampler.device import PinnedGraph
from gids.store import FeatureStore, Graph
from gids.store.names import NODE, RELATION
from gids.write import DatasetWriter

_TABLE = f"{NODE}.feat"
_TIMES = 5


@dataclass(frozen=True)
class LimitSizes:
    """feature_bytes, free_bytes: of life. table_bytes, edges: of large."""

    feature_bytes: int = 1 << 30
    free_bytes: int = 1600 << 20
    table_bytes: int = (9 << 29) + (1 << 20)
    row_bytes: int = 8192
    edges: int = (1 << 31) + (1 << 24)
    degree: int = 1 << 10
    rows: int = 1 << 17  # compared at a time
    seeds: int = 4096


SMALL = LimitSizes(
    feature_bytes=1 << 18,
    table_bytes=1 << 18,
    row_bytes=1024,
    edges=1 << 12,
    degree=1 << 4,
    rows=100,
    seeds=20,
)


def life(device: Device, directory: Path, sizes: LimitSizes, figures: Figures) -> None:
    spec = GraphSpec(node_count=sizes.feature_bytes // 4096, degree=4.0, dim=1024, classes=4, train_count=64)
    source, path = directory / "graph", directory / "graph.gids"
    write_graph(source, spec)
    if gids_command(["convert", str(source), str(path), "--quiet"]) != 0:
        raise SystemExit("the conversion failed")
    train = torch.from_numpy(np.load(source / "train_idx.npy"))
    features = torch.from_numpy(np.load(source / "feat.npy", mmap_mode="c"))
    ballast = None
    if device.torch_device.type == "cuda":  # what the allocator keeps would hide in plenty of free memory
        ballast = device.empty(max(0, device.memory_info()[0] - sizes.free_bytes), torch.uint8)

    def open_loader(cache: int | None) -> NodeLoader:
        opened = gids.open(path, window=4, tuning=gids.Tuning(cache=cache, staging=16 << 20))
        options = {"tables": [_TABLE], "batch_size": 16, "shuffle": False, "device": "cuda"}
        return NodeLoader(opened, train, (3, 2), **options)  # type: ignore[arg-type]

    def use(loader: NodeLoader) -> int:
        """Read an epoch; the bytes of the cache's lines."""
        for minibatch in loader:
            ids = minibatch.input_nodes
            rows = minibatch.features[_TABLE].cpu()
            assert torch.equal(rows.view(torch.int32), features[ids.cpu()].view(torch.int32)), "wrong rows"
        return int(loader.stats()["memory"]["lines"])

    explicit = int(0.6 * sizes.feature_bytes)
    for name, cache in (("of an explicit size", explicit), ("without a size", None)):
        lines = []
        for _ in range(_TIMES):
            with closing(open_loader(cache)) as loader:
                lines.append(use(loader))
        note = ", ".join(f"{n / 1e6:,.0f} MB" for n in lines)
        ratio = min(lines) / lines[0]
        figures.add(f"smallest over first cache of {_TIMES} loaders {name}", ratio, "x", bar=0.98, note=note)
    with ExitStack() as stack:
        both = [stack.enter_context(closing(open_loader(explicit // 2))) for _ in range(2)]
        pairs = [use(loader) for loader in both + both]
    figures.add("smallest over largest cache of two loaders at once", min(pairs) / max(pairs), "x", bar=0.98)
    del ballast


def large(device: Device, directory: Path, sizes: LimitSizes, figures: Figures) -> None:
    _lines(device, directory, sizes, figures)
    _edges(device, sizes, figures)


def _lines(device: Device, directory: Path, sizes: LimitSizes, figures: Figures) -> None:
    words = sizes.row_bytes // 4
    rows = torch.arange(sizes.table_bytes // 4, dtype=torch.int64).to(torch.int32).view(-1, words)
    with DatasetWriter(directory / "rows.gids", workers=8) as writer:
        writer.write_table("node", NODE, "feat", rows.view(torch.float32))
    table = FeatureStore(directory / "rows.gids").table(_TABLE)
    generator = torch.Generator().manual_seed(8)
    compared = 0
    with open_cache(device, table, CacheSizes(), lines=table.page_count, preload=True) as (cache, _):
        for step, ids in enumerate(torch.randperm(len(rows), generator=generator).split(sizes.rows)):
            cache.enter(step, {_TABLE: ids.to(device.torch_device)})
            cache.plan(step)
            found, error = cache.gather(step)
            assert error is None, error
            cache.retire(step)
            assert torch.equal(found[_TABLE].view(torch.int32).cpu(), rows[ids]), (
                "other rows than the source's"
            )
            compared += len(ids)
        hits, pages = (cache.stats()[_TABLE][key] for key in ("hits", "pages"))
    assert hits == pages, "not every row was in a line"
    figures.add(
        f"rows that are right, in lines of {table.page_count * table.page_bytes:,} B", compared, "rows"
    )


def _edges(device: Device, sizes: LimitSizes, figures: Figures) -> None:
    nodes = sizes.edges // sizes.degree
    indices = np.empty(nodes * sizes.degree, np.int32)
    period = nodes - 1  # edge e comes from node e modulo period
    for first in range(0, len(indices), 64 * period):
        part = indices[first : first + 64 * period]
        part[:] = np.resize(np.arange(period, dtype=np.int32), len(part))
    indptr = np.arange(nodes + 1, dtype=np.int64) * sizes.degree
    graph = Graph(RELATION, nodes, nodes, indptr, indices, None)
    drawn = np.random.default_rng(9).permutation(nodes)[: sizes.seeds // 2]
    seeds = torch.from_numpy(np.union1d(drawn, np.arange(nodes - sizes.seeds // 2, nodes)))
    with closing(PinnedGraph(graph, device, topology_on="host")) as pinned:
        sampler = Neighbor([8])
        on_cpu, found = (sampler.sample(Topology(g), seeds, seed=3, step=0) for g in (graph, pinned))
    assert same_minibatch(on_cpu, found), "CPU and GPU sample different minibatches"
    beyond = int((indptr[seeds.numpy() + 1] > 1 << 31).sum())
    note = f"{beyond:,} of them have edges beyond number 2^31"
    figures.add(f"seeds whose neighbors are right, {len(indices):,} edges", len(seeds), "seeds", note=note)
