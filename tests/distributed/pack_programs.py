"""What ranks do in the tests of packs. In a module of its own: the processes of ranks import it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_disk import fail_at
from open_options import tuned
from programs import check_same, compare, logged

import gids.distributed
from gids.distributed import stream
from gids.loader import feature_loader, pack_chooser, pack_switch
from gids.packs import PackBudget, PackPlan, Superbatch
from gids.sampler import Neighbor

Fault = tuple[type, str, int]
"""A class, a method, and the call of it from which on the disk is full."""

MEMORY = 32 << 20
SMALL: dict[str, Any] = {"memory": MEMORY, "queue_depth": 16}


@contextlib.contextmanager
def small_packs(
    *, pack_bytes: int = 300_000, together: int | None = None, early: int = 4
) -> Iterator[pytest.MonkeyPatch]:
    """Packs of little memory; superbatches of `together` steps. Ranks agree after `early` of them."""
    share = PackBudget.share

    def less(*args: Any) -> PackPlan | None:
        plan = share(*args)
        assert plan.purposes["packs"] > pack_bytes
        return replace(plan, purposes={**plan.purposes, "packs": pack_bytes})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackBudget, "share", less)
        patch.setattr(stream, "EARLY", early)
        patch.setattr(pack_switch, "EARLY", early)
        if together is not None:
            patch.setattr(stream, "MOST_MINIBATCHES", together + 1)
        yield patch


def compare_nodes(dataset: Path, whole: Path, arguments: Any, options: Any, *more: Any) -> dict[str, Any]:
    """compare() of NodeLoaders, whose ranks have little memory."""
    return compare(dataset, whole, "NodeLoader", arguments, {**SMALL, **options}, *more)


def check_packs(found: Mapping[str, Any], epochs: int) -> None:
    """All minibatches came from packs, within the memory."""
    stats, count = found["stats"], epochs * found["steps"]
    packs = stats["packs"]
    assert packs["minibatches"] == count, packs
    assert packs["packs"] >= packs["superbatches"] >= epochs
    assert packs["bytes_written"] > 0
    used = {k: v for k, v in stats["memory"].items() if not k.startswith("topology")}
    assert used["packs"] > 0
    assert sum(used.values()) <= found["memory"]


def compare_all(cases: list[tuple[Any, ...]], reads: str) -> list[float]:
    """compare() by packs. By case: packs of a superbatch."""
    told = []
    for dataset, whole, kind, arguments, options, pack_bytes, together in cases:
        with small_packs(pack_bytes=pack_bytes, together=together):
            found = compare(dataset, whole, kind, arguments, {**SMALL, "reads": reads, **options})
        check_packs(found, 2)
        packs = found["stats"]["packs"]
        assert packs["superbatches"] >= 2 * -(-found["steps"] // (together or found["steps"]))
        told.append(packs["packs"] / packs["superbatches"])
    return told


def steps_wait_on_disk(dataset: Path, arguments: Mapping[str, Any]) -> int:
    """The most sampled steps that are in memory when minibatches are returned."""
    most = 0

    def look(epoch: Any, _: int) -> None:
        nonlocal most
        most = max(most, len(epoch._stream._steps._waiting))

    with small_packs():
        check_packs(compare_nodes(dataset, dataset, arguments, {"reads": "pack"}, 2, look), 2)
    return most


def disk_is_full_on_one_rank(
    dataset: Path, arguments: Mapping[str, Any], faults: list[Fault]
) -> list[tuple[int, int]]:
    """Rank 1's disk is full, in one way after the other. By way: minibatches by packs, and superbatches."""
    told = []
    for of, method, turn in faults:
        with small_packs(together=9) as patch:
            if dist.get_rank() == 1:
                fail_at(patch, of, method, turn)
            found = compare_nodes(dataset, dataset, arguments, {"reads": "pack"})
        packs = found["stats"]["packs"]
        told.append((packs["minibatches"], packs["superbatches"]))
    return told


def scratch_is_small_on_one_rank(
    dataset: Path, whole: Path, arguments: Mapping[str, Any], sizes: list[int]
) -> list[tuple[int, list[str]]]:
    """Rank 1 has so many bytes of scratch. By size: minibatches by packs, and what is logged."""
    told = []
    for size in sizes:
        options: dict[str, Any] = {"reads": "pack"}
        if dist.get_rank() == 1:
            options["scratch_bytes"] = size
        with small_packs(), logged() as lines:
            found = compare_nodes(dataset, whole, arguments, options)
        told.append((found["stats"]["packs"]["minibatches"], lines))
    return told


def choose(dataset: Path, arguments: Mapping[str, Any], late: bool, replicas: int) -> dict[str, Any]:
    """reads="auto", where random reads are cheaper on rank 1: at once, or when a superbatch is sampled."""
    with small_packs(together=9) as patch:
        patch.setattr(feature_loader.FeatureLoader, "may_use_packs", _always_large)
        patch.setattr(pack_chooser.PackChooser, "choose_early", lambda *_: not late and dist.get_rank() == 1)
        patch.setattr(pack_chooser, "_pays", lambda *_: dist.get_rank() != 1)
        found = compare_nodes(dataset, dataset, arguments, {"reads": "auto", "replicas": replicas})
    return {"steps": found["steps"], **found["stats"]["packs"]}


def _always_large(self: Any, learned: Any, count: int | None) -> bool:
    """Tables that do not fit into the memory."""
    return not learned.random(count) and not self.has_open_epoch


class FailingOnce(Neighbor):
    """Fails on one rank in one step of the first epoch."""

    rank = step = 0

    def sample_bulk(self, topology: Any, seeds: Any, *, first_step: int, **numbers: Any) -> Any:
        self._check(numbers["epoch"], range(first_step, first_step + len(seeds)))
        return super().sample_bulk(topology, seeds, first_step=first_step, **numbers)

    def sample(self, topology: Any, seeds: Any, *, epoch: int = 0, step: int = 0, **numbers: Any) -> Any:
        self._check(epoch, range(step, step + 1))
        return super().sample(topology, seeds, epoch=epoch, step=step, **numbers)

    def _check(self, epoch: int, steps: range) -> None:
        if dist.get_rank() == self.rank and epoch == 0 and self.step in steps:
            raise ArithmeticError(f"no step {self.step}")


def sampling_fails(dataset: Path, arguments: Mapping[str, Any], at: list[tuple[int, int]]) -> list[str]:
    """Rank `rank` cannot sample step `step` of the first epoch. The errors; the second epoch is right."""
    told = []
    with gids.open(dataset, memory="64MB", reads="random") as alone:
        theirs = gids.NodeLoader(alone, **arguments)
        theirs.epoch = 1
        expected = list(theirs)
    for rank, step in at:
        sampler = FailingOnce(arguments["sampler"])
        sampler.rank, sampler.step = rank, step
        with small_packs(), gids.distributed.open(dataset, reads="pack", **tuned(SMALL)) as source:
            loader = gids.NodeLoader(source, **{**arguments, "sampler": sampler})
            try:
                list(loader)
            except (ArithmeticError, gids.RankError) as error:
                told.append(f"{type(error).__name__}: {error}")
            for a, b in zip(loader, expected, strict=True):
                check_same(a, b)
            assert loader.stats()["packs"]["minibatches"] == len(expected)
    return told


def scratch_files(folder: Path) -> list[str]:
    """Unnamed files in a folder that this process has open."""
    files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if os.path.lexists(file)]
    return [name for name in files if name.startswith(str(folder)) and name.endswith("(deleted)")]


def stop_early(dataset: Path, arguments: Mapping[str, Any]) -> None:
    """All ranks close an epoch, then drop one. Nothing is left of it, and the next one is whole."""
    with small_packs(), gids.distributed.open(dataset, reads="pack", **tuned(SMALL)) as source:
        loader = gids.NodeLoader(source, **arguments)
        for way in ("close", "drop", "error"):
            epoch = iter(loader)
            next(epoch)
            assert scratch_files(dataset)
            if way == "close":
                epoch.close()
            elif way == "error":
                with contextlib.suppress(ArithmeticError):
                    raise_in(epoch)
            del epoch
            assert not scratch_files(dataset), way
        assert len(list(loader)) == len(loader)
    assert not scratch_files(dataset)


def raise_in(epoch: Any) -> None:
    for _ in epoch:
        raise ArithmeticError


def resume(dataset: Path, arguments: Mapping[str, Any], stops: list[int]) -> None:
    """Stop after so many minibatches, and resume in another loader, by packs and by random reads."""
    with gids.open(dataset, memory="64MB", reads="random") as alone:
        loader = gids.NodeLoader(alone, **arguments)
        expected = list(loader)
    for stop in stops:
        with small_packs(together=9):
            with gids.distributed.open(dataset, reads="pack", **tuned(SMALL)) as source:
                first = gids.NodeLoader(source, **arguments)
                epoch = iter(first)
                for _ in range(stop):
                    next(epoch)
                state = first.state_dict()
                epoch.close()
                assert [len(list(first))] == [len(expected)]  # the next epoch is whole
            for reads in ("pack", "random"):
                with gids.distributed.open(dataset, reads=reads, **tuned(SMALL)) as source:
                    resumed = gids.NodeLoader(source, **arguments)
                    resumed.load_state_dict(state)
                    for a, b in zip(resumed, expected[stop:], strict=True):
                        check_same(a, b)


def sweep_long(dataset: Path, arguments: Mapping[str, Any], seconds: float, timeout: float) -> float:
    """Rank 1 takes long for its packs. The seconds until the first minibatch."""
    with small_packs() as patch:
        if dist.get_rank() == 1:
            ready = Superbatch.ready.fget
            end = time.monotonic() + seconds
            patch.setattr(Superbatch, "ready", property(lambda self: ready(self) and time.monotonic() > end))
        begun, first = time.monotonic(), []

        def look(_: Any, count: int) -> None:
            if not first:
                first.append(time.monotonic() - begun)

        options = {"reads": "pack", "timeout": timeout}
        check_packs(compare_nodes(dataset, dataset, arguments, options, 1, look), 1)
        return first[0]


def on_cuda(dataset: Path) -> str:
    with gids.distributed.open(dataset, reads="pack", **tuned(SMALL)) as source:
        try:
            gids.NodeLoader(source, torch.arange(10), [3], device="cuda")
        except ValueError as error:
            return str(error)
    return "no error"
