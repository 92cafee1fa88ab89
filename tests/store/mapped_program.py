"""Reads a dataset in many ways while files of it end early. Run by test_mapped_files.py, because a read that
nothing guards ends the process. Prints for every case "ok", or what is wrong.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import torch

import gids
from gids.errors import StorageError
from gids.heat import reverse_pagerank
from gids.pyg.hops import HopSampler
from gids.sampler import Labor, Ladies, LocalityBias, Minibatch, Neighbor, RandomWalk, Topology
from gids.sampler.device import PinnedGraph
from gids.store import FeatureStore, Graph
from gids.write import DatasetWriter, edge_list

NODES, EDGES, KEPT = 3000, 30_000, 4096
"""Bytes of a file that are left."""


def write(path: Path) -> Path:
    rng = np.random.default_rng(0)
    edges = edge_list(*rng.integers(0, NODES, (2, EDGES)), num_src=NODES, num_dst=NODES)
    with DatasetWriter(path) as writer:
        writer.write_table("node", "_N", "feat", torch.randn(NODES, 4))
        writer.write_edges(("_N", "_E", "_N"), edges, times=rng.integers(0, 100, EDGES))
        writer.write_table("edge", ("_N", "_E", "_N"), "feat", torch.randn(EDGES, 1))
    return path


def path_of(array: Any) -> Path:
    return Path(array.filename)


def plain(of: Any) -> list[torch.Tensor]:
    """What minibatches have, to compare."""
    if isinstance(of, list):
        return [tensor for each in of for tensor in plain(each)]
    if isinstance(of, dict):
        return plain(list(of.values()))
    return list(of.tensors()) if isinstance(of, Minibatch) else [torch.as_tensor(of)]


def restore(path: Path, whole: bytes, status: os.stat_result) -> None:
    """The file as it was, which a dataset that is open takes for the same."""
    with open(path, "r+b") as file:
        file.write(whole)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def check(name: str, path: Path, read: Callable[[], Any]) -> None:
    """Reads the whole file, a file that ends early, and the whole file again."""
    whole, before, status = path.read_bytes(), plain(read()), path.stat()
    os.truncate(path, KEPT)
    try:
        read()
        result = "no error"
    except StorageError as error:
        result = "ok"
        if (
            error.errno != errno.ENODATA
            or error.filename != str(path)
            or (KEPT if error.offset is None else error.offset) < KEPT
        ):
            result = f"another error: {error!r}"
    except Exception as error:
        result = f"another error: {error!r}"
    restore(path, whole, status)
    after = plain(read())
    if len(before) != len(after) or not all(map(torch.equal, before, after)):
        result = "another result once the file is whole"
    print(f"case {name}: {result}", flush=True)


def samplers() -> dict[str, Any]:
    weights = torch.rand(EDGES)
    every = {
        "neighbor": Neighbor([5, 5]),
        "replace": Neighbor([5, 5], replace=True),
        "all": Neighbor([-1, -1]),
        "weighted": Neighbor([5, 5], weights=weights),
        "temporal": Neighbor([5, 5], temporal="edges"),
        "last": Neighbor([5, 5], temporal="edges", strategy="last"),
        "induced": Neighbor([5, 5], subgraph="induced"),
        "local": Neighbor([5, 5], locality=LocalityBias(torch.arange(NODES) < 300, 4)),
        "labor": Labor([5, 5]),
        "labor to convergence": Labor([5, 5], importance_sampling=-1),
        "ladies": Ladies([200, 200]),
        "walk": RandomWalk([5, 5], num_walks=4, walk_length=3),
    }
    return every | {"one thread": Neighbor([5, 5], threads=1), "two threads": Neighbor([5, 5], threads=2)}


def seeds_of(sampler: Any, step: int) -> Any:
    ids = torch.arange(64) + 64 * step
    if getattr(sampler, "temporal", None):
        from gids.sampler import TimedSeeds

        return TimedSeeds(ids, torch.full((64,), 50))
    return ids


def check_samplers(graph: Graph) -> None:
    indptr, indices = path_of(graph.indptr), path_of(graph.indices)
    for name, sampler in samplers().items():
        topology = Topology(graph)

        def one(sampler: Any = sampler, topology: Topology = topology) -> Any:
            return sampler.sample(topology, seeds_of(sampler, 20), seed=0)

        def bulk(sampler: Any = sampler, topology: Topology = topology) -> Any:
            return sampler.sample_bulk(topology, [seeds_of(sampler, step) for step in range(20, 24)], seed=0)

        for what, path in (("indptr", indptr), ("indices", indices)):
            check(f"{name}, {what}", path, one)
            check(f"{name}, {what}, bulk", path, bulk)
        if getattr(sampler, "temporal", None):
            check(f"{name}, times", path_of(graph.edge_times), bulk)
    hops = HopSampler([5, 5])
    check("hops", indices, lambda: hops.sample(graph, torch.arange(64), seed=0).input_nodes)


def check_loaders(path: Path, graph: Graph) -> None:
    indices, ids, every = path_of(graph.indices), path_of(graph.edge_ids), torch.arange(NODES)
    with gids.open(path, memory="16MB", threads=2) as source:
        options: dict[str, Any] = {"batch_size": 30, "tables": ["_N.feat"]}
        nodes = gids.NodeLoader(source, every[-600:], [2], **{"seed": 0} | options)
        edges = gids.EdgeLoader(source, None, [2], **{"seed": 0} | options)
        own = gids.NodeLoader(source, every, [2], batch_size=500, tables=["_N._E._N.feat"], seed=0)
        check("node loader", indices, lambda: first_epoch(nodes, "input_nodes"))
        check("edge loader", indices, lambda: first_epoch(edges, "pairs", 5))
        check("edge ids", ids, lambda: first_epoch(own, "features"))
        # Only minibatches of the last nodes read the end of the file.
        stream, count = iter(gids.NodeLoader(source, every, [2], **{"seed": 0} | options)), 0
        whole, status = indices.read_bytes(), indices.stat()
        os.truncate(indices, len(whole) - 2 * 4096)
        try:
            for _ in stream:
                count += 1
        except StorageError:
            print(
                "case the right minibatch:", "ok" if 90 < count < 99 else f"{count} minibatches", flush=True
            )
        restore(indices, whole, status)


def first_epoch(loader: Any, what: str, most: int | None = None) -> list[Any]:
    """What its minibatches have."""
    loader.epoch = 0
    with closing(iter(loader)) as epoch:
        return [getattr(minibatch, what) for minibatch in islice(epoch, most)]


def main(folder: Path, compiled: Path | None) -> None:
    """compiled: where the emulator keeps what it compiled."""
    emulator.folder = compiled
    path = write(folder / "a.gids")
    store = FeatureStore(path)
    graph = store.graph()
    indices = path_of(graph.indices)
    check_samplers(graph)
    check_loaders(path, graph)

    def pin() -> list[torch.Tensor]:
        with PinnedGraph(graph, emulator.EmulatedDevice(), topology_on="host") as pinned:
            return [Neighbor([3]).sample(pinned, torch.arange(64), seed=0).input_nodes.cpu()]

    check("pinned", indices, pin)
    check("heat", indices, lambda: reverse_pagerank(store, {"_N": np.arange(9)})["_N"])
    check("numpy", indices, lambda: graph.indices[::7].astype(float))
    positions = np.arange(0, EDGES, 100)
    check("numpy at ids", indices, lambda: graph.indices[positions])
    check("a numpy function", path_of(graph.indptr), lambda: np.diff(graph.indptr))
