"""`torchrun restart_program.py DATASET FOLDER KILLS SEED`: train with DDP and checkpoints. Ranks are killed.

Saves the weights of rank 0 as FOLDER/weights.pt, and a line for each start in FOLDER/starts.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from fault_program import SEEDS
from programs import Sage

import gids.distributed

EPOCHS, EVERY = 2, 4


def main() -> None:
    dataset, folder = map(Path, sys.argv[1:3])
    kills, seed = map(int, sys.argv[3:])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    start, rng = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), random.Random(seed)
    checkpoint = folder / "checkpoint.pt"
    with gids.distributed.open(dataset, memory="32MB", window=4) as source:
        loader = gids.NodeLoader(source, SEEDS, [3, 4], batch_size=5, shuffle=True, seed=0)
        # Each start but the last one ends at a random step after the checkpoint.
        ends = [(rng.randrange(size), rng.randrange(1, len(loader) // 2)) for _ in range(kills)]
        model = torch.nn.parallel.DistributedDataParallel(Sage())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        saved = {"model": model, "optimizer": optimizer, "loader": loader}
        if checkpoint.exists():
            for name, state in torch.load(checkpoint).items():
                saved[name].load_state_dict(state)
        done = 0
        if rank == 0:
            with (folder / "starts").open("a") as file:
                at = loader.state_dict()
                print(start, at["epoch"], at["step"], file=file)
        while loader.epoch < EPOCHS:
            for minibatch in loader:
                if start < kills and ends[start] == (rank, done):
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = torch.nn.functional.cross_entropy(model(minibatch), minibatch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                if rank == 0 and done % EVERY == 0:
                    new = checkpoint.with_suffix(".new")
                    torch.save({name: of.state_dict() for name, of in saved.items()}, new)
                    new.replace(checkpoint)
    if rank == 0:
        torch.save(model.module.state_dict(), folder / "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
