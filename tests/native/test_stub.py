"""gids/_core.pyi describes what the native module has, name by name."""

from __future__ import annotations

import ast
from pathlib import Path

import gids
from gids import _core


def names_in_stub() -> set[str]:
    names: set[str] = set()
    for node in ast.parse((Path(gids.__file__).parent / "_core.pyi").read_text()).body:
        if isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            members = [member for member in getattr(node, "body", []) if isinstance(member, ast.FunctionDef)]
            names |= {f"{node.name}.{member.name}" for member in members}
    return {name for name in names if "__" not in name}


def names_in_module() -> set[str]:
    names = {name: getattr(_core, name) for name in dir(_core)}
    classes = {name: value for name, value in names.items() if isinstance(value, type)}
    members = {f"{name}.{member}" for name, value in classes.items() for member in vars(value)}
    return {name for name in {*names, *members} if "__" not in name}


def test_the_stub_has_the_names_of_the_module() -> None:
    assert names_in_stub() == names_in_module()
