"""A window of minibatches from workers must not exhaust file descriptors or shared memory."""

import os
import subprocess
import sys

import pytest

from gids.dgl import headroom


@pytest.fixture
def free(monkeypatch):
    """What is free of each resource, settable."""
    amounts = {"descriptors": 1000, "bytes": 1 << 30}
    monkeypatch.setattr(headroom, "_free_descriptors", lambda: amounts["descriptors"])
    monkeypatch.setattr(headroom, "_free_shared_bytes", lambda: amounts["bytes"])
    return amounts


def test_nothing_is_limited_while_half_of_what_was_free_is_left(free):
    watched = headroom.Headroom()
    free["descriptors"], free["bytes"] = 500, 1 << 29
    assert watched.window_limit(12) is None


def test_the_window_is_half_of_what_used_half(free):
    watched = headroom.Headroom()
    free["descriptors"] = 400
    limit, reason = watched.window_limit(12)
    assert limit == 6
    assert reason == (
        "12 minibatches from worker processes left 400 of 1000 file descriptors; raise `ulimit -n`"
    )
    assert watched.window_limit(1)[0] == 1
    free["descriptors"], free["bytes"] = 1000, 1 << 20
    assert "/dev/shm" in watched.window_limit(12)[1]


def test_an_epoch_under_a_low_limit_of_open_files():
    code = """
import logging, pathlib, resource, sys, tempfile
import dgl_model
logging.basicConfig(level=logging.WARNING)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400))
with tempfile.TemporaryDirectory() as directory:
    data = dgl_model.heterogeneous(pathlib.Path(directory))
    indices, sampler = dgl_model.make("neighbor", data, None)
    loader = dgl_model.gids_loader(data, indices, sampler, batch_size=4, num_workers=2, gids_window=22)
    count = sum(dgl_model.assert_rows_equal_source(batch, data) == 5 for batch in loader)
    assert count == len(loader) == 22, count
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 400
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "window lowered from 22 to" in result.stderr
    assert "file descriptors" in result.stderr
