"""The documentation is true: links lead somewhere, snippets run, command lines parse.

Every ```python block of the README and of docs/*.md runs, page by page and in order, in a folder with the
datasets of datasets(). A page may prepare more in a comment that GitHub does not show: `<!-- setup`, Python,
`-->`. A block under `<!-- not run: REASON -->`, and those of docs/internals, are compiled, and their names of
gids are looked up.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import re
import shlex
import shutil
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import api_page

import gids
from gids import cli
from gids.write import DatasetWriter, edge_list

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
USER_PAGES = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")]
CODE = re.compile(r"<!-- (setup)\n(.*?)-->|(?:<!-- (not run): .*? -->\n+)?```python\n(.*?)```", re.DOTALL)


class Snippet(NamedTuple):
    code: str
    runs: bool


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix(""))


def snippets(page: Path) -> list[Snippet]:
    """Hidden preparations and visible blocks. Line numbers of errors are those of the page."""
    text, found = page.read_text(), []
    for match in CODE.finditer(text):
        part = 2 if match[1] else 4
        lines_before = text.count("\n", 0, match.start(part))
        found.append(Snippet("\n" * lines_before + match[part], match[3] is None))
    return found


def prose(page: Path) -> str:
    return re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)


# Snippets


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with papers.gids (one node type; feat, edge table w), embeddings.gids (embedding of the same
    nodes) and shop.gids (users buy items)."""
    folder = tmp_path_factory.mktemp("datasets")
    generator = torch.Generator().manual_seed(1)
    nodes, cites = 300, ("_N", "_E", "_N")

    def edges(num_src: int, num_dst: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.randint(num_src, (count,), generator=generator),
            torch.randint(num_dst, (count,), generator=generator),
        )

    with DatasetWriter(folder / "papers.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.randn(nodes, 16, generator=generator))
        writer.write_edges(cites, edge_list(*edges(nodes, nodes, 3000), num_src=nodes, num_dst=nodes))
        writer.write_table("edge", cites, "w", torch.rand(3000, 1, generator=generator))
        writer.write_labels("_N", torch.arange(nodes) % 4)
        for split, first, end in (("train", 0, 150), ("val", 150, 200), ("test", 200, 300)):
            writer.write_split("_N", split, torch.arange(first, end))
    with DatasetWriter(folder / "embeddings.gids") as writer:
        writer.write_table("node", "_N", "embedding", torch.randn(nodes, 8, generator=generator))
    users, items = 50, 30
    with DatasetWriter(folder / "shop.gids") as writer:
        writer.write_table("node", "user", "feat", torch.randn(users, 8, generator=generator))
        writer.write_table("node", "item", "feat", torch.randn(items, 8, generator=generator))
        buyers, bought = edges(users, items, 400)
        buys = edge_list(buyers, bought, num_src=users, num_dst=items)
        writer.write_edges(("user", "buys", "item"), buys)
        reverse = edge_list(bought, buyers, num_src=items, num_dst=users)
        writer.write_edges(("item", "bought by", "user"), reverse)
    return folder


def train(*given: Any) -> Any:
    """What the snippets call a training step, or a run."""
    return given


PAGES_WITH_CODE = [page for page in USER_PAGES if any(snippet.runs for snippet in snippets(page))]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=name_of)
def test_snippets_run(
    page: Path, datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    frameworks = {"dgl": "gids.dgl", "torch_geometric": "torch_geometric"}  # gids.dgl makes DGL importable
    for word, module in frameworks.items():
        if any(s.runs and word in s.code for s in snippets(page)):
            pytest.importorskip(module, exc_type=ImportError)
    shutil.copytree(datasets, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "snippet", "train": train}
    for snippet in snippets(page):
        if snippet.runs:
            exec(compile(snippet.code, str(page), "exec"), names)
    for value in names.values():
        if isinstance(value, gids.Source):
            value.close()


def looked_up(node: ast.expr) -> Any:
    """The object that `gids.a.b` names. None for other expressions, and for what is in modules that cannot be
    imported here."""
    if isinstance(node, ast.Name):
        return gids if node.id == "gids" else None
    if not isinstance(node, ast.Attribute):
        return None
    owner = looked_up(node.value)
    if not isinstance(owner, ModuleType):
        return None
    name = f"{owner.__name__}.{node.attr}"
    if not hasattr(owner, "__path__") or importlib.util.find_spec(name) is None:
        return getattr(owner, node.attr)  # AttributeError: the page names what there is not
    try:
        return importlib.import_module(name)
    except ImportError:  # a framework is missing here
        return None


def not_run(page: Path) -> list[str]:
    """The code that no test runs: what the page says so of, and all of docs/internals."""
    return [s.code for s in snippets(page) if not s.runs or page not in USER_PAGES]


@pytest.mark.parametrize("page", [page for page in PAGES if not_run(page)], ids=name_of)
def test_snippets_that_are_not_run_name_what_exists(page: Path) -> None:
    for code in not_run(page):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gids"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if importlib.util.find_spec(f"{node.module}.{alias.name}") is None:
                        getattr(module, alias.name)
            elif isinstance(node, ast.Attribute):
                looked_up(node)
            elif isinstance(node, ast.Call) and (called := looked_up(node.func)) is not None:
                assert {keyword.arg for keyword in node.keywords} <= argument_names(called), ast.unparse(node)


def argument_names(called: Any) -> set[str]:
    """With those of **options: Unpack[...]."""
    parameters = inspect.signature(called).parameters
    if "options" not in parameters:
        return set(parameters)
    (options,) = typing.get_args(typing.get_type_hints(called)["options"])
    return {*parameters, *options.__annotations__}


@pytest.mark.parametrize(
    ("head", "documented"), [("option of `gids.open`", gids.open), ("field of `gids.Tuning`", gids.Tuning)]
)
def test_settings_list_every_option(head: str, documented: Any) -> None:
    table = re.search(rf"\| {head} .*?\n\n", (ROOT / "docs/settings.md").read_text(), re.DOTALL)
    assert table
    rows = re.findall(r"^\| (`.*?) \|", table[0], re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == set(inspect.signature(documented).parameters)
    explained = re.findall(r"^ +(\w+): ", inspect.getdoc(documented) or "", re.MULTILINE)
    assert set(explained) == listed


# The page of public names


def test_page_of_public_names_is_that_of_the_code() -> None:
    assert (ROOT / "docs/api.md").read_text() == api_page.page_of(ROOT), "run python tools/api_page.py"


def test_public_names_are_few_and_ten_are_marked() -> None:
    entries = re.findall(r"^\* (\**)`(gids[\w.]*)", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert len(entries) <= 60
    assert {name for mark, name in entries if mark} == set(api_page.MOST_USED)
    assert len(api_page.MOST_USED) == 10


def test_user_pages_are_short() -> None:
    longer = {"api", "papers", "performance", "performance-conditions"}
    lines = {page.stem: len(page.read_text().splitlines()) for page in ROOT.glob("docs/*.md")}
    assert {name for name, count in lines.items() if count > 120} <= longer


# Files and functions of the code


FILE = re.compile(r"`((?:gids|native|tests|bench|tools|docs)/[\w./-]*)`")


@pytest.mark.parametrize("page", PAGES[:2] + PAGES[3:], ids=name_of)  # the changelog names old files
def test_files_that_a_page_names_exist(page: Path) -> None:
    for name in FILE.findall(prose(page)):
        assert (ROOT / name).exists(), name


def table_below(page: Path, heading: str) -> list[list[str]]:
    """The cells of the rows of the first table below a heading."""
    section = page.read_text().split(f"\n## {heading}\n")[1]
    rows = section[section.index("|") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


ARCHITECTURE = ROOT / "docs/internals/architecture.md"


def test_walk_through_the_code_is_what_a_loader_calls(datasets: Path) -> None:
    rows = table_below(ARCHITECTURE, "The walk through the code")
    walk = {(FILE.findall(f)[0], name) for _, f, names in rows for name in re.findall(r"`(.+?)`", names)}
    section = ARCHITECTURE.read_text().split("\n## The walk through the code\n")[1].split("\n## ")[0]
    assert len({file for file in FILE.findall(section) if file.endswith(".py")}) <= 10
    installed = Path(gids.__file__).parents[1]
    called = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(installed):
            called.add((str(file.relative_to(installed)), frame.f_code.co_qualname))

    with gids.open(datasets / "papers.gids", memory="64MB") as source:
        sampler = gids.sampler.Neighbor([3, 3], threads=2)
        minibatches = iter(gids.NodeLoader(source, source.split("train"), sampler, batch_size=8, seed=0))
        sys.setprofile(note)
        try:
            next(minibatches), next(minibatches)
        finally:
            sys.setprofile(None)
    assert walk <= called


def test_table_of_places_names_what_is_in_the_files() -> None:
    for _, place in table_below(ARCHITECTURE, "Where is ..."):
        assert FILE.search(place), place
        for name, file in re.findall(r"`([\w.:]+)` (?:in|of) `([\w./]+)`", place):
            assert re.split(r"[.:]+", name)[-1] in (ROOT / file).read_text(), place


def test_the_table_of_faults_is_of_the_present_code() -> None:
    faults = tomllib.loads((ROOT / "tools/mutations.toml").read_text())["mutation"]
    assert [fault["what"] for fault in faults if fault["old"] not in (ROOT / fault["file"]).read_text()] == []
    assert [test for fault in faults for test in fault["tests"] if not (ROOT / test).exists()] == []
    *lines, last = (ROOT / "tools/mutations.txt").read_text().splitlines()[2:]
    rows = [re.match(r"(\S+) +(.+): (tests/\S+\.py)::(\w+)", line).groups() for line in lines]  # type: ignore[union-attr]
    assert [(file, what) for file, what, *_ in rows] == [(fault["file"], fault["what"]) for fault in faults]
    assert [name for *_, test, name in rows if f"def {name}(" not in (ROOT / test).read_text()] == []
    assert last == f"{len(faults)} of {len(faults)} faults were noticed"


# Messages


NOT_OUR_MESSAGES = {
    "module 'gids' has no attribute 'FeatureStore'",
    "No module named 'torchdata.datapipes'",
    "Package 'gids-loader' requires a different Python",
    "Too many open files",
    "import dgl",
    "gids bench bandwidth",
}


def texts_of_the_code() -> str:
    """Every text in the code of gids, with … for what is put in."""
    found = []
    for file in ROOT.glob("gids/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    for file in [*ROOT.glob("native/**/*.cpp"), *ROOT.glob("native/**/*.h")]:
        literals = re.sub(r'"\s*"', "", file.read_text())
        found += re.findall(r'"([^"\n]+)"', literals)
    return "\n".join(found)


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    texts = texts_of_the_code()
    page = (ROOT / "docs/troubleshooting.md").read_text()
    for cell in re.findall(r"^\| ([^|]*) \|", page, re.MULTILINE):
        for message in re.findall(r"`([^`]*)`", cell):
            if " " in message and message not in NOT_OUR_MESSAGES:
                message = re.sub(r"^\w*Error: ", "", message)
                for part in filter(None, (part.strip() for part in message.split("…"))):
                    assert part in texts, message


# Command lines


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words after `gids` of each command line in a block of shell commands."""
    text = re.sub(r"```(?:python|text)\n.*?```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"\\\n *", "", text)
    fenced = "".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)).splitlines()
    indented = re.findall(r"^    (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    for line in [*fenced, *indented]:
        for command in re.split(r"&&|\|", line):
            if re.match(r"\s*(\S*/)?gids ", command):
                yield shlex.split(command, comments=True)[1:]


@pytest.mark.parametrize("page", [p for p in PAGES if any(command_lines(p))], ids=name_of)
def test_command_lines_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in command_lines(page):
        try:
            cli._parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"gids {shlex.join(words)}: {capsys.readouterr().err.splitlines()[-1]}")


def options_of(words: list[str]) -> set[str]:
    """All options of the command that the words begin with."""
    parser, known = cli._parser(), set()
    for word in words:
        known |= set(parser._option_string_actions)
        nested = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
        if nested is None or word.startswith("-"):
            break
        assert word in nested.choices, f"no command {word!r} in {words}"
        parser = nested.choices[word]
    return known | set(parser._option_string_actions)


@pytest.mark.parametrize("page", PAGES[:2] + PAGES[3:], ids=name_of)  # the changelog tells of old commands
def test_commands_in_the_text_have_these_options(page: Path) -> None:
    for span in re.findall(r"`gids ([^`]+)`", prose(page)):
        words = span.split()
        known = options_of(words)
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in known, f"gids {span}"


# Links


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    found = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    return [
        ((page.parent / path).resolve() if path else page, anchor)
        for path, _, anchor in found
        if not path.startswith("http")
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    for path, anchor in links(page):
        assert path.is_file(), path
        assert not anchor or anchor in anchors(path), f"{path.name}#{anchor}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, next_pages = set(), [ROOT / "README.md"]
    while next_pages:
        page = next_pages.pop()
        if page not in seen:
            seen.add(page)
            next_pages += [path for path, _ in links(page) if path.suffix == ".md"]
    assert seen >= set(PAGES), sorted(map(name_of, set(PAGES) - seen))
