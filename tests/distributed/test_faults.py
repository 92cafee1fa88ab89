"""Ranks that end, stall or fail: an error on every other rank, at the time-out of the process group at the
latest."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import fault_program
import pytest
import torch
from partition_example import PAPERS, Datasets
from processes import Processes
from rank_pool import RankPool

from gids.store.part import part_name
from gids.write.partition import partition

TIMEOUT_S = 5.0
MISSING = "an exchange with the other ranks failed"


@pytest.mark.parametrize("cooperative", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_stalls_ends_the_others(
    cited: Path, tmp_path: Path, number: signal.Signals, cooperative: bool
) -> None:
    partition(cited, tmp_path / "parts", 3)
    program: Any = (fault_program.load, tmp_path / "parts", cooperative)
    with Processes(3, *program, timeout_s=TIMEOUT_S) as ranks:
        for rank in ranks.ranks:
            assert ranks.told(rank) == "loading"
        time.sleep(random.Random(number).uniform(0, 0.5))
        ranks.signal(1, number)
        for rank in (0, 2):
            outcome = ranks.outcome(rank)
            assert outcome.error == "RankError", outcome
            assert MISSING in outcome.value
            assert "within the timeout= of init_process_group()" in outcome.value
            assert ranks.has_ended(rank)


def test_a_rank_that_makes_no_loader_ends_the_others(cited: Path) -> None:
    with Processes(2, fault_program.make_no_loader, cited, timeout_s=TIMEOUT_S) as ranks:
        outcome = ranks.outcome(0)
    assert outcome.error == "RankError", outcome
    assert MISSING in outcome.value


@pytest.mark.parametrize(("size", "replicas", "cooperative"), [(3, 1, False), (3, 1, True), (4, 2, False)])
def test_a_failed_read_ends_the_epoch_on_every_rank(
    rich: Datasets, ranks: RankPool, size: int, replicas: int, cooperative: bool
) -> None:
    """In every column: a rank that trained the step, which others do not, would wait for their gradients."""
    parts, seeds = rich.parts(size // replicas), torch.arange(0, PAPERS, 5)
    shard = parts / part_name(1) / "tables/paper.long/shard-00.bin"
    batch_size = 2 if replicas == 1 else 1
    arguments = {"seeds": seeds, "sampler": [1], "batch_size": batch_size, "tables": ["paper.long"]}
    options = {"queue_depth": 16, "cache": 0, "replicas": replicas}
    given = arguments | {"cooperative": cooperative}
    seen = ranks.run(size, fault_program.read_damaged, parts, rich.whole, shard, given, options)
    for rank, of_rank in enumerate(seen):
        (step, message), (_, later) = of_rank["errors"][0]
        assert step == seen[1]["errors"][0][0][0]
        assert "ended this epoch" in later
        assert of_rank["errors"][1] == [], "the shard is whole again"
        assert of_rank["files"] == {str(shard)}
        if replicas == 1:
            assert ("rank 1" in message) == (rank != 1)
