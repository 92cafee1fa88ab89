"""Fixtures of this folder."""

from __future__ import annotations

from pathlib import Path

import packs_example
import pytest
import torch

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
