"""A window of minibatches from workers must not exhaust file descriptors."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_an_epoch_under_a_low_limit_of_open_files():
    code = """
import logging, pathlib, resource, sys, tempfile
import dgl_model
logging.basicConfig(level=logging.WARNING)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400))
with tempfile.TemporaryDirectory() as directory:
    data = dgl_model.heterogeneous(pathlib.Path(directory))
    indices, sampler = dgl_model.make("neighbor", data, None)
    loader = dgl_model.gids_loader(data, indices, sampler, batch_size=4, num_workers=2, window=22)
    count = sum(dgl_model.assert_rows_equal_source(batch, data) == 6 for batch in loader)
    assert count == len(loader) == 22, count
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 400
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(
                (os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__)))
            )
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "window lowered from 22 to" in result.stderr
    assert "file descriptors" in result.stderr
