"""Imports point one way."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import gids

ROOT = Path(gids.__file__).parent
ORDER = [
    "errors",
    "sizes",
    "_core",
    "store",
    "write",
    "convert",
    "cuda",
    "io",
    "cache",
    "sampler",
    "heat",
    "loader",
    "inference",
]
"""A part may import those before it; what is not listed (adapters, cli) may import them all."""


def imported_parts(source: Path) -> set[str]:
    """Parts of gids that a file imports when it runs; imports for type checking do not count."""
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            parts |= {n.name.split(".")[1] for n in node.names if n.name.startswith("gids.")}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "gids":
                parts |= {n.name for n in node.names}
            elif node.module.startswith("gids."):
                parts.add(node.module.split(".")[1])
    return parts


def test_each_part_imports_only_those_before_it() -> None:
    looked_at = 0
    for part in ORDER[3:]:
        for source in (ROOT / part).rglob("*.py"):
            allowed = set(ORDER[: ORDER.index(part) + 1])
            assert imported_parts(source) <= allowed, source
            looked_at += 1
    assert looked_at > 10


def test_all_that_is_public_can_be_reached_and_is_listed() -> None:
    script = (
        "import sys, gids; assert 'torch' not in sys.modules; "
        "print(gids.sampler.Neighbor.__name__, *(n for n in dir(gids) if callable(getattr(gids, n))))"
    )
    said = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines()[-1].split() == ["Neighbor", *gids.__all__]
    assert gids.__version__ == importlib.metadata.version("gids")
    assert set(dir(gids)) == {*gids.__all__, *ORDER[3:], "__version__"}
    with pytest.raises(AttributeError, match="has no attribute 'quickest'"):
        gids.quickest  # noqa: B018
