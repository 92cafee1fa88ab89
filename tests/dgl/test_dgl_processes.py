"""gids.dgl in processes of its own: it makes PyPI's DGL importable, and lives with few file descriptors."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from gids.dgl_finder import import_dgl
from gids.write import DatasetWriter

INSTALL = "pip install 'dgl>=1.1.3,<=2.1.0' packaging pandas"


def test_the_error_names_the_package_that_is_not_installed():
    with patch.dict(sys.modules, {"dgl": None}):
        with pytest.raises(ImportError, match=r"gids\.dgl needs DGL") as raised:
            import_dgl()
    assert INSTALL in str(raised.value)


IMPORTS = """
import os, sys
before = list(sys.meta_path)
import gids, gids.errors
assert sys.meta_path == before
assert not {"dgl", "torch", "json", "gids.dgl_finder"} & sys.modules.keys()
import gids.loader, gids.write.partition, gids.cli
gids.NodeLoader, gids.open
assert sys.meta_path == before
assert "DGLBACKEND" not in os.environ
os.environ["DGLBACKEND"] = "pytorch"
try:
    import dgl
except Exception:
    pass
sys.modules["networkx"] = None
try:
    import gids.dgl
except ImportError as error:
    print(error)
del sys.modules["networkx"]
import gids.dgl, dgl, dgl.nn, torch
graph = dgl.rand_graph(10, 30)
print(dgl.nn.SAGEConv(4, 2, "mean")(dgl.add_self_loop(graph), torch.ones(10, 4)).shape)
try:
    import dgl.no_such_module
except ModuleNotFoundError as error:
    print(error)
if dgl.__version__ >= "2":  # DGL 1 has no GraphBolt
    import dgl.graphbolt as gb, dgl.graphbolt.impl
    try:
        gb.ItemSampler
    except ImportError as error:
        assert "dgl.graphbolt needs torch" in str(error), error
"""


def fresh(home):
    """The environment of a user who has made no choice for DGL."""
    return {k: v for k, v in os.environ.items() if not k.startswith("DGL")} | {"HOME": str(home)}


@pytest.mark.slow
def test_imports(tmp_path):
    """`import gids` installs no finder. DGL and its layers can be imported after a failure. A stand-in for
    GraphBolt alone has modules that nobody wrote; it says what it needs."""
    command = [sys.executable, "-P", "-W", "error", "-c", IMPORTS]
    result = subprocess.run(command, env=fresh(tmp_path), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    said = [f"DGL needs 'networkx': {INSTALL}", "torch.Size([10, 2])", "No module named 'dgl.no_such_module'"]
    assert result.stdout.splitlines() == said


SPAWN = """
import sys
import gids.dgl, dgl
import torch
from gids.write import DatasetWriter

if __name__ == "__main__":
    graph = dgl.rand_graph(100, 500)
    with DatasetWriter(sys.argv[1]) as writer:
        writer.write_table("node", "_N", "feat", torch.arange(100.0))
    sampler = dgl.dataloading.NeighborSampler([2], prefetch_node_feats=["feat"])
    loader = gids.dgl.DataLoader(
        graph, torch.arange(100), sampler, gids=sys.argv[1], batch_size=50, num_workers=1,
        multiprocessing_context="spawn",
    )
    for input_nodes, _, blocks in loader:
        assert torch.equal(blocks[0].srcdata["feat"], input_nodes.float())
        print("minibatch")
"""


@pytest.mark.slow
def test_a_worker_that_is_spawned(tmp_path):
    """The worker imports the script again, whose top imports `gids.dgl`. DGL prints no advice, and makes no
    ~/.dgl."""
    script, home = tmp_path / "script.py", tmp_path / "home"
    script.write_text(SPAWN)
    home.mkdir()
    command = [sys.executable, script, tmp_path / "x.gids"]
    result = subprocess.run(command, env=fresh(home), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "DGL backend" not in result.stderr
    assert result.stdout == "minibatch\nminibatch\n"
    assert list(home.iterdir()) == []


FEW = """
import logging, os, resource, signal, sys
import torch
import gids.dgl
import dgl

path, folder, *limits = sys.argv[1:]
for name in limits:
    if not (child := os.fork()):
        break
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
signal.alarm(120)
for number, end in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{folder}/{name}.{end}", os.O_WRONLY | os.O_CREAT), number)
logging.basicConfig(level=logging.WARNING)
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, name.split("-"))))
graph = dgl.rand_graph(1000, 10000)
sampler = dgl.dataloading.NeighborSampler([5, 5], prefetch_node_feats=["feat"])
with gids.open(path, memory=1 << 26, window=22) as source:
    rows = source.store.table("_N.feat").read_rows(torch.arange(1000))
    loader = gids.dgl.DataLoader(
        graph, torch.arange(1000), sampler, batch_size=20, num_workers=2, gids=source
    )
    for input_nodes, _, blocks in loader:
        assert torch.equal(blocks[0].srcdata["feat"], rows[input_nodes])
    print("whole", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
"""A fork for each limit, so that modules are imported once."""


@pytest.mark.slow
def test_an_epoch_with_few_file_descriptors_never_hangs(tmp_path):
    """The soft limit is raised to the hard one. A window that exhausts it is lowered."""
    with DatasetWriter(tmp_path / "d.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.randn(1000, 16))
    command = [sys.executable, "-P", "-W", "ignore", "-c", FEW, tmp_path / "d.gids", tmp_path]
    command += ["40-40", "200-400"]
    done = subprocess.run(command, timeout=250, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "40-40 1\n200-400 0\n"
    few, more = ((tmp_path / f"{limits}.err").read_text() for limits in ("40-40", "200-400"))
    assert "free file descriptors are too few for worker processes: raise `ulimit -n`" in few
    assert (tmp_path / "200-400.out").read_text() == "whole 400\n", more
    assert "window lowered from 22 to" in more
    assert "file descriptors" in more
