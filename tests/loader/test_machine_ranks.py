"""Ranks of one machine tell each other plain values through a key-value store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from gids.errors import RankError
from gids.loader.machine_ranks import MachineRanks, Process


def make(store: Any, ranks: tuple[int, ...] = (3, 5, 8), **changes: Any) -> list[MachineRanks]:
    """The same ranks, as each of them sees them. changes: of the process of the last one."""
    processes = dict.fromkeys(ranks, Process.this())
    processes[ranks[-1]] = dataclasses.replace(Process.this(), **changes)
    return [MachineRanks(rank, processes, store, "key", 10.0) for rank in ranks]


def together(ranks: list[MachineRanks], work: Callable[[MachineRanks], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def test_each_hears_what_all_say_and_little_is_left_in_the_store() -> None:
    store = HashStore()
    ranks = make(store)
    assert [(r.index, r.size, r.name_of(r.index)) for r in ranks] == [
        (0, 3, "rank 3"),
        (1, 3, "rank 5"),
        (2, 3, "rank 8"),
    ]
    for number in range(20):
        values = together(ranks, lambda r, number=number: r.gather({"said": [number, r.index]}))  # type: ignore[misc]
        assert values == [[{"said": [number, index]} for index in range(3)]] * 3
        assert store.num_keys() == 3, "of this round"


def test_one_alone_hears_itself() -> None:
    with MachineRanks.alone(7) as rank:
        assert (rank.index, rank.size, rank.gather("a")) == (0, 1, ["a"])
        rank.fail(ValueError("nobody hears it"))


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("heard", [False, True])
def test_a_rank_that_fails_is_named_wherever_the_others_are(rounds: int, heard: bool) -> None:
    """heard: it has said its value of this round, and failed while it waited for the others."""
    ranks = make(HashStore())
    for _ in range(rounds):
        together(ranks, lambda r: r.gather(None))
    if heard:
        ranks[1]._say(rounds, {"value": None})
    with pytest.raises(KeyError, match="x"), ranks[1]:
        raise KeyError("x")
    for rank in (ranks[0], ranks[2]):  # one after the other: they do not wait for the one that failed
        other = ranks[2] if rank is ranks[0] else ranks[0]
        other._say(rounds, {"value": None})
        with pytest.raises(RankError, match=r"^rank 5 failed with KeyError: 'x'$"), rank:
            rank.gather(None)


def test_the_first_failure_is_told_and_not_what_follows_from_it() -> None:
    ranks = make(HashStore(), (0, 1, 2))
    ranks[0].fail(MemoryError("short"))

    def follow(rank: MachineRanks) -> str:
        with pytest.raises(RankError) as caught, rank:
            rank.gather(None)
        return str(caught.value)

    assert together(ranks[1:], follow) == ["rank 0 failed with MemoryError: short"] * 2


def test_a_rank_that_says_nothing_is_named() -> None:
    rank = make(HashStore())[0]
    rank._timeout_s = 0.1
    with pytest.raises(RankError, match=r"rank 5 does not answer within 0\.1 s"):
        rank.gather(None)


def test_a_rank_that_ended_is_named_at_once_unless_it_had_said_its_value() -> None:
    ranks = make(HashStore(), (0, 1), started="1")  # another process had its number
    with pytest.raises(RankError, match="rank 1 has ended"):
        ranks[0].gather(None)
    ranks = make(HashStore(), (0, 1), started="1")
    ranks[1]._say(0, {"value": "last words"})
    assert ranks[0].gather("mine") == ["mine", "last words"]


def test_a_store_that_does_not_answer_is_an_error() -> None:
    class Gone(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(RankError, match=r"store of the process group does not answer \(Connection reset"):
        make(Gone())[0].gather(None)
