"""Ranks: the processes that train one model together, and the part of each step's seeds that each rank has.

Called by EpochLoader. It asks torch.distributed for the ranks, and sends no seeds and no rows.

StoreGroup: ranks that tell each other plain values in the key-value store of torch.distributed's process
group, whatever its backend. Made by Ranks for each loader, and for the ranks of a machine that share its
memory; and by gids.distributed.Group, whose ranks find each other here. Process: what a rank must know of
another's process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch.distributed as dist

from gids.errors import RankError

log = logging.getLogger("gids")

_PATIENCE_S = 10.0
"""A rank that waits longer for another one logs a warning."""
_MEET_TIMEOUT_S = 1800.0
"""How long ranks wait for each other in meet(): as long as torch's process groups do by default, because one
rank may do other work before."""
_VERDICT_S = 10.0
"""How much longer they wait for the first rank, so that it can say first which rank is missing."""
_LONGEST_SLEEP_S = 0.05
_LOOK_S = 0.5
"""How often a rank that waits for another one looks whether its process still runs."""
_counters: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Process:
    """A process, as others see it.

    machine: its name, an id that changes when it is started, and the process's namespace of process ids.
    started: when the process was; "" if /proc is missing.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{socket.gethostname()} {boot} {_namespace()}"
            return cls(machine, os.getpid(), _started(os.getpid()) or "")
        return cls(socket.gethostname(), os.getpid(), "")

    def has_ended(self, here: Process) -> bool:
        """Whether it is known to have ended; False if it runs on another machine than `here`, or in another
        namespace."""
        return self.machine == here.machine and bool(self.started) and _started(self.pid) != self.started


class StoreGroup:
    """Some ranks of torch.distributed's default process group.

    rank: this one. ranks: all of them, ascending; one alone exchanges nothing. key: unlike that of any other
    group. timeout_s: how long a rank waits for another one. processes: of those that are known, by rank.

    The first rank hears all others, and tells them what it heard or why it failed: so the store is asked for
    two values per rank. A ``with`` block that ends with an error tells it to the others.

    Attributes: index, size: the place of this rank among them, and their number; timeout_s.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        store: Any,
        key: str,
        timeout_s: float,
        processes: Mapping[int, Process] | None = None,
    ) -> None:
        self._ranks = list(ranks)
        self.index, self.size, self.timeout_s = self._ranks.index(rank), len(self._ranks), timeout_s
        self._store, self._key = store, key
        self._here, self._processes = Process.this(), dict(processes or {})
        self._round = 0
        self._failed = False  # the others know it, or said so

    @classmethod
    def alone(cls, rank: int) -> StoreGroup:
        return cls(rank, [rank], None, "", 0.0)

    def gather(self, value: Any, place: str = "") -> list[Any]:
        """The values of all ranks, which must be plain values: they are sent as JSON. Collective.

        place: what this rank does. Raises RankError, on every rank, if another one does something else,
        failed, ended, or says nothing for the time-out.
        """
        return self._exchange(value, place, self.timeout_s)

    def meet(self, place: str) -> None:
        """Check that all ranks are at this place, as gather() does. Waits for half an hour."""
        self._exchange(None, place, _MEET_TIMEOUT_S)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one goes on without them. They raise RankError at their next
        gather()."""
        if self.size == 1 or self._failed:
            return
        self._failed = True
        with contextlib.suppress(Exception):  # they find out by the time-out
            for number in (self._round, self._round + 1):  # they may already have heard this round
                self._say(number, self._failure(error))

    def name_of(self, index: int) -> str:
        """How errors and logs call a rank."""
        return f"rank {self._ranks[index]}"

    def __enter__(self) -> StoreGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)

    def _exchange(self, value: Any, place: str, timeout_s: float) -> list[Any]:
        if self.size == 1:
            return [value]
        number, end = self._round, time.monotonic() + timeout_s
        said = {"place": place, "value": value}
        if number == 0:
            said["process"] = asdict(self._here)
        try:
            if self.index == 0:
                verdict = self._collect(said, place, end)
                self._say(number, verdict)
            else:
                self._say(number, said)
                verdict = self._heard(0, place, end + _VERDICT_S)
        except RankError:
            self._failed = True
            raise
        if "error" in verdict:
            self._failed = True
            raise RankError(verdict["error"])
        if number == 0:
            self._processes.setdefault(self._ranks[0], Process(**verdict["process"]))
        else:  # all have heard what was said before
            self._store.delete_key(self._key_of(number - 1, self.index))
        self._round += 1
        values: list[Any] = verdict["values"]
        return values

    def _collect(self, mine: dict[str, Any], place: str, end: float) -> dict[str, Any]:
        """What the first rank tells the others of a round. Raises RankError once they know it."""
        try:
            said = [json.loads(json.dumps(mine))]
            said += [self._heard(index, place, end) for index in range(1, self.size)]
            if failures := [theirs["error"] for theirs in said if "error" in theirs]:
                raise RankError("; ".join(failures))
            places = [theirs["place"] for theirs in said]
            if len(set(places)) > 1:
                raise RankError(different_places(places, self.name_of))
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the store does not answer
                known = {"error": str(error)} if isinstance(error, RankError) else self._failure(error)
                self._say(self._round, known)
            self._failed = True
            raise
        if self._round == 0:
            for index, theirs in enumerate(said):
                self._processes.setdefault(self._ranks[index], Process(**theirs["process"]))
        return {"values": [theirs["value"] for theirs in said], "process": mine.get("process")}

    def _failure(self, error: BaseException) -> dict[str, str]:
        return {"error": f"{self.name_of(self.index)} failed with {type(error).__name__}: {error}"}

    def _say(self, number: int, what: Mapping[str, Any]) -> None:
        self._store.set(self._key_of(number, self.index), json.dumps(what))

    def _heard(self, index: int, place: str, end: float) -> dict[str, Any]:
        """What a rank says in this round. Blocks until `end`."""
        key, name, at = self._key_of(self._round, index), self.name_of(index), f" ({place})" if place else ""
        process = self._processes.get(self._ranks[index])
        begun = looked_at = time.monotonic()
        sleep_s, warned, ended = 0.0005, False, False
        while True:
            try:
                value = stored_value(self._store, key)
            except RuntimeError as error:  # the class depends on the store and on torch's version
                raise RankError(
                    f"the store of the process group does not answer while this rank waits for {name}{at}: "
                    f"its process may have ended ({error})"
                ) from error
            if value is not None:
                said: dict[str, Any] = json.loads(value)
                return said
            now = time.monotonic()
            if ended:
                raise RankError(f"{name} has ended (process {process.pid if process else '?'}){at}")
            if now > end:
                raise RankError(
                    f"{name} did not come in time to where this rank is{at}: every rank must make the same "
                    "loaders and begin the same epochs"
                )
            if now - begun > _PATIENCE_S and not warned:
                warned = True
                log.warning(
                    "waiting for %s%s. If not every rank makes and uses this loader, give rank=0, "
                    "world_size=1: this rank then gets all seeds",
                    name,
                    at,
                )
            if process is not None and now - looked_at > _LOOK_S:
                looked_at = now
                ended = process.has_ended(self._here)  # it may have said it before: look once more
            else:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, max(_LONGEST_SLEEP_S, (now - begun) / 60))

    def _key_of(self, number: int, index: int) -> str:
        return f"{self._key}/{number}/{index}"


def different_places(places: Sequence[str], name_of: Callable[[int], str]) -> str:
    """The error of ranks that do not do the same. places: what each one does."""
    ranks_at: dict[str, list[str]] = {}
    for index, place in enumerate(places):
        ranks_at.setdefault(place, []).append(name_of(index))
    at = "; ".join(f"{' and '.join(names)}: {place}" for place, names in ranks_at.items())
    return (
        f"the ranks are at different minibatches: {at}. Every rank must take the same minibatches: load the "
        "same state_dict(), and use the loaders in the same order"
    )


def stored_value(store: Any, key: str) -> str | None:
    """The value of a key of torch's store, or None. Does not wait: store.get() and store.wait() block every
    other thread that uses the store, and torch before 2.3 has no store.check()."""
    nothing = "?"  # neither JSON nor a number; what a store compares with, it returns for a missing key
    value = bytes(store.compare_set(key, nothing, nothing)).decode()
    return None if value == nothing else value


def next_number(what: str) -> int:
    """How often the default process group has counted these things before: the same on all ranks."""
    counters = _counters.setdefault(dist.group.WORLD or dist.group, {})
    number = counters.get(what, 0)
    counters[what] = number + 1
    return number


def key_prefix() -> str:
    """The beginning of all keys of the default process group. One that was destroyed may have had the same
    store, in which its keys are."""
    lives = _counters.setdefault(dist.group.WORLD or dist.group, {})
    if "life" not in lives:
        store: Any = dist.distributed_c10d._get_default_store()
        lives["life"] = store.add(f"gids/lives/{dist.get_rank()}", 1)
    return f"gids/{lives['life']}"


def _namespace() -> str:
    """The namespace of process ids; "" if the kernel does not say."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _started(pid: int) -> str | None:
    """When a process was started, or None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


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
