"""Sampling of minibatches by sparse matrices: a reference, to read and to compare with.

Tripathy, Yelick and Buluc, "Distributed Matrix-Based Sampling for Graph Neural Network Training" (arXiv
2311.02909), for one process, on scipy.sparse. Called by matrix_sampling.py. Minibatches in bulk are stacked:
k of them are one matrix Q. Each layer has three stages:

    probability  P = Q A, and each row of P divided by its sum
    sampling     inverse transform sampling in each row of P
    extraction   GraphSAGE: the drawn matrix without its empty columns; LADIES: A_R = Q_R A, then A_R Q_C
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse

from gids.store import Graph

Ints = npt.NDArray[np.int64]
Matrix = sparse.csr_array

STAGES = ("probability", "sampling", "extraction")


class Adjacency:
    """A, float64[n, n], of a graph without parallel edges: row v has a 1 for each in-neighbor of node v.

    squared_shares: the same with 1 / degree(v)² in row v.
    """

    def __init__(self, graph: Graph) -> None:
        ones = np.ones(graph.num_edges)
        self.ones: Matrix = sparse.csr_array((ones, graph.indices, graph.indptr), shape=(graph.num_dst,) * 2)
        shares = np.repeat(1 / np.maximum(1, np.diff(graph.indptr)), np.diff(graph.indptr))
        self.squared_shares: Matrix = sparse.csr_array((shares**2, *_structure(self.ones)), self.ones.shape)


@dataclass(frozen=True)
class Layer:
    """The sampled adjacency matrix of a layer of all minibatches, one block of it per minibatch.

    A row or column is a node of a minibatch: its key is minibatch * number of nodes + node. rows, columns:
    int64, ascending keys of the destinations and of the drawn sources.
    """

    matrix: Matrix
    rows: Ints
    columns: Ints


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begun


Step = Callable[[Adjacency, Ints, int, np.random.Generator, Clock], Layer]
"""graphsage, or ladies with a law: samples a layer of minibatches whose destinations have these keys."""


def sample(
    step: Step,
    adjacency: Adjacency,
    seeds: Sequence[Ints],
    sizes: Sequence[int],
    rng: np.random.Generator,
    clock: Clock,
) -> tuple[list[Layer], Ints]:
    """Sample some minibatches together. Returns the layers, the seeds' first, and keys of the input nodes.

    seeds: of each minibatch, int64, different. sizes: as in gids, the last one is for the seeds. As in gids,
    the next layer's destinations are those of this layer and what they drew.
    """
    count = adjacency.ones.shape[0]
    minibatch = np.repeat(np.arange(len(seeds)), [len(nodes) for nodes in seeds])
    rows, layers = np.sort(minibatch * count + np.concatenate(seeds)), []
    for size in reversed(sizes):
        layers.append(step(adjacency, rows, size, rng, clock))
        with clock.stage("extraction"):
            rows = np.union1d(rows, layers[-1].columns)
    return layers, rows


def graphsage(adjacency: Adjacency, rows: Ints, size: int, rng: np.random.Generator, clock: Clock) -> Layer:
    """Each destination draws `size` of its neighbors."""
    count = adjacency.ones.shape[0]
    minibatch, nodes = np.divmod(rows, count)
    with clock.stage("probability"):
        p = normalised(selection(nodes, count) @ adjacency.ones)
    with clock.stage("sampling"):
        drawn = inverse_transform(p, size, rng)
    with clock.stage("extraction"):
        row = rows_of(p)[drawn]
        columns, column = np.unique(minibatch[row] * count + p.indices[drawn], return_inverse=True)
        indptr = np.searchsorted(row, np.arange(len(rows) + 1))
        matrix = sparse.csr_array((np.ones(len(drawn)), column, indptr), (len(rows), len(columns)))
    return Layer(matrix, rows, columns)


def ladies(
    adjacency: Adjacency, rows: Ints, size: int, rng: np.random.Generator, clock: Clock, *, law: str
) -> Layer:
    """The destinations of a minibatch draw `size` sources together, and take every edge from these.

    law: what the probability of a candidate is proportional to. "count": the square of the number of
    destinations that it is a neighbor of (Tripathy et al.). "degree": the sum of 1 / degree² over these
    destinations (Zou et al., "Layer-Dependent Importance Sampling", NeurIPS 2019).
    """
    count = adjacency.ones.shape[0]
    minibatch, nodes = np.divmod(rows, count)
    with clock.stage("probability"):
        indptr = np.searchsorted(minibatch, np.arange(minibatch[-1] + 2))
        q = sparse.csr_array((np.ones(len(nodes)), nodes, indptr), (minibatch[-1] + 1, count))
        p = q @ adjacency.squared_shares if law == "degree" else (q @ adjacency.ones).power(2)
        p = normalised(p)
    with clock.stage("sampling"):
        drawn = inverse_transform(p, size, rng)
    with clock.stage("extraction"):
        candidates = rows_of(p) * count + p.indices  # keys of the columns that are not empty
        a_r = selection(nodes, count) @ adjacency.ones
        keys = minibatch[rows_of(a_r)] * count + a_r.indices
        blocks = sparse.csr_array(
            (a_r.data, np.searchsorted(candidates, keys), a_r.indptr), (len(rows), len(candidates))
        )
        matrix = blocks @ selection(drawn, len(candidates)).T.tocsr()  # Q_C
    return Layer(matrix, rows, candidates[drawn])


def selection(columns: Ints, width: int) -> Matrix:
    """float64[len(columns), width]: row i has a 1 in column columns[i]."""
    return sparse.csr_array(
        (np.ones(len(columns)), columns, np.arange(len(columns) + 1)), (len(columns), width)
    )


def normalised(p: Matrix) -> Matrix:
    """p with ascending columns, each row divided by its sum."""
    p.sort_indices()
    sums = np.asarray(p.sum(axis=1)).ravel()
    return sparse.csr_array((p.data / sums[rows_of(p)], *_structure(p)), p.shape)


def inverse_transform(p: Matrix, size: int, rng: np.random.Generator) -> Ints:
    """Draw `size` different entries of each row, one after the other in proportion; all if it has fewer.

    Returns their positions in p.data, ascending. A row that draws one twice draws again, without those that
    it has.
    """
    row_of = rows_of(p)
    missing = np.full(p.shape[0], size)
    taken = np.diff(p.indptr)[row_of] <= size
    left = np.flatnonzero(~taken)
    while len(left):
        row, sums = row_of[left], np.cumsum(p.data[left])
        begins = np.flatnonzero(np.diff(row, prepend=-1))
        ends = np.append(begins[1:], len(row))
        draws = np.repeat(np.arange(len(begins)), missing[row[begins]])
        below = np.where(begins > 0, sums[begins - 1], 0.0)
        at = below[draws] + rng.random(len(draws)) * (sums[ends - 1] - below)[draws]
        drawn = np.unique(np.minimum(np.searchsorted(sums, at, side="right"), ends[draws] - 1))
        taken[left[drawn]] = True
        missing -= np.bincount(row[drawn], minlength=len(missing))
        left = left[~taken[left] & (missing[row] > 0)]
    return np.flatnonzero(taken)


def rows_of(matrix: Matrix) -> Ints:
    """The row of each entry."""
    return np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))


def _structure(matrix: Matrix) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    return matrix.indices, matrix.indptr
