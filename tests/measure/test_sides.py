"""A side of the comparison: its memory and time are limited, and a failure is reported."""

import time
from dataclasses import replace

import pytest
from epoch_results import epoch_result

from gids.bench import quickstart
from gids.cli import main
from gids.convert.synthetic import GraphSpec, write_graph
from gids.measure import sides
from gids.measure.isolation import FreshProcessError, FreshProcessOutOfMemory, FreshProcessTimeout
from gids.measure.sides import EpochConfig

MEMORY = 100 << 20


CONFIG = EpochConfig(
    side="gids",
    source="graph",
    dataset="graph.gids",
    fanouts=(3, 3),
    batch_size=16,
    hidden=8,
    batches=6,
    memory_bytes=MEMORY,
    gids_memory_bytes=MEMORY,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The side of gids on a small graph: 6 minibatches."""
    directory = tmp_path_factory.mktemp("sides")
    spec = GraphSpec(node_count=3000, degree=8, dim=1024, train_count=96, val_count=32)
    write_graph(directory / "graph", spec)
    assert main(["convert", str(directory / "graph"), str(directory / "graph.gids"), "--quiet"]) == 0
    return replace(CONFIG, source=str(directory / "graph"), dataset=str(directory / "graph.gids"))


@pytest.fixture
def limit():
    if reason := sides.why_no_limit():
        pytest.skip(reason)


@pytest.fixture
def runs(monkeypatch):
    """Replaces run_side: returns the list of (config, options) it was called with, and a list of outcomes to
    return or raise, in turn; a result where there are none."""
    asked, outcomes = [], []

    def run(config, **options):
        asked.append((config, options))
        outcome = outcomes.pop(0) if outcomes else epoch_result(config.side)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(sides, "run_side", run)
    return asked, outcomes


def killed():
    return FreshProcessOutOfMemory(
        "long story", "needed more than 500 MB of memory and was killed by the kernel"
    )


@pytest.mark.slow
def test_stock_that_runs_out_of_memory_is_reported_with_its_limit(config, limit):
    tiny = replace(config, side="stock", memory_bytes=1, headroom_bytes=1)
    found = sides.run_other("stock DGL", tiny)
    assert isinstance(found, str)
    assert found.startswith("stock DGL needed more than ")
    assert found.endswith(" MB of memory and was killed by the kernel")


@pytest.mark.slow
def test_gids_that_runs_out_of_memory_gets_more_once(config, limit):
    said = []
    tiny = replace(config, headroom_bytes=1, memory_bytes=1)
    found = sides.run_gids(tiny, say=said.append)
    assert found.batches == 6
    assert found.headroom_bytes == 1 + (256 << 20)
    [sentence] = said
    assert sentence.startswith("gids needed more than ")
    assert sentence.endswith("it runs again with 268 MB more")


@pytest.mark.slow
def test_headroom_is_measured_unless_it_is_given(config, limit):
    measured = sides.run_side(config)
    assert 16 << 20 < measured.headroom_bytes < 200 << 20
    given = sides.run_side(replace(config, headroom_bytes=123 << 20))
    assert given.headroom_bytes == 123 << 20
    assert abs(
        given.memory_limit_bytes - measured.memory_limit_bytes - (123 << 20) + measured.headroom_bytes
    ) < (40 << 20)


@pytest.mark.slow
def test_training_stops_after_the_minibatch_in_which_the_time_is_up(config):
    found = sides.run_side(replace(config, most_seconds=1e-9, val_nodes=8), limited=False)
    assert found.batches == 1
    assert found.val_accuracy is None  # validation takes time too
    assert (found.compared_rows, found.wrong_rows) == (64, 0)


def test_gids_runs_twice_at_most(runs):
    asked, outcomes = runs
    outcomes += [killed(), killed()]
    with pytest.raises(
        FreshProcessError, match="MB of memory and was killed by the kernel: give it more memory, smaller"
    ):
        sides.run_gids(CONFIG, say=lambda _: None, limited=True)
    assert [c.spare_bytes for c, _ in asked] == [0, 256 << 20]


def test_a_crash_or_timeout_of_gids_is_an_error(runs):
    _, outcomes = runs
    outcomes += [FreshProcessTimeout("", "did not end within 9 s and was stopped")]
    with pytest.raises(FreshProcessError, match="did not end within 9 s and was stopped: the disk may be"):
        sides.run_gids(CONFIG, say=lambda _: None)
    outcomes += [FreshProcessError("broken", "failed (exit status 1)")]
    with pytest.raises(FreshProcessError, match="broken"):
        sides.run_gids(CONFIG, say=lambda _: None)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (killed(), "stock DGL needed more than 500 MB of memory and was killed by the kernel"),
        (
            FreshProcessTimeout("", "did not end within 9 s and was stopped"),
            "stock DGL did not end within 9 s",
        ),
        (FreshProcessError("", "failed (exit status 1): boom"), "stock DGL failed (exit status 1): boom"),
        (
            PermissionError(1, "Operation not permitted"),
            "stock DGL could not be started: Operation not permit",
        ),
    ],
)
def test_the_failure_of_another_side_is_a_sentence(runs, error, sentence):
    _, outcomes = runs
    outcomes.append(error)
    assert sides.run_other("stock DGL", CONFIG).startswith(sentence)


def compare(config=CONFIG, *, spent=0.0, total=150.0, limited=True):
    begun = time.monotonic() - spent
    return quickstart.compare(config, limited=limited, total_seconds=total, begun=begun)


def test_all_sides_have_the_headroom_that_gids_measured(runs):
    asked, outcomes = runs
    outcomes += [killed(), epoch_result("gids", headroom_bytes=300 << 20)]
    compare()
    assert [(c.side, c.spare_bytes, c.headroom_bytes) for c, _ in asked] == [
        ("gids", 0, 0),
        ("gids", 256 << 20, 0),
        ("stock", 0, 300 << 20),
        ("stock", 0, 300 << 20),
    ]


def test_each_side_is_stopped_in_time(runs):
    asked, _ = runs
    compare(replace(CONFIG, most_seconds=60))
    assert [c.most_seconds for c, _ in asked] == [60, 60, 15]
    assert [c.random_access for c, _ in asked] == [True, True, False]
    assert [options["timeout_s"] for _, options in asked[:2]] == [240, 120]
    assert asked[2][1]["timeout_s"] <= 75


def test_stock_gets_less_time_if_gids_took_long(runs):
    asked, _ = runs
    compare(replace(CONFIG, most_seconds=60), spent=90)
    assert asked[1][0].most_seconds == pytest.approx(20, abs=1)
    assert asked[2][1]["timeout_s"] == pytest.approx(60, abs=1)


def test_stock_without_advice_is_skipped_when_the_time_is_up(runs):
    asked, _ = runs
    found = compare(replace(CONFIG, most_seconds=60), spent=140)
    assert [c.side for c, _ in asked] == ["gids", "stock"]
    assert asked[1][0].most_seconds == 20
    assert found.missing == {
        "stock_without_advice": "stock DGL without MADV_RANDOM was skipped, because the time was up"
    }


def test_without_a_limit_only_stock_without_advice_is_stopped(runs):
    asked, _ = runs
    compare(spent=10_000, total=0)
    assert [c.most_seconds for c, _ in asked] == [0, 0, 15]


def test_without_a_memory_limit_stock_may_read_ahead(runs):
    asked, _ = runs
    compare(limited=False)
    assert [(c.side, c.random_access, o["limited"]) for c, o in asked] == [
        ("gids", True, False),
        ("stock", False, False),
    ]


def verdict(ours, stock, plain=None):
    found = sides.Comparison(limited=True)
    for side, outcome in (("gids", ours), ("stock", stock), ("stock_without_advice", plain)):
        if isinstance(outcome, str):
            found.missing[side] = outcome
        elif outcome is not None:
            found.results[side] = epoch_result(side, **outcome)
    return quickstart.verdict(found, 6)


def test_the_verdict_compares_seconds_of_whole_epochs():
    text = verdict({"seconds": 2.0}, {"seconds": 9.0}, {"seconds": 8.0, "rows": 60, "batches": 1})
    assert text == (
        "gids is 4.5 x as fast as stock DGL. It is 40 x as fast, by rows/s, as stock DGL without MADV_RANDOM."
    )


@pytest.mark.parametrize("stopped", [0, 1])
def test_the_verdict_compares_rows_per_second_when_a_side_was_stopped(stopped):
    runs = [{"seconds": 2.0}, {"seconds": 9.0}]
    runs[stopped] |= {"batches": 3, "rows": 300}
    text = verdict(*runs)
    assert text.startswith(
        f"gids is {9 / 2 * (2 if stopped else 0.5):.1f} x as fast, by rows/s, as stock DGL."
    )
    name, seconds = ("Stock DGL", 9) if stopped else ("gids", 2)
    assert f"{name} was stopped after {seconds} s and 3 of 6 minibatches, so compare rows/s." in text


def test_the_verdict_says_why_a_side_is_missing():
    text = verdict({}, f"stock DGL {killed().reason}")
    assert text == "Stock DGL needed more than 500 MB of memory and was killed by the kernel."
