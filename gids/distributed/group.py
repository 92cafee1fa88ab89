"""Group: ranks that exchange ids, edges and rows over torch.distributed.

Called by everything else in this folder. It knows tensors and ranks, and nothing of graphs or tables. Each
method that exchanges is collective: all ranks of the group call the same ones in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import timedelta
from itertools import chain, cycle
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from gids.errors import RankError
from gids.loader.ranks import (
    Process,
    StoreGroup,
    different_places,
    key_prefix,
    next_number,
    stored_value,
)
from gids.packs import ByReference

P = ParamSpec("P")
R = TypeVar("R")
Tensors = Sequence[Sequence[torch.Tensor]]
"""What is exchanged with each rank: for each kind of tensor, one by rank."""

_PAD = 8
"""Tensors in a message begin at multiples of this."""
_HEADER = 64
"""Numbers for each rank in the first message of an exchange. The size does not depend on what is exchanged:
ranks that exchange something else by now hear of it here. Gloo ends a process that gets another size than it
expects, so nothing else is sent before the headers are compared."""
_OWN = 2
"""Numbers of a header that say whether the rank failed, and where it is."""
_ANSWER_S = 5.0
"""How long a rank has to say that it still runs, after an exchange failed."""
_POLL_S = 0.05
_dropped: list[list[weakref.ref[Any]]] = []
"""The process groups of Groups that nobody closed. The next Group gives them back to torch, which does not
bear it while garbage is collected."""


def _in_turn(method: Callable[Concatenate[Group, P], R]) -> Callable[Concatenate[Group, P], R]:
    """No other thread compares places or sends rows meanwhile."""

    @functools.wraps(method)
    def call(self: Group, /, *args: P.args, **options: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **options)

    return call


class Group(ByReference):
    """Some ranks of torch.distributed's default process group.

    ranks: their ranks in the default group, in ascending order; None: all. timeout_s: seconds that a rank
    waits for another one in an exchange. all_groups: the ranks of every group of this kind, of which this
    rank is in one: all ranks of the default group must make the same groups in the same order. within: a
    larger group. If an exchange of one of the two fails, the ranks of both hear it, and do not take this rank
    for missing.

    Every exchange has a place: text that says what this rank does, such as the epoch and the step. Ranks
    compare it before they send anything else. If places differ, all ranks raise RankError, which says who is
    where, and the group is not usable any more. Rows are sent without such a comparison, by start_rows():
    whoever calls it has compared the place since the rows before.

    Attributes: rank, size: this rank's number in the group, and its number of ranks; ranks; timeout_s; lock:
    held from a comparison of places until the rows after it are begun, so that threads may take turns;
    failures: number of exchanges in which some rank's make() failed, the same on all ranks; comparisons:
    number of comparisons of places.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        *,
        timeout_s: float = 300.0,
        all_groups: Sequence[Sequence[int]] | None = None,
        within: Group | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("there is no process group: call torch.distributed.init_process_group() first")
        if not 0 < timeout_s <= 10**8:
            raise ValueError(f"timeout={timeout_s} must be more than 0 seconds, and at most 10^8")
        self._process_groups: list[weakref.ref[Any]] = []
        weakref.finalize(self, _dropped.append, self._process_groups).atexit = False
        self.ranks = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.timeout_s = timeout_s
        self._groups = [self.ranks] if all_groups is None else all_groups
        self._beside = weakref.WeakSet[Group]()  # groups of this rank whose others wait for it, too
        if within is not None:
            self._beside.add(within)
            within._beside.add(self)
        self._key = f"{key_prefix()}/group/{next_number('groups')}/{self.ranks[0]}"
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._broken: str | None = None
        self._begun = 0  # exchanges
        self.failures = self.comparisons = 0
        self._lock = threading.RLock()
        self._here = Process.this()
        # Once all have come to make this group:
        key, rank = f"{self._key}/processes", self.ranks[self.rank]
        meeting = StoreGroup(rank, self.ranks, self._store, key, timeout_s)
        said = meeting.gather(asdict(self._here), "calls gids.distributed.open()")
        self._processes = [Process(**theirs) for theirs in said]
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:  # no rank is in an exchange of theirs
                _give_back(_dropped.pop())
        self._control: Any = None
        self._rows: dict[str, Any] = {}
        self._control = self._run(lambda: self._new("gloo"))
        self._rows["cpu"] = self._run(lambda: self._new("gloo"))

    @_in_turn
    def exchange(
        self, make: Callable[[], Tensors], dtypes: Sequence[torch.dtype], place: str
    ) -> list[list[torch.Tensor]]:
        """Send each rank its tensors, and return those that each rank sent to this one.

        make: returns, for each of dtypes, a tensor for each rank of the group, in one dimension, on the CPU.
        So does this, with the tensors from each rank.

        Raises the error of make(). The other ranks raise RankError then, which names this rank, and the group
        stays usable. RankError also if a rank ended, stalls or is at another place; then the group is not
        usable.
        """
        made, error = self._made(make)
        lengths = torch.zeros(self.size, len(dtypes), dtype=torch.int64)
        for i, (by_rank, dtype) in enumerate(zip(made, dtypes, strict=error is None)):
            assert all(tensor.dtype == dtype for tensor in by_rank), dtype
            lengths[:, i] = torch.tensor([len(tensor) for tensor in by_rank])
        received = self._compare(place, lengths, error)
        if not dtypes:
            return []
        sizes = torch.tensor([dtype.itemsize for dtype in dtypes])
        outgoing, incoming = (
            (counts * sizes + _PAD - 1) // _PAD * _PAD for counts in (lengths, received)
        )  # bytes
        sent = torch.empty(int(outgoing.sum()), dtype=torch.uint8)
        came = torch.empty(int(incoming.sum()), dtype=torch.uint8)
        spaces = torch.split(sent, outgoing.flatten().tolist())
        for tensor, space in zip(chain(*zip(*made, strict=True)), spaces, strict=True):
            if len(tensor):
                space[: tensor.nbytes] = tensor.contiguous().view(torch.uint8)
        self._all_to_all(came, sent, incoming.sum(1).tolist(), outgoing.sum(1).tolist())
        counts, spaces = received.flatten().tolist(), torch.split(came, incoming.flatten().tolist())
        tensors = [
            space[: count * dtype.itemsize].view(dtype)
            for space, count, dtype in zip(spaces, counts, cycle(dtypes), strict=False)
        ]
        return [tensors[i :: len(dtypes)] for i in range(len(dtypes))]

    def start_rows(
        self, rows: torch.Tensor, counts: Sequence[int], expected: Sequence[int]
    ) -> tuple[torch.Tensor, Any]:
        """Begin to send rows. Returns the memory that rows of other ranks come into, and wait_for()'s handle.

        rows: uint8[n, row_bytes], those for rank 0 first. counts: rows for each rank. expected: rows from
        each rank. Both buffers must stay until the handle is waited for. The ranks must have compared their
        place, and row_bytes, before.
        """
        row_bytes = rows.shape[1]
        received = rows.new_empty(sum(expected), row_bytes)
        group = self._rows_group(rows.device)
        work = self._run(
            lambda: dist.all_to_all_single(
                received.view(-1),
                rows.contiguous().view(-1),
                [n * row_bytes for n in expected],
                [n * row_bytes for n in counts],
                group=group,
                async_op=True,
            )
        )
        return received, (work, rows)

    def start_most(self, values: Sequence[int]) -> tuple[torch.Tensor, Any]:
        """Begin to find the largest of each value over the ranks. Returns int64[n], as start_rows does.

        It is in order with start_rows(), and with nothing else.
        """
        most = torch.tensor(values, dtype=torch.int64)
        group = self._rows_group(most.device)
        work = self._run(lambda: dist.all_reduce(most, dist.ReduceOp.MAX, group=group, async_op=True))
        return most, (work, most)

    @_in_turn
    def most(self, values: Sequence[int], place: str) -> list[int]:
        """The largest of each value over the ranks, at most 62 values."""
        received = self._compare(place, torch.tensor([values] * self.size, dtype=torch.int64))
        largest: list[int] = received.amax(0).tolist()
        return largest

    @_in_turn
    def meet(self, place: str, error: Exception | None = None) -> None:
        """Check that all ranks are at this place. Raises this rank's error; RankError if another has one."""
        self._compare(place, torch.empty(self.size, 0, dtype=torch.int64), error)

    @_in_turn
    def agree(self, say: Callable[[], Any], where: str, place: str) -> None:
        """Check that all ranks say the same plain value. Raises ValueError, on every rank.

        If say() raises an error on one rank, so does this; the others raise RankError.
        """
        value, digest, error = None, 0, None
        try:
            value = say()
            digest = _digest(json.dumps(value))
        except Exception as raised:
            error = raised
        received = self._compare(place, torch.full((self.size, 1), digest), error)
        if (received == digest).all():
            return
        values = self.gather(value, f"{place}: differs")
        mine = values[self.rank]
        for rank, theirs in enumerate(values):
            if theirs == mine:
                continue
            if isinstance(mine, dict):  # with the same keys
                different = [key for key in mine if mine[key] != theirs[key]]
                mine, theirs = ({key: values[key] for key in different} for values in (mine, theirs))
            raise ValueError(
                f"{where}: {self.name_of(self.rank)} has {mine}, and {self.name_of(rank)} has {theirs}"
            )

    def wait_for(self, handle: Any) -> None:
        """Block until an exchange that was begun is complete. Raises RankError."""
        work, _ = handle
        self._run(work.wait)

    @_in_turn
    def gather(self, value: Any, place: str) -> list[Any]:
        """The values of all ranks, which must be plain values: they are sent as JSON."""

        def say() -> Tensors:
            text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
            return [[text] * self.size]

        [texts] = self.exchange(say, [torch.uint8], place)
        return [json.loads(text.numpy().tobytes()) for text in texts]

    def name_of(self, rank: int) -> str:
        """How errors call a rank of this group."""
        return f"rank {self.ranks[rank]}"

    def close(self) -> None:
        """Give the process groups back to torch. Idempotent. Not collective. Nothing in a forked child, which
        lacks their threads."""
        if self._forked:
            return
        if self._broken is None:
            self._broken = "this group is closed"
        self._rows = {}
        _give_back(self._process_groups)

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """A forked child is refused, and must not wait for a thread of its parent."""
        return contextlib.nullcontext() if self._forked else self._lock

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._here.pid

    def _new(self, backend: str) -> Any:
        timeout, mine = timedelta(seconds=self.timeout_s), None
        for ranks in self._groups:
            made = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            if tuple(ranks) == self.ranks:
                mine = made
        assert mine is not None
        self._process_groups.append(weakref.ref(mine))  # torch has them until they are given back
        return mine

    def _rows_group(self, device: torch.device) -> Any:
        """The process group for rows on a device. Made at the first use, which is at the same place on all
        ranks."""
        if device.type not in self._rows:
            self._rows[device.type] = self._run(lambda: self._new("nccl"))
        return self._rows[device.type]

    def _made(self, make: Callable[[], Tensors]) -> tuple[Tensors, Exception | None]:
        if self._broken is not None:
            raise RankError(self._broken)
        try:
            return make(), None
        except RankError:
            if self._broken is not None:
                raise
            return [], RankError("another rank failed")
        except Exception as error:
            return [], error

    def _compare(self, place: str, numbers: torch.Tensor, error: Exception | None = None) -> torch.Tensor:
        """Compare the place with the other ranks, and send each one its numbers, int64[size, n].

        Returns those that came. Raises if a rank failed, or is at another place.
        """
        self.comparisons += 1
        count = numbers.shape[1]
        place = f"{place}, {count} numbers"
        header = torch.zeros(self.size, max(_HEADER, _OWN + count), dtype=torch.int64)
        header[:, 0], header[:, 1] = int(error is not None), _digest(place)
        header[:, _OWN : _OWN + count] = numbers
        received = torch.empty_like(header)
        for begin, end in ((0, _HEADER), (_HEADER, header.shape[1])):
            part = torch.empty(self.size, end - begin, dtype=torch.int64)
            if end > begin:
                self._all_to_all(part, header[:, begin:end].contiguous())
            received[:, begin:end] = part
            if begin == 0:
                self._check(received, place, error)
        return received[:, _OWN : _OWN + count]

    def _check(self, received: torch.Tensor, place: str, error: Exception | None) -> None:
        """Raise if a rank failed, or is at another place. All ranks see the same."""
        failed = [rank for rank in range(self.size) if received[rank, 0]]
        if failed:
            self.failures += 1
            said = self.gather(None if error is None else f"{type(error).__name__}: {error}", "failures")
            if error is not None and not isinstance(error, RankError):
                raise error
            told = [f"{self.name_of(r)} failed with {said[r]}" for r in failed if "RankError" not in said[r]]
            raise RankError("; ".join(told) or str(error))
        if (received[:, 1] != received[0, 1]).any():
            said = self.gather(place, "different places")
            without_counts = [theirs.rpartition(", ")[0] for theirs in said]
            self._broken = different_places(
                without_counts if len(set(without_counts)) > 1 else said, self.name_of
            )
            raise RankError(self._broken)

    def _all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        incoming: list[int] | None = None,
        outgoing: list[int] | None = None,
    ) -> None:
        group = self._control
        self._run(lambda: dist.all_to_all_single(received, sent, incoming, outgoing, group=group))

    def _run(self, call: Callable[[], Any]) -> Any:
        if self._forked:
            raise RankError(
                "a forked process is no rank: use the loaders in the process that opened the source"
            )
        if self._broken is not None:
            raise RankError(self._broken)
        self._begun += 1
        try:
            return call()
        except RuntimeError as error:
            self._broken = self._explain(error)
            raise RankError(self._broken) from error

    def _explain(self, error: RuntimeError) -> str:
        """Which rank is missing, after an exchange failed."""
        cause = re.sub(r"\[/\S*\] ", "", str(error).splitlines()[0])[:200]  # without places in torch's code
        lost, begun = self._missing()
        named = []
        for rank in lost:
            process = self._processes[rank]
            ended = process.has_ended(self._here)
            what = f"has ended (process {process.pid})" if ended else "does not answer"
            named.append(f"{self.name_of(rank)} {what}")
        if not lost and set(begun.values()) != {self._begun}:
            counts = ", ".join(f"{count} on {self.name_of(rank)}" for rank, count in sorted(begun.items()))
            named.append(
                f"the ranks are at different minibatches or layers (exchanges begun: {counts}); every rank "
                "must take the same number of minibatches and call exchange() for the same layers"
            )
        if not named:
            return f"an exchange with the other ranks failed ({cause})"
        return (
            f"{' and '.join(named)}: an exchange with the other ranks failed ({cause}). Start all ranks "
            "again; with state_dict() of the loader they go on where they were"
        )

    def _failure_of(self, rank: int) -> str:
        """The key in the store that says that an exchange failed for a rank."""
        return f"{self._key}/failed/{rank}"

    def _missing(self) -> tuple[list[int], dict[int, int]]:
        """The ranks that ended or do not say within a few seconds that the exchange failed for them, too; and
        the number of exchanges that the others have begun."""
        listener = _Listener(self._store, self._failure_of, self.rank, self.size, self._begun)
        for group in self._beside:
            listener.said[group._failure_of(group.rank)] = group._begun
        listener.start()
        end = time.monotonic() + _ANSWER_S
        while True:
            rounds = listener.rounds
            ended = {r for r, process in enumerate(self._processes) if process.has_ended(self._here)}
            listener.join(_POLL_S)
            heard = dict(listener.heard)
            done = ended - set(heard) and listener.rounds > rounds  # others that ended said why before
            if done or not listener.is_alive() or time.monotonic() > end:
                break
        listener.stop()
        if lost := ended - set(heard):
            return sorted(lost), heard
        if not listener.hears and 0 not in heard:
            host = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and 0 in self.ranks[:1]
            return [0] if host and self.rank else sorted(ended), heard
        return sorted(set(range(self.size)) - set(heard)), heard


def _give_back(process_groups: list[weakref.ref[Any]]) -> None:
    while process_groups:
        process_group = process_groups.pop()()
        with contextlib.suppress(Exception):
            if process_group is not None:
                dist.destroy_process_group(process_group)


def _digest(text: str) -> int:
    """0 to 2^56 - 1. Equal for equal text, and only for it."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


class _Listener(threading.Thread):
    """Says in the process group's store that an exchange failed, and hears who else says so.

    A thread, because the store does not answer if its process is stopped.

    Attributes: said: what it says, by key; heard: the number of exchanges that each rank has begun; rounds:
    how often all were asked.
    """

    def __init__(self, store: Any, key_of: Callable[[int], str], rank: int, size: int, begun: int) -> None:
        super().__init__(daemon=True)
        self._store, self._key_of, self._size = store, key_of, size
        self._stopped, self._failed = False, False
        self.said, self.heard = {key_of(rank): begun}, {rank: begun}
        self.rounds, self._asked_at = 0, time.monotonic()

    @property
    def hears(self) -> bool:
        """Whether the store answers."""
        return not self._failed and time.monotonic() - self._asked_at < _ANSWER_S / 2

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        try:
            for key, begun in self.said.items():
                self._store.set(key, str(begun))
            while len(self.heard) < self._size and not self._stopped:
                for rank in set(range(self._size)) - set(self.heard):
                    if theirs := stored_value(self._store, self._key_of(rank)):
                        self.heard[rank] = int(theirs)
                self.rounds, self._asked_at = self.rounds + 1, time.monotonic()
                time.sleep(_POLL_S)
        except RuntimeError:  # the process with the store ended
            self._failed = True
