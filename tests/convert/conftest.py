"""Fixtures of this folder."""

import pytest


@pytest.fixture
def in_this_process(monkeypatch):
    """SciPy and DGL read in this process at once. A trial in another one takes seconds."""
    monkeypatch.setattr("gids.convert.readers.try_to_read", lambda *_: None)
