"""Neighbor: uniform neighbour sampling without replacement, by native threads or by GPU kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from gids import _core
from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler.minibatch import Block, Minibatch, PerType
from gids.sampler.on_device import DeviceSampler
from gids.sampler.topology import Graphs, Topology
from gids.store.names import Relation, describe_type

Fanout = int | Mapping[Relation, int]

_KEEP_BYTES = 512 << 20
"""Buffers of minibatches on the CPU are used again as long as they and those in use take at most this."""
_MAX_FANOUT = (1 << 31) - 1
_U64 = (1 << 64) - 1


class Neighbor:
    """Every node of a layer draws up to `fanout` in-edges by each relation, each as likely as the others.

    fanouts: one per layer, from the input layer to the output layer (as dgl.dataloading.NeighborSampler takes
    them: the last is that of the seeds). Each is a number, 1 or more, or -1 for all neighbours; or a
    dictionary with such a number for every relation, where 0 leaves the relation out. threads: on the CPU;
    None takes torch's.

    In a heterogeneous graph a node that any relation has found draws by every relation that ends in its type.
    Random numbers are counted, not drawn in turn: the minibatch depends on seeds, seed, epoch, step and
    graph, neither on threads nor on the device.
    """

    def __init__(self, fanouts: Sequence[Fanout], *, threads: int | None = None) -> None:
        self.fanouts = list(fanouts)
        if not self.fanouts or not all(_is_fanout(f) for layer in self.fanouts for f in _values(layer)):
            raise ValueError(
                f"fanouts={self.fanouts}; give one per layer: 1 or more, -1 for all neighbours, or a "
                "dictionary by relation, where 0 leaves one out"
            )
        if any(f == 0 for f in self.fanouts):
            raise ValueError(
                f"fanouts={self.fanouts}; a layer without neighbours computes nothing: leave it out"
            )
        self.threads = threads if threads is not None else torch.get_num_threads()
        if self.threads < 1:
            raise ValueError(f"threads={threads}; at least one thread samples")
        self._host: _core.NeighborSampler | None = None
        self._devices: dict[Device, DeviceSampler] = {}
        self._lock = threading.Lock()  # the memory that minibatches are made in is one

    def sample(
        self, graphs: Graphs | Topology, seeds: PerType, *, seed: int = 0, epoch: int = 0, step: int = 0
    ) -> Minibatch:
        """One minibatch, on the device for which the graphs are pinned, else on the CPU.

        graphs: a Graph or PinnedGraph, several as a sequence or dictionary, or a Topology made of them once.
        seeds: int64[n] of node ids, or a dictionary by node type of such. Seeds that repeat are kept, each
        with edges of its own (drawn alike), as DGL does; edges to such a node refer to its first place. seed,
        epoch, step: 0 or more, below 2^64; together they choose the random numbers.

        On the CPU this blocks, without the GIL. On a device it works on torch's current stream and waits for
        it once per layer, twice with a fanout of -1 or above 32. The tensors are the caller's to keep.

        Raises IndexError for a seed that is no node, FormatError for a topology that contradicts itself,
        TypeError and ValueError for arguments.
        """
        topology = Topology.of(graphs)
        numbers = (seed, epoch, step)
        if not all(isinstance(n, int) and 0 <= n <= _U64 for n in numbers):
            raise ValueError(f"seed={seed}, epoch={epoch}, step={step}; each must be from 0 to 2^64 - 1")
        fanouts = self._fanouts_of(topology)
        given = topology.seeds_by_type(seeds)
        with self._lock:
            sample = self._on_host if topology.device is None else self._on_device(topology.device)
            nodes, layers = sample(topology, given, fanouts, numbers)
        if topology.homogeneous:
            blocks = [layer[0] for layer in reversed(layers)]
            return Minibatch(given[0].to(nodes[0].device), nodes[0], blocks, epoch, step)
        return Minibatch(
            {
                t: ids.to(n.device)
                for t, ids, n in zip(topology.node_types, given, nodes, strict=True)
                if len(ids)
            },
            dict(zip(topology.node_types, nodes, strict=True)),
            [dict(zip(topology.relations, layer, strict=True)) for layer in reversed(layers)],
            epoch,
            step,
        )

    @property
    def nbytes(self) -> int:
        """Memory kept between minibatches, on the host and on devices."""
        host = self._host.bytes if self._host is not None else 0
        return host + sum(d.nbytes for d in self._devices.values())

    def __getstate__(self) -> dict[str, object]:
        return {"fanouts": self.fanouts, "threads": self.threads}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # what workers and checkpoints carry are the arguments

    def __repr__(self) -> str:
        return f"Neighbor({self.fanouts})"

    def _fanouts_of(self, topology: Topology) -> list[list[int]]:
        """By layer, the seeds' first, and by relation."""
        result = []
        for layer in reversed(self.fanouts):
            if not isinstance(layer, Mapping):
                result.append([layer] * len(topology.relations))
                continue
            if missing := [r for r in topology.relations if r not in layer]:
                named = ", ".join(map(describe_type, missing))
                raise ValueError(
                    f"fanouts={layer} lacks {named}; give every relation a number, 0 leaves it out"
                )
            if unknown := [r for r in layer if r not in topology.relations]:
                raise ValueError(f"fanouts={layer} names {unknown[0]!r}, and no graph has that relation")
            result.append([layer[r] for r in topology.relations])
        return result

    def _on_host(
        self,
        topology: Topology,
        seeds: list[torch.Tensor],
        fanouts: list[list[int]],
        numbers: tuple[int, int, int],
    ) -> tuple[list[torch.Tensor], list[list[Block]]]:
        if self._host is None:
            self._host = _core.NeighborSampler(self.threads, _KEEP_BYTES)
        for ids, ntype in zip(seeds, topology.node_types, strict=True):
            if ids.device.type != "cpu":
                raise ValueError(
                    f"seeds of {ntype!r} are on {ids.device}; graphs that are not pinned need the CPU"
                )
        try:
            nodes, layers = self._host.sample(
                topology.native, [ids.numpy() for ids in seeds], fanouts, *numbers
            )
        except _core.BadTopology as error:
            raise FormatError(str(error)) from None
        tensor = torch.from_numpy
        return [tensor(n) for n in nodes], [
            [
                Block(tensor(indptr), tensor(indices), tensor(positions), num_src, graph)
                for (indptr, indices, positions, num_src), graph in zip(layer, topology.graphs, strict=True)
            ]
            for layer in layers
        ]

    def _on_device(
        self, device: Device
    ) -> Callable[
        [Topology, list[torch.Tensor], list[list[int]], tuple[int, int, int]],
        tuple[list[torch.Tensor], list[list[Block]]],
    ]:
        if device not in self._devices:
            self._devices[device] = DeviceSampler(device)
        return self._devices[device].sample


def _values(layer: Fanout) -> list[int]:
    return list(layer.values()) if isinstance(layer, Mapping) else [layer]


def _is_fanout(fanout: object) -> bool:
    return isinstance(fanout, int) and not isinstance(fanout, bool) and -1 <= fanout <= _MAX_FANOUT
