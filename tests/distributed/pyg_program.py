"""What each rank of test_pyg_parts.py runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from open_options import tuned
from programs import differences

import gids.distributed
import gids.pyg


def compare_loaders(
    dataset: Path, whole: Path, kind: str, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> int:
    """Each rank's minibatches, and those that a loader of the whole dataset gives this rank."""
    make = getattr(gids.pyg, kind)
    given = {"shuffle": True, **arguments}
    shares = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    count = 0
    with (
        gids.distributed.open(dataset, memory="64MB", timeout=30, **tuned(options)) as shared,
        gids.open(whole, memory="64MB", reads="random") as alone,
        make(shared, **given) as mine,
        make(alone, **shares, **given) as theirs,
    ):
        for a, b in zip(mine, theirs, strict=True):
            found = differences(a.to_dict(), b.to_dict())
            assert not found, found[:5]
            count += 1
        if options.get("reads") == "pack":
            assert mine.stats()["packs"]["minibatches"] == count
    return count


def call_by_itself(dataset: Path) -> None:
    with (
        gids.distributed.open(dataset, memory="64MB", timeout=30) as shared,
        gids.pyg.NeighborLoader(shared, [2], input_nodes=[1, 2]) as loader,
    ):
        loader([0])


def fail_while_sampling(dataset: Path, after: int, tables: list[str] | None) -> tuple[int, str]:
    """Rank 1 fails in transform_sampler_output=. The number of minibatches, and the error."""
    calls, count = 0, 0

    def transform(output: Any) -> Any:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 1 and calls > after:
            raise ArithmeticError("no such number")
        return output

    with (
        gids.distributed.open(dataset, memory="64MB", timeout=20) as shared,
        gids.pyg.NeighborLoader(
            shared,
            [3, 2],
            input_nodes=torch.arange(120),
            batch_size=4,
            transform_sampler_output=transform,
            tables=tables,
        ) as loader,
    ):
        try:
            for _ in loader:
                count += 1
        except Exception as error:
            return count, f"{type(error).__name__}: {error}"
    return count, "no error"
