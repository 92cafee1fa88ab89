"""MachineRanks: ranks that make one loader on one machine, and tell each other how they share its memory.

Made by Ranks. They meet in the key-value store of torch.distributed's process group, whatever its backend.
Process: what a rank must know of another one's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gids.errors import RankError


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


_LONGEST_SLEEP_S = 0.05
_LOOK_S = 0.5
"""How often a rank that waits for another one looks whether its process still runs."""


class MachineRanks:
    """The ranks that share host memory, for as long as they make a loader.

    processes: of all of them, by rank, this one included; one alone exchanges nothing. store: of the process
    group. key: unlike that of any other loader. timeout_s: how long a rank waits for another one.

    A ``with`` block that ends with an error tells it to the others, which raise RankError.

    Attributes: index, size: the place of this rank among them, and their number.
    """

    def __init__(
        self, rank: int, processes: Mapping[int, Process], store: Any, key: str, timeout_s: float
    ) -> None:
        self._ranks = sorted(processes)
        self.index, self.size = self._ranks.index(rank), len(self._ranks)
        self._here, self._processes = processes[rank], processes
        self._store, self._key, self._timeout_s = store, key, timeout_s
        self._round = 0
        self._failed = False  # the others know it, or said so

    @classmethod
    def alone(cls, rank: int) -> MachineRanks:
        return cls(rank, {rank: Process.this()}, None, "", 0.0)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, which must be plain values, in the order of the ranks. Collective.

        Raises RankError if a rank failed, ended, or says nothing for the time-out.
        """
        if self.size == 1:
            return [value]
        self._say(self._round, {"value": value})
        said = [self._heard(index) for index in range(self.size)]
        failed = [f"{self.name_of(i)} failed with {s['error']}" for i, s in enumerate(said) if "error" in s]
        if failed:
            self._failed = True
            raise RankError("; ".join(failed))
        if self._round:  # all have heard what was said before
            self._store.delete_key(self._key_of(self._round - 1, self.index))
        self._round += 1
        return [s["value"] for s in said]

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one makes no loader. They raise RankError at their next gather()."""
        if self.size == 1 or self._failed:
            return
        self._failed = True
        with contextlib.suppress(Exception):  # they find out by the time-out
            for number in (self._round, self._round + 1):  # a rank may already have heard this round
                self._say(number, {"error": f"{type(error).__name__}: {error}"})

    def name_of(self, index: int) -> str:
        """How errors and logs call a rank."""
        return f"rank {self._ranks[index]}"

    def __enter__(self) -> MachineRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)

    def _say(self, number: int, what: Mapping[str, Any]) -> None:
        self._store.set(self._key_of(number, self.index), json.dumps(what))

    def _heard(self, index: int) -> dict[str, Any]:
        """What a rank says in this round."""
        key, process = self._key_of(self._round, index), self._processes[self._ranks[index]]
        begun = looked_at = time.monotonic()
        sleep_s, ended = 0.0005, False
        while True:
            try:
                if self._store.check([key]):
                    said: dict[str, Any] = json.loads(bytes(self._store.get(key)).decode())
                    return said
            except RuntimeError as error:
                raise self._lost(f"the store of the process group does not answer ({error})") from error
            now = time.monotonic()
            if ended:
                raise self._lost(f"{self.name_of(index)} has ended (process {process.pid})")
            if now - begun > self._timeout_s:
                raise self._lost(f"{self.name_of(index)} does not answer within {self._timeout_s:g} s")
            if now - looked_at > _LOOK_S:
                looked_at = now
                ended = process.has_ended(self._here)  # it may have said it before: look once more
            else:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _lost(self, what: str) -> RankError:
        self._failed = True
        return RankError(f"{what}: the ranks of this machine were about to share the topology")

    def _key_of(self, number: int, index: int) -> str:
        return f"{self._key}/{number}/{index}"
