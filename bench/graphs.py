"""Graphs without features, synthetic datasets, and owners of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gids.cli import main as gids_command
from gids.convert.synthetic import GraphSpec, draw_edges, write_dataset
from gids.distributed.owners import hash_owners, range_owners
from gids.sampler import Sampler, Topology
from gids.store import FeatureStore, Graph
from gids.store.names import RELATION
from gids.store.rows import read_range
from gids.write.row_order import community_order

_COMMUNITY = 4096  # nodes of the largest community, in community_order

Ids = npt.NDArray[np.int64]
Owners = npt.NDArray[np.uint8]

GRAPHS = ("R-MAT", "clustered")
OWNERS = ("hash", "range", "community")


def rmat(
    log2_nodes: int, degree: int, rng: np.random.Generator | torch.Generator, a: float = 0.57
) -> tuple[Ids, npt.NDArray[np.int32]]:
    """CSC (indptr, indices) of an R-MAT graph with shuffled node ids; the other quadrants share 1 - a.

    Computed on the device of rng.
    """
    nodes, edges, rest = 1 << log2_nodes, degree << log2_nodes, (1 - a) / 3
    on_device = isinstance(rng, torch.Generator)
    device = rng.device if on_device else torch.device("cpu")
    src, dst = (torch.zeros(edges, dtype=torch.int32, device=device) for _ in range(2))
    for _ in range(log2_nodes):
        if on_device:
            r = torch.rand(edges, generator=rng, device=device)
        else:
            r = torch.from_numpy(rng.random(edges, np.float32))
        src.mul_(2).add_(r >= a + rest)
        dst.mul_(2).add_(((r >= a) & (r < a + rest)) | (r >= a + 2 * rest))
    if on_device:
        shuffled = torch.randperm(nodes, generator=rng, device=device).int()
    else:
        shuffled = torch.from_numpy(rng.permutation(nodes).astype(np.int32))
    targets, order = torch.sort(shuffled[dst], stable=True)
    indptr = torch.zeros(nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(targets, minlength=nodes).cumsum(0).cpu()
    return indptr.numpy(), shuffled[src][order].cpu().numpy()


def graph_of(indptr: Ids, indices: npt.NDArray[np.integer]) -> Graph:
    return Graph(RELATION, len(indptr) - 1, len(indptr) - 1, indptr, indices, None)


def make_graph(name: str, log2_nodes: int, degree: int, seed: int) -> Graph:
    """R-MAT: a = 0.57, shuffled ids. Clustered: of `gids generate`, one class per thousand nodes, 90 % of the
    edges within a class, also shuffled."""
    if name == "R-MAT":
        return graph_of(*rmat(log2_nodes, degree, np.random.default_rng(seed)))
    nodes = 1 << log2_nodes
    classes = max(2, min(32_767, nodes // 1000))
    spec = GraphSpec(nodes, degree=degree, dim=1, classes=classes, homophily=0.9, seed=seed)
    [(_, edges)] = draw_edges(spec)
    return graph_of(edges.indptr, read_range(edges.indices, 0, edges.indices.shape[0]).numpy())


def convert(source: Path, *options: str) -> Path:
    """Convert source to source.gids, beside it. options: of `gids convert`. Returns the dataset's path."""
    path = source.with_suffix(".gids")
    if gids_command(["convert", str(source), str(path), "--quiet", *options]) != 0:
        raise SystemExit("the conversion failed")
    return path


def make_dataset(folder: Path, spec: GraphSpec, **options: Any) -> FeatureStore:
    """Write a synthetic graph as folder/graph.gids. options: of write_dataset."""
    return FeatureStore(write_dataset(folder / "graph.gids", spec, **options))


class OwnersOf:
    """owners(method, parts): uint8[num_nodes]. Communities are found once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._order: npt.NDArray[np.integer] | None = None

    def __call__(self, method: str, parts: int) -> Owners:
        count = self._graph.num_dst
        if method in ("hash", "range"):
            owners = hash_owners(parts) if method == "hash" else range_owners(parts, count)
            return owners(np.arange(count)).astype(np.uint8)
        # Communities are dealt out, the largest first, so that every part has as many hot ones.
        dealt = max(1, min(_COMMUNITY, count // parts))
        return (self.community // dealt % parts).astype(np.uint8)

    @property
    def community(self) -> npt.NDArray[np.integer]:
        """The position of each node in the order of `gids convert --order community`."""
        if self._order is None:
            degrees = np.bincount(self._graph.indices, minlength=self._graph.num_src).astype(np.uint32)
            self._order = community_order([(self._graph.indptr, self._graph.indices)], degrees)
        return self._order


def input_nodes(sampler: Sampler, topology: Topology, seeds: Ids, **numbers: int) -> Ids:
    """numbers: seed, epoch and step of the minibatch."""
    nodes = sampler.sample(topology, torch.from_numpy(seeds.astype(np.int64)), **numbers).input_nodes
    assert isinstance(nodes, torch.Tensor)
    return nodes.numpy()


def seed_order(graph: Graph, seed: int) -> Ids:
    """All nodes with in-edges, in random order."""
    return np.random.default_rng([seed, 1]).permutation(np.flatnonzero(np.diff(graph.indptr)))
