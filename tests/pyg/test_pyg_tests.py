"""tools/pyg_tests.py: PyG's own tests import gids.pyg under PyG's names. Here with two tests of our own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch_geometric

TOOL = Path(__file__).parents[2] / "tools/pyg_tests.py"

TESTS = """
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.testing import onlyNeighborSampler, withPackage
from torch_geometric.typing import WITH_EDGE_TIME_NEIGHBOR_SAMPLE

def loader_of(size):
    data = Data(x=torch.arange(9.0)[:, None], edge_index=torch.randint(9, (2, 40)))
    return NeighborLoader(data, [2], batch_size=size, disjoint=True)

@onlyNeighborSampler
@withPackage('pyg_lib')
def test_where_the_data_is(get_dataset):
    assert WITH_EDGE_TIME_NEIGHBOR_SAMPLE
    assert get_dataset(name='Cora')[0].num_nodes == 2708
    batch = next(iter(loader_of(3)))
    assert batch.batch[:3].tolist() == [0, 1, 2]
    assert torch.equal(batch.x.view(-1).long(), batch.n_id)

@withPackage('pyg_lib', 'torch_sparse')
def test_that_compares_both():
    raise NotImplementedError

def test_that_fails():
    where, _, _ = type(loader_of(3)).__module__.partition('.')
    assert where == ''
"""


@pytest.mark.slow
def test_passes_and_failures_are_counted_and_data_is_where_it_should_be(tmp_path: Path) -> None:
    (tmp_path / "test/loader").mkdir(parents=True)
    (tmp_path / "test/loader/test_zip_loader.py").write_text(TESTS)
    (tmp_path / "torch_geometric").mkdir()
    (tmp_path / "torch_geometric/__init__.py").write_text("__version__ = '2.7.0'\n")
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- by tools/pyg_tests.py -->\n\nNot yet run.\n\n<!-- end -->\nb\n")
    command = [sys.executable, TOOL, tmp_path, "--write", page]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    name = "test/loader/test_zip_loader.py::test_that_fails"
    failed = f"{name}: AssertionError: assert '{{}}' == ''"
    assert run.stdout.splitlines() == [
        failed.format("torch_geometric"),
        "data in memory: 1 failed, 1 passed, 1 skipped",
        failed.format("gids"),
        "data on disk: 1 failed, 1 passed, 1 skipped",
    ]
    others = " and ".join(
        f"`test/{name}.py`"
        for name in (
            "loader/test_neighbor_loader",
            "loader/test_link_neighbor_loader",
            "sampler/test_sampler_neighbor_sampler",
            "data/test_feature_store",
            "data/test_graph_store",
        )
    )
    part = f"""### PyG 2.7.0

With PyG {torch_geometric.__version__} installed, without {others}:

* data in memory: 1 failed, 1 passed, 1 skipped
* data on disk: 1 failed, 1 passed, 1 skipped
* failed in memory and on disk: `{name}`
"""
    assert page.read_text() == f"a\n<!-- by tools/pyg_tests.py -->\n\n{part}\n<!-- end -->\nb\n"
    run = subprocess.run(
        [sys.executable, TOOL, tmp_path / "test"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "has none of test/loader/test_neighbor_loader.py" in run.stderr
