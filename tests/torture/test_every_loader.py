"""Every loader in runs that a number draws: each row is the dataset's, and each minibatch comes once.

The model of all loaders: what is loaded (adapter, sampler, tables, dtype), how it is read (`reads=`, memory,
policy, device) and what a user does (validation, leaving, resuming) are drawn independently of each other. A
failure prints its scenario and the command that repeats it. tools/torture.py runs as many as fit in a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torture_run
from torture_data import TortureData
from torture_scenario import draw

COUNT = 200


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, TortureData]]:
    with torture_run.opened_data(tmp_path_factory.mktemp("torture")) as opened:
        yield opened


@pytest.fixture(scope="module")
def done() -> Counter[str]:
    return Counter()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(COUNT))
def test_a_run_that_is_drawn(
    one_thread: None, data: dict[bool, TortureData], done: Counter[str], number: int
) -> None:
    if draw(number).load.kind in ("DGL", "GraphBolt", "GraphBolt feature"):
        pytest.importorskip("gids.dgl", exc_type=ImportError)
    done += torture_run.torture(number, data)
    done["scenarios"] += 1


def test_the_runs_above_read_in_each_way(done: Counter[str]) -> None:
    if done["scenarios"] < COUNT // 2:
        pytest.skip("few scenarios have run")
    assert done["superbatches by reads='pack'"] > 50
    assert all(done[kind] > 3 for kind in torture_run.KINDS if kind in done), done
