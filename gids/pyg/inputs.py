"""Seeds of datasets as inputs of PyG's samplers, and negatives of seed edges. Called by the loaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput

from gids.cuda import on_host
from gids.errors import MissingError
from gids.loader.epoch_loader import check_range
from gids.loader.facts import seeds_of
from gids.pyg.stores import is_homogeneous
from gids.store import FeatureStore, Graph
from gids.store.names import Relation, describe_type

Inputs: TypeAlias = NodeSamplerInput | EdgeSamplerInput
Nodes = torch.Tensor | Sequence[int] | None
InputNodes = Nodes | str | tuple[str, Nodes | str] | Mapping[str, Nodes | str]
Edges = torch.Tensor | None
InputEdges = Edges | Relation | tuple[Relation, Edges] | Mapping[Relation, Edges]
_COUNTERS = {"dst": 1, "src": 2}
"""Words of a counter that no other random numbers of an epoch have."""
_TRIALS = 6
"""As in PyG: a negative that is later than its seed edge is drawn again this often at most."""


def node_inputs(
    store: FeatureStore, nodes: InputNodes, times: torch.Tensor | None, input_id: torch.Tensor | None
) -> NodeSamplerInput:
    """Raises TypeError, ValueError, IndexError and KeyError for input_nodes that do not fit the store."""
    if isinstance(nodes, str):
        nodes = _typed(store, nodes)
    ntype, chosen = None, seeds_of(store, nodes, by_type=False)
    if isinstance(chosen, Mapping) and len(chosen) == 1:
        [(ntype, chosen)] = chosen.items()
    elif isinstance(chosen, Mapping) or not is_homogeneous(store):
        raise ValueError(
            f"input_nodes of {store.name} must be a split, a node type, or (node type, nodes): it has "
            f"{len(store.node_types)} node types and {len(store.relations)} edge types"
        )
    count = store.num_nodes(ntype)
    if chosen is None:
        ids = torch.arange(count)
    else:
        ids = torch.as_tensor(chosen, dtype=None if len(chosen) else torch.int64)
    if ids.dtype == torch.bool:
        if ids.shape != (count,):
            raise ValueError(f"input_nodes is bool{list(ids.shape)}; a mask is bool[{count}], one per node")
        ids = on_host(ids).nonzero().view(-1)
        input_id = ids if input_id is None else input_id
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"input_nodes is {ids.dtype} of shape {list(ids.shape)}; give int64[n] or a mask")
    ids = on_host(ids).to(torch.int64, copy=chosen is not None)
    check_range(ids, count, "input_nodes run from")
    input_id, times = _per_seed(len(ids), input_id=input_id, input_time=times)
    return NodeSamplerInput(input_id, ids, times, ntype)


def edge_inputs(
    store: FeatureStore,
    graphs: Sequence[Graph],
    edges: InputEdges,
    labels: torch.Tensor | None,
    times: torch.Tensor | None,
    input_id: torch.Tensor | None,
) -> EdgeSamplerInput:
    """Raises TypeError, ValueError, IndexError and KeyError for edges that do not fit the store."""
    relation: Relation | None = None
    if isinstance(edges, Mapping) and len(edges) == 1:
        [edges] = edges.items()
    chosen: Any = edges
    if isinstance(edges, tuple | list) and len(edges) and isinstance(edges[0], str):
        relation, chosen = _relation(store, graphs, edges), None
    elif isinstance(edges, tuple | list) and len(edges) == 2 and _are_names(edges[0]):
        relation, chosen = _relation(store, graphs, edges[0]), edges[1]
    if relation is None and not is_homogeneous(store):
        raise ValueError(
            f"edge_label_index of {store.name} must be an edge type, or (edge type, edges): it has "
            f"{len(store.node_types)} node types and {len(store.relations)} edge types"
        )
    graph = graphs[0] if relation is None else next(g for g in graphs if g.relation == relation)
    per_seed = {"input_id": input_id, "edge_label": labels, "edge_label_time": times}
    if chosen is None:
        return AllEdges(graph, relation, *_per_seed(graph.num_edges, **per_seed))
    pairs = torch.as_tensor(chosen)
    if pairs.dim() != 2 or len(pairs) != 2 or pairs.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"edge_label_index is {pairs.dtype} of shape {list(pairs.shape)}; give int64[2, n], sources and "
            "destinations"
        )
    pairs = on_host(pairs).to(torch.int64)
    check_range(pairs[0], graph.num_src, "sources of edge_label_index run from")
    check_range(pairs[1], graph.num_dst, "destinations of edge_label_index run from")
    input_id, labels, times = _per_seed(pairs.shape[1], **per_seed)
    return EdgeSamplerInput(input_id, pairs[0], pairs[1], labels, times, relation)


def count_of(inputs: Inputs) -> int:
    """Number of seeds."""
    if isinstance(inputs, AllEdges):
        return inputs.graph.num_edges
    return len(inputs.node if isinstance(inputs, NodeSamplerInput) else inputs.row)


def hash_inputs(inputs: Inputs, update: Callable[[Any], None]) -> None:
    """Call update with everything that minibatches get from the inputs."""
    for name in ("input_id", "node", "row", "col", "label", "time"):
        value = getattr(inputs, name, None)
        if value is not None:
            update(f"{name} {value.dtype} {list(value.shape)};".encode())
            update(value.contiguous().view(-1).view(torch.uint8).numpy())
    update(str(inputs.input_type).encode())


class AllEdges(EdgeSamplerInput):  # type: ignore[misc]  # PyG is not typed
    """All edges of a graph in the order of their ids, looked up when they are seeds.

    Memory: 4 bytes per edge, 8 from 2^32 edges on, if ids are not positions.
    """

    def __init__(
        self, graph: Graph, input_type: Relation | None, input_id: Any, label: Any, time: Any
    ) -> None:
        none = torch.empty(0, dtype=torch.int64)
        super().__init__(input_id, none, none, label, time, input_type)
        self.graph = graph
        self._position: np.ndarray | None = None  # by id
        if graph.edge_ids is not None:
            dtype = np.uint32 if graph.num_edges < 1 << 32 else np.int64
            self._position = np.empty(graph.num_edges, dtype)
            self._position[graph.edge_ids] = np.arange(graph.num_edges, dtype=dtype)

    def __getitem__(self, index: Any) -> EdgeSamplerInput:
        ids = torch.as_tensor(index, dtype=torch.int64).view(-1)
        at = ids.numpy() if self._position is None else self._position[ids.numpy()].astype(np.int64)
        rows = torch.from_numpy(self.graph.indices[at].astype(np.int64))
        columns = torch.from_numpy(np.searchsorted(self.graph.indptr, at, side="right") - 1)
        input_id, label, time = (
            None if values is None else values[ids] for values in (self.input_id, self.label, self.time)
        )
        return EdgeSamplerInput(
            ids if input_id is None else input_id, rows, columns, label, time, self.input_type
        )


def _typed(store: FeatureStore, name: str) -> InputNodes:
    """The nodes that the name of a node type, or of a split, means; with their type, if there are several."""
    is_split = any(name in splits for splits in store.splits.values())
    if name in store.node_types:
        if is_split:
            raise ValueError(
                f"{name!r} is a split and a node type of {store.name}: give ({name!r}, None) for all nodes "
                f"of the type, or (TYPE, {name!r}) for the split"
            )
        return name, None
    if not is_split:
        known = ", ".join(map(repr, store.node_types))
        raise MissingError(f"no split and no node type {name!r} in {store.name} (node types: {known})")
    return name if is_homogeneous(store) else (store.split_type(name), name)


def _are_names(names: Any) -> bool:
    return isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)


def _relation(store: FeatureStore, graphs: Sequence[Graph], names: Sequence[str]) -> Relation:
    """The edge type (source, relation, destination), or (source, destination) if one fits."""
    asked = tuple(names)
    fitting = [g.relation for g in graphs if asked in (g.relation, (g.relation[0], g.relation[2]))]
    if len(fitting) != 1:
        known = ", ".join(describe_type(g.relation) for g in graphs)
        raise MissingError(f"{len(fitting)} edge types of {store.name} match {asked} (it has {known})")
    return fitting[0]


def _per_seed(count: int, **values: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The values on the host. Raises ValueError for those that are not one for each seed."""
    tensors = [None if value is None else on_host(torch.as_tensor(value)) for value in values.values()]
    for name, tensor in zip(values, tensors, strict=True):
        if tensor is not None and (tensor.dim() < 1 or len(tensor) != count):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; give one value for each of the {count} seeds"
            )
    return tensors


class StepNegatives(NegativeSampling):  # type: ignore[misc]  # PyG is not typed
    """The negatives of one step. Ranks that share a step draw those of all its edges, and take their own.

    numbers: seed, epoch, step. first: position of this rank's first seed edge among those of the step.
    """

    def __init__(self, negatives: NegativeSampling, numbers: tuple[int, int, int], first: int) -> None:
        super().__init__(negatives.mode, negatives.amount, negatives.src_weight, negatives.dst_weight)
        self._numbers, self._first = numbers, first
        self._generators: dict[str, np.random.Generator] = {}
        self._edge_count: int | None = None  # of seed edges with trees

    def use_trees(
        self, count: int, times: torch.Tensor | None, node_times: dict[str, torch.Tensor | None]
    ) -> None:
        """Draw for seed edges with trees: negative k belongs to seed edge k % count.

        times: int64[count], of the seed edges. node_times: by end, int64[nodes], if nodes have times. Then a
        negative is not later than its seed edge; if none is found, it is the earliest node.
        """
        self._edge_count, self._edge_times, self._node_times = count, times, node_times

    def sample(self, num_samples: int, endpoint: str, num_nodes: int | None = None) -> torch.Tensor:
        """int64[num_samples]: nodes, uniform or by weight."""
        if self._edge_count is not None:
            return torch.from_numpy(self._in_trees(self._edge_count, num_samples, endpoint, num_nodes))
        passed = 0
        if endpoint not in self._generators:
            self._generators[endpoint] = self._generator(endpoint)
            passed = int(self._first * self.amount)
        drawn = self._draw(self._generators[endpoint], endpoint, num_nodes, passed + num_samples)
        return torch.from_numpy(drawn[passed:])

    def _in_trees(
        self, edge_count: int, num_samples: int, endpoint: str, num_nodes: int | None
    ) -> np.ndarray:
        per_edge, negatives = math.ceil(self.amount), np.arange(num_samples)
        edges = negatives % edge_count
        places = (self._first + edges) * per_edge + negatives // edge_count  # in the draws of all ranks
        times = self._node_times[endpoint]
        count = (self._first + edge_count) * per_edge
        drawn: np.ndarray = self._draw(self._generator(endpoint), endpoint, num_nodes, count)[places]
        if times is None or self._edge_times is None:
            return drawn
        latest = self._edge_times.numpy()[edges]
        for trial in range(1, _TRIALS):
            late = np.flatnonzero(times.numpy()[drawn] > latest)
            if not len(late):
                return drawn
            again = self._draw(self._generator(endpoint, trial), endpoint, num_nodes, count)
            drawn[late] = again[places[late]]
        drawn[times.numpy()[drawn] > latest] = int(times.argmin())
        return drawn

    def _generator(self, endpoint: str, trial: int = 0) -> np.random.Generator:
        seed, epoch, step = self._numbers
        key = np.array([seed, epoch], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=[0, trial, step, _COUNTERS[endpoint]]))

    def _draw(
        self, generator: np.random.Generator, endpoint: str, num_nodes: int | None, count: int
    ) -> np.ndarray:
        """int64[count]: nodes, uniform or by weight."""
        weight = self.src_weight if endpoint == "src" else self.dst_weight
        if weight is None:
            assert num_nodes is not None
            return generator.integers(0, num_nodes, count)
        sums = on_host(weight.detach()).double().cumsum(0).numpy()
        places = generator.random(count) * sums[-1]
        last = int(np.searchsorted(sums, sums[-1]))  # with a weight; rounding may lead past it
        nodes: np.ndarray = np.minimum(np.searchsorted(sums, places, side="right"), last)
        return nodes.astype(np.int64, copy=False)


def check_negatives(negatives: NegativeSampling | None, num_src: int, num_dst: int) -> None:
    """Raise ValueError for weights that are not one number of 0 or more for each node."""
    if negatives is None:
        return
    for name, weight, count in (
        ("src_weight", negatives.src_weight, num_src),
        ("dst_weight", negatives.dst_weight, num_dst),
    ):
        if weight is None:
            continue
        if weight.shape != (count,):
            raise ValueError(
                f"{name} of neg_sampling has shape {list(weight.shape)}; give one number for each of the "
                f"{count} nodes"
            )
        if not (weight.min() >= 0 and weight.sum() > 0):
            raise ValueError(f"{name} of neg_sampling must be 0 or more, and not all 0")
