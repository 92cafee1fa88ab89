"""Ranks: the processes that train one model together, and the part of each step's seeds that each rank has.

Called by EpochLoader. It asks torch.distributed for the ranks, and sends no seeds and no rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch.distributed as dist

from gids.loader.store_group import Process, StoreGroup, key_prefix, next_number

log = logging.getLogger("gids")

_STORE_TIMEOUT = timedelta(minutes=5)
"""torch's default, for a version whose stores do not say theirs."""


class RankGroup(Protocol):
    """Ranks that tell each other plain values: a StoreGroup, or those of gids.distributed. See StoreGroup."""

    timeout_s: float

    def gather(self, value: Any, place: str) -> list[Any]: ...
    def meet(self, place: str) -> None: ...


def place_of(loader: int, epoch: int, step: int, what: str) -> str:
    """What a rank does, for RankGroup. loader: its number among the loaders that the ranks made."""
    return f"loader {loader}, epoch {epoch}, step {step} ({what})"


@dataclass
class Ranks:
    """The rank of this process, for one loader.

    group_of: makes the group of the ranks that make a loader, from its number; None: they do not know of each
    other. loader: once arguments are compared, the loader's number among those that the ranks made together.
    taken: minibatches since an epoch was begun. assumed: there was no process group that says the rank.
    """

    rank: int = 0
    world_size: int = 1
    group_of: Callable[[int], RankGroup] | None = None
    loader: int = 0
    taken: int = 0
    assumed: bool = field(default=False, compare=False, repr=False)
    _group: RankGroup | None = field(default=None, compare=False, repr=False)

    def part(self, count: int) -> slice:
        """This rank's part of the `count` seeds of a step: 1 seed or more.

        The parts of two ranks differ by one seed at most. With fewer seeds than ranks, each rank has one
        seed, and some seeds are in several ranks: a rank without a seed would block the others.
        """
        begin = count * self.rank // self.world_size
        return slice(begin, max(begin + 1, count * (self.rank + 1) // self.world_size))

    def check_alike(
        self, made_with: Callable[[], Mapping[str, Any]], shares: str | None = None
    ) -> StoreGroup:
        """Compare a loader's arguments, which must be plain values, over all ranks. Collective.

        shares: what this rank can share with the ranks of its machine that give the same; None: nothing.
        Returns these ranks, or this one alone. Does nothing if the user gave the rank.

        Raises, on every rank, ValueError if arguments differ, RankError if a rank makes no such loader in
        time.
        """
        if self.group_of is None or self.world_size == 1:
            return StoreGroup.alone(self.rank)
        self.loader = next_number("loaders")
        group = self._group = self.group_of(self.loader)
        arguments, place = made_with(), f"makes loader {self.loader}"
        offer = None if shares is None else [shares, asdict(Process.this())]
        digest = hashlib.blake2b(json.dumps(arguments).encode(), digest_size=16).hexdigest()
        said = group.gather([digest, offer], place)
        if any(theirs != digest for theirs, _ in said):
            check_said(group.gather(arguments, f"{place} with other arguments"))
        return self._machine([offer for _, offer in said], group.timeout_s)

    def begin_epoch(self, epoch: int, step: int, name_sampler: Callable[[], str]) -> None:
        """Check that all ranks begin this epoch at this step, by the same sampler, and took equally many
        minibatches before.

        Called for the first minibatch. Waits for all ranks; does nothing if the user gave the rank. Raises
        RankError, on every rank, if they differ, or if one does not come; ValueError if there is a process
        group by now, and there was none when the loader was made.
        """
        if self.assumed and _initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "this loader was made before the process group, so the ranks would not share its seeds: make "
                "it after init_process_group(), with Lightning in LightningDataModule.train_dataloader(). "
                "For a loader that shares no seeds: rank=0, world_size=1"
            )
        taken, self.taken = self.taken, 0
        if self._group is not None:
            what = f"begins after {taken} minibatches of this loader, by {name_sampler()}"
            self._group.meet(place_of(self.loader, epoch, step, what))

    def _machine(self, offers: Sequence[Any], timeout_s: float) -> StoreGroup:
        """The ranks of this machine that offer what this one does. offers: of all ranks."""
        mine = offers[self.rank]
        if mine is None or not mine[1]["started"]:
            return StoreGroup.alone(self.rank)
        processes = {
            rank: Process(**theirs[1])
            for rank, theirs in enumerate(offers)
            if theirs is not None and (theirs[0], theirs[1]["machine"]) == (mine[0], mine[1]["machine"])
        }
        key = f"{key_prefix()}/machine/{self.loader}/{min(processes)}"
        return StoreGroup(self.rank, sorted(processes), _store(), key, timeout_s, processes)


def check_said(said: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the arguments of a loader, by rank, differ."""
    for other, theirs in enumerate(said):
        for name in said[0]:
            if theirs.get(name) != said[0][name]:
                raise ValueError(
                    f"rank 0 made this loader with {name} = {said[0][name]!r}, and rank {other} with "
                    f"{theirs.get(name)!r}. Give every rank the same arguments and all seeds: the loader "
                    "gives each rank its part. For a loader that shares no seeds: rank=0, world_size=1"
                )


def find_ranks(rank: int | None, world_size: int | None) -> Ranks:
    """The given rank, else the rank in torch.distributed's default process group, else rank 0 of 1.

    Raises ValueError for a rank without a world_size or out of range, TypeError for other types.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank}, world_size={world_size}: give both, or neither")
    if rank is not None and world_size is not None:
        for name, value in (("rank", rank), ("world_size", world_size)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{name}={value!r} must be a whole number")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: rank must be 0 to world_size - 1")
        return Ranks(int(rank), int(world_size))
    if _initialized():
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), _group_of)
        if ranks.world_size > 1:
            log.info("rank %d of %d: sharing the seeds with the other ranks", ranks.rank, ranks.world_size)
        return ranks
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        log.warning(
            "torchrun started %s ranks, but there is no process group: every rank gets all seeds. Call "
            "torch.distributed.init_process_group() before making the loader, or give rank= and world_size=",
            launched,
        )
    return Ranks(assumed=True)


def local_ranks() -> int:
    """Number of ranks on this machine, which share its memory.

    LOCAL_WORLD_SIZE (set by torchrun); without it the number of ranks of the process group; else 1.
    """
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local_world_size.isdecimal():
        return max(1, int(local_world_size))
    return dist.get_world_size() if _initialized() else 1


class StepSeeds(NamedTuple):
    """The seeds of one step, as positions among a loader's seeds. part: the seeds of this rank."""

    of_all_ranks: np.ndarray
    part: slice

    @property
    def own(self) -> np.ndarray:
        return self.of_all_ranks[self.part]


@dataclass(frozen=True)
class EpochSeeds:
    """The seeds of an epoch by step. order: int64[seeds], positions, of all ranks."""

    order: np.ndarray
    batch_size: int
    ranks: Ranks

    def at(self, step: int) -> StepSeeds:
        size = self.batch_size * self.ranks.world_size
        seeds = self.order[step * size : (step + 1) * size]
        return StepSeeds(seeds, self.ranks.part(len(seeds)))


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _group_of(loader: int) -> StoreGroup:
    """All ranks of the default process group."""
    store: Any = _store()
    timeout_s = getattr(store, "timeout", _STORE_TIMEOUT).total_seconds()
    ranks, key = range(dist.get_world_size()), f"{key_prefix()}/loader/{loader}"
    return StoreGroup(dist.get_rank(), ranks, store, key, timeout_s)
