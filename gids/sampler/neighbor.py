"""Neighbor: every node draws its own neighbors, by native threads or GPU kernels.

Bidirectional subgraphs have the sampled edges of all layers, each once, and their reverses: the rules are
those of PyG's SamplerOutput.to_bidirectional.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch

from gids import _core
from gids.cuda import Device
from gids.sampler.device.rates import Rates
from gids.sampler.device.sampling import Choice, Forest, Kind, Started
from gids.sampler.forest import AnySeeds, Given, Trees, check_seeds, planted
from gids.sampler.layered import (
    DeviceDrawnFor,
    DrawnFor,
    Fanout,
    LayeredSampler,
    Layers,
    array_digest,
    check_dependency,
)
from gids.sampler.locality import LocalityBias
from gids.sampler.minibatch import Block, Minibatch
from gids.sampler.topology import By, Graphs, Topology
from gids.store.names import Relation, describe_type

Weights = torch.Tensor | np.ndarray
"""float[num_edges] in the order of graph.indices."""
Strategy = Literal["uniform", "last"]
Subgraph = Literal["directional", "bidirectional", "induced"]


class Neighbor(LayeredSampler):
    """Every node of a layer draws up to `fanout` in-edges of each relation, uniformly by default.

    fanouts: one per layer, from the input layer to the output layer; as in dgl.dataloading.NeighborSampler,
    the last one applies to the seeds. Each is 1 or more, or -1 for all neighbors; or a dictionary with such
    a number for every relation (0: leave it out).

    replace: draw `fanout` edges with replacement; -1 takes all edges once. weights: draw edges in proportion
    to their weights: float[num_edges] on the CPU in the order of graph.indices (of a dataset in parts: of
    edge ids), kept as float32; or a dictionary by relation; relations without weights are drawn uniformly.
    Blocks of relations with weights have `weights`, 1 / probability. locality: draw edges from nodes in a
    cache more often (LocalityBias, which says whether blocks have weights then). threads: number of CPU
    threads (None: torch's).

    batch_dependency: number of minibatches over which draws stay correlated (1: independent, math.inf: the
    whole training), so that successive minibatches read more of the same rows. nested: instead, that many
    minibatches use the same random numbers, as if cut from a large minibatch, and the next ones use new ones.
    Loaders count minibatches over epochs (see sample()).

    disjoint: every seed has a tree of its own: nodes of different trees are different nodes, also where their
    ids are the same, and `minibatch.batch` has the tree of each. Equal seeds have equal trees.

    temporal: bound the edges by time, which makes minibatches disjoint: a tree has no edge that is later than
    its seed. "edges": by the times of edges; "nodes": by those of their sources. Relations without such times
    are not bounded. Seeds are TimedSeeds; without, seed nodes need times of their own. strategy: "uniform":
    draw among the edges that are not later than the seed; "last": only among the latest `fanout` of these.

    subgraph: "directional": a block per layer. "bidirectional" and "induced": one layer of edges among all
    input nodes, to use in every layer of a model: the sampled edges of all layers, each once, and their
    reverses (between two types, those of NAME are in rev_NAME); or all edges of the graph among these nodes,
    in a disjoint minibatch those within a tree that are not later than its seed. These have no weights.

    In a heterogeneous graph every node that is found draws by all relations that end in its type. Random
    numbers are counter-based: the minibatch depends only on seeds, seed, epoch, step and graph, not on
    threads or the device. When a GPU samples first, weights are copied beside the pinned topology, 4 bytes
    per edge, and masks to the device.

    Raises TypeError for weights that are not floating-point in one dimension, ValueError for negative or
    infinite weights and other wrong arguments. sample() raises ValueError for weights and masks that do not
    fit the graph.
    """

    newest = False
    """Whether only the nodes that the layer before has found draw, as in PyG."""
    _repeatable = True
    _options: tuple[str, ...] = (
        "replace",
        "weights",
        "locality",
        "batch_dependency",
        "nested",
        "disjoint",
        "temporal",
        "strategy",
        "subgraph",
    )

    def __init__(
        self,
        fanouts: Sequence[Fanout],
        *,
        replace: bool = False,
        weights: Weights | Mapping[Relation, Weights] | None = None,
        locality: LocalityBias | None = None,
        batch_dependency: float = 1,
        nested: bool = False,
        disjoint: bool = False,
        temporal: By | None = None,
        strategy: Strategy = "uniform",
        subgraph: Subgraph = "directional",
        threads: int | None = None,
    ) -> None:
        super().__init__(fanouts, threads)
        for name, value, known in (
            ("temporal", temporal, (None, *get_args(By))),
            ("strategy", strategy, get_args(Strategy)),
            ("subgraph", subgraph, get_args(Subgraph)),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, known))}")
        if strategy != "uniform" and temporal is None:
            raise ValueError(f"strategy={strategy!r} needs times: give temporal='edges' or 'nodes'")
        self.disjoint, self.temporal = bool(disjoint) or temporal is not None, temporal
        self.strategy, self.subgraph = strategy, subgraph
        self.replace, self.batch_dependency, self.nested = bool(replace), batch_dependency, bool(nested)
        self._dependency = check_dependency(batch_dependency, self.nested)
        if locality is not None and not isinstance(locality, LocalityBias):
            raise TypeError(f"locality must be a gids.sampler.LocalityBias (got {type(locality).__name__})")
        self.locality = locality
        self._digest: tuple[Any, str | dict[Relation, str] | None] = None, None
        self.weights: np.ndarray | dict[Relation, np.ndarray] | None = None
        if isinstance(weights, Mapping):
            self.weights = {r: _check_weights(w, f" of {describe_type(r)}") for r, w in weights.items()}
        elif weights is not None:
            self.weights = _check_weights(weights, "")
        arrays = self.weights.values() if isinstance(self.weights, dict) else [self.weights]
        most = max((float(w.max(initial=0)) for w in arrays if w is not None), default=0)
        if locality is not None and most * locality.factor > float(np.finfo(np.float32).max):
            raise ValueError(
                f"weights up to {most:g} times the factor {locality.factor:g} exceed float32: scale them down"
            )

    @property
    def fanouts(self) -> list[Fanout]:
        return self._per_layer

    @property
    def draws_alone(self) -> bool:
        return self.subgraph != "induced"

    def with_weights(self, weights: Mapping[Relation, Weights]) -> Neighbor:
        """The same sampler with other weights."""
        return Neighbor(**self._arguments() | {"weights": weights})

    def of_rank(self, rank: int, world_size: int) -> Neighbor:
        """The same sampler with the masks of one rank, if its locality has some for each rank, else itself.

        Raises as LocalityBias.of_rank.
        """
        if self.locality is None or self.locality.rank_count is None:
            return self
        of_rank = copy.copy(self)
        of_rank.locality = self.locality.of_rank(rank, world_size)
        return of_rank

    @property
    def repeatable(self) -> bool:
        """See Sampler. The arrays of weights and of a locality may change."""
        return super().repeatable and self.weights is None and self.locality is None

    def _printed(self) -> dict[str, Any]:
        weights, digest = self._digest
        if weights is not self.weights:  # computed once for each object that `weights` is set to
            weights = self.weights
            if isinstance(weights, dict):
                digest = {relation: array_digest(array) for relation, array in weights.items()}
            else:
                digest = None if weights is None else array_digest(weights)
            self._digest = weights, digest
        return self._arguments() | {"weights": digest}

    def _call(
        self, host: _core.HostSampler, topology: Topology, drawn_for: DrawnFor, checked: list[Given]
    ) -> list[_core._Sampled]:
        weights, masks = self._weights_of(topology), self._masks_of(topology)
        return host.neighbor(
            *drawn_for,
            self.replace,
            weights,
            self._dependency,
            *masks,
            [trees for seeds in checked if (trees := seeds.native()) is not None],
            [] if self.temporal is None else topology.times(self.temporal),
            self.strategy == "last",
            self.newest,
            self.subgraph == "induced",
        )

    def trees(self, graphs: Graphs | Topology, seeds: AnySeeds) -> Trees:
        """The trees of the seeds, as sample() makes them, for PlantedNodes. Raises as sample()."""
        trees = self.prepare(Topology.of(graphs), seeds).trees
        if trees is None:
            raise ValueError("the sampler is not disjoint: it makes no trees")
        return trees

    def prepare(self, topology: Topology, seeds: AnySeeds) -> Given:
        if self.subgraph == "bidirectional":
            check_reverses(topology)
        if not self.disjoint:
            return super().prepare(topology, seeds)
        return planted(topology, seeds, temporal=self.temporal is not None)

    def finish(self, topology: Topology, checked: Given, layers: Layers, epoch: int, step: int) -> Minibatch:
        nodes, blocks, batch = layers
        if self.subgraph == "bidirectional":
            blocks = [bidirectional_layer(topology, blocks, [len(ids) for ids in nodes])]
        if self.subgraph != "directional":
            for block in blocks[0]:
                block.weights = None
        return super().finish(topology, checked, (nodes, blocks, batch), epoch, step)

    def _masks_of(self, topology: Topology) -> tuple[list[np.ndarray | None], float, bool]:
        """As LocalityBias.of."""
        return ([], 1.0, False) if self.locality is None else self.locality.of(topology)

    def _weights_of(self, topology: Topology) -> list[np.ndarray | None]:
        """By relation."""
        weights = self.weights
        if weights is None:
            return []
        if isinstance(weights, np.ndarray):
            if len(topology.relations) > 1:
                raise ValueError(
                    "weights is one tensor, but there are several relations: give a dictionary by relation"
                )
            weights = {topology.relations[0]: weights}
        if unknown := [r for r in weights if r not in topology.relations]:
            raise ValueError(f"weights names {unknown[0]!r}, but no graph has that relation")
        for graph in topology.graphs:
            if graph.relation in weights and len(weights[graph.relation]) != graph.num_edges:
                raise ValueError(
                    f"weights of {describe_type(graph.relation)} must have {graph.num_edges} values, one per "
                    f"edge in the order of graph.indices (got {len(weights[graph.relation])})"
                )
        return [weights.get(relation) for relation in topology.relations]

    def _start_on(self, device: Device, drawn_for: DeviceDrawnFor) -> Started:
        sampler, (topology, checked, fanouts, numbers) = self._device_sampler(device), drawn_for
        if self.subgraph == "induced":
            return super()._start_on(device, drawn_for)
        forest = None
        if checked.trees is not None:
            for ids, ntype, count in zip(checked.ids, topology.node_types, topology.node_counts, strict=True):
                if ids.device.type == "cpu":  # else a kernel checks them
                    check_seeds(ids, ntype, count)
            times = [] if self.temporal is None else topology.times(self.temporal)
            forest = Forest(checked.batch, checked.trees.tags, checked.trees.times, times)
        rates: list[Rates | None] = []
        weights, masks = self._weights_of(topology), self._masks_of(topology)
        if weights or masks[0]:
            topology.check_open()
            rates = sampler.rates.of(topology, weights, *masks)
        kind: Kind = "least" if self._dependency.gradual else "uniform"
        last = self.strategy == "last"
        kind = "replaced" if self.replace else kind
        choice = Choice(kind, self._dependency, rates=rates, last=last, newest=self.newest)
        return sampler.start(topology, checked.ids, fanouts, numbers, choice, forest)


def _check_weights(weights: Weights, whose: str) -> np.ndarray:
    array = np.asarray(
        weights.numpy() if isinstance(weights, torch.Tensor) and not weights.is_cuda else weights
    )
    if array.dtype.kind != "f" or array.ndim != 1:
        raise TypeError(
            f"weights{whose} must be float[num_edges] on the CPU (got {array.dtype}{list(array.shape)})"
        )
    array = np.ascontiguousarray(array, np.float32)
    if len(array) and not (array.min() >= 0 and np.isfinite(array.max())):  # NaN fails the first
        at = int(np.argmax(~((array >= 0) & np.isfinite(array))))
        raise ValueError(f"weights{whose} must be 0 or more and finite (weight {at} is {array[at]})")
    return array


def reverse_of(
    relation: Relation, relations: Sequence[Relation] | Mapping[Relation, object]
) -> Relation | None:
    """The relation that holds the reverses: rev_NAME, NAME of rev_NAME, or itself within a node type."""
    src, name, dst = relation
    for other in ((dst, f"rev_{name}", src), (dst, name.removeprefix("rev_"), src)):
        if other in relations and other != relation:
            return other
    return relation if src == dst else None


def bidirectional_layer(
    topology: Topology, layers: Sequence[Sequence[Block]], node_counts: Sequence[int]
) -> list[Block]:
    """The blocks of a bidirectional subgraph, by relation: edges in the order of (destination, source).

    layers: the sampled blocks, by relation. node_counts: by type. If edges are equal, one is kept,
    preferably a relation's own. An edge and its reverse have the same id.
    """
    edges = {}
    for r, relation in enumerate(topology.relations):
        pairs = [layer[r].coo() for layer in layers]
        positions = torch.cat([layer[r].positions for layer in layers])
        edges[relation] = torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs]), positions
    graphs = dict(zip(topology.relations, topology.graphs, strict=True))
    blocks = []
    for relation, (from_type, to_type) in zip(topology.relations, topology.ends, strict=True):
        src, dst, positions = edges[relation]
        reverse = reverse_of(relation, edges)
        assert reverse is not None, "check_reverses was called"
        back, forth, of_reverse = edges[reverse]
        src, dst = torch.cat([src, forth]), torch.cat([dst, back])
        positions = torch.cat([positions, -1 - of_reverse])
        kept = _first_of_equals(src, dst)
        counts = torch.bincount(dst[kept], minlength=node_counts[to_type])
        blocks.append(
            Block(
                torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
                src[kept],
                positions[kept],
                node_counts[from_type],
                graphs[relation],
                reverse=graphs[reverse],
            )
        )
    return blocks


def check_reverses(topology: Topology) -> None:
    """Raise ValueError for a relation that has no relation for its reverses."""
    for relation in topology.relations:
        if reverse_of(relation, topology.relations) is None:
            src, name, dst = relation
            raise ValueError(
                f"subgraph='bidirectional' needs a relation for the reverses of {describe_type(relation)}, "
                f"{describe_type((dst, f'rev_{name}', src))}: convert the dataset with --reverse-edges"
            )


def check_ids_of_reverses(topology: Topology, relation: Relation) -> None:
    """Raise ValueError if the edges of a relation and of that of its reverses cannot have the same ids.

    A table of the relation has rows for both then.
    """
    counts = {g.relation: g.num_edges for g in topology.graphs}
    reverse = reverse_of(relation, counts)
    if reverse is not None and counts[reverse] != counts[relation]:
        raise ValueError(
            f"{describe_type(relation)} has {counts[relation]} edges, and {describe_type(reverse)} has "
            f"{counts[reverse]}: edges with features must have the ids of their reverses in a bidirectional "
            "subgraph; leave the table out of tables="
        )


def _first_of_equals(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """Positions of the edges to keep: the first of equal ones, in the order of (destination, source)."""
    keys, order = (dst << 32 | src).sort(stable=True)  # local ids are below 2^32
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    return order[first]
