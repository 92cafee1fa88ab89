"""Ranks that disagree: an error on every rank that says who differs; never wrong rows, or an abort."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import CITES, random_in_edges, same_bits
from open_options import tuned
from programs import error_of
from rank_pool import RankPool

import gids.distributed
from gids.loader.ranks import Group
from gids.write import DatasetWriter
from gids.write.partition import partition

PAPERS = 900
ODD = 1
"""The rank that differs."""
SEEDS = torch.arange(0, PAPERS, 3)
ARGUMENTS: dict[str, Any] = {"seeds": SEEDS, "sampler": [3, 4], "batch_size": 10, "shuffle": True, "seed": 0}


def write(path: Path, names: tuple[str, str] = ("a", "b"), *, seed: int = 1) -> Path:
    generator = torch.Generator().manual_seed(seed)
    with DatasetWriter(path, page_bytes=512) as writer:
        for name in names:
            writer.write_table("node", "paper", name, torch.randn(PAPERS, 24, generator=generator))
        writer.write_table("node", "paper", "wide", torch.randn(PAPERS, 50, generator=generator))
        writer.write_graph(CITES, *random_in_edges(PAPERS, PAPERS, 0), num_src=PAPERS)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("disagreements") / "one.gids")


@pytest.fixture(scope="module")
def parts(whole: Path) -> Path:
    partition(whole, whole.with_name("parts"), 3)
    return whole.with_name("parts")


def is_odd() -> bool:
    return dist.get_rank() == ODD


def opened(dataset: Path, *, alone: bool = False, **options: Any) -> Any:
    """A source of gids.distributed.open(), or of gids.open(), whose ranks share the seeds alone."""
    if alone:
        return gids.open(dataset, memory="32MB")
    return gids.distributed.open(dataset, **tuned({"memory": "32MB", "window": 4} | options))


def check_places(told: list[str], *texts: str) -> None:
    """All ranks raised RankError with these texts."""
    assert len(told) > 1
    for of_rank in told:
        assert of_rank.startswith("RankError: the ranks are at different minibatches"), told
        assert all(text in of_rank for text in texts), told


def read_in_an_order(dataset: Path, orders: list[list[str]]) -> None:
    order = orders[dist.get_rank()]
    with opened(dataset) as source, gids.open(dataset) as whole:
        for minibatch in gids.NodeLoader(source, **ARGUMENTS, tables=order):
            assert list(minibatch.features) == order
            for name, rows in minibatch.features.items():
                assert same_bits(rows, whole.store.tables[name].read_rows(minibatch.input_nodes))


def test_each_rank_may_list_tables_in_its_own_order(whole: Path, ranks: RankPool) -> None:
    names = ["paper.a", "paper.wide"]
    ranks.run(3, read_in_an_order, whole, [names, names[::-1], names])


def open_otherwise(dataset: Path, changes: list[dict[str, Any]]) -> list[str]:
    """The errors of gids.distributed.open() where the odd rank gives each of these changes."""
    errors = []
    for change in changes:
        mine = {"dataset": dataset} | (change if is_odd() else {})
        errors.append(error_of(lambda mine=mine: opened(**mine).close()))
    return errors


OPENINGS: list[tuple[dict[str, Any], str, str]] = [
    ({"owners": "range"}, "with owners = 'hash', and rank 1 with 'range'. Give every rank the same", ""),
    ({"window": 3}, "with window = ", ""),
    ({"bulk": 3}, "with bulk = ", ""),
    ({"replicas": 3}, "with replicas = ", ""),
    ({"owners": "mine"}, "rank 1 failed with ValueError: owners='mine'", "ValueError: owners='mine'"),
    ({"replicas": 2}, "rank 1 failed with ValueError", "the 3 ranks cannot be divided by it"),
    ({"bulk": 0}, "rank 1 failed with ValueError", "bulk=0 must be a whole number"),
    ({"reads": "pack"}, "rank 1 failed with ValueError", "ranks that share rows read at random"),
    ({"dataset": ["a.gids", "b.gids"]}, "rank 1 failed with TypeError", "takes the path of one dataset"),
    ({"timeout": 9}, "rank 1 failed with TypeError", "give it to init_process_group(timeout="),
    ({"dataset": Path("/missing")}, "rank 1 failed with FileNotFoundError", "FileNotFoundError"),
]


def test_other_arguments_of_open_are_refused_on_every_rank(
    whole: Path, parts: Path, ranks: RankPool, tmp_path: Path
) -> None:
    swapped = write(tmp_path / "swapped.gids", ("b", "a"))
    openings = [*OPENINGS, ({"dataset": swapped}, "with dataset = ", "")]
    for rank, errors in enumerate(ranks.run(3, open_otherwise, whole, [o[0] for o in openings])):
        for error, (_, others, mine) in zip(errors, openings, strict=True):
            assert (mine if rank == ODD and mine else others) in error
    partition(whole, tmp_path / "parts", 3, seed=1)  # of the same dataset, by the same method
    for [error] in ranks.run(3, open_otherwise, parts, [{"dataset": tmp_path / "parts"}]):
        assert "with dataset = 'parts of crc32c:" in error


def make_otherwise(dataset: Path, changes: list[dict[str, Any]], alone: bool, other: Path) -> list[str]:
    """The errors where the odd rank makes a loader with each of these changes.

    other: the dataset of tables that are given by name.
    """
    errors = []
    with opened(dataset, alone=alone) as source, gids.open(other) as others:
        for change in changes:
            given: dict[str, Any] = ARGUMENTS | {"tables": ["paper.a", "paper.b"]}
            given |= change if is_odd() else {}
            tables = given["tables"]
            if isinstance(tables, dict):
                given["tables"] = {name: others.store.table(table) for name, table in tables.items()}
            errors.append(error_of(lambda given=given: gids.NodeLoader(source, **given)))
        gids.NodeLoader(source, **ARGUMENTS).close()  # ranks that agree go on
    return errors


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"tables": ["paper.a"]}, "tables"),
    ({"tables": {"paper.a": "paper.wide", "paper.b": "paper.b"}}, "tables"),
    ({"dtype": torch.float16}, "dtype"),
    ({"drop_last": True}, "drop_last"),
    ({"batch_size": 11}, "batch_size"),
    ({"seeds": SEEDS[:-1]}, "seeds"),
    ({"seed": None}, "seed "),
    ({"sampler": [4, 3]}, "sampler"),
    ({"cooperative": True}, "cooperative"),
]


@pytest.mark.parametrize("alone", [False, True])
def test_loaders_with_other_arguments_are_refused_on_every_rank(
    whole: Path, ranks: RankPool, alone: bool
) -> None:
    changes = CHANGES[:-1] if alone else CHANGES
    told = ranks.run(3, make_otherwise, whole, [change for change, _ in changes], alone, whole)
    for errors in told:
        for error, (change, name) in zip(errors, changes, strict=True):
            assert error.startswith(f"ValueError: rank 0 made this loader with {name}"), (change, told)
            assert "rank 1" in error


def test_tables_of_other_datasets_are_compared(whole: Path, ranks: RankPool, tmp_path: Path) -> None:
    """Names, shapes and dtypes are equal, and rows are not. A rank that cannot open its tables is named."""
    other = write(tmp_path / "others.gids", seed=2)
    changes = [{"tables": {"paper.a": "paper.a", "paper.b": "paper.b"}}, {"minibatch_rows": -1}]
    for rank, (rows, failed) in enumerate(ranks.run(3, make_otherwise, whole, changes, False, other)):
        assert rows.startswith("ValueError: rank 0 opened tables with paper.a = ['paper', ")
        assert "rank 1 with" in rows
        mine = "ValueError: minibatch_rows=-1"
        assert failed.startswith(mine if rank == ODD else f"RankError: rank 1 failed with {mine}")


def load_state(dataset: Path, state: Mapping[str, int], options: Mapping[str, Any]) -> str:
    """The error where only the odd ranks load a state of this epoch and step."""
    with opened(dataset, **options) as source:
        loader = gids.NodeLoader(source, **ARGUMENTS)
        if dist.get_rank() % 2:
            loader.load_state_dict(loader.state_dict() | dict(state))
        return error_of(lambda: list(loader))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_state_that_one_rank_loads_is_an_error_on_all(
    whole: Path, parts: Path, ranks: RankPool, replicas: int
) -> None:
    state, options = {"epoch": 0, "step": 4}, {"replicas": replicas}
    told = ranks.run(3 if replicas == 1 else 4, load_state, parts if replicas == 1 else whole, state, options)
    if replicas == 1:
        check_places(told, "rank 0: loader 0, epoch 0, step 0", "rank 1: loader 0, epoch 0, step 4")
    else:  # ranks of a column agree, and columns do not
        assert all(of_rank.startswith("RankError") for of_rank in told), told


def swap_loaders(dataset: Path, arguments: Mapping[str, Any]) -> str:
    """The error where the odd rank takes minibatches of two loaders in another order, after one of each."""

    def take() -> None:
        epochs = [iter(gids.NodeLoader(source, **ARGUMENTS | dict(arguments))) for _ in range(2)]
        for epoch in (*epochs, *(reversed(epochs) if is_odd() else epochs)):
            next(epoch)

    with opened(dataset) as source:
        return error_of(take)


@pytest.mark.parametrize("stride", [1, 9])
def test_loaders_in_another_order_are_an_error(parts: Path, ranks: RankPool, stride: int) -> None:
    """Also with so few minibatches that all are sampled at the beginning."""
    told = ranks.run(3, swap_loaders, parts, {"tables": [], "seeds": SEEDS[::stride]})
    check_places(told, "rank 0: loader 0", "rank 1: loader 1", "rank 2: loader 0")


def leave_early(dataset: Path) -> str:
    """The error where the odd rank ends an epoch after two minibatches, and begins the next one."""

    def take() -> None:
        loader = gids.NodeLoader(source, **ARGUMENTS)
        for _ in range(2):
            for step, _ in enumerate(loader):
                if is_odd() and step == 1:
                    break

    with opened(dataset) as source:
        return error_of(take)


def test_an_epoch_that_one_rank_ends_early_is_an_error(whole: Path, ranks: RankPool) -> None:
    check_places(ranks.run(3, leave_early, whole), "rank 1: loader 0, epoch 1, step 0")


def fork_in_an_epoch(dataset: Path) -> tuple[int, int]:
    """The status of a forked child that uses and closes the loader, and its parent's minibatches."""
    told = ""
    with opened(dataset) as source, gids.NodeLoader(source, **ARGUMENTS) as loader:
        epoch = iter(loader)
        next(epoch)
        child = os.fork()
        if child == 0:
            try:
                next(iter(loader))
            except RuntimeError as error:
                told = str(error)
            source.close()
            os._exit("a forked child opens its own source" not in told)
        return os.waitpid(child, 0)[1], 1 + len(list(epoch))


def test_a_forked_child_is_no_rank_and_ends(whole: Path, ranks: RankPool) -> None:
    assert ranks.run(2, fork_in_an_epoch, whole) == [(0, 15)] * 2


DTYPES = (torch.int64, torch.uint8, torch.float32)


def exchange_kinds(counts: list[int]) -> None:
    """Exchange so many tensors with each rank, from no number on, of every dtype."""

    def sent(sender: int, to: int, kind: int) -> torch.Tensor:
        return (torch.arange((3 * sender + 5 * to + kind) % 7) + 10 * sender + to).to(DTYPES[kind % 3])

    with Group() as group:
        for count in counts:
            dtypes = [DTYPES[kind % 3] for kind in range(count)]
            tensors = [[sent(group.rank, to, kind) for to in range(group.size)] for kind in range(count)]
            came = group.exchange(lambda tensors=tensors: tensors, dtypes, f"exchange {count} {count * '-'}")
            assert [len(by_rank) for by_rank in came] == [group.size] * count
            for kind, by_rank in enumerate(came):
                for rank, tensor in enumerate(by_rank):
                    assert same_bits(tensor, sent(rank, group.rank, kind))


def test_any_number_of_tensors_is_exchanged(ranks: RankPool) -> None:
    ranks.run(3, exchange_kinds, [0, 1, 64, 65, 200])
