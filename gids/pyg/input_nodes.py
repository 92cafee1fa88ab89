"""Parses PyG's input_nodes for a store. Called by NeighborLoader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gids.pyg.attributes import is_homogeneous
from gids.store import FeatureStore

Nodes = torch.Tensor | Sequence[int] | None
InputNodes = Nodes | str | tuple[str, Nodes]


class Seeds(NamedTuple):
    """ntype: None for a homogeneous dataset. ids: int64[n]. input_ids: PyG's input_id of each node; None if
    it is its position among ids.
    """

    ntype: str | None
    ids: torch.Tensor
    input_ids: torch.Tensor | None


def input_nodes_of(store: FeatureStore, nodes: InputNodes) -> Seeds:
    """Raises TypeError, ValueError and KeyError for input_nodes that do not fit the store."""
    ntype: str | None = None
    given: Any = nodes
    if isinstance(nodes, str):
        ntype, given = nodes, None
    elif isinstance(nodes, tuple | list) and len(nodes) == 2 and isinstance(nodes[0], str):
        ntype, given = nodes
    elif not is_homogeneous(store):
        raise ValueError(
            f"input_nodes of {store.name} must be a node type, or (node type, nodes): it has "
            f"{len(store.node_types)} node types and {len(store.relations)} edge types"
        )
    count = store.num_nodes(ntype)
    if given is None:
        return Seeds(ntype, torch.arange(count), None)
    ids = torch.as_tensor(given, dtype=None if len(given) else torch.int64)
    if ids.dtype == torch.bool:
        if ids.shape != (count,):
            raise ValueError(f"input_nodes is bool{list(ids.shape)}; a mask is bool[{count}], one per node")
        chosen = ids.cpu().nonzero().view(-1)
        return Seeds(ntype, chosen, chosen)
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"input_nodes is {ids.dtype} of shape {list(ids.shape)}; give int64[n] or a mask")
    return Seeds(ntype, ids.to("cpu", torch.int64), None)
