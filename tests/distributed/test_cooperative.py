"""Cooperative minibatches: the ranks' parts make up the minibatch of one process, and train one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import CITED, cooperate, write_cited
from rank_pool import RankPool

from gids.sampler import Labor, Ladies, Neighbor, RandomWalk

_, WRITES, WRITTEN = CITED


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cited(tmp_path_factory.mktemp("cooperative") / "several.gids", CITED)


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
ONE_TYPE = list(SAMPLERS)[:-1]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "size"), [("Labor", 1), ("Labor", 4), *((name, 2 + i % 3) for i, name in enumerate(ONE_TYPE))]
)
def test_parts_make_up_the_minibatch_of_one_process(
    cited: Path, ranks: RankPool, name: str, size: int
) -> None:
    seeds = torch.cat([torch.arange(0, 900, 12), torch.tensor([12, 12, 24])])
    ranks.run(size, cooperate, cited, SAMPLERS[name], seeds, 12 // size)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "size"), [("metapath", 2), ("Neighbor", 3), ("Labor", 3), ("Ladies", 2)])
def test_several_types(several: Path, ranks: RankPool, name: str, size: int) -> None:
    seeds = {"paper": torch.arange(0, 900, 18), "author": torch.arange(0, 300, 22)}
    ranks.run(size, cooperate, several, SAMPLERS[name], seeds, 12 // size)
