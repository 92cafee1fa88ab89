"""Minibatch and Block, the results of samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch

from gids.cuda import on_host
from gids.errors import MissingError
from gids.store import Graph
from gids.store.names import Relation

V = TypeVar("V")
PerType = torch.Tensor | dict[str, torch.Tensor]
"""One tensor, or one by node type if the minibatch is heterogeneous."""


@dataclass(repr=False)
class Block:
    """The edges of one relation in one layer, as in-edges by destination (CSC).

    indptr: int64[num_dst + 1]. indices: int64[num_edges]; destination v has the sources indptr[v]:indptr[v +
    1], as local ids below num_src. positions: int64[num_edges], the position of each edge in graph.indices.
    All are on the sampler's device. Destinations are the first num_dst nodes of their type, sources the first
    num_src of theirs; if both have the same type, a block's destinations are its first sources.

    weights: float32[num_edges], 1 / the probability of each edge, so that the sum of weight x feature over a
    destination's edges is an unbiased estimate of the sum over all its neighbors (docs/sampler.md explains
    means). None: all sampled neighbors have the same weight.

    A destination's edges are in the order of the draws, or in the graph's order if all were taken or the
    sampler looks at all of them.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    positions: torch.Tensor
    num_src: int
    graph: Graph
    weights: torch.Tensor | None = None
    reverse: Graph | None = None
    """The graph whose reverse edges a bidirectional subgraph has: those with the positions -1 - p."""

    @classmethod
    def of_arrays(
        cls,
        indptr: np.ndarray,
        indices: np.ndarray,
        positions: np.ndarray,
        weights: np.ndarray | None,
        num_src: int,
        graph: Graph,
    ) -> Block:
        """A block that shares the memory of these arrays."""
        indptr_, indices_, positions_ = map(torch.from_numpy, (indptr, indices, positions))
        weights_ = None if weights is None else torch.from_numpy(weights)
        return cls(indptr_, indices_, positions_, num_src, graph, weights_)

    def __repr__(self) -> str:
        weights = ", weights" if self.weights is not None else ""
        return f"Block({self.num_src} -> {self.num_dst} nodes, {self.num_edges} edges{weights})"

    @property
    def num_dst(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @property
    def relation(self) -> Relation:
        return self.graph.relation

    @property
    def edge_ids(self) -> torch.Tensor:
        """int64[num_edges]: the id of each edge, or its position if the graph has no edge ids.

        Edge features are stored by these ids. Looked up on the host on each access, so it blocks on a GPU.
        """
        if self.reverse is None and self.graph.edge_ids is None:
            return self.positions
        positions = on_host(self.positions).numpy()
        if self.reverse is None:
            ids = _ids_at(self.graph, positions)
        else:
            ids, added = np.empty_like(positions), positions < 0
            ids[~added] = _ids_at(self.graph, positions[~added])
            ids[added] = _ids_at(self.reverse, -1 - positions[added])
        return torch.from_numpy(ids).to(self.positions.device)

    def coo(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(sources, destinations) of each edge as local ids, int64[num_edges] each."""
        local = torch.arange(self.num_dst, device=self.indptr.device)
        return self.indices, local.repeat_interleave(self.indptr.diff(), output_size=self.num_edges)


class FeatureRows(dict[str, torch.Tensor]):
    """Rows by table name, or by key: "feat" is "paper.feat" if no other table here has the key.

    keys: of the tables, by name. Another name raises KeyError with the names that exist.
    """

    def __init__(
        self, rows: Mapping[str, torch.Tensor] | None = None, keys: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(rows or {})
        self.keys_of_tables = dict(keys or {})

    def __missing__(self, name: object) -> torch.Tensor:
        of_key = [of_table for of_table in self if self.keys_of_tables.get(of_table) == name]
        if len(of_key) == 1:
            return self[of_key[0]]
        names = ", ".join(map(repr, self)) or "none"
        raise MissingError(f"the minibatch has no features {name!r} (it has {names})")


@dataclass(repr=False)
class Minibatch:
    """One minibatch, homogeneous or (dictionaries by node type and relation) heterogeneous.

    seeds: int64[n], as given. input_nodes: int64[m], the nodes whose features the first block reads: the
    seeds, then every other node once, in order of first appearance. blocks: from the input layer to the
    output layer, one Block each, or a dictionary by relation; or, of a bidirectional or induced subgraph, one
    layer among all input nodes. epoch, step: as given to sample(); from a loader, the epoch and the
    position in it.

    batch: of a disjoint minibatch, int64[m], the tree of each input node: the position of its seed. Positions
    go on from one node type to the next, in the order of the topology. Then pairs (batch, node) are unique,
    nodes are not. times: of a temporal one, int64[n], the time of each seed. Otherwise None.

    Filled by a loader: features: rows of input_nodes, by table name; labels: of the seeds, None if
    the loader has none.
    """

    seeds: PerType
    input_nodes: PerType
    blocks: list[Block] | list[dict[Relation, Block]]
    epoch: int = 0
    step: int = 0
    features: FeatureRows = field(default_factory=FeatureRows)
    labels: PerType | None = None
    batch: PerType | None = None
    times: PerType | None = None

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("batch", "times"):  # most minibatches have none
            if shown[name] is None:
                del shown[name]
        shapes = ", ".join(f"{name}={_shapes(value)}" for name, value in shown.items())
        return f"{type(self).__name__}({shapes})"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors except the features."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Self:
        """The same minibatch with its tensors on another device. Lightning calls it."""
        if all(tensor.device == torch.device(device) for tensor in self.tensors()):
            return self
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same minibatch with its tensors in pinned memory, for ``to("cuda", non_blocking=True)``.

        Raises PyTorch's RuntimeError without a driver.
        """
        return self._with(torch.Tensor.pin_memory)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """A copy, with other tensors."""

        def moved(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return change(item)
            if isinstance(item, Mapping):
                changed: Any = copy(item)  # FeatureRows knows the keys of its tables
                changed.update({key: moved(value) for key, value in item.items()})
                return changed
            if isinstance(item, list):
                return [moved(value) for value in item]
            return replace(item, **fields_of(item)) if isinstance(item, Block) else item

        def fields_of(item: Any) -> dict[str, Any]:
            return {f.name: moved(getattr(item, f.name)) for f in fields(item) if f.init}

        return replace(self, **fields_of(self))

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors except the features."""
        for of_nodes in (self.seeds, self.input_nodes, self.labels, self.batch, self.times):
            if of_nodes is not None:
                yield from _all(of_nodes)
        for layer in self.blocks:
            for block in _all(layer):
                yield from (block.indptr, block.indices, block.positions)
                if block.weights is not None:
                    yield block.weights


def _ids_at(graph: Graph, positions: np.ndarray) -> np.ndarray:
    return positions if graph.edge_ids is None else graph.edge_ids[positions].astype(np.int64, copy=False)


def _all(item: V | dict[str, V] | dict[Relation, V]) -> list[V]:
    return list(item.values()) if isinstance(item, dict) else [item]


def _shapes(item: object) -> str:
    """repr, with the type and shape of tensors: float32[1024, 128]."""
    if isinstance(item, torch.Tensor):
        return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    if isinstance(item, dict):
        return "{" + ", ".join(f"{key!r}: {_shapes(value)}" for key, value in item.items()) + "}"
    return repr(item)
