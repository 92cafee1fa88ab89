"""Fixtures of this folder."""

import pytest


@pytest.fixture
def disks(tmp_path):
    """Three directories, for shards."""
    directories = [tmp_path / f"ssd{i}" for i in range(3)]
    for directory in directories:
        directory.mkdir()
    return directories
