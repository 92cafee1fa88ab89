"""Fixtures of this folder."""

import pytest
from datasets import write_dataset


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(tmp_path / "mag.gids")
