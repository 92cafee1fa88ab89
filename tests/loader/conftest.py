"""Fixtures of this folder."""

from __future__ import annotations

from pathlib import Path

import loader_example
import pytest
import torch


@pytest.fixture(scope="session")
def source() -> dict[str, torch.Tensor]:
    return loader_example.make_source()


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory, source: dict[str, torch.Tensor]) -> Path:
    return loader_example.write(tmp_path_factory.mktemp("loader") / "two.gids", source)
