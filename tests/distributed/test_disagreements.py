"""Ranks that disagree: an error on every rank that says who differs; never wrong rows, or an abort."""

from __future__ import annotations

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


def test_each_rank_may_list_tables_in_its_own_order(whole: Path, ranks: RankPool) -> None:
    names = ["paper.a", "paper.wide"]
    assert ranks.run(3, program.wrong_rows, whole, [names, names[::-1], names]) == [0, 0, 0]


OPENINGS: list[tuple[dict[str, Any], str, str]] = [
    ({"owners": "range"}, "with owners = 'hash', and rank 1 with 'range'. Give every rank the same", ""),
    ({"bulk": 3}, "with bulk = ", ""),
    ({"window": 3}, "with window = ", ""),
    ({"replicas": 3}, "with replicas = ", ""),
    ({"owners": "mine"}, "rank 1 failed with ValueError: owners='mine'", "ValueError: owners='mine'"),
    ({"reads": "pack"}, "rank 1 failed with ValueError", "ranks that share rows read at random"),
    ({"dataset": ["a.gids", "b.gids"]}, "rank 1 failed with TypeError", "takes the path of one dataset"),
    ({"timeout": 9}, "rank 1 failed with TypeError", "give it to init_process_group(timeout="),
    ({"dataset": Path("/missing")}, "rank 1 failed with FileNotFoundError", "FileNotFoundError"),
]


def test_other_arguments_of_open_are_refused_on_every_rank(
    whole: Path, parts: Path, ranks: RankPool, tmp_path: Path
) -> None:
    other = write(tmp_path / "other.gids", seed=2)
    openings = [*OPENINGS, ({"dataset": other}, "with dataset = ", "")]
    for rank, errors in enumerate(ranks.run(3, program.open_otherwise, whole, [o[0] for o in openings])):
        for error, (_, others, mine) in zip(errors, openings, strict=True):
            assert (mine if rank == 1 and mine else others) in error
    partition(whole, tmp_path / "parts", 3, seed=1)  # of the same dataset, by the same method
    for [error] in ranks.run(3, program.open_otherwise, parts, [{"dataset": tmp_path / "parts"}]):
        assert "with dataset = 'parts of crc32c:" in error


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"tables": ["paper.a"]}, "tables"),
    ({"tables": []}, "tables"),
    ({"tables": {"paper.a": "paper.wide", "paper.b": "paper.b"}}, "tables"),
    ({"dtype": torch.float16}, "dtype"),
    ({"drop_last": True}, "drop_last"),
    ({"batch_size": 11}, "batch_size"),
    ({"seeds": program.SEEDS[:-1]}, "seeds"),
    ({"seed": 1}, "seed "),
    ({"seed": None}, "seed "),
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
        assert error.startswith("ValueError: rank 0 opened tables with paper.a = ['paper', ")
        assert "rank 1 with" in error


def test_a_rank_that_cannot_open_its_tables_is_named(whole: Path, ranks: RankPool) -> None:
    for rank, [error] in enumerate(
        ranks.run(3, program.make_otherwise, whole, [{"minibatch_rows": -1}], "group", None)
    ):
        mine = "ValueError: minibatch_rows=-1"
        assert error.startswith(mine if rank == 1 else f"RankError: rank 1 failed with {mine}")


@pytest.mark.parametrize(
    ("partitioned", "size", "options", "arguments"),
    [(True, 3, {}, {}), (False, 4, {"replicas": 2}, {}), (True, 3, {}, {"cooperative": True})],
)
def test_a_state_that_one_rank_loads_is_an_error_on_all(
    whole: Path, parts: Path, ranks: RankPool, partitioned: bool, size: int, options: Any, arguments: Any
) -> None:
    dataset, state = parts if partitioned else whole, {"epoch": 0, "step": 4}
    told = ranks.run(size, program.load_state, dataset, state, options, arguments)
    if size == 3:
        check_places(told, "rank 0: loader 0, epoch 0, step 0", "rank 1: loader 0, epoch 0, step 4")
    else:  # ranks of a column agree, and columns do not
        assert all(of_rank.startswith("RankError") for of_rank in told), told


@pytest.mark.few(2)
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(
    ("partitioned", "arguments"), [(False, SMALL), (True, {"tables": []}), (False, {"cooperative": True})]
)
def test_loaders_in_another_order_are_an_error(
    whole: Path, parts: Path, ranks: RankPool, partitioned: bool, arguments: dict[str, Any], after: int
) -> None:
    told = ranks.run(3, program.swap_loaders, parts if partitioned else whole, arguments, after)
    check_places(told, "rank 0: loader 0", "rank 1: loader 1", "rank 2: loader 0")


@pytest.mark.parametrize("arguments", [{}, SMALL])
def test_an_epoch_that_one_rank_ends_early_is_an_error(
    whole: Path, ranks: RankPool, arguments: dict[str, Any]
) -> None:
    check_places(ranks.run(3, program.leave_early, whole, arguments), "rank 1: loader 0, epoch 1, step 0")


def test_a_forked_child_is_no_rank_and_ends(whole: Path, ranks: RankPool) -> None:
    assert ranks.run(2, program.fork_in_an_epoch, whole) == [(0, 15)] * 2


@pytest.mark.parametrize("alone", [False, True])
def test_ranks_that_agree_go_on(whole: Path, ranks: RankPool, alone: bool) -> None:
    count = -(-len(program.SEEDS) // 30)
    expected = [(0, s) for s in range(3)] + [(0, s) for s in range(count)] + [(1, s) for s in range(3)]
    expected += [(1, s) for s in range(3, count)]
    assert ranks.run(3, program.go_on, whole, alone) == [expected] * 3


def test_rows_that_differ_in_an_exchange_are_an_error_at_once(whole: Path, ranks: RankPool) -> None:
    told = ranks.run(3, program.exchange_otherwise, whole, ["width", "dtype", "rows", "layer"])
    for errors, odd in zip(zip(*told, strict=True), ("[5]", "float64", "", "exchange(1, h)"), strict=True):
        if odd:
            check_places(list(errors), "rank 0: loader 0, epoch 0, step", odd)
        else:
            mine = "ValueError: exchange(0, h): h has"
            for rank, error in enumerate(errors):
                assert error.startswith(mine if rank == 1 else f"RankError: rank 1 failed with {mine}")


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
    others = FeatureStore(write(tmp_path / "edges.gids", edges=1))
    assert others.topology_crc != stores[0].topology_crc == stores[1].topology_crc


def test_any_number_of_tensors_is_exchanged(ranks: RankPool) -> None:
    ranks.run(3, program.exchange_kinds, [0, 1, 5, 63, 64, 65, 200])


@pytest.mark.parametrize(
    ("failing", "place", "error"),
    [
        (True, "here", "rank 1 failed with ArithmeticError: no such number"),
        (False, "here", "the ranks are at different minibatches"),
        (False, "h" * 300, "the ranks are at different minibatches"),
    ],
)
def test_an_exchange_that_fails_or_differs_is_an_error_and_the_next_one_is_right(
    ranks: RankPool, failing: bool, place: str, error: str
) -> None:
    for rank, (told, later) in enumerate(ranks.run(3, program.exchange_differently, failing, place)):
        mine = "ArithmeticError: no such number"
        assert told.startswith(mine if failing and rank == 1 else f"RankError: {error}")
        assert later == [[0, 0.1, "é"], [1, 0.1, "é"], [2, 0.1, "é"]]


def test_rows_that_one_rank_did_not_send_are_noticed_before_the_next_ones(ranks: RankPool) -> None:
    check_places(ranks.run(2, program.skip_rows, Path()))
