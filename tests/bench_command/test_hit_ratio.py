"""`gids bench hit-ratio`: results, replays, notes."""

from __future__ import annotations

import itertools

import pytest
import torch

import gids
from gids.bench.sampling import DEPENDENT, SAMPLERS
from gids.bench.trace import TouchedPages, replay, sampled_pages
from gids.cache import POLICIES

SAMPLED = ("--batch-size", 8, "--fanouts", "3,3", "--batches", 40)
SMALL = (*SAMPLED, "--cache", "5%,20%")


def ratios(report, policy):
    return {
        (f["setting"]["lines"], f["setting"]["window"]): f["metrics"]["hit_ratio"]
        for f in report["figures"]
        if f["setting"]["policy"] == policy
    }


def test_every_policy_is_compared_with_min(dataset, bench):
    _, report = bench("hit-ratio", dataset, *SMALL)
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
    _, report = bench("hit-ratio", dataset, *SAMPLED, *options)
    assert (report["subject"]["sampler"], report["subject"]["kappa"]) == (sampler, kappa)
    assert [f["setting"]["policy"] for f in report["figures"]] == ["MIN", "lru"]


def test_the_pages_are_those_of_a_node_loader(dataset, bench, monkeypatch):
    traces = []

    def kept(*args):
        traces.append(sampled_pages(*args))
        return traces[-1]

    monkeypatch.setattr("gids.bench.hit_ratio.sampled_pages", kept)
    bench("hit-ratio", dataset, *SMALL, "--sampler", "labor", "--kappa", 4, "--policies", "lru", "--seed", 1)
    seeds = gids.FeatureStore(dataset).splits["_N"]["train"]
    sampler = gids.sampler.Labor([3, 3], batch_dependency=4)
    loader = gids.NodeLoader(dataset, seeds, sampler, tables=[], batch_size=8, shuffle=True, seed=1)
    nodes = [minibatch.input_nodes.tolist() for minibatch in itertools.islice(loader, 40)]
    [trace] = traces
    assert [pages.tolist() for pages in trace] == nodes  # a row is a page


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


@pytest.mark.parametrize(
    ("args", "note"),
    [
        (["--batch-size", 512, "--batches", 4, "--cache", "5%", "--policies", "lru"], "a minibatch reads"),
        ([*SAMPLED, "--cache", "1GB", "--policies", "lru"], "holds the whole table"),
        (
            [*SAMPLED, "--cache", "3000", "--policies", "lru"],
            "a cache of 3000 is smaller than a page of 4096 B, so nothing is hit: give more bytes",
        ),
    ],
)
def test_a_note_says_what_makes_a_measurement_useless(dataset, bench, args, note):
    said, _ = bench("hit-ratio", dataset, *args)
    assert note in said.replace("\n  ", " ")
    assert ("a minibatch reads" in said) == (note == "a minibatch reads")
