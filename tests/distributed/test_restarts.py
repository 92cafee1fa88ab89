"""torchrun starts all ranks again when one is killed: they end with the weights of an undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import run_ranks

from gids.write.partition import partition

PROGRAM = Path(__file__).with_name("restart_program.py")
RANKS, KILLS = 2, 1
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
TORCHRUN += [f"--max-restarts={KILLS}", f"--nproc-per-node={RANKS}"]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # torchrun's own store outlives the ranks, and torch 2.13 takes the addresses of ended ranks from it.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def result(folder: Path) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """The weights, and (start, epoch, step) of each start."""
    starts = [[int(n) for n in line.split()] for line in (folder / "starts").read_text().splitlines()]
    return torch.load(folder / "weights.pt"), starts


@pytest.mark.slow
def test_killed_ranks_go_on_with_the_checkpoint(cited: Path, tmp_path: Path) -> None:
    partition(cited, tmp_path / "parts", RANKS)
    words = [str(PROGRAM), str(tmp_path / "parts")]
    folders = [tmp_path / "undisturbed", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    run_ranks(tmp_path / "ranks", RANKS, [*words, str(folders[0]), "0", "0"])
    command = [*TORCHRUN, *words, folders[1], str(KILLS), os.environ.get("GIDS_SEED", "0")]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    undisturbed, [first] = result(folders[0])
    killed, starts = result(folders[1])
    print(starts)
    assert first == [0, 0, 0]
    assert [start for start, _, _ in starts] == list(range(KILLS + 1))
    assert max(step for _, _, step in starts) > 0, "some start went on in the middle of an epoch"
    assert list(killed) == list(undisturbed)
    for name, weights in undisturbed.items():
        assert torch.equal(killed[name], weights), name
