"""GraphBolt itself where it can be imported (tools/graphbolt_env.sh makes such an environment), else a
stand-in for the few classes of it that gids.graphbolt builds on. Tests of more than that are skipped there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # graphbolt_model.py

import graphbolt_model as model

import gids.dgl  # noqa: F401  (makes dgl importable)

import dgl  # isort: skip


@pytest.fixture(scope="session")
def graphbolt() -> Iterator[Any]:
    """gids.graphbolt."""
    with model.importable() as module:
        yield module


@pytest.fixture
def gb() -> Any:
    """GraphBolt itself."""
    if model.WHY_NOT:
        pytest.skip("GraphBolt itself cannot be imported here; `tools/graphbolt_env.sh DIR` runs this test")
    return dgl.graphbolt


@pytest.fixture
def minibatch(graphbolt: Any) -> Any:
    """GraphBolt's MiniBatch."""
    return dgl.graphbolt.MiniBatch


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> model.Dataset:
    return model.homogeneous(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory) -> model.Dataset:
    return model.heterogeneous(tmp_path_factory.mktemp("several"))


@pytest.fixture(params=["one", "several"])
def dataset(request: pytest.FixtureRequest) -> model.Dataset:
    return request.getfixturevalue(request.param)
