"""Methods that give every node an owner: range, hash, community, METIS. Called by partition().

By range and by hash, each owner is computed by itself. Community and METIS divide one graph over the nodes of
all types: the id of a node is its id within its type plus the number of nodes of the types before.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gids import _core, dgl_finder
from gids.errors import FormatError
from gids.store.feature_store import FeatureStore, Graph
from gids.store.ids import mixed
from gids.store.manifest import Manifest, owner_dtype
from gids.write.edges import EDGE_BYTES, Edges, EdgeSource, in_edges
from gids.write.graph_writer import sorted_in_edges
from gids.write.partition.divide import check_array
from gids.write.row_order import MAX_ROWS, InEdges, check_rows_fit, find_communities

METHODS = ("range", "hash", "community", "metis")
_BLOCK = 1 << 20

_SHARE = 20  # a community has at most 1/20 of the rows of a part
_HEAVY = 8  # a community with more than 1/8 of another load of a part is packed node by node
_MOST = 1.03  # times the mean: the largest load of a part that nodes may move to
_ROUNDS = 8
_SETTLED = 200  # stop when fewer than one node in this many moves


def range_owners(count: int, parts: int) -> Iterator[np.ndarray]:
    """Contiguous ranges of ids, of equal size up to one row."""
    dtype = owner_dtype(parts)
    bounds = np.array([count * part // parts for part in range(1, parts + 1)], np.int64)
    for start in range(0, count, _BLOCK):
        ids = np.arange(start, min(start + _BLOCK, count), dtype=np.int64)
        yield np.searchsorted(bounds, ids, side="right").astype(dtype)


def hash_owners(ntype: str, count: int, parts: int, seed: int) -> Iterator[np.ndarray]:
    """A random part for each node, a function of (seed, type, id) alone."""
    dtype = owner_dtype(parts)
    key = mixed(np.array([seed], np.uint64)) ^ np.uint64(zlib.crc32(ntype.encode()))
    key = mixed(key)
    for start in range(0, count, _BLOCK):
        ids = np.arange(start, min(start + _BLOCK, count), dtype=np.uint64)
        values = mixed(mixed(ids) ^ key) >> np.uint64(32)
        yield ((values * np.uint64(parts)) >> np.uint64(32)).astype(dtype)


class GraphMethod:
    """--method community or metis for one dataset. Attributes: scratch_bytes (disk space for sorted edges).

    The loads of a node: rows of each type, then training seeds, then in-edges. Raises FormatError if the
    dataset has no graph, ImportError without METIS.
    """

    def __init__(self, method: str, store: FeatureStore, manifest: Manifest, memory_bytes: int) -> None:
        if not manifest.relations:
            raise FormatError(f"--method {method} needs a graph, and the dataset has none: use --method hash")
        self._method, self._store, self._manifest, self._memory_bytes = method, store, manifest, memory_bytes
        self._counts = {n.type: n.count for n in manifest.nodes}
        ends = itertools.accumulate(self._counts.values(), initial=0)
        self._starts = dict(zip(self._counts, ends, strict=False))
        self._node_count, self._load_count = sum(self._counts.values()), len(self._counts) + 2
        self._library = find_metis() if method == "metis" else ""
        self._needs_union = method == "metis" or len(self._counts) > 1
        edges = sum(relation.count for relation in manifest.relations)
        self.scratch_bytes = 2 * edges * (2 * EDGE_BYTES + 8) if self._needs_union else 0
        self._owners: np.ndarray | None = None

    def owners(self, ntype: str, parts: int, scratch: Path, workers: int) -> np.ndarray:
        """The part of each node of a type, uint16. The first call computes those of all types.

        Raises FormatError if that needs more memory.
        """
        if self._owners is None:
            self._check_memory()
            for relation in self._manifest.relations:
                for role in ("indptr", "indices"):
                    check_array(self._store.locate, relation.arrays[role])
            self._owners = self._divide(parts, scratch, workers)
        start = self._starts[ntype]
        return self._owners[start : start + self._counts[ntype]]

    def _check_memory(self) -> None:
        """Not before they are computed: a run that resumes with less memory may have the owners on disk."""
        if self._method == "community":
            row_bytes, cure = 16 + 4 * self._load_count, "--method hash"  # besides memory maps
            check_rows_fit("--method community", self._node_count, row_bytes, self._memory_bytes, cure)

    def _divide(self, parts: int, scratch: Path, workers: int) -> np.ndarray:
        graphs = [self._store.graph(relation.type) for relation in self._manifest.relations]
        edges = [(graph.indptr, graph.indices) for graph in graphs]
        if self._needs_union:
            options = {"memory_bytes": self._memory_bytes // 2, "workers": workers}
            simple = self._method == "metis"
            edges = [union_graph(graphs, self._starts, self._node_count, scratch, simple=simple, **options)]
        if self._method == "community":
            return self._by_community(edges, parts)
        kinds = [np.full(count, 2 * i) for i, count in enumerate(self._counts.values())]
        for ntype, values in zip(self._counts, kinds, strict=True):
            if (seeds := self._seeds(ntype)) is not None:
                values += seeds
        in_edges = [self._in_edges(ntype, 0, count) for ntype, count in self._counts.items()]
        return metis_owners(self._library, edges[0], np.concatenate(kinds), np.concatenate(in_edges), parts)

    def _loads(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (number of the load, first node, float32[n] of the nodes from there): all that is not 0."""
        for row_load, (ntype, start) in enumerate(self._starts.items()):
            seeds = self._seeds(ntype)
            for first in range(0, self._counts[ntype], _BLOCK):
                last = min(first + _BLOCK, self._counts[ntype])
                yield row_load, start + first, np.ones(last - first, np.float32)
                if seeds is not None:
                    yield self._load_count - 2, start + first, seeds[first:last].astype(np.float32)
                in_edges = self._in_edges(ntype, first, last).astype(np.float32)
                yield self._load_count - 1, start + first, in_edges

    def _seeds(self, ntype: str) -> np.ndarray | None:
        """Whether each node is a training seed, bool[n]."""
        if ntype not in self._store.splits or "train" not in self._store.splits[ntype]:
            return None
        seeds = np.zeros(self._counts[ntype], np.bool_)
        seeds[self._store.splits[ntype]["train"].numpy()] = True
        return seeds

    def _in_edges(self, ntype: str, first: int, last: int) -> np.ndarray:
        counts = np.zeros(last - first, np.int64)
        for relation in self._store.relations:
            if relation[2] == ntype:
                counts += np.diff(self._store.graph(relation).indptr[first : last + 1])
        return counts

    def _by_community(self, graphs: Sequence[InEdges], part_count: int) -> np.ndarray:
        """The part of each node: uint16[nodes]. Deterministic. graphs: in-edges between all nodes.

        Raises ValueError for a damaged topology.
        """
        node_count = self._node_count
        most_rows = min(MAX_ROWS, max(1, node_count // (_SHARE * part_count)))
        labels, sizes = find_communities(graphs, node_count, most_rows)
        order = np.empty(node_count, np.uint32)
        _core.by_weight(sizes, order)
        weights = np.zeros((node_count, self._load_count), np.float32)
        for load, first, values in self._loads():
            _core.add_weights(labels[first : first + len(values)], values, load, weights)
        totals = weights.sum(axis=0, dtype=np.float64)
        loads = np.zeros((part_count, self._load_count))
        of_label = np.full(node_count, _core.NO_PART, np.uint16)
        _core.pack(order, weights, totals, 1 / (_HEAVY * part_count), loads, of_label)
        parts = np.empty(node_count, np.uint16)
        for start in range(0, node_count, _BLOCK):
            parts[start : start + _BLOCK] = of_label[labels[start : start + _BLOCK]]
        del labels, of_label
        weights[:] = 0
        for load, first, values in self._loads():
            nodes = np.arange(first, first + len(values), dtype=np.uint32)
            _core.add_weights(nodes, values, load, weights)
        for start in range(0, node_count, _BLOCK):
            sizes[start : start + _BLOCK] = np.minimum(weights[start : start + _BLOCK, -1], 1 << 31)
        _core.by_weight(sizes, order)
        _core.pack(order, weights, totals, 1.0, loads, parts)
        for _ in range(_ROUNDS):
            moved = sum(
                _core.refine(indptr, indices, weights, totals, _MOST, loads, parts)
                for indptr, indices in graphs
            )
            if moved * _SETTLED < node_count:
                break
        return parts


# METIS


def find_metis() -> str:
    """ "pymetis" or "dgl", whichever can be imported. Raises ImportError."""
    try:
        import pymetis  # noqa: F401

        return "pymetis"
    except ImportError:
        pass
    try:
        dgl_finder.import_dgl()
        return "dgl"
    except ImportError as error:
        raise ImportError(
            "--method metis needs METIS: pip install pymetis, or install DGL "
            f"(pymetis is not installed; {error})"
        ) from None


def metis_owners(
    library: str, graph: InEdges, kinds: np.ndarray, in_edges: np.ndarray, part_count: int
) -> np.ndarray:
    """The part of each node: uint16[node_count].

    graph: all edges in both directions, without loops and repeated edges. kinds: the type of each node, and
    whether it is a training seed, as a small number. in_edges: int64[node_count]. DGL balances the kinds and
    the edges; pymetis balances one weight per node, a mean of its shares of these.
    """
    indptr, indices = graph
    count = len(kinds)
    if part_count == 1 or not count:
        return np.zeros(count, np.uint16)
    owners = _by_pymetis if library == "pymetis" else _by_dgl
    return np.asarray(owners(indptr, indices, kinds, in_edges, part_count)).astype(np.uint16)


def _by_pymetis(
    indptr: np.ndarray, indices: np.ndarray, kinds: np.ndarray, in_edges: np.ndarray, parts: int
) -> Any:
    import pymetis

    # The share of a node in the rows of its kind and in the in-edges, 1000 on average.
    sizes = np.bincount(kinds)
    kind_count = int((sizes > 0).sum())
    share = len(kinds) / (sizes[kinds] * kind_count) + in_edges * (len(kinds) / max(1, int(in_edges.sum())))
    weights = np.maximum(1, share * 500).astype(np.int64)
    _, owners = pymetis.part_graph(
        parts, xadj=indptr.tolist(), adjncy=indices.tolist(), vweights=weights.tolist()
    )
    return owners


def _by_dgl(
    indptr: np.ndarray, indices: np.ndarray, kinds: np.ndarray, in_edges: np.ndarray, parts: int
) -> Any:
    dgl = dgl_finder.import_dgl()
    import torch

    pointers, sources = (torch.from_numpy(np.array(a, np.int64)) for a in (indptr, indices))
    graph = dgl.graph(("csc", (pointers, sources, torch.empty(0, dtype=torch.int64))))
    node_kinds = torch.from_numpy(kinds.astype(np.int64))
    # DGL prints how long each step takes, and leaves a file to the garbage collection.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        owners = dgl.metis_partition_assignment(graph, parts, balance_ntypes=node_kinds, balance_edges=True)
    return owners.numpy()


# One graph over all types


def union_graph(
    graphs: Sequence[Graph],
    starts: Mapping[str, int],
    node_count: int,
    scratch: Path,
    *,
    memory_bytes: int,
    workers: int,
    simple: bool,
) -> InEdges:
    """(indptr, indices) of all edges, each in both directions, memory-mapped from files in scratch.

    starts: the id of the first node of each type. simple: without loops and repeated edges.
    """

    def pieces(block_bytes: int) -> Iterator[Edges]:
        # One direction after the other: the order of edges must not depend on the size of blocks.
        for graph, forward in itertools.product(graphs, (True, False)):
            first_src, first_dst = starts[graph.relation[0]], starts[graph.relation[2]]
            edges = in_edges(graph.indptr, graph.indices, None, num_src=graph.num_src, num_dst=graph.num_dst)
            for src, dst, _ in edges.pieces(block_bytes):
                a, b = src + first_src, dst + first_dst
                if simple:
                    a, b = a[a != b], b[a != b]
                yield *((a, b) if forward else (b, a)), np.zeros(len(a), np.int64)

    edges = EdgeSource(2 * sum(len(graph.indices) for graph in graphs), node_count, node_count, pieces)
    return sorted_in_edges(edges, scratch, memory_bytes, workers=workers, dedup=simple)
