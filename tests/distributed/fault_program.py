"""What ranks do while a test disturbs them. In a module of its own: the processes of ranks import it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from open_options import tuned
from pack_programs import small_packs
from programs import Sage, check_cooperative, check_same

import gids.distributed

SEEDS = torch.arange(0, 900, 3)
Tell = Callable[[Any], None]


def open_loader(dataset: Path, timeout_s: float, *, cooperative: bool = False, **options: Any) -> Any:
    """A loader of more minibatches than the window."""
    source = gids.distributed.open(
        dataset, memory="32MB", window=4, bulk=2, **tuned(options)
    )
    return gids.NodeLoader(
        source, SEEDS, [3, 4], batch_size=4, shuffle=True, cooperative=cooperative, tables=["paper.feat"]
    )


def load(tell: Tell, dataset: Path, timeout_s: float, cooperative: bool, reads: str = "random") -> None:
    """Load until another rank is missing."""
    loader = open_loader(dataset, timeout_s, cooperative=cooperative, reads=reads)
    tell("loading")
    while True:
        for minibatch in loader:
            if cooperative:
                Sage()(minibatch)


def train(tell: Tell, dataset: Path, timeout_s: float) -> None:
    """Train until another rank is missing."""
    model = torch.nn.parallel.DistributedDataParallel(Sage())
    loader = open_loader(dataset, timeout_s)
    tell("loading")
    while True:
        for minibatch in loader:
            out = model(minibatch)
            torch.nn.functional.cross_entropy(out, minibatch.labels).backward()


def leave_early(tell: Tell, dataset: Path, then: str, replicas: int) -> None:
    """Rank 1 leaves the loop after two steps of twenty."""
    loader = open_loader(dataset, 3.0, replicas=replicas)
    for step, _ in enumerate(loader):
        if dist.get_rank() == 1 and step == 1:
            if then == "the end":
                return
            tell("idle")
            time.sleep(1000)


def open_otherwise(dataset: Path, changes: list[dict[str, Any]]) -> list[str]:
    """Rank 1 opens with each of these changes. The errors."""
    errors = []
    for change in changes:
        mine = {"dataset": dataset} | (change if dist.get_rank() == 1 else {})
        loader_options = {"batch_size": mine.pop("batch_size", 4)}
        try:
            with gids.distributed.open(memory="32MB", **tuned(mine)) as source:
                gids.NodeLoader(source, SEEDS, [3], **loader_options)
        except (ValueError, FileNotFoundError, gids.RankError) as error:
            errors.append(str(error))
    return errors


def come_alone(timeout_s: float, dataset: Path) -> str:
    """Rank 1 does not open the dataset."""
    if dist.get_rank() == 1:
        return ""
    try:
        gids.distributed.open(dataset)
    except gids.RankError as error:
        return str(error)
    return "no error"


def read_damaged(
    dataset: Path, whole: Path, shard: Path, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Two epochs. Rank 1's shard has no second half in the first one. By epoch: the steps that failed, and
    why; and the files of these errors. All other minibatches are right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    content, cooperative = shard.read_bytes(), bool(arguments.get("cooperative"))
    plain: dict[str, Any] = {**arguments, "rank": rank, "world_size": size}
    if plain.pop("cooperative", False):
        plain |= {"batch_size": arguments["batch_size"] * size, "rank": 0, "world_size": 1}
    seen: dict[str, Any] = {"errors": [], "files": set()}
    with (
        gids.open(whole, memory="64MB", reads="random") as alone,
        gids.distributed.open(dataset, memory="32MB", **tuned(options)) as source,
        gids.NodeLoader(alone, **plain) as theirs,
        gids.NodeLoader(source, **arguments) as loader,
        small_packs(),
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
                    continue
                if cooperative:
                    check_cooperative(minibatch, expected, alone)
                    minibatch.exchange(0, minibatch.input_nodes)
                else:
                    check_same(minibatch, expected)
            assert next(mine, None) is None
            seen["errors"].append(errors)
    return seen


def drop_after_an_error(dataset: Path, shard: Path) -> tuple[bool, bool]:
    """Leave an epoch at a page that cannot be read: (whether there was one, whether the epoch stays open)."""
    loader, failed = open_loader(dataset, 20.0), False
    os.truncate(shard, shard.stat().st_size // 2)
    gc.collect()
    gc.disable()
    try:
        for _ in loader:
            pass
    except gids.StorageError:
        failed = True
    finally:
        gc.enable()
    return failed, loader.feature_loader.has_open_epoch


def raise_between_exchanges(tell: Tell, dataset: Path) -> None:
    """Rank 2 fails in the forward pass of the fourth minibatch."""
    loader = open_loader(dataset, 3.0, cooperative=True)
    for step, minibatch in enumerate(loader):
        h = minibatch.exchange(0, minibatch.features["paper.feat"])
        if dist.get_rank() == 2 and step == 3:
            raise ArithmeticError("the loss is not finite")
        minibatch.exchange(1, h[: minibatch.blocks[0].num_dst])
