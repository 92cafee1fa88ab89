"""PyG's arguments: which there are, and the checks that loaders and samplers share. Called by both."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch_geometric.sampler import NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from gids.loader.option_names import check_names
from gids.loader.tables import Tables
from gids.pyg.hops import Counts
from gids.pyg.memory_graphs import is_typed
from gids.pyg.sampling_attributes import STORED
from gids.store.names import Relation

_STRATEGIES = ("uniform", "last")

SAMPLING = {
    "subgraph_type": "directional",
    "replace": False,
    "disjoint": False,
    "temporal_strategy": "uniform",
    "time_attr": None,
    "weight_attr": None,
    "is_sorted": False,
    "directed": True,
}
"""Arguments of NeighborSampler that loaders pass on, besides num_neighbors, and their defaults."""


class TorchOptions(TypedDict, total=False):
    """Arguments of PyG's and torch's base classes, by keyword."""

    custom_cls: type | None
    input_id: torch.Tensor | None
    batch_size: int | None
    shuffle: bool | None
    drop_last: bool
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Sequence[int]] | None
    generator: torch.Generator | None


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


class WorkerOptions(TypedDict, total=False):
    """Arguments of torch's DataLoader about worker processes. A loader of a dataset on disk has none."""

    num_workers: int
    persistent_workers: bool
    prefetch_factor: int | None
    pin_memory: bool
    pin_memory_device: str
    timeout: float
    multiprocessing_context: Any
    worker_init_fn: Any
    in_order: bool


class LoaderOptions(TorchOptions, DatasetOptions, WorkerOptions, total=False):
    """The keyword arguments of gids.pyg's loaders besides those of their signatures."""

    collate_fn: Any
    dataset: Any


_REFUSED = {
    "collate_fn": "PyG's loaders ignore it; give transform=, which is called with each minibatch",
    "dataset": "PyG's loaders ignore it; give the seeds as input_nodes or edge_label_index",
}


def check_sampling(
    subgraph_type: Any,
    directed: bool,
    temporal_strategy: str,
    time_attr: str | None,
    sample_direction: str = "forward",
) -> SubgraphType:
    """The type of subgraph. Raises ValueError for values that PyG does not have, and NotImplementedError for
    sample_direction="backward".
    """
    if not directed:
        warnings.warn("directed=False is deprecated: use subgraph_type='induced'", stacklevel=4)
        subgraph_type = "induced"
    if sample_direction != "forward":
        raise NotImplementedError(
            f"sample_direction={sample_direction!r} is not supported, only 'forward': the topology is stored "
            "by destination; sample from a graph with reversed edges instead"
        )
    if temporal_strategy not in _STRATEGIES:
        raise ValueError(f"temporal_strategy={temporal_strategy!r} must be one of {_STRATEGIES}")
    if temporal_strategy != "uniform" and time_attr is None:
        raise ValueError(f"temporal_strategy={temporal_strategy!r} needs time_attr=")
    try:
        return SubgraphType(subgraph_type)
    except ValueError:
        known = tuple(t.value for t in SubgraphType)
        raise ValueError(f"subgraph_type={subgraph_type!r} must be one of {known}") from None


def check_for_parts(subgraph_type: SubgraphType, time_attr: str | None, weight_attr: str | None) -> None:
    """Raise ValueError for arguments that do not work where the edges are divided among ranks."""
    if subgraph_type != SubgraphType.directional:
        raise not_for_parts(f"subgraph_type={subgraph_type.value!r}", "no rank has all edges")
    if weight_attr is not None:
        raise not_for_parts("weight_attr=", "use gids.NodeLoader with gids.sampler.Neighbor(weights=)")
    if time_attr not in (None, STORED):
        raise not_for_parts(f"time_attr={time_attr!r}", f"times that `gids convert` stores do: {STORED!r}")


def options_on_disk(loader: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of DatasetLoader among those of a loader.

    Raises TypeError for an unknown name, ValueError for an argument that is not supported.
    """
    _check_known(loader, options)
    for name, cure in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"{name}= is not supported: {cure}")
    taken = TorchOptions.__annotations__ | DatasetOptions.__annotations__
    return {name: value for name, value in options.items() if name in taken}


def options_in_memory(
    loader: Callable[..., Any], data: object, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The keyword arguments for PyG's loader.

    Raises TypeError for an unknown name, ValueError for an argument that only loaders of datasets have.
    """
    _check_known(loader, options)
    is_typed(data)  # raises TypeError for other data
    for name in options:
        if name in DatasetOptions.__annotations__:
            raise ValueError(
                f"{name}= needs a dataset on disk, and data is {type(data).__name__}: leave it out, or write "
                "the data by `gids convert`"
            )
    return options


def _check_known(loader: Callable[..., Any], options: Mapping[str, Any]) -> None:
    known = [*inspect.signature(loader).parameters, *LoaderOptions.__annotations__]
    check_names(f"gids.pyg.{loader.__name__}", options, known)


def not_for_parts(what: str, why: str) -> ValueError:
    return ValueError(f"{what} does not work with a partitioned dataset ({why})")


def counts_of(num_neighbors: Counts | NumNeighbors, relations: Sequence[Relation] | None) -> Counts:
    """By relation; one list if relations is None, for a homogeneous graph. Raises TypeError, ValueError."""
    if relations is None:
        hops = num_neighbors.values if isinstance(num_neighbors, NumNeighbors) else num_neighbors
        if not isinstance(hops, list | tuple):
            raise TypeError(
                f"num_neighbors={num_neighbors!r}; with one edge type give a list, a number per hop"
            )
        return _plain(hops)
    if not isinstance(num_neighbors, NumNeighbors | list | tuple | dict):
        raise TypeError(
            f"num_neighbors={num_neighbors!r}; give a list, a number per hop, or such lists by edge type"
        )
    numbers = num_neighbors if isinstance(num_neighbors, NumNeighbors) else NumNeighbors(num_neighbors)
    return {relation: _plain(hops) for relation, hops in numbers.get_values(list(relations)).items()}


def _plain(hops: Sequence[int]) -> list[int]:
    return [int(n) if isinstance(n, np.integer) else n for n in hops]
