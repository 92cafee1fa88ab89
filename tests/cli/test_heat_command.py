"""`gids heat`: each method, its options and its errors."""

import numpy as np
import pytest
from commands import gids
from datasets import save_arrays

from gids import FeatureStore
from gids.cli import main
from gids.heat import choose_seeds, expected_visits, reverse_pagerank, sampled_counts
from gids.store import verify


@pytest.fixture
def dataset(tmp_path):
    rng = np.random.default_rng(1)
    source = tmp_path / "source"
    arrays = {
        "nodes/paper/feat": rng.standard_normal((40, 4), np.float32),
        "nodes/paper/label": rng.integers(0, 4, 40),
        "nodes/author/feat": rng.standard_normal((7, 4), np.float32),
        "edges/author.writes.paper/edge_index": np.stack([rng.integers(0, 7, 60), rng.integers(0, 40, 60)]),
        "edges/paper.cites.paper/edge_index": rng.integers(0, 40, (2, 99)),
    }
    save_arrays(source, **arrays)
    gids("convert", source, tmp_path / "mag.gids", "--quiet")
    return tmp_path / "mag.gids"


def test_damped_walks_are_stored(dataset, capsys):
    gids("heat", dataset, "--method", "reverse-pagerank", "--damping", "0.5")
    store = FeatureStore(dataset)
    expected = reverse_pagerank(store, choose_seeds(store, "train"), damping=0.5)
    for ntype in ("paper", "author"):
        assert np.array_equal(store.heat("reverse-pagerank", ntype), expected[ntype].astype(np.float32))
    above, most = int((expected["author"] > 0).sum()), expected["author"].max()
    assert f"author: {above} of 7 nodes have heat, at most {most:.6g}\n" in capsys.readouterr().out
    assert list(verify(dataset)) == []


def test_heat_without_damping_equals_the_visits_of_sampling(dataset):
    for options, fanouts in ((["--fanouts", "5,-1,2"], [5, -1, 2]), ([], [10, 10, 10])):
        arguments = [*options, "--seeds", "all", "--quiet"]  # the default method
        gids("heat", dataset, *arguments)
        store = FeatureStore(dataset)
        expected = expected_visits(store, choose_seeds(store, "all"), fanouts)["author"]
        assert np.array_equal(store.heat("reverse-pagerank", "author"), expected.astype(np.float32))


def test_sampled_counts_are_stored_and_quiet_is_quiet(dataset, capfd):
    arguments = ["--fanouts", "3,2", "--batch-size", "4", "--seed", "3", "--seeds", "val"]
    gids("heat", dataset, "--method", "sampled", *arguments, "--quiet")
    assert capfd.readouterr() == ("", "")
    store = FeatureStore(dataset)
    expected = sampled_counts(store, choose_seeds(store, "val"), [3, 2], batch_size=4, seed=3)
    assert np.array_equal(store.heat("sampled", "paper"), expected["paper"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "sampled", "--damping", "0.9"], "--damping does not apply to --method sampled"),
        (
            ["--method", "reverse-pagerank", "--batch-size", "1"],
            "--batch-size does not apply to --method rev",
        ),
        (
            ["--method", "reverse-pagerank", "--fanouts", "3", "--damping", "0.9"],
            "exclude each other: remove one",
        ),
        (["--method", "reverse-pagerank", "--damping", "1.5"], "damping=1.5"),
        (["--method", "sampled", "--fanouts", "3", "--batch-size", "0"], "batch_size=0"),
    ],
)
def test_invalid_options_print_one_line_and_change_nothing(dataset, capsys, arguments, message):
    before = (dataset / "manifest.json").read_bytes()
    assert main(["heat", str(dataset), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gids heat: ")
    assert message in error
    assert error.count("\n") == 1
    assert (dataset / "manifest.json").read_bytes() == before


def test_unreadable_options_are_refused(dataset, capsys):
    for arguments in (["--method", "luck"], ["--method", "sampled", "--fanouts", "3,x"]):
        with pytest.raises(SystemExit):
            main(["heat", str(dataset), *arguments])
    assert "'3,x' is not a list of fanouts such as 10,5,5" in capsys.readouterr().err
