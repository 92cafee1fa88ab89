"""The scripts of docs/examples, run as a user runs them: each learns more than chance, and prints it."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import run_ranks

from gids.cli import main

FOLDER = Path(__file__).parents[2] / "docs/examples"
CLASSES = 8


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one.gids, several.gids and parts.gids, made by the commands that the scripts name."""
    folder = tmp_path_factory.mktemp("examples")
    sizes = f"--nodes 2000 --edges 20000 --dim 32 --classes {CLASSES} --split 0.6,0.2,0.2".split()
    for name, kind in (("one", []), ("several", ["--hetero"])):
        assert main(["generate", str(folder / f"{name}.gids"), *sizes, *kind, "--quiet"]) == 0
    assert main(["partition", str(folder / "one.gids"), str(folder / "parts.gids"), "--parts", "2"]) == 0
    return folder


def numbers(pattern: str, output: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, output)]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("script", "dataset", "arguments", "accuracy"),
    [
        ("dgl_graphsage.py", "one", ["--batch-size", "64"], 75),
        ("pyg_graphsage.py", "one", ["--batch-size", "64"], 75),
        ("torch_graphsage.py", "one", ["--batch-size", "64"], 75),
        ("link_prediction.py", "one", [], 65),
        ("temporal_links.py", "shop", ["--make"], 75),
        ("rgcn.py", "several", ["--batch-size", "32", "--table", "feat"], 75),
        ("inference.py", "one", ["--batch-size", "64"], 75),
        ("distributed_dgl.py", "one", ["--batch-size", "64", "--table", "feat"], 60),
        ("distributed_pyg.py", "one", ["--batch-size", "64", "--table", "feat"], 60),
        ("distributed_pytorch.py", "parts", ["--batch-size", "64"], 60),
        ("distributed_cooperative.py", "one", ["--batch-size", "64"], 60),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_example_learns(
    datasets: Path,
    script: str,
    dataset: str,
    arguments: list[str],
    accuracy: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By chance 12.5 % of the nodes are classified right, and 50 % of the edges."""
    if script in ("dgl_graphsage.py", "distributed_dgl.py"):
        pytest.importorskip("gids.dgl", exc_type=ImportError)
    words = [str(FOLDER / script), str(datasets / f"{dataset}.gids"), "--memory", "100MB", "--epochs", "2"]
    words += arguments
    if script.startswith("distributed"):
        output = run_ranks(tmp_path / "ranks", 2, words)
    else:
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")
        output = capsys.readouterr().out
    print(output)
    losses = numbers(r"loss (\d+\.\d+)", output)
    accuracies = numbers(r"accuracy (\d+\.\d)%", output)
    assert len(losses) == 2
    assert losses[-1] < losses[0]
    assert accuracies[-1] > accuracy


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.name for path in FOLDER.glob("*.py")}
    listed = set(re.findall(r"\]\((\w+\.py)\)", (FOLDER / "README.md").read_text()))
    [marks] = [mark for mark in test_an_example_learns.pytestmark if mark.name == "parametrize"]
    assert scripts == listed == {script for script, *_ in marks.args[1]}


def run_notebook(path: Path) -> dict[str, Any]:
    """Run the code cells as Jupyter does, in one namespace. `!gids` lines call the command."""
    names: dict[str, Any] = {"__name__": "__main__", "run_gids": lambda words: main(words.split())}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            code = re.sub(r"^!gids (.*)", r"assert run_gids('\1') == 0", "".join(cell["source"]), flags=re.M)
            exec(compile(code, f"{path.name}, cell {number}", "exec"), names)
    return names


@pytest.mark.slow
def test_the_notebook_is_interrupted_goes_on_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = run_notebook(FOLDER / "first_training.ipynb")
    said = capsys.readouterr().out
    assert "interrupted; next is epoch 2 step 7" in said
    assert numbers(r"epoch (\d+):", said) == [0, 1, 2, 3, 4, 5]
    assert numbers(r"accuracy (\d+\.\d)%", said)[-1] > 75, "12.5 % by chance"
    steps = names["loader"].stats()["tables"]["_N.feat"]["steps"]
    trained = steps - 6 * 4  # without the validations
    assert 6 * 20 <= trained <= 6 * 20 + 2, "and those that were planned at the interrupt"
