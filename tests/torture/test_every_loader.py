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
from torture_loaders import KINDS
from torture_scenario import draw

COUNT = 200
try:
    import gids.dgl as DGL
except ImportError:
    DGL = None


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
    if not DGL and draw(number).load.kind in ("DGL", "GraphBolt", "GraphBolt feature"):
        pytest.skip("there is no DGL")
    done += torture_run.torture(number, data)
    done["scenarios"] += 1


def test_the_runs_above_are_of_every_kind_also_on_a_device_and_resumed(done: Counter[str]) -> None:
    if done["scenarios"] < COUNT // 2:
        pytest.skip("few scenarios have run")
    kinds = [kind for kind in KINDS if DGL or not kind.startswith(("DGL", "GraphBolt"))]
    assert not [kind for kind in kinds if done[kind] < 5]
    on_device = [kind for kind in kinds if kind != "GraphBolt feature"]
    assert not [kind for kind in on_device if not done[f"{kind} on a device"]]
    assert not [kind for kind in kinds if KINDS[kind].resumes and done[f"{kind} resumed"] < 3]
    assert done["late"] >= 3
    assert done["superbatches by reads='pack'"] > 50
