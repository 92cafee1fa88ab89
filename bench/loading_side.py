"""One side of bench/loading.py cold, in its own process, which begins without features in the page cache."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from loading import Loading

from gids.bench.isolation import cached_share
from gids.io import drop_page_cache
from gids.store import FeatureStore

MOST_CACHED = 0.01


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Read the minibatches. Raises OSError if more than 1 % of the features stays in the page cache."""
    loading = Loading(FeatureStore(config["dataset"]), SimpleNamespace(**config["args"]))
    for path in loading.paths:
        drop_page_cache(path)
    cached = max(map(cached_share, loading.paths))
    if cached > MOST_CACHED:
        raise OSError(
            f"{cached:.0%} of the features are in the page cache, and cannot be dropped: give a --dir on a "
            "disk, and let no other process map its files"
        )
    if config["mapped"]:
        run = loading.mapped(random_access=config["mapped"] == "random")
    else:
        run = loading.run(memory=config["args"]["memory"], window=config["window"])
    return asdict(run) | {"cached": cached}
