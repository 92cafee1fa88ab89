"""What ranks do that differ from each other. In a module of its own: the processes of ranks import it."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import same_bits
from open_options import tuned
from pack_programs import small_packs
from programs import Sage

import gids.distributed
from gids.distributed import group
from gids.loader import ranks

ODD = 1
"""The rank that differs."""
SEEDS = torch.arange(0, 900, 3)
ARGUMENTS: dict[str, Any] = {"seeds": SEEDS, "sampler": [3, 4], "batch_size": 10, "shuffle": True}


def is_odd() -> bool:
    return dist.get_rank() == ODD


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (gids.RankError, ValueError, ArithmeticError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def opened(dataset: Path, *, alone: bool = False, **options: Any) -> Any:
    """A source of gids.distributed.open(), or of gids.open(), whose ranks share the seeds alone."""
    if alone:
        return gids.open(dataset, memory="32MB")
    return gids.distributed.open(dataset, **tuned({"memory": "32MB", "window": 4} | options))


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

    kind: "group", "cooperative" or "alone". other: the dataset of tables that begin with "other:".
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
            errors.append(error_of(lambda given=given: gids.NodeLoader(source, **given)))
        gids.NodeLoader(source, **ARGUMENTS, **extra).close()  # ranks that agree go on
    return errors


def open_other(dataset: Path, other: Path) -> str:
    """The error where the odd rank opens another dataset by gids.open()."""
    with gids.open(other if is_odd() else dataset) as source:
        return error_of(lambda: gids.NodeLoader(source, **ARGUMENTS))


def begin_elsewhere(
    dataset: Path,
    state: Mapping[str, int],
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
    odd: list[int],
) -> str:
    """The error where only these ranks load a state of this epoch and step; {}: set another sampler."""

    def load() -> None:
        loader = gids.NodeLoader(source, **ARGUMENTS | dict(arguments))
        if dist.get_rank() in odd and state:
            loader.load_state_dict(loader.state_dict() | dict(state))
        elif dist.get_rank() in odd:
            loader.sampler = gids.sampler.Neighbor([2, 2])
        for _ in loader:
            pass

    with opened(dataset, **options) as source, small_packs():
        return error_of(load)


def swap_loaders(dataset: Path, options: Mapping[str, Any], arguments: Mapping[str, Any], after: int) -> str:
    """The error where the odd rank takes minibatches of two loaders in another order, after some of each."""

    def take() -> None:
        with small_packs():
            epochs = [iter(gids.NodeLoader(source, **ARGUMENTS | dict(arguments))) for _ in range(2)]
            for _, epoch in itertools.product(range(after), epochs):
                next(epoch)
            for epoch in reversed(epochs) if is_odd() else epochs:
                next(epoch)

    with opened(dataset, **options) as source:
        return error_of(take)


def leave_early(
    dataset: Path, options: Mapping[str, Any], arguments: Mapping[str, Any], early: list[int]
) -> str:
    """The error where these ranks end an epoch after two minibatches, and begin the next one."""

    def take() -> None:
        loader = gids.NodeLoader(source, **ARGUMENTS | dict(arguments))
        with small_packs():
            for _ in range(2):
                for step, _ in enumerate(loader):
                    if dist.get_rank() in early and step == 1:
                        break

    with opened(dataset, **options) as source:
        return error_of(take)


def take_ahead(dataset: Path) -> str:
    """The error where a thread takes minibatches while another one exchanges the rows of those before."""

    def take() -> None:
        taken: queue.Queue[Any] = queue.Queue()
        ahead = threading.Thread(target=lambda: taken.put(error_of(lambda: [taken.put(m) for m in loader])))
        ahead.start()
        while not isinstance(minibatch := taken.get(), str):
            minibatch.exchange(0, minibatch.features["paper.a"])
        ahead.join()

    with opened(dataset) as source:
        loader = gids.NodeLoader(source, **ARGUMENTS | {"cooperative": True, "tables": ["paper.a"]})
        return error_of(take)


def make_beside(dataset: Path) -> list[str]:
    """The errors of a thread that takes minibatches, and of another one that makes loaders meanwhile."""
    with opened(dataset) as source:
        loader, errors = gids.NodeLoader(source, **ARGUMENTS), []
        taking = threading.Thread(target=lambda: errors.append(error_of(lambda: list(loader))))
        taking.start()
        errors.append(error_of(lambda: [gids.NodeLoader(source, **ARGUMENTS) for _ in range(20)]))
        taking.join()
        return errors


def do_something_else(dataset: Path, what: str) -> str:
    """The error where the odd rank closes its source in an epoch, or makes a loader for itself."""

    def take() -> None:
        for step, _ in enumerate(gids.NodeLoader(source, **ARGUMENTS)):
            if is_odd() and step == 1:
                source.close() if what == "close" else gids.NodeLoader(source, torch.arange(9), [3])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_ANSWER_S", 0.5)
        with opened(dataset, timeout=2) as source:
            told = error_of(take)
            dist.barrier()
            return told


def fork_in_an_epoch(dataset: Path) -> tuple[bool, int]:
    """Whether a forked child that uses and closes the loader ended well, and its parent's minibatches."""
    with opened(dataset) as source, gids.NodeLoader(source, **ARGUMENTS) as loader:
        epoch = iter(loader)
        next(epoch)
        child = os.fork()
        if child == 0:
            told = error_of(lambda: next(iter(loader)))
            source.close()
            os._exit(not told.startswith("RankError: a forked process is no rank"))
        end, ended = time.monotonic() + 20, (0, 0)
        while ended[0] == 0 and time.monotonic() < end:
            ended = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return ended == (child, 0), 1 + len(list(epoch))


def do_not_begin(dataset: Path) -> str:
    """The error where the odd rank makes a loader and does not use it."""
    with gids.open(dataset) as source, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_MEET_TIMEOUT_S", 0.3)
        loader = gids.NodeLoader(source, **ARGUMENTS)
        epoch, told = iter(loader), ""
        if is_odd():
            epoch.close()
            assert next(epoch, None) is None, "a closed epoch waits for no rank"
        else:
            told = error_of(lambda: next(epoch))
        dist.barrier()
        return told


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
    """The errors of exchanges where the odd rank differs. The group goes on after each but the last."""
    errors = []
    with opened(dataset) as source:
        loader = gids.NodeLoader(source, **ARGUMENTS, cooperative=True, tables=["paper.a"])
        for change, minibatch in zip(changes, loader, strict=False):
            h, layer = minibatch.features["paper.a"], 0
            minibatch.exchange(layer, h)  # these rows are known
            if is_odd():
                h = {"width": h[:, :5], "dtype": h.double(), "rows": h[1:], "layer": h}[change]
                layer = int(change == "layer")
            errors.append(error_of(lambda m=minibatch, la=layer, h=h: m.exchange(la, h[: _rows(m, la)])))
    return errors


def _rows(minibatch: Any, layer: int) -> int | None:
    return None if layer == 0 else minibatch.blocks[layer - 1].num_dst


def train_cooperatively(
    dataset: Path, options: Mapping[str, Any], batch_size: int, seeds: torch.Tensor
) -> tuple[list[torch.Tensor], int]:
    """The weights after an epoch, and the seeds that this rank had."""
    model, count = Sage(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with opened(dataset, **options) as source:
        loader = gids.NodeLoader(
            source,
            seeds,
            [3, 4],
            batch_size=batch_size,
            shuffle=True,
            cooperative=True,
            tables=["paper.feat"],
        )
        for minibatch in loader:
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


def exchange_after_close() -> list[str]:
    """The errors of a group that another thread closes before rows, and before a status, are sent."""
    closed = Group(timeout_s=20)
    closed.close()
    rows, count = torch.zeros(closed.size, 8, dtype=torch.uint8), [1] * closed.size
    return [error_of(lambda: closed.start_rows(rows, count, count)), error_of(lambda: closed.start_most([1]))]


def send_values(values: list[Any]) -> list[Any]:
    """What comes of values that this rank sends all others; "error" for those that are not plain."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a peer's pickle is not loaded")

    came: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", fail)
        ranks_here = Group(timeout_s=20)
        for value in values:
            try:
                came.append(ranks_here.gather(value, "sends a value"))
            except (TypeError, gids.RankError):
                came.append("error")
        ranks_here.close()
    return came


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
            return [[sent(group.rank, to, kind) for to in range(group.size)] for kind in range(count)]

        came = group.exchange(make, dtypes, f"exchange {count}")
        assert [len(by_rank) for by_rank in came] == [group.size] * count
        for kind, by_rank in enumerate(came):
            for rank, tensor in enumerate(by_rank):
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
        return [[torch.zeros(1, dtype=torch.int64)] * group.size] * kinds

    told = ""
    try:
        group.exchange(make, [torch.int64] * kinds, "exchange")
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    later = sum(group.most([group.rank], "later")) if failing else -1
    group.close()
    return told, later
