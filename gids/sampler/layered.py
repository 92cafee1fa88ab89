"""LayeredSampler: what the samplers share that go from layer to layer. Subclasses say what a layer draws."""

from __future__ import annotations

import hashlib
import inspect
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gids import _core
from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler.device.sampling import Dependency, DeviceSampler
from gids.sampler.minibatch import Block, Minibatch, PerType
from gids.sampler.topology import Graphs, Topology
from gids.store.names import Relation, describe_type

Fanout = int | Mapping[Relation, int]
Numbers = tuple[int, int, int]
"""Seed, epoch and step."""
Layers = tuple[list[torch.Tensor], list[list[Block]]]
"""Nodes by type; by layer, the seeds' first, a block of each relation."""

_KEEP_BYTES = 512 << 20
"""Buffers of minibatches on the CPU are used again as long as they and those in use take at most this."""
_MAX_FANOUT = (1 << 31) - 1
_U64 = (1 << 64) - 1
_MAX_KAPPA = 1 << 63


class LayeredSampler(ABC):
    """Arguments that are numbers per layer, the lock, pickling, and minibatches made of native arrays."""

    _numbers_are = "fanouts"  # the argument that has a number per layer
    _least = -1

    def __init__(self, per_layer: Sequence[Fanout], threads: int | None) -> None:
        name = self._numbers_are
        layers: list[Fanout] = [dict(sorted(n.items())) if isinstance(n, Mapping) else n for n in per_layer]
        if not layers or not all(_is_number(f, self._least) for layer in layers for f in _values(layer)):
            every = ", -1 for all neighbours" if self._least < 0 else ""
            raise ValueError(
                f"{name}={layers}; give one per layer: 1 or more{every}, or a "
                "dictionary by relation, where 0 leaves one out"
            )
        if any(f == 0 for f in layers):
            raise ValueError(f"{name}={layers}; a layer without neighbours computes nothing: leave it out")
        self.threads = threads if threads is not None else torch.get_num_threads()
        if self.threads < 1:
            raise ValueError(f"threads={threads}; at least one thread samples")
        self._per_layer = layers
        self._host: _core.HostSampler | None = None
        self._devices: dict[Device, DeviceSampler] = {}
        self._lock = threading.Lock()  # the memory that minibatches are made in is one

    def sample(
        self, graphs: Graphs | Topology, seeds: PerType, *, seed: int = 0, epoch: int = 0, step: int = 0
    ) -> Minibatch:
        """One minibatch, on the device for which the graphs are pinned, else on the CPU.

        graphs: a Graph or PinnedGraph, several as a sequence or dictionary, or a Topology made of them once.
        seeds: int64[n] of node ids, or bool[num_nodes], or a dictionary by node type of such. Seeds that
        repeat are kept, each with edges of its own (drawn alike), as DGL does; edges to such a node refer to
        its first position. seed, epoch, step: 0 or more, below 2^64; together they choose the random numbers.

        On the CPU this blocks, without the GIL. On a device it works on torch's current stream and waits for
        it once or twice per layer. The tensors are the caller's to keep.

        Raises IndexError for a seed that is no node, FormatError for a topology that contradicts itself,
        TypeError and ValueError for arguments.
        """
        topology, fanouts = self._checked(graphs, seed, epoch, step)
        return self._one(topology, seeds, fanouts, (seed, epoch, step))

    def sample_layer(
        self,
        graphs: Graphs | Topology,
        seeds: PerType,
        layer: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        step: int = 0,
    ) -> Minibatch:
        """One layer alone, 0 being that of the seeds: what a sampler with its number only would sample, with
        this one's threads and memory. Arguments, device, errors: as of sample().
        """
        topology, fanouts = self._checked(graphs, seed, epoch, step)
        return self._one(topology, seeds, [fanouts[layer]], (seed, epoch, step))

    def sample_bulk(
        self,
        graphs: Graphs | Topology,
        seeds_of_steps: Sequence[PerType],
        *,
        seed: int = 0,
        epoch: int = 0,
        first_step: int = 0,
    ) -> list[Minibatch]:
        """The minibatches of successive steps, each exactly what sample() makes of its seeds and step.

        seeds_of_steps: for each step, from first_step on, seeds as sample() takes them. On the CPU every
        thread makes whole minibatches, where sample() has all threads work on one: faster with two threads
        and more, while as many minibatches of scratch memory as there are threads are kept (``nbytes``). With
        less than one minibatch for two threads, and on a device, they are sampled one after the other. The
        matrix formulation of bulk sampling (Tripathy et al., MLSys 2024); see docs/sampler.md.

        Blocks, and raises, as sample() does: what the first step that fails raises, its message beginning
        with ``step N:``; no minibatch is returned then.
        """
        last_step = first_step + max(0, len(seeds_of_steps) - 1)
        topology, fanouts = self._checked(graphs, seed, epoch, first_step, last_step)
        steps = range(first_step, first_step + len(seeds_of_steps))
        own = type(self).sample is not LayeredSampler.sample  # a subclass that does more
        in_turn = len(steps) < 2 or topology.device is not None or own
        made, given = [], []
        try:
            for step, seeds in zip(steps, seeds_of_steps, strict=True):
                if in_turn:
                    made.append(self.sample(topology, seeds, seed=seed, epoch=epoch, step=step))
                else:
                    given.append(_seeds_for(topology, seeds))
        except (TypeError, ValueError, LookupError) as error:
            said, *rest = error.args or ("",)
            error.args = (f"step {step}: {said}", *rest)
            raise
        if in_turn:
            return made
        with self._lock:
            drawn = self._on_host(topology, given, fanouts, (seed, epoch, first_step))
        return [
            self._minibatch(topology, of_types, layers, epoch, step)
            for of_types, layers, step in zip(given, drawn, steps, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Memory kept between minibatches, on the host and on devices."""
        host = self._host.scratch_bytes + self._host.idle_bytes if self._host is not None else 0
        return host + sum(d.nbytes for d in self._devices.values())

    def scratch_bytes(self, at_once: int = 1) -> int:
        """Memory on the host to sample so many minibatches in one call, without these themselves.

        By what the last one took that was sampled alone; 0 before the first.
        """
        together = self._host.together_bytes if self._host is not None else 0
        return together if at_once == 1 else together * (1 + self.threads)

    def host_bytes(self) -> tuple[int, int]:
        """Memory on the host now: scratch, and buffers of minibatches, in use or kept for those to come."""
        host = self._host
        return (0, 0) if host is None else (host.scratch_bytes, host.taken_bytes + host.idle_bytes)

    def __repr__(self) -> str:
        """All that minibatches depend on: samplers that print alike sample alike."""
        parameters = inspect.signature(type(self)).parameters
        (_, per_layer), *options = self._printed().items()
        given = [
            f", {k}={v!r}"
            for k, v in options
            if k != "threads" and (k not in parameters or v != parameters[k].default)
        ]
        return f"{type(self).__name__}({per_layer}{''.join(given)})"

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """What makes an equal sampler, the numbers per layer first; what workers carry."""

    def _printed(self) -> dict[str, Any]:
        """The same, where what is large is told by a digest."""
        return self._arguments()

    @abstractmethod
    def _call(
        self,
        host: _core.HostSampler,
        topology: Topology,
        seeds: list[list[Any]],
        fanouts: list[list[int]],
        numbers: Numbers,
    ) -> list[_core._Sampled]:
        """The native sampler. seeds: int64[n] arrays by minibatch and node type. numbers: the first one's."""

    def _one(
        self, topology: Topology, seeds: PerType, fanouts: list[list[int]], numbers: Numbers
    ) -> Minibatch:
        given = _seeds_for(topology, seeds)
        with self._lock:
            if topology.device is None:
                [layers] = self._on_host(topology, [given], fanouts, numbers)
            else:
                layers = self._sample_on(topology.device, topology, given, fanouts, numbers)
        return self._minibatch(topology, given, layers, *numbers[1:])

    def _minibatch(
        self, topology: Topology, given: list[torch.Tensor], layers: Layers, epoch: int, step: int
    ) -> Minibatch:
        """given: the seeds by node type."""
        nodes, blocks = layers
        if topology.homogeneous:
            of_layers = [layer[0] for layer in reversed(blocks)]
            return Minibatch(given[0].to(nodes[0].device), nodes[0], of_layers, epoch, step)
        return Minibatch(
            {
                t: ids.to(n.device)
                for t, ids, n in zip(topology.node_types, given, nodes, strict=True)
                if len(ids)
            },
            dict(zip(topology.node_types, nodes, strict=True)),
            [dict(zip(topology.relations, layer, strict=False)) for layer in reversed(blocks)],
            epoch,
            step,
        )

    def _checked(
        self, graphs: Graphs | Topology, seed: int, epoch: int, *steps: int
    ) -> tuple[Topology, list[list[int]]]:
        """What is sampled, and the fanouts for it."""
        if not all(isinstance(n, int | np.integer) and 0 <= n <= _U64 for n in (seed, epoch, *steps)):
            given = ", ".join(f"step={step}" for step in steps)
            raise ValueError(f"seed={seed}, epoch={epoch}, {given}; each must be from 0 to 2^64 - 1")
        topology = Topology.of(graphs)
        return topology, self._fanouts_of(topology)

    def _sample_on(
        self,
        device: Device,
        topology: Topology,
        seeds: list[torch.Tensor],
        fanouts: list[list[int]],
        numbers: Numbers,
    ) -> Layers:
        raise ValueError(
            f"the graphs are pinned for {device.torch_device}, and {self!r} samples on the CPU alone; pass "
            "graphs that are not pinned"
        )

    def _device_sampler(self, device: Device) -> DeviceSampler:
        if device not in self._devices:
            self._devices[device] = DeviceSampler(device)
        return self._devices[device]

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # of the subclass

    def _fanouts_of(self, topology: Topology) -> list[list[int]]:
        """By layer, the seeds' first, and by relation."""
        result = []
        for layer in reversed(self._per_layer):
            if not isinstance(layer, Mapping):
                result.append([layer] * len(topology.relations))
                continue
            if missing := [r for r in topology.relations if r not in layer]:
                named = ", ".join(map(describe_type, missing))
                raise ValueError(
                    f"{self._numbers_are}={layer} lacks {named}; give every relation a number, 0 leaves it "
                    "out"
                )
            if unknown := [r for r in layer if r not in topology.relations]:
                raise ValueError(
                    f"{self._numbers_are}={layer} names {unknown[0]!r}, and no graph has that relation"
                )
            result.append([layer[r] for r in topology.relations])
        return result

    def _on_host(
        self,
        topology: Topology,
        seeds: list[list[torch.Tensor]],
        fanouts: list[list[int]],
        numbers: Numbers,
    ) -> list[Layers]:
        """By minibatch, as seeds are."""
        if self._host is None:
            self._host = _core.HostSampler(self.threads, _KEEP_BYTES)
        arrays = [[ids.numpy() for ids in given] for given in seeds]
        try:
            sampled = self._call(self._host, topology, arrays, fanouts, numbers)
        except _core.BadTopology as error:
            raise FormatError(str(error)) from None
        return [
            ([torch.from_numpy(n) for n in nodes], [_blocks(topology, layer) for layer in layers])
            for nodes, layers in sampled
        ]


def _seeds_for(topology: Topology, seeds: PerType) -> list[torch.Tensor]:
    """By node type."""
    given = topology.seeds_by_type(seeds)
    for ids, ntype in zip(given, topology.node_types, strict=True):
        if topology.device is None and ids.device.type != "cpu":
            raise ValueError(
                f"seeds of {ntype!r} are on {ids.device}; graphs that are not pinned need the CPU"
            )
    return given


def _blocks(topology: Topology, layer: list[_core._Arrays]) -> list[Block]:
    """One for each relation that the layer has."""
    tensor = torch.from_numpy
    return [
        Block(
            tensor(indptr),
            tensor(indices),
            tensor(positions),
            num_src,
            graph,
            None if weights is None else tensor(weights),
        )
        for (indptr, indices, positions, weights, num_src), graph in zip(layer, topology.graphs, strict=False)
    ]


def check_dependency(batch_dependency: float, nested: bool) -> Dependency:
    """As the native samplers take it."""
    if (
        isinstance(batch_dependency, bool)
        or not isinstance(batch_dependency, int | float)
        or not (batch_dependency == math.inf or 1 <= batch_dependency < _MAX_KAPPA)
        or (batch_dependency != math.inf and batch_dependency % 1)
    ):
        raise ValueError(
            f"batch_dependency={batch_dependency!r}; give how many minibatches the random numbers take to "
            "change: 1 (independent minibatches) or more, or math.inf"
        )
    kappa = 0 if batch_dependency == math.inf else int(batch_dependency)
    if nested and kappa == 1:
        raise ValueError(
            "nested=True with batch_dependency=1 nests nothing; give how many minibatches are cut from a "
            "large one: 2 or more, or math.inf"
        )
    return Dependency(kappa, nested)


def array_digest(array: np.ndarray) -> str:
    """Tells a large argument from others of its kind."""
    return f"{len(array)} ({hashlib.blake2b(array.data, digest_size=8).hexdigest()})"


def _values(layer: Fanout) -> list[int]:
    return list(layer.values()) if isinstance(layer, Mapping) else [layer]


def _is_number(given: object, least: int) -> bool:
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        return False
    return least <= int(given) <= _MAX_FANOUT
