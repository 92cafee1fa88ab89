"""Traces of page accesses for the cache benchmarks: neighbor sampling on an R-MAT graph.

No features and no files: a trace is a list of int64 arrays, the unique nodes of each minibatch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gids.sampler import Neighbor, Topology
from gids.store import Graph
from gids.store.names import RELATION

Trace = list[npt.NDArray[np.int64]]

FANOUTS = (5, 5, 10)  # the last one applies to the seeds


def rmat(
    log2_nodes: int, degree: int, rng: np.random.Generator, a: float = 0.57
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """CSC (indptr, indices) of an R-MAT graph with shuffled node ids; the other quadrants share 1 - a."""
    nodes, edges = 1 << log2_nodes, degree << log2_nodes
    src = np.zeros(edges, np.int32)
    dst = np.zeros(edges, np.int32)
    rest = (1 - a) / 3
    for _ in range(log2_nodes):
        r = rng.random(edges, np.float32)
        src = 2 * src + (r >= a + rest)
        dst = 2 * dst + (((r >= a) & (r < a + rest)) | (r >= a + 2 * rest))
    shuffled = rng.permutation(nodes).astype(np.int32)
    src, dst = shuffled[src], shuffled[dst]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=nodes))])
    return indptr, src[np.argsort(dst, kind="stable")]


def sample_trace(
    indptr: npt.NDArray[np.int64],
    indices: npt.NDArray[np.int32],
    rng: np.random.Generator,
    *,
    train: npt.NDArray[np.int64],
    seeds: int,
    minibatches: int,
) -> Trace:
    """Uniform neighbor sampling with FANOUTS; the seeds are train in one random order, repeated."""
    train = rng.permutation(train)
    count, seed = len(indptr) - 1, int(rng.integers(1 << 31))
    topology = Topology(Graph(RELATION, count, count, indptr, indices, None))
    sampler = Neighbor(FANOUTS)
    trace = []
    for t in range(minibatches):
        drawn = np.take(train, range(t * seeds, (t + 1) * seeds), mode="wrap")
        ids = torch.from_numpy(np.unique(drawn))
        nodes = sampler.sample(topology, ids, seed=seed, step=t).input_nodes
        assert isinstance(nodes, torch.Tensor)
        trace.append(rng.permutation(nodes.numpy()))
    return trace


def popular_pages(pages: int, rank: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The page of each rank of popularity, scattered over the table."""
    return rank * 2654435761 % pages


def skewed_trace(pages: int, batch: int, minibatches: int, rng: np.random.Generator) -> Trace:
    """Minibatches of `batch` unique pages whose popularity follows a power law."""
    trace = []
    for _ in range(minibatches):
        drawn = (pages * rng.random(int(batch * 1.6)) ** 3).astype(np.int64)
        unique = np.unique(popular_pages(pages, drawn))
        trace.append(rng.permutation(unique)[:batch])
    return trace
