"""`gids bench hit-ratio`: results, replays, advice, notes."""

from __future__ import annotations

import itertools
import signal

import pytest
import torch

import gids
from gids.bench.trace import TouchedPages, replay, sampled_pages
from gids.cache import POLICIES
from gids.cli.progress import Progress

SAMPLED = ("--batch-size", 8, "--fanouts", "3,3", "--batches", 40)
SMALL = (*SAMPLED, "--cache", "5%,20%")


def ratios(report, policy):
    return {
        (f["setting"]["lines"], f["setting"]["window"]): f["metrics"]["hit_ratio"]["median"]
        for f in report["figures"]
        if f["setting"]["policy"] == policy
    }


def test_every_policy_is_compared_with_min(dataset, bench):
    said, report = bench("hit-ratio", dataset, *SMALL, "--repeat", 2)
    assert "2 repeats" in said
    best = ratios(report, "MIN")
    assert [lines for lines, _ in best] == [150, 600]
    lines_in_order = [f["setting"]["lines"] for f in report["figures"]]
    assert lines_in_order == sorted(lines_in_order)
    for policy in ("random", "lru", "static", "window-pin", "lookahead"):
        found = ratios(report, policy)
        windows = {window for _, window in found}
        assert windows == ({0, 4, 8, 16, 22} if policy in ("window-pin", "lookahead") else {None})
        metrics = [set(f["metrics"]) for f in report["figures"] if f["setting"]["policy"] == policy]
        assert all({"of_min", "regret"} <= names for names in metrics)
        assert all(ratio <= best[lines, None] for (lines, _), ratio in found.items())
    figure = report["figures"][-1]["metrics"]
    assert len(figure["hit_ratio"]["values"]) == 2
    assert {"pages_read", "evictions", "bypasses", "regret", "of_min", "in_use_share"} <= set(figure)
    for figure in report["figures"]:
        if figure["setting"]["policy"] != "MIN":
            assert 0 <= figure["metrics"]["in_use_share"]["median"] <= 1
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["gids"]


def test_samplers_and_kappas_are_compared_on_the_same_caches(dataset, bench):
    names = ["neighbor", "labor", "labor-1", "labor-star", "ladies", "ladies-poisson", "walk"]
    args = ("--sampler", ",".join(names), "--kappa", "1,8,inf", "--policies", "lru")
    said, report = bench("hit-ratio", dataset, *SMALL, "--windows", 0, *args)
    settings = [(f["setting"]["sampler"], f["setting"]["kappa"]) for f in report["figures"]]
    dependent = [(name, kappa) for name in names[:4] for kappa in (1, 8, "inf")]
    assert list(dict.fromkeys(settings)) == [*dependent, *((name, None) for name in names[4:])]
    assert "ladies takes no kappa: it is measured once" in said
    assert len({f["setting"]["lines"] for f in report["figures"]}) == 2  # the same caches for all
    asked = {}
    for figure in report["figures"]:
        metrics = {name: m["median"] for name, m in figure["metrics"].items()}
        assert metrics["pages_read"] == pytest.approx(
            30 * metrics["pages_per_batch"] * (1 - metrics["hit_ratio"])
        )
        assert metrics["epoch_pages_read"] == pytest.approx(metrics["pages_read"] / 30 * 75)
        asked[figure["setting"]["sampler"], figure["setting"]["kappa"]] = metrics["epoch_pages"]
    assert asked["labor", 1] < asked["neighbor", 1]


def test_the_pages_are_those_of_a_node_loader(dataset, bench, monkeypatch):
    traces = []

    def kept(*args):
        traces.append(sampled_pages(*args))
        return traces[-1]

    monkeypatch.setattr("gids.bench.hit_ratio.sampled_pages", kept)
    options = ("--sampler", "labor", "--kappa", 4, "--policies", "lru", "--repeat", 2)
    bench("hit-ratio", dataset, *SMALL, *options)
    seeds = gids.FeatureStore(dataset).splits["_N"]["train"]
    sampler = gids.sampler.Labor([3, 3], batch_dependency=4)
    for seed, trace in enumerate(traces):
        loader = gids.NodeLoader(dataset, seeds, sampler, tables=[], batch_size=8, shuffle=True, seed=seed)
        nodes = [minibatch.input_nodes.tolist() for minibatch in itertools.islice(loader, 40)]
        assert [pages.tolist() for pages in trace] == nodes  # a row is a page
    assert len(traces) == 2


def test_a_replay_counts_what_the_loader_counts(dataset):
    """With the loader's cache, window and planned minibatches, for each policy."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(3000, (200,), generator=generator) for _ in range(30)]
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
        assert replayed.evictions == counted["evictions"]


def test_advice_finds_the_smallest_cache(dataset, bench):
    said, report = bench("hit-ratio", dataset, *SAMPLED, "--advise", "60%")
    reached = {lines: ratio for (lines, window), ratio in ratios(report, "lookahead").items() if window == 22}
    smallest = min(lines for lines, ratio in reached.items() if ratio >= 0.6)
    assert f"hits with {smallest:,} lines" in said.replace("\n  ", " ")
    assert any(ratio < 0.6 for lines, ratio in reached.items() if smallest * 0.95 < lines < smallest)


def test_advice_for_an_epoch_counts_its_missing_pages(dataset, bench):
    args = (*SAMPLED, "--advise", "10s", "--pages-per-s", 300, "--repeat", 2)
    said, report = bench("hit-ratio", dataset, *args)
    assert "--repeat has no effect" in said
    assert "an epoch of 75 minibatches then reads" in said.replace("\n  ", " ")
    wanted = 1 - 10 * 300 / (75 * report["subject"]["pages_per_batch"])
    assert report["subject"]["wanted_hit_ratio"] == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize(
    ("args", "note"),
    [
        ([*SAMPLED, "--advise", "99.9%"], "no cache reaches 99.9%: with every page"),
        ([*SAMPLED, "--advise", "30s", "--pages-per-s", 1e6], "no cache is needed: the goal is reached"),
        (["--batch-size", 512, "--batches", 4, "--cache", "5%", "--policies", "lru"], "a minibatch reads"),
        ([*SAMPLED, "--cache", "1GB", "--policies", "lru"], "holds the whole table"),
        (
            [*SAMPLED, "--cache", "3000", "--policies", "lru"],
            "a cache of 3000 is smaller than a page of 4096 B: nothing is hit (2% is a share",
        ),
    ],
)
def test_a_note_says_what_makes_a_measurement_useless(dataset, bench, args, note):
    said, _ = bench("hit-ratio", dataset, *args)
    assert note in said.replace("\n  ", " ")
    assert ("a minibatch reads" in said) == (note == "a minibatch reads")


def test_an_interrupted_run_reports_what_it_has(dataset, bench, monkeypatch):
    runs = 0

    def interrupt(self, count):
        nonlocal runs
        runs += 1
        if runs == 13:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does

    monkeypatch.setattr(Progress, "add", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        said, report = bench("hit-ratio", dataset, *SMALL, "--policies", "lru,lookahead", status=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "PARTIAL: interrupted; number of results: 13" in said
    assert report["partial"] == "interrupted"
    policies = ["MIN", "lru", *["lookahead"] * 5]
    assert [f["setting"]["policy"] for f in report["figures"]] == (policies * 2)[:13]
