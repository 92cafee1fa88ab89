"""What ranks do in tests. In a module of its own: the processes of ranks import it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gids.distributed
from gids.sampler import Minibatch
from datasets import same_bits


def differences(mine: Any, theirs: Any, where: str = "minibatch") -> list[str]:
    """Where two minibatches, or parts of them, are not equal bit for bit."""
    if isinstance(theirs, torch.Tensor):
        return [] if isinstance(mine, torch.Tensor) and same_bits(mine, theirs) else [f"{where}: {mine} {theirs}"]
    if isinstance(theirs, Mapping):
        if not isinstance(mine, Mapping) or list(mine) != list(theirs):
            return [f"{where}: {list(mine)} {list(theirs)}"]
        return [d for key, value in theirs.items() for d in differences(mine[key], value, f"{where}[{key!r}]")]
    if isinstance(theirs, list):
        if len(mine) != len(theirs):
            return [f"{where}: {len(mine)} {len(theirs)}"]
        return [d for i, value in enumerate(theirs) for d in differences(mine[i], value, f"{where}[{i}]")]
    if isinstance(theirs, gids.sampler.Block):
        names = ("relation", "indptr", "indices", "edge_ids", "weights", "num_src")
        return [d for n in names for d in differences(getattr(mine, n), getattr(theirs, n), f"{where}.{n}")]
    if isinstance(theirs, Minibatch):
        names = ("seeds", "input_nodes", "blocks", "epoch", "step", "features", "labels", "batch", "times")
        return [d for n in names for d in differences(getattr(mine, n), getattr(theirs, n), f"{where}.{n}")]
    return [] if mine == theirs else [f"{where}: {mine!r} {theirs!r}"]


def compare_with_one_process(
    dataset: Path, whole: Path, kind: str, arguments: Mapping[str, Any], options: Mapping[str, Any], epochs: int
) -> dict[str, Any]:
    """Each rank's minibatches, and those that a loader of the whole dataset gives this rank."""
    make = getattr(gids, kind)
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = gids.distributed.open(dataset, memory="64MB", timeout=30, **options)
    count = 0
    with shared, gids.open(whole, memory="64MB", reads="random") as alone:
        with make(shared, **arguments) as mine, make(alone, rank=rank, world_size=size, **arguments) as theirs:
            assert len(mine) == len(theirs)
            for _ in range(epochs):
                for a, b in zip(mine, theirs, strict=True):
                    found = differences(a, b)
                    assert not found, found[:5]
                    count += 1
            stats = mine.stats()
    return {"minibatches": count, "stats": stats}
