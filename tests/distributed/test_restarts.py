"""torchrun starts all ranks again when one is killed: they end with the weights of an undisturbed run.

`torchrun test_restarts.py DATASET FOLDER KILLS SEED` trains with DDP and checkpoints.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs import Sage
from rank_pool import RankPool

import gids.distributed

RANKS, KILLS, EPOCHS, EVERY = 2, 1, 2, 4
SEEDS = torch.arange(0, 900, 3)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
TORCHRUN += [f"--max-restarts={KILLS}", f"--nproc-per-node={RANKS}", __file__]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(Path(__file__).parents[1]),
    # torchrun's own store outlives the ranks, and torch 2.13 takes the addresses of ended ranks from it.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def train(dataset: Path, folder: Path, kills: int, seed: int) -> None:
    """Saves the weights of rank 0 as FOLDER/weights.pt, and a line for each start in FOLDER/starts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    start, rng = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), random.Random(seed)
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


@pytest.mark.slow
def test_killed_ranks_go_on_with_the_checkpoint(cited_parts: Path, ranks: RankPool, tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    ranks.run(RANKS, train, cited_parts, undisturbed, 0, 0)
    command = [*TORCHRUN, cited_parts, killed, str(KILLS), os.environ.get("GIDS_SEED", "0")]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    starts = [[int(n) for n in line.split()] for line in (killed / "starts").read_text().splitlines()]
    assert [start for start, _, _ in starts] == list(range(KILLS + 1))
    assert max(step for _, _, step in starts) > 0, "some start went on in the middle of an epoch"
    weights, expected = (torch.load(folder / "weights.pt") for folder in (killed, undisturbed))
    assert list(weights) == list(expected)
    for name, values in expected.items():
        assert torch.equal(weights[name], values), name


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    dist.destroy_process_group()
