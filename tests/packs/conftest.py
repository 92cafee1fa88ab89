"""Fixtures of this folder."""

from __future__ import annotations

from pathlib import Path

import packs_example
import pytest
import torch
from packs_example import open_loader, open_source

from gids.sampler import Minibatch
from gids.store import FeatureStore


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packs_example.write(tmp_path_factory.mktemp("packs") / "two.gids")


@pytest.fixture(scope="session")
def rows(path: Path) -> dict[str, torch.Tensor]:
    """Every row of the undamaged dataset, by table."""
    store = FeatureStore(path)
    found = {name: t.read_rows(range(t.row_count)) for name, t in store.tables.items()}
    store.close()
    return found


@pytest.fixture(scope="session")
def epochs(path: Path) -> list[list[Minibatch]]:
    """Four epochs of open_loader(), by random reads."""
    with open_source(path, "random") as source, open_loader(source) as loader:
        return [list(loader) for _ in range(4)]


@pytest.fixture(scope="session")
def expected(epochs: list[list[Minibatch]]) -> list[Minibatch]:
    """The first of these epochs."""
    return epochs[0]
