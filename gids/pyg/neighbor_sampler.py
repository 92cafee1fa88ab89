"""NeighborSampler: gids' sampling as PyG's BaseSampler, for PyG's own loaders and for gids.pyg's.

Also PyG's arguments: which there are, and the checks that loaders and samplers share.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypedDict

import numpy as np
import torch
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    NumNeighbors,
)
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from gids.loader.options import check_names
from gids.loader.row_source import RowSource, Tables
from gids.pyg.hops import STORED, Counts, HopMinibatch, HopSampler, weights_of, with_times
from gids.pyg.inputs import StepNegatives
from gids.pyg.outputs import Output, bidirectional, output_of
from gids.pyg.stores import (
    attribute_in_memory,
    graphs_in_memory,
    graphs_on_disk,
    is_homogeneous,
    is_on_disk,
    is_typed,
    store_of,
    table_of,
)
from gids.sampler import TimedSeeds, Topology
from gids.sampler.minibatch import PerType
from gids.sampler.topology import By
from gids.store.names import Relation
from gids.store.part import refuse_part


class NeighborSampler(BaseSampler):  # type: ignore[misc]  # PyG is not typed
    """Neighbor sampling for PyG's loaders, without pyg-lib and torch-sparse.

    data: the data of the loader: Data or HeteroData in memory, any (FeatureStore, GraphStore) with PyG's
    interfaces, or gids.open(...), a path or a gids.FeatureStore. num_neighbors: as in PyG. subgraph_type,
    replace, disjoint, temporal_strategy, time_attr, weight_attr: as in gids.pyg.NeighborLoader; for data in
    memory the attributes of nodes and edges that have these names. is_sorted: the edges in memory are sorted
    by destination, and are not copied. share_memory: has no effect, because forked workers share the
    topology, and others make their own. directed=False: subgraph_type="induced". threads: number of sampling
    threads (default: torch's number, which is 1 in workers of a DataLoader).

    ``torch_geometric.loader.NodeLoader(data, node_sampler=NeighborSampler(data, [10, 10]), …)``, or
    ``LinkLoader`` with ``link_sampler=``. Each minibatch takes one random number from torch's generator, so
    torch.manual_seed repeats a run, and workers differ. Edges are given by their ids in the data, so that
    edge_permutation is None.

    Raises TypeError for other data and for an argument that PyG's sampler does not have, ValueError for
    num_neighbors, for edges that are not sorted as is_sorted says, and for an argument of PyG that is not
    supported; NotImplementedError for sample_direction="backward"; KeyError and FormatError for a dataset
    without topology. While sampling: IndexError for a seed out of range, TypeError for
    times that are not whole numbers.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Counts | NumNeighbors,
        subgraph_type: Any = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        sample_direction: str = "forward",
        *,
        threads: int | None = None,
    ) -> None:
        before = set(vars(self))  # of a subclass
        if sample_direction != "forward":
            raise NotImplementedError(
                f"sample_direction={sample_direction!r} is not supported, only 'forward': the topology is "
                "stored by destination; sample from a graph with reversed edges instead"
            )
        drawing = subgraph_type, replace, disjoint, temporal_strategy
        sampling = Sampling(num_neighbors, *drawing, time_attr, weight_attr, is_sorted, directed)
        self.num_neighbors = (
            num_neighbors if isinstance(num_neighbors, NumNeighbors) else NumNeighbors(num_neighbors)
        )
        # Tables of times and weights, and a checksum of each.
        self.tables_read: dict[str, str] = {}
        if is_on_disk(data):
            store = store_of(data)
            name = store.name
            if not (isinstance(data, RowSource) and data.together):
                refuse_part(store, "gids.pyg.NeighborSampler")
            self._divided = store.part is not None
            self.graphs = graphs_on_disk(data)
            has_types = isinstance(data, tuple | list) and data[0].typed
            self._typed = True if has_types or not is_homogeneous(store) else None

            def find(type_: str | Relation, attribute: str) -> Any:
                table = table_of(store, type_, attribute)
                if table is None:
                    return None
                self.tables_read[table.name] = f"{table.pages_crc:08x}"
                return table.read_rows(torch.arange(table.row_count))

        else:
            self._typed, name = is_typed(data), "the data"
            self._divided = False
            self.graphs = graphs_in_memory(data, is_sorted=is_sorted)
            find = partial(attribute_in_memory, data)
        self.subgraph_type = sampling.check(self._divided)
        kind = {"subgraph_type": self.subgraph_type, "directed": True}
        self._made_of = {"data": data, "threads": threads, **vars(sampling), **kind}
        by: By | None = None
        if time_attr is not None:
            self.graphs, by = with_times(self.graphs, time_attr, find, name)
        self._node_times: dict[str, torch.Tensor] = {}
        if by == "nodes":
            topology = Topology(self.graphs)
            times = ((ntype, topology.node_times(ntype)) for ntype in topology.node_types)
            self._node_times = {t: torch.from_numpy(np.array(v, np.int64)) for t, v in times if v is not None}
        relations = [g.relation for g in self.graphs]
        by_relation = self._typed or (self._typed is None and isinstance(self.num_neighbors.values, dict))
        counts = counts_of(num_neighbors, relations if by_relation else None) or []
        weights = None
        if weight_attr is not None:
            weights = weights_of(self.graphs, weight_attr, find, name)
        self._make_hops = partial(
            HopSampler,
            counts,
            replace=replace,
            weights=weights,
            disjoint=disjoint,
            temporal=by,
            strategy=temporal_strategy,  # type: ignore[arg-type]  # was checked
            induced=self.subgraph_type.value == "induced",
            threads=threads,
        )
        self._hops, self._process = self._make_hops(), os.getpid()
        self._topologies: dict[bool, Topology] = {}
        self._own_names = set(vars(self)) - before

    @property
    def hops(self) -> HopSampler:
        """The sampler. A forked worker makes one, because its number of threads is another one."""
        if self._process != os.getpid():
            self._hops, self._process = self._make_hops(), os.getpid()
        return self._hops

    @property
    def disjoint(self) -> bool:
        """Whether each seed has a tree of its own."""
        return self.hops.disjoint

    @property
    def is_temporal(self) -> bool:
        """Whether seeds have times."""
        return self.hops.temporal is not None

    def sample_from_nodes(self, index: NodeSamplerInput) -> Output:
        """PyG's entry for NodeLoader."""
        return self._sample(index, None)

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> Output:
        """PyG's entry for LinkLoader."""
        return self._sample(index, neg_sampling)

    def topology(self, typed: bool) -> Topology:
        """The graphs for seeds with or without a type."""
        if typed not in self._topologies:
            self._topologies[typed] = Topology(self.graphs if typed else self.graphs[0])
        return self._topologies[typed]

    def draw(
        self,
        topology: Topology,
        inputs: NodeSamplerInput | EdgeSamplerInput,
        negatives: NegativeSampling | None,
        *,
        seed: int,
        epoch: int = 0,
        step: int = 0,
    ) -> HopMinibatch:
        """Sample for PyG's inputs, with given random numbers. metadata: as PyG's node_sample and edge_sample
        make it.
        """

        def sample(seeds: PerType, times: PerType | None = None) -> HopMinibatch:
            roots = seeds if times is None else TimedSeeds(seeds, _int64(times))
            sampled = self.hops.sample(topology, roots, seed=seed, epoch=epoch, step=step)
            if self.disjoint and negatives is not None and negatives.is_binary():
                # By pairs of ends. PyG takes them modulo the seed edges, whose number need not divide theirs.
                ends = seeds.values() if isinstance(seeds, dict) else [seeds]
                sampled.batch = _modulo(sampled.batch, sum(map(len, ends)) // 2)
            return sampled

        if inputs.time is not None and not self.is_temporal:
            raise ValueError(
                "the seeds have times (input_time= or edge_label_time=), and the sampler does not sample by "
                "time: give it time_attr=, or leave them out"
            )
        if inputs.time is None and (self.hops.temporal == "edges" or (self._node_times and negatives)):
            raise ValueError(
                "the seeds need times, because time_attr= names times of edges, or there are negatives: give "
                "input_time= or edge_label_time="
            )
        drawn: HopMinibatch
        if isinstance(inputs, NodeSamplerInput):
            drawn = node_sample(inputs, sample)
        else:
            counts = dict(zip(topology.node_types, topology.node_counts, strict=True))
            num_nodes = next(iter(counts.values())) if topology.homogeneous else counts
            node_times: Any = self._node_times or None
            if self.disjoint and isinstance(negatives, StepNegatives):
                src, _, dst = inputs.input_type or topology.relations[0]
                ends = (self._node_times.get(ntype) for ntype in (src, dst))
                negatives, node_times = negatives.in_trees(len(inputs.row), inputs.time, *ends), None
            elif topology.homogeneous and node_times is not None:
                (node_times,) = node_times.values()
            drawn = edge_sample(inputs, sample, num_nodes, self.disjoint, node_times, negatives)
        return drawn

    def _sample(
        self, inputs: NodeSamplerInput | EdgeSamplerInput, negatives: NegativeSampling | None
    ) -> Output:
        seed = int(torch.randint(torch.iinfo(torch.int64).max, ()))
        if self._divided:
            raise ValueError(
                "the ranks sample a partitioned dataset together: iterate over a gids.pyg.NeighborLoader or "
                "LinkNeighborLoader of gids.distributed.open(), or open the whole dataset"
            )
        if self._is_alone(inputs, negatives):
            return _alone(inputs)
        topology = self.topology(inputs.input_type is not None)
        return self.finished(output_of(self.draw(topology, inputs, negatives, seed=seed)))

    def finished(self, output: Output) -> Output:
        """The output with the subgraph's type."""
        return bidirectional(output) if self.subgraph_type.value == "bidirectional" else output

    def _is_alone(
        self, inputs: NodeSamplerInput | EdgeSamplerInput, negatives: NegativeSampling | None
    ) -> bool:
        """Whether no relation has nodes of the type of the seeds."""
        if isinstance(inputs, EdgeSamplerInput):
            if self.graphs:
                return False
            if negatives is not None or self.disjoint:
                raise ValueError("the data has no edges: negatives and disjoint=True need some")
            return True
        ntype = inputs.input_type
        return ntype is not None and all(ntype not in (g.relation[0], g.relation[2]) for g in self.graphs)

    def __reduce__(self) -> tuple[Any, ...]:
        added = {name: value for name, value in vars(self).items() if name not in self._own_names}
        return _remade, (type(self), self._made_of), added


def _alone(inputs: NodeSamplerInput | EdgeSamplerInput) -> Output:
    """The seeds, without neighbors."""

    def sample(seeds: dict[str, torch.Tensor], times: object = None) -> HeteroSamplerOutput:
        return HeteroSamplerOutput(seeds, {}, {}, {})

    if isinstance(inputs, NodeSamplerInput):
        return node_sample(inputs, sample)
    src, _, dst = inputs.input_type
    return edge_sample(inputs, sample, {src: 0, dst: 0}, False)


def _int64(times: PerType) -> PerType:
    if isinstance(times, dict):
        return {ntype: _whole(values) for ntype, values in times.items()}
    return _whole(times)


def _whole(times: torch.Tensor) -> torch.Tensor:
    if times.is_floating_point():  # rounding toward 0 would let later edges pass
        raise TypeError(f"input_time= or edge_label_time= is {times.dtype}: give int64[n]")
    return times.to(torch.int64)


def _modulo(trees: Any, count: int) -> Any:
    return {t: b % count for t, b in trees.items()} if isinstance(trees, dict) else trees % count


def _remade(kind: type[NeighborSampler], made_of: dict[str, Any]) -> NeighborSampler:
    """A sampler of this class, whose own constructor may take other arguments."""
    made = kind.__new__(kind)
    NeighborSampler.__init__(made, **made_of)
    return made


@dataclass(frozen=True)
class Sampling:
    """Arguments of NeighborSampler that loaders pass on. NeighborLoader documents them."""

    num_neighbors: Counts | NumNeighbors
    subgraph_type: Any = "directional"
    replace: bool = False
    disjoint: bool = False
    temporal_strategy: str = "uniform"
    time_attr: str | None = None
    weight_attr: str | None = None
    is_sorted: bool = False
    directed: bool = True

    def changed(self) -> list[str]:
        """The names of arguments that are not their defaults, besides num_neighbors."""
        return [f.name for f in fields(self)[1:] if getattr(self, f.name) != f.default]

    def check(self, divided: bool) -> SubgraphType:
        """The type of subgraph. divided: the edges are divided among ranks. Raises ValueError for values that
        PyG does not have, or that do not work there."""
        kind, strategies = self.subgraph_type, ("uniform", "last")
        if not self.directed:
            warnings.warn("directed=False is deprecated: use subgraph_type='induced'", stacklevel=4)
            kind = "induced"
        if self.temporal_strategy not in strategies:
            raise ValueError(f"temporal_strategy={self.temporal_strategy!r} must be one of {strategies}")
        if self.temporal_strategy != "uniform" and self.time_attr is None:
            raise ValueError(f"temporal_strategy={self.temporal_strategy!r} needs time_attr=")
        known = [t.value for t in SubgraphType]
        if getattr(kind, "value", kind) not in known:
            raise ValueError(f"subgraph_type={kind!r} must be one of {tuple(known)}")
        if divided and SubgraphType(kind) != SubgraphType.directional:
            raise not_for_parts(f"subgraph_type={SubgraphType(kind).value!r}", "no rank has all edges")
        if divided and self.weight_attr is not None:
            raise not_for_parts("weight_attr=", "use gids.NodeLoader with gids.sampler.Neighbor(weights=)")
        if divided and self.time_attr not in (None, STORED):
            cure = f"times that `gids convert` stores do: {STORED!r}"
            raise not_for_parts(f"time_attr={self.time_attr!r}", cure)
        return SubgraphType(kind)


class DatasetOptions(TypedDict, total=False):
    """Arguments that loaders of data in memory do not have."""

    tables: Tables | None
    labels: bool
    seed: int | None
    rank: int | None
    world_size: int | None
    device: str | torch.device
    topology_on: str
    dtype: torch.dtype | None
    minibatch_rows: int | Mapping[str, int] | None


class LoaderOptions(DatasetOptions, total=False):
    """The keyword arguments of gids.pyg's loaders besides those of their signatures."""

    custom_cls: type | None
    input_id: torch.Tensor | None
    batch_size: int | None
    shuffle: bool | None
    drop_last: bool
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Sequence[int]] | None
    generator: torch.Generator | None
    collate_fn: Any
    dataset: Any
    # Of worker processes, which a loader of a dataset on disk does not have:
    num_workers: int
    persistent_workers: bool
    prefetch_factor: int | None
    pin_memory: bool
    pin_memory_device: str
    timeout: float
    multiprocessing_context: Any
    worker_init_fn: Any
    in_order: bool


def check_options(loader: Callable[..., Any], data: object, options: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown name or other data, ValueError for an option that the data excludes."""
    known = [*inspect.signature(loader).parameters, *LoaderOptions.__annotations__]
    check_names(f"gids.pyg.{loader.__name__}", options, known)
    on_disk = is_on_disk(data)
    if not on_disk:
        is_typed(data)  # raises TypeError
    for name, value in options.items():
        if on_disk and name in ("collate_fn", "dataset") and value is not None:
            raise ValueError(
                f"{name}= is not supported: PyG's loaders ignore it; give the seeds as input_nodes or "
                "edge_label_index, and transform=, which is called with each minibatch"
            )
        if not on_disk and name in DatasetOptions.__annotations__:
            raise ValueError(
                f"{name}= needs a dataset on disk, and data is {type(data).__name__}: leave it out, or write "
                "the data by `gids convert`"
            )


def not_for_parts(what: str, why: str) -> ValueError:
    return ValueError(f"{what} does not work with a partitioned dataset ({why})")


def counts_of(num_neighbors: Counts | NumNeighbors, relations: Sequence[Relation] | None) -> Counts:
    """By relation; one list if relations is None, for a homogeneous graph. Raises TypeError, ValueError."""
    values: Any = num_neighbors.values if isinstance(num_neighbors, NumNeighbors) else num_neighbors
    if not isinstance(values, list | tuple) and not (relations is not None and isinstance(values, dict)):
        by_type = "" if relations is None else ", or such lists by edge type"
        raise TypeError(f"num_neighbors={num_neighbors!r}; give a list, a number per hop{by_type}")
    if relations is None:
        return _plain(list(values))
    numbers = num_neighbors if isinstance(num_neighbors, NumNeighbors) else NumNeighbors(num_neighbors)
    return {relation: _plain(hops) for relation, hops in numbers.get_values(list(relations)).items()}


def _plain(hops: Sequence[int]) -> list[int]:
    return [int(n) if isinstance(n, np.integer) else n for n in hops]
