"""Random damage to a source of each format: it converts, or prints one line and leaves nothing behind."""

import random
import shutil

import pytest
import test_reader_edges as edges
import test_reader_graphbolt as graphbolt
import test_reader_igb as igb
import test_reader_mag240m as mag240m
import test_reader_ogb as ogb
import test_reader_parquet as parquet
import test_reader_pyg as pyg
import torch

from gids.cli import main


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One source of each format that gids itself parses."""
    root = tmp_path_factory.mktemp("sources")
    ogb.papers100m(root / "ogb-binary")
    ogb.arxiv(root / "ogb-text")
    ogb.mag(root / "ogb-types")
    mag240m.write(root / "mag240m")
    igb.write(root / "igb", {("paper", "cites", "paper"): 50})
    graphbolt.homogeneous(root / "graphbolt")
    parquet.write(root / "parquet", parquet.nodes(), parquet.edges())
    edges.text(root / "edges.csv.gz")
    torch.save(pyg.tensors(), root / "pyg.pt")
    return root


def damage(rng, files):
    """Damage one file: cut it, flip or insert bytes, empty it, replace it, remove it."""
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    kind = rng.choice(["cut", "flip", "flip the start", "insert", "empty", "replace", "remove"])
    if kind == "cut":
        data = data[: rng.randrange(len(data))]
    elif kind.startswith("flip"):
        for _ in range(rng.choice([1, 3, 20])):
            data[rng.randrange(min(len(data), 300) if "start" in kind else len(data))] = rng.randrange(256)
    elif kind == "insert":
        at = rng.randrange(len(data))
        data[at:at] = rng.randbytes(rng.choice([1, 8, 100]))
    elif kind == "empty":
        data.clear()
    elif kind == "replace":
        data = rng.choice(files).read_bytes()
    file.write_bytes(data)
    if kind == "remove":
        file.unlink()
    return f"{kind} {file.name}"


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_prints_one_line_or_converts(tmp_path, sources, capsys, seed):
    rng = random.Random(seed)
    outcomes = []
    for round_ in range(25):
        chosen = rng.choice(sorted(sources.iterdir()))
        work = tmp_path / str(round_)
        work.mkdir()
        source = work / chosen.name
        (shutil.copytree if chosen.is_dir() else shutil.copy)(chosen, source)
        files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
        what = damage(rng, files)
        before = sorted(work.rglob("*"))
        reader = chosen.name.partition(".")[0].partition("-")[0]
        status = main(["convert", str(source), str(work / "x.gids"), "--from", reader, "--quiet"])
        error = capsys.readouterr().err.splitlines()
        outcomes.append(status)
        if status == 0:
            continue
        assert status == 2, what
        assert error[-1].startswith("gids convert: "), what
        assert "GIDS_TRACEBACK" not in error[-1], f"{what}: {error[-1]}"
        assert sorted(work.rglob("*")) == before, what
    assert 0 < outcomes.count(0) < 25
