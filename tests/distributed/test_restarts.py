"""torchrun starts all ranks again when one is killed: they go on with the minibatches of an undisturbed run.

`torchrun test_restarts.py DATASET FOLDER KILLS SEED` loads, and saves checkpoints.
"""

from __future__ import annotations

import json
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
from rank_pool import RankPool

import gids.distributed

RANKS, KILLS, EPOCHS, EVERY = 2, 1, 2, 4
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
TORCHRUN += [f"--max-restarts={KILLS}", f"--nproc-per-node={RANKS}", __file__]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(Path(__file__).parents[1]),
    # torchrun's own store outlives the ranks, and torch 2.13 takes the addresses of ended ranks from it.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def load(dataset: Path, folder: Path, kills: int, seed: int) -> None:
    """Writes a line for each minibatch of this rank: the start, epoch, step and seeds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    start, rng = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), random.Random(seed)
    checkpoint, done = folder / "checkpoint.json", 0
    with (
        gids.distributed.open(dataset, memory="32MB", window=4) as source,
        (folder / str(rank)).open("a") as log,
    ):
        seeds = torch.arange(0, 900, 3)
        loader = gids.NodeLoader(source, seeds, [3, 4], batch_size=5, shuffle=True, seed=0)
        # Each start but the last one ends at a random step after the checkpoint.
        ends = [(rng.randrange(size), rng.randrange(1, len(loader) // 2)) for _ in range(kills)]
        if checkpoint.exists():
            loader.load_state_dict(json.loads(checkpoint.read_text()))
        while loader.epoch < EPOCHS:
            for minibatch in loader:
                if start < kills and ends[start] == (rank, done):
                    os.kill(os.getpid(), signal.SIGKILL)
                line = [start, minibatch.epoch, minibatch.step, minibatch.seeds.tolist()]
                print(json.dumps(line), file=log, flush=True)
                dist.barrier()  # as gradients
                done += 1
                if rank == 0 and done % EVERY == 0:
                    new = checkpoint.with_suffix(".new")
                    new.write_text(json.dumps(loader.state_dict()))
                    new.replace(checkpoint)


def minibatches(folder: Path, rank: int) -> list[list[object]]:
    return [json.loads(line) for line in (folder / str(rank)).read_text().splitlines()]


@pytest.mark.slow
def test_killed_ranks_go_on_with_the_checkpoint(cited_parts: Path, ranks: RankPool, tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    ranks.run(RANKS, load, cited_parts, undisturbed, 0, 0)
    command = [*TORCHRUN, cited_parts, killed, str(KILLS), os.environ.get("GIDS_SEED", "0")]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        expected = {(epoch, step): seeds for _, epoch, step, seeds in minibatches(undisturbed, rank)}
        found = minibatches(killed, rank)
        assert [seeds for _, epoch, step, seeds in found] == [expected[e, s] for _, e, s, _ in found]
        assert {(epoch, step) for _, epoch, step, _ in found} == set(expected)
        assert next(step for start, _, step, _ in found if start) > 0, "it went on in the middle of an epoch"


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    load(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    dist.destroy_process_group()
