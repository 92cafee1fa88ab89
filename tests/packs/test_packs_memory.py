"""memory= holds for packs: what is listed stays within it, and the process within what is listed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import in_edges

from gids.write import DatasetWriter

ROWS, DIM = 600_000, 128
PROGRAM = Path(__file__).with_name("memory_program.py")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """307 MB of rows of 512 bytes, with a graph of 3 million edges."""
    path = tmp_path_factory.mktemp("large") / "large.gids"
    rng = np.random.default_rng(0)
    indptr, indices = in_edges(rng.integers(0, 11, ROWS), ROWS, rng)
    values = torch.arange(ROWS * DIM, dtype=torch.int32).view(ROWS, DIM)
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", values)
        writer.write_graph(("paper", "cites", "paper"), indptr, indices, num_src=ROWS)
    return path


def run(large: Path, reads: str, memory: int, superbatch: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", PROGRAM, large, reads, memory, superbatch, *more]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_the_process_stays_within_the_memory_that_is_listed(large: Path) -> None:
    """From 1/16 of the rows' bytes on. 64 MB are for what libraries take when they are first used."""
    checksums = set()
    for way, share, superbatch in (
        ("pack", 16, 24),
        ("sweep", 16, 24),
        ("pack", 16, 6),
        ("pack", 8, 24),
        ("sweep", 8, 6),
        ("pack", 4, 6),
        ("pack", 2, 24),
        ("pack", 16, 49),
        ("pack", 4, 49),
    ):
        memory = ROWS * DIM * 4 // share
        found = run(large, way, memory, superbatch)
        print(way, share, superbatch, found)
        assert found["minibatches"] == 48
        assert {choice["way"] for choice in found["choices"]} == {way}
        listed = sum(found["memory"].values())
        assert listed <= memory
        assert found["most"] - found["before"] <= listed + (64 << 20)
        checksums.add(found["checksum"])
    assert len(checksums) == 1


@pytest.mark.slow
def test_the_memory_of_a_superbatch_is_free_before_the_next_one_takes_its_own(large: Path) -> None:
    memory = ROWS * DIM * 4 // 2
    found = run(large, "pack", memory, 12, "anew")
    assert [choice["minibatches"] for choice in found["choices"]] == [12, 12, 12, 12]
    used = found["most"] - found["before"]
    print(found)
    assert used >= memory // 2
    assert used <= sum(found["memory"].values()) + (64 << 20)
