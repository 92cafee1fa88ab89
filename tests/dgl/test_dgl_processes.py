"""gids.dgl in processes of its own: it makes PyPI's DGL importable, and lives with few file descriptors."""

import os
import subprocess
import sys

import pytest
import torch

from gids.write import DatasetWriter


@pytest.fixture
def run(tmp_path):
    """Runs code in a fresh process with an empty home, warnings being errors; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DGL")} | {"HOME": str(tmp_path)}

    def run(code):
        command = [sys.executable, "-P", "-W", "error", "-c", code]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert "DGL backend" not in result.stderr
        return result.stdout

    return run


@pytest.mark.slow
def test_dgl_and_its_layers_import_and_leave_nothing_behind(run, tmp_path):
    """Only a stand-in for GraphBolt has modules that nobody wrote. It says what it needs when used."""
    printed = run("""
import gids.dgl, dgl, dgl.nn, torch
graph = dgl.rand_graph(10, 30)
print(dgl.nn.SAGEConv(4, 2, "mean")(dgl.add_self_loop(graph), torch.ones(10, 4)).shape)
try:
    import dgl.no_such_module
except ModuleNotFoundError as error:
    print(error)
if dgl.__version__ >= "2":  # DGL 1 has no GraphBolt
    import dgl.graphbolt as gb, dgl.graphbolt.impl
    assert dgl.graphbolt is gb
    try:
        gb.ItemSampler
    except ImportError as error:
        assert "dgl.graphbolt needs torch" in str(error), error
""")
    assert printed.splitlines()[-2:] == ["torch.Size([10, 2])", "No module named 'dgl.no_such_module'"]
    assert list(tmp_path.iterdir()) == []  # DGL would have made ~/.dgl


@pytest.mark.slow
def test_importing_gids_installs_no_finder_and_dgl_imports_after_an_import_that_failed(run):
    run("""
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
import gids.dgl, dgl
assert dgl.rand_graph(10, 20).num_edges() == 20
""")


SPAWN = """
import sys
import gids.dgl, dgl
import torch
from gids.write import DatasetWriter

def edges(rank, graph):
    print("edges:", graph.num_edges(), flush=True)

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
    torch.multiprocessing.spawn(edges, (graph,), 1)
"""


@pytest.mark.slow
def test_processes_that_are_spawned(tmp_path):
    """A spawned process imports `gids.dgl` at the script's top."""
    script = tmp_path / "script.py"
    script.write_text(SPAWN)
    command = [sys.executable, script, tmp_path / "x.gids"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "minibatch\nminibatch\nedges: 500\n"


def test_the_error_names_the_package_that_is_not_installed(run):
    printed = run("""
import sys
for missing in ("dgl", "networkx"):
    sys.modules[missing] = None
    try:
        import gids.dgl
    except ImportError as error:
        print(error)
    del sys.modules[missing]
""")
    assert "gids.dgl needs DGL" in printed
    assert "DGL needs 'networkx'" in printed
    assert printed.count("pip install 'dgl>=1.1.3,<=2.1.0' packaging pandas") == 2


LIMITS = [(40, 40), (128, 128), (200, 400)]
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


@pytest.fixture(scope="module")
def printed_with_few(tmp_path_factory):
    """The folder of what each fork printed."""
    folder = tmp_path_factory.mktemp("few")
    with DatasetWriter(folder / "d.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.randn(1000, 16))
    command = [sys.executable, "-P", "-W", "ignore", "-c", FEW, folder / "d.gids", folder]
    limits = [f"{soft}-{hard}" for soft, hard in LIMITS]
    done = subprocess.run([*command, *limits], timeout=550, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split("\n")[:-1] == [f"{name} {int(name == '40-40')}" for name in limits]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("soft", "hard"), LIMITS)
def test_an_epoch_with_few_file_descriptors_never_hangs(printed_with_few, soft, hard):
    """The soft limit is raised to the hard one. A window that exhausts it is lowered."""
    printed, errors = ((printed_with_few / f"{soft}-{hard}.{end}").read_text() for end in ("out", "err"))
    if hard == 40:
        assert "free file descriptors are too few for worker processes: raise `ulimit -n`" in errors
    else:
        assert printed == f"whole {hard}\n", errors
    if hard == 400:
        assert "window lowered from 22 to" in errors
        assert "file descriptors" in errors
