"""Fixtures of this folder."""

from __future__ import annotations

from pathlib import Path

import packs_example
import pytest


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packs_example.write(tmp_path_factory.mktemp("packs") / "two.gids")
