"""Importing gids.graphbolt where GraphBolt cannot be, in a process of its own each time."""

from __future__ import annotations

import subprocess
import sys

import pytest
from graphbolt_model import WHY_NOT

import gids.dgl  # noqa: F401  (makes dgl importable)

import dgl  # isort: skip


def said_by(code: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import gids.dgl, dgl\n", "import gids.dgl, dgl.graphbolt\n"])
def test_the_import_error_lists_the_versions_that_are_needed(before: str) -> None:
    if not WHY_NOT:
        pytest.skip("GraphBolt is here")
    said = said_by(
        before + "try:\n    import gids.graphbolt\nexcept ImportError as error:\n    print(error.name, error)"
    )
    assert "dgl.graphbolt gids.graphbolt needs DGL's GraphBolt: dgl 2.1.0, torch 2.2.0 or 2.2.1" in said
    assert f"dgl {dgl.__version__}" in said
    assert "tools/graphbolt_env.sh" in said


@pytest.mark.slow
def test_without_dgl_it_says_so_as_well() -> None:
    said = said_by(
        "import sys\nsys.modules['dgl'] = None\n"
        "try:\n    import gids.graphbolt\nexcept ImportError as error:\n    print(error)"
    )
    assert "no DGL that can be imported (gids.dgl needs DGL" in said
