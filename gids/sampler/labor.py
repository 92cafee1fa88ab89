"""Labor: layer-neighbor sampling. Nodes that share neighbors sample the same ones."""

from __future__ import annotations

from collections.abc import Sequence

from gids import _core
from gids.cuda import Device
from gids.sampler.device.sampling import Choice, Kind, Started
from gids.sampler.forest import Given
from gids.sampler.layered import (
    DeviceDrawnFor,
    DrawnFor,
    Fanout,
    LayeredSampler,
    check_dependency,
)
from gids.sampler.topology import Topology

_TO_CONVERGENCE = -1


class Labor(LayeredSampler):
    """Like Neighbor, with fewer different neighbors.

    In a layer every neighbor t has one random number r_t; a node with d > fanout neighbors takes those
    whose number is below a threshold. For one node the estimate is about as good as Neighbor's, but a
    minibatch has far fewer input nodes. Balin and Catalyurek, "Layer-Neighbor Sampling: Defusing Neighborhood
    Explosion in GNNs", NeurIPS 2023. GPUs sample LABOR-0 only.

    fanouts, threads: as in Neighbor; a fanout is an expected number unless fixed_count is set.
    importance_sampling: 0 (LABOR-0): t is taken with probability fanout / d. i >= 1 (LABOR-i): neighbors of
    nodes with few neighbors get higher probabilities, in i rounds. -1 (LABOR-*): as many rounds as reduce
    the expected number of nodes. fixed_count: take exactly `fanout` neighbors, those with the smallest
    numbers (sequential Poisson sampling). layer_dependency: a node has the same number in every layer, so
    that a minibatch has fewer input nodes; products of weights of several layers are biased then.
    batch_dependency: number of minibatches over which the numbers stay correlated (1: independent, math.inf:
    the whole training), so that successive minibatches read more of the same rows. nested: instead, that many
    minibatches have the same numbers, and the next ones new numbers. Loaders count minibatches over epochs
    (see sample()).

    Blocks have weights, 1 / the probability of each edge, which make the sums of each layer unbiased.
    fixed_count is slightly biased for parallel edges, which share one number. The minibatch depends only on
    seeds, seed, epoch, step and graph.
    """

    _repeatable = True
    _options = ("importance_sampling", "fixed_count", "layer_dependency", "batch_dependency", "nested")

    def __init__(
        self,
        fanouts: Sequence[Fanout],
        *,
        importance_sampling: int = 0,
        fixed_count: bool = False,
        layer_dependency: bool = False,
        batch_dependency: float = 1,
        nested: bool = False,
        threads: int | None = None,
    ) -> None:
        super().__init__(fanouts, threads)
        if (
            not isinstance(importance_sampling, int)
            or isinstance(importance_sampling, bool)
            or not _TO_CONVERGENCE <= importance_sampling < 1 << 31
        ):
            raise ValueError(
                "importance_sampling must be the number of rounds, 0 or more, or -1 for convergence (got "
                f"{importance_sampling!r})"
            )
        self.importance_sampling = importance_sampling
        self.fixed_count, self.layer_dependency = bool(fixed_count), bool(layer_dependency)
        self.batch_dependency, self.nested = batch_dependency, bool(nested)
        self._dependency = check_dependency(batch_dependency, self.nested)
        if self.nested and importance_sampling:
            raise ValueError(
                f"nested=True does not work with importance_sampling={importance_sampling}, whose "
                "probabilities depend on the whole minibatch: use importance_sampling=0"
            )

    @property
    def fanouts(self) -> list[Fanout]:
        return self._per_layer

    @property
    def draws_alone(self) -> bool:
        return self.importance_sampling == 0

    def _call(
        self, host: _core.HostSampler, topology: Topology, drawn_for: DrawnFor, checked: list[Given]
    ) -> list[_core._Sampled]:
        options = (self.importance_sampling, self.fixed_count, self.layer_dependency, self._dependency)
        return host.labor(*drawn_for, *options)

    def _start_on(self, device: Device, drawn_for: DeviceDrawnFor) -> Started:
        if self.importance_sampling:
            return super()._start_on(device, drawn_for)
        kind: Kind = "least sources" if self.fixed_count else "labor"
        choice = Choice(kind, self._dependency, self.layer_dependency)
        topology, checked, fanouts, numbers = drawn_for
        return self._device_sampler(device).start(topology, checked.ids, fanouts, numbers, choice)
