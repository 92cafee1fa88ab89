"""The figures in the documentation are those of bench/results."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import papers
import report

ROOT = report.ROOT
RESULTS = [json.loads(path.read_text()) for path in sorted(report.RESULTS.glob("*.json"))]


def test_every_result_is_on_a_page_or_misses_no_target():
    shown = [name for section in report.SECTIONS.values() for name in section]
    of_papers = {papers.result_of(row.run) for rows in papers.WORKS.values() for row in rows}
    names = [*shown, *report.NOT_SHOWN]
    assert len(set(names)) == len(names)
    assert not of_papers & set(report.NOT_SHOWN)
    results = {path.stem for path in report.RESULTS.glob("*.json")}
    assert set(names) <= results <= {*names, *of_papers}
    figures = [figure for name in report.NOT_SHOWN for figure in report.read(name)["figures"]]
    assert [figure["name"] for figure in figures if figure.get("passed") is False] == []


@pytest.mark.parametrize("name", report.PAGES)
def test_the_tables_of_the_pages_are_those_of_the_results(name):
    page = (ROOT / "docs" / name).read_text()
    assert report.with_tables(page, report.PAGES[name]) == page, "run bench/report.py"
    sections = {*papers.WORKS, *papers.TABLES, *papers.PLOTS} if name == "papers.md" else set(report.SECTIONS)
    assert set(re.findall(r"<!-- results: (.*) -->", page)) == sections


@pytest.mark.parametrize("name", report.LEFT_OUT)
def test_only_some_figures_of_a_result_are_left_out(name):
    names = [figure["name"] for figure in report.read(name)["figures"]]
    left_out = [figure for figure in names if re.fullmatch(report.LEFT_OUT[name], figure)]
    assert 0 < len(left_out) < len(names)


def test_rows_of_papers_name_figures_that_their_results_have():
    for row in itertools.chain(*papers.WORKS.values()):
        if (report.RESULTS / f"{papers.result_of(row.run)}.json").exists():
            lines = report.of_papers(next(work for work, rows in papers.WORKS.items() if row in rows))
            assert [line for line in lines if row.item in line and "not measured yet" not in line], row.item


def test_commands_of_results_name_scripts():
    commands = [result["command"] for result in RESULTS if result["command"]]
    scripts = {word for command in commands for word in command.split() if re.match("(bench|tools)/", word)}
    assert len(scripts) > 10
    assert [script for script in sorted(scripts) if not (ROOT / script).exists()] == []


def readme_rows():
    """(result, command) of each row of the table of measurements."""
    text = (ROOT / "README.md").read_text()
    table = text.partition("| what | result | command |")[2].partition("\n\n")[0]
    return [(cells[2], cells[3].strip(" `")) for row in table.splitlines()[2:] if (cells := row.split("|"))]


@pytest.mark.parametrize(("result", "command"), readme_rows())
def test_figures_of_the_readme_are_those_of_the_results(result, command):
    scripts = {command, "tools/graphbolt_env.sh" if "graphbolt" in command else command}
    values = []
    for measured in RESULTS:
        if any((measured["command"] or "").startswith(script) for script in scripts):
            for figure in measured["figures"]:
                value = figure["value"]
                values += value if isinstance(value, list) else [value]
    numbers = re.findall(
        "([0-9.]+)(?= (?:\N{MULTIPLICATION SIGN}|of|to|GB/s))", re.sub(r"\(docs[^)]*\)", "", result)
    )
    assert numbers
    for number in numbers:
        digits = len(number.partition(".")[2])
        assert float(number) in {round(value, digits) for value in values}, f"{command}: {number}"
