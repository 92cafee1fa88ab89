"""Loaders of a path, with the options of gids.open(), gids.Tuning and the loader in one dictionary."""

from __future__ import annotations

from typing import Any

from open_options import take_options

import gids


def feature_loader(path: Any, tables: Any, **options: Any) -> gids.FeatureLoader:
    return gids.FeatureLoader(gids.open(path, **take_options(options)), tables, **options)


def node_loader(path: Any, seeds: Any, sampler: Any, **options: Any) -> gids.NodeLoader:
    """With seed=0 by default."""
    options.setdefault("seed", 0)
    return gids.NodeLoader(gids.open(path, **take_options(options)), seeds, sampler, **options)


def edge_loader(path: Any, edges: Any, sampler: Any, **options: Any) -> gids.EdgeLoader:
    """With seed=0 by default."""
    options.setdefault("seed", 0)
    return gids.EdgeLoader(gids.open(path, **take_options(options)), edges, sampler, **options)
