"""Cooperative minibatches: the ranks' parts make up the minibatch of one process, and train one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import random_in_edges
from programs import cooperate, exchange_wrongly
from rank_pool import RankPool

from gids.sampler import Labor, Ladies, Neighbor, RandomWalk
from gids.store.names import Relation
from gids.write import DatasetWriter

COUNTS = {"paper": 900, "author": 300}
CITES: Relation = ("paper", "cites", "paper")
WRITES: Relation = ("author", "writes", "paper")
WRITTEN: Relation = ("paper", "rev_writes", "author")


def write(path: Path, relations: list[Relation], seed: int = 1) -> Path:
    generator = torch.Generator().manual_seed(seed)
    with DatasetWriter(path, page_bytes=512) as writer:
        for ntype in sorted({t for r in relations for t in r[::2]}):
            rows = torch.randn(COUNTS[ntype], 24, generator=generator)
            writer.write_table("node", ntype, "feat", rows)
            writer.write_labels(ntype, torch.randint(0, 5, (COUNTS[ntype],), generator=generator))
        for i, relation in enumerate(relations):
            num_src, num_dst = COUNTS[relation[0]], COUNTS[relation[2]]
            writer.write_graph(relation, *random_in_edges(num_src, num_dst, i), num_src=num_src)
    return path


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cooperative") / "one.gids", [CITES])


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cooperative") / "several.gids", [CITES, WRITES, WRITTEN])


SAMPLERS: dict[str, Any] = {
    "Neighbor": Neighbor([3, 4]),
    "dependent": Neighbor([3, 4], batch_dependency=4),
    "replace": Neighbor([3, 4, 2], replace=True),
    "Labor": Labor([3, 4]),
    "nested": Labor([3, 4], batch_dependency=4, nested=True),
    "layer dependency": Labor([3, 4, 2], layer_dependency=True, batch_dependency=3),
    "Labor 2": Labor([3, 4], importance_sampling=2),
    "Ladies": Ladies([40, 30]),
    "RandomWalk": RandomWalk([3, 4], num_walks=6),
    "metapath": RandomWalk([3, 4], num_walks=6, metapath=[WRITES, WRITTEN]),
}


CASES = [
    (name, size) for name in list(SAMPLERS)[:-1] for size in ((1, 2, 3, 4) if name == "Labor" else (2, 4))
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "size"), CASES)
def test_parts_make_up_the_minibatch_of_one_process(one: Path, ranks: RankPool, name: str, size: int) -> None:
    seeds = torch.cat([torch.arange(0, 900, 5), torch.tensor([5, 5, 10])])
    ranks.run(size, cooperate, one, SAMPLERS[name], seeds, 12 // size)


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["metapath", "Neighbor", "Labor", "Ladies"])
def test_several_types(several: Path, ranks: RankPool, name: str, size: int) -> None:
    seeds = {"paper": torch.arange(0, 900, 9), "author": torch.arange(0, 300, 11)}
    ranks.run(size, cooperate, several, SAMPLERS[name], seeds, 12 // size)


def test_exchange_needs_rows_by_known_types(several: Path, ranks: RankPool) -> None:
    for errors in ranks.run(2, exchange_wrongly, several):
        assert errors == [
            "exchange(0, h): give h as a dictionary by node type: paper, author",
            "exchange(0, h): no node type 'papr' (has paper, author)",
        ]
