"""RandomWalk: a node's neighbours are those that short random walks from it visit most, as in PinSAGE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gids import _core
from gids.sampler.layered import LayeredSampler, Layers, Numbers
from gids.sampler.minibatch import Minibatch
from gids.sampler.topology import Topology
from gids.store import Graph
from gids.store.names import Relation, describe_type

_MOST_NUMBERS = 1 << 31


class RandomWalk(LayeredSampler):
    """Walks with restart from every node of a layer; the nodes visited most become its neighbours.

    Ying et al., "Graph Convolutional Neural Networks for Web-Scale Recommender Systems" (PinSAGE), KDD 2018.

    num_neighbors: one per layer, from the input layer to the output layer, 1 or more. A node walks num_walks
    times, walk_length traversals each; before every traversal but the first it goes back to where it began
    with probability `restart`, and so it does from a dead end. A traversal goes over one in-edge; or, with a
    metapath, over one in-edge of each of its relations in turn, which must lead from a type back to it:
    [("user", "clicked by", "item"), ("item", "clicks", "user")] walks from items over users to items. It is
    needed with several relations. threads: None takes torch's.

    Blocks are between nodes of that type, and edges none of the graph's: positions are -1. Their weights are
    each neighbour's share of the visits to those kept and sum up to 1. The node itself does not count; of
    nodes visited equally often those visited first come first. With several relations blocks have the
    relation (type, "walks", type), and other types' nodes and seeds stay as given.

    The minibatch depends on seeds, seed, epoch, step and graph alone. sample() raises ValueError for a
    metapath that the graphs do not have, or that does not lead back.
    """

    _numbers_are = "num_neighbors"
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
            raise ValueError(f"num_neighbors={self._per_layer}; give a number per layer, not by relation")
        for name, value in (("num_walks", num_walks), ("walk_length", walk_length)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}; it must be 1 or more")
        if not 0 <= restart < 1:
            raise ValueError(f"restart={restart!r}; it is a probability, from 0 to less than 1")
        self.num_walks, self.walk_length, self.restart = num_walks, walk_length, float(restart)
        self.metapath = None if metapath is None else [(src, name, dst) for src, name, dst in metapath]
        if self.metapath is not None and not self.metapath:
            raise ValueError("metapath=[]; give one relation or more, or None")
        if num_walks * walk_length * (1 + len(self.metapath or [0])) >= _MOST_NUMBERS:
            raise ValueError(
                f"num_walks={num_walks}, walk_length={walk_length}; a node may draw less than 2^31 numbers"
            )

    @property
    def num_neighbors(self) -> list[Any]:
        return self._per_layer

    def _arguments(self) -> dict[str, Any]:
        return {
            "num_neighbors": self.num_neighbors,
            "num_walks": self.num_walks,
            "walk_length": self.walk_length,
            "restart": self.restart,
            "metapath": self.metapath,
            "threads": self.threads,
        }

    def _minibatch(
        self, topology: Topology, given: list[torch.Tensor], layers: Layers, epoch: int, step: int
    ) -> Minibatch:
        minibatch = super()._minibatch(topology, given, layers, epoch, step)
        ntype = topology.graphs[self._path_in(topology)[0]].relation[2]
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

    def _path_in(self, topology: Topology) -> list[int]:
        """The relations of a traversal."""
        if self.metapath is None:
            if len(topology.relations) > 1:
                named = ", ".join(map(describe_type, topology.relations))
                raise ValueError(
                    f"metapath=None, and there are several relations ({named}); give the way to walk"
                )
            path = [0]
        else:
            if unknown := [r for r in self.metapath if r not in topology.relations]:
                raise ValueError(f"metapath names {unknown[0]!r}, and no graph has that relation")
            path = [topology.relations.index(r) for r in self.metapath]
        ways = [topology.relations[r] for r in path]
        for one, following in zip(ways, [*ways[1:], ways[0]], strict=True):
            if one[0] != following[2]:
                raise ValueError(
                    f"metapath: against its direction {one!r} leads to {one[0]!r}, and {following!r} goes on "
                    f"from {following[2]!r}; a traversal must lead back to where it began"
                )
        return path

    def _call(
        self,
        host: _core.HostSampler,
        topology: Topology,
        seeds: list[list[Any]],
        fanouts: list[list[int]],
        numbers: Numbers,
    ) -> list[_core._Sampled]:
        path, counts = self._path_in(topology), [layer[:1] for layer in fanouts]
        walk = (path, self.num_walks, self.walk_length, self.restart)
        return host.walk(topology.native, seeds, counts, numbers, *walk)
