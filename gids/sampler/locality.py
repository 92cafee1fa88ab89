"""LocalityBias: sources that a cache holds are drawn more often. Called by Neighbor."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from gids.sampler.layered import array_digest
from gids.sampler.topology import Topology
from gids.store.names import describe_type

Mask = torch.Tensor | np.ndarray
"""bool[num_nodes]."""

Masks = Mask | Mapping[str, Mask]
"""One mask, or masks by node type."""


class LocalityBias:
    """Draw edges from given nodes, whose features are in a cache, `factor` times as often as others.

    Song and Jiang, "Rethinking graph data placement for graph neural network training on multiple GPUs", ICS
    2022. weights: False, as published: blocks of relations with a mask have no weights, so that a mean over
    the drawn neighbors leans towards nodes in the cache, also where the sampler has weights of edges. True:
    with a factor above 1 they have weights, 1 / the probability of each edge, so that estimates of sums over
    neighbors are unbiased for every factor, with a variance that grows with it.

    nodes: bool[num_nodes] on the CPU, True for nodes in the cache, or a dictionary of such masks by node
    type. Types without a mask are drawn uniformly. The mask is copied, one bit per node, and does not change,
    as minibatches must not depend on the cache's state. gids.heat.hottest_nodes returns the nodes that a
    static cache will hold, FeatureLoader.cached_rows those that a cache holds between two epochs. factor: 1
    (no bias: the same minibatches as without LocalityBias) or more.

    nodes may be a list of these, one for each rank, as rows that are near one rank are far from another: see
    gids.distributed.Placement.within and GroupSource.own_nodes. Give all ranks the same list. A loader draws
    by the masks of its rank (of cooperative minibatches, of the rank that owns the destination), so ranks
    together no longer sample the minibatch of one process.

    Attributes: factor; weights; rank_count: number of ranks with masks of their own, or None.

    Raises TypeError for masks that are not bool in one dimension, ValueError for a wrong factor, an empty
    list, or ranks whose masks are of other nodes.
    """

    def __init__(self, nodes: Masks | Sequence[Masks], factor: float, *, weights: bool = False) -> None:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
            raise ValueError(f"factor must be 1 (no bias) or more, and finite (got {factor!r})")
        self.factor, self.weights = float(factor), bool(weights)
        self.rank_count = len(nodes) if isinstance(nodes, list | tuple) else None
        of_ranks = cast("Sequence[Masks]", [nodes] if self.rank_count is None else nodes)
        if not of_ranks:
            raise ValueError("nodes is an empty list: give the masks of each rank, or one mask for all")
        self._of_ranks = [_by_type(masks) for masks in of_ranks]
        self._rank = 0 if self.rank_count is None else None
        counts = [{ntype: count for ntype, (count, _) in masks.items()} for masks in self._of_ranks]
        if wrong := [rank for rank, count in enumerate(counts) if count != counts[0]]:
            raise ValueError(
                f"the masks of rank {wrong[0]} must be of the same nodes as those of rank 0 (got "
                f"{_brief(counts[wrong[0]])}, and {_brief(counts[0])})"
            )

    def __repr__(self) -> str:
        """Everything that minibatches depend on, with digests of the masks. The same on all ranks."""
        told = [
            _brief({ntype: f"{n} nodes, {array_digest(bits)}" for ntype, (n, bits) in masks.items()})
            for masks in self._of_ranks
        ]
        masks = told[0] if self.rank_count is None else told
        return f"LocalityBias({masks}, factor={self.factor}, weights={self.weights})"

    def of_rank(self, rank: int, world_size: int) -> LocalityBias:
        """The same with the masks of one rank; of a bias with the same masks for all ranks itself.

        Loaders call it. Raises ValueError if the masks are of another number of ranks.
        """
        if self.rank_count is None:
            return self
        if self.rank_count != world_size or not 0 <= rank < world_size:
            raise ValueError(
                f"the LocalityBias has masks for {self.rank_count} ranks, but this is rank {rank} of "
                f"{world_size}: give a list with masks for each rank"
            )
        of_rank = copy.copy(self)
        of_rank._rank = rank
        return of_rank

    def of(self, topology: Topology) -> tuple[list[np.ndarray | None], float, bool]:
        """(masks by relation, factor, weights). A mask is uint8[ceil(num_src / 8)], one bit per source, the
        lowest bit of a byte first, or None. Raises ValueError for masks that do not fit the node types.
        """
        if self._rank is None:
            raise ValueError(
                f"the LocalityBias has masks for {self.rank_count} ranks: sample by a loader, or give the "
                "sampler those of one rank, bias.of_rank(rank, world_size)"
            )
        chosen = self._of_ranks[self._rank]
        masks = {topology.node_types[0] if ntype is None else ntype: mask for ntype, mask in chosen.items()}
        if None in chosen and len(topology.node_types) > 1:
            raise ValueError(
                "nodes is one mask, but there are several node types: give a dictionary by node type"
            )
        counts = dict(zip(topology.node_types, topology.node_counts, strict=True))
        for ntype, (count, _) in masks.items():
            if ntype not in counts:
                known = ", ".join(map(describe_type, counts))
                raise ValueError(f"nodes has a mask for {ntype!r}, but the graphs have {known}")
            if count != counts[ntype]:
                raise ValueError(
                    f"the mask of {ntype!r} nodes must have {counts[ntype]} entries (got {count})"
                )
        if self.factor == 1:
            return [], 1.0, self.weights
        of_relations = [masks[r[0]][1] if r[0] in masks else None for r in topology.relations]
        return of_relations, self.factor, self.weights


def _by_type(nodes: Masks) -> dict[str | None, tuple[int, np.ndarray]]:
    """By node type, or of None: number of nodes, and a bit for each."""
    if isinstance(nodes, Mapping):
        return {ntype: _packed(mask, f" of {ntype!r}") for ntype, mask in nodes.items()}
    return {None: _packed(nodes, "")}


def _brief(values: dict[str | None, Any]) -> Any:
    """The value of one mask, or the values by node type."""
    return values.get(None, values)


def _packed(mask: Mask, whose: str) -> tuple[int, np.ndarray]:
    array = np.asarray(mask.numpy() if isinstance(mask, torch.Tensor) and not mask.is_cuda else mask)
    if array.dtype != np.bool_ or array.ndim != 1:
        raise TypeError(
            f"the mask{whose} must be bool[num_nodes] on the CPU, True for nodes in the cache (got "
            f"{array.dtype}{list(array.shape)})"
        )
    return len(array), np.packbits(array, bitorder="little")
