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

from gids.sampler import Block, Sampler, Topology

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampled:
    """A minibatch on the host. nodes: the input nodes. frontiers: how many of them, from the first on, draw
    neighbors in each layer, from the seeds' layer on. blocks: from the input layer on."""

    nodes: Ids
    frontiers: list[int]
    blocks: list[Block]


def sample(sampler: Sampler, topology: Topology, seeds: Ids, step: int, *, keep_blocks: bool) -> Sampled:
    minibatch = sampler.sample(topology, torch.from_numpy(seeds), step=step)
    blocks = [block for block in minibatch.blocks if isinstance(block, Block)]
    assert isinstance(minibatch.input_nodes, torch.Tensor)
    frontiers = [block.num_dst for block in reversed(blocks)]
    return Sampled(minibatch.input_nodes.numpy(), frontiers, blocks if keep_blocks else [])


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


def ask(
    minibatch: Sampled, foreign: npt.NDArray[np.bool_], in_degrees: Counts, fanouts: Sequence[int]
) -> Counts:
    """What one rank sends and gets for a minibatch if the owners of nodes sample for it: int64[3].

    The ids that it sends; the ids that it gets, at most fanout for each; and those that it gets instead if
    whole adjacency rows are sent. fanouts: from the input layer on, all 1 or more.
    """
    asked = np.zeros(3, np.int64)
    for frontier, fanout in zip(minibatch.frontiers, reversed(fanouts), strict=True):
        degrees = in_degrees[minibatch.nodes[:frontier][foreign[:frontier]]]
        asked += [len(degrees), np.minimum(degrees, fanout).sum(), degrees.sum()]
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
