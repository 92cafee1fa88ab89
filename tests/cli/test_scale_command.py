"""`gids scale`: tables, JSON, plot, options and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from commands import gids
from datasets import save_arrays

from gids.bench.arguments import SAMPLERS
from gids.cli import main
from gids.write import DatasetWriter

Run = Callable[..., str]
RATES = ["--storage-gb-s", "2", "--reads-per-s", "1e5"]
QUICK = ["--fanouts", "3,2", "--batch-size", "8", *RATES]


def convert(folder, arrays):
    save_arrays(folder / "source", **arrays)
    out = folder / "made.gids"
    gids("convert", folder / "source", out, "--quiet", "--page-bytes", "512")
    return out


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Clusters of 50 nodes, with successive ids; rows of a page."""
    rng = np.random.default_rng(1)
    targets = rng.integers(0, 2000, 16_000)
    near, far = targets // 50 * 50 + rng.integers(0, 50, 16_000), rng.integers(0, 2000, 16_000)
    sources = np.where(rng.random(16_000) < 0.9, near, far)
    arrays = {
        "feat": np.zeros((2000, 128), np.float32),
        "labels": rng.integers(0, 4, 2000),
        "edge_index": np.stack([sources, targets]),
        "train_idx": np.arange(0, 2000, 2),
    }
    return convert(tmp_path_factory.mktemp("scale"), arrays)


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    rng = np.random.default_rng(1)
    arrays = {
        "nodes/paper/feat": np.zeros((800, 16), np.float32),
        "nodes/paper/train_idx": np.arange(0, 800, 4),
        "nodes/author/feat": np.zeros((300, 200), np.float32),
        "edges/author.writes.paper/edge_index": np.stack(
            [rng.integers(0, 300, 3000), rng.integers(0, 800, 3000)]
        ),
        "edges/paper.cites.paper/edge_index": rng.integers(0, 800, (2, 5000)),
    }
    return convert(tmp_path_factory.mktemp("typed"), arrays)


@pytest.fixture
def run(capsys):
    def run(*arguments, status=0):
        assert main(["scale", *map(str, arguments)]) == status
        said = capsys.readouterr()
        return said.err if status else said.out

    return run


def test_tables_and_json_agree(dataset, run, tmp_path):
    said = run(dataset, *QUICK, "--ranks", "16", "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert said.splitlines()[0] == "made.gids: 1,000 seeds, batch 8 per rank, neighbor"
    assert said.splitlines()[-1] == found["recommendation"]
    assert [p["batch_size"] for p in found["curves"]] == [8, 16, 32, 64, 128]
    modes = {(p["ranks"], p["mode"]): p for p in found["predictions"]}
    assert {ranks for ranks, _ in modes} == {1, 2, 4, 8, 16}
    assert (4, "1.5D") in modes
    assert (2, "1.5D") not in modes
    for ranks in (1, 2, 4, 8, 16):
        alone, together = modes[ranks, "independent"], modes[ranks, "cooperative"]
        assert alone["steps"] == together["steps"] == -(-1000 // (8 * ranks))
        assert together["storage_bytes"] <= alone["storage_bytes"]
        assert together["rank_bytes"] <= alone["rank_bytes"]
        slowest = max(alone["parts_s"].values())
        assert alone["parts_s"][alone["bottleneck"]] == slowest
        assert alone["seconds"] == pytest.approx(1000 / (8 * ranks) * slowest)
    one = modes[1, "cooperative"]
    assert one["network_bytes"] == 0
    assert one["seconds"] == modes[1, "independent"]["seconds"]
    [first] = [p for p in found["curves"] if p["batch_size"] == 8]
    assert modes[1, "independent"]["work"]["rows"] == first["input_nodes"]["_N"]


def test_json_and_tables_in_one_file(dataset, tmp_path):
    words = ["scale", dataset, *QUICK, "--ranks", "1", "--json", "-"]
    with open(tmp_path / "out", "w") as out:
        subprocess.run([sys.executable, "-P", "-m", "gids", *words], stdout=out, check=True)
    found, end = json.JSONDecoder().raw_decode(said := (tmp_path / "out").read_text())
    assert said[end:].startswith("\nmade.gids: 1,000 seeds")
    assert said.splitlines()[-1] == found["recommendation"]


def test_rates_decide_the_bottleneck(dataset, run, tmp_path):
    out = tmp_path / "out.json"
    slow = {
        "storage": ["--reads-per-s", "1000"],
        "network": ["--network-gb-s", "0.001"],
        "memory": ["--memory-gb-s", "0.01"],
        "compute": ["--flops", "1e6"],
    }
    for resource, options in slow.items():
        run(dataset, *QUICK, *options, "--ranks", "4", "--cache", "0%", "--json", out, "--quiet")
        found = json.loads(out.read_text())["predictions"]
        assert {p["bottleneck"] for p in found if p["mode"] == "partitioned" and p["ranks"] > 1} == {resource}


def test_more_ranks_than_seeds_share_them(dataset, run, tmp_path):
    out = tmp_path / "out.json"
    run(dataset, *QUICK, "--ranks", "1024", "--json", out, "--quiet")
    found = {(p["ranks"], p["mode"]): p for p in json.loads(out.read_text())["predictions"]}
    assert found[1024, "independent"]["steps"] == 1
    assert found[1024, "independent"]["work"]["seeds"] == pytest.approx(1000 / 1024)
    assert not any(p["extrapolated"] for p in found.values())


def test_larger_minibatches_than_there_is_time_for_are_marked(dataset, run):
    said = run(dataset, *QUICK, "--ranks", "64", "--seconds", "1e-9")
    assert "~: extrapolated from minibatches of at most 16 seeds" in said
    assert " ~" in said


def test_memory_limits_the_recommendation(dataset, run):
    said = run(dataset, *QUICK, "--ranks", "8", "--memory", "1kB")
    assert said.splitlines()[-1].startswith("No mode fits: the smallest, ")
    assert said.count("(too large)") >= 3 * 4
    assert "(too large)" not in run(dataset, *QUICK, "--ranks", "8", "--memory", "1GB")


def test_a_dataset_without_nodes_is_refused(tmp_path, run):
    with DatasetWriter(tmp_path / "empty.gids", page_bytes=512) as writer:
        writer.write_table("node", "paper", "feat", np.ones((0, 4), np.float32))
        relation = ("paper", "cites", "paper")
        writer.write_graph(relation, np.zeros(1, np.int64), np.zeros(0, np.int64), num_src=0)
    said = run(tmp_path / "empty.gids", "--seeds", "all", *QUICK, status=2)
    assert "empty.gids has no nodes, so there are no seeds" in said


def test_several_node_types(typed, run, tmp_path):
    out = tmp_path / "out.json"
    run(typed, *QUICK, "--ranks", "4", "--sampler", "labor", "--policy", "lru", "--kappa", "8", "--json", out)
    found = json.loads(out.read_text())
    for point in found["curves"]:
        assert set(point["input_nodes"]) == {"paper", "author"}
        assert point["nodes"][-1] == pytest.approx(sum(point["input_nodes"].values()))
        assert point["pages"]["author.feat"] == pytest.approx(
            point["input_nodes"]["author"] * 2, rel=0.01
        ) or (point["pages"]["author.feat"] == point["input_nodes"]["author"])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_has_curves(dataset, run, tmp_path, sampler):
    out = tmp_path / "out.json"
    run(dataset, *QUICK, "--sampler", sampler, "--ranks", "4", "--json", out, "--quiet")
    points = json.loads(out.read_text())["curves"]
    assert [p["batch_size"] for p in points] == [8, 16, 32]
    most = {"ladies": 3 * 8, "ladies-poisson": 1.5 * 3 * 8}.get(
        sampler
    )  # beside the nodes of the layer before
    for point in points:
        drawn, inputs = point["nodes"][-2:]
        assert drawn <= inputs
        if most is not None:  # LADIES draws more if the minibatch is larger
            assert inputs - drawn <= most * point["batch_size"] / 8


def test_plot(dataset, run, tmp_path):
    pytest.importorskip("matplotlib")
    run(dataset, *QUICK, "--ranks", "8", "--plot", tmp_path / "out.png")
    data = (tmp_path / "out.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000


def test_storage_is_measured_unless_given(dataset, run):
    options = ["--fanouts", "2", "--batch-size", "8", "--ranks", "2"]
    assert "reads/s (measured)" in run(dataset, *options)
    assert "reads/s (partly measured)" in run(dataset, *options, "--reads-per-s", "1e5")
    assert "storage 2.0 GB/s, 100,000 reads/s;" in run(dataset, *options, *RATES)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cache", "5x"], "--cache 5x is not a cache size: use 2% (of the pages) or 4GB"),
        (["--cache", "much"], "--cache much is not a cache size"),
        (["--json", "no/where/out.json"], "no/where to write out.json in"),
        (["--seeds", "val"], "no node of made.gids is in a val split"),
        (["--fanouts", "0"], "fanout"),
    ],
)
def test_errors(dataset, run, options, said):
    assert said in run(dataset, *QUICK, *options, status=2)


def test_wrong_values_are_refused(dataset, capsys):
    for option, value in (
        ("--network-gb-s", "0"),
        ("--flops", "fast"),
        ("--ranks", "0"),
        ("--sampler", "graph"),
    ):
        with pytest.raises(SystemExit):
            main(["scale", str(dataset), option, value])
        assert f"argument {option}: " in capsys.readouterr().err


def test_a_dataset_without_topology_or_features(tmp_path, run):
    rows = convert(tmp_path / "rows", {"feat": np.zeros((40, 4), np.float32), "train_idx": np.arange(9)})
    assert "has no topology" in run(rows, *QUICK, status=2)
    with DatasetWriter(tmp_path / "edges.gids") as writer:
        writer.write_graph(("_N", "_E", "_N"), np.arange(41), np.arange(40), num_src=40)
    assert "edges.gids has no table of nodes" in run(tmp_path / "edges.gids", *QUICK, status=2)


def test_a_part_is_refused(dataset, tmp_path, run):
    gids("partition", dataset, tmp_path / "parts", "--parts", "2", "--quiet")
    part = next(p for p in (tmp_path / "parts").iterdir() if p.is_dir())
    assert "measure with the whole dataset" in run(part, *QUICK, status=2)
