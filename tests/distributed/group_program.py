"""What each rank of test_group.py runs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gids.distributed.group import Group

DTYPES = (torch.int64, torch.uint8, torch.float32)


def sent(sender: int, to: int, kind: int) -> torch.Tensor:
    """What a rank sends another one: from no number on, of every dtype."""
    count = (3 * sender + 5 * to + kind) % 7
    return (torch.arange(count) + 10 * sender + to).to(DTYPES[kind % 3])


def exchange_kinds(counts: list[int]) -> None:
    """Exchange so many tensors with each rank."""
    group = Group(timeout_s=30)
    for count in counts:
        dtypes = [DTYPES[kind % 3] for kind in range(count)]

        def make(count: int = count) -> list[list[torch.Tensor]]:
            return [[sent(group.rank, to, kind) for kind in range(count)] for to in range(group.size)]

        came = group.exchange(make, dtypes, f"exchange {count}")
        assert [len(of_rank) for of_rank in came] == [count] * group.size
        for rank, of_rank in enumerate(came):
            for kind, tensor in enumerate(of_rank):
                expected = sent(rank, group.rank, kind)
                assert tensor.dtype == expected.dtype
                assert torch.equal(tensor, expected)
    group.close()


def exchange_differently(failing: bool) -> tuple[str, int]:
    """Rank 1 exchanges more kinds than the others; perhaps it fails. The error, and what comes after it."""
    group = Group(timeout_s=30)
    kinds = 70 if dist.get_rank() == 1 else 2

    def make() -> list[list[torch.Tensor]]:
        if failing and group.rank == 1:
            raise ArithmeticError("no such number")
        return [[torch.zeros(1, dtype=torch.int64)] * kinds for _ in range(group.size)]

    told = ""
    try:
        group.exchange(make, [torch.int64] * kinds, "exchange")
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    later = sum(group.most([group.rank], "later")) if failing else -1
    group.close()
    return told, later
