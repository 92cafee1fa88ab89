"""Runs PyG's own tests of loaders, samplers and stores against gids.pyg: python tools/pyg_tests.py CHECKOUT

CHECKOUT: a directory with PyG's `test` and `torch_geometric` folders, of any tag. The PyG that runs is the
installed one. Runs twice: with data in memory, and with data that is first converted to a dataset on
disk. Prints the passes and failures of both. `--write docs/pyg.md` writes them to the page; `--title` says
what files of no tag are.

PyG's tests import its classes by name. While a test module is imported, these names lead to gids.pyg, and
tests that ask for pyg-lib or torch-sparse are not skipped; those that compare both are. A random graph
stands in for PyG's data sets.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.loader
import torch_geometric.nn
import torch_geometric.sampler.neighbor_sampler
import torch_geometric.testing
import torch_geometric.typing
from torch_geometric.data import Data, HeteroData

import gids.pyg
from gids.cli import main
from gids.write import DatasetWriter

TESTS = (
    "test/loader/test_neighbor_loader.py",
    "test/loader/test_link_neighbor_loader.py",
    "test/loader/test_zip_loader.py",
    "test/sampler/test_sampler_neighbor_sampler.py",
    "test/data/test_feature_store.py",
    "test/data/test_graph_store.py",
)
SUPPORTED = (
    "WITH_PYG_LIB",
    "WITH_TORCH_SPARSE",
    "WITH_WEIGHTED_NEIGHBOR_SAMPLE",
    "WITH_EDGE_TIME_NEIGHBOR_SAMPLE",
)
"""What tests ask for: gids.pyg has it without these packages."""

PYGS_WITH_PACKAGE = torch_geometric.testing.withPackage

NODES, EDGES, FEATURES, CLASSES = 2708, 5278, 1433, 7


class StandIn(list[Data]):
    """A data set of one random undirected graph, with Cora's counts."""

    num_features, num_classes = FEATURES, CLASSES

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        row, col = torch.randint(NODES, (2, EDGES), generator=generator).unbind()
        edge_index = torch.stack([torch.cat([row, col]), torch.cat([col, row])])
        edge_index = torch_geometric.utils.coalesce(edge_index[:, edge_index[0] != edge_index[1]])
        x = (torch.rand(NODES, FEATURES, generator=generator) < 0.01).float()
        super().__init__([Data(x=x, edge_index=edge_index)])

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index).clone()


def on_disk(loader: type, folder: Path) -> Callable[..., Any]:
    """A loader that first writes Data and HeteroData to a dataset. Other data is given as it is."""
    numbers = itertools.count()

    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, Data | HeteroData) or not has_edges(data):
            return loader(data, *args, **kwargs)
        number = next(numbers)
        source, path = folder / f"{loader.__name__}{number}.pt", folder / f"{loader.__name__}{number}.gids"
        torch.save(as_dict(data), source)
        if main(["convert", str(source), str(path)]) != 0:
            raise RuntimeError(f"gids convert could not convert {data}")
        return loader(path, *args, **kwargs)

    return make


def has_edges(data: Data | HeteroData) -> bool:
    return "edge_index" in data if isinstance(data, Data) else len(data.edge_types) > 0


def as_dict(data: Data | HeteroData) -> dict[Any, Any]:
    """data.to_dict(), with tensors, and without edges to train on, which belong to no graph."""

    def tensors(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
            if name != "edge_label_index"
        }

    found = data.to_dict()
    if isinstance(data, Data):
        return tensors(found)
    return {key: tensors(values) for key, values in found.items() if key != "_global_store"}


def of_three_nodes(kind: type) -> type:
    """A store without arguments, over a small dataset."""

    def opened(self: Any) -> None:
        path = Path(tempfile.mkdtemp()) / "three.gids"
        with DatasetWriter(path) as writer:
            writer.write_table("node", "A", "other", torch.zeros(3, 3))
        kind.__init__(self, path)  # type: ignore[misc]

    return type(kind.__name__, (kind,), {"__init__": opened})


def with_package(*packages: str) -> Callable[[Any], Any]:
    """PyG's withPackage, but a test that asks for one sampling package runs: gids.pyg stands in."""
    if len(packages) == 1 and packages[0].startswith(("pyg_lib", "torch_sparse")):
        return lambda test: test
    return PYGS_WITH_PACKAGE(*packages)


class AgainstGids:
    """A pytest plugin: test modules import gids.pyg under PyG's names. Counts the results."""

    def __init__(self, folder: Path | None) -> None:
        wrap = (lambda loader: loader) if folder is None else (lambda loader: on_disk(loader, folder))
        typing, testing = torch_geometric.typing, torch_geometric.testing
        self.names: list[tuple[Any, str, Any]] = [(typing, name, True) for name in SUPPORTED]
        self.names += [(testing, name, lambda test: test) for name in ("onlyOnline", "onlyNeighborSampler")]
        self.names += [
            (testing, "withPackage", with_package),
            (torch_geometric.loader, "NeighborLoader", wrap(gids.pyg.NeighborLoader)),
            (torch_geometric.loader, "LinkNeighborLoader", wrap(gids.pyg.LinkNeighborLoader)),
            (torch_geometric.sampler.neighbor_sampler, "NeighborSampler", gids.pyg.NeighborSampler),
        ]
        self.results: Counter[str] = Counter()
        self.failures: list[tuple[str, str]] = []
        """The test, and the first line of its error."""

    @property
    def counts(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.results.items()))

    @contextlib.contextmanager
    def renamed(self, path: Path) -> Iterator[None]:
        names = list(self.names)
        if path.parent.name == "data":  # tests of stores
            names += [
                (torch_geometric.testing, "MyFeatureStore", of_three_nodes(gids.pyg.FeatureStore)),
                (torch_geometric.testing, "MyGraphStore", of_three_nodes(gids.pyg.GraphStore)),
            ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in names]
        try:
            for owner, name, value in names:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        if not isinstance(collector, pytest.Module):
            return (yield)
        with self.renamed(collector.path):
            return (yield)

    @pytest.fixture
    def get_dataset(self) -> Callable[..., StandIn]:
        return lambda name: StandIn()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.results[report.outcome] += 1
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                said = str(crash.message if crash else report.longrepr).strip().splitlines()[0]
                self.failures.append((report.nodeid, said))


def run(checkout: Path, files: list[Path], data: str) -> AgainstGids:
    """Run the tests with data in "memory" or on "disk". Exits with status 2 if pytest could not run them."""
    with tempfile.TemporaryDirectory() as folder:
        plugin = AgainstGids(Path(folder) if data == "disk" else None)
        (settings := Path(folder, "none.ini")).touch()  # in place of the checkout's
        options = ["--rootdir", str(checkout), "-c", str(settings), "-p", "no:cacheprovider", "-n", "0"]
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            quiet = ["-q", "--tb=short", "--no-header"]
            status = pytest.main([*options, *quiet, *map(str, files)], plugins=[plugin])
    for name, module in list(sys.modules.items()):  # the next run imports the tests anew
        if checkout.resolve() in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(output.getvalue())
        raise SystemExit(2)
    return plugin


RESULTS = re.compile(r"(?<=<!-- by tools/pyg_tests.py -->\n).*?(?=<!-- end -->)", re.S)
"""What the tool has written to the page."""


def with_results(page: str, title: str, results: dict[str, AgainstGids], missing: list[str]) -> str:
    """The page with the counts and the failed tests, in place of the earlier ones.

    results: by "in memory" and "on disk". missing: files of TESTS that did not run.
    """
    if RESULTS.search(page) is None:
        raise SystemExit("the page has no lines <!-- by tools/pyg_tests.py --> and <!-- end -->")
    runs: dict[str, list[str]] = {}
    for data, plugin in results.items():
        for test, _ in plugin.failures:
            runs.setdefault(test, []).append(data)
    tests: dict[str, list[str]] = {}
    for test, where in runs.items():
        tests.setdefault(" and ".join(where), []).append(f"`{test}`")
    counts = [f"* data {data}: {plugin.counts}" for data, plugin in results.items()]
    failed = [f"* failed {where}: {', '.join(names)}" for where, names in tests.items()]
    without = f", without {' and '.join(f'`{name}`' for name in missing)}" if missing else ""
    installed = f"With PyG {torch_geometric.__version__} installed{without}:"
    body = "\n".join(["", f"### {title}", "", installed, "", *counts, *failed, "", ""])
    return RESULTS.sub(lambda _: body, page)


def main_of_tool() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="directory with PyG's test folder")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the results to this page")
    parser.add_argument("--title", help="with --write: what the tests are, if not 'PyG VERSION'")
    given = parser.parse_args()
    files = [given.checkout / name for name in TESTS if (given.checkout / name).exists()]
    if not files:
        parser.error(f"{given.checkout} has none of {', '.join(TESTS)}")
    package = given.checkout / "torch_geometric/__init__.py"
    text = package.read_text().replace("'", '"') if package.exists() else ""
    version = re.search(r'(?m)^__version__ = "(.*)"', text)
    if given.write and version is None and not given.title:
        parser.error(f"{package} has no __version__: give --title")
    results = {}
    for where, data in (("in memory", "memory"), ("on disk", "disk")):
        plugin = results[where] = run(given.checkout, files, data)
        for test, message in plugin.failures:
            print(f"{test}: {message}")
        print(f"data {where}: {plugin.counts}")
    if given.write:
        missing = [name for name in TESTS if given.checkout / name not in files]
        title = given.title or f"PyG {version[1] if version else ''}"
        given.write.write_text(with_results(given.write.read_text(), title, results, missing))
    return 1 if any(plugin.failures for plugin in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main_of_tool())
