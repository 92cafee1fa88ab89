"""`gids bench hit-ratio`: results, replays, notes; it predicts the pages of a dataset in another order."""

from __future__ import annotations

import itertools

import pytest
import torch
from commands import gids as run_gids

import gids
from gids.bench.sampling import DEPENDENT, SAMPLERS
from gids.bench.trace import TouchedPages, replay
from gids.cache import POLICIES
from gids.convert.synthetic import GraphSpec, write_graph

SAMPLED = ("--batch-size", 8, "--fanouts", "3,3", "--batches", 40)


def ratios(report, policy):
    return {
        (f["setting"]["lines"], f["setting"]["window"]): f["metrics"]["hit_ratio"]
        for f in report["figures"]
        if f["setting"]["policy"] == policy
    }


def test_every_policy_is_compared_with_min(dataset, bench, plot):
    _, report = bench("hit-ratio", dataset, *SAMPLED, "--cache", "5%,20%", *plot)
    best = ratios(report, "MIN")
    assert [lines for lines, _ in best] == [150, 600]
    for policy in ("random", "lru", "static", "window-pin", "lookahead"):
        hits = ratios(report, policy)
        windows = {window for _, window in hits}
        assert windows == ({0, 4, 8, 16, 22} if policy in ("window-pin", "lookahead") else {None})
        assert all(ratio <= best[lines, None] for (lines, _), ratio in hits.items())
    subject = report["subject"]
    asked = 30 * subject["pages_per_batch"]
    for figure in report["figures"]:
        metrics = figure["metrics"]
        minimum = best[figure["setting"]["lines"], None]
        assert metrics["regret"] == pytest.approx(minimum - metrics["hit_ratio"])
        assert metrics["of_min"] == pytest.approx(metrics["hit_ratio"] / minimum)
        assert metrics["pages_read"] == pytest.approx(asked * (1 - metrics["hit_ratio"]))
        assert metrics["epoch_pages_read"] == pytest.approx(metrics["pages_read"] / 30 * 75)
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["gids"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_sampler_is_measured(dataset, bench, sampler):
    kappa = "inf" if sampler in DEPENDENT else 1
    options = ("--sampler", sampler, "--kappa", kappa, "--policies", "lru", "--cache", "5%")
    _, report = bench("hit-ratio", dataset, *SAMPLED[:-1], 12, *options)
    assert (report["subject"]["sampler"], report["subject"]["kappa"]) == (sampler, kappa)
    assert [f["setting"]["policy"] for f in report["figures"]] == ["MIN", "lru"]


def test_the_pages_are_those_of_a_node_loader(dataset, bench):
    options = ("--fanouts", "4,2", "--cache", "5%", "--policies", "lru", "--seed", 1)
    _, report = bench("hit-ratio", dataset, *SAMPLED, *options)
    seeds = gids.FeatureStore(dataset).splits["_N"]["train"]
    loader = gids.NodeLoader(dataset, seeds, [4, 2], tables=[], batch_size=8, shuffle=True, seed=1)
    pages = [len(minibatch.input_nodes) for minibatch in itertools.islice(loader, 10, 40)]  # a row is one
    assert report["subject"]["pages_per_batch"] == sum(pages) / 30


def test_a_replay_counts_what_the_loader_counts(dataset):
    """With the loader's cache, window and planned minibatches, for each policy."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(3000, (200,), generator=generator) for _ in range(20)]
    for policy in POLICIES:
        tuning = gids.Tuning(cache=2 << 20, planned=2, policy=policy)
        source = gids.open(dataset, memory=64 << 20, window=6, tuning=tuning)
        with gids.FeatureLoader(source, ["feat"]) as loader:
            table = loader.tables[0]
            list(loader.attach(batches, lambda ids: {"_N.feat": ids}))
            counted, heat = loader.stats()["tables"]["_N.feat"], loader.table_heat(table)
        touched = TouchedPages(table.page_count, table.rows_per_page, table.order)
        trace = [touched.of(ids.numpy()) for ids in batches]
        options = {"lines": counted["lines"], "window": 6, "planned": 2, "heat": heat}
        replayed = replay(trace, table.page_count, policy=policy, **options)
        assert int(replayed.hits.sum()) == counted["hits"]
        assert int(replayed.loads.sum()) == counted["loads"]
        assert int(replayed.bypasses.sum()) == counted["bypasses"]


@pytest.mark.parametrize(
    ("args", "note"),
    [
        (["--batch-size", 512, "--batches", 4, "--cache", "5%"], "a minibatch reads"),
        ([*SAMPLED, "--cache", "1GB"], "holds the whole table"),
        ([*SAMPLED, "--cache", "3000"], "a cache of 3000 is smaller than a page of 4096 B, so nothing is"),
    ],
)
def test_a_note_says_what_makes_a_measurement_useless(dataset, bench, args, note):
    said, _ = bench("hit-ratio", dataset, *args, "--policies", "lru")
    assert note in said.replace("\n  ", " ")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--policies", "lookahead,belady"], "(got 'belady'); MIN is always measured"),
        (["--cache", "5apples"], "--cache 5apples is not a cache size: use 2% (of the pages), 4GB or 5x"),
        (["--table", "nothing"], "no table 'nothing' in graph.gids (has '_N.feat')"),
        (["--sampler", "pinsage"], "--sampler must be one of neighbor, labor, labor-1, labor-star, ladies, "),
        (["--order", "rows"], "--order must be one of stored, original, degree, community (got 'rows')"),
        (["--fanouts", "3,0"], "a layer without neighbors computes nothing; leave it out"),
        (["--seeds", "test"], "is in a test split"),
        (["--sampler", "walk", "--kappa", "2"], "sampler 'walk' takes no kappa"),
    ],
)
def test_bad_options_are_refused_with_the_reason(dataset, bench, args, said):
    text, report = bench("hit-ratio", dataset, *SAMPLED, *args, status=2)
    assert said in text.replace("\n  ", " ")
    assert not report


def test_an_order_by_community_reads_fewer_pages_and_converts_to_the_same(tmp_path, bench):
    """Many classes, most edges within one, ids in no order: rows of 256 bytes, 16 per page."""
    spec = GraphSpec(8000, degree=12, dim=64, classes=80, homophily=0.9, train_count=800)
    write_graph(tmp_path / "graph", spec)
    for order in ("original", "community"):
        options = ["--quiet", "--order", order, "--page-bytes", "4096"]
        run_gids("convert", tmp_path / "graph", tmp_path / f"{order}.gids", *options)
    options = ("--batch-size", 8, "--fanouts", "5,5", "--batches", 60, "--windows", 16)

    def pages_read(dataset, order):
        """Per epoch."""
        limits = ("--cache", "5%", "--policies", "lookahead", "--order", order)
        _, report = bench("hit-ratio", tmp_path / f"{dataset}.gids", *options, *limits)
        return {f["setting"]["policy"]: f["metrics"]["epoch_pages_read"] for f in report["figures"]}

    original, community = pages_read("original", "original"), pages_read("original", "community")
    assert original["lookahead"] >= 1.5 * community["lookahead"]
    assert pages_read("community", "stored") == community
    assert pages_read("community", "original") == original
