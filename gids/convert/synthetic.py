"""Makes synthetic graphs of any size: power-law, with features from which a GNN can learn the labels.

Called by ``gids generate``, ``gids quickstart``, the benchmarks and the tests. ``write_dataset`` writes a
dataset, ``write_graph`` the directory of ``.npy`` files that ``gids convert`` reads.

The model is a degree-corrected block model. Every node has a class. In-degrees follow a capped Pareto law.
The source of an edge is drawn by popularity rank (Zipf-Mandelbrot) among the nodes of one class: the target's
class with probability ``homophily``, any class otherwise. A row of features is the centroid of a class plus
white noise: the node's own class with probability ``candour``, any class otherwise. So a single row is often
misleading, and a neighborhood shows the class. Popularity and class do not depend on the id. An edge may
occur twice, and a node may be its own neighbor.

The typed graph has authors, who write papers, and papers, which cite papers. Authors have a class, too, and
each relation has the same number of edges.

Every random number is keyed by (seed, purpose, block) or, of features, by the node, so a graph depends on its
parameters only, and a row can be computed again (``Features.of``). Nothing but ids is held: 14 bytes per node
(32 for a moment), and blocks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gids.convert.layout import direct_alignment
from gids.store.dtypes import TABLE_DTYPES
from gids.store.geometry import best_page_bytes, div_ceil
from gids.store.names import NODE, RELATION, SPLITS, Relation
from gids.store.rows import GeneratedRows, Rows, in_order, read_range
from gids.write import DatasetWriter

HEADER_BYTES = 4096  # of feat.npy, so that rows of whole pages are aligned to pages of the file
BLOCK_BYTES = 4 << 20
_CHUNK_VALUES = 1 << 21  # of features, at a time: threads seldom wait for the interpreter
_CAST_VALUES = 32_000  # at a time: fewer than torch divides among threads, which may be busy
EDGE_BLOCK = 1 << 20
NODE_BLOCK = 1 << 20
NOISE = 1 << 20  # numbers; the noise of a row begins at one of them
POPULARITY_EXPONENT = 0.8  # of rank: the top 1 % of sources have a third of the edges, as in R-MAT graphs
POPULARITY_SHIFT = 8.0  # without it, the most popular node would have a few percent of all edges
IN_DEGREE_TAIL = 2.0  # Pareto index of the in-degrees
IN_DEGREE_CAP = 64.0  # largest in-degree, as a multiple of the mean

TWO_RELATIONS: tuple[Relation, ...] = (("author", "writes", "paper"), ("paper", "cites", "paper"))
FIVE_RELATIONS: tuple[Relation, ...] = (
    *TWO_RELATIONS,
    ("paper", "cited_by", "paper"),
    ("paper", "written_by", "author"),
    ("author", "knows", "author"),
)

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class GraphSpec:
    """A graph of ``node_count`` nodes with ``degree`` in-edges on average, and rows of ``dim`` values.

    homophily: probability that the source of an edge is drawn from the target's class. candour: that a row
    shows the node's own class. signal: norm of a class's centroid, where noise is 1. train_count, val_count,
    test_count: sizes of the disjoint splits. dtype: of the features, "float32" or "float16". Raises
    ValueError for an argument out of its range.
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
    dtype: str = "float32"

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
            "dtype must be float32 or float16": self.dtype in ("float32", "float16"),
        }.items():
            if not holds:
                raise ValueError(f"{rule} (got {self})")

    @property
    def row_bytes(self) -> int:
        return TABLE_DTYPES[self.dtype].itemsize * self.dim

    @property
    def feature_bytes(self) -> int:
        return self.node_count * self.row_bytes

    @property
    def directory_bytes(self) -> int:
        """Bytes that ``write_graph`` writes, or about 1 % fewer: the number of edges is random."""
        index_bytes = _index_dtype(self.node_count).itemsize
        return self.feature_bytes + int(self.node_count * (16 + 1.02 * index_bytes * self.degree)) + (1 << 20)


class Nodes(NamedTuple):
    """The nodes of a type. splits: sorted ids by name; a type without splits is written without labels."""

    labels: NDArray[np.int16]
    splits: dict[str, NDArray[np.int64]]
    features: Features


class Edges(NamedTuple):
    """The edges of a relation, by destination: the sources of v are indices[indptr[v]:indptr[v + 1]]."""

    indptr: NDArray[np.int64]
    indices: Rows


def write_graph(
    directory: str | os.PathLike[str],
    spec: GraphSpec,
    *,
    relations: Sequence[Relation] = (),
    threads: int = 0,
    progress: Report | None = None,
) -> Path:
    """Write a graph to a directory, which is made if it is missing. Returns the directory.

    Writes feat.npy (dtype[node_count, dim]), indptr.npy and indices.npy (CSC: sources of in-edges),
    labels.npy and {train,val,test}_idx.npy, all int64 but for indices, which are int32 where they fit.
    Blocks until the files are written; does not sync.

    relations: TWO_RELATIONS or FIVE_RELATIONS: spec.node_count papers with labels and splits, and half as
    many authors, in nodes/paper and nodes/author; edges/paper.cites.paper, …, with spec.node_count *
    spec.degree edges in all. Empty: one node type. threads: that draw (0: one per core). progress(what, share
    done) is called repeatedly. Raises OSError, for example if the disk is full.
    """
    root = Path(directory)
    for ntype, nodes in draw_nodes(spec, typed=bool(relations)):
        folder = _folder(root / "nodes" / ntype if relations else root)
        if nodes.splits:
            np.save(folder / "labels.npy", nodes.labels.astype(np.int64))
        for name, ids in nodes.splits.items():
            np.save(folder / f"{name}_idx.npy", ids)
        _save(folder / "feat.npy", _reported(nodes.features, f"{ntype} features", progress), threads)
    for relation, edges in draw_edges(spec, relations):
        folder = _folder(root / "edges" / ".".join(relation) if relations else root)
        np.save(folder / "indptr.npy", edges.indptr)
        _save(folder / "indices.npy", _reported(edges.indices, f"{relation[1]} edges", progress), threads)
    return root


def write_dataset(
    path: str | os.PathLike[str],
    spec: GraphSpec,
    *,
    relations: Sequence[Relation] = (),
    threads: int = 0,
    page_bytes: int | None = None,
    progress: Report | None = None,
) -> Path:
    """Write the graph of ``write_graph`` as a dataset, NAME.gids. Returns its path.

    Blocks until the dataset is on disk. Arguments as of ``write_graph``. page_bytes: of the tables; None: as
    `gids convert` chooses. Raises FileExistsError; StorageError if the disk is full. Then nothing is left.
    """
    counts = {}
    workers = threads or os.cpu_count() or 1
    if page_bytes is None:
        alignment = direct_alignment([Path(path).absolute().parent])
        page_bytes = best_page_bytes(spec.row_bytes, alignment=alignment)
    with DatasetWriter(path, page_bytes=page_bytes, workers=workers) as writer:
        for ntype, nodes in draw_nodes(spec, typed=bool(relations)):
            counts[ntype] = len(nodes.labels)
            features = _reported(nodes.features, f"{ntype} features", progress)
            writer.write_table("node", ntype, "feat", features)
            if nodes.splits:
                writer.write_labels(ntype, nodes.labels)
            for name, ids in nodes.splits.items():
                writer.write_split(ntype, name, ids)
        for relation, edges in draw_edges(spec, relations):
            indices = _reported(edges.indices, f"{relation[1]} edges", progress)
            count = counts[relation[0]]
            writer.write_graph(relation, edges.indptr, indices, num_src=count, index_dtype="auto")
    return writer.path


def draw_nodes(spec: GraphSpec, *, typed: bool = False) -> Iterator[tuple[str, Nodes]]:
    """The node types of ``write_graph``, one after the other. Rows are drawn when they are read."""
    if typed:
        authors = _authors(spec)
        labels = _draw_labels(authors, "author labels")
        yield "author", Nodes(labels, {}, Features(authors, labels, "author features"))
    labels = _draw_labels(spec)
    counts = (spec.train_count, spec.val_count, spec.test_count)
    chosen = _generator(spec, "splits").choice(spec.node_count, sum(counts), replace=False)
    parts = np.split(chosen.astype(np.int64), np.cumsum(counts)[:2])
    splits = {name: np.sort(ids) for name, ids in zip(SPLITS, parts, strict=True)}
    yield "paper" if typed else NODE, Nodes(labels, splits, Features(spec, labels))


def draw_edges(spec: GraphSpec, relations: Sequence[Relation] = ()) -> Iterator[tuple[Relation, Edges]]:
    """The relations of ``write_graph``, one after the other. Edges are drawn when they are read."""
    labels = _draw_labels(spec)
    if not relations:
        yield RELATION, _edges(spec, labels, _Sources(spec, labels, "popularity"))
        return
    authors = _authors(spec)
    ends = {
        "paper": (spec, labels, "popularity"),
        "author": (authors, _draw_labels(authors, "author labels"), "author popularity"),
    }
    for relation in relations:
        target, target_labels, _ = ends[relation[2]]
        degree = spec.degree / len(relations) * (spec.node_count / target.node_count)
        purposes = [".".join(relation)] * 2
        yield (
            relation,
            _edges(replace(target, degree=degree), target_labels, _Sources(*ends[relation[0]]), *purposes),
        )


def _authors(spec: GraphSpec) -> GraphSpec:
    count = max(spec.classes, spec.node_count // 2)
    return replace(spec, node_count=count, train_count=0, val_count=0, test_count=0)


def _generator(spec: GraphSpec, purpose: str, block: int = 0) -> np.random.Generator:
    key = int.from_bytes(purpose.encode(), "little")
    return np.random.Generator(np.random.SFC64([spec.seed, key, block]))


def _draw_labels(spec: GraphSpec, purpose: str = "labels") -> NDArray[np.int16]:
    labels = _generator(spec, purpose).integers(spec.classes, size=spec.node_count, dtype=np.int16)
    labels[: spec.classes] = np.arange(spec.classes)  # no class is empty
    return labels


class Features:
    """The features: Rows of dtype[node_count, dim]. Each row depends on the spec, its id and label only."""

    def __init__(self, spec: GraphSpec, labels: NDArray[np.int16], purpose: str = "features") -> None:
        self.shape = (spec.node_count, spec.dim)
        self.dtype: torch.dtype = TABLE_DTYPES[spec.dtype]
        self._spec, self._labels = spec, labels
        centroids = _generator(spec, "centroids").standard_normal((spec.classes, spec.dim), dtype=np.float32)
        self._centroids = centroids * (spec.signal / np.linalg.norm(centroids, axis=1, keepdims=True))
        rng = _generator(spec, purpose)
        noise = rng.standard_normal(NOISE + spec.dim, dtype=np.float32)
        self._noise = np.lib.stride_tricks.sliding_window_view(noise, spec.dim)
        self._key = rng.integers(1 << 63, dtype=np.uint64)

    def of(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """The rows of these nodes, before they are cast: float32[n, dim]."""
        words = _mixed(ids.astype(np.uint64) ^ self._key)
        shown = self._labels[ids]
        is_other = (words >> np.uint64(40)) >= np.uint64(self._spec.candour * (1 << 24))
        other = ((words >> np.uint64(20)) & np.uint64(0xFFFFF)) * np.uint64(self._spec.classes) >> np.uint64(
            20
        )
        shown = np.where(is_other, other.astype(np.int16), shown)
        rows = self._noise[(words & np.uint64(NOISE - 1)).astype(np.int64)]
        rows += np.take(self._centroids, shown, axis=0)
        return torch.from_numpy(rows)

    def read_into(self, start: int, out: torch.Tensor) -> None:
        step = max(1, _CHUNK_VALUES // self.shape[1])
        for first in range(0, len(out), step):
            piece = out[first : first + step]
            exact = self.of(np.arange(start + first, start + first + len(piece))).view(-1)
            for at in range(0, len(exact), _CAST_VALUES):
                piece.view(-1)[at : at + _CAST_VALUES].copy_(exact[at : at + _CAST_VALUES])


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: every bit of a word depends on all bits of the argument."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))


def _draw_indptr(spec: GraphSpec, purpose: str) -> NDArray[np.int64]:
    def weights(first: int) -> tuple[np.random.Generator, NDArray[np.float64]]:
        rng = _generator(spec, purpose, first)
        uniform = rng.random(min(NODE_BLOCK, spec.node_count - first))
        return rng, np.minimum((1 - uniform) ** (-1 / IN_DEGREE_TAIL), IN_DEGREE_CAP)

    starts = range(0, spec.node_count, NODE_BLOCK)
    scale = spec.degree * spec.node_count / sum(weights(first)[1].sum() for first in starts)
    indptr = np.zeros(spec.node_count + 1, np.int64)
    for first in starts:
        rng, expected = weights(first)
        indptr[1 + first : 1 + first + len(expected)] = expected * scale + rng.random(len(expected))
    return np.cumsum(indptr, out=indptr)


class _Sources:
    """The possible sources of edges, by class and popularity."""

    def __init__(self, spec: GraphSpec, labels: NDArray[np.int16], purpose: str) -> None:
        # members: the nodes of class 0 by falling popularity, then of class 1, ...
        order = np.arange(spec.node_count, dtype=_index_dtype(spec.node_count))
        _generator(spec, purpose).shuffle(order)
        self.members = order[np.argsort(labels[order], kind="stable")]
        self._sizes = np.bincount(labels, minlength=spec.classes)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._power = 1 - POPULARITY_EXPONENT
        self._low = POPULARITY_SHIFT**self._power
        self._spans = (self._sizes + POPULARITY_SHIFT) ** self._power - self._low

    def draw(self, classes: NDArray[np.int16], uniform: NDArray[np.float64]) -> NDArray[np.integer]:
        """A source of each class. The inverse of the distribution function maps uniform numbers to ranks."""
        ranks = (uniform * self._spans[classes] + self._low) ** (1 / self._power) - POPULARITY_SHIFT
        ranks_in_class = np.minimum(ranks.astype(np.int64), self._sizes[classes] - 1)
        sources: NDArray[np.integer] = self.members[self._starts[classes] + ranks_in_class]
        return sources


def _index_dtype(node_count: int) -> np.dtype[np.integer]:
    return np.dtype(np.int32 if node_count <= 1 << 31 else np.int64)


def _edges(
    spec: GraphSpec,
    labels: NDArray[np.int16],
    sources: _Sources,
    purpose: str = "indices",
    indptr_purpose: str = "indptr",
) -> Edges:
    indptr = _draw_indptr(spec, indptr_purpose)
    count = int(indptr[-1])

    def block(number: int) -> NDArray[np.integer]:
        """The sources of edges number * EDGE_BLOCK, …"""
        begin, end = number * EDGE_BLOCK, min((number + 1) * EDGE_BLOCK, count)
        first, last = np.searchsorted(indptr, [begin, end - 1], side="right")
        ends = indptr[first - 1 : last + 1].clip(begin, end)
        classes = np.repeat(labels[first - 1 : last], ends[1:] - ends[:-1])
        rng = _generator(spec, purpose, number)
        draw = rng.random(len(classes))
        strays = np.flatnonzero(draw >= spec.homophily)
        classes[strays] = rng.integers(spec.classes, size=len(strays), dtype=np.int16)
        rng.random(out=draw)
        return sources.draw(classes, draw)

    def fill(start: int, out: torch.Tensor) -> None:
        stop, indices = start + len(out), out.numpy()
        for number in range(start // EDGE_BLOCK, div_ceil(stop, EDGE_BLOCK)):
            at = number * EDGE_BLOCK
            piece = block(number)[max(0, start - at) : stop - at]
            indices[max(at - start, 0) :][: len(piece)] = piece

    dtype = TABLE_DTYPES[sources.members.dtype.name]
    return Edges(indptr, GeneratedRows((count,), dtype, fill))


def _reported(rows: Rows, what: str, report: Report | None) -> Rows:
    """The same rows. report(what, share): which share of them was read, about."""
    if report is None:
        return rows

    def fill(start: int, out: torch.Tensor) -> None:
        rows.read_into(start, out)
        report(what, (start + len(out)) / rows.shape[0])

    return GeneratedRows(rows.shape, rows.dtype, fill)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _save(path: Path, rows: Rows, threads: int) -> None:
    """Write a .npy file."""
    dtype = str(rows.dtype).removeprefix("torch.")
    head = f"{{'descr': '{np.dtype(dtype).str}', 'fortran_order': False, 'shape': {rows.shape}, }}"
    magic = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    path.write_bytes(magic + head.ljust(HEADER_BYTES - 11).encode() + b"\n")
    row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    step = max(1, BLOCK_BYTES // row_bytes)

    def write(start: int) -> None:
        block = read_range(rows, start, min(start + step, rows.shape[0]))
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + start * row_bytes)
            file.write(block.numpy().data)

    workers = threads or os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        for _ in in_order(pool, write, range(0, rows.shape[0], step), 2 * workers):
            pass
