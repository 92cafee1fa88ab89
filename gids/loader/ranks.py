"""Ranks: the processes that train one model together, and the part of each step's seeds that each rank has.

Called by EpochLoader. It asks torch.distributed for the ranks, and sends no seeds and no rows.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from gids.errors import RankError
from gids.loader.machine_ranks import MachineRanks
from gids.loader.process import Process

log = logging.getLogger("gids")

_PATIENCE = timedelta(seconds=10)
"""A rank that waits longer for another one logs a warning."""
_STORE_TIMEOUT = timedelta(minutes=5)
"""torch's default, for a version whose stores do not say theirs."""
_counters: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Ranks:
    """The rank of this process. detected: taken from the process group, not given by the user."""

    rank: int = 0
    world_size: int = 1
    detected: bool = False

    def part(self, count: int) -> slice:
        """This rank's part of the `count` seeds of a step: 1 seed or more.

        The parts of two ranks differ by one seed at most. With fewer seeds than ranks, each rank has one
        seed, and some seeds are in several ranks: a rank without a seed would block the others.
        """
        begin = count * self.rank // self.world_size
        return slice(begin, max(begin + 1, count * (self.rank + 1) // self.world_size))

    def check_alike(
        self, made_with: Callable[[], Mapping[str, Any]], shares: str | None = None
    ) -> MachineRanks:
        """Compare a loader's arguments, which must be plain values, over all ranks.

        shares: what this rank can share with the ranks of its machine that give the same; None: nothing.
        Returns these ranks, or this one alone.

        Does nothing unless the ranks were detected. Rank 0 waits for all others, and each of them for rank 0,
        up to the time-out of the process group; a rank that shares something waits for all. Raises ValueError
        if arguments differ, RuntimeError if a rank makes no such loader in time.
        """
        store: Any = dist.distributed_c10d._get_default_store() if self.detected else None
        if store is None or self.world_size == 1:
            return MachineRanks.alone(self.rank)
        prefix = f"gids/loader/{next_number('loaders')}"
        key_of = f"{prefix}/rank/{{}}".format
        said = {"made_with": made_with(), "offer": offer(shares)}
        store.set(key_of(self.rank), json.dumps(said))
        said = json.loads(json.dumps(said))
        if self.rank:
            theirs = _wait_for("rank 0", store, key_of(0))
            _compare(self.rank, said["made_with"], 0, theirs["made_with"])
            met = _wait_for("all ranks", store, f"{prefix}/met") if shares is not None else {"offers": []}
            if "error" in met:
                raise (ValueError if met["differ"] else RankError)(met["error"])
            offers = met["offers"]
        else:
            offers = self._meet(store, key_of, said, f"{prefix}/met")
        timeout_s = getattr(store, "timeout", _STORE_TIMEOUT).total_seconds()
        return machine_ranks(self.rank, offers, store, f"{prefix}/machine", timeout_s)

    def _meet(self, store: Any, key_of: Callable[[int], str], said: Any, met_key: str) -> list[Any]:
        """On rank 0: compare with all others. Returns what all offer, and tells them."""
        offers = [said["offer"]]
        try:
            for other in range(1, self.world_size):
                theirs = _wait_for(f"rank {other}", store, key_of(other))
                _compare(0, said["made_with"], other, theirs["made_with"])
                offers.append(theirs["offer"])
        except BaseException as error:
            met = {"error": str(error), "differ": isinstance(error, ValueError)}
            store.set(met_key, json.dumps(met))
            raise
        if any(offers):
            store.set(met_key, json.dumps({"offers": offers}))
        return offers


def offer(shares: str | None) -> list[Any] | None:
    """What a rank tells the others, so that they know whether they share memory with it. A plain value."""
    return None if shares is None else [shares, asdict(Process.this())]


def machine_ranks(rank: int, offers: Sequence[Any], store: Any, key: str, timeout_s: float) -> MachineRanks:
    """The ranks of this machine that offer what this one does. offers: of all ranks; may be empty."""
    mine = offers[rank] if offers else None
    if mine is None or not mine[1]["started"]:
        return MachineRanks.alone(rank)
    found = {
        other: Process(**theirs[1])
        for other, theirs in enumerate(offers)
        if theirs is not None and (theirs[0], theirs[1]["machine"]) == (mine[0], mine[1]["machine"])
    }
    return MachineRanks(rank, found, store, f"{key}/{min(found)}", timeout_s)


def check_said(ranks: Ranks, said: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the arguments of a loader, by rank, differ."""
    for other, theirs in enumerate(said):
        _compare(ranks.rank, said[ranks.rank], other, theirs)


def _compare(rank: int, mine: Mapping[str, Any], other: int, theirs: Mapping[str, Any]) -> None:
    for key, value in mine.items():
        if theirs.get(key) != value:
            raise ValueError(
                f"rank {rank} made this loader with {key} = {value!r}, and rank {other} with "
                f"{theirs.get(key)!r}. Give every rank the same arguments and all seeds: the loader "
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
        found = Ranks(dist.get_rank(), dist.get_world_size(), detected=True)
        if found.world_size > 1:
            log.info("rank %d of %d: sharing the seeds with the other ranks", found.rank, found.world_size)
        return found
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        log.warning(
            "torchrun started %s ranks, but there is no process group: every rank gets all seeds. Call "
            "torch.distributed.init_process_group() before making the loader, or give rank= and world_size=",
            launched,
        )
    return Ranks()


def next_number(of: str) -> int:
    """How often the default process group has counted these things before: the same on all ranks."""
    counters = _counters.setdefault(dist.group.WORLD or dist.group, {})
    number = counters.get(of, 0)
    counters[of] = number + 1
    return number


def local_ranks() -> int:
    """Number of ranks on this machine, which share its memory.

    LOCAL_WORLD_SIZE (set by torchrun); without it the number of ranks of the process group; else 1.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    if given.isdecimal():
        return max(1, int(given))
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
        found = self.order[step * size : (step + 1) * size]
        return StepSeeds(found, self.ranks.part(len(found)))


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _wait_for(whom: str, store: Any, key: str) -> Any:
    """The plain value under this key, which `whom` stores."""
    try:
        store.wait([key], _PATIENCE)
    except RuntimeError:  # the class depends on the store and on torch's version
        log.warning(
            "waiting for %s to make the same loader. If not every rank makes one, give rank=0, "
            "world_size=1: this rank then gets all seeds",
            whom,
        )
        store.wait([key])
    return json.loads(bytes(store.get(key)).decode())
