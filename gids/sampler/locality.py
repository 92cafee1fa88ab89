"""LocalityBias: which sources a cache holds, and how much more often they are drawn. Called by Neighbor."""

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
    """Edges from some nodes, those whose features are at hand, are drawn `factor` times as readily as others.

    Song and Jiang, "Rethinking graph data placement for graph neural network training on multiple GPUs", ICS
    2022. Unlike there, blocks have weights, 1 / the probability of each edge, so that sums over neighbours
    are estimated without bias whatever the factor.

    nodes: bool[num_nodes] on the CPU, True for a node that is at hand, or a dictionary by node type of such
    masks; of types that it lacks all nodes are drawn alike. It is copied, as a bit for each node, and does
    not change: minibatches must not depend on what a cache holds at the moment. gids.heat.hottest_nodes says
    what a static cache will hold, FeatureLoader.cached_rows what a cache holds between two epochs. factor: 1
    (all alike, the very minibatches of Neighbor without it) or more.

    Raises TypeError for masks that are not bool in one dimension, ValueError for the factor.
    """

    def __init__(self, nodes: Mask | Mapping[str, Mask], factor: float) -> None:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
            raise ValueError(f"factor={factor!r}; it must be 1 (all alike) or more, and finite")
        self.factor = float(factor)
        self._masks: dict[str | None, tuple[int, np.ndarray]] = (
            {ntype: _packed(mask, f" of {ntype!r}") for ntype, mask in nodes.items()}
            if isinstance(nodes, Mapping)
            else {None: _packed(nodes, "")}
        )

    def __repr__(self) -> str:
        """Tells all that minibatches depend on, masks by a digest."""
        told = {ntype: f"{n} nodes, {array_digest(bits)}" for ntype, (n, bits) in self._masks.items()}
        return f"LocalityBias({told.get(None, told)}, factor={self.factor})"

    def of(self, topology: Topology) -> tuple[list[np.ndarray | None], float]:
        """(by relation, a bit for each source, uint8[ceil(num_src / 8)], the lowest bit of a byte first, or
        None; the factor). Raises ValueError for masks that are not of its node types.
        """
        masks = {
            topology.node_types[0] if ntype is None else ntype: mask for ntype, mask in self._masks.items()
        }
        if None in self._masks and len(topology.node_types) > 1:
            raise ValueError("the mask of nodes is one tensor; give a dictionary by node type")
        counts = dict(zip(topology.node_types, topology.node_counts, strict=True))
        for ntype, (count, _) in masks.items():
            if ntype not in counts:
                known = ", ".join(map(describe_type, counts))
                raise ValueError(f"the masks of nodes name {ntype!r}; the graphs have {known}")
            if count != counts[ntype]:
                raise ValueError(
                    f"the mask of {ntype!r} nodes has {count} entries, and there are {counts[ntype]} nodes"
                )
        if self.factor == 1:
            return [], 1.0
        return [masks[r[0]][1] if r[0] in masks else None for r in topology.relations], self.factor


def _packed(mask: Mask, of: str) -> tuple[int, np.ndarray]:
    array = np.asarray(mask.numpy() if isinstance(mask, torch.Tensor) and not mask.is_cuda else mask)
    if array.dtype != np.bool_ or array.ndim != 1:
        raise TypeError(
            f"the mask{of} is {array.dtype} of shape {array.shape}; give bool[num_nodes], on the CPU: True "
            "for nodes that are at hand"
        )
    return len(array), np.packbits(array, bitorder="little")
