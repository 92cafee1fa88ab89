"""Every loader in runs that a number draws: each row is the dataset's, and each minibatch comes once.

A failure prints its scenario and the command that repeats it. tools/torture.py runs as many scenarios as fit
in a time; with --ranks, those of two processes (distributed/test_every_rank.py).
"""

from __future__ import annotations

import pytest
import torture_run
from torture_data import TortureData

USUAL, ALL = 40, 200
"""Scenarios of a default run, and with slow tests."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, TortureData]:
    return torture_run.open_data(tmp_path_factory.mktemp("torture"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "number", [*range(USUAL), *(pytest.param(n, marks=pytest.mark.slow) for n in range(USUAL, ALL))]
)
def test_a_run_that_is_drawn(one_thread: None, data: dict[bool, TortureData], number: int) -> None:
    if torture_run.draw(number).kind in ("DGL", "GraphBolt"):
        pytest.importorskip("gids.dgl", exc_type=ImportError)
    assert torture_run.torture(number, data)
