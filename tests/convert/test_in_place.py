"""`gids convert DATASET DATASET --overwrite`: a kill at the end, stripes inside, times of edges."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import killed
from reader_example import convert, refused

from gids import FeatureStore, cli
from gids.write import DatasetWriter, create_table, edge_list, publish, workplace


def write(path: Path, times: bool = False) -> FeatureStore:
    ends = torch.tensor([0, 1, 1]), torch.tensor([1, 2, 1])
    with DatasetWriter(path) as writer:
        if not times:
            writer.write_table("node", "_N", "x", torch.arange(12.0).view(3, 4))
        edges = edge_list(*ends, num_src=3, num_dst=3)
        writer.write_edges(("_N", "_E", "_N"), edges, times=torch.tensor([5, 6, 7]) if times else None)
    return FeatureStore(path)


@pytest.mark.parametrize("between_renames", [False, True])
def test_a_conversion_in_place_that_is_killed_is_finished_by_the_same_command_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between_renames: bool
) -> None:
    path = tmp_path / "d.gids"
    write(path)
    command = ["convert", str(path), str(path), "--overwrite", "--reverse-edges", "--quiet"]
    if between_renames:  # of a file system that cannot exchange two names
        with monkeypatch.context() as patch:
            patch.setattr(publish, "_exchange", lambda *_: False)
            killed(lambda: cli.main(command), os, "rename", after=True)
        assert not path.exists()
    else:
        killed(lambda: cli.main(command), workplace, "clean_up")
    assert cli.main(command) == 0
    assert FeatureStore(path).graph().num_edges == 6
    assert os.listdir(tmp_path) == ["d.gids"]


def test_a_conversion_in_place_does_not_take_that_of_another_dataset_for_its_own(tmp_path: Path) -> None:
    path, other = tmp_path / "d.gids", tmp_path / "e.gids"
    write(path)
    write(other)
    options = ["--overwrite", "--reverse-edges", "--quiet"]
    killed(lambda: cli.main(["convert", str(other), str(path), *options]), workplace, "clean_up")
    assert cli.main(["convert", str(path), str(path), *options]) == 0
    assert FeatureStore(path).graph().num_edges == 12


def test_a_table_that_is_added_while_a_conversion_in_place_is_published_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.gids"
    write(path)
    faults = workplace.faults

    def checked(*arguments: Any) -> Iterator[str]:
        with create_table(path, "later", 3, 1) as writer:
            writer.write(0, torch.ones(3, 1))
        return faults(*arguments)

    monkeypatch.setattr(workplace, "faults", checked)
    assert cli.main(["convert", str(path), str(path), "--overwrite"]) == 2
    assert "the source changed during the conversion" in capsys.readouterr().err
    assert list(FeatureStore(path).tables) == ["_N.x", "_N.later"]
    assert os.listdir(tmp_path) == ["d.gids"]


def test_what_is_inside_the_dataset_is_refused_before_anything_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.gids"
    rows = write(path).table("x").read_rows(torch.arange(3))
    inside = path / "ssd0"
    inside.mkdir()
    assert cli.main(["convert", str(path), str(path), "--overwrite", "--stripe", str(inside)]) == 2
    assert "is inside" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is inside"):
        DatasetWriter(path, overwrite=True, stripe=[str(inside)])
    with pytest.raises(ValueError, match=r"e\.gids is inside the dataset .*d\.gids, and would be removed"):
        DatasetWriter(inside / "e.gids")
    torch.save({"x": rows}, inside / "data.pt")
    assert "would be removed together with it" in refused(capsys, inside / "data.pt", path, "--overwrite")
    assert torch.equal(FeatureStore(path).table("x").read_rows(torch.arange(3)), rows)
    shutil.rmtree(inside)


def test_self_loops_are_refused_for_edges_with_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = tmp_path / "d.gids", tmp_path / "e.gids"
    write(paths[0], times=True)
    assert "has times of edges: give --no-times" in refused(capsys, *paths, "--self-loops")
    indices = convert(*paths, "--self-loops", "--no-times").graph().indices
    assert sorted(indices) == [0, 0, 1, 1, 2]
