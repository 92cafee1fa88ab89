"""LocalityBias: sources that a cache holds are drawn more often. Called by Neighbor."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from gids.sampler.layered import array_digest
from gids.sampler.topology import Topology
from gids.store.names import describe_type

Mask = torch.Tensor | np.ndarray
"""bool[num_nodes]."""


class LocalityBias:
    """Draw edges from given nodes, whose features are in a cache, `factor` times as often as others.

    Song and Jiang, "Rethinking graph data placement for graph neural network training on multiple GPUs", ICS
    2022. Unlike there, blocks have weights, 1 / the probability of each edge, so that estimates of sums over
    neighbors are unbiased for every factor.

    nodes: bool[num_nodes] on the CPU, True for nodes in the cache, or a dictionary of such masks by node
    type. Types without a mask are drawn uniformly. The mask is copied, one bit per node, and does not change,
    as minibatches must not depend on the cache's state. gids.heat.hottest_nodes returns the nodes that a
    static cache will hold, FeatureLoader.cached_rows those that a cache holds between two epochs. factor: 1
    (no bias: the same minibatches as without LocalityBias) or more.

    Raises TypeError for masks that are not bool in one dimension, ValueError for a wrong factor.
    """

    def __init__(self, nodes: Mask | Mapping[str, Mask], factor: float) -> None:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
            raise ValueError(f"factor must be 1 (no bias) or more, and finite (got {factor!r})")
        self.factor = float(factor)
        self._masks: dict[str | None, tuple[int, np.ndarray]] = (
            {ntype: _packed(mask, f" of {ntype!r}") for ntype, mask in nodes.items()}
            if isinstance(nodes, Mapping)
            else {None: _packed(nodes, "")}
        )

    def __repr__(self) -> str:
        """Everything that minibatches depend on, with digests of the masks."""
        told = {ntype: f"{n} nodes, {array_digest(bits)}" for ntype, (n, bits) in self._masks.items()}
        return f"LocalityBias({told.get(None, told)}, factor={self.factor})"

    def of(self, topology: Topology) -> tuple[list[np.ndarray | None], float]:
        """(masks by relation, factor). A mask is uint8[ceil(num_src / 8)], one bit per source, the lowest bit
        of a byte first, or None. Raises ValueError for masks that do not fit the node types.
        """
        masks = {
            topology.node_types[0] if ntype is None else ntype: mask for ntype, mask in self._masks.items()
        }
        if None in self._masks and len(topology.node_types) > 1:
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
            return [], 1.0
        return [masks[r[0]][1] if r[0] in masks else None for r in topology.relations], self.factor


def _packed(mask: Mask, whose: str) -> tuple[int, np.ndarray]:
    array = np.asarray(mask.numpy() if isinstance(mask, torch.Tensor) and not mask.is_cuda else mask)
    if array.dtype != np.bool_ or array.ndim != 1:
        raise TypeError(
            f"the mask{whose} must be bool[num_nodes] on the CPU, True for nodes in the cache (got "
            f"{array.dtype}{list(array.shape)})"
        )
    return len(array), np.packbits(array, bitorder="little")
