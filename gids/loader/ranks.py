"""Ranks: the processes that train one model together, and the part of each step's seeds that each rank has.

Called by EpochLoader. It asks torch.distributed for the ranks, and sends no seeds and no rows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from gids.errors import RankError
from gids.loader.machine_ranks import MachineRanks, Process

log = logging.getLogger("gids")

_PATIENCE_S = 10.0
"""A rank that waits longer for another one logs a warning."""
_STORE_TIMEOUT = timedelta(minutes=5)
"""torch's default, for a version whose stores do not say theirs."""
_EPOCH_TIMEOUT_S = 1800.0
"""How long ranks wait for each other at the beginning of an epoch: as long as torch's process groups do by
default, because one rank may do other work before."""
_VERDICT_S = 10.0
"""How much longer they wait for rank 0, so that it can say first which rank is missing."""
_LONGEST_SLEEP_S = 0.05
_counters: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


@dataclass
class Ranks:
    """The rank of this process, for one loader.

    detected: taken from the process group, not given by the user. loader: once arguments are compared, the
    loader's number among those that the ranks made together. taken: minibatches since an epoch was begun.
    """

    rank: int = 0
    world_size: int = 1
    detected: bool = False
    loader: int = 0
    taken: int = 0
    _begun: int = 0  # epochs
    _store: Any = field(default=None, compare=False, repr=False)

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

        Does nothing unless the ranks were detected. All ranks wait for all, up to the time-out of the process
        group's store. Raises, on every rank, ValueError if arguments differ, RankError if a rank makes no
        such loader in time.
        """
        if not self.detected or self.world_size == 1:
            return MachineRanks.alone(self.rank)
        self.loader = next_number("loaders")
        self._store = store = dist.distributed_c10d._get_default_store()
        timeout_s = getattr(store, "timeout", _STORE_TIMEOUT).total_seconds()
        said = {"made_with": made_with(), "offer": offer(shares)}

        def judge(told: list[Any]) -> list[Any]:
            check_said([of["made_with"] for of in told])
            offers = [of["offer"] for of in told]
            return offers if any(offers) else []

        key = f"gids/loader/{self.loader}"
        offers = self._meet(key, said, judge, "make the same loader", timeout_s)
        return machine_ranks(self.rank, offers, store, f"{key}/machine", timeout_s)

    def begin_epoch(self, epoch: int, step: int) -> None:
        """Check that all ranks begin this epoch at this step, and took equally many minibatches before.

        Called for the first minibatch. Does nothing unless the ranks were detected. Waits for all ranks.
        Raises RankError, on every rank, if they differ, or if one does not come.
        """
        taken, self.taken = self.taken, 0
        if not self.detected or self.world_size == 1:
            return

        def judge(told: list[Any]) -> None:
            for other, theirs in enumerate(told):
                if theirs != told[0]:
                    begins = [
                        f"rank {rank} begins epoch {of[0]}, step {of[1]}, after {of[2]} minibatches before"
                        for rank, of in ((0, told[0]), (other, theirs))
                    ]
                    raise RankError(
                        f"{'; '.join(begins)}: all ranks must begin the same epoch of a loader, and take the "
                        "same minibatches. Load state_dict(), or set epoch, on all ranks or on none"
                    )

        key = f"gids/loader/{self.loader}/epoch/{self._begun}"
        self._meet(key, [epoch, step, taken], judge, "iterate over the same loader", _EPOCH_TIMEOUT_S)
        if self._begun:  # all ranks have read what was said before
            before = f"gids/loader/{self.loader}/epoch/{self._begun - 1}"
            for name in (f"rank/{self.rank}", *["verdict"] * (self.rank == 0)):
                self._store.delete_key(f"{before}/{name}")
        self._begun += 1

    def _meet(
        self, key: str, said: Any, judge: Callable[[list[Any]], Any], what: str, timeout_s: float
    ) -> Any:
        """What judge() returns on rank 0 for what all ranks say, or its error. Both are plain values."""
        store = self._store
        store.set(f"{key}/rank/{self.rank}", json.dumps(said))
        end = time.monotonic() + timeout_s
        if self.rank:
            verdict = _wait_for(0, what, store, f"{key}/verdict", end + _VERDICT_S)
            if "error" in verdict:
                raise (ValueError if verdict["differ"] else RankError)(verdict["error"])
            return verdict["value"]
        try:
            others = range(1, self.world_size)
            told = [_wait_for(r, what, store, f"{key}/rank/{r}", end) for r in others]
            value = judge([json.loads(json.dumps(said)), *told])
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the store does not answer
                verdict = {"error": str(error), "differ": isinstance(error, ValueError)}
                store.set(f"{key}/verdict", json.dumps(verdict))
            raise
        store.set(f"{key}/verdict", json.dumps({"value": value}))
        return value


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


def _wait_for(rank: int, what: str, store: Any, key: str, end: float) -> Any:
    """The plain value under this key, which a rank stores until `end`."""
    begun, warned, sleep_s = time.monotonic(), False, 0.0005
    try:
        # Not store.wait(), which blocks every other thread that uses the store.
        while not store.check([key]):
            now = time.monotonic()
            if now > end:
                raise RankError(f"rank {rank} did not {what} in time: every rank must do so")
            if now - begun > _PATIENCE_S and not warned:
                warned = True
                log.warning(
                    "waiting for rank %d to %s. If not every rank does so, give rank=0, world_size=1: this "
                    "rank then gets all seeds",
                    rank,
                    what,
                )
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, max(_LONGEST_SLEEP_S, (now - begun) / 60))
        return json.loads(bytes(store.get(key)).decode())
    except RankError:
        raise
    except RuntimeError as error:  # the class depends on the store and on torch's version
        raise RankError(
            f"the store of the process group does not answer while this rank waits for rank {rank} to "
            f"{what}: its process may have ended ({error})"
        ) from error
