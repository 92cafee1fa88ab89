"""Ladies: layer-wise sampling. The nodes of a layer draw their neighbours together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gids import _core
from gids.sampler.layered import Fanout, LayeredSampler, Numbers
from gids.sampler.topology import Topology


class Ladies(LayeredSampler):
    """Each layer draws `size` sources in all, and takes every edge from them.

    A source is drawn in proportion to the squared norm of its column in the row-normalised adjacency matrix,
    restricted to the rows of the layer's nodes. Zou et al., "Layer-Dependent Importance Sampling for Training
    Deep and Large Graph Convolutional Networks", NeurIPS 2019. The number of input nodes grows linearly with
    the number of layers; a node with few neighbours may get none.

    sizes: one per layer, from the input layer to the output layer: 1 or more, or -1 for all; or a dictionary
    with such a number for every relation (0: leave it out). poisson: take each source independently, `size`
    of them on average (Poisson LADIES; Balin and Catalyurek, 2023), which has less variance. Otherwise make
    `size` draws with replacement, which gives fewer different sources. threads: number of threads (None:
    torch's).

    Blocks have weights that make sums over all neighbours unbiased. The minibatch depends only on seeds,
    seed, epoch, step and graph.
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
