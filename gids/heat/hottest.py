"""The nodes that a cache of the hottest pages holds. Called by users, for gids.sampler.LocalityBias."""

from __future__ import annotations

import numpy as np
import torch

from gids import _core
from gids.cache import page_heat
from gids.store import FeatureStore


def hottest_nodes(store: FeatureStore, table: str, cache_bytes: int, *, method: str = "auto") -> torch.Tensor:
    """Nodes whose rows lie on the hottest pages of a table that fit into cache_bytes; of pages equally hot,
    the first. That is what a cache with policy="static" comes to hold, if the table has it alone.

    table: of nodes, such as "paper.feat". method: of heat; "auto" takes the best that is stored, as
    gids.FeatureLoader does. Returns bool[num_nodes] on the CPU, known before anything was read, so that
    minibatches that depend on it can be had again.

    Raises KeyError for a table or heat that the store does not have, ValueError for a table of edges and for
    a negative size.
    """
    found = store.table(table)
    if not isinstance(found.type, str):
        raise ValueError(f"{table} has rows of edges, which have no heat; name a table of nodes")
    if cache_bytes < 0:
        raise ValueError(f"cache_bytes={cache_bytes} is negative; give a number of bytes")
    methods = store.heat_methods(found.type)
    heat = page_heat(
        store.heat(methods[0] if method == "auto" and methods else method, found.type),
        found.rows_per_page,
        found.order,
    )
    fit = cache_bytes // (found.page_bytes + _core.LINE_METADATA_BYTES)
    held = np.zeros(len(heat), np.bool_)
    held[np.argsort(255 - heat, kind="stable")[:fit]] = True
    return torch.from_numpy(found.rows_of_pages(held))
