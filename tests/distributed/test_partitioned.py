"""Loaders of partitioned datasets: each rank has a part, and gets what the whole dataset gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from partition_example import AUTHORS, PAPERS, Datasets
from programs import compare
from rank_pool import RankError, RankPool

from gids.sampler import Labor, Ladies, Neighbor


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    return Datasets(tmp_path_factory.mktemp("one"), heterogeneous=False)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    return Datasets(tmp_path_factory.mktemp("several"), heterogeneous=True)


SEEDS = {"paper": torch.arange(0, PAPERS, 3), "author": torch.arange(0, AUTHORS, 2)}
SAMPLERS: dict[str, Any] = {
    "fanouts": [3, 4],
    "Labor": Labor([3, 4], batch_dependency=8),
    "Ladies": Ladies([30, 20]),
    "bidirectional": Neighbor([3, 4], subgraph="bidirectional"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["fanouts", "Labor", "Ladies", "bidirectional"])
def test_one_type(one: Datasets, ranks: RankPool, name: str, size: int) -> None:
    tables = one.tables("node" if name == "bidirectional" else None)
    arguments = {
        "seeds": SEEDS["paper"],
        "sampler": SAMPLERS[name],
        "tables": tables,
        "batch_size": 20,
        "shuffle": True,
    }
    told = ranks.run(size, compare, one.parts(size), one.whole, "NodeLoader", arguments, {})
    assert {t["steps"] for t in told} == {-(-len(SEEDS["paper"]) // (20 * size))}


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["fanouts", "Labor", "Ladies"])
def test_several_types(several: Datasets, ranks: RankPool, name: str, size: int) -> None:
    arguments = {
        "seeds": SEEDS,
        "sampler": SAMPLERS[name],
        "tables": several.tables(),
        "batch_size": 20,
        "shuffle": True,
    }
    ranks.run(size, compare, several.parts(size), several.whole, "NodeLoader", arguments, {}, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("bulk", [1, 3])
def test_replicas_exchange_in_columns(one: Datasets, ranks: RankPool, replicas: int, bulk: int) -> None:
    arguments = {"seeds": SEEDS["paper"], "sampler": [3, 4], "batch_size": 20, "shuffle": True}
    options = {"replicas": replicas, "bulk": bulk}
    parts = one.parts(4 // replicas)
    ranks.run(4, compare, parts, one.whole, "NodeLoader", arguments, options, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_converted_when_they_arrive(one: Datasets, ranks: RankPool, dtype: torch.dtype) -> None:
    tables = ["float32", "by_row", "by_column", "bfloat16"]
    arguments = {
        "seeds": SEEDS["paper"],
        "sampler": [3, 4],
        "batch_size": 30,
        "dtype": dtype,
        "tables": [f"paper.{t}" for t in tables],
    }
    ranks.run(3, compare, one.parts(3), one.whole, "NodeLoader", arguments, {}, 1)


@pytest.mark.parametrize(("size", "subgraph"), [(2, "directional"), (3, "bidirectional")])
def test_edges(one: Datasets, ranks: RankPool, size: int, subgraph: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    arguments = {
        "edges": torch.randint(PAPERS, (2, 90), generator=generator),
        "sampler": Neighbor([3, 4], subgraph=subgraph),
        "exclude": "self",
        "time": False,
        "batch_size": 11,
        "shuffle": True,
    }
    ranks.run(size, compare, one.parts(size), one.whole, "EdgeLoader", arguments, {}, 2)


def test_times(one: Datasets, ranks: RankPool) -> None:
    arguments = {
        "seeds": SEEDS["paper"],
        "sampler": [3, 4],
        "time": torch.arange(len(SEEDS["paper"])) << 32,
        "batch_size": 20,
    }
    ranks.run(3, compare, one.parts(3), one.whole, "NodeLoader", arguments, {}, 1)


def test_a_missing_part_is_an_error_on_every_rank(one: Datasets, ranks: RankPool, tmp_path: Path) -> None:
    for part in sorted(one.parts(3).iterdir())[:2]:
        (tmp_path / part.name).symlink_to(part)
    arguments = {"seeds": SEEDS["paper"], "sampler": [3]}
    with pytest.raises(RankError) as told:
        ranks.run(3, compare, tmp_path, one.whole, "NodeLoader", arguments, {}, 1)
    assert str(told.value).count("RankError: rank 2 failed with FileNotFoundError") == 2


def test_another_number_of_ranks_than_parts_is_refused(one: Datasets, ranks: RankPool) -> None:
    arguments = {"seeds": SEEDS["paper"], "sampler": [3]}
    with pytest.raises(RankError, match="has 3 parts, for 2 ranks"):
        ranks.run(2, compare, one.parts(3), one.whole, "NodeLoader", arguments, {}, 1)
