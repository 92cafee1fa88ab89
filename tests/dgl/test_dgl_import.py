"""Importing gids.dgl makes PyPI's DGL importable, in a process of its own each time."""

import os
import subprocess
import sys

import pytest

import gids.dgl  # noqa: F401  (makes dgl importable)

import dgl  # isort: skip


@pytest.fixture
def run(tmp_path):
    """Runs code in a fresh process with an empty home, warnings being errors; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DGL")} | {"HOME": str(tmp_path)}

    def run(code, **variables):
        command = [sys.executable, "-P", "-W", "error", "-c", code]
        result = subprocess.run(
            command, env=environment | variables, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        assert "DGL backend" not in result.stderr
        return result.stdout

    return run


def test_dgl_and_its_layers_import_and_leave_nothing_behind(run, tmp_path):
    printed = run("""
import gids.dgl, dgl, dgl.nn, torch
graph = dgl.rand_graph(10, 30)
print(dgl.nn.SAGEConv(4, 2, "mean")(dgl.add_self_loop(graph), torch.ones(10, 4)).shape)
""")
    assert printed.endswith("torch.Size([10, 2])\n")
    assert list(tmp_path.iterdir()) == []  # DGL would have made ~/.dgl


@pytest.mark.skipif(dgl.__version__ < "2", reason="DGL 1 has no GraphBolt")
def test_graphbolt_says_what_it_needs_when_used(run):
    printed = run("""
import gids.dgl, dgl, torch
import dgl.graphbolt as gb, dgl.graphbolt.impl
assert dgl.graphbolt is gb
try:
    gb.ItemSampler
except ImportError as error:
    print(error)
else:
    print("dgl.graphbolt needs torch: the real one is there")
""")
    assert "dgl.graphbolt needs torch" in printed


def test_after_an_import_of_dgl_that_failed(run):
    run(
        """
try:
    import dgl
except Exception:
    pass
import gids.dgl, dgl
assert dgl.rand_graph(10, 20).num_edges() == 20
""",
        DGLBACKEND="pytorch",
    )


@pytest.mark.parametrize(
    ("missing", "message"), [("dgl", "gids.dgl needs DGL"), ("networkx", "DGL needs 'networkx'")]
)
def test_what_is_not_installed_is_named(run, missing, message):
    printed = run(f"""
import sys
sys.modules[{missing!r}] = None
try:
    import gids.dgl
except ImportError as error:
    print(error)
""")
    assert message in printed
    assert "pip install 'dgl>=1.1.3,<=2.1.0' packaging pandas" in printed
