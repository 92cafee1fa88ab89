"""Writes docs/api.md: every public name of gids, and every public method, with its signature and the first
sentence of its docstring.

A package or module is public if the README, docs/*.md or an example mentions it. Its public names are
those of `__all__`, and those that it imports "as" themselves. The code is read, not imported, so no
framework is needed. tests/test_docs.py compares the page with the code.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
HEAD = """# Public names

`python tools/api_page.py` writes this page from the code: names and methods with the first words of their
docstrings. `…` stands for more than two options; `help(name)` shows all. Most scripts need only the ten names
in bold. What is not here is private.
"""
MOST_USED = (
    "gids.open",
    "gids.Source",
    "gids.NodeLoader",
    "gids.EdgeLoader",
    "gids.dgl.DataLoader",
    "gids.dgl.graph",
    "gids.pyg.NeighborLoader",
    "gids.pyg.LinkNeighborLoader",
    "gids.inference.layerwise",
    "gids.write.DatasetWriter",
)
"""The names in bold."""

MANY = 2
"""Arguments with a default that a signature shows; more of them are …"""

Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


class Place(NamedTuple):
    """A definition and the module that it is in."""

    module: str
    node: Definition


class Code:
    """The modules below a directory, by name, parsed when they are first asked for."""

    def __init__(self, root: Path):
        self._root = root
        text = "\n".join(page.read_text() for page in pages_of(root))
        self._named = set(re.findall(r"\.([a-z]\w*)", text))
        self._trees: dict[str, ast.Module | None] = {}
        self._described: set[tuple[str, str]] = set()  # methods, with their first sentences

    def tree(self, module: str) -> ast.Module | None:
        """None if there is no such module in Python."""
        if module not in self._trees:
            path = self._root.joinpath(*module.split("."))
            files = [path / "__init__.py", path.with_suffix(".py")]
            file = next((file for file in files if file.is_file()), None)
            self._trees[module] = ast.parse(file.read_text()) if file else None
        return self._trees[module]

    def public_names(self, module: str) -> list[str]:
        """Sorted, without submodules. A module without `__all__` has its public classes and functions."""
        tree = self.tree(module)
        assert tree is not None, module
        listed = [node for node in tree.body if "__all__" in assigned(node)]
        if not listed:
            names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        else:
            names = {name for node in listed for name in constants(node)}
            names |= {alias.name for _, alias in imports(tree) if alias.asname == alias.name}
        submodules = {name for name in names if self.tree(f"{module}.{name}") and not self.find(module, name)}
        return sorted((n for n in names - submodules if not n.startswith("_")), key=str.lower)

    def find(self, module: str, name: str) -> Place | None:
        """The definition that `module.name` leads to, through imports. None if it is outside or a module."""
        tree = self.tree(module)
        if tree is None:
            return None
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return Place(module, node)
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in assigned(node):
                return Place(module, node)
        for source, alias in imports(tree):
            if (alias.asname or alias.name) == name and source != module:
                return self.find(source, alias.name)
        return None

    def bases(self, place: Place) -> Iterator[Place]:
        """The class and those that it inherits from, nearest first, as far as they are in this code."""
        yield place
        if isinstance(place.node, ast.ClassDef):
            for base in place.node.bases:
                node = base.value if isinstance(base, ast.Subscript) else base
                inherited = self.find(place.module, node.id) if isinstance(node, ast.Name) else None
                if inherited is not None:
                    yield from self.bases(inherited)

    def arguments(self, place: Place) -> str:
        """As a call is written. Empty for constants, and for classes that others make or that define none."""
        if isinstance(place.node, ast.FunctionDef):
            return self.call(place, skip=0)
        if isinstance(place.node, ast.ClassDef) and "Made by " in (ast.get_docstring(place.node) or ""):
            return ""
        for module, node in self.bases(place):
            if not isinstance(node, ast.ClassDef):
                continue
            made = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
            for method in ("__init__", "__new__"):
                if method in made:
                    return self.call(Place(module, made[method]), skip=1)
            bases = {ast.unparse(base) for base in node.bases}
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            dataclass = next((d for d in decorators if d.startswith("dataclass")), None)
            if dataclass or "NamedTuple" in bases:
                fields = ["*"] if dataclass and "kw_only=True" in dataclass else []
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                        fields.append(ast.unparse(field.target) + self._default(module, field.value))
                return f"({', '.join(shortened(fields))})"
        return ""

    def methods(self, place: Place) -> dict[str, str]:
        """The public methods and properties of a class, with their arguments, -> their first sentences.

        Only those that a page names, as ".method".
        """
        found: dict[str, str] = {}
        seen: set[str] = set()
        for module, node in self.bases(place):
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
                    continue
                if method.name in seen:  # a nearer class has its own, or it is a property's setter
                    continue
                seen.add(method.name)
                if method.name in self._named:
                    decorators = {ast.unparse(d).rpartition(".")[2] for d in method.decorator_list}
                    is_property = decorators & {"property", "cached_property"}
                    at = Place(module, method)
                    call = "" if is_property else self.call(at, skip="staticmethod" not in decorators)
                    found[method.name + call] = self.sentence(at)
        return dict(sorted(found.items()))

    def call(self, place: Place, *, skip: int) -> str:
        """The arguments of a function, in parentheses, without the first `skip`."""
        assert isinstance(place.node, ast.FunctionDef)
        return f"({self._written(place.module, place.node.args, skip=skip)})"

    def _written(self, module: str, arguments: ast.arguments, *, skip: int) -> str:
        """Arguments with defaults, without types, and without the first `skip`."""
        plain = [*arguments.posonlyargs, *arguments.args]
        defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
        words = [a.arg + self._default(module, d) for a, d in zip(plain, defaults, strict=True)][skip:]
        if arguments.vararg:
            words.append(f"*{arguments.vararg.arg}")
        elif arguments.kwonlyargs:
            words.append("*")
        keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        words += [a.arg + self._default(module, d) for a, d in keywords]
        if arguments.kwarg:
            words.append(f"**{arguments.kwarg.arg}")
        return ", ".join(shortened(words))

    def _default(self, module: str, value: ast.expr | None) -> str:
        """The value of a named constant; … for what is made anew for each call, and for functions."""
        if value is None:
            return ""
        place = self.find(module, value.id) if isinstance(value, ast.Name) else None
        if place is not None and isinstance(place.node, ast.Assign | ast.AnnAssign):
            return self._default(place.module, place.node.value)
        is_made = isinstance(value, ast.Lambda) or ast.unparse(value).startswith("field(")
        return "=…" if place is not None or is_made else f"={ast.unparse(value)}"

    def entry(self, module: str, name: str) -> str:
        place = self.find(module, name)
        if place is None:
            return bullet(f"`{module}.{name}`")
        mark = "**" if f"{module}.{name}" in MOST_USED else ""
        call = f"{mark}`{module}.{name}{self.arguments(place)}`{mark}"
        text = bullet(f"{call}: {self.sentence(place)}".rstrip(": "))
        inherited = []  # what the page has for an earlier class
        for method, sentence in self.methods(place).items():
            if sentence and (method, sentence) in self._described:
                inherited.append(f"`.{method.partition('(')[0]}`")
                continue
            self._described.add((method, sentence))
            text += textwrap.indent(bullet(f"`.{method}`: {sentence}".rstrip(": "), 118), "  ")
        if inherited:
            text += textwrap.indent(bullet(f"{', '.join(inherited)}: as above.", 118), "  ")
        return text

    def sentence(self, place: Place) -> str:
        """The first of the docstring, or of the text below a constant, up to a semicolon."""
        if isinstance(place.node, ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(place.node) or ""
        else:
            tree = self.tree(place.module)
            body = tree.body if tree else []
            after = body[body.index(place.node) + 1 :][:1]
            text = ast.get_docstring(ast.Module(after, [])) or ""
        paragraph = " ".join(text.split("\n\n")[0].split())
        match = re.match(r"(.*?)[.;](?=\s|$)", paragraph)
        return f"{match[1]}." if match else paragraph


def shortened(arguments: list[str]) -> list[str]:
    """With … for the options, if they are many. A keyword that has no default stays."""
    if sum("=" in argument for argument in arguments) <= MANY:
        return arguments
    needed = [a for a in arguments if "=" not in a and not a.startswith("**")]
    return [*(needed[:-1] if needed[-1:] == ["*"] else needed), "…"]


def assigned(node: ast.stmt) -> set[str]:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {target.id for target in targets if isinstance(target, ast.Name)}


def constants(node: ast.stmt) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def imports(tree: ast.Module) -> Iterator[tuple[str, ast.alias]]:
    """Names that the module imports from others, at its top or for type checkers."""
    nodes = [*tree.body]
    for node in nodes:
        if isinstance(node, ast.If | ast.Try):
            nodes += [*node.body, *node.orelse]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.module, alias


def bullet(text: str, width: int = 120) -> str:
    return (
        textwrap.fill(
            f"* {text}", width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        + "\n"
    )


def pages_of(root: Path) -> list[Path]:
    """The pages and examples for users, without this one."""
    pages = [root / "README.md", *root.glob("docs/*.md"), *root.glob("docs/examples/*")]
    return [page for page in pages if page.name not in (PAGE.name, "CHANGELOG.md") and page.is_file()]


def modules_of_pages(root: Path) -> list[str]:
    """Packages and modules of gids that the user pages mention, sorted."""
    code = Code(root)
    modules = {"gids"}
    for page in pages_of(root):
        for name in re.findall(r"\bgids(?:\.[a-z_]+)+", page.read_text()):
            words = name.split(".")
            prefixes = (".".join(words[:n]) for n in range(2, len(words) + 1))
            modules |= {prefix for prefix in prefixes if code.tree(prefix) is not None}
    return sorted(modules)


def page_of(root: Path) -> str:
    """The text of docs/api.md for the code and the pages below `root`."""
    code, parts = Code(root), [HEAD]
    homes: dict[int, str] = {}  # the first module that lists a definition
    for module in modules_of_pages(root):
        package, _, last = module.rpartition(".")
        if package and last in code.public_names(package):
            continue  # a function with the name of its module
        new: list[str] = []
        listed: list[str] = []
        for name in code.public_names(module):
            place = code.find(module, name)
            home = homes.setdefault(id(place.node), module) if place else module
            (new if home == module else listed).append(name)
        text = "".join(code.entry(module, name) for name in new)
        if listed:
            text += bullet("listed above: " + ", ".join(f"`{module}.{name}`" for name in listed))
        if text:
            parts.append(f"\n## {module}\n\n{text}")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page_of(ROOT))
