"""CollectiveSampling: minibatches that the ranks of a group make together. LayeredSteps: some of them, made
layer by layer. GroupSampling and Cooperation are such.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from gids import _core
from gids.distributed.owners import Owners
from gids.loader.ranks import Group, Ranks, place_of
from gids.sampler import Minibatch, Sampler, Topology
from gids.sampler.forest import AnySeeds, Given, check_seeds
from gids.sampler.layered import LayeredSampler, Numbers
from gids.sampler.minibatch import Block


class CollectiveSampling(ABC):
    """Samples minibatches that the ranks of a group make together.

    ranks: of the loader. whole: the topology that minibatches refer to. owners: of the nodes of each type.
    """

    def __init__(self, group: Group, ranks: Ranks, whole: Topology, owners: Sequence[Owners]) -> None:
        self.group, self.ranks, self.whole, self.owners = group, ranks, whole, list(owners)

    def sample_steps(
        self,
        sampler: Sampler,
        topology: Topology,
        seeds: Sequence[AnySeeds],
        *,
        seed: int,
        epoch: int,
        first_step: int,
    ) -> list[Minibatch]:
        """The minibatches of successive steps. Collective. Raises as the sampler, and RankError."""
        assert topology is self.whole
        return self._sample(sampler, seeds, (seed, epoch, first_step))

    @abstractmethod
    def _sample(self, sampler: Sampler, seeds: Sequence[AnySeeds], numbers: Numbers) -> list[Minibatch]: ...


class LayeredSteps(ABC):
    """Some steps, while all ranks make them, layer by layer. Lists are by step, then by node type.

    numbers: of the first step. count: of the steps.
    """

    def __init__(self, sampling: CollectiveSampling, sampler: Sampler, numbers: Numbers, count: int) -> None:
        self._group, self._whole, self._owners = sampling.group, sampling.whole, sampling.owners
        self._loader = sampling.ranks.loader
        self._sampler = cast(LayeredSampler, sampler)  # else begin() raises
        self._numbers, self._count = numbers, count
        self._seeds: list[Given] = []
        self._nodes: list[_core.FoundNodes] = []  # so far

    def sample(self, seeds: Sequence[AnySeeds]) -> list[Minibatch]:
        """The minibatches of these seeds. Collective."""
        try:
            for step_seeds in seeds:
                self.begin(step_seeds)
        except Exception as error:
            self._group.meet(self.place(0, "begins"), error)  # the others hear of it where they are
        layers: list[list[list[Block]]] = [[] for _ in seeds]
        for layer in range(self._sampler.layer_count):
            for step_layers, blocks in zip(layers, self.draw(layer), strict=True):
                step_layers.append(blocks)
        return [self.finish(step, step_layers) for step, step_layers in enumerate(layers)]

    @abstractmethod
    def begin(self, seeds: AnySeeds) -> None:
        """Check the seeds of the next step."""

    @abstractmethod
    def draw(self, layer: int) -> list[list[Block]]:
        """Draw one layer: by step, a block of each relation. Collective."""

    def finish(self, step: int, layers: list[list[Block]]) -> Minibatch:
        """The minibatch of a step."""
        types, nodes, (_, epoch, first) = range(len(self._whole.node_types)), self._nodes[step], self._numbers
        trees = []
        if self._seeds[step].trees is not None:
            trees = [torch.from_numpy(nodes.trees(t).astype(np.int64)) for t in types]
        drawn = [torch.from_numpy(nodes.nodes(t)) for t in types], layers, trees
        return self._sampler.finish(self._whole, self._seeds[step], drawn, epoch, first + step)

    def checked(self, seeds: AnySeeds) -> Given:
        """The seeds. Raises as the sampler, and IndexError for one that is no node."""
        checked, whole = self._sampler.prepare(self._whole, seeds), self._whole
        for ids, ntype, count in zip(checked.ids, whole.node_types, whole.node_counts, strict=True):
            check_seeds(ids, ntype, count)
        return checked

    def place(self, layer: int, what: str) -> str:
        """Where this rank is, for Group, from what it exchanges."""
        _, epoch, first = self._numbers
        return place_of(self._loader, epoch, first, f"{what} of layer {layer}, {self._count} steps")
