"""Sampling by GPU kernels (native/sampler/*.cu): launches them and owns the memory between them.

Called by Neighbor and Labor. The minibatches are the same as on the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from gids import _core
from gids.cuda import Argument, Device, Event, Stream
from gids.errors import FormatError
from gids.sampler.device import PinnedGraph
from gids.sampler.device.rates import DeviceRates, Rates
from gids.sampler.forest import Given
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
_NO_FAULT = -1
_MOST_EDGES = 1 << 31


class Dependency(NamedTuple):
    """How the minibatches of successive steps depend on each other.

    kappa minibatches (0: all of an epoch number) form a group. It is nested in a large minibatch, or its
    random numbers change gradually.
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
    newest: only the nodes that the layer before has found draw, by the same numbers in all layers.
    """

    kind: Kind
    dependency: Dependency
    layer_dependency: bool = False
    rates: Sequence[Rates | None] = ()
    last: bool = False
    newest: bool = False

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


@dataclass(eq=False)
class _Draw:
    """One relation in one layer.

    nodes: the destinations, from number `begin` of their type on. begins, degrees: of each in the graph.
    indptr: of the sampled edges. keys: of the random numbers, for kernels. size: where the report has the
    number of edges. capacity: its upper bound. base: the first place (see gids/sampled_edges.h) among the
    edges from the source type.
    """

    pinned: PinnedGraph
    number: int
    src: int
    dst: int
    fanout: int
    begin: int
    nodes: torch.Tensor
    begins: torch.Tensor
    degrees: torch.Tensor
    indptr: torch.Tensor
    rates: Rates | None
    keys: tuple[int, int, np.float64, np.float64]
    size: int = 0
    capacity: int = 0
    base: int = 0

    @property
    def n(self) -> int:
        return len(self.nodes)


@dataclass
class _Table:
    """Arrays for the edges from one node type in one layer, indexed by place (slots by hash)."""

    slots: torch.Tensor
    log2_slots: np.uint32
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
    edges: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Started:
    """A minibatch whose draws are enqueued on a stream. finish() waits for its sizes and makes its blocks.

    Made by DeviceSampler.start(). seeds: by node type, on the device. Until it is settled it uses the
    sampler's scratch memory, which holds the last layer whose sizes the host does not know.

    _nodes: by type; in trees they are keys, tree * 2^32 + id. _report: what the host must know, int64 on the
    device: faults, one by node type and then two by relation; then sizes. Kernels write it.
    """

    def __init__(
        self,
        sampler: DeviceSampler,
        topology: Topology,
        seeds: list[torch.Tensor],
        choice: Choice,
        forest: Forest | None,
    ) -> None:
        self._sampler, self._topology, self._choice, self._forest = sampler, topology, choice, forest
        self._device, self._stream = sampler.device, sampler.stream
        self.seeds = [self._moved(ids) for ids in seeds]
        self._nodes = list(self.seeds)
        self._tags: torch.Tensor | int = 0  # uint32 as int32, or a null pointer
        self._tree_times: torch.Tensor | None = None
        if forest is not None:
            self._tags = self._moved(torch.from_numpy(forest.tags.view(np.int32)))
            if forest.of_trees is not None:
                self._tree_times = self._moved(torch.from_numpy(forest.of_trees))
            # Before a batch: torch copies them.
            self._times_at = [
                pinned.array(times[0], "times") if times is not None and graph.num_src else 0
                for pinned, graph, times in zip(topology.pinned, topology.graphs, forest.times, strict=False)
            ]
            batch = [self._moved(trees) for trees in forest.batch]
            self._nodes = [tree << 32 | ids & _IDS for tree, ids in zip(batch, self.seeds, strict=True)]
        self._in_trees = np.uint32(forest is not None)
        self._types = len(self._nodes)
        self._begins = [0] * self._types  # of the nodes that draw
        self._sizes = self._types + 2 * len(topology.relations)  # taken in the report, after the faults
        self._layers: list[list[Block]] = []
        self._waiting: list[_Drawn] = []
        self._error: Exception | None = None

    def enqueue(self, fanouts: list[list[int]], numbers: tuple[int, int, int]) -> None:
        """Draw all layers. Waits for what is known only from layers before."""
        choice, device = self._choice, self._device
        words = self._sizes + self._types + len(fanouts) * (self._types + len(self._topology.relations))
        with device.batch(self._stream, hold=True):
            self._report = device.empty(words, torch.int64)
            device.fill(self._stream, self._report, _NO_FAULT & 0xFF)  # sizes too: all is copied to the host
            sizes = [self._take_size() for _ in self._nodes]
            for t, ids in enumerate(self.seeds):
                checked = (ids, len(ids), self._topology.node_counts[t], self._at(t), self._at(sizes[t]))
                self._launch("gids_check_seeds", max(1, len(ids)), *checked)
        for hop, layer in enumerate(fanouts):
            if self._waiting and any(_is_counted(choice, fanout) for fanout in layer):
                self._settle_layers()
            with device.batch(self._stream, hold=True):
                drawn = self._draw_layer(sizes, layer, hop, numbers)
            self._waiting.append(drawn)
            sizes = drawn.after
            # Weights need scratch of the layer; the newest nodes begin after those that are known.
            may_wait = not choice.rates and not choice.by_source and not choice.newest
            if hop + 1 == len(fanouts):
                break
            if may_wait and max(drawn.places) <= _LARGEST_UNCOUNTED:
                with device.batch(self._stream, hold=True):
                    self._relabel_ahead(drawn)
            else:
                self._settle_layers()
            if choice.newest:
                self._begins = drawn.known
        self._sampler.ask(self._report)

    def moved(self, seeds: Given) -> Given:
        """The seeds, on the device."""
        times = None if seeds.times is None else [self._moved(values) for values in seeds.times]
        return replace(seeds, ids=self.seeds, times=times)

    def finish(self) -> tuple[list[torch.Tensor], list[list[Block]], list[torch.Tensor]]:
        """(nodes by type; by layer, the seeds' first, a block per relation; the trees of the nodes, or none).
        Raises like Neighbor.sample."""
        self.settle()
        if self._error is not None:
            raise self._error
        if self._forest is None:
            return self._nodes, self._layers, []
        with self._device.use(self._stream):
            return [keys & _IDS for keys in self._nodes], self._layers, [keys >> 32 for keys in self._nodes]

    def settle(self) -> None:
        """Wait for the sizes, and free the sampler's scratch memory for the next minibatch. Idempotent."""
        try:
            self._settle_layers()
        except Exception as error:
            self._error = error
        self._waiting.clear()

    def _settle_layers(self) -> None:
        """Wait for the sizes of layers, and make their blocks. The last one may not be relabeled yet."""
        if not self._waiting:
            return
        with self._device.use(self._stream):
            answer = self._sampler.answer(self._report)
            self._raise_faults(answer)
            with self._device.batch(self._stream):
                self._layers += [self._blocks(drawn, answer) for drawn in self._waiting]
                for t, index in enumerate(self._waiting[-1].after):
                    self._nodes[t] = self._exactly(self._nodes[t], answer[index])
        self._waiting.clear()

    # --- drawing ---

    def _draw_layer(
        self, sizes: list[int], fanouts: list[int], hop: int, numbers: tuple[int, int, int]
    ) -> _Drawn:
        """Draw one layer. sizes: where the report has them. Nodes beyond are _NO_NODE: they have no edges."""
        draws = [self._count(r, fanout, hop, numbers) for r, fanout in enumerate(fanouts)]
        places, known = self._capacities(draws), [len(ids) for ids in self._nodes]
        weighted = {draw.src for draw in draws if draw.rates is not None}
        tables = [self._table(t, places[t], t in weighted) for t in range(self._types)]
        for draw in draws:
            self._draw(draw, tables[draw.src], known[draw.src])
        for draw in draws:
            table = tables[draw.src]
            of_edges = (table.slots, table.slot_of, draw.indptr[draw.n :], draw.capacity)
            of_map = (known[draw.src], draw.base, self._in_trees, table.ranks)
            self._launch("gids_mark_first", draw.capacity, *of_edges, *of_map)
        after = list(sizes)
        for t, (table, count) in enumerate(zip(tables, places, strict=True)):
            if count:
                after[t] = self._take_size()
                self._sampler.scan(table.ranks[:count], self._at(after[t]), base=self._at(sizes[t]))
        return _Drawn(draws, tables, places, known, sizes, after)

    def _count(self, number: int, fanout: int, hop: int, numbers: tuple[int, int, int]) -> _Draw:
        """Count the edges of a relation."""
        topology, choice = self._topology, self._choice
        pinned, graph, (src, dst) = topology.pinned[number], topology.graphs[number], topology.ends[number]
        begin = self._begins[dst]
        nodes, n = self._nodes[dst][begin:], len(self._nodes[dst]) - begin
        of_layer = 0 if choice.layer_dependency or choice.newest else hop
        of_keys = src if choice.by_source else number
        now, following, cos, sin = _core.variate_keys(numbers, choice.dependency, of_layer, of_keys)
        scratch = self._sampler.scratch
        begins, degrees = (scratch(name, number, n, torch.int64) for name in ("begins", "degrees"))
        indptr = self._device.empty(n + 1, torch.int64)
        keys = (now, following, np.float64(cos), np.float64(sin))
        rates = choice.rates[number] if choice.rates else None
        draw = _Draw(pinned, number, src, dst, fanout, begin, nodes, begins, degrees, indptr, rates, keys)
        counts, replaced = indptr[1:], np.uint32(choice.kind == "replaced")
        sources = (pinned.indices_address, np.uint32(pinned.wide), graph.num_src)
        self._launch(
            "gids_count_neighbors",
            2 * n,
            *(nodes, n, graph.num_dst, pinned.indptr_address, graph.num_edges, np.int32(fanout), replaced),
            *(self._in_trees, begins, degrees, counts, self._fault(number, 0)),
            over_bus=pinned.indptr_on_host,
        )
        times = self._forest.times[number] if self._forest and self._forest.times else None
        if times is not None and graph.num_src:
            assert self._tree_times is not None, "seeds of a temporal sampler have times"
            values, of_sources = times
            self._launch(
                "gids_leave_out_later",
                n,
                *(nodes, n, begins, degrees, self._times_at[number]),
                *(np.uint32(values.dtype == np.int64), np.uint32(of_sources), *sources, self._tree_times),
                np.uint64(fanout) if choice.last and fanout != _ALL else _NO_LIMIT,
                *(np.int32(fanout), replaced, counts),
                over_bus=pinned.over_bus,
            )
        if rates is not None and rates.some_zero and fanout:
            self._launch(
                "gids_count_weighted",
                32 * n,
                *(n, begins, degrees, rates.weights, np.int32(fanout), replaced, counts),
                unit=_WEIGHTED,
                over_bus=pinned.over_bus,
            )
        if choice.kind == "labor" and fanout > 0:
            self._launch(
                "gids_count_labor",
                32 * n,
                *(n, begins, degrees, *keys, np.uint32(fanout), *sources, counts, self._fault(number, 1)),
                over_bus=pinned.indices_on_host,
            )
        draw.size = self._take_size()
        self._sampler.scan(indptr, self._at(draw.size), skip=1)
        return draw

    def _capacities(self, draws: list[_Draw]) -> list[int]:
        """Assign places to every relation. Returns the number of places by source type."""
        counted = [d for d in draws if _is_counted(self._choice, d.fanout)]
        if counted:  # known only from the degrees: wait for them
            answer = self._sampler.answer(self._report, anew=True)
            for draw in counted:
                draw.capacity = answer[draw.size]
        capacities = [0] * self._types
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

    def _table(self, t: int, capacity: int, weighted: bool) -> _Table:
        """An id map with the known nodes of a type, at most three quarters full, and arrays for the edges."""
        nodes, take = self._nodes[t], self._sampler.scratch
        log2_slots = max(10, ((len(nodes) + capacity) * 4 // 3).bit_length()) if capacity else 0
        words = 1 + int(self._in_trees)
        slots = take("slots", t, words << log2_slots if capacity else 0, torch.int64)
        self._device.fill(self._stream, slots, 0xFF)
        if capacity:
            of_map = (slots, np.uint32(log2_slots), self._in_trees)
            self._launch("gids_note_nodes", len(nodes), nodes, len(nodes), *of_map)
        return _Table(
            slots,
            np.uint32(log2_slots),
            take("sources", t, capacity, torch.int32),
            take("positions", t, capacity, torch.int64),
            take("slot_of", t, capacity, torch.int32),
            take("ranks", t, capacity, torch.int32),
            take("estimates", t, capacity if weighted else 0, torch.float32),
        )

    def _draw(self, draw: _Draw, table: _Table, known: int) -> None:
        pinned, kind, replaced = draw.pinned, self._choice.kind, self._choice.kind == "replaced"
        edges: tuple[Argument, ...] = (
            *(pinned.indices_address, np.uint32(pinned.wide), self._topology.graphs[draw.number].num_src),
            *(known, draw.base, table.slots, table.log2_slots),
            *(table.sources, table.positions, table.slot_of, self._tags, self._fault(draw.number, 1)),
        )
        nodes: tuple[Argument, ...] = (draw.nodes, draw.n, draw.begins, draw.degrees, draw.indptr)
        fanout, some = np.uint32(draw.fanout & _IDS), draw.n if draw.fanout else 0

        def numbers() -> torch.Tensor:
            """Scratch, int64 per place."""
            return self._sampler.scratch("numbers", draw.src, len(table.positions), torch.int64)

        if draw.rates is not None:
            self._launch(
                "gids_draw_weighted_replaced" if replaced and draw.fanout != _ALL else "gids_draw_weighted",
                32 * some,
                *(*nodes, *draw.keys, _NO_LIMIT if draw.fanout == _ALL else np.uint64(draw.fanout)),
                *(*draw.rates.arguments, numbers(), table.estimates, *edges),
                unit=_WEIGHTED,
                over_bus=pinned.over_bus,
            )
            return
        kernel, threads = "gids_draw_least", 32 * some
        arguments: tuple[Argument, ...] = (*nodes, *draw.keys, fanout)
        if draw.fanout == _ALL:
            kernel, threads = "gids_take_neighbors", draw.capacity
            arguments = (draw.nodes, draw.n, draw.begins, draw.indptr, draw.capacity)
        elif kind == "labor":
            kernel, arguments = "gids_draw_labor", arguments[1:]
        elif replaced:
            kernel, threads = "gids_draw_replaced", some * draw.fanout
        elif kind == "uniform":
            width = min(32, 1 << max(0, draw.fanout - 1).bit_length())
            kernel, threads = "gids_draw_neighbors", some * width
            arguments = (*nodes, draw.keys[0], fanout, np.uint32(width))
        else:
            arguments = (*arguments, np.uint32(self._choice.by_source), numbers())
        self._launch(kernel, threads, *arguments, *edges, over_bus=pinned.indices_on_host)

    # --- relabeling, blocks ---

    def _relabel_ahead(self, drawn: _Drawn) -> None:
        """Write a layer's edges and nodes into arrays for all that are possible. Does not wait."""
        for t, places in enumerate(drawn.places):
            if places:
                nodes = self._nodes[t] = self._grown(self._nodes[t], len(self._nodes[t]), places)
                self._device.fill(self._stream, nodes[-places:], _NO_NODE & 0xFF)
        drawn.edges = [self._relabel(draw, drawn, draw.capacity) for draw in drawn.draws]

    def _relabel(self, draw: _Draw, drawn: _Drawn, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices and positions of a relation's edges, int64[count] each. Also writes their new nodes."""
        table, src = drawn.tables[draw.src], draw.src
        indices, positions = (self._device.empty(count, torch.int64) for _ in range(2))
        self._launch(
            "gids_relabel",
            count,
            *(draw.indptr[draw.n :], drawn.known[src], draw.base, table.slots, table.slot_of, table.ranks),
            *(self._at(drawn.before[src]), self._in_trees, table.sources, table.positions),
            *(indices, positions, self._nodes[src]),
        )
        return indices, positions

    def _blocks(self, drawn: _Drawn, answer: list[int]) -> list[Block]:
        """The blocks of a layer, which is relabeled if it is not yet. answer: the report, on the host."""
        before, after = ([answer[index] for index in indices] for indices in (drawn.before, drawn.after))
        if not drawn.edges:
            for t, (old, size) in enumerate(zip(before, after, strict=True)):
                if size > len(self._nodes[t]) or old < len(self._nodes[t]):
                    self._nodes[t] = self._grown(self._nodes[t], old, size - old)
            drawn.edges = [self._relabel(draw, drawn, answer[draw.size]) for draw in drawn.draws]
        blocks = []
        for draw in drawn.draws:
            count, num_dst = answer[draw.size], before[draw.dst] - draw.begin
            indptr = self._exactly(draw.indptr, num_dst + 1)
            indices, positions = (self._exactly(edges, count) for edges in drawn.edges[draw.number])
            weights = None
            if draw.rates is not None and draw.rates.weighted:
                weights = self._grown(drawn.tables[draw.src].estimates[draw.base :], count)
            elif self._choice.by_source:
                weights = self._device.empty(count, torch.float32)
                of_edges = (num_dst, draw.degrees, indptr, np.int32(draw.fanout), weights)
                self._launch("gids_weigh_edges", 32 * num_dst if count else 0, *of_edges)
            graph = self._topology.graphs[draw.number]
            blocks.append(Block(indptr, indices, positions, after[draw.src], graph, weights))
        return blocks

    def _raise_faults(self, answer: list[int]) -> None:
        for t, ntype in enumerate(self._topology.node_types):
            if answer[t] != _NO_FAULT:
                seed, count = int(self._nodes[t][answer[t]]), self._topology.node_counts[t]
                seed = seed & _IDS if self._in_trees else seed
                raise IndexError(f"seed {seed} is not a {ntype!r} node: ids run from 0 to {count - 1}")
        for r, graph in enumerate(self._topology.graphs):
            node, edge = answer[self._types + 2 * r : self._types + 2 * r + 2]
            what = f"indices[{edge}] is outside 0 to {graph.num_src - 1}"
            if node != _NO_FAULT:
                what = f"indptr decreases or exceeds the indices at node {node}"
            if (node, edge) != (_NO_FAULT, _NO_FAULT):
                raise FormatError(
                    f"topology of {describe_type(graph.relation)}: {what}; run `gids verify` for details"
                )

    # --- memory, the report ---

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        here = self._device.torch_device
        return values if values.device == here else values.pin_memory().to(here, non_blocking=True)

    def _grown(self, values: torch.Tensor, count: int, more: int = 0) -> torch.Tensor:
        """The first `count` values in memory of their own, and room for more."""
        grown = self._device.empty(count + more, values.dtype)
        self._device.copy(self._stream, grown[:count], values[:count])
        return grown

    def _exactly(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """The first `count` values, in memory that has no more."""
        return values if len(values) == count else self._grown(values, count)

    def _take_size(self) -> int:
        """The index of another size in the report."""
        self._sizes += 1
        return self._sizes - 1

    def _at(self, index: int) -> torch.Tensor:
        """int64[1] in the report."""
        return self._report[index : index + 1]

    def _fault(self, relation: int, kind: int) -> torch.Tensor:
        """kind: 0: a node of indptr, 1: an edge of indices."""
        return self._at(self._types + 2 * relation + kind)

    def _launch(
        self, kernel: str, threads: int, *args: Argument, unit: str = _UNIT, over_bus: bool = False
    ) -> None:
        """threads: the number of threads with work. over_bus: whether they read host memory."""
        most = _BLOCKS_PER_SM * self._device.sm_count
        blocks = min(-(-threads // _THREADS), min(most, _BUS_BLOCKS) if over_bus else most)
        self._device.launch(self._stream, unit, kernel, blocks, _THREADS, *args)


class DeviceSampler:
    """Samples on one device. Reuses the memory between kernels. One caller at a time.

    stream: the last one that used the scratch memory.
    """

    stream: Stream

    def __init__(self, device: Device) -> None:
        self.device = device
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}
        self._started: weakref.ref[Started] | None = None  # uses the scratch until it is settled
        self._asked: tuple[torch.Tensor, Event] | None = None  # a report on its way to the host
        self._unwanted: list[tuple[torch.Tensor, Event]] = []  # that nobody will read
        self._rates: DeviceRates | None = None
        device.preload(_UNIT)

    @property
    def nbytes(self) -> int:
        masks = self._rates.nbytes if self._rates is not None else 0
        scratch = list(self._scratch.values())  # another thread may sample
        return sum(t.nbytes for t in scratch) + masks

    @property
    def rates(self) -> DeviceRates:
        """The weights and masks, for draws by weight."""
        if self._rates is None:
            self._rates = DeviceRates(self.device)
            self.device.preload(_WEIGHTED)
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
        stream = self.device.current_stream()
        if self._scratch and self.stream != stream:
            stream.wait_stream(self.stream)
            for scratch in self._scratch.values():  # this stream may still use it when it is replaced
                self.device.hand_over(scratch, self.stream, stream)
            self._scratch.clear()  # it belongs to the stream on which it was allocated
        self.stream = stream
        for pinned in topology.pinned:
            pinned.used_on(stream)
        started = Started(self, topology, seeds, choice, forest)
        started.enqueue(fanouts, numbers)
        self._started = weakref.ref(started)
        return started

    def ask(self, report: torch.Tensor) -> None:
        """Enqueue a copy of a report to the host."""
        with self.device.batch(self.stream):
            self._asked = self.device.to_host(report)

    def answer(self, report: torch.Tensor, *, anew: bool = False) -> list[int]:
        """Wait for the report that was asked for, or ask for it now. anew: in any case."""
        if anew or self._asked is None:
            self.ask(report)
        assert self._asked is not None
        (words, copied), self._asked = self._asked, None
        copied.synchronize()
        answer: list[int] = words.tolist()
        return answer

    def scratch(self, name: str, number: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized scratch memory."""
        held = self._scratch.get((name, number))
        if held is None or len(held) < count:
            held = self._scratch[name, number] = self.device.empty(max(1024, count * 5 // 4), dtype)
        return held[:count]

    def scan(
        self, values: torch.Tensor, total: torch.Tensor, *, base: torch.Tensor | None = None, skip: int = 0
    ) -> None:
        """Replace values, int64 or int32, by their running sums. total: int64[1], gets base plus their sum.

        skip: so many values before them become 0.
        """
        n, wide = len(values) - skip, np.uint32(values.dtype == torch.int64)
        blocks = max(1, min(-(-n // _SCANNED), _BLOCKS_PER_SM * self.device.sm_count))
        part = (values, wide, skip, n, self.scratch("sums", 0, blocks, torch.int64))
        if blocks > 1:
            self.device.launch(self.stream, _UNIT, "gids_sum_parts", blocks, _THREADS, *part)
        of_values = (*part, 0 if base is None else base, total)
        self.device.launch(self.stream, _UNIT, "gids_scan_parts", blocks, _THREADS, *of_values)


def _is_counted(choice: Choice, fanout: int) -> bool:
    """Whether the number of possible edges depends on the degrees."""
    return choice.kind == "labor" or not 0 <= fanout <= _LARGEST_ASSUMED
