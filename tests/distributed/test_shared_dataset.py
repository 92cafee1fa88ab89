"""Ranks that read one dataset together: each page is read by one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import random_in_edges
from programs import compare_with_one_process
from rank_pool import RankPool

from gids.store.names import Relation
from gids.write import DatasetWriter

NODES = 1500
CITES: Relation = ("paper", "cites", "paper")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "one.gids"
    generator = torch.Generator().manual_seed(1)
    with DatasetWriter(path, page_bytes=512) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(NODES, 50, generator=generator))
        writer.write_table("node", "paper", "half", torch.randn(NODES, 7, generator=generator).half())
        writer.write_table(
            "node", "paper", "code", torch.randn(NODES, 9, generator=generator), dtype=torch.int8, scale="row"
        )
        writer.write_labels("paper", torch.arange(NODES) % 7)
        writer.write_graph(CITES, *random_in_edges(NODES, NODES, 3), num_src=NODES)
    return path


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("owners", ["hash", "range"])
def test_rows_are_those_of_one_process(one: Path, ranks: RankPool, size: int, owners: str) -> None:
    arguments = {"seeds": torch.arange(0, NODES, 3), "sampler": [3, 4], "batch_size": 30, "shuffle": True}
    told = ranks.run(size, compare_with_one_process, one, one, "NodeLoader", arguments, {"owners": owners}, 2)
    assert {t["minibatches"] for t in told} == {2 * -(-500 // (30 * size))}
