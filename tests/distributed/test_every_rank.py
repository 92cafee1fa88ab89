"""Loaders of two ranks in runs that a number draws, as in torture/test_every_loader.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pool import RankPool

for _folder in ("graphbolt", "torture"):
    sys.path.append(str(Path(__file__).parents[1] / _folder))

import torture_run  # noqa: E402
from torture_data import TortureData  # noqa: E402
from torture_loaders import KINDS  # noqa: E402
from torture_scenario import draw  # noqa: E402

NUMBERS = [0, 3, 9, 10, 14, 16, 19, 20, 23, 25, 27, 33, 37, 57, 65, 68, 104, 123, 142, 149]
"""Chosen so that few runs share in every way. tools/torture.py --ranks draws more."""
try:
    import gids.dgl as DGL
except ImportError:
    DGL = None


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, TortureData]]:
    with torture_run.opened_data(tmp_path_factory.mktemp("torture")) as opened:
        yield opened


@pytest.mark.parametrize("number", NUMBERS)
def test_a_run_that_is_drawn(data: dict[bool, TortureData], ranks: RankPool, number: int) -> None:
    if not DGL and draw(number, ranks=True).load.kind.startswith(("DGL", "GraphBolt")):
        pytest.skip("there is no DGL")
    assert torture_run.torture_ranks(number, data, ranks)


def test_the_runs_above_share_in_every_way() -> None:
    drawn = [draw(number, ranks=True) for number in NUMBERS]
    assert {run.load.kind for run in drawn} == set(KINDS)
    assert {run.share for run in drawn} == {"seeds", "rows", "parts", "replicas"}
    for kind in ("NodeLoader", "EdgeLoader", "PyG", "PyG links"):
        assert {"rows", "parts"} <= {run.share for run in drawn if run.load.kind == kind}
    assert {run.share for run in drawn if run.cooperative} == {"rows", "parts", "replicas"}
