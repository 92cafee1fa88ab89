"""Ladies: layer-wise sampling. The nodes of a layer draw their neighbors together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from gids import _core
from gids.sampler.forest import Given
from gids.sampler.layered import DrawnFor, Fanout, LayeredSampler
from gids.sampler.topology import Topology

Law = Literal["degree", "count"]


class Ladies(LayeredSampler):
    """Each layer draws `size` sources in all, and takes every edge from them.

    law: what a source is drawn in proportion to. "degree": the sum of 1 / d^2 over the layer's nodes of
    in-degree d with an edge from it, the squared norm of its column in the row-normalized adjacency matrix;
    Zou et al., "Layer-Dependent Importance Sampling for Training Deep and Large Graph Convolutional
    Networks", NeurIPS 2019. "count": the square of the number of edges from it to the layer's nodes;
    Tripathy, Yelick and Buluc, "Distributed Matrix-Based Sampling for Graph Neural Network Training", MLSys
    2024. Parallel edges count as several. The number of input nodes grows linearly with the number of layers;
    a node with few neighbors may get none.

    sizes: one per layer, from the input layer to the output layer: 1 or more, or -1 for all; or a dictionary
    with such a number for every relation (0: leave it out). poisson: take each source independently, `size`
    of them on average (Poisson LADIES; Balin and Catalyurek, 2023), which has less variance. Otherwise draw
    `size` sources one after the other: with replace=True a source may come again, so that fewer are
    different; with replace=False, as published, all are. threads: number of threads (None: torch's).

    Blocks have weights that make sums over all neighbors unbiased, by both laws. On the CPU. The minibatch
    depends only on seeds, seed, epoch, step and graph.
    """

    _numbers_are = "sizes"
    _repeatable = True
    _options = ("law", "replace", "poisson")

    def __init__(
        self,
        sizes: Sequence[Fanout],
        *,
        law: Law = "degree",
        replace: bool = True,
        poisson: bool = False,
        threads: int | None = None,
    ) -> None:
        super().__init__(sizes, threads)
        if law not in get_args(Law):
            raise ValueError(f"law={law!r} must be one of {', '.join(map(repr, get_args(Law)))}")
        self.law: Law = law
        self.replace, self.poisson = bool(replace), bool(poisson)
        if self.poisson and not self.replace:
            raise ValueError("poisson=True draws no source twice: leave out replace=False")

    @property
    def sizes(self) -> list[Fanout]:
        return self._per_layer

    def _call(
        self, host: _core.HostSampler, topology: Topology, drawn_for: DrawnFor, checked: list[Given]
    ) -> list[_core._Sampled]:
        return host.ladies(*drawn_for, self.law == "count", self.replace, self.poisson)
