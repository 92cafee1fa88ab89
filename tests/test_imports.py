"""Imports point one way."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import gids

ROOT = Path(gids.__file__).parent
BASE = {"closing", "errors", "sizes", "stored_file", "_core", "dgl_finder", "profiling"}
STORE = BASE | {"store"}
IO = STORE | {"cuda", "io"}
SAMPLER = IO | {"cache", "sampler"}
LOADER = SAMPLER | {"heat", "packs", "loader"}
BENCH = LOADER | {"write", "convert", "inference", "dgl", "pyg", "bench"}
ALLOWED = {
    "__init__": BASE,
    "__main__": {"cli"},
    "dgl_finder": set(),
    "closing": set(),
    "errors": set(),
    "profiling": set(),
    "sizes": set(),
    "stored_file": {"errors"},
    "store": STORE,
    "write": STORE | {"write"},
    "convert": STORE | {"write", "convert"},
    "cuda": STORE | {"cuda"},
    "io": IO,
    "cache": IO | {"cache"},
    "sampler": SAMPLER,
    "packs": IO | {"cache", "packs"},
    "heat": SAMPLER | {"heat", "write"},
    "loader": LOADER,
    "inference": LOADER | {"inference", "write"},
    "distributed": LOADER | {"distributed"},
    "dgl": LOADER | {"dgl"},
    "pyg": LOADER | {"pyg"},
    "lightning": LOADER,
    "graphbolt": LOADER | {"graphbolt"},
    "bench": BENCH,
    "cli": BENCH | {"distributed", "cli"},
}
"""What each folder and module of gids may import of the others."""
PUBLIC = ("distributed", "heat", "inference", "loader", "sampler", "write")
"""The parts of which pages for users name something; gids.dgl, pyg and graphbolt need their frameworks."""


def imported_parts(source: Path) -> set[str]:
    """Parts of gids that a file imports when it runs: what is for type checking does not count."""
    tree, parts = ast.parse(source.read_text()), set()
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            parts |= {n.name.split(".")[1] for n in node.names if n.name.startswith("gids.")}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "gids":
                parts |= {n.name for n in node.names}
            elif node.module.startswith("gids."):
                parts.add(node.module.split(".")[1])
    return parts


def test_every_module_imports_only_what_its_part_may() -> None:
    sources = list(ROOT.rglob("*.py"))
    parts = {path: path.relative_to(ROOT).parts[0].removesuffix(".py") for path in sources}
    assert set(parts.values()) == set(ALLOWED)
    wrong = {
        str(path.relative_to(ROOT)): found
        for path, part in parts.items()
        if (found := imported_parts(path) - ALLOWED[part])
    }
    assert wrong == {}


@pytest.mark.parametrize("name", ["dgl", "pyg", "graphbolt", "inference"])
def test_the_names_of_an_adapter_are_those_on_its_page(name: str) -> None:
    [names] = [
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / name / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    repository = Path(__file__).parents[1]
    pages = [repository / "README.md", *repository.glob("docs/*.md")]
    text = "\n".join(page.read_text() for page in pages)
    used = set(re.findall(rf"\bgids\.{name}\.(\w+)", text))
    assert set(names) == used


def test_no_two_parts_may_import_each_other() -> None:
    assert [(a, b) for a in ALLOWED for b in ALLOWED[a] if a != b and a in ALLOWED.get(b, ())] == []


def test_public_names_are_listed_and_can_be_imported() -> None:
    assert [name for name in dir(gids) if callable(getattr(gids, name))] == [*gids.__all__, "open"]
    assert set(dir(gids)) == {*gids.__all__, *PUBLIC, "__version__", "open"}
    with pytest.raises(AttributeError, match="has no attribute 'quickest'"):
        gids.quickest  # noqa: B018


def test_the_distribution_has_the_version_of_the_package() -> None:
    try:
        assert importlib.metadata.version("gids-loader") == gids.__version__
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gids-loader is not installed: gids is imported from its source")


def test_another_system_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ImportError, match=r"^gids needs Linux: .* \(this is darwin\)$"):
        runpy.run_path(gids.__file__)


def test_lines_of_native_code_have_at_most_120_characters() -> None:
    repository = Path(__file__).parents[1]
    long = [
        f"{path.relative_to(repository)}:{number}"
        for folder in ("native", "tests", "bench")
        for path in sorted((repository / folder).rglob("*.*"))
        if path.suffix in {".cpp", ".cu", ".h"}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120 and not line.startswith("// sources: ")  # for test_native.py
    ]
    assert long == []


def test_the_source_tree_says_that_it_hides_the_installed_package(tmp_path: Path) -> None:
    (tmp_path / "gids").mkdir()
    (tmp_path / "gids/__init__.py").write_bytes((ROOT / "__init__.py").read_bytes())
    program = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if isinstance(f, type)]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\nfrom gids import _core"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert "is the source of gids, without its native code" in done.stderr
    assert "start Python in another folder" in done.stderr
