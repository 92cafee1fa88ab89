"""InputSampler: draws the neighbors of PyG's inputs. Made by gids.pyg's loaders, called by gids.loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch_geometric.sampler import NegativeSampling, NodeSamplerInput, NumNeighbors
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from gids.cuda import on_host
from gids.loader.row_source import RowSource
from gids.pyg.hops import STORED, Counts, HopMinibatch, HopSampler, weights_of, with_times
from gids.pyg.inputs import StepNegatives
from gids.pyg.outputs import bidirectional
from gids.pyg.stores import is_homogeneous, table_of
from gids.sampler import TimedSeeds, Topology
from gids.sampler.layered import array_digest
from gids.sampler.minibatch import PerType
from gids.sampler.topology import By
from gids.store.names import Relation


class InputSampler:
    """A Sampler of gids.loader whose seeds are inputs of PyG.

    Arguments are those of gids.pyg.NeighborLoader. negatives: for seed edges.

    Attributes: graphs: the topology that it samples, in the order of times. layered: the sampler of gids that
    it samples by. divisible: whether the edges of the topology may be divided among ranks.
    """

    divisible = True

    def __init__(
        self,
        source: RowSource,
        num_neighbors: Counts | NumNeighbors,
        subgraph_type: SubgraphType | str,
        replace: bool,
        disjoint: bool,
        temporal_strategy: str,
        time_attr: str | None,
        weight_attr: str | None,
        negatives: NegativeSampling | None = None,
    ) -> None:
        store = source.store
        self.subgraph_type, self.negatives = _kind_of(subgraph_type), negatives
        if temporal_strategy not in ("uniform", "last"):
            raise ValueError(f"temporal_strategy={temporal_strategy!r} must be one of ('uniform', 'last')")
        if temporal_strategy != "uniform" and time_attr is None:
            raise ValueError(f"temporal_strategy={temporal_strategy!r} needs time_attr=")
        if store.part is not None:
            _check_parts(self.subgraph_type, weight_attr, time_attr)
        self._tables_read: dict[str, str] = {}  # of times and weights, and a checksum of each

        def find(type_: str | Relation, attribute: str) -> torch.Tensor | None:
            table = table_of(store, type_, attribute)
            if table is None:
                return None
            self._tables_read[table.name] = f"{table.pages_crc:08x}"
            return table.read_rows(torch.arange(table.row_count))

        self.graphs = source.graphs()
        by: By | None = None
        if time_attr is not None:
            self.graphs, by = with_times(self.graphs, time_attr, find, store.name)
        self._node_times: dict[str, torch.Tensor] = {}
        if by == "nodes":
            topology = Topology(self.graphs)
            times = ((ntype, topology.node_times(ntype)) for ntype in topology.node_types)
            self._node_times = {t: torch.from_numpy(np.array(v, np.int64)) for t, v in times if v is not None}
        relations = None if is_homogeneous(store) else [g.relation for g in self.graphs]
        self.layered = HopSampler(
            _counts_of(num_neighbors, relations),
            replace=replace,
            weights=None if weight_attr is None else weights_of(self.graphs, weight_attr, find, store.name),
            disjoint=disjoint,
            temporal=by,
            strategy=temporal_strategy,  # type: ignore[arg-type]  # was checked
            induced=self.subgraph_type is SubgraphType.induced,
            threads=source.options.threads,
        )

    def sample(
        self, topology: Any, seeds: Any, *, seed: int = 0, epoch: int = 0, step: int = 0
    ) -> HopMinibatch:
        """seeds: inputs of PyG, and the position of the first one among those of all ranks. metadata: as
        PyG's node_sample and edge_sample make it."""
        inputs, first = seeds
        self._check_times(inputs.time)
        hops, negatives = self.layered, self.negatives

        def sample(seeds: PerType, times: PerType | None = None) -> HopMinibatch:
            roots = seeds if times is None else TimedSeeds(seeds, _int64(times))
            sampled = hops.sample(topology, roots, seed=seed, epoch=epoch, step=step)
            if hops.disjoint and negatives is not None and negatives.is_binary():
                # By pairs of ends. PyG takes them modulo the seed edges, whose number need not divide theirs.
                ends = seeds.values() if isinstance(seeds, dict) else [seeds]
                sampled.batch = _modulo(sampled.batch, sum(map(len, ends)) // 2)
            return sampled

        drawn: HopMinibatch
        if isinstance(inputs, NodeSamplerInput):
            drawn = node_sample(inputs, sample)
        else:
            counts = dict(zip(topology.node_types, topology.node_counts, strict=True))
            num_nodes = next(iter(counts.values())) if topology.homogeneous else counts
            if negatives is not None:
                negatives = StepNegatives(negatives, (seed, epoch, step), first)
                if hops.disjoint:
                    src, _, dst = inputs.input_type or topology.relations[0]
                    node_times = {"src": self._node_times.get(src), "dst": self._node_times.get(dst)}
                    negatives.use_trees(len(inputs.row), inputs.time, node_times)
            drawn = edge_sample(inputs, sample, num_nodes, hops.disjoint, None, negatives)
        return bidirectional(drawn) if self.subgraph_type is SubgraphType.bidirectional else drawn

    @property
    def nbytes(self) -> int:
        return self.layered.nbytes

    @property
    def repeatable(self) -> bool:
        """See gids.sampler.Sampler. The weights of edges and negatives may change."""
        negatives = self.negatives
        weighted = negatives is not None and (
            negatives.src_weight is not None or negatives.dst_weight is not None
        )
        return not weighted and self.layered.weights is None

    def __repr__(self) -> str:
        """Everything that minibatches depend on."""
        read = f", tables={self._tables_read}" if self._tables_read else ""
        negatives = "" if self.negatives is None else f", {_described(self.negatives)}"
        kind = self.subgraph_type.value
        return f"{self.layered!r}{read}{negatives}{'' if kind == 'directional' else f', {kind}'}"

    def _check_times(self, times: torch.Tensor | None) -> None:
        if times is None:
            if self.layered.temporal == "edges":
                raise ValueError(
                    "the seeds need times, because time_attr= names times of edges: give input_time="
                )
        elif times.is_floating_point():  # rounding toward 0 would let later edges pass
            raise TypeError(f"input_time= or edge_label_time= is {times.dtype}: give int64[n]")


def not_for_parts(what: str, why: str) -> ValueError:
    return ValueError(f"{what} does not work with a partitioned dataset ({why})")


def _kind_of(subgraph_type: SubgraphType | str) -> SubgraphType:
    known = tuple(t.value for t in SubgraphType)
    if getattr(subgraph_type, "value", subgraph_type) not in known:
        raise ValueError(f"subgraph_type={subgraph_type!r} must be one of {known}")
    return SubgraphType(subgraph_type)


def _check_parts(kind: SubgraphType, weight_attr: str | None, time_attr: str | None) -> None:
    """Raise ValueError for what needs all edges, which no rank has."""
    if kind is not SubgraphType.directional:
        raise not_for_parts(f"subgraph_type={kind.value!r}", "no rank has all edges")
    if weight_attr is not None:
        raise not_for_parts("weight_attr=", "use gids.NodeLoader with gids.sampler.Neighbor(weights=)")
    if time_attr not in (None, STORED):
        raise not_for_parts(f"time_attr={time_attr!r}", f"times that `gids convert` stores do: {STORED!r}")


def _counts_of(num_neighbors: Counts | NumNeighbors, relations: Sequence[Relation] | None) -> Counts:
    """By relation; one list if relations is None. Raises TypeError, ValueError."""
    numbers = num_neighbors if isinstance(num_neighbors, NumNeighbors) else NumNeighbors(num_neighbors)
    if not isinstance(numbers.values, list | tuple if relations is None else list | tuple | dict):
        by_type = "" if relations is None else ", or such lists by edge type"
        raise TypeError(f"num_neighbors={num_neighbors!r}; give a list, a number per hop{by_type}")
    if relations is None:
        return _plain(numbers.values)
    return {relation: _plain(hops) for relation, hops in numbers.get_values(list(relations)).items()}


def _plain(hops: Sequence[int]) -> list[int]:
    return [int(n) if isinstance(n, np.integer) else n for n in hops]


def _int64(times: PerType) -> PerType:
    if isinstance(times, dict):
        return {ntype: values.to(torch.int64) for ntype, values in times.items()}
    return times.to(torch.int64)


def _modulo(trees: Any, count: int) -> Any:
    return {t: b % count for t, b in trees.items()} if isinstance(trees, dict) else trees % count


def _described(negatives: NegativeSampling) -> str:
    ends = {"src": negatives.src_weight, "dst": negatives.dst_weight}
    weights = {end: array_digest(on_host(w).numpy()) for end, w in ends.items() if w is not None}
    return f"negatives={negatives.mode.value} {negatives.amount} {weights}"
