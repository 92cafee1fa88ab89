"""What P ranks read and send for one step, counted in one process. Called by cooperation.py.

A rank's rows and ids are counted from minibatches of one process: nothing is sent. No loops over nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from graphs import Ids, Owners

from gids.sampler import Block, Minibatch, Sampler, Topology

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampled:
    """A minibatch on the host. nodes: the input nodes. frontiers: how many of them, from the first on, draw
    neighbors in each layer, from the seeds' layer on. blocks: from the input layer on."""

    nodes: Ids
    frontiers: list[int]
    blocks: list[Block]

    @staticmethod
    def of(minibatch: Minibatch, *, keep_blocks: bool = True) -> Sampled:
        blocks = [block for block in minibatch.blocks if isinstance(block, Block)]
        assert isinstance(minibatch.input_nodes, torch.Tensor)
        frontiers = [block.num_dst for block in reversed(blocks)]
        return Sampled(minibatch.input_nodes.numpy(), frontiers, blocks if keep_blocks else [])

    def foreign(self, owners: Owners, rank: int) -> npt.NDArray[np.bool_]:
        """Of each input node: whether another rank owns it."""
        return owners[self.nodes] != rank


def sample(sampler: Sampler, topology: Topology, seeds: Ids, step: int, *, keep_blocks: bool) -> Sampled:
    minibatch = sampler.sample(topology, torch.from_numpy(seeds), step=step)
    return Sampled.of(minibatch, keep_blocks=keep_blocks)


def unite(minibatches: Sequence[Sampled], node_count: int) -> Iterator[Ids]:
    """The union of the input nodes of the first 1, 2, 3, … minibatches: int64[n], ascending."""
    marks = np.zeros(node_count, np.bool_)
    for minibatch in minibatches:
        marks[minibatch.nodes] = True
        yield np.flatnonzero(marks)


def pages_of(rows: Ids, rows_per_page: int, page_count: int) -> int:
    """How many pages hold these rows."""
    marks = np.zeros(page_count, np.bool_)
    marks[rows // rows_per_page] = True
    return int(np.count_nonzero(marks))


def received(minibatch: Sampled, owners: Owners, ranks: int) -> list[Counts]:
    """Cooperative: the sources that each rank gets from other ranks, by layer, from the input layer on.

    A rank computes the destinations that it owns, so it needs their sources, each once. int64[ranks] each.
    """
    of_nodes, found = owners[minibatch.nodes], []
    for block in minibatch.blocks:
        ranks_of_edges = np.repeat(of_nodes[: block.num_dst].astype(np.int64), np.diff(block.indptr.numpy()))
        needed = np.zeros(ranks * block.num_src, np.bool_)
        needed[ranks_of_edges * block.num_src + block.indices.numpy()] = True
        needed = needed.reshape(ranks, block.num_src)
        needed[of_nodes[: block.num_src], np.arange(block.num_src)] = False
        found.append(np.count_nonzero(needed, axis=1).astype(np.int64))
    return found


@dataclass(frozen=True)
class Asked:
    """What one rank sends and gets if the owners of nodes sample for it, or send whole adjacency rows.

    requests: ids that it sends. drawn: ids that it gets, at most fanout per request. adjacent: ids that it
    gets instead if adjacency rows are sent.
    """

    requests: int
    drawn: int
    adjacent: int

    def __add__(self, other: Asked) -> Asked:
        return Asked(self.requests + other.requests, self.drawn + other.drawn, self.adjacent + other.adjacent)

    @property
    def sampling_bytes(self) -> int:
        return 8 * (self.requests + self.drawn)

    @property
    def adjacency_bytes(self) -> int:
        return 8 * (self.requests + self.adjacent)


def ask(
    minibatch: Sampled, foreign: npt.NDArray[np.bool_], in_degrees: Counts, fanouts: Sequence[int]
) -> Asked:
    """For one minibatch of a rank. fanouts: from the input layer on, all 1 or more."""
    asked = Asked(0, 0, 0)
    for frontier, fanout in zip(minibatch.frontiers, reversed(fanouts), strict=True):
        degrees = in_degrees[minibatch.nodes[:frontier][foreign[:frontier]]]
        drawn = int(np.minimum(degrees, fanout).sum())
        asked += Asked(len(degrees), drawn, int(degrees.sum()))
    return asked


@dataclass(frozen=True)
class Replicated:
    """Words of 1.5D sampling of P minibatches with whole adjacency rows; P ranks are P / c parts, c times.

    total: the adjacency rows of all frontiers, "kbd". stages: the largest message sum of a sender in a stage,
    over the stages, which follow each other. received: by a rank, mean. reduced: received by a rank in the
    reduction of partial results within a row of the grid, mean.
    """

    total: float
    stages: float
    received: float
    reduced: float


def replicate(
    minibatches: Sequence[Sampled], owners: Owners, in_degrees: Counts, ranks: int, copies: int
) -> Replicated:
    """Algorithm 2 of Tripathy, Yelick and Buluc (2024).

    owners: of ranks / copies parts. copies^2 divides ranks. Row i of the grid samples `copies` minibatches.
    Its rank in column j gets the adjacency rows of parts j * ranks / copies^2 and on, a part in each stage.
    """
    parts = ranks // copies
    stages = parts // copies
    # By row of the grid and part: an adjacency row that several minibatches want is sent once, but the
    # products have it several times.
    words, made = np.zeros((parts, parts)), np.zeros((parts, parts))
    layers = len(minibatches[0].frontiers)
    marks = np.zeros(len(owners), np.bool_)
    for row in range(parts):
        block = minibatches[row * copies : (row + 1) * copies]
        for layer in range(layers):
            marks[:] = False
            for minibatch in block:
                nodes = minibatch.nodes[: minibatch.frontiers[layer]]
                made[row] += np.bincount(owners[nodes], in_degrees[nodes], parts)
                marks[nodes] = True
            nodes = np.flatnonzero(marks)
            words[row] += np.bincount(owners[nodes], in_degrees[nodes], parts)
    sent = words - np.diag(np.diag(words))
    by_stage = sent.sum(axis=0).reshape(copies, stages).max(axis=0)
    partial = made.reshape(parts, copies, stages).sum(axis=2)  # of rank (row, column)
    reduced = partial.sum(axis=1, keepdims=True) - partial
    return Replicated(
        float(made.sum()), float(by_stage.sum()), float(sent.sum() / ranks), float(reduced.mean())
    )
