"""RandomWalk: a node's neighbors are the nodes that short random walks visit most, as in PinSAGE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gids import _core
from gids.sampler.forest import Given
from gids.sampler.layered import DrawnFor, LayeredSampler, Layers
from gids.sampler.minibatch import Minibatch
from gids.sampler.topology import Topology
from gids.store import Graph
from gids.store.names import Relation, describe_type

_MOST_NUMBERS = 1 << 31


class RandomWalk(LayeredSampler):
    """Walks with restart from every node of a layer. The nodes that are visited most become its neighbors.

    Ying et al., "Graph Convolutional Neural Networks for Web-Scale Recommender Systems" (PinSAGE), KDD 2018.

    num_neighbors: one per layer, from the input layer to the output layer, 1 or more. num_walks: walks per
    node. walk_length: traversals per walk. A traversal follows one in-edge or, with a metapath, one in-edge
    of each of its relations in turn. restart: probability of returning to the start before a traversal; a
    dead end always returns. metapath: relations that lead from a type back to it, required with several
    relations: [("user", "clicked by", "item"), ("item", "clicks", "user")] walks from items over users to
    items. threads: number of threads (None: torch's).

    Blocks connect nodes of that type. Their edges are not the graph's: positions are -1. A weight is the
    neighbor's share of the visits to the neighbors kept; weights of a node sum to 1. Visits to the node
    itself do not count. Among equally visited nodes the first visited come first. With several relations
    blocks have the relation (type, "walks", type); nodes and seeds of other types stay as given.

    The minibatch depends only on seeds, seed, epoch, step and graph. sample() raises ValueError for a
    metapath that the graphs do not have, or that does not lead back.
    """

    _numbers_are = "num_neighbors"
    _repeatable = True
    _options = ("num_walks", "walk_length", "restart", "metapath")
    _least = 0

    def __init__(
        self,
        num_neighbors: Sequence[int],
        *,
        num_walks: int = 10,
        walk_length: int = 2,
        restart: float = 0.5,
        metapath: Sequence[Relation] | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(num_neighbors, threads)
        if not all(isinstance(n, int) for n in self._per_layer):
            raise ValueError(f"num_neighbors={self._per_layer}: give one number per layer, not by relation")
        for name, value in (("num_walks", num_walks), ("walk_length", walk_length)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be 1 or more (got {value!r})")
        if not 0 <= restart < 1:
            raise ValueError(f"restart must be a probability, 0 or more and below 1 (got {restart!r})")
        self.num_walks, self.walk_length, self.restart = num_walks, walk_length, float(restart)
        self.metapath = None if metapath is None else [(src, name, dst) for src, name, dst in metapath]
        if self.metapath is not None and not self.metapath:
            raise ValueError("metapath=[]: give one relation or more, or None")
        if num_walks * walk_length * (1 + len(self.metapath or [0])) >= _MOST_NUMBERS:
            raise ValueError(
                f"num_walks={num_walks}, walk_length={walk_length}: a node must draw fewer than 2^31 numbers"
            )

    @property
    def num_neighbors(self) -> list[Any]:
        return self._per_layer

    def path_in(self, topology: Topology) -> list[int]:
        """The indices of the relations of a traversal."""
        if self.metapath is None:
            if len(topology.relations) > 1:
                named = ", ".join(map(describe_type, topology.relations))
                raise ValueError(f"metapath=None, but there are several relations ({named})")
            path = [0]
        else:
            if unknown := [r for r in self.metapath if r not in topology.relations]:
                raise ValueError(f"metapath names {unknown[0]!r}, but no graph has that relation")
            path = [topology.relations.index(r) for r in self.metapath]
        ways = [topology.relations[r] for r in path]
        for one, following in zip(ways, [*ways[1:], ways[0]], strict=True):
            if one[0] != following[2]:
                raise ValueError(
                    f"metapath: {one!r} leads (against its direction) to {one[0]!r}, but {following!r} "
                    f"starts from {following[2]!r}; a traversal must lead back to its start"
                )
        return path

    def finish(self, topology: Topology, checked: Given, layers: Layers, epoch: int, step: int) -> Minibatch:
        minibatch = super().finish(topology, checked, layers, epoch, step)
        ntype = topology.graphs[self.path_in(topology)[0]].relation[2]
        count = topology.node_counts[topology.node_types.index(ntype)]
        empty = np.zeros(0, np.int64)
        walks = Graph((ntype, "walks", ntype), count, count, empty, empty, None)
        of_layers: list[Any] = minibatch.blocks
        for i, layer in enumerate(of_layers):
            [block] = layer.values() if isinstance(layer, dict) else [layer]
            block.graph = walks
            if isinstance(layer, dict):
                of_layers[i] = {walks.relation: block}
        return minibatch

    def _call(
        self, host: _core.HostSampler, topology: Topology, drawn_for: DrawnFor, checked: list[Given]
    ) -> list[_core._Sampled]:
        native, seeds, fanouts, numbers, only = drawn_for
        walk = (self.path_in(topology), self.num_walks, self.walk_length, self.restart)
        return host.walk(native, seeds, [layer[:1] for layer in fanouts], numbers, only, *walk)
