"""Sampling by GPU kernels (native/sampler/*.cu): launches them and owns the memory between them.

Called by Neighbor and Labor. The minibatches are the same as on the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from gids import _core
from gids.cuda import Argument, Device, Event, Stream
from gids.errors import FormatError
from gids.sampler.device import PinnedGraph
from gids.sampler.device.rates import DeviceRates, Rates
from gids.sampler.minibatch import Block
from gids.sampler.topology import Topology
from gids.store.names import describe_type

_UNIT = "sampler/neighbor.cu"
_WEIGHTED = "sampler/weighted.cu"
_THREADS = 256
_BLOCKS_PER_SM = 8
_BUS_BLOCKS = 64
"""The most blocks of a kernel that reads the topology over the bus. They keep the bus full; more blocks would
only keep registers from the kernels of training."""
_ALL = -1
_NO_LIMIT = np.uint64((1 << 64) - 1)
"""A fanout of -1 for the kernels that draw by weight."""
_LARGEST_ASSUMED = 32
"""Up to this fanout, room for all possible edges is allocated; above it, the host waits for their count."""
_LARGEST_UNCOUNTED = 1 << 18
"""Up to this many possible edges of a layer, the next one is enqueued before the host knows their number."""
_SCANNED = 2048
"""Values of a scan that a block takes at least."""
_NO_NODE = -1  # also as a key: its id is above all others
_IDS = (1 << 32) - 1
_NO_ADDRESS = 0
_NO_FAULT = -1
_MOST_EDGES = 1 << 31


Keys = tuple[int, int, np.float64, np.float64]
"""Keys of the random numbers of one relation or node type in one layer, for kernels."""


class Dependency(NamedTuple):
    """How the minibatches of successive steps depend on each other.

    kappa minibatches (0: a whole epoch) form a group. It is nested in a large minibatch, or its random
    numbers change gradually.
    """

    kappa: int
    nested: bool

    @property
    def gradual(self) -> bool:
        return not self.nested and self.kappa != 1


Kind = Literal["uniform", "replaced", "least", "least sources", "labor"]


@dataclass(frozen=True)
class Choice:
    """How in-edges are chosen.

    kind: "uniform": `fanout` edges, without replacement; "replaced": `fanout` draws with replacement;
    "least": the edges with the least random numbers; "least sources": the edges whose sources have the least
    numbers; "labor": the edges whose sources' numbers are below fanout / degree. dependency: not gradual for
    "uniform". layer_dependency: sources have the same numbers in all layers. rates: by relation, or empty;
    edges are drawn in proportion to them. last: of the edges that have times, only the last `fanout` ones.
    """

    kind: Kind
    dependency: Dependency
    layer_dependency: bool = False
    rates: Sequence[Rates | None] = ()
    last: bool = False

    @property
    def by_source(self) -> bool:
        """Whether a source has one number for all relations, and edges are weighted as in LABOR."""
        return self.kind in ("least sources", "labor")


class Forest(NamedTuple):
    """The trees of a disjoint minibatch. batch: the tree of each seed by node type, tags: of the trees.

    of_trees: the times of the trees; times: by relation (times of edges or sources, whether of sources) or
    None.
    """

    batch: list[torch.Tensor]
    tags: np.ndarray
    of_trees: np.ndarray | None
    times: Sequence[tuple[np.ndarray, bool] | None]


class _Trees(NamedTuple):
    """On the device: tags of the trees, uint32 as int32, and their times, int64."""

    tags: torch.Tensor
    times: torch.Tensor | None
    of_relations: Sequence[tuple[np.ndarray, bool] | None]


@dataclass(eq=False)
class _Draw:
    """One relation in one layer.

    capacity: upper bound of its edges. base: its first place (see gids/sampled_edges.h) among the edges from
    its source type. size: where the report has the number of its edges. begins, degrees: of each destination
    in the graph. indptr: of the sampled edges.
    """

    pinned: PinnedGraph
    number: int
    src: int
    fanout: int
    n: int
    begins: torch.Tensor
    degrees: torch.Tensor
    indptr: torch.Tensor
    choice: Choice
    rates: Rates | None
    keys: Keys
    size: int
    capacity: int = 0
    base: int = 0


@dataclass
class _Table:
    """Arrays for the edges from one node type in one layer, indexed by place (slots by hash)."""

    slots: torch.Tensor
    log2_slots: int
    sources: torch.Tensor
    positions: torch.Tensor
    slot_of: torch.Tensor
    ranks: torch.Tensor
    estimates: torch.Tensor


@dataclass(eq=False)
class _Drawn:
    """One layer whose edges are drawn and whose sizes are on the device.

    By node type: places, the number of possible edges; known, the length of the nodes before; before, after:
    where the report has the number of nodes that exist before and after the layer. By relation: edges, the
    indices and positions if the layer is relabeled, with room for all possible edges.
    """

    draws: list[_Draw]
    tables: list[_Table]
    places: list[int]
    known: list[int]
    before: list[int]
    after: list[int]
    edges: list[tuple[torch.Tensor, torch.Tensor]]
    in_trees: bool


class _Report:
    """What the host must know of a minibatch, int64 on the device: faults, then sizes. Kernels write it.

    faults: two by relation after one by node type. words: all of it.
    """

    def __init__(self, words: torch.Tensor, faults: int) -> None:
        self.words, self.fault_count = words, faults
        self._taken = faults

    def take(self) -> int:
        """The index of another size."""
        self._taken += 1
        return self._taken - 1

    def at(self, index: int) -> torch.Tensor:
        """int64[1] on the device."""
        return self.words[index : index + 1]


class Started:
    """A minibatch whose draws are enqueued on a stream. finish() waits for its sizes and makes its blocks.

    Made by DeviceSampler.start(). in_trees: nodes are keys, tree * 2^32 + id. waiting: the layers whose sizes
    the host does not know, of which the sampler's scratch memory holds the last one. layers: those before
    them.
    """

    def __init__(
        self,
        sampler: DeviceSampler,
        stream: Stream,
        topology: Topology,
        seeds: list[torch.Tensor],
        nodes: list[torch.Tensor],
        report: _Report,
        layers: list[list[Block]],
        waiting: list[_Drawn],
        in_trees: bool,
    ) -> None:
        self._in_trees = in_trees
        self._sampler, self._stream, self._topology = sampler, stream, topology
        self.seeds = seeds
        """By node type, on the device."""
        self._nodes, self._report, self._layers, self._waiting = nodes, report, layers, waiting
        sampler.ask(report)
        self._error: Exception | None = None

    def finish(self) -> tuple[list[torch.Tensor], list[list[Block]], list[torch.Tensor]]:
        """(nodes by type; by layer, the seeds' first, a block per relation; the trees of the nodes, or none).
        Raises like Neighbor.sample."""
        self.settle()
        if self._error is not None:
            raise self._error
        if not self._in_trees:
            return self._nodes, self._layers, []
        with self._sampler.using(self._stream):
            return [keys & _IDS for keys in self._nodes], self._layers, [keys >> 32 for keys in self._nodes]

    def settle(self) -> None:
        """Wait for the sizes, and free the sampler's scratch memory for the next minibatch. Idempotent."""
        if self._waiting:
            try:
                self._layers += self._sampler.settle(
                    self._stream, self._waiting, self._topology, self._nodes, self._report
                )
            except Exception as error:
                self._error = error
            self._waiting.clear()


class DeviceSampler:
    """Samples on one device. Reuses the memory between kernels. One caller at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}
        self._stream: Stream | None = None  # the last stream that used the scratch
        self._started: weakref.ref[Started] | None = None  # uses the scratch until it is settled
        self._asked: tuple[torch.Tensor, Event] | None = None  # a report on its way to the host
        self._unwanted: list[tuple[torch.Tensor, Event]] = []  # that nobody will read
        self._rates: DeviceRates | None = None
        self._trees: _Trees | None = None  # of the minibatch that is being started
        device.preload(_UNIT)

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """A context: torch works on this stream."""
        return self._device.use(stream)

    @property
    def nbytes(self) -> int:
        masks = self._rates.nbytes if self._rates is not None else 0
        return sum(t.nbytes for t in self._scratch.values()) + masks

    @property
    def rates(self) -> DeviceRates:
        """The weights and masks, for draws by weight."""
        if self._rates is None:
            self._rates = DeviceRates(self._device)
            self._device.preload(_WEIGHTED)
        return self._rates

    def start(
        self,
        topology: Topology,
        seeds: list[torch.Tensor],
        fanouts: list[list[int]],
        numbers: tuple[int, int, int],
        choice: Choice,
        forest: Forest | None = None,
    ) -> Started:
        """Enqueue a minibatch on torch's current stream. forest: the trees of a disjoint one.

        Waits for what is known only from layers before. Settles the minibatch that was started before.
        """
        topology.check_open()
        if self._started is not None and (before := self._started()) is not None:
            before.settle()
        if self._asked is not None:  # of a minibatch that was dropped
            self._unwanted = [asked for asked in (*self._unwanted, self._asked) if not asked[1].query()]
            self._asked = None
        stream = self._device.current_stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
            for scratch in self._scratch.values():  # this stream may still use it when it is replaced
                self._device.hand_over(scratch, self._stream, stream)
            self._scratch.clear()  # it belongs to the stream on which it was allocated
        self._stream = stream
        for pinned in topology.pinned:
            pinned.used_on(stream)
        here = self._device.torch_device
        seeds = [ids if ids.device == here else ids.pin_memory().to(here, non_blocking=True) for ids in seeds]
        nodes = list(seeds)
        self._trees = None
        if forest is not None:
            self._trees, batch = self._plant(forest)
            nodes = [of << 32 | ids & _IDS for of, ids in zip(batch, seeds, strict=True)]
        types, relations = len(nodes), len(topology.relations)
        fault_count = types + 2 * relations
        words = fault_count + types + len(fanouts) * (types + relations)
        with self._device.batch(stream, hold=True):
            report = _Report(self._device.empty(words, torch.int64), fault_count)
            self._device.fill(stream, report.words[:fault_count], _NO_FAULT & 0xFF)
            sizes = [report.take() for _ in nodes]
            for t, ids in enumerate(seeds):
                places = (report.at(t), report.at(sizes[t]))
                self._launch(
                    "gids_check_seeds", max(1, len(ids)), ids, len(ids), topology.node_counts[t], *places
                )
        layers: list[list[Block]] = []
        waiting: list[_Drawn] = []  # layers whose sizes the host does not know
        for hop, layer in enumerate(fanouts):
            keys: list[Keys] = []
            for r, (src, _) in enumerate(topology.ends):
                of_layer, number = 0 if choice.layer_dependency else hop, src if choice.by_source else r
                now, following, cos, sin = _core.variate_keys(numbers, choice.dependency, of_layer, number)
                keys.append((now, following, np.float64(cos), np.float64(sin)))
            if waiting and any(_is_counted(choice, fanout) for fanout in layer):
                layers += self.settle(stream, waiting, topology, nodes, report)
            with self._device.batch(stream, hold=True):
                drawn = self._layer(topology, nodes, sizes, layer, keys, report, choice)
            waiting.append(drawn)
            may_wait = not choice.rates and not choice.by_source  # their weights need scratch of the layer
            if hop + 1 == len(fanouts):
                break
            if may_wait and max(drawn.places) <= _LARGEST_UNCOUNTED:
                with self._device.batch(stream, hold=True):
                    self._relabel_ahead(drawn, nodes, report)
            else:
                layers += self.settle(stream, waiting, topology, nodes, report)
            sizes = drawn.after
        in_trees = self._trees is not None
        started = Started(self, stream, topology, seeds, nodes, report, layers, waiting, in_trees)
        self._started = weakref.ref(started)
        return started

    def _plant(self, forest: Forest) -> tuple[_Trees, list[torch.Tensor]]:
        """The trees on the device, and the tree of each seed."""
        here = self._device.torch_device

        def copied(values: torch.Tensor) -> torch.Tensor:
            return values if values.device == here else values.pin_memory().to(here, non_blocking=True)

        times = None if forest.of_trees is None else copied(torch.from_numpy(forest.of_trees))
        tags = copied(torch.from_numpy(forest.tags.view(np.int32)))
        return _Trees(tags, times, forest.times), [copied(of) for of in forest.batch]

    @property
    def _in_trees(self) -> np.uint32:
        """For kernels."""
        return np.uint32(self._trees is not None)

    def _layer(
        self,
        topology: Topology,
        nodes: list[torch.Tensor],
        sizes: list[int],
        fanouts: list[int],
        keys: list[Keys],
        report: _Report,
        choice: Choice,
    ) -> _Drawn:
        """Draw one layer. sizes: where the report has them. Nodes beyond are _NO_NODE: they have no edges."""
        draws = [
            self._count(topology, r, nodes[dst], fanouts[r], report, choice, keys[r])
            for r, (_, dst) in enumerate(topology.ends)
        ]
        places = self._capacities(draws, len(nodes), report)
        known = [len(ids) for ids in nodes]
        weighted = {draw.src for draw in draws if draw.rates is not None}
        tables = [self._table(t, ids, places[t], t in weighted) for t, ids in enumerate(nodes)]
        for draw, (_, dst) in zip(draws, topology.ends, strict=True):
            self._draw(draw, nodes[dst], tables[draw.src], known[draw.src], topology, report)
        for draw in draws:
            table = tables[draw.src]
            self._launch(
                "gids_mark_first",
                draw.capacity,
                *(table.slots, table.slot_of, draw.indptr[draw.n :], draw.capacity),
                *(known[draw.src], draw.base, self._in_trees, table.ranks),
            )
        after = list(sizes)
        for t, (table, count) in enumerate(zip(tables, places, strict=True)):
            if count:
                after[t] = report.take()
                self._scan(table.ranks[:count], report.at(after[t]), base=report.at(sizes[t]))
        return _Drawn(draws, tables, places, known, sizes, after, [], self._trees is not None)

    def _relabel_ahead(self, drawn: _Drawn, nodes: list[torch.Tensor], report: _Report) -> None:
        """Write a layer's edges and nodes into arrays for all that are possible. Does not wait."""
        for t, places in enumerate(drawn.places):
            if places:
                nodes[t] = self._grown(nodes[t], len(nodes[t]), places)
                self._device.fill(self._on, nodes[t][-places:], _NO_NODE & 0xFF)
        drawn.edges = [self._relabel(draw, drawn, draw.capacity, nodes, report) for draw in drawn.draws]

    def _grown(self, values: torch.Tensor, count: int, more: int = 0) -> torch.Tensor:
        """The first `count` values in memory of their own, and room for more."""
        grown = self._device.empty(count + more, values.dtype)
        self._device.copy(self._on, grown[:count], values[:count])
        return grown

    def _exactly(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """The first `count` values, in memory that has no more."""
        return values if len(values) == count else self._grown(values, count)

    @property
    def _on(self) -> Stream:
        assert self._stream is not None
        return self._stream

    def ask(self, report: _Report) -> None:
        """Enqueue a copy of the report to the host."""
        with self._device.batch(self._on):
            self._asked = self._device.to_host(report.words)

    def _answer(self) -> list[int]:
        """Wait for the report that was asked for."""
        assert self._asked is not None
        (words, copied), self._asked = self._asked, None
        copied.synchronize()
        answer: list[int] = words.tolist()
        return answer

    def settle(
        self,
        stream: Stream,
        waiting: list[_Drawn],
        topology: Topology,
        nodes: list[torch.Tensor],
        report: _Report,
    ) -> list[list[Block]]:
        """Wait for the sizes of layers, and make their blocks. The last one may not be relabeled yet.

        stream: that of start().
        """
        if not waiting:
            return []
        with self._device.use(stream):
            if self._asked is None:
                self.ask(report)
            answer = self._answer()
            _raise_faults(topology, nodes, answer[: report.fault_count], waiting[0].in_trees)
            with self._device.batch(stream):
                return self._blocks(waiting, topology, nodes, report, answer)

    def _blocks(
        self,
        waiting: list[_Drawn],
        topology: Topology,
        nodes: list[torch.Tensor],
        report: _Report,
        answer: list[int],
    ) -> list[list[Block]]:
        """The blocks of layers. Relabels the last one if it is not yet. answer: the report, on the host."""
        layers = []
        for drawn in waiting:
            edges = [answer[draw.size] for draw in drawn.draws]
            before = [answer[index] for index in drawn.before]
            after = [answer[index] for index in drawn.after]
            if not drawn.edges:
                for t, (old, size) in enumerate(zip(before, after, strict=True)):
                    if size > len(nodes[t]) or old < len(nodes[t]):
                        nodes[t] = self._grown(nodes[t], old, size - old)
                drawn.edges = [
                    self._relabel(draw, drawn, count, nodes, report)
                    for draw, count in zip(drawn.draws, edges, strict=True)
                ]
            layers.append(
                [
                    self._block(draw, drawn, before[dst], after[draw.src], count, topology)
                    for draw, (_, dst), count in zip(drawn.draws, topology.ends, edges, strict=True)
                ]
            )
        for t, size in enumerate(after):
            nodes[t] = self._exactly(nodes[t], size)
        waiting.clear()
        return layers

    def _count(
        self,
        topology: Topology,
        number: int,
        nodes: torch.Tensor,
        fanout: int,
        report: _Report,
        choice: Choice,
        keys: Keys,
    ) -> _Draw:
        pinned, graph, n = topology.pinned[number], topology.graphs[number], len(nodes)
        begins = self._take("begins", number, n, torch.int64)
        degrees = self._take("degrees", number, n, torch.int64)
        indptr = self._device.empty(n + 1, torch.int64)
        fault = len(topology.node_types) + 2 * number
        self._launch(
            "gids_count_neighbors",
            2 * n,
            *(nodes, n, graph.num_dst, pinned.indptr_address, graph.num_edges, np.int32(fanout)),
            np.uint32(choice.kind == "replaced"),
            *(self._in_trees, begins, degrees, indptr[1:], report.at(fault)),
            over_bus=pinned.indptr_on_host,
        )
        times = self._trees.of_relations[number] if self._trees and self._trees.of_relations else None
        if times is not None and graph.num_src:
            assert self._trees is not None
            assert self._trees.times is not None, "seeds of a temporal sampler have times"
            values, of_sources = times
            self._launch(
                "gids_leave_out_later",
                n,
                *(
                    nodes,
                    n,
                    begins,
                    degrees,
                    pinned.array(values, "times"),
                    np.uint32(values.dtype == np.int64),
                ),
                *(np.uint32(of_sources), pinned.indices_address, np.uint32(pinned.wide), graph.num_src),
                *(self._trees.times, np.uint64(fanout) if choice.last and fanout != _ALL else _NO_LIMIT),
                *(np.int32(fanout), np.uint32(choice.kind == "replaced"), indptr[1:]),
                over_bus=pinned.over_bus,
            )
        rates = choice.rates[number] if choice.rates else None
        if rates is not None and rates.some_zero and fanout:
            self._launch(
                "gids_count_weighted",
                32 * n,
                *(n, begins, degrees, rates.weights, np.int32(fanout), np.uint32(choice.kind == "replaced")),
                indptr[1:],
                unit=_WEIGHTED,
                over_bus=pinned.over_bus,
            )
        if choice.kind == "labor" and fanout > 0:
            self._launch(
                "gids_count_labor",
                32 * n,
                *(n, begins, degrees, *keys, np.uint32(fanout)),
                *(pinned.indices_address, np.uint32(pinned.wide), graph.num_src, indptr[1:]),
                report.at(fault + 1),
                over_bus=pinned.indices_on_host,
            )
        size = report.take()
        self._scan(indptr, report.at(size), skip=1)
        src = topology.ends[number][0]
        return _Draw(pinned, number, src, fanout, n, begins, degrees, indptr, choice, rates, keys, size)

    def _capacities(self, draws: list[_Draw], types: int, report: _Report) -> list[int]:
        """Assign places to every relation. Returns the number of places by source type."""
        counted = [d for d in draws if _is_counted(d.choice, d.fanout)]
        if counted:  # known only from the degrees: wait for them
            self.ask(report)
            answer = self._answer()
            for draw in counted:
                draw.capacity = answer[draw.size]
        capacities = [0] * types
        for draw in draws:
            if draw not in counted:
                draw.capacity = draw.n * draw.fanout
            draw.base = capacities[draw.src]
            capacities[draw.src] += draw.capacity
        if max(capacities) >= _MOST_EDGES:
            raise ValueError(
                f"one layer of this minibatch can have {max(capacities)} edges, but a GPU supports at most "
                f"{_MOST_EDGES - 1}: use fewer seeds or smaller fanouts"
            )
        return capacities

    def _table(self, t: int, nodes: torch.Tensor, capacity: int, weighted: bool) -> _Table:
        """An id map with the known nodes of a type, at most three quarters full, and arrays for the edges."""
        log2_slots = max(10, ((len(nodes) + capacity) * 4 // 3).bit_length()) if capacity else 0
        words = 2 if self._trees is not None else 1
        slots = self._take("slots", t, words << log2_slots if capacity else 0, torch.int64)
        self._device.fill(self._on, slots, 0xFF)
        if capacity:
            of_map = (slots, np.uint32(log2_slots), self._in_trees)
            self._launch("gids_note_nodes", len(nodes), nodes, len(nodes), *of_map)
        return _Table(
            slots,
            log2_slots,
            self._take("sources", t, capacity, torch.int32),
            self._take("positions", t, capacity, torch.int64),
            self._take("slot_of", t, capacity, torch.int32),
            self._take("ranks", t, capacity, torch.int32),
            self._take("estimates", t, capacity if weighted else 0, torch.float32),
        )

    def _draw(
        self,
        draw: _Draw,
        nodes: torch.Tensor,
        table: _Table,
        known: int,
        topology: Topology,
        report: _Report,
    ) -> None:
        graph = topology.graphs[draw.number]
        edges: tuple[Argument, ...] = (
            *(draw.pinned.indices_address, np.uint32(draw.pinned.wide), graph.num_src),
            *(known, draw.base, table.slots, np.uint32(table.log2_slots)),
            *(table.sources, table.positions, table.slot_of),
            _NO_ADDRESS if self._trees is None else self._trees.tags,
            report.at(len(topology.node_types) + 2 * draw.number + 1),
        )
        if draw.rates is not None:
            self._draw_weighted(draw, draw.rates, nodes, table, edges)
            return
        over_bus = draw.pinned.indices_on_host
        if draw.fanout == _ALL:
            self._launch(
                "gids_take_neighbors",
                draw.capacity,
                *(nodes, draw.n, draw.begins, draw.indptr, draw.capacity),
                *edges,
                over_bus=over_bus,
            )
            return
        kind, fanout = draw.choice.kind, np.uint32(draw.fanout)
        of_nodes = (nodes, draw.n, draw.begins, draw.degrees, draw.indptr)
        some = draw.n if draw.fanout else 0
        if kind == "labor":
            self._launch(
                "gids_draw_labor", 32 * some, *of_nodes[1:], *draw.keys, fanout, *edges, over_bus=over_bus
            )
        elif kind == "replaced":
            self._launch(
                "gids_draw_replaced",
                some * draw.fanout,
                *of_nodes,
                *draw.keys,
                fanout,
                *edges,
                over_bus=over_bus,
            )
        elif kind == "uniform":
            width = min(32, 1 << max(0, draw.fanout - 1).bit_length())
            of_layer = (draw.keys[0], fanout, np.uint32(width))
            self._launch("gids_draw_neighbors", some * width, *of_nodes, *of_layer, *edges, over_bus=over_bus)
        else:
            which = (fanout, np.uint32(draw.choice.by_source), self._numbers(draw, table))
            self._launch(
                "gids_draw_least", 32 * some, *of_nodes, *draw.keys, *which, *edges, over_bus=over_bus
            )

    def _draw_weighted(
        self,
        draw: _Draw,
        rates: Rates,
        nodes: torch.Tensor,
        table: _Table,
        edges: tuple[Argument, ...],
    ) -> None:
        replaced = draw.choice.kind == "replaced" and draw.fanout != _ALL
        self._launch(
            "gids_draw_weighted_replaced" if replaced else "gids_draw_weighted",
            32 * draw.n if draw.fanout else 0,
            *(nodes, draw.n, draw.begins, draw.degrees, draw.indptr, *draw.keys),
            _NO_LIMIT if draw.fanout == _ALL else np.uint64(draw.fanout),
            *(*rates.arguments, self._numbers(draw, table), table.estimates, *edges),
            unit=_WEIGHTED,
            over_bus=draw.pinned.over_bus,
        )

    def _numbers(self, draw: _Draw, table: _Table) -> torch.Tensor:
        """Scratch, int64 per place."""
        return self._take("numbers", draw.src, len(table.positions), torch.int64)

    def _relabel(
        self, draw: _Draw, drawn: _Drawn, count: int, nodes: list[torch.Tensor], report: _Report
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices and positions of a relation's edges, int64[count] each. Also writes their new nodes."""
        table = drawn.tables[draw.src]
        indices = self._device.empty(count, torch.int64)
        positions = self._device.empty(count, torch.int64)
        self._launch(
            "gids_relabel",
            count,
            *(
                draw.indptr[draw.n :],
                drawn.known[draw.src],
                draw.base,
                table.slots,
                table.slot_of,
                table.ranks,
            ),
            *(report.at(drawn.before[draw.src]), np.uint32(drawn.in_trees)),
            *(table.sources, table.positions, indices, positions, nodes[draw.src]),
        )
        return indices, positions

    def _block(
        self, draw: _Draw, drawn: _Drawn, num_dst: int, num_src: int, count: int, topology: Topology
    ) -> Block:
        indptr = self._exactly(draw.indptr, num_dst + 1)
        indices, positions = (self._exactly(edges, count) for edges in drawn.edges[draw.number])
        weights = None
        if draw.rates is not None:
            weights = self._grown(drawn.tables[draw.src].estimates[draw.base :], count)
        elif draw.choice.by_source:
            weights = self._device.empty(count, torch.float32)
            of_edges = (num_dst, draw.degrees, indptr, np.int32(draw.fanout), weights)
            self._launch("gids_weigh_edges", 32 * num_dst if count else 0, *of_edges)
        return Block(indptr, indices, positions, num_src, topology.graphs[draw.number], weights)

    def _scan(
        self,
        values: torch.Tensor,
        total: torch.Tensor,
        *,
        base: torch.Tensor | None = None,
        skip: int = 0,
    ) -> None:
        """Replace values, int64 or int32, by their running sums. total: int64[1], gets base plus their sum.

        skip: so many values before them become 0.
        """
        n, wide = len(values) - skip, np.uint32(values.dtype == torch.int64)
        blocks = max(1, min(-(-n // _SCANNED), _BLOCKS_PER_SM * self._device.sm_count))
        sums = self._take("sums", 0, blocks, torch.int64)
        part = (values, wide, skip, n, sums)
        if blocks > 1:
            self._device.launch(self._on, _UNIT, "gids_sum_parts", blocks, _THREADS, *part)
        of_values = (*part, 0 if base is None else base, total)
        self._device.launch(self._on, _UNIT, "gids_scan_parts", blocks, _THREADS, *of_values)

    def _launch(
        self, kernel: str, threads: int, *args: Argument, unit: str = _UNIT, over_bus: bool = False
    ) -> None:
        """threads: the number of threads with work. over_bus: whether they read host memory."""
        most = _BLOCKS_PER_SM * self._device.sm_count
        blocks = min(-(-threads // _THREADS), min(most, _BUS_BLOCKS) if over_bus else most)
        self._device.launch(self._on, unit, kernel, blocks, _THREADS, *args)

    def _take(self, name: str, number: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized scratch memory."""
        held = self._scratch.get((name, number))
        if held is None or len(held) < count:
            held = self._scratch[name, number] = self._device.empty(max(1024, count * 5 // 4), dtype)
        return held[:count]


def _is_counted(choice: Choice, fanout: int) -> bool:
    """Whether the number of possible edges depends on the degrees."""
    return choice.kind == "labor" or not 0 <= fanout <= _LARGEST_ASSUMED


def _raise_faults(topology: Topology, nodes: list[torch.Tensor], faults: list[int], in_trees: bool) -> None:
    types = len(topology.node_types)
    for t, ntype in enumerate(topology.node_types):
        if faults[t] != _NO_FAULT:
            seed, count = int(nodes[t][faults[t]]), topology.node_counts[t]
            seed = seed & _IDS if in_trees else seed
            raise IndexError(f"seed {seed} is not a {ntype!r} node: ids run from 0 to {count - 1}")
    for r, graph in enumerate(topology.graphs):
        node, edge = faults[types + 2 * r : types + 2 * r + 2]
        if node == edge == _NO_FAULT:
            continue
        what = (
            f"indptr decreases or exceeds the indices at node {node}"
            if node != _NO_FAULT
            else f"indices[{edge}] is outside 0 to {graph.num_src - 1}"
        )
        raise FormatError(
            f"topology of {describe_type(graph.relation)}: {what}; run `gids verify` for details"
        )
