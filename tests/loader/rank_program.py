"""What each rank of test_torchrun.py does: `torchrun rank_program.py DATASET FOLDER`. Saves what it saw."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gids
import gids.pyg
from gids.loader.ranks import local_ranks

RELATION = ("paper", "cites", "paper")
BATCH_SIZE = 20


def seeds_of_steps(loader: Any) -> list[list[int]]:
    """Of two epochs. The ranks meet at every step, as gradients do, so that unequal steps would hang."""
    seen = []
    for _ in range(2):
        for minibatch in loader:
            seen.append(minibatch.seeds.tolist())
            dist.all_reduce(torch.zeros(1))
    return seen


def error_of(make: Any) -> str:
    try:
        make().close()
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    path, folder = map(Path, sys.argv[1:])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seeds = torch.arange(0, 611, 3)
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "tables": []}
    saw: dict[str, Any] = {"local_ranks": local_ranks()}

    with gids.NodeLoader(path, seeds, [3, 4], **options) as loader:
        saw["nodes"] = seeds_of_steps(loader)
    with gids.NodeLoader(path, seeds, [3, 4], **options) as loader:
        epoch = iter(loader)
        for _ in range(3):
            next(epoch)
        saw["state"] = loader.state_dict()
    with gids.NodeLoader(path, seeds, [3, 4], **options) as loader:
        loader.load_state_dict(saw["state"])
        saw["resumed"] = seeds_of_steps(loader)
    edges = torch.stack([torch.arange(211), torch.arange(211)])
    with gids.EdgeLoader(path, edges, [3, 4], relation=RELATION, **options) as edge_loader:
        saw["pairs"] = [minibatch.seeds[minibatch.pairs].tolist() for minibatch in edge_loader]
    with gids.pyg.NeighborLoader(path, [4, 3], seeds, **options) as pyg_loader:
        saw["pyg"] = [(data.input_id.tolist(), data.n_id[: data.batch_size].tolist()) for data in pyg_loader]
    with gids.NodeLoader(path, seeds, [3, 4], rank=0, world_size=1, **options) as loader:
        saw["unshared"] = len(loader)
    if rank == 0:  # the others make none
        with gids.NodeLoader(path, seeds, [3, 4], rank=0, world_size=1, **options) as loader:
            saw["alone"] = sum(len(minibatch.seeds) for minibatch in loader)
    parts = seeds.tensor_split(world_size)
    saw["split by hand"] = error_of(lambda: gids.NodeLoader(path, parts[rank], [3, 4], **options))
    saw["other seed"] = error_of(lambda: gids.NodeLoader(path, seeds, [3, 4], seed=rank, **options))

    torch.save(saw, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
