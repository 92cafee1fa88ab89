"""`gids bench hit-ratio`: results, replay, advice, bad input; and options of all bench commands."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import torch

import gids
from gids.cli.progress import Progress
from gids.trace import Trace, record
from gids.trace.recording import TracedTable, TraceWriter

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


def test_a_recorded_sampled_trace_gives_the_same_results(dataset, bench, tmp_path):
    trace = tmp_path / "sampled.trace"
    _, sampled = bench("hit-ratio", dataset, *SMALL, "--record", trace)
    said, replayed = bench("hit-ratio", "--replay", trace, "--cache", "5%,20%")
    of_epoch = ("epoch_pages", "epoch_pages_read")  # whose length the trace does not say
    expected = [{k: v for k, v in f["metrics"].items() if k not in of_epoch} for f in sampled["figures"]]
    assert [f["metrics"] for f in replayed["figures"]] == expected, said
    assert replayed["figures"][0]["setting"] == sampled["figures"][0]["setting"] | dict.fromkeys(
        ("sampler", "kappa", "order")
    )


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


@pytest.mark.parametrize(
    ("options", "sampler", "seed"),
    [
        (("--sampler", "labor", "--kappa", 4), gids.sampler.Labor([3, 3], batch_dependency=4), 0),
        (("--seed", 3), gids.sampler.Neighbor([3, 3]), 3),
    ],
)
def test_a_sampled_trace_has_the_pages_of_a_node_loader(dataset, bench, tmp_path, options, sampler, seed):
    bench("hit-ratio", dataset, *SMALL, "--record", tmp_path / "t", "--policies", "lru", *options)
    seeds = gids.FeatureStore(dataset).splits["_N"]["train"]
    loader = gids.NodeLoader(dataset, seeds, sampler, tables=[], batch_size=8, shuffle=True, seed=seed)
    with Trace(tmp_path / "t") as trace:
        assert (trace.batch_count, trace.tables[0].heat is None) == (40, False)
        for number, minibatch in zip(range(40), loader, strict=False):
            assert trace.pages(number).tolist() == minibatch.input_nodes.tolist()  # a row is a page


def record_run(dataset, path):
    """Record a run with a small cache. Returns its hits."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(3000, (200,), generator=generator) for _ in range(30)]
    source = gids.open(dataset, memory=64 << 20, tuning=gids.Tuning(cache=2 << 20))
    with gids.FeatureLoader(source, ["feat"]) as loader, record(loader, path):
        for _ in loader.attach(batches, lambda ids: {"_N.feat": ids}):
            pass
        return int(loader.stats()["hits"])


def test_a_recorded_run_is_replayed(dataset, bench, tmp_path):
    path = tmp_path / "run.trace"
    hits = record_run(dataset, path)
    said, _ = bench("hit-ratio", "--replay", path, "--cache", "10%")
    assert f"hit {hits:,} of" in said


def test_a_trace_with_other_counters_is_damaged_unless_another_version_recorded_it(dataset, bench, tmp_path):
    path = tmp_path / "run.trace"
    hits = record_run(dataset, path)

    def change(old, new):
        with np.load(path) as file:
            arrays = dict(file)
        about = arrays["about"].item()
        assert old.encode() in about
        with open(path, "wb") as changed:
            np.savez(changed, **arrays | {"about": np.array(about.replace(old.encode(), new.encode()))})

    change(f'"hits": {hits}', f'"hits": {hits - 1}')
    said, _ = bench("hit-ratio", "--replay", path, "--cache", "10%", status=2)
    assert "is damaged: its replay counts" in said
    change(f'"gids": "{gids.__version__}"', '"gids": "0.0"')
    said, _ = bench("hit-ratio", "--replay", path, "--cache", "10%")
    assert f"which chooses other victims: it hit {hits - 1:,} pages" in said.replace("\n  ", " ")


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
    ("args", "said"),
    [
        (["--batches", "20", "--seeds", "val"], "samples nothing: remove --seeds, --batches"),
        (["--order", "degree", "--kappa", "4"], "samples nothing: remove --kappa, --order"),
        (["--record", "t"], "samples nothing: remove --record"),
        (["--rows", "--order", "degree"], "samples nothing: remove --order, --rows"),
        (["nowhere.gids"], "needs a dataset only for --advise in seconds: remove nowhere.gids"),
        (["--table", "nothing"], "no table 'nothing' in {trace} (has '_N.feat')"),
        (["--advise", "3s"], "--advise in seconds needs the disk's speed"),
    ],
)
def test_options_without_effect_on_a_replay_are_refused(dataset, bench, tmp_path, args, said):
    trace = tmp_path / "t.trace"
    bench("hit-ratio", dataset, *SMALL, "--policies", "lru", "--record", trace)
    text, _ = bench("hit-ratio", "--replay", trace, *args, status=2)
    assert said.format(trace=trace) in text


def test_advice_refuses_a_trace_of_another_dataset(dataset, bench, tmp_path):
    writer = TraceWriter(tmp_path / "t", [TracedTable("_N.feat", 7, 4096, 1, None, None)])
    for _ in range(8):
        writer.enter([np.arange(7)])
    writer.finish()
    said, _ = bench("hit-ratio", dataset, "--replay", tmp_path / "t", "--advise", "3s", status=2)
    assert "the trace is from another dataset" in said


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


def test_what_is_no_dataset_and_no_trace_is_refused(bench, tmp_path):
    said, _ = bench("hit-ratio", status=2)
    assert said == "gids bench: give a dataset to sample, or a recorded trace with --replay\n"
    (tmp_path / "x.trace").write_bytes(b"PK\x03\x04" * 20)
    said, _ = bench("hit-ratio", "--replay", tmp_path / "x.trace", status=2)
    assert said.startswith(f"gids bench: {tmp_path}/x.trace is not a complete trace of this gids")


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
