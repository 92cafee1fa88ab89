"""Ladies: layer-wise sampling, where a layer's nodes draw their neighbours together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gids import _core
from gids.sampler.layered import Fanout, LayeredSampler, Numbers
from gids.sampler.topology import Topology


class Ladies(LayeredSampler):
    """A layer draws `size` sources in all, in proportion to the squared norm of their column of the rows of
    the row-normalised adjacency matrix that belong to the layer's nodes; every edge from them is taken.

    Zou et al., "Layer-Dependent Importance Sampling for Training Deep and Large Graph Convolutional
    Networks", NeurIPS 2019. The number of input nodes grows with the number of layers, not exponentially; a
    node with few neighbours may sample none.

    sizes: one per layer, from the input layer to the output layer, each a number, 1 or more, or -1 for all;
    or a dictionary with such a number for every relation, where 0 leaves the relation out. poisson: each
    source comes or not by a number of its own, `size` in expectation (Poisson LADIES; Balin and Catalyurek,
    2023): less variance; otherwise `size` draws with replacement, so that fewer different sources come.
    threads: None takes torch's.

    Blocks have weights, by which sums over all neighbours are estimated without bias. The minibatch depends
    on seeds, seed, epoch, step and graph alone.
    """

    _numbers_are = "sizes"

    def __init__(self, sizes: Sequence[Fanout], *, poisson: bool = False, threads: int | None = None) -> None:
        super().__init__(sizes, threads)
        self.poisson = bool(poisson)

    @property
    def sizes(self) -> list[Fanout]:
        return self._per_layer

    def _arguments(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "poisson": self.poisson, "threads": self.threads}

    def _call(
        self,
        host: _core.HostSampler,
        topology: Topology,
        seeds: list[list[Any]],
        fanouts: list[list[int]],
        numbers: Numbers,
    ) -> list[_core._Sampled]:
        return host.ladies(topology.native, seeds, fanouts, numbers, self.poisson)
