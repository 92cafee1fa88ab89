"""Ranks that end, stall or fail: an error on every other rank, at the time-out of the process group at the
latest."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from open_options import tuned
from partition_example import PAPERS, Datasets
from programs import check_same, error_of
from rank_pool import RankPool

import gids.distributed
from gids.store.part import part_name


def lose_the_last_rank(dataset: Path, number: int, after: int | None) -> str:
    """The error of a rank, where the last one sends itself a signal after some minibatches, or without making
    a loader."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with gids.distributed.open(dataset, memory="32MB", window=4, bulk=2) as source:
        if is_last and after is None:
            os.kill(os.getpid(), number)

        def load() -> None:
            loader = gids.NodeLoader(source, torch.arange(0, 900, 3), [3, 4], batch_size=4, seed=0)
            for step, _ in enumerate(loader):
                if is_last and step == after:
                    os.kill(os.getpid(), number)

        return error_of(load)


@pytest.mark.parametrize(("number", "after"), [(signal.SIGKILL, 5), (signal.SIGSTOP, None)])
def test_a_rank_that_ends_or_makes_no_loader_ends_the_others(
    cited_parts: Path, ranks: RankPool, number: int, after: int | None
) -> None:
    errors = ranks.run(2, lose_the_last_rank, cited_parts, number, after, lost=1, timeout_s=3)
    assert errors[0].startswith("RankError: an exchange with the other ranks failed")
    assert "within the timeout= of init_process_group()" in errors[0]


def read_damaged(dataset: Path, whole: Path, shard: Path, replicas: int) -> list[tuple[int, str, str, str]]:
    """Two epochs; rank 1's shard has no second half in the first one. All minibatches before the error are
    right. Returns the step of each error, its text and file, and what comes after it."""
    rank, content, found = dist.get_rank(), shard.read_bytes(), list[tuple[int, str, str, str]]()
    given: dict[str, Any] = {"seeds": torch.arange(0, PAPERS, 10), "sampler": [1], "tables": ["paper.long"]}
    given |= {"batch_size": 2 // replicas, "seed": 0}
    options = tuned({"queue_depth": 16, "cache": 0, "replicas": replicas})
    with (
        gids.open(whole, memory="64MB", reads="random") as alone,
        gids.distributed.open(dataset, memory="32MB", **options) as source,
        gids.NodeLoader(alone, **given, rank=rank, world_size=dist.get_world_size()) as theirs,
        gids.NodeLoader(source, **given) as loader,
    ):
        for epoch in range(2):
            dist.barrier()
            if rank == 1:
                with shard.open("r+b") as file:
                    file.truncate(len(content) // 2) if epoch == 0 else file.write(content)
            dist.barrier()
            mine = iter(loader)
            for step, expected in enumerate(theirs):
                try:
                    minibatch = next(mine)
                except gids.StorageError as error:
                    assert loader.state_dict()["step"] == step
                    found.append((step, str(error), str(error.filename), error_of(partial(next, mine))))
                    break
                check_same(minibatch, expected)
    return found


@pytest.mark.parametrize(("size", "replicas"), [(3, 1), (4, 2)])
def test_a_failed_read_ends_the_epoch_on_every_rank(
    rich: Datasets, ranks: RankPool, size: int, replicas: int
) -> None:
    """In every column: a rank that trained the step, which others do not, would wait for their gradients."""
    parts = rich.parts(size // replicas)
    shard = parts / part_name(1) / "tables/paper.long/shard-00.bin"
    found = ranks.run(size, read_damaged, parts, rich.whole, shard, replicas)
    for rank, of_rank in enumerate(found):
        [(step, message, file, later)] = of_rank
        assert step == found[0][0][0]
        assert file == str(shard)
        assert replicas > 1 or ("rank 1" in message) == (rank != 1)
        assert "ended this epoch" in later
