"""LayeredSampler: the base of samplers that go from layer to layer. Subclasses define what a layer draws."""

from __future__ import annotations

import hashlib
import inspect
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch

from gids import _core
from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler.device.sampling import Dependency, DeviceSampler, Started
from gids.sampler.forest import AnySeeds, Given, PlantedNodes, TimedSeeds, per_type
from gids.sampler.minibatch import Block, Minibatch, PerType
from gids.sampler.topology import Graphs, Topology
from gids.store.names import Relation, describe_type

Fanout = int | Mapping[Relation, int]
Seed = int | None
Numbers = tuple[int, int, int]
"""Seed, epoch and step."""
DrawnFor = tuple[_core.NeighborTopology, list[list[Any]], list[list[int]], Numbers, int | None]
"""The first arguments of every native sampler: the topology; the seeds, int64[n] by minibatch and node type;
the fanouts by layer, the seeds' first, and relation; the numbers of the first minibatch; the layer to draw
alone, or None for all layers."""
DeviceDrawnFor = tuple[Topology, Given, list[list[int]], Numbers]
"""The same for DeviceSampler.sample, of one minibatch."""
Layers = tuple[list[torch.Tensor], list[list[Block]], list[torch.Tensor]]
"""Nodes by type; by layer, the seeds' first, a block of each relation; the trees of the nodes, or none."""

_KEEP_BYTES = 512 << 20
"""Buffers of minibatches on the CPU are kept for reuse up to this size, including those in use."""
_MAX_FANOUT = (1 << 31) - 1
_U64 = (1 << 64) - 1
_MAX_KAPPA = 1 << 63


def chosen_seed(seed: Seed) -> int:
    """The seed; for None a number below 2^63 that torch's default generator draws."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_()) if seed is None else seed


class LayeredSampler(ABC):
    """Arguments with a number per layer, the lock, pickling, and minibatches made of native arrays."""

    _numbers_are = "fanouts"  # the argument that has a number per layer
    _options: tuple[str, ...] = ()  # further arguments and attributes, besides threads
    _least = -1
    _repeatable = False  # of this very class: a subclass of other people may keep a state
    _dependency = Dependency(1, False)

    def __init__(self, per_layer: Sequence[Fanout], threads: int | None) -> None:
        name = self._numbers_are
        layers: list[Fanout] = [dict(sorted(n.items())) if isinstance(n, Mapping) else n for n in per_layer]
        numbers = [f for n in layers for f in (n.values() if isinstance(n, Mapping) else [n])]
        if not layers or not all(_is_number(f, self._least) for f in numbers):
            every = ", -1 for all neighbors" if self._least < 0 else ""
            raise ValueError(
                f"{name}={layers}: give one number per layer, 1 or more{every}, or a dictionary of such "
                "numbers by relation (0: leave the relation out)"
            )
        if any(f == 0 for f in layers):
            raise ValueError(f"{name}={layers}: a layer without neighbors computes nothing; leave it out")
        self.threads = threads if threads is not None else torch.get_num_threads()
        if self.threads < 1:
            raise ValueError(f"threads must be 1 or more (got {threads})")
        self._per_layer = layers
        self._host: _core.HostSampler | None = None
        self._freed_bytes = 0
        self._devices: dict[Device, DeviceSampler] = {}
        self._lock = threading.Lock()  # one minibatch at a time uses the scratch memory

    def sample(
        self, graphs: Graphs | Topology, seeds: AnySeeds, *, seed: Seed = None, epoch: int = 0, step: int = 0
    ) -> Minibatch:
        """Sample one minibatch, on the device of pinned graphs, else on the CPU.

        graphs: a Graph or PinnedGraph, a sequence or dictionary of them, or a Topology, which can be reused.
        seeds: int64[n] node ids or bool[num_nodes], or a dictionary of these by node type. As in DGL,
        repeated seeds are kept and get the same edges; edges to such a node refer to its first position.
        TimedSeeds of such ids are for a temporal sampler. seed, epoch, step: 0 to 2^64 - 1; together they
        determine the random numbers. seed=None: each call draws one from torch's default generator. With
        batch_dependency, draws are correlated between the steps of one `epoch`: for a dependence that goes on
        from one epoch to the next, as in loaders, pass epoch=0 and the number of all steps before.

        On the CPU this blocks without the GIL. On a device it works on torch's current stream and waits for
        it, mostly once. The tensors belong to the caller.

        Raises IndexError for a seed that is not a node, FormatError for an inconsistent topology, TypeError
        and ValueError for wrong arguments.
        """
        seed = chosen_seed(seed)
        topology, fanouts = self._checked(graphs, seed, epoch, step)
        numbers, checked = (seed, epoch, step), self.prepare(topology, seeds)
        with self._lock:
            if topology.device is None:
                [layers] = self._on_host(topology, [checked], fanouts, numbers)
            else:
                started = self._start_on(topology.device, (topology, checked, fanouts, numbers))
                checked, layers = started.moved(checked), started.finish()
        return self.finish(topology, checked, layers, epoch, step)

    def start(
        self, graphs: Graphs | Topology, seeds: AnySeeds, *, seed: Seed = None, epoch: int = 0, step: int = 0
    ) -> Callable[[], Minibatch]:
        """Enqueue sample() on a device. The result returns the minibatch, and usually does not wait for it.

        Arguments and errors as in sample(); those of seeds and topology are raised by the result. Works on
        torch's current stream. Waits if a layer can have more than 2^18 edges, if a fanout is -1 or above 32,
        and with weights, locality or Labor. Minibatches may be finished in any order, but starting one waits
        for the one that was started before.
        """
        seed = chosen_seed(seed)
        topology, fanouts = self._checked(graphs, seed, epoch, step)
        if topology.device is None:
            raise ValueError("start() needs graphs that are pinned for a device: call sample()")
        checked = self.prepare(topology, seeds)
        with self._lock:
            started = self._start_on(topology.device, (topology, checked, fanouts, (seed, epoch, step)))

        def finish() -> Minibatch:
            with self._lock:
                layers = started.finish()
            return self.finish(topology, started.moved(checked), layers, epoch, step)

        return finish

    def sample_bulk(
        self,
        graphs: Graphs | Topology,
        seeds_of_steps: Sequence[AnySeeds],
        *,
        seed: Seed = None,
        epoch: int = 0,
        first_step: int = 0,
    ) -> list[Minibatch]:
        """Sample the minibatches of successive steps; each equals sample() with its seeds and step.

        seeds_of_steps: seeds, as in sample(), for each step from first_step on. On the CPU each thread makes
        whole minibatches, while in sample() all threads work on one. This is faster with two threads or more,
        and keeps scratch memory per thread (``nbytes``). With fewer minibatches than half the threads, and on
        a device, minibatches are sampled one after the other. Bulk sampling is from Tripathy et al., MLSys
        2024; no matrices are made here. See docs/internals/sampling.md.

        Blocks and raises like sample(). The error of the first step that fails begins with ``step N:``; then
        no minibatch is returned.
        """
        seed = chosen_seed(seed)
        last_step = first_step + max(0, len(seeds_of_steps) - 1)
        topology, fanouts = self._checked(graphs, seed, epoch, first_step, last_step)
        steps = range(first_step, first_step + len(seeds_of_steps))
        own = type(self).sample is not LayeredSampler.sample  # a subclass that adds work
        in_turn = len(steps) < 2 or topology.device is not None or own
        made, checked = [], []
        try:
            for step, seeds in zip(steps, seeds_of_steps, strict=True):
                if in_turn:
                    made.append(self.sample(topology, seeds, seed=seed, epoch=epoch, step=step))
                else:
                    checked.append(self.prepare(topology, seeds))
        except (TypeError, ValueError, LookupError) as error:
            said, *rest = error.args or ("",)
            error.args = (f"step {step}: {said}", *rest)
            raise
        if in_turn:
            return made
        with self._lock:
            drawn = self._on_host(topology, checked, fanouts, (seed, epoch, first_step))
        return [
            self.finish(topology, of_types, layers, epoch, step)
            for of_types, layers, step in zip(checked, drawn, steps, strict=True)
        ]

    def prepare(self, topology: Topology, seeds: AnySeeds) -> Given:
        """The checked seeds of a minibatch, to draw() the first layer of. Raises as sample()."""
        if isinstance(seeds, TimedSeeds | PlantedNodes):
            raise TypeError(
                f"{self!r} makes no trees, so it takes no {type(seeds).__name__}: use "
                "gids.sampler.Neighbor(disjoint=True), or temporal="
            )
        return Given(_seeds_for(topology, seeds))

    def draw(self, topology: Topology, nodes: list[Given], layer: int, numbers: Numbers) -> list[list[Block]]:
        """Draw the edges of one layer (0: the seeds') of successive minibatches, and assemble nothing.

        nodes: of each minibatch, those that draw. numbers: of the first one. Returns, by minibatch and
        relation, a block whose indices are node ids. A node draws as in sample(), whatever other nodes are
        given with it, unless the sampler looks at all of them together. On the CPU. Raises as sample().
        """
        fanouts = self.fanouts_of(topology)
        with self._lock:
            drawn = self._on_host(topology, nodes, fanouts, numbers, only=layer)
        return [blocks for _, [blocks], _ in drawn]

    def draw_from(
        self,
        topology: Topology,
        lists: Sequence[tuple[np.ndarray, np.ndarray]],
        layer: int,
        numbers: Numbers,
    ) -> list[Block]:
        """Draw the edges of one layer of one minibatch from the in-edges of its nodes, which are given.

        lists: by relation (indptr, sources): int64[nodes of the destination type + 1] and int64[edges].
        Returns by relation a block whose indices are node ids and whose positions are in `sources`. For
        samplers whose random numbers belong to sources. On the CPU. Raises as sample().
        """
        types = [(count, repr(t)) for t, count in zip(topology.node_types, topology.node_counts, strict=True)]
        sizes = [0] * len(types)
        for (indptr, _), (_, dst) in zip(lists, topology.ends, strict=True):
            sizes[dst] = max(sizes[dst], len(indptr) - 1)
        native = _core.NeighborTopology(types + [(size, "asked") for size in sizes])
        for (indptr, sources), graph, (src, dst) in zip(lists, topology.graphs, topology.ends, strict=True):
            rest = np.full(sizes[dst] + 1 - len(indptr), indptr[-1])
            native.add(np.append(indptr, rest), sources, src, len(types) + dst, describe_type(graph.relation))
        none = np.empty(0, np.int64)
        seeds = [*[none] * len(types), *[np.arange(size) for size in sizes]]
        fanouts = self.fanouts_of(topology)
        with self._lock:
            host = self._host_sampler()
            [(_, [blocks], _)] = self._call(host, topology, (native, [seeds], fanouts, numbers, layer), [])
        return _blocks(topology, blocks)

    def finish(self, topology: Topology, checked: Given, layers: Layers, epoch: int, step: int) -> Minibatch:
        """The minibatch of layers that were drawn and assembled. checked: the seeds, where the nodes are."""
        nodes, blocks, batch = layers
        by_type = partial(per_type, topology)
        minibatch = Minibatch(by_type(checked.ids), by_type(nodes, empty=True), [], epoch, step)
        of_layers = list(reversed(blocks))
        if topology.homogeneous:
            minibatch.blocks = [layer[0] for layer in of_layers]
        else:
            minibatch.blocks = [dict(zip(topology.relations, layer, strict=False)) for layer in of_layers]
        minibatch.batch = by_type(batch, empty=True) if batch else None
        minibatch.times = None if checked.times is None else by_type(checked.times)
        return minibatch

    @property
    def layer_count(self) -> int:
        return len(self._per_layer)

    def fanouts_of(self, topology: Topology) -> list[list[int]]:
        """By layer, the seeds' first, and by relation."""
        result = []
        for layer in reversed(self._per_layer):
            if not isinstance(layer, Mapping):
                result.append([layer] * len(topology.relations))
                continue
            if missing := [r for r in topology.relations if r not in layer]:
                named = ", ".join(map(describe_type, missing))
                raise ValueError(
                    f"{self._numbers_are}={layer} lacks {named}: give every relation a number (0: leave it "
                    "out)"
                )
            if unknown := [r for r in layer if r not in topology.relations]:
                raise ValueError(
                    f"{self._numbers_are}={layer} names {unknown[0]!r}, but no graph has that relation"
                )
            result.append([layer[r] for r in topology.relations])
        return result

    @property
    def draws_alone(self) -> bool:
        """Whether a node draws its edges without a look at the other nodes of its layer."""
        return False

    @property
    def repeatable(self) -> bool:
        """See Sampler. False for subclasses of other people; they may override it."""
        return bool(type(self).__dict__.get("_repeatable", False))

    @property
    def spans_epochs(self) -> bool:
        """See Sampler."""
        return self._dependency.kappa != 1

    @property
    def nbytes(self) -> int:
        """Bytes of memory kept between minibatches, on the host and on devices."""
        host = self._host
        host_bytes = 0 if host is None else host.scratch_bytes + host.idle_bytes
        return host_bytes + sum(d.nbytes for d in list(self._devices.values()))

    def scratch_bytes(self, at_once: int = 1) -> int:
        """Host memory to sample at_once minibatches in one call, without the minibatches.

        Estimated from the last minibatch that was sampled alone; 0 before the first. Once the memory is
        freed, that of a minibatch is included.
        """
        host = self._host
        together = self._freed_bytes if host is None else host.together_bytes
        return together if at_once == 1 else together * (1 + self.threads)

    def free_scratch(self, minibatch_bytes: int) -> None:
        """Free the host memory that is kept between calls. The next call takes it again.

        minibatch_bytes: of one minibatch.
        """
        if self._host is not None:
            self._freed_bytes = self._host.together_bytes + minibatch_bytes
        self._host = None

    def host_bytes(self) -> tuple[int, int]:
        """Host memory now: (scratch, buffers of minibatches that are in use or kept for reuse)."""
        host = self._host
        return (0, 0) if host is None else (host.scratch_bytes, host.taken_bytes + host.idle_bytes)

    def __repr__(self) -> str:
        """Everything that minibatches depend on: samplers with equal repr sample equally."""
        parameters = inspect.signature(type(self)).parameters
        (_, per_layer), *options = self._printed().items()
        words = [
            f", {k}={v!r}"
            for k, v in options
            if k != "threads" and (k not in parameters or v != parameters[k].default)
        ]
        return f"{type(self).__name__}({per_layer}{''.join(words)})"

    def _arguments(self) -> dict[str, Any]:
        """The constructor's arguments, the numbers per layer first."""
        return {name: getattr(self, name) for name in (self._numbers_are, *self._options, "threads")}

    def _printed(self) -> dict[str, Any]:
        """The arguments, with a digest in place of large arrays."""
        return self._arguments()

    @abstractmethod
    def _call(
        self, host: _core.HostSampler, topology: Topology, drawn_for: DrawnFor, checked: list[Given]
    ) -> list[_core._Sampled]:
        """Call the native sampler. checked: the seeds of drawn_for, with their trees."""

    def _checked(
        self, graphs: Graphs | Topology, seed: int, epoch: int, *steps: int
    ) -> tuple[Topology, list[list[int]]]:
        """The topology, and its fanouts."""
        if not all(isinstance(n, int | np.integer) and 0 <= n <= _U64 for n in (seed, epoch, *steps)):
            named = ", ".join(f"step={step}" for step in steps)
            raise ValueError(f"seed, epoch and step must be 0 to 2^64 - 1 (got {seed=}, {epoch=}, {named})")
        topology = Topology.of(graphs)
        return topology, self.fanouts_of(topology)

    def _start_on(self, device: Device, drawn_for: DeviceDrawnFor) -> Started:
        raise ValueError(
            f"{self!r} samples on the CPU only, but the graphs are pinned for {device.torch_device}: pass "
            "graphs that are not pinned"
        )

    def _device_sampler(self, device: Device) -> DeviceSampler:
        if device not in self._devices:
            self._devices[device] = DeviceSampler(device)
        return self._devices[device]

    def __getstate__(self) -> dict[str, Any]:
        """All attributes, those in slots of a subclass too, without memory. The constructor of a subclass may
        take other arguments."""
        state: Any = super().__getstate__()
        attributes, slots = state if isinstance(state, tuple) else (state, {})
        return {**attributes, **slots, "_host": None, "_freed_bytes": 0, "_devices": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if isinstance(getattr(type(self), name, None), MemberDescriptorType):  # a slot
                object.__setattr__(self, name, value)
            else:
                vars(self)[name] = value
        self._lock = threading.Lock()

    def _host_sampler(self) -> _core.HostSampler:
        if self._host is None:
            self._host = _core.HostSampler(self.threads, _KEEP_BYTES)
        return self._host

    def _on_host(
        self,
        topology: Topology,
        seeds: list[Given],
        fanouts: list[list[int]],
        numbers: Numbers,
        only: int | None = None,
    ) -> list[Layers]:
        """The layers by minibatch. only: as in DrawnFor."""
        host = self._host_sampler()
        arrays = [[ids.numpy() for ids in checked.ids] for checked in seeds]
        try:
            sampled = self._call(host, topology, (topology.native, arrays, fanouts, numbers, only), seeds)
        except _core.BadTopology as error:
            raise FormatError(str(error)) from None
        return [
            (
                [torch.from_numpy(n) for n in nodes],
                [_blocks(topology, layer) for layer in layers],
                [torch.from_numpy(t) for t in trees],
            )
            for nodes, layers, trees in sampled
        ]


def _seeds_for(topology: Topology, seeds: PerType) -> list[torch.Tensor]:
    """By node type."""
    by_type = topology.seeds_by_type(seeds)
    for ids, ntype in zip(by_type, topology.node_types, strict=True):
        if topology.device is None and ids.device.type != "cpu":
            raise ValueError(
                f"seeds of {ntype!r} are on {ids.device}: move them to the CPU, or pin the graphs"
            )
    return by_type


def _blocks(topology: Topology, layer: list[_core._Arrays]) -> list[Block]:
    """A block for each relation of the layer."""
    return [Block.of_arrays(*arrays, graph) for arrays, graph in zip(layer, topology.graphs, strict=False)]


def check_dependency(batch_dependency: float, nested: bool) -> Dependency:
    """The argument of the native samplers. Raises ValueError for a wrong one."""
    if (
        isinstance(batch_dependency, bool)
        or not isinstance(batch_dependency, int | float)
        or not (batch_dependency == math.inf or 1 <= batch_dependency < _MAX_KAPPA)
        or (batch_dependency != math.inf and batch_dependency % 1)
    ):
        raise ValueError(
            f"batch_dependency={batch_dependency!r}: give the number of minibatches over which draws stay "
            "correlated, 1 (independent) or more, or math.inf"
        )
    kappa = 0 if batch_dependency == math.inf else int(batch_dependency)
    if nested and kappa == 1:
        raise ValueError(
            "nested=True needs batch_dependency, the number of minibatches cut from a large one, to be 2 or "
            "more, or math.inf (got 1)"
        )
    return Dependency(kappa, nested)


def array_digest(array: np.ndarray) -> str:
    """A short text that identifies a large array."""
    return f"{len(array)} ({hashlib.blake2b(array.data, digest_size=8).hexdigest()})"


def _is_number(value: object, least: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return least <= int(value) <= _MAX_FANOUT
