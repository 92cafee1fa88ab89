from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pyg_model.py

if importlib.util.find_spec("torch_geometric") is None:
    collect_ignore_glob = ["test_*.py"]  # of the extra `pyg`, which the extra `test` includes


@pytest.fixture(autouse=True)
def _small_tensors(one_thread: None) -> None: ...


@pytest.fixture(scope="session")
def one() -> Any:
    """Data with edge features."""
    from pyg_model import homogeneous

    return homogeneous()


@pytest.fixture(scope="session")
def several() -> Any:
    """HeteroData of two node types and three relations."""
    from pyg_model import heterogeneous

    return heterogeneous()


@pytest.fixture(scope="session")
def one_path(tmp_path_factory: pytest.TempPathFactory, one: Any) -> Path:
    from pyg_model import write

    return write(tmp_path_factory.mktemp("pyg") / "one.gids", one)


@pytest.fixture(scope="session")
def several_path(tmp_path_factory: pytest.TempPathFactory, several: Any) -> Path:
    from pyg_model import write

    return write(tmp_path_factory.mktemp("pyg") / "several.gids", several)
