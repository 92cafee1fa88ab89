"""Ranks that disagree: an error on every rank that says who differs; never wrong rows, a hang or an abort."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import disagreement_program as program
import pytest
import torch
from datasets import random_in_edges
from programs import CITED, COUNTS
from rank_pool import RankPool

from gids.distributed.source import _identity
from gids.store import FeatureStore
from gids.write import DatasetWriter
from gids.write.partition import partition

CITES, PAPERS = CITED[0], COUNTS["paper"]
SMALL = {"seeds": torch.arange(0, 900, 9)}
"""So few minibatches that all are sampled at the beginning."""


def write(path: Path, names: tuple[str, str] = ("a", "b"), *, seed: int = 1, edges: int = 0) -> Path:
    generator = torch.Generator().manual_seed(seed)
    with DatasetWriter(path, page_bytes=512) as writer:
        for name in names:
            writer.write_table("node", "paper", name, torch.randn(PAPERS, 24, generator=generator))
        writer.write_table("node", "paper", "wide", torch.randn(PAPERS, 50, generator=generator))
        writer.write_graph(CITES, *random_in_edges(PAPERS, PAPERS, edges), num_src=PAPERS)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("disagreements") / "one.gids")


@pytest.fixture(scope="module")
def parts(whole: Path) -> Path:
    partition(whole, whole.with_name("parts"), 3)
    return whole.with_name("parts")


def check_places(told: list[str], *texts: str) -> None:
    """All ranks raised RankError with these texts."""
    assert len(told) > 1
    for of_rank in told:
        assert of_rank.startswith("RankError: the ranks are at different minibatches"), told
        assert all(text in of_rank for text in texts), told


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [("paper.a", "paper.b"), ("paper.a", "paper.wide")])
def test_each_rank_may_list_tables_in_its_own_order(
    whole: Path, ranks: RankPool, names: tuple[str, str]
) -> None:
    orders = [list(names), list(reversed(names)), list(names)]
    assert ranks.run(3, program.wrong_rows, whole, orders) == [0, 0, 0]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"tables": ["paper.a"]}, "tables"),
    ({"tables": []}, "tables"),
    ({"tables": ["paper.a", "paper.wide"]}, "tables"),
    ({"tables": {"paper.a": "paper.wide", "paper.b": "paper.b"}}, "tables"),
    ({"dtype": torch.float16}, "dtype"),
    ({"labels": "inputs"}, "labels"),
    ({"drop_last": True}, "drop_last"),
    ({"batch_size": 11}, "batch_size"),
    ({"seeds": program.SEEDS[:-1]}, "seeds"),
    ({"seed": 1}, "seed "),
    ({"sampler": [4, 3]}, "sampler"),
]


@pytest.mark.parametrize("kind", ["group", "cooperative", "alone"])
def test_loaders_with_other_arguments_are_refused_on_every_rank(
    whole: Path, ranks: RankPool, kind: str
) -> None:
    changes = CHANGES + ([({"cooperative": kind != "cooperative"}, "cooperative")] if kind != "alone" else [])
    told = ranks.run(3, program.make_otherwise, whole, [change for change, _ in changes], kind, None)
    for errors in told:
        for error, (change, name) in zip(errors, changes, strict=True):
            assert error.startswith(f"ValueError: rank 0 made this loader with {name}"), (change, told)
            assert "rank 1" in error


def test_tables_of_other_datasets_are_compared(whole: Path, ranks: RankPool) -> None:
    """Their names, shapes and dtypes are equal, and rows are not."""
    other = write(whole.with_name("others.gids"), seed=2)
    changes = [{"tables": {"paper.a": "paper.a", "paper.b": "paper.b"}}]
    for [error] in ranks.run(3, program.make_otherwise, whole, changes, "group", other):
        assert error.startswith("ValueError: all ranks must load the same tables: rank")
        assert "rank 1 has" in error


def test_other_edges_are_refused_where_ranks_share_only_the_seeds(
    whole: Path, ranks: RankPool, tmp_path: Path
) -> None:
    for error in ranks.run(3, program.open_other, whole, write(tmp_path / "other.gids", edges=1)):
        assert error.startswith("ValueError: rank 0 made this loader with topology"), error
        assert "rank 1" in error


def test_a_rank_that_cannot_open_its_tables_is_named(whole: Path, ranks: RankPool) -> None:
    for rank, [error] in enumerate(
        ranks.run(3, program.make_otherwise, whole, [{"minibatch_rows": -1}], "group", None)
    ):
        mine = "ValueError: minibatch_rows=-1"
        assert error.startswith(mine if rank == 1 else f"RankError: rank 1 failed with {mine}")


@pytest.mark.few(3)
@pytest.mark.parametrize("arguments", [{}, {"cooperative": True}, {"tables": []}, "seeds alone"])
@pytest.mark.parametrize("state", [{"epoch": 3, "step": 0}, {"epoch": 0, "step": 4}])
def test_a_state_that_one_rank_loads_is_an_error_on_all(
    whole: Path, parts: Path, ranks: RankPool, state: dict[str, int], arguments: Any
) -> None:
    if arguments == "seeds alone":
        told = ranks.run(3, program.begin_elsewhere, whole, state, {"alone": True}, {}, [1])
    else:
        told = ranks.run(3, program.begin_elsewhere, parts, state, {}, arguments, [1])
    check_places(
        told,
        "rank 0 and rank 2: loader 0, epoch 0, step 0",
        f"rank 1: loader 0, epoch {state['epoch']}, step {state['step']}",
    )


@pytest.mark.parametrize("options", [{}, {"alone": True}])
def test_a_sampler_that_one_rank_sets_is_an_error_on_all(
    parts: Path, whole: Path, ranks: RankPool, options: dict[str, Any]
) -> None:
    dataset = whole if options else parts
    told = ranks.run(3, program.begin_elsewhere, dataset, {}, options, {}, [1])
    check_places(told, "rank 1: loader 0, epoch 0", "by Neighbor([2, 2])")


@pytest.mark.parametrize("column", [0, 1])
def test_a_state_that_one_column_loads_is_an_error_on_all(whole: Path, ranks: RankPool, column: int) -> None:
    state, odd = {"epoch": 3}, [column, column + 2]
    told = ranks.run(4, program.begin_elsewhere, whole, state, {"replicas": 2}, {}, odd)
    check_places(told, f"rank {column} and rank {column + 2}: loader 0, epoch 3")


@pytest.mark.few(4)
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(
    ("partitioned", "options", "arguments"),
    [
        (False, {}, SMALL),
        (False, {"reads": "pack"}, {}),
        (True, {}, {}),
        (True, {}, {"tables": []}),
        (False, {}, {"cooperative": True}),
    ],
)
def test_loaders_in_another_order_are_an_error(
    whole: Path,
    parts: Path,
    ranks: RankPool,
    partitioned: bool,
    options: dict[str, Any],
    arguments: dict[str, Any],
    after: int,
) -> None:
    dataset = parts if partitioned else whole
    told = ranks.run(3, program.swap_loaders, dataset, options, arguments, after)
    check_places(told, "rank 0 and rank 2: loader 0", "rank 1: loader 1")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"alone": True}, {}),  # ranks of gids.open()
        *itertools.product([{}, {"reads": "pack"}], [{}, SMALL, {"cooperative": True}]),
    ],
)
def test_an_epoch_that_one_rank_ends_early_is_an_error(
    whole: Path, ranks: RankPool, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    told = ranks.run(3, program.leave_early, whole, options, arguments, [1])
    check_places(told, "rank 1: loader 0, epoch 1, step 0")


def test_an_epoch_that_one_column_ends_early_is_an_error(whole: Path, ranks: RankPool) -> None:
    told = ranks.run(4, program.leave_early, whole, {"replicas": 2}, {}, [1, 3])
    check_places(told, "rank 1 and rank 3: loader 0, epoch 1, step 0 (begins after 2 minibatches")


def test_threads_that_exchange_in_any_order_never_abort(whole: Path, ranks: RankPool) -> None:
    beside = ranks.run(3, program.make_beside, whole)
    for error in (*ranks.run(3, program.take_ahead, whole), *itertools.chain(*beside)):
        assert error == "no error" or error.startswith("RankError: the ranks are at different"), error


def test_a_rank_that_makes_a_loader_for_itself_is_named(whole: Path, ranks: RankPool) -> None:
    told = ranks.run(3, program.do_something_else, whole, "make")
    check_places(told, "rank 1: makes loader 1", "rank 0 and rank 2: loader 0, epoch 0, step")


@pytest.mark.slow
def test_a_rank_that_closes_its_source_is_named(whole: Path, ranks: RankPool) -> None:
    told = ranks.run(3, program.do_something_else, whole, "close")
    for rank in (0, 2):
        assert told[rank].startswith("RankError: rank 1 does not answer")


def test_a_group_that_is_closed_says_so(ranks: RankPool) -> None:
    assert ranks.run(1, program.exchange_after_close) == [["RankError: this group is closed"] * 2]


def test_a_forked_child_is_no_rank_and_ends(whole: Path, ranks: RankPool) -> None:
    assert ranks.run(2, program.fork_in_an_epoch, whole) == [(True, 15)] * 2


def test_a_rank_that_does_not_begin_an_epoch_is_named(whole: Path, ranks: RankPool) -> None:
    told = ranks.run(3, program.do_not_begin, whole)
    for rank in (0, 2):
        assert told[rank].startswith(
            "RankError: rank 1 did not come in time to where this rank is (loader 0, epoch 0"
        )


@pytest.mark.parametrize("alone", [False, True])
def test_ranks_that_agree_go_on(whole: Path, ranks: RankPool, alone: bool) -> None:
    count = -(-len(program.SEEDS) // 30)
    expected = [(0, s) for s in range(3)] + [(0, s) for s in range(count)] + [(1, s) for s in range(3)]
    expected += [(1, s) for s in range(3, count)]
    assert ranks.run(3, program.go_on, whole, alone) == [expected] * 3


def test_rows_that_differ_in_an_exchange_are_an_error_at_once(whole: Path, ranks: RankPool) -> None:
    told = ranks.run(3, program.exchange_otherwise, whole, ["width", "dtype", "rows", "layer"])
    for rank, (width, dtype, rows, _) in enumerate(told):
        for error in (width, dtype):
            assert error.startswith("ValueError: exchange(0, h): all ranks must give rows of the same shape")
            assert "rank 1 has" in error
        mine = "ValueError: exchange(0, h): h has"
        assert rows.startswith(mine if rank == 1 else f"RankError: rank 1 failed with {mine}")
    check_places([of_rank[3] for of_rank in told], "rank 1: loader 0, epoch 0, step 3 (exchange(1, h))")


@pytest.mark.parametrize("partitioned", [False, True])
def test_cooperative_columns_share_the_seeds(
    cited: Path, ranks: RankPool, tmp_path: Path, partitioned: bool
) -> None:
    """The last step has one seed, and so one column has none."""
    dataset, seeds = cited, torch.arange(0, 900, 9)[:65]
    [(expected, _)] = ranks.run(1, program.train_cooperatively, dataset, {}, 32, seeds)
    if partitioned:
        partition(dataset, tmp_path / "parts", 2)
        dataset = tmp_path / "parts"
    told = ranks.run(4, program.train_cooperatively, dataset, {"replicas": 2}, 8, seeds)
    assert sum(count for _, count in told) == len(seeds)
    for weights, _ in told:
        for mine, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_datasets_whose_tables_swap_names_differ(whole: Path, tmp_path: Path) -> None:
    stores = [FeatureStore(write(tmp_path / f"{n}.gids", n)) for n in (("a", "b"), ("b", "a"))]
    assert len({s.content_crc for s in stores}) == len({_identity(s) for s in stores}) == 2
    assert FeatureStore(whole).content_crc == stores[0].content_crc
    assert {s.topology_crc for s in stores} == {FeatureStore(whole).topology_crc}
    others = FeatureStore(write(tmp_path / "edges.gids", edges=1))
    assert others.topology_crc != stores[0].topology_crc


def test_values_are_sent_as_json(ranks: RankPool) -> None:
    values = [[1, None, 0.1, "é"], {"a": {"b": [True]}}, "x" * 5000]
    for came in ranks.run(3, program.send_values, [*values, {1, 2}]):
        assert came == [*([value] * 3 for value in values), "error"]


def test_any_number_of_tensors_is_exchanged(ranks: RankPool) -> None:
    ranks.run(3, program.exchange_kinds, [0, 1, 5, 60, 61, 62, 200])


def test_a_failure_is_heard_by_ranks_that_exchange_something_else(ranks: RankPool) -> None:
    for rank, (told, later) in enumerate(ranks.run(3, program.exchange_differently, True)):
        mine = "ArithmeticError: no such number"
        assert told == (mine if rank == 1 else f"RankError: rank 1 failed with {mine}")
        assert later == 2


@pytest.mark.slow
def test_ranks_that_exchange_different_things_are_named(ranks: RankPool) -> None:
    for rank, (told, _) in enumerate(ranks.run(3, program.exchange_differently, False)):
        assert "are at different minibatches" in told, rank
        assert "rank 1" in told
