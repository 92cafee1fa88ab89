"""The nodes on the hottest pages of a table. Called by users, for gids.sampler.LocalityBias."""

from __future__ import annotations

import numpy as np
import torch

from gids import _core
from gids.cache import page_heat
from gids.store import FeatureStore
from gids.store.part import refuse_part


def hottest_nodes(store: FeatureStore, table: str, cache_bytes: int, *, method: str = "auto") -> torch.Tensor:
    """The nodes with rows on the hottest pages of a table that fit in cache_bytes.

    A cache of this size with policy="static" converges to these pages, if it has no other table. table: a
    table of nodes, such as "paper.feat". method: the heat to use; "auto": the best that is stored, as in
    gids.FeatureLoader. Returns bool[num_nodes] on the CPU. The result depends only on the dataset, so
    minibatches that depend on it are reproducible.

    Raises MissingError for an unknown table or heat, ValueError for a table of edges or a negative size.
    """
    refuse_part(store, "gids.heat.hottest_nodes")
    stored = store.table(table)
    if not isinstance(stored.type, str):
        raise ValueError(f"{table} is a table of edges, which have no heat: give a table of nodes")
    if cache_bytes < 0:
        raise ValueError(f"cache_bytes={cache_bytes}; it must be 0 or more")
    methods = store.heat_methods(stored.type)
    heat = page_heat(
        store.heat(methods[0] if method == "auto" and methods else method, stored.type),
        stored.rows_per_page,
        stored.order,
    )
    fit = cache_bytes // (stored.page_bytes + _core.LINE_METADATA_BYTES)
    held = np.zeros(len(heat), np.bool_)
    held[np.argsort(255 - heat, kind="stable")[:fit]] = True
    return torch.from_numpy(stored.rows_of_pages(held))
