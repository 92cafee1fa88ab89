"""Ranks that end, stall, fail or differ: an error on every other rank within the time-out, never a hang."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import fault_program
import pytest
import torch
from partition_example import PAPERS, Datasets
from processes import PATIENCE_S, Outcome, Processes
from programs import CITED, write_cited
from rank_pool import RankPool

from gids.store.part import part_name
from gids.write.partition import partition

KILLS = int(os.environ.get("GIDS_KILLS", "5"))
"""How many ranks the test of kills kills."""
TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def parts(cited: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("faults") / "parts"
    partition(cited, out, 4)
    return out


def check_named(outcome: Outcome, rank: int) -> None:
    assert outcome.error == "RankError", outcome
    assert re.search(rf"\brank {rank}\b", outcome.value), outcome


@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(KILLS))
def test_a_rank_that_is_killed_is_named_on_all_others(cited: Path, parts: Path, number: int) -> None:
    """$GIDS_KILLS is how many are killed, at random moments."""
    rng = random.Random(f"{number} {os.environ.get('GIDS_SEED', 0)}")
    way = ("partitioned", "shared", "cooperative", "DDP", "packs")[number % 5]
    victim, delay = rng.randrange(4), rng.uniform(0, 1)
    print(f"{way}: kill rank {victim} after {delay:.3f} s")
    dataset = cited if way == "shared" else parts
    reads = "pack" if way == "packs" else "random"
    timeout_s = PATIENCE_S * 2 / 3  # as long as a rank may take to end
    program: tuple[Any, ...] = (fault_program.load, dataset, timeout_s, way == "cooperative", reads)
    if way == "DDP":
        program = (fault_program.train, dataset, timeout_s)
    with Processes(4, *program) as ranks:
        for rank in ranks.ranks:
            assert ranks.told(rank) == "loading"
        time.sleep(delay)
        shared = ranks.shared_memory()
        ranks.signal(victim, signal.SIGKILL)
        killed = time.monotonic()
        for rank in set(ranks.ranks) - {victim}:
            outcome = ranks.outcome(rank)
            print(rank, outcome, outcome.at - killed)
            if way != "DDP" or outcome.error == "RankError":
                check_named(outcome, victim)
            assert outcome.error in ("RankError", "RuntimeError"), outcome
            assert outcome.at - killed < 1.2 * timeout_s
        for rank in ranks.ranks:
            assert ranks.has_ended(rank)
        assert [name for name in shared if Path(name).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 2])
def test_a_rank_that_stalls_is_named_on_all_others(parts: Path, stopped: int) -> None:
    with Processes(4, fault_program.load, parts, TIMEOUT_S, False) as ranks:
        for rank in ranks.ranks:
            assert ranks.told(rank) == "loading"
        ranks.signal(stopped, signal.SIGSTOP)
        for rank in set(ranks.ranks) - {stopped}:
            outcome = ranks.outcome(rank)
            check_named(outcome, stopped)
            assert "does not answer" in outcome.value
            assert ranks.has_ended(rank)


@pytest.mark.slow
@pytest.mark.parametrize(("then", "replicas"), [("the end", 1), ("idle", 1), ("idle", 2)])
def test_a_rank_that_leaves_the_loop_is_named(cited: Path, parts: Path, then: str, replicas: int) -> None:
    """One that begins its next epoch: see test_disagreements.py. With replicas, rank 3 waits for it, and the
    ranks of the other column wait for both."""
    dataset = parts if (then, replicas) == ("idle", 1) else cited
    with Processes(4, fault_program.leave_early, dataset, then, replicas) as ranks:
        for rank in (0, 2, 3):
            outcome = ranks.outcome(rank)
            check_named(outcome, 1)
            assert re.findall(r"\brank \d", outcome.value) == ["rank 1"], outcome


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"owners": "range"}, "has {'owners': 'hash'}, and rank"),
    ({"bulk": 3}, "has {'bulk': "),
    ({"window": 3}, "has {'window': "),
    ({"reads": "pack"}, "has {'reads': "),
    ({"replicas": 3}, "has {'replicas': "),
    ({"owners": "mine"}, "rank 1 failed with ValueError: owners='mine'"),
    ({"dataset": "other"}, "has {'dataset': "),
    ({"dataset": "missing"}, "rank 1 failed with FileNotFoundError"),
    ({"batch_size": 5}, "batch_size = "),
]


@pytest.mark.slow
def test_ranks_with_other_arguments_are_refused(cited: Path, ranks: RankPool, tmp_path: Path) -> None:
    other = write_cited(tmp_path / "other.gids", CITED[:1], seed=2)
    paths = {"other": other, "missing": tmp_path / "missing.gids"}
    changes = [c | {"dataset": paths[c["dataset"]]} if "dataset" in c else c for c, _ in DIFFERENT]
    for rank, errors in enumerate(ranks.run(3, fault_program.open_otherwise, cited, changes)):
        assert len(errors) == len(changes)
        for error, (_, message) in zip(errors, DIFFERENT, strict=True):
            if rank != 1:
                assert "rank 1" in error
                assert message in error


@pytest.mark.slow
def test_a_rank_that_does_not_open_the_dataset_is_named(cited: Path, ranks: RankPool) -> None:
    errors = ranks.run(3, fault_program.come_alone, 1.0, cited)
    for rank in (0, 2):
        assert (
            "rank 1 did not come in time to where this rank is (calls gids.distributed.open" in errors[rank]
        )


@pytest.mark.few(3)
@pytest.mark.parametrize("reads", ["random", "pack"])
@pytest.mark.parametrize("cooperative", [False, True])
def test_a_failed_read_is_an_error_of_one_step_on_every_rank(
    rich: Datasets, ranks: RankPool, reads: str, cooperative: bool
) -> None:
    parts, seeds = rich.parts(3), torch.arange(0, PAPERS, 3)
    shard = parts / part_name(1) / "tables/paper.long/shard-00.bin"
    arguments = {"seeds": seeds, "sampler": [1], "batch_size": 2, "tables": ["paper.long"]}
    options = {"reads": reads, "queue_depth": 16, "cache": 0} if reads == "random" else {"reads": reads}
    given = arguments | {"cooperative": cooperative}
    seen = ranks.run(3, fault_program.read_damaged, parts, rich.whole, shard, given, options)
    failed = [step for step, _ in seen[1]["errors"][0]]
    assert 0 < len(failed) < len(seeds) // 6
    for rank, of_rank in enumerate(seen):
        assert [step for step, _ in of_rank["errors"][0]] == failed
        assert of_rank["errors"][1] == [], "the shard is whole again"
        assert of_rank["files"] == {str(shard)}
        assert all(("rank 1" in message) == (rank != 1) for _, message in of_rank["errors"][0])


@pytest.mark.parametrize("reads", ["random", "pack"])
def test_a_failed_read_is_an_error_of_the_step_in_every_column(
    rich: Datasets, ranks: RankPool, reads: str
) -> None:
    """A rank that trained the step, which others skip, would wait for their gradients."""
    parts, seeds = rich.parts(2), torch.arange(0, PAPERS, 7)
    shard = parts / part_name(1) / "tables/paper.long/shard-00.bin"
    arguments = {"seeds": seeds, "sampler": [1], "batch_size": 1, "tables": ["paper.long"]}
    options = {"reads": reads, "queue_depth": 16, "replicas": 2}
    seen = ranks.run(4, fault_program.read_damaged, parts, rich.whole, shard, arguments, options)
    steps = [[step for step, _ in of_rank["errors"][0]] for of_rank in seen]
    assert 0 < len(steps[0]) < len(seeds) // 4
    assert steps == steps[:1] * 4
    assert all("rank 2" in message or "rank 3" in message for _, message in seen[0]["errors"][0])


def test_an_epoch_that_is_left_after_an_error_ends(ranks: RankPool, tmp_path: Path) -> None:
    """Otherwise only this rank has an open epoch, and no memory for its next loader."""
    dataset = write_cited(tmp_path / "left.gids", CITED[:1])
    shard = dataset / "tables/paper.feat/shard-00.bin"
    assert ranks.run(1, fault_program.drop_after_an_error, dataset, shard) == [(True, False)]


def test_parts_of_another_division_are_refused(cited: Path, parts: Path, ranks: RankPool) -> None:
    """It has the same dataset, number of parts and method."""
    other = parts.with_name("other parts")
    partition(cited, other, 4, seed=1)
    for rank, [error] in enumerate(ranks.run(4, fault_program.open_otherwise, parts, [{"dataset": other}])):
        assert "{'dataset': 'parts of crc32c:" in error, rank
        assert "rank 1" in error


def test_a_failure_between_exchanges_ends_all_ranks(parts: Path) -> None:
    """Other rows, or those of another layer: see test_disagreements.py."""
    with Processes(4, fault_program.raise_between_exchanges, parts) as ranks:
        outcomes = [ranks.outcome(rank) for rank in ranks.ranks]
    for rank in (0, 1, 3):
        check_named(outcomes[rank], 2)
    assert outcomes[2].error == "ArithmeticError", outcomes
