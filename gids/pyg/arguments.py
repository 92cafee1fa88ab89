"""PyG's arguments: which there are, and the checks that loaders and samplers share. Called by both."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import numpy as np
import torch
from torch_geometric.sampler import NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from gids.loader.options import check_names
from gids.loader.tables import Tables
from gids.pyg.hops import Counts
from gids.pyg.memory_graphs import is_typed
from gids.pyg.sampling_attributes import STORED
from gids.pyg.stores import is_on_disk
from gids.store.names import Relation


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
