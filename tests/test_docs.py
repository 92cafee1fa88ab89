"""The documentation holds together: links lead somewhere, no page is lost, every example is Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_there_are(page: Path) -> None:
    for path, anchor in links(page):
        assert path.is_file(), path
        assert not anchor or anchor in anchors(path), f"{path.name}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_python(page: Path) -> None:
    for example in EXAMPLE.findall(page.read_text()):
        ast.parse(example)


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, next_pages = set(), [ROOT / "README.md"]
    while next_pages:
        page = next_pages.pop()
        if page not in seen:
            seen.add(page)
            next_pages += [path for path, _ in links(page) if path.suffix == ".md"]
    assert seen >= set(PAGES)
