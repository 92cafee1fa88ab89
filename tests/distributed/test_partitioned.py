"""Loaders of partitioned datasets: each rank has a part, and gets what the whole dataset gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from partition_example import AUTHORS, PAPERS, Datasets
from programs import Marking, compare
from rank_pool import RankError, RankPool

from gids.sampler import Labor, Ladies, LocalityBias, Neighbor

SEEDS = {"paper": torch.arange(0, PAPERS, 3), "author": torch.arange(0, AUTHORS, 2)}
ARGUMENTS = {"seeds": SEEDS["paper"], "sampler": [3, 4], "batch_size": 20, "shuffle": True}
SAMPLERS: dict[str, Any] = {
    "fanouts": [3, 4],
    "Labor": Labor([3, 4], batch_dependency=8),
    "Ladies": Ladies([30, 20]),
    "bidirectional": Neighbor([3, 4], subgraph="bidirectional"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("fanouts", 1), ("Ladies", 2), ("Labor", 4), ("bidirectional", 3)),
        *(("fanouts", 2), ("Ladies", 3), ("bidirectional", 4)),
    ],
)
def test_one_type(rich: Datasets, ranks: RankPool, name: str, size: int) -> None:
    tables = rich.tables("node" if name == "bidirectional" else None)
    arguments = ARGUMENTS | {"sampler": SAMPLERS[name], "tables": tables}
    told = ranks.run(size, compare, rich.parts(size), rich.whole, "NodeLoader", arguments, {})
    assert {t["steps"] for t in told} == {-(-len(SEEDS["paper"]) // (20 * size))}


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "size"), [("fanouts", 2), ("Labor", 2), ("Ladies", 3)])
def test_several_types(rich_types: Datasets, ranks: RankPool, name: str, size: int) -> None:
    arguments = ARGUMENTS | {"seeds": SEEDS, "sampler": SAMPLERS[name], "tables": rich_types.tables()}
    ranks.run(size, compare, rich_types.parts(size), rich_types.whole, "NodeLoader", arguments, {}, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize(("size", "replicas"), [(3, 1), (1, 1), (4, 2)])
@pytest.mark.parametrize("disjoint", [False, True])
def test_owners_draw_by_the_masks_of_the_rank_that_asks(
    rich: Datasets, ranks: RankPool, size: int, replicas: int, disjoint: bool
) -> None:
    masks = [torch.arange(PAPERS) % size == rank for rank in range(size)]
    sampler = Neighbor([3, 4], locality=LocalityBias(masks, 6), disjoint=disjoint)
    arguments, options = ARGUMENTS | {"sampler": sampler}, {"replicas": replicas}
    ranks.run(size, compare, rich.parts(size // replicas), rich.whole, "NodeLoader", arguments, options)


@pytest.mark.few(1)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("bulk", [1, 3])
def test_replicas_exchange_in_columns(rich: Datasets, ranks: RankPool, replicas: int, bulk: int) -> None:
    options = {"replicas": replicas, "bulk": bulk}
    parts = rich.parts(4 // replicas)
    ranks.run(4, compare, parts, rich.whole, "NodeLoader", ARGUMENTS, options, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_converted_when_they_arrive(rich: Datasets, ranks: RankPool, dtype: torch.dtype) -> None:
    tables = ["float32", "by_row", "by_column", "bfloat16"]
    arguments = ARGUMENTS | {"dtype": dtype, "tables": [f"paper.{t}" for t in tables]}
    ranks.run(3, compare, rich.parts(3), rich.whole, "NodeLoader", arguments, {}, 1)


@pytest.mark.parametrize(("size", "subgraph"), [(2, "directional"), (3, "bidirectional")])
def test_edges(rich: Datasets, ranks: RankPool, size: int, subgraph: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    arguments = {
        "edges": torch.randint(PAPERS, (2, 90), generator=generator),
        "sampler": Neighbor([3, 4], subgraph=subgraph),
        "exclude": "self",
        "time": False,
        "batch_size": 11,
        "shuffle": True,
    }
    ranks.run(size, compare, rich.parts(size), rich.whole, "EdgeLoader", arguments, {}, 2)


def test_times(rich: Datasets, ranks: RankPool) -> None:
    arguments = ARGUMENTS | {"time": torch.arange(len(SEEDS["paper"])) << 32}
    ranks.run(3, compare, rich.parts(3), rich.whole, "NodeLoader", arguments, {}, 1)


def test_a_missing_part_is_an_error_on_every_rank(rich: Datasets, ranks: RankPool, tmp_path: Path) -> None:
    for part in sorted(rich.parts(3).iterdir())[:2]:
        (tmp_path / part.name).symlink_to(part)
    with pytest.raises(RankError) as told:
        ranks.run(3, compare, tmp_path, rich.whole, "NodeLoader", ARGUMENTS, {}, 1)
    assert str(told.value).count("RankError: rank 2 failed with FileNotFoundError") == 2


def test_another_number_of_ranks_than_parts_is_refused(rich: Datasets, ranks: RankPool) -> None:
    with pytest.raises(RankError, match="has 3 parts, for 2 ranks"):
        ranks.run(2, compare, rich.parts(3), rich.whole, "NodeLoader", ARGUMENTS, {}, 1)


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_sampler_whose_own_work_would_be_left_out_is_refused(
    rich: Datasets, ranks: RankPool, cooperative: bool
) -> None:
    arguments = {**ARGUMENTS, "sampler": Marking([3]), "cooperative": cooperative}
    with pytest.raises(RankError, match=r"a sampler of gids\.sampler, without a sample\(\) of your own"):
        ranks.run(2, compare, rich.parts(2), rich.whole, "NodeLoader", arguments, {}, 1)
