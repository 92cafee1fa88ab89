"""Exchanges of ids: any number of tensors, and ranks that are not where the others are."""

from __future__ import annotations

import pytest
from group_program import exchange_differently, exchange_kinds
from rank_pool import RankPool


def test_any_number_of_tensors_is_exchanged(ranks: RankPool) -> None:
    ranks.run(3, exchange_kinds, [0, 1, 5, 60, 61, 62, 200])


def test_a_failure_is_heard_by_ranks_that_exchange_something_else(ranks: RankPool) -> None:
    for rank, (told, later) in enumerate(ranks.run(3, exchange_differently, True)):
        mine = "ArithmeticError: no such number"
        assert told == (mine if rank == 1 else f"RankError: rank 1 failed with {mine}")
        assert later == 2


@pytest.mark.slow
def test_ranks_that_exchange_different_things_are_named(ranks: RankPool) -> None:
    for rank, (told, _) in enumerate(ranks.run(3, exchange_differently, False)):
        assert "are at different minibatches" in told, rank
        assert "rank 1" in told
