"""EdgeLoader: seed edges of a relation, uniform negatives, and a sampler, for link prediction.

The user's entry to training on edges. It knows what a seed is; the rest is EpochLoader's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch

from gids.loader.epoch_loader import EpochLoader
from gids.loader.excluded_edges import without_edges
from gids.loader.ranks import StepSeeds
from gids.loader.sample_stream import Draw, sample_steps
from gids.loader.tables import Tables
from gids.sampler import Minibatch, Sampler, Topology
from gids.sampler.layered import Fanout
from gids.sampler.minibatch import PerType
from gids.store import FeatureStore, Graph
from gids.store.names import Relation, describe_type


@dataclass(repr=False)
class EdgeMinibatch(Minibatch):
    """A Minibatch whose seeds are the ends of edges.

    seeds: each end once, ascending, by type where the minibatch is heterogeneous. pairs: int64[2, n], of each
    pair the source and the destination as places among the seeds of their types, which are rows of the last
    layer's output: first the positive_count seed edges, then the negatives of the first, of the second, …
    labels: float32[n], 1 for seed edges and 0 for negatives.
    """

    pairs: torch.Tensor = field(default_factory=lambda: torch.empty((2, 0), dtype=torch.int64))
    positive_count: int = 0

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        yield self.pairs


class EdgeLoader(EpochLoader):
    """Minibatches for training on edges: ends sampled from a store's topology, features through a cache.

    Args:
        store: the dataset, or its path.
        edges: the edges to train on, int64[2, n] of sources and destinations; need not be in the topology.
            They are copied, and what changes later has no effect. None: all of the relation's.
        sampler: fanouts, as ``gids.sampler.Neighbor`` takes them, or a sampler of blocks.
        relation: (source type, relation, destination type) of the edges; may be left out where there is one.
        negatives: pairs for every seed edge that have its source and a uniformly drawn destination, which
            may by chance be an edge.
        exclude: ``"self"``: the step's seed edges, of all ranks, are left out of the blocks, as they would
            tell the answer; ``"reverse"``: those and their reverses. All parallel edges are. Blocks may then
            have input nodes that no edge leads from.
        reverse: the relation of the reverses; None: the same one, where both ends have one type.
        batch_size: seed edges, without negatives, on each rank.
        shuffle, drop_last, seed, rank, world_size, device, tables, place, options: as of gids.NodeLoader.

    Minibatches are EdgeMinibatches: of tensors where the dataset has one node type and one relation, else of
    dictionaries. Epochs, determinism, ``state_dict()`` and errors are as of gids.NodeLoader. Memory: 16
    bytes per edge given, and 8 per seed edge for an epoch's order.
    """

    def __init__(
        self,
        store: FeatureStore | str | os.PathLike[str],
        edges: torch.Tensor | None,
        sampler: Sampler | Sequence[Fanout],
        *,
        relation: Relation | None = None,
        negatives: int = 1,
        exclude: Literal["self", "reverse"] | None = None,
        reverse: Relation | None = None,
        tables: Tables | None = None,
        batch_size: int = 1024,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        device: str | torch.device = "cpu",
        place: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(
            store,
            sampler,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
            threads=options.get("threads"),
        )
        if isinstance(negatives, bool) or not isinstance(negatives, int) or negatives < 0:
            raise ValueError(f"negatives={negatives!r}; give a number for each seed edge, 0 for none")
        if exclude not in (None, "self", "reverse"):
            raise ValueError(f"exclude={exclude!r}; it must be None, 'self' or 'reverse'")
        ends = {(g.relation[0], g.relation[2]) for g in self._graphs}
        one = len(self._graphs) == 1 and all(src == dst for src, dst in ends)
        topology = Topology(self._graphs[0] if one else self._graphs)
        self._graph = self._graph_of(relation)
        self.relation: Relation = self._graph.relation
        self.negatives, self.exclude = negatives, exclude
        self._reverse = self._reverse_of(reverse) if exclude == "reverse" else None
        self._edges = _Edges(self._graph, edges)
        self._open(topology, tables, device, place, options)

    @property
    def _seed_count(self) -> int:
        return self._edges.count

    def _hash_seeds(self, update: Callable[[Any], None]) -> None:
        self._edges.hash(update)

    def _made_with(self) -> dict[str, Any]:
        mine = {
            "relation": list(self.relation),
            "negatives": self.negatives,
            "exclude": self.exclude,
            "reverse": list(self._reverse) if self._reverse else None,
        }
        return super()._made_with() | mine

    def _drawing(self) -> Draw:
        topology, sampler, seed, stream = self._topology, self.sampler, self.seed, self._stream
        edges, graph, relation, negatives = self._edges, self._graph, self.relation, self.negatives
        excluded = [(relation, False)] if self.exclude else []
        if self._reverse is not None:
            excluded.append((self._reverse, True))

        def ends(seeds: StepSeeds, epoch: int, step: int) -> tuple[PerType, torch.Tensor]:
            src, dst = edges.at(seeds.own)
            count = len(seeds.of_all_ranks)
            drawn = _uniform(graph.num_dst, count * negatives, seed, epoch, step).reshape(count, negatives)
            wrong = drawn[seeds.part].ravel()
            src, dst = np.concatenate([src, src.repeat(negatives)]), np.concatenate([dst, wrong])
            nodes, pairs = _ends(relation, src, dst)
            return next(iter(nodes.values())) if topology.homogeneous else nodes, pairs

        def finish(sampled: Minibatch, pairs: torch.Tensor, seeds: StepSeeds) -> Minibatch:
            count = len(seeds.own)
            labels = torch.zeros(pairs.shape[1])
            labels[:count] = 1
            minibatch = EdgeMinibatch(
                **{f.name: getattr(sampled, f.name) for f in fields(Minibatch)},
                pairs=stream.to_device(pairs),
                positive_count=count,
            )
            minibatch.labels = stream.to_device(labels)
            if excluded:
                ids = stream.to_device(torch.from_numpy(np.stack(edges.at(seeds.of_all_ranks))))
                for which, backwards in excluded:
                    without_edges(minibatch, which, ids.flip(0) if backwards else ids)
            return minibatch

        def draw(steps: Sequence[StepSeeds], epoch: int, first_step: int) -> list[Minibatch]:
            drawn = [ends(of_step, epoch, step) for step, of_step in enumerate(steps, first_step)]
            minibatches = sample_steps(
                sampler,
                topology,
                [nodes for nodes, _ in drawn],
                seed=seed,
                epoch=epoch,
                first_step=first_step,
            )
            return [
                finish(sampled, pairs, of_step)
                for sampled, (_, pairs), of_step in zip(minibatches, drawn, steps, strict=True)
            ]

        return draw

    def _graph_of(self, relation: Relation | None) -> Graph:
        known = {g.relation: g for g in self._graphs}
        if isinstance(relation, list):
            relation = tuple(relation)
        if relation is None and len(known) == 1:
            return self._graphs[0]
        found = known.get(relation) if relation is not None else None
        if found is None:
            names = ", ".join(map(describe_type, known))
            asked = "relation is not given" if relation is None else f"no topology of {relation}"
            raise KeyError(f"{asked}: {self.store.name} has {names}")
        return found

    def _reverse_of(self, reverse: Relation | None) -> Relation:
        src, _, dst = self.relation
        if reverse is None and src == dst:
            return self.relation
        known = {g.relation for g in self._graphs}
        if reverse is None or reverse not in known or (reverse[0], reverse[2]) != (dst, src):
            raise ValueError(
                f"reverse={reverse}; with exclude='reverse', give the relation from {dst!r} to {src!r} that "
                f"holds the reverses of {describe_type(self.relation)}"
            )
        return reverse


class _Edges:
    """The seed edges: a copy of those given, or by their places those of a graph."""

    def __init__(self, graph: Graph, edges: torch.Tensor | None) -> None:
        self._graph = graph
        self._given: np.ndarray | None = None
        self.count = graph.num_edges
        if edges is None:
            return
        if not isinstance(edges, torch.Tensor) or edges.dtype != torch.int64 or edges.dim() != 2:
            kind = (
                f"{edges.dtype}{list(edges.shape)}"
                if isinstance(edges, torch.Tensor)
                else type(edges).__name__
            )
            raise TypeError(f"edges is {kind}; give int64[2, n], sources and destinations")
        if len(edges) != 2:
            raise TypeError(f"edges is int64{list(edges.shape)}; give int64[2, n], sources and destinations")
        self._given = edges.to("cpu", copy=True).numpy()
        self.count = edges.shape[1]
        for ids, ntype, limit in zip(
            self._given, graph.relation[::2], (graph.num_src, graph.num_dst), strict=True
        ):
            if len(ids) and not (ids.min() >= 0 and ids.max() < limit):
                raise IndexError(
                    f"edges have {ntype!r} nodes from {ids.min()} to {ids.max()}; ids run from 0 to "
                    f"{limit - 1}"
                )

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sources, destinations), int64 each."""
        if self._given is not None:
            return self._given[0][places], self._given[1][places]
        destinations = np.searchsorted(self._graph.indptr, places, side="right") - 1
        return self._graph.indices[places].astype(np.int64), destinations.astype(np.int64)

    def hash(self, update: Callable[[Any], None]) -> None:
        for ids in self._given if self._given is not None else ():
            update(np.ascontiguousarray(ids))


def _uniform(limit: int, count: int, seed: int, epoch: int, step: int) -> np.ndarray:
    """int64[count] in [0, limit), counted as all random numbers are; an epoch's order has counters below."""
    key = np.array([seed, epoch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, step, 1]))
    return generator.integers(0, limit, count)


def _ends(
    relation: Relation, src: np.ndarray, dst: np.ndarray
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The nodes at either end, each once, by type; int64[2, n], the places of src and dst among them."""
    if relation[0] == relation[2]:
        nodes, places = np.unique(np.concatenate([src, dst]), return_inverse=True)
        return {relation[0]: torch.from_numpy(nodes)}, torch.from_numpy(places.reshape(2, -1))
    sources, at_source = np.unique(src, return_inverse=True)
    destinations, at_destination = np.unique(dst, return_inverse=True)
    pairs = torch.from_numpy(np.stack([at_source, at_destination]))
    return {relation[0]: torch.from_numpy(sources), relation[2]: torch.from_numpy(destinations)}, pairs
