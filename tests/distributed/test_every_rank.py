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

USUAL = [4, 9, 33]
MORE = [0, 7, 12, 30, 9738]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, TortureData]]:
    with torture_run.opened_data(tmp_path_factory.mktemp("torture")) as opened:
        yield opened


@pytest.mark.parametrize("number", [*USUAL, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_a_run_that_is_drawn(data: dict[bool, TortureData], ranks: RankPool, number: int) -> None:
    assert torture_run.torture_ranks(number, data, ranks)
