"""What a loader carries from one epoch to the next: what it learned, and what it prepared of the next one."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gids.closing import Threads
from gids.loader.epoch_stream import Ending, Sampled
from gids.loader.sampled_ahead import SampledAhead
from gids.packs import PackMachine, Superbatch


@dataclass
class Choice:
    """How minibatches are read, chosen once for all of them. stats()["packs"]["choices"] has the fields.

    way: "random" or "pack". minibatches: those that were considered. predicted_s: seconds, by way
    that fits in memory. returned, actual_s: minibatches that came so far, and the seconds of reading them.
    """

    way: str
    minibatches: int
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    returned: int = 0
    superbatches: int = 0
    packs: int = 0
    resident_rows: int = 0
    actual_s: float = 0.0

    @property
    def random_s(self) -> float:
        """Seconds of random reads for a minibatch, as predicted."""
        return self.predicted_s.get("random", math.inf) / self.minibatches


@dataclass(eq=False)
class Learned:
    """What a loader learned about its own epochs. Other loaders of the same source learn for themselves.

    consumer_s: seconds that the consumer takes for a minibatch, 0 at first. longest: minibatches of the
    longest epoch, as far as it is known. why_random: why epochs of at most random_count minibatches do not
    consider packs, or "".
    choices: all. by_packs: whether packs were chosen last. unpaid: minibatches of the last epoch with packs,
    if it was left before they saved time. next_epoch: what is prepared of it, or None.
    """

    consumer_s: float = 0.0
    longest: int = 0
    why_random: str = ""
    random_count: float = 0
    choices: list[Choice] = field(default_factory=list)
    by_packs: bool = False
    unpaid: int = 0
    next_epoch: NextEpoch | None = None

    def random(self, count: int | None) -> bool:
        """Whether an epoch of so many minibatches reads at random. None: it is not known."""
        return bool(self.why_random) and 0 < (count or self.longest) <= self.random_count

    def ended(self, count: int) -> None:
        """An epoch of so many minibatches came to its end."""
        self.longest, self.unpaid = max(self.longest, count), 0

    def read_at_random(self, reason: str, count: float = math.inf) -> None:
        """Do not consider packs for epochs of at most so many minibatches."""
        self.why_random, self.random_count = reason, max(count, self.random_count)
        self.by_packs = False
        self.drop_next()

    def drop_next(self) -> None:
        """Drop what is prepared of the next epoch."""
        coming, self.next_epoch = self.next_epoch, None
        if coming is not None:
            coming.close()


class NextEpoch:
    """Minibatches of a loader's next epoch, which are sampled and swept to scratch while this one is trained.

    It lasts from one stream to the next: until take() or close(), or until its loader is dropped.

    minibatches: what the loader will give to attach(). source: of them. opened: what a stream must close.
    """

    def __init__(self, minibatches: Iterable[Any], source: Sampled[Any], sampled: SampledAhead[Any]) -> None:
        self.minibatches, self.source, self.sampled = minibatches, source, sampled
        self.learned: Callable[[], Learned | None] = lambda: None  # whose it is, once it is kept
        self.machine: PackMachine | None = None
        self._making: Future[Superbatch | None] | None = None
        self._lists_bytes = 0
        self._pid, ending = os.getpid(), Ending()
        self.opened = ending.parts
        self.opened.append(sampled.background)
        self._finalizer = weakref.finalize(self, ending.close)

    @property
    def nbytes(self) -> int:
        """Memory that it takes beside what is read meanwhile."""
        if self.machine is None:
            return self.sampled.counts_bytes
        return self.machine.plan.beside_bytes(self._lists_bytes)

    @property
    def open(self) -> bool:
        """Whether it was neither taken nor dropped."""
        return self._finalizer.alive

    @property
    def here(self) -> bool:
        """Whether it may be taken: a forked child has none of the threads."""
        return self.open and os.getpid() == self._pid

    @property
    def begun(self) -> bool:
        """Whether make() was called."""
        return self.machine is not None

    def make(self, machine: PackMachine, lists_bytes: int, make: Callable[[], Superbatch | None]) -> None:
        """Make packs in a thread, once all is sampled. lists_bytes: of their row lists, at most."""
        self.machine, self._lists_bytes = machine, lists_bytes
        thread = Threads(1, "gids-next")
        self._making = thread.submit(make)
        thread.shutdown(wait=False)
        self.opened.append(_Making(self._making))

    def take(self) -> Superbatch | None:
        """The packs; None if there are none. Blocks until they are being swept. Others close what is open."""
        superbatch = None if self._making is None else self._making.result()
        self._finalizer.detach()
        self.opened[:] = [self.sampled] if superbatch is None else [self.sampled, superbatch]
        self.sampled.spool.file.spare = False
        if superbatch is not None:
            superbatch.file.spare = False
        return superbatch

    def close(self) -> None:
        """Drop what is prepared. Idempotent. Blocks until no thread makes packs."""
        if self.here:
            futures.wait([] if self._making is None else [self._making])
            self._finalizer()


@dataclass
class _Making:
    """A superbatch that a thread makes."""

    superbatch: Future[Superbatch | None]

    @property
    def busy(self) -> bool:
        return not self.superbatch.done()

    def close(self) -> None:
        with suppress(Exception):  # take() raises it
            superbatch = self.superbatch.result()
            if superbatch is not None:
                superbatch.close()
