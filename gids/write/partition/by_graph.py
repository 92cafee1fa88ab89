"""Divides nodes by the graph: communities or METIS, on one graph over all node types. Called by run.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gids.errors import FormatError
from gids.store.feature_store import FeatureStore
from gids.store.manifest import Manifest
from gids.write.partition.communities import check_memory, community_owners
from gids.write.partition.metis import find_metis, metis_owners
from gids.write.partition.node_loads import NodeLoads
from gids.write.partition.source_arrays import SourceArrays
from gids.write.partition.union import StoredGraph, union_bytes, union_graph


class GraphMethod:
    """--method community or metis for one dataset. Attributes: scratch_bytes (disk space for sorted edges).

    Raises FormatError if the dataset has no graph or needs more memory, ImportError without METIS.
    """

    def __init__(self, method: str, store: FeatureStore, manifest: Manifest, memory_bytes: int) -> None:
        if not manifest.relations:
            raise FormatError(f"--method {method} needs a graph, and the dataset has none: use --method hash")
        counts = [nodes.count for nodes in manifest.nodes]
        self._starts = {n.type: sum(counts[:i]) for i, n in enumerate(manifest.nodes)}
        self._counts = {n.type: n.count for n in manifest.nodes}
        self._method, self._manifest, self._memory_bytes = method, manifest, memory_bytes
        self._arrays = SourceArrays(store.locate)
        self._loads = NodeLoads(store, self._starts)
        self._library = find_metis() if method == "metis" else ""
        if method == "community":
            check_memory(sum(counts), self._loads.count, memory_bytes)
        self._needs_union = method == "metis" or len(counts) > 1
        edges = sum(relation.count for relation in manifest.relations)
        self.scratch_bytes = union_bytes(edges) if self._needs_union else 0
        self._owners: np.ndarray | None = None

    def owners(self, ntype: str, parts: int, scratch: Path, workers: int) -> np.ndarray:
        """The part of each node of a type, uint16. The first call computes those of all types."""
        if self._owners is None:
            for relation in self._manifest.relations:
                for role in ("indptr", "indices"):
                    self._arrays.check(relation.arrays[role])
            self._owners = self._divide(parts, scratch, workers)
        start = self._starts[ntype]
        return self._owners[start : start + self._counts[ntype]]

    def _divide(self, parts: int, scratch: Path, workers: int) -> np.ndarray:
        mapped, node_count = self._arrays.mapped, sum(self._counts.values())
        graphs = [
            StoredGraph(
                r.type, self._counts[r.type[0]], mapped(r.arrays["indptr"]), mapped(r.arrays["indices"])
            )
            for r in self._manifest.relations
        ]
        edges = [(graph.indptr, graph.indices) for graph in graphs]
        if self._needs_union:
            union = union_graph(
                graphs,
                self._starts,
                node_count,
                scratch,
                memory_bytes=self._memory_bytes // 2,
                workers=workers,
                simple=self._method == "metis",
            )
            edges = [union]
        if self._method == "community":
            return community_owners(edges, self._loads, node_count, self._loads.count, parts)
        return metis_owners(self._library, edges[0], self._loads.kinds(), self._loads.in_edges(), parts)
