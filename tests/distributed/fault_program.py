"""What ranks do while a test disturbs them. In a module of its own: the processes of ranks import it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from open_options import tuned
from programs import Sage, check_cooperative, check_same

import gids.distributed

SEEDS = torch.arange(0, 900, 3)
Tell = Callable[[Any], None]


def load(tell: Tell, dataset: Path, cooperative: bool) -> None:
    """Load until another rank is missing. There are more minibatches than the window."""
    source = gids.distributed.open(dataset, memory="32MB", window=4, bulk=2)
    options: dict[str, Any] = {"batch_size": 4, "cooperative": cooperative, "tables": ["paper.feat"]}
    loader = gids.NodeLoader(source, SEEDS, [3, 4], shuffle=True, **{"seed": 0} | options)
    tell("loading")
    while True:
        for minibatch in loader:
            if cooperative:
                Sage()(minibatch)


def make_no_loader(_: Tell, dataset: Path) -> None:
    """Rank 1 makes no loader, and does not end."""
    if dist.get_rank() == 1:
        time.sleep(1000)
    gids.NodeLoader(dataset, SEEDS, [3], seed=0)


def read_damaged(
    dataset: Path, whole: Path, shard: Path, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Two epochs. Rank 1's shard has no second half in the first one, which an error ends. By epoch: the step
    that failed, and why; and the files of these errors. All minibatches before it are right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    content, cooperative = shard.read_bytes(), bool(arguments.get("cooperative"))
    plain: dict[str, Any] = {**arguments, "rank": rank, "world_size": size}
    if plain.pop("cooperative", False):
        plain |= {"batch_size": arguments["batch_size"] * size, "rank": 0, "world_size": 1}
    seen: dict[str, Any] = {"errors": [], "files": set()}
    with (
        gids.open(whole, memory="64MB", reads="random") as alone,
        gids.distributed.open(dataset, memory="32MB", **tuned(options)) as source,
        gids.NodeLoader(alone, **{"seed": 0} | plain) as theirs,
        gids.NodeLoader(source, **{"seed": 0} | arguments) as loader,
    ):
        for epoch in range(2):
            dist.barrier()
            if rank == 1:
                with shard.open("r+b") as file:
                    file.truncate(len(content) // 2) if epoch == 0 else file.write(content)
            dist.barrier()
            errors, mine = [], iter(loader)
            for step, expected in enumerate(theirs):
                try:
                    minibatch = next(mine)
                except gids.StorageError as error:
                    errors.append((step, str(error)))
                    seen["files"].add(error.filename)
                    assert loader.state_dict()["step"] == step
                    break
                if cooperative:
                    check_cooperative(minibatch, expected, alone)
                    minibatch.exchange(0, minibatch.input_nodes)
                else:
                    check_same(minibatch, expected)
            if errors:
                try:
                    next(mine)
                except RuntimeError as error:
                    errors.append((None, str(error)))
            else:
                assert next(mine, None) is None
            seen["errors"].append(errors)
    return seen
