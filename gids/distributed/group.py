"""Group: ranks that exchange ids, edges and rows over torch.distributed.

Called by everything else in this folder. It knows tensors and ranks, and nothing of graphs or tables. Each
method that exchanges is collective: all ranks of the group call the same ones in the same order.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gids.errors import RankError
from gids.loader.machine_ranks import MachineRanks
from gids.loader.process import Process
from gids.loader.ranks import machine_ranks, next_number
from gids.packs import ByReference

_PAD = 8
"""Tensors in a message begin at multiples of this."""
_HEADER = 64
"""Numbers for each rank in the first message of an exchange. The size does not depend on what is exchanged,
so that ranks that exchange something else by now hear of a rank that failed."""
_ANSWER_S = 5.0
"""How long a rank has to say that it still runs, after an exchange failed."""
_POLL_S = 0.05


class Group(ByReference):
    """Some ranks of torch.distributed's default process group.

    ranks: their ranks in the default group, in ascending order; None: all. timeout_s: seconds that a rank
    waits for another one in an exchange. all_groups: the ranks of every group of this kind, of which this
    rank is in one: all ranks of the default group must make the same groups in the same order.

    Exchanges of ids and of rows are in process groups of their own: if a rank is not in step with the others,
    they wait in vain, and nothing is taken for something else.

    Attributes: rank, size: this rank's place in the group, and its number of ranks; ranks; timeout_s;
    failures: number of exchanges in which some rank's make() failed, the same on all ranks.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        *,
        timeout_s: float = 300.0,
        all_groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("there is no process group: call torch.distributed.init_process_group() first")
        if not timeout_s > 0:
            raise ValueError(f"timeout={timeout_s} must be more than 0 seconds")
        self.ranks = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.timeout_s = timeout_s
        self._groups = [self.ranks] if all_groups is None else all_groups
        self._key = f"gids/group/{next_number('groups')}/{self.ranks[0]}"
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._broken: str | None = None
        self._begun = 0  # exchanges
        self.failures = 0
        self._here = Process.this()
        self._processes = self._meet()
        self._control: Any = None
        self._rows: dict[str, Any] = {}
        self._control = self._run(lambda: self._new("gloo"))
        self._rows["cpu"] = self._run(lambda: self._new("gloo"))
        self._agreed: set[Any] = set()

    def exchange(
        self,
        make: Callable[[], Sequence[Sequence[torch.Tensor]]],
        dtypes: Sequence[torch.dtype],
        tag: int = 0,
    ) -> list[list[torch.Tensor]]:
        """Send each rank its tensors, and return those that each rank sent to this one.

        make: returns, by rank of the group, one tensor of each of dtypes, in one dimension, on the CPU. tag:
        the same on all ranks if they are in step. The result is by rank, too.

        Raises the error of make(). The other ranks raise RankError then, which names this rank, and the group
        stays usable. RankError also if a rank ended, stalls or has another tag; then the group is not usable.
        """
        made, error = self._made(make)
        header = torch.zeros(self.size, max(_HEADER, 3 + len(dtypes)), dtype=torch.int64)
        header[:, 0], header[:, 1], header[:, 2] = int(error is not None), tag, len(dtypes)
        for to, tensors in enumerate(made):
            for i, tensor in enumerate(tensors):
                header[to, 3 + i] = len(tensor)
        received = torch.empty_like(header)
        for begin, end in ((0, _HEADER), (_HEADER, header.shape[1])):
            part = torch.empty(self.size, end - begin, dtype=torch.int64)
            if end > begin:
                self._all_to_all(part, header[:, begin:end].contiguous())
            received[:, begin:end] = part
            if begin == 0:
                self._check(received, (tag, len(dtypes)), error)
        header, received = (of[:, 3 : 3 + len(dtypes)] for of in (header, received))
        sizes = torch.tensor([dtype.itemsize for dtype in dtypes])
        outgoing: list[list[int]]
        incoming: list[list[int]]
        outgoing, incoming = (((of * sizes + _PAD - 1) // _PAD * _PAD).tolist() for of in (header, received))
        send, recv = (torch.empty(sum(map(sum, of)), dtype=torch.uint8) for of in (outgoing, incoming))
        at = 0
        for to, tensors in enumerate(made):
            for tensor, dtype, nbytes in zip(tensors, dtypes, outgoing[to], strict=True):
                assert tensor.dtype == dtype, (tensor.dtype, dtype)
                if len(tensor):
                    send[at : at + tensor.nbytes] = tensor.contiguous().view(torch.uint8)
                at += nbytes
        self._all_to_all(recv, send, [sum(of) for of in incoming], [sum(of) for of in outgoing])
        result: list[list[torch.Tensor]] = []
        at = 0
        for counts, of_rank in zip(received.tolist(), incoming, strict=True):
            result.append([])
            for count, dtype, nbytes in zip(counts, dtypes, of_rank, strict=True):
                result[-1].append(recv[at : at + count * dtype.itemsize].view(dtype))
                at += nbytes
        return result

    def start_rows(
        self, rows: torch.Tensor, counts: Sequence[int], expected: Sequence[int]
    ) -> tuple[torch.Tensor, Any]:
        """Begin to send rows. Returns the memory that rows of other ranks come into, and wait_for()'s handle.

        rows: uint8[n, row_bytes], those for rank 0 first. counts: rows for each rank. expected: rows from
        each rank. Both buffers must stay until the handle is waited for.
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
        return self._start_most(values, self._rows["cpu"])

    def most(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks."""
        found, handle = self._start_most(values, self._control)
        self.wait_for(handle)
        return found.tolist()

    def agree(self, what: Any, where: str) -> None:
        """Check that all ranks say the same, a tuple of plain values. Collective for what is new to a rank.

        Raises ValueError, on every rank.
        """
        if what in self._agreed:
            return
        for rank, theirs in enumerate(self.gather(what)):
            if theirs != what:
                raise ValueError(
                    f"{where}: {self.name_of(self.rank)} has {what}, and {self.name_of(rank)} has {theirs}"
                )
        self._agreed.add(what)

    def wait_for(self, handle: Any) -> None:
        """Block until an exchange that was begun is complete. Raises RankError."""
        work, _ = handle
        self._run(work.wait)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, any picklable objects."""
        values: list[Any] = [None] * self.size
        self._run(lambda: dist.all_gather_object(values, value, group=self._control))
        return values

    def share_error(self, error: Exception | None, tag: int) -> None:
        """Raise this rank's error, or RankError if another rank has one. Collective. tag: see exchange()."""

        def check() -> list[list[torch.Tensor]]:
            if error is not None:
                raise error
            return [[] for _ in range(self.size)]

        self.exchange(check, [], tag)

    def on_this_machine(self, offers: Sequence[Any]) -> MachineRanks:
        """The ranks of this machine that offer what this one does. offers: of all ranks, by offer()."""
        key = f"{self._key}/machine/{next_number('machines')}"
        return machine_ranks(self.rank, offers, self._store, key, self.timeout_s)

    def name_of(self, rank: int) -> str:
        """How errors call a rank of this group."""
        return f"rank {self.ranks[rank]}"

    def close(self) -> None:
        """Give the process groups back to torch. Idempotent. Not collective."""
        if self._broken is None:
            self._broken = "this group is closed"
        groups, self._rows = {self._control, *self._rows.values()}, {}
        for group in groups:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)

    def _meet(self) -> list[Process]:
        """The processes of the ranks, once all have come to make this group."""
        key_of = f"{self._key}/process/{{}}".format
        self._store.set(key_of(self.rank), json.dumps(asdict(self._here)))
        found, end = [], time.monotonic() + self.timeout_s
        for rank in range(self.size):
            left = max(0.001, end - time.monotonic())
            try:
                self._store.wait([key_of(rank)], timedelta(seconds=left))
                said = bytes(self._store.get(key_of(rank))).decode()
            except RuntimeError as error:
                raise RankError(
                    f"{self.name_of(rank)} did not come to the same gids.distributed.open() within "
                    f"{self.timeout_s:g} s: every rank must call it"
                ) from error
            found.append(Process(**json.loads(said)))
        return found

    def _new(self, backend: str) -> Any:
        timeout, mine = timedelta(seconds=self.timeout_s), None
        for ranks in self._groups:
            made = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            if tuple(ranks) == self.ranks:
                mine = made
        return mine

    def _rows_group(self, device: torch.device) -> Any:
        """The process group for rows on a device. Made at the first use, which is at the same place on all
        ranks."""
        if device.type not in self._rows:
            self._rows[device.type] = self._run(lambda: self._new("nccl"))
        return self._rows[device.type]

    def _start_most(self, values: Sequence[int], group: Any) -> tuple[torch.Tensor, Any]:
        most = torch.tensor(values, dtype=torch.int64)
        work = self._run(lambda: dist.all_reduce(most, dist.ReduceOp.MAX, group=group, async_op=True))
        return most, (work, most)

    def _made(
        self, make: Callable[[], Sequence[Sequence[torch.Tensor]]]
    ) -> tuple[Sequence[Sequence[torch.Tensor]], Exception | None]:
        if self._broken is not None:
            raise RankError(self._broken)
        try:
            return make(), None
        except RankError:
            if self._broken is not None:
                raise
            return [[] for _ in range(self.size)], RankError("another rank failed")
        except Exception as error:
            return [[] for _ in range(self.size)], error

    def _check(self, received: torch.Tensor, mine: tuple[int, int], error: Exception | None) -> None:
        """Raise if a rank failed, or is not in step. mine: this rank's tag and number of tensors."""
        failed = [rank for rank in range(self.size) if received[rank, 0]]
        if failed:
            self.failures += 1
            said = self.gather(None if error is None else f"{type(error).__name__}: {error}")
            if error is not None and not isinstance(error, RankError):
                raise error
            told = [f"{self.name_of(r)} failed with {said[r]}" for r in failed if "RankError" not in said[r]]
            raise RankError("; ".join(told) or str(error))
        theirs = [tuple(of_rank) for of_rank in received[:, 1:3].tolist()]
        if any(other != mine for other in theirs):
            rank = next(r for r, other in enumerate(theirs) if other != mine)
            self._broken = (
                f"{self.name_of(self.rank)} and {self.name_of(rank)} are at different minibatches: every "
                "rank must take the same number of minibatches of an epoch, and use its loaders in the same "
                "order"
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

    def _missing(self) -> tuple[list[int], dict[int, int]]:
        """The ranks that ended or do not say within a few seconds that the exchange failed for them, too; and
        the number of exchanges that the others have begun."""
        listener = _Listener(
            self._store, f"{self._key}/failed/{{}}".format, self.rank, self.size, self._begun
        )
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


class _Listener(threading.Thread):
    """Says in the process group's store that an exchange failed, and hears who else says so.

    A thread, because the store does not answer if its process is stopped.

    Attributes: heard: the number of exchanges that each rank has begun. rounds: how often all were asked.
    """

    def __init__(self, store: Any, key_of: Callable[[int], str], rank: int, size: int, begun: int) -> None:
        super().__init__(daemon=True)
        self._store, self._key_of, self._size = store, key_of, size
        self._rank, self._begun = rank, begun
        self._stopped, self._failed = False, False
        self.heard = {rank: begun}
        self.rounds, self._asked_at = 0, time.monotonic()
        self.start()

    @property
    def hears(self) -> bool:
        """Whether the store answers."""
        return not self._failed and time.monotonic() - self._asked_at < _ANSWER_S / 2

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        try:
            self._store.set(self._key_of(self._rank), str(self._begun))
            while len(self.heard) < self._size and not self._stopped:
                for rank in set(range(self._size)) - set(self.heard):
                    if self._store.check([self._key_of(rank)]):
                        self.heard[rank] = int(self._store.get(self._key_of(rank)))
                self.rounds, self._asked_at = self.rounds + 1, time.monotonic()
                time.sleep(_POLL_S)
        except RuntimeError:  # the process with the store ended
            self._failed = True
