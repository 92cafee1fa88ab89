"""`gids heat`: what each method stores and prints."""

import numpy as np
from commands import gids

from gids import FeatureStore
from gids.heat import choose_seeds, expected_visits, reverse_pagerank, sampled_counts
from gids.store import verify


def test_damped_walks_are_stored(dataset, capsys):
    gids("heat", dataset, "--method", "reverse-pagerank", "--damping", "0.5")
    store = FeatureStore(dataset)
    expected = reverse_pagerank(store, choose_seeds(store, "train"), damping=0.5)
    for ntype in ("paper", "author"):
        assert np.array_equal(store.heat("reverse-pagerank", ntype), expected[ntype].astype(np.float32))
    above, most = int((expected["author"] > 0).sum()), expected["author"].max()
    assert f"author: {above} of 3 nodes have heat, at most {most:.6g}\n" in capsys.readouterr().out
    assert list(verify(dataset)) == []


def test_heat_without_damping_equals_the_visits_of_sampling(dataset):
    for options, fanouts in ((["--fanouts", "5,-1,2"], [5, -1, 2]), ([], [10, 10, 10])):
        gids("heat", dataset, *options, "--seeds", "all", "--quiet")  # by the default method
        store = FeatureStore(dataset)
        expected = expected_visits(store, choose_seeds(store, "all"), fanouts)["author"]
        assert np.array_equal(store.heat("reverse-pagerank", "author"), expected.astype(np.float32))


def test_sampled_counts_are_stored_and_quiet_is_quiet(dataset, capfd):
    arguments = ["--fanouts", "3,2", "--batch-size", "4", "--seed", "3", "--seeds", "test"]
    gids("heat", dataset, "--method", "sampled", *arguments, "--quiet")
    assert capfd.readouterr() == ("", "")
    store = FeatureStore(dataset)
    expected = sampled_counts(store, choose_seeds(store, "test"), [3, 2], batch_size=4, seed=3)
    assert np.array_equal(store.heat("sampled", "paper"), expected["paper"])
