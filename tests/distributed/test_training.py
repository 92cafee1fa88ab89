"""Training on several processes ends like training on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import train_together
from rank_pool import RankPool

from gids.cli import main
from gids.write.partition import partition


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nodes of a class cite each other, and have similar features."""
    folder = tmp_path_factory.mktemp("clustered")
    sizes = ["--nodes", "1500", "--edges", "12000", "--dim", "24", "--classes", "8"]
    assert main(["generate", str(folder / "raw"), *sizes, "--split", "0.4,0.1,0.5", "--quiet"]) == 0
    assert main(["convert", str(folder / "raw"), str(folder / "one.gids"), "--quiet"]) == 0
    return folder / "one.gids"


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["torch", "dgl", "pyg"])
def test_cooperative_training_gives_the_weights_of_one_process(
    clustered: Path, ranks: RankPool, layers: str
) -> None:
    if layers == "dgl":
        pytest.importorskip("gids.dgl", exc_type=ImportError)
    [(alone, expected)] = ranks.run(1, train_together, clustered, layers)
    assert alone[-1] < alone[0] / 2
    parts, size = clustered.with_name(f"parts-{layers}"), 4 if layers == "torch" else 2
    partition(clustered, parts, size)
    for size, dataset in ((2, clustered), (4, parts)) if layers == "torch" else ((2, parts),):
        for losses, weights in ranks.run(size, train_together, dataset, layers):
            assert losses == pytest.approx(alone, rel=1e-4)
            for mine, theirs in zip(weights, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
