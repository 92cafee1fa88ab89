"""Checks of PyG's arguments that gids' classes share. Called by gids.pyg's classes."""

from __future__ import annotations

import warnings
from typing import Any

from torch_geometric.sampler.base import SubgraphType

from gids.pyg.times import STORED

_STRATEGIES = ("uniform", "last")

NO_EFFECT = (
    "num_workers",
    "persistent_workers",
    "prefetch_factor",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "multiprocessing_context",
    "worker_init_fn",
    "in_order",
)
"""Arguments of torch's DataLoader about worker processes. A loader of a dataset on disk has none."""

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
    """The type of subgraph. Raises ValueError for values that PyG does not have or gids does not support."""
    if not directed:
        warnings.warn("directed=False is deprecated: use subgraph_type='induced'", stacklevel=4)
        subgraph_type = "induced"
    if sample_direction != "forward":
        raise ValueError(
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


def not_for_parts(what: str, why: str) -> ValueError:
    return ValueError(f"{what} does not work with a partitioned dataset ({why})")


def refuse_arguments(given: dict[str, Any]) -> None:
    """Remove the arguments that loaders of datasets on disk take with one value only. Raises ValueError."""
    for name, cure in _REFUSED.items():
        if given.pop(name, None) is not None:
            raise ValueError(f"{name}= is not supported: {cure}")
    for name in NO_EFFECT:
        given.pop(name, None)
