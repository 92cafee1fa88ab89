"""Makes synthetic graphs of any size: power-law, with features from which a GNN can learn the labels.

Called by ``gids generate``, ``gids quickstart``, the benchmarks and the tests. Writes the directory of
``.npy`` files that ``gids convert`` reads.

The model is a degree-corrected block model. Every node has a class. In-degrees follow a capped Pareto law.
The source of an edge is drawn by popularity rank (Zipf-Mandelbrot) among the nodes of one class: the target's
class with probability ``homophily``, any class otherwise. A row of features is the centroid of a class plus
white noise: the node's own class with probability ``candour``, any class otherwise. So a single row is often
misleading, and a neighborhood shows the class. Popularity and class do not depend on the id. An edge may
occur twice, and a node may be its own neighbor.

The typed graph has authors, who write papers, and papers, which cite papers. Authors have a class, too, and
each relation has half of the edges.

Every random number is keyed by (seed, purpose, block), so a graph depends on its parameters only. Memory:
about 40 bytes per node and a few blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 4096  # of feat.npy, so that rows of whole pages are aligned to pages of the file
FEATURE_BLOCK_BYTES = 4 << 20
EDGE_BLOCK_NODES = 1 << 17
POPULARITY_EXPONENT = 0.8  # of rank: the top 1 % of sources have a third of the edges, as in R-MAT graphs
POPULARITY_SHIFT = 8.0  # without it, the most popular node would have a few percent of all edges
IN_DEGREE_TAIL = 2.0  # Pareto index of the in-degrees
IN_DEGREE_CAP = 64.0  # largest in-degree, as a multiple of the mean


@dataclass(frozen=True)
class GraphSpec:
    """A graph of ``node_count`` nodes with ``degree`` in-edges on average, and rows of ``dim`` float32.

    homophily: probability that the source of an edge is drawn from the target's class. candour: that a row
    shows the node's own class. signal: norm of a class's centroid, where noise is 1. train_count, val_count,
    test_count: sizes of the disjoint splits. Raises ValueError for an argument out of its range.
    """

    node_count: int
    degree: float = 16.0
    dim: int = 128
    classes: int = 16
    homophily: float = 0.7
    candour: float = 0.5
    signal: float = 8.0
    train_count: int = 0
    val_count: int = 0
    test_count: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        splits = (self.train_count, self.val_count, self.test_count)
        most_classes = min(self.node_count, 32767)
        for rule, holds in {
            "node_count and dim must be 1 or more": min(self.node_count, self.dim) >= 1,
            "degree and seed must be 0 or more": min(self.degree, self.seed) >= 0,
            f"classes must be 1 to {most_classes}": 1 <= self.classes <= most_classes,
            "homophily and candour must be 0 to 1": 0 <= self.homophily <= 1 and 0 <= self.candour <= 1,
            "splits must be 0 or more": min(splits) >= 0,
            "splits must be at most all nodes": sum(splits) <= self.node_count,
        }.items():
            if not holds:
                raise ValueError(f"{rule} (got {self})")

    @property
    def row_bytes(self) -> int:
        return 4 * self.dim

    @property
    def feature_bytes(self) -> int:
        return self.node_count * self.row_bytes

    @property
    def directory_bytes(self) -> int:
        """Bytes that ``write_graph`` writes, within about 1 %: the number of edges is random."""
        return self.feature_bytes + int(8 * self.node_count * (2 + 1.02 * self.degree)) + (1 << 20)


def write_graph(
    directory: str | os.PathLike[str],
    spec: GraphSpec,
    *,
    typed: bool = False,
    threads: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> Path:
    """Write a graph to a directory, which is made if it is missing. Returns the directory.

    Writes feat.npy (float32[node_count, dim]), indptr.npy and indices.npy (CSC: sources of in-edges),
    labels.npy and {train,val,test}_idx.npy, all int64. Blocks until the files are written; does not sync.

    typed: spec.node_count papers with labels and splits, and half as many authors, in nodes/paper and
    nodes/author; edges/paper.cites.paper and edges/author.writes.paper. threads: for the features (0: one per
    core). progress(what, share done) is called repeatedly. Raises OSError, for example if the disk is full.
    """
    root, report = Path(directory), progress or (lambda what, share: None)
    papers = _draw_labels(spec)
    cited = _Sources(spec, papers, "popularity")
    if not typed:
        _write_nodes(root, spec, papers, threads, report)
        _write_edges(root, spec, papers, cited, report)
        return root
    no_splits = {"train_count": 0, "val_count": 0, "test_count": 0}
    author_spec = replace(spec, node_count=max(spec.classes, spec.node_count // 2), **no_splits)
    half = replace(spec, degree=spec.degree / 2)
    authors = _draw_labels(author_spec, "author labels")
    _write_nodes(root / "nodes/paper", spec, papers, threads, report)
    _write_features(_folder(root / "nodes/author"), author_spec, authors, threads, report, "author features")
    writing = _Sources(author_spec, authors, "author popularity")
    for name, sources in (("paper.cites.paper", cited), ("author.writes.paper", writing)):
        _write_edges(root / "edges" / name, half, papers, sources, report, name, name)
    return root


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _generator(spec: GraphSpec, purpose: str, block: int = 0) -> np.random.Generator:
    key = int.from_bytes(purpose.encode(), "little")
    return np.random.Generator(np.random.SFC64([spec.seed, key, block]))


def _draw_labels(spec: GraphSpec, purpose: str = "labels") -> NDArray[np.int16]:
    labels = _generator(spec, purpose).integers(spec.classes, size=spec.node_count, dtype=np.int16)
    labels[: spec.classes] = np.arange(spec.classes)  # no class is empty
    return labels


def _write_nodes(
    path: Path, spec: GraphSpec, labels: NDArray[np.int16], threads: int, report: Callable[[str, float], None]
) -> None:
    """Write the labels, splits and features of nodes to a new folder."""
    root = _folder(path)
    np.save(root / "labels.npy", labels.astype(np.int64))
    counts = (spec.train_count, spec.val_count, spec.test_count)
    chosen = _generator(spec, "splits").choice(spec.node_count, sum(counts), replace=False)
    parts = np.split(chosen.astype(np.int64), np.cumsum(counts)[:2])
    for name, ids in zip(("train", "val", "test"), parts, strict=True):
        np.save(root / f"{name}_idx.npy", np.sort(ids))
    _write_features(root, spec, labels, threads, report)


def _draw_indptr(spec: GraphSpec, purpose: str = "indptr") -> NDArray[np.int64]:
    rng = _generator(spec, purpose)
    weights = np.minimum((1 - rng.random(spec.node_count)) ** (-1 / IN_DEGREE_TAIL), IN_DEGREE_CAP)
    expected = weights * (spec.degree / weights.mean())
    in_degrees = np.floor(expected + rng.random(spec.node_count)).astype(np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(in_degrees)])


class _Sources:
    """The possible sources of edges, by class and popularity."""

    def __init__(self, spec: GraphSpec, labels: NDArray[np.int16], purpose: str) -> None:
        # members: the nodes of class 0 by falling popularity, then of class 1, ...
        order = _generator(spec, purpose).permutation(spec.node_count)
        self._members = order[np.argsort(labels[order], kind="stable")]
        self._sizes = np.bincount(labels, minlength=spec.classes)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._power = 1 - POPULARITY_EXPONENT
        self._low = POPULARITY_SHIFT**self._power
        self._spans = (self._sizes + POPULARITY_SHIFT) ** self._power - self._low

    def draw(self, classes: NDArray[np.int16], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """A source of each class. The inverse of the distribution function maps uniform numbers to ranks."""
        ranks = (uniform * self._spans[classes] + self._low) ** (1 / self._power) - POPULARITY_SHIFT
        ranks_in_class = np.minimum(ranks.astype(np.int64), self._sizes[classes] - 1)
        sources: NDArray[np.int64] = self._members[self._starts[classes] + ranks_in_class]
        return sources


def _write_edges(
    path: Path,
    spec: GraphSpec,
    labels: NDArray[np.int16],
    sources: _Sources,
    report: Callable[[str, float], None],
    purpose: str = "indices",
    indptr_purpose: str = "indptr",
) -> None:
    root, indptr = _folder(path), _draw_indptr(spec, indptr_purpose)
    np.save(root / "indptr.npy", indptr)
    with (root / "indices.npy").open("wb") as file:
        file.write(_npy_header("<i8", (int(indptr[-1]),)))
        for block, first in enumerate(range(0, spec.node_count, EDGE_BLOCK_NODES)):
            last = min(first + EDGE_BLOCK_NODES, spec.node_count)
            rng = _generator(spec, purpose, block)
            classes = np.repeat(labels[first:last], np.diff(indptr[first : last + 1]))
            draw = rng.random(len(classes))
            strays = np.flatnonzero(draw >= spec.homophily)
            classes[strays] = rng.integers(spec.classes, size=len(strays), dtype=np.int16)
            rng.random(out=draw)
            file.write(sources.draw(classes, draw).data)
            report("edges", last / spec.node_count)


def _write_features(
    root: Path,
    spec: GraphSpec,
    labels: NDArray[np.int16],
    threads: int,
    report: Callable[[str, float], None],
    purpose: str = "features",
) -> None:
    centroids = _generator(spec, "centroids").standard_normal((spec.classes, spec.dim), dtype=np.float32)
    centroids *= spec.signal / np.linalg.norm(centroids, axis=1, keepdims=True)
    block_rows = max(1, FEATURE_BLOCK_BYTES // spec.row_bytes)
    block_count = -(-spec.node_count // block_rows)
    path = root / "feat.npy"
    path.write_bytes(_npy_header("<f4", (spec.node_count, spec.dim), HEADER_BYTES))

    def write_block(block: int) -> None:
        first = block * block_rows
        shown = labels[first : first + block_rows].copy()
        rng = _generator(spec, purpose, block)
        others = np.flatnonzero(rng.random(len(shown)) >= spec.candour)
        shown[others] = rng.integers(spec.classes, size=len(others), dtype=np.int16)
        rows = rng.standard_normal((len(shown), spec.dim), dtype=np.float32)
        rows += centroids[shown]
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + first * spec.row_bytes)
            file.write(rows.data)

    # NumPy draws without the GIL.
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for done, _ in enumerate(pool.map(write_block, range(block_count)), start=1):
            report("features", done / block_count)


def _npy_header(descr: str, shape: tuple[int, ...], header_bytes: int = 128) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    head = b"\x93NUMPY\x01\x00" + (header_bytes - 10).to_bytes(2, "little")
    return head + text.ljust(header_bytes - 11).encode() + b"\n"
