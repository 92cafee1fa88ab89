"""Packs of ranks that read together: minibatches are those of one process, whatever happens to packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pack_programs as programs
import pytest
import torch
from datasets import CITES, WRITES, random_in_edges
from partition_example import AUTHORS, PAPERS, Datasets, open_parts
from rank_pool import RankPool

from gids.packs import Scratch, Spool, Superbatch
from gids.sampler import Ladies
from gids.store import FeatureStore
from gids.write import DatasetWriter
from gids.write.partition import partition

SEEDS = torch.arange(0, PAPERS, 3)
ARGUMENTS: dict[str, Any] = {"seeds": SEEDS, "sampler": [3, 4], "batch_size": 8, "shuffle": True}
FLOATS = ARGUMENTS | {"tables": ["paper.float32", "paper.by_row"]}
LADIES = Ladies([30, 20])
TIMEOUT_S = 3.0


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [1, 3])
def test_minibatches_are_those_of_one_process(
    rich: Datasets, rich_types: Datasets, ranks: RankPool, size: int
) -> None:
    whole, parts, every = rich.whole, rich.parts(size), rich.tables()
    edges = torch.randint(PAPERS, (2, 300), generator=torch.Generator().manual_seed(1))
    linked = {"edges": edges, "sampler": [3], "exclude": "self", "time": False, "batch_size": 8}
    nodes = rich.tables("node")
    by_type = {**ARGUMENTS, "seeds": {"paper": SEEDS, "author": torch.arange(0, AUTHORS, 2)}}
    by_type["tables"] = rich_types.tables()
    beside = {"whole": FeatureStore(whole).table("paper.long"), **dict(zip(every, every, strict=True))}
    cooperative = {**ARGUMENTS, "cooperative": True, "tables": nodes}
    cases = [
        (whole, whole, "NodeLoader", {**ARGUMENTS, "tables": every}, {}, 1_000_000, None),
        (whole, whole, "NodeLoader", FLOATS, {"owners": "heat"}, 100_000, 9),
        (whole, whole, "EdgeLoader", linked, {"owners": "range"}, 1_000_000, 5),
        (whole, whole, "NodeLoader", {**FLOATS, "cooperative": True}, {}, 100_000, 9),
        (parts, whole, "NodeLoader", {**ARGUMENTS, "tables": beside, "sampler": LADIES}, {}, 1_000_000, 9),
        (rich_types.parts(size), rich_types.whole, "NodeLoader", by_type, {}, 1_400_000, 20),
        (parts, whole, "NodeLoader", cooperative, {}, 1_000_000, None),
    ]
    packs = ranks.run(size, programs.compare_all, cases[3:] if size == 1 else cases, "pack")
    assert size > 1 or sum(n > 1 for n in packs[0]) >= 3, "the memory holds a part of the rows"


def test_a_part_without_rows_of_a_type(ranks: RankPool, tmp_path: Path) -> None:
    path, papers = tmp_path / "whole.gids", 900
    with DatasetWriter(path, page_bytes=512) as writer:
        for ntype, count in (("paper", papers), ("author", 2)):
            writer.write_table("node", ntype, "feat", torch.randn(count, 50))
        writer.write_graph(CITES, *random_in_edges(papers, papers, 3), num_src=papers)
        writer.write_graph(WRITES, *random_in_edges(2, papers, 3), num_src=2)
    partition(path, tmp_path / "parts", 3)
    counts = [len(part.table("author.feat").held.ids()) for part in open_parts(tmp_path / "parts")]
    assert min(counts) == 0
    arguments = {**ARGUMENTS, "seeds": {"paper": torch.arange(0, papers, 4)}}
    cases = [(tmp_path / "parts", path, "NodeLoader", arguments, {}, 150_000, 6)]
    ranks.run(3, programs.compare_all, cases, "pack")


def test_steps_wait_on_disk(rich: Datasets, ranks: RankPool) -> None:
    assert ranks.run(2, programs.steps_wait_on_disk, rich.whole, FLOATS) == [0, 0]


FAULTS: list[tuple[type, str, int, bool]] = [
    (Spool, "begin_put", 3, False),
    (Spool, "begin_put", 7, True),  # when all have agreed on 9 steps
    (Superbatch, "prepare", 1, True),
    (Superbatch, "begin", 1, True),
    (Superbatch, "prepare", 2, True),
    (Scratch, "open", 1, False),
]
"""What fails on a rank, and whether the others use packs before they learn of it."""


@pytest.mark.slow
def test_a_full_disk_on_one_rank(rich: Datasets, ranks: RankPool) -> None:
    told = ranks.run(3, programs.disk_is_full_on_one_rank, rich.whole, FLOATS, [f[:3] for f in FAULTS])
    for i, (*_, packs) in enumerate(FAULTS):
        assert all((told[rank][i][0] > 0) == packs for rank in (0, 2)), FAULTS[i]


@pytest.mark.slow
def test_little_scratch_on_one_rank(rich: Datasets, ranks: RankPool) -> None:
    sizes = [20_000, 400_000, 30_000_000]
    told = ranks.run(2, programs.scratch_is_small_on_one_rank, rich.parts(2), rich.whole, FLOATS, sizes)
    for rank, of_rank in enumerate(told):
        assert of_rank[0][0] == 0
        assert of_rank[-1][0] > 0
        why = "because rank 1 does; its log says why" if rank == 0 else "has room for too few minibatches"
        assert any(why in line for line in of_rank[0][1]), of_rank


@pytest.mark.parametrize(("late", "size", "replicas"), [(False, 3, 1), (True, 3, 1), (True, 4, 2)])
def test_random_reads_of_one_rank_are_those_of_all(
    rich: Datasets, ranks: RankPool, late: bool, size: int, replicas: int
) -> None:
    told = ranks.run(size, programs.choose, rich.whole, FLOATS, late, replicas)
    assert told[1]["minibatches"] == 0
    for rank in set(range(size)) - {1}:
        assert told[rank]["minibatches"] == (min(9, told[rank]["steps"]) if late else 0)


@pytest.mark.slow
def test_a_run_resumes_in_a_superbatch(rich: Datasets, ranks: RankPool) -> None:
    ranks.run(2, programs.resume, rich.whole, FLOATS, [1, 12])


def test_a_sampler_that_fails_on_one_rank(rich: Datasets, ranks: RankPool) -> None:
    """In one of the steps before all agree, and after."""
    for rank, told in enumerate(ranks.run(2, programs.sampling_fails, rich.whole, FLOATS, [(0, 2), (1, 9)])):
        for fails, error in zip((0, 1), told, strict=True):
            assert ("RankError" in error and f"rank {fails} failed with" in error) == (rank != fails), told
            assert "ArithmeticError: no step" in error


def test_nothing_is_left_of_an_epoch_that_ends_early(rich: Datasets, ranks: RankPool) -> None:
    ranks.run(2, programs.stop_early, rich.whole, FLOATS)


@pytest.mark.slow
def test_ranks_wait_longer_for_packs_than_for_a_rank(rich: Datasets, ranks: RankPool) -> None:
    seconds = ranks.run(2, programs.sweep_long, rich.whole, FLOATS, TIMEOUT_S + 1, TIMEOUT_S)
    assert all(s > TIMEOUT_S for s in seconds)


def test_packs_are_refused_on_cuda(rich: Datasets, ranks: RankPool) -> None:
    for told in ranks.run(2, programs.on_cuda, rich.whole):
        assert "packs on the CPU only" in told
