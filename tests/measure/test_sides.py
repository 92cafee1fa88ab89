"""A side of the comparison: its memory and time are limited, and a failure is reported."""

from dataclasses import replace

import pytest
from epoch_results import epoch_result, train_here

from gids.cli import main
from gids.convert.synthetic import GraphSpec, write_graph
from gids.measure import sides
from gids.measure.isolation import FreshProcessError, FreshProcessOutOfMemory, FreshProcessTimeout
from gids.measure.sides import EpochConfig

MEMORY = 100 << 20


CONFIG = EpochConfig(
    side="gids",
    dataset="graph.gids",
    tables=("_N.feat",),
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
    return replace(CONFIG, dataset=str(directory / "graph.gids"))


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


def compare(config, name="stock DGL"):
    """(result, sentences) of a comparison that runs one side."""
    said = []
    comparison = sides.Comparison(limited=True, say=said.append)
    comparison.headroom_bytes = config.headroom_bytes
    return comparison.run(name, config), said


@pytest.mark.slow
def test_stock_that_runs_out_of_memory_is_reported_with_its_limit(config, limit):
    result, [sentence] = compare(replace(config, side="stock", memory_bytes=1, headroom_bytes=1))
    assert result is None
    assert sentence.startswith("`stock DGL` needed more than ")
    assert sentence.endswith(" MB of memory and was killed by the kernel")


@pytest.mark.slow
def test_headroom_is_measured_unless_it_is_given(config, limit):
    measured = sides.run_side(config)
    assert 16 << 20 < measured.headroom_bytes < 200 << 20
    given = sides.run_side(replace(config, headroom_bytes=1, memory_bytes=1, spare_bytes=256 << 20))
    assert given.batches == 6
    assert given.headroom_bytes == 1 + (256 << 20)
    before_training = [
        r.memory_limit_bytes - r.headroom_bytes - m for r, m in ((measured, MEMORY), (given, 1))
    ]
    assert abs(before_training[0] - before_training[1]) < 40 << 20


@pytest.mark.slow
def test_training_stops_after_the_minibatch_in_which_the_time_is_up(config, monkeypatch):
    pytest.importorskip("gids.dgl", exc_type=ImportError)
    train_here(monkeypatch)
    found = sides.run_side(replace(config, most_seconds=1e-9), limited=False)
    assert found.batches == 1
    assert (found.compared_rows, found.wrong_rows) == (64, 0)


def test_gids_runs_twice_at_most(runs):
    asked, outcomes = runs
    outcomes += [killed(), killed()]
    with pytest.raises(
        FreshProcessError, match="MB of memory and was killed by the kernel: give it more memory, or smaller"
    ):
        compare(CONFIG)
    assert [c.spare_bytes for c, _ in asked] == [0, 256 << 20]


SLOW = FreshProcessTimeout("", "did not end within 9 s and was stopped")
FAILED = FreshProcessError("broken", "failed (exit status 1): boom")
REFUSED = PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("error", "of_gids", "of_stock"),
    [
        (killed(), None, "needed more than 500 MB of memory and was killed by the kernel"),
        (SLOW, "did not end within 9 s and was stopped: the disk may be", "did not end within 9 s"),
        (FAILED, "broken", "failed (exit status 1): boom"),
        (REFUSED, "Operation not permitted", "could not be started: Operation not permitted"),
    ],
)
def test_a_failure_is_an_error_for_gids_and_a_sentence_for_stock(runs, error, of_gids, of_stock):
    _, outcomes = runs
    outcomes.append(error)
    result, [sentence] = compare(replace(CONFIG, side="stock"))
    assert result is None
    assert sentence.startswith(f"`stock DGL` {of_stock}")
    if of_gids:
        outcomes.append(error)
        with pytest.raises(OSError, match=of_gids):
            compare(CONFIG)


def test_gids_that_runs_out_of_memory_runs_again_and_all_sides_have_its_headroom(runs):
    asked, outcomes = runs
    outcomes += [killed(), epoch_result("gids", headroom_bytes=300 << 20)]
    said: list[str] = []
    comparison = sides.Comparison(limited=True, say=said.append)
    for side in ("gids", "stock", "stock"):
        comparison.run(side, replace(CONFIG, side=side))
    assert [(c.side, c.spare_bytes, c.headroom_bytes) for c, _ in asked] == [
        ("gids", 0, 0),
        ("gids", 256 << 20, 0),
        ("stock", 0, 300 << 20),
        ("stock", 0, 300 << 20),
    ]
    assert said == [f"gids {killed().reason}; it runs again with 268 MB more"]
