"""One side of bench/epoch.py, in its own process: gids.bench.dgl_side, with the stages of loading."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

from gids.bench import dgl_side

import dgl  # isort: skip  # after gids.dgl


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    return with_stages(lambda: dgl_side.run(values))


def with_stages(train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of train(), the fields of an EpochResult, with "sampling" and "aggregation" in its stages.

    The loader of gids reports both. Of stock DGL, aggregation is the time in which it fetches columns, rows
    and labels, and sampling is the rest of what training waits for the loader.
    """
    fetch, fetching = dgl.frame.Column.fetch, 0.0

    def timed(*args: Any, **options: Any) -> Any:
        nonlocal fetching
        begun = time.perf_counter()
        try:
            return fetch(*args, **options)
        finally:
            fetching += time.perf_counter() - begun

    with patch.object(dgl.frame.Column, "fetch", timed):
        result = train()
    stages = result["stages"]
    sampling = stages["loading"] - fetching
    if seconds := result["loader"].get("seconds"):
        sampling = min(seconds["sample"], stages["loading"])
    stages |= {"sampling": sampling, "aggregation": stages["loading"] - sampling}
    return result
