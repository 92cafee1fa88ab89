"""What ranks do that differ from each other. In a module of its own: the processes of ranks import it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import same_bits
from open_options import tuned
from programs import Sage

import gids.distributed
from gids.loader.ranks import Group

ODD = 1
"""The rank that differs."""
SEEDS = torch.arange(0, 900, 3)
ARGUMENTS: dict[str, Any] = {"seeds": SEEDS, "sampler": [3, 4], "batch_size": 10, "shuffle": True, "seed": 0}


def is_odd() -> bool:
    return dist.get_rank() == ODD


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (gids.RankError, ValueError, TypeError, ArithmeticError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def opened(dataset: Path, *, alone: bool = False, **options: Any) -> Any:
    """A source of gids.distributed.open(), or of gids.open(), whose ranks share the seeds alone."""
    if alone:
        return gids.open(dataset, memory="32MB")
    return gids.distributed.open(dataset, **tuned({"memory": "32MB", "window": 4} | options))


def open_otherwise(dataset: Path, changes: list[dict[str, Any]]) -> list[str]:
    """The errors of gids.distributed.open() where the odd rank gives each of these changes."""
    errors = []
    for change in changes:
        mine = {"dataset": dataset} | (change if is_odd() else {})
        errors.append(error_of(lambda mine=mine: opened(**mine).close()))
    return errors


def wrong_rows(dataset: Path, orders: list[list[str]]) -> int:
    """The number of wrong features, where each rank loads tables in an order of its own."""
    wrong = 0
    with opened(dataset) as source, gids.open(dataset) as whole:
        loader = gids.NodeLoader(source, **ARGUMENTS, tables=orders[dist.get_rank()])
        for minibatch in loader:
            assert list(minibatch.features) == orders[dist.get_rank()]
            for name, rows in minibatch.features.items():
                wrong += not same_bits(rows, whole.store.tables[name].read_rows(minibatch.input_nodes))
    return wrong


def make_otherwise(dataset: Path, changes: list[dict[str, Any]], kind: str, other: Path | None) -> list[str]:
    """The errors where the odd rank makes a loader with each of these changes.

    kind: "group", "cooperative" or "alone". other: the dataset of tables that are given by name.
    """
    errors = []
    extra = {"cooperative": True} if kind == "cooperative" else {}
    with opened(dataset, alone=kind == "alone") as source, gids.open(other or dataset) as others:
        for change in changes:
            given: dict[str, Any] = ARGUMENTS | {"tables": ["paper.a", "paper.b"]} | extra
            given |= change if is_odd() else {}
            tables = given["tables"]
            if isinstance(tables, dict):
                given["tables"] = {name: others.store.table(table) for name, table in tables.items()}
            errors.append(error_of(lambda given=given: gids.NodeLoader(source, **{"seed": 0} | given)))
        gids.NodeLoader(source, **ARGUMENTS, **extra).close()  # ranks that agree go on
    return errors


def load_state(
    dataset: Path, state: Mapping[str, int], options: Mapping[str, Any], arguments: Mapping[str, Any]
) -> str:
    """The error where only the odd ranks load a state of this epoch and step."""
    with opened(dataset, **options) as source:
        loader = gids.NodeLoader(source, **ARGUMENTS | dict(arguments))
        if dist.get_rank() % 2:
            loader.load_state_dict(loader.state_dict() | dict(state))
        return error_of(lambda: list(loader))


def swap_loaders(dataset: Path, arguments: Mapping[str, Any], after: int) -> str:
    """The error where the odd rank takes minibatches of two loaders in another order, after some of each."""

    def take() -> None:
        epochs = [iter(gids.NodeLoader(source, **ARGUMENTS | dict(arguments))) for _ in range(2)]
        for _, epoch in itertools.product(range(after), epochs):
            next(epoch)
        for epoch in reversed(epochs) if is_odd() else epochs:
            next(epoch)

    with opened(dataset) as source:
        return error_of(take)


def leave_early(dataset: Path, arguments: Mapping[str, Any]) -> str:
    """The error where the odd rank ends an epoch after two minibatches, and begins the next one."""

    def take() -> None:
        loader = gids.NodeLoader(source, **ARGUMENTS | dict(arguments))
        for _ in range(2):
            for step, _ in enumerate(loader):
                if is_odd() and step == 1:
                    break

    with opened(dataset) as source:
        return error_of(take)


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


def go_on(dataset: Path, alone: bool) -> list[tuple[int, int]]:
    """Epoch and step of each minibatch of two loaders that all ranks use alike, resumed in between."""
    seen = []
    with opened(dataset, alone=alone) as source:
        train, valid = (gids.NodeLoader(source, **ARGUMENTS | {"seed": seed}) for seed in (1, 2))
        for loader in (train, valid, train):
            seen += [(m.epoch, m.step) for m in itertools.islice(loader, 3 if loader is train else None)]
        state = train.state_dict()
        train.load_state_dict(state)
        seen += [(m.epoch, m.step) for m in train]
    return seen


def exchange_otherwise(dataset: Path, changes: list[str]) -> list[str]:
    """The errors of exchanges where the odd rank differs. The group goes on after each."""
    errors = []
    with opened(dataset) as source:
        loader = gids.NodeLoader(source, **ARGUMENTS, cooperative=True, tables=["paper.a"])
        for change, minibatch in zip(changes, loader, strict=False):
            h, layer = minibatch.features["paper.a"], 0
            minibatch.exchange(layer, h)  # these rows are known
            if is_odd():
                h = {"width": h[:, :5], "dtype": h.double(), "rows": h[1:], "layer": h}[change]
                layer = int(change == "layer")
            count = None if layer == 0 else minibatch.blocks[0].num_dst
            errors.append(error_of(lambda m=minibatch, la=layer, h=h[:count]: m.exchange(la, h)))
    return errors


def train_cooperatively(
    dataset: Path, options: Mapping[str, Any], batch_size: int, seeds: torch.Tensor
) -> tuple[list[torch.Tensor], int]:
    """The weights after an epoch, and the seeds that this rank had."""
    model, count = Sage(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"batch_size": batch_size, "shuffle": True, "cooperative": True, "tables": ["paper.feat"]}
    with opened(dataset, **options) as source:
        for minibatch in gids.NodeLoader(source, seeds, [3, 4], **{"seed": 0} | arguments):
            optimizer.zero_grad()
            out = model(minibatch)
            loss = torch.nn.functional.cross_entropy(out, minibatch.labels, reduction="sum")
            (loss / minibatch.seed_count).backward()
            for p in model.parameters():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(grad)
                p.grad = grad
            optimizer.step()
            count += len(minibatch.seeds)
    return [p.detach() for p in model.parameters()], count


DTYPES = (torch.int64, torch.uint8, torch.float32)


def exchange_kinds(counts: list[int]) -> None:
    """Exchange so many tensors with each rank, from no number on, of every dtype."""

    def sent(sender: int, to: int, kind: int) -> torch.Tensor:
        return (torch.arange((3 * sender + 5 * to + kind) % 7) + 10 * sender + to).to(DTYPES[kind % 3])

    with Group() as group:
        for count in counts:
            dtypes = [DTYPES[kind % 3] for kind in range(count)]
            tensors = [[sent(group.rank, to, kind) for to in range(group.size)] for kind in range(count)]
            came = group.exchange(lambda tensors=tensors: tensors, dtypes, f"exchange {count}")
            assert [len(by_rank) for by_rank in came] == [group.size] * count
            for kind, by_rank in enumerate(came):
                for rank, tensor in enumerate(by_rank):
                    assert tensor.dtype == DTYPES[kind % 3]
                    assert torch.equal(tensor, sent(rank, group.rank, kind))


def exchange_differently(failing: bool, place: str) -> tuple[str, list[Any]]:
    """Rank 1 exchanges more kinds than the others at this place; perhaps it fails. The error, and what comes
    after it."""

    def make() -> list[list[torch.Tensor]]:
        if failing and group.rank == 1:
            raise ArithmeticError("no such number")
        return [[torch.zeros(1, dtype=torch.int64)] * group.size] * kinds

    with Group() as group:
        kinds = 70 if group.rank == 1 else 2
        told = error_of(lambda: group.exchange(make, [torch.int64] * kinds, place))
        return told, group.gather(lambda: [group.rank, 0.1, "é"], "later")


def skip_rows(_: Path) -> str:
    """The error of the next exchange where the odd rank sent rows once more than the others."""
    with Group() as group:
        group.meet("here")
        group._rows_begun += is_odd()
        return error_of(lambda: group.meet("there"))
