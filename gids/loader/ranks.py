"""Ranks: the processes that train one model together, each one's part of the seeds, and what they exchange.

Called by EpochLoader, which compares arguments here, and by gids.distributed. All exchanges go through
process groups of torch.distributed with the time-out of the default one. This knows nothing of graphs or
tables.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gids.closing import Closing
from gids.errors import RankError

log = logging.getLogger("gids")

Tensors = Sequence[Sequence[torch.Tensor]]
"""What is exchanged with each rank: for each kind of tensor, one by rank."""

_PAD = 8  # tensors in a message begin at multiples of this
_TEXT_BYTES = 192
_OWN = 3 + _TEXT_BYTES // 8
"""Numbers of a header that are compared: whether the rank failed, how many exchanges of rows it began, how
many numbers follow, and the text of its place."""
_HEADER = _OWN + 64
"""Numbers for each rank in the first message of an exchange, whatever is exchanged: gloo ends a process that
gets another size than it expects."""


class Group(Closing):
    """This rank and others, which exchange ids, edges and rows. Every exchange is collective.

    groups: the ranks of each group, which make up all ranks of the default process group; this one is in one
    of them. None: one group of all. All ranks must make the same groups in the same order.

    Every exchange has a place: text that says what this rank does, such as the epoch and the step. It is in
    the header, so ranks at different places raise RankError and send nothing else. Rows are sent without a
    header: whoever calls start_rows() has compared the place since the rows before.

    Attributes: ranks: their ranks in the default group; rank, size: this one's number, and how many they are;
    loaders: how many they made; failures: exchanges in which one failed, the same on all ranks.
    """

    def __init__(self, groups: Sequence[Sequence[int]] | None = None) -> None:
        if not _initialized():
            raise ValueError("there is no process group: call torch.distributed.init_process_group() first")
        self._groups = [range(dist.get_world_size())] if groups is None else groups
        [self.ranks] = [tuple(ranks) for ranks in self._groups if dist.get_rank() in ranks]
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.loaders = self.failures = self._rows_begun = 0
        self._pid = os.getpid()  # 0 once closed
        self._process_groups: dict[str, Any] = {}
        self._process_group("")

    def exchange(
        self, make: Callable[[], Tensors], dtypes: Sequence[torch.dtype], place: str
    ) -> list[list[torch.Tensor]]:
        """Send each rank its tensors, and return those that each rank sent to this one.

        make: returns, for each of dtypes, a tensor for each rank of the group, in one dimension, on the CPU.
        So does this, with the tensors from each rank. Raises the error of make(); the other ranks raise
        RankError then. RankError also if a rank ended, stalls for the time-out, or is at another place.
        """
        made: Tensors = []
        error: Exception | None = None
        try:
            made = make()
        except Exception as raised:
            error = raised
        lengths = torch.zeros(self.size, len(dtypes), dtype=torch.int64)
        for i, (by_rank, dtype) in enumerate(zip(made, dtypes, strict=error is None)):
            assert all(tensor.dtype == dtype for tensor in by_rank), dtype
            lengths[:, i] = torch.tensor([len(tensor) for tensor in by_rank])
        received = self._compare(place, lengths, error)
        if not dtypes:
            return []
        sizes = torch.tensor([dtype.itemsize for dtype in dtypes])
        outgoing, incoming = (-(-counts * sizes // _PAD) * _PAD for counts in (lengths, received))  # bytes
        pieces = [torch.empty(0, dtype=torch.uint8)]
        for tensor in chain(*zip(*made, strict=True)):
            if len(tensor):
                padding = torch.zeros(-tensor.nbytes % _PAD, dtype=torch.uint8)
                pieces += [tensor.contiguous().view(torch.uint8), padding]
        sent, came = torch.cat(pieces), torch.empty(int(incoming.sum()), dtype=torch.uint8)
        incoming_bytes, outgoing_bytes = incoming.sum(1).tolist(), outgoing.sum(1).tolist()
        with self._exchanging() as group:
            dist.all_to_all_single(came, sent, incoming_bytes, outgoing_bytes, group=group)
        counts, spaces = received.flatten().tolist(), torch.split(came, incoming.flatten().tolist())
        tensors = [
            space[: count * dtype.itemsize].view(dtype)
            for space, count, dtype in zip(spaces, counts, cycle(dtypes), strict=False)
        ]
        return [tensors[i :: len(dtypes)] for i in range(len(dtypes))]

    def start_rows(
        self, rows: torch.Tensor, counts: Sequence[int], expected: Sequence[int]
    ) -> tuple[torch.Tensor, Any]:
        """Begin to send rows, uint8[n, row_bytes], those for rank 0 first. Returns the memory that rows of
        other ranks come into, and wait_for()'s handle. counts: rows for each rank. expected: from each rank.

        The ranks must have compared their place, and row_bytes, before.
        """
        row_bytes = rows.shape[1]
        received = rows.new_empty(sum(expected), row_bytes)
        group = self._process_group(rows.device.type)
        incoming, outgoing = ([n * row_bytes for n in numbers] for numbers in (expected, counts))
        self._rows_begun += 1
        with self._exchanging():
            sent = rows.contiguous()
            work = dist.all_to_all_single(
                received.view(-1), sent.view(-1), incoming, outgoing, group=group, async_op=True
            )
        return received, (work, sent)

    def wait_for(self, handle: Any) -> None:
        """Block until an exchange that was begun is complete. Raises RankError."""
        with self._exchanging():
            handle[0].wait()

    def most(self, values: Sequence[int], place: str) -> list[int]:
        """The largest of each value over the ranks."""
        received = self._compare(place, torch.tensor([values] * self.size, dtype=torch.int64))
        largest: list[int] = received.amax(0).tolist()
        return largest

    def meet(self, place: str, error: Exception | None = None) -> None:
        """Check that all ranks are at this place. Raises this rank's error; RankError if another has one."""
        self._compare(place, torch.empty(self.size, 0, dtype=torch.int64), error)

    def gather(self, say: Callable[[], Any], place: str) -> list[Any]:
        """What all ranks say, which must be plain values: they are sent as JSON. Raises as exchange()."""

        def make() -> Tensors:
            text = torch.frombuffer(bytearray(json.dumps(say()).encode()), dtype=torch.uint8)
            return [[text] * self.size]

        [texts] = self.exchange(make, [torch.uint8], place)
        return [json.loads(text.numpy().tobytes()) for text in texts]

    def agree(self, say: Callable[[], Mapping[str, Any]], does: str, cure: str) -> None:
        """Check that all ranks say the same. Raises ValueError on every rank, and as gather()."""
        first, *others = self.gather(say, does)
        for rank, theirs in enumerate(others, 1):
            for name in first | theirs:
                if theirs.get(name) != first.get(name):
                    raise ValueError(
                        f"{self.name_of(0)} {does} with {name} = {first.get(name)!r}, and "
                        f"{self.name_of(rank)} with {theirs.get(name)!r}. {cure}"
                    )

    def name_of(self, rank: int) -> str:
        """How errors call a rank of this group."""
        return f"rank {self.ranks[rank]}"

    def close(self) -> None:
        """Give the process groups back to torch. Idempotent. Not collective. Does nothing in a forked child,
        which lacks their threads."""
        while self._process_groups and os.getpid() == self._pid:
            with contextlib.suppress(Exception):  # the default process group ended
                dist.destroy_process_group(self._process_groups.popitem()[1])
        self._pid = 0

    def _process_group(self, device: str) -> Any:
        """The process group for rows on a type of device, or for all else, "". Made at the first use, which
        is at the same place on all ranks."""
        if device not in self._process_groups:
            backend = "nccl" if device == "cuda" else "gloo"
            with self._exchanging():
                made = [dist.new_group(list(r), timeout=_timeout(), backend=backend) for r in self._groups]
            self._process_groups[device] = made[[tuple(ranks) for ranks in self._groups].index(self.ranks)]
        return self._process_groups[device]

    def _compare(self, place: str, numbers: torch.Tensor, error: Exception | None = None) -> torch.Tensor:
        """Compare the place with the other ranks, and send each one its numbers, int64[size, n].

        Returns those that came. Raises the error; and RankError if a rank failed, or is at another place.
        """
        count, text = numbers.shape[1], place if error is None else f"{type(error).__name__}: {error}"
        if error is None and len(place.encode()) > _TEXT_BYTES:
            text = f"{zlib.crc32(place.encode()):08x}: {place}"
        header = torch.zeros(self.size, max(_HEADER, _OWN + count), dtype=torch.int64)
        header[:, :3] = torch.tensor([int(error is not None), self._rows_begun, count])
        encoded = bytearray(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES))
        header[:, 3:_OWN] = torch.frombuffer(encoded, dtype=torch.int64)
        header[:, _OWN : _OWN + count] = numbers
        received = torch.empty(self.size, _HEADER, dtype=torch.int64)
        with self._exchanging() as group:
            dist.all_to_all_single(received, header[:, :_HEADER].contiguous(), group=group)
        self._check(received, error)
        if header.shape[1] > _HEADER:
            rest = torch.empty(self.size, header.shape[1] - _HEADER, dtype=torch.int64)
            with self._exchanging() as group:
                dist.all_to_all_single(rest, header[:, _HEADER:].contiguous(), group=group)
            received = torch.cat([received, rest], 1)
        return received[:, _OWN : _OWN + count]

    def _check(self, headers: torch.Tensor, error: Exception | None) -> None:
        """Raise if a rank failed, or is at another place. All ranks see the same headers."""
        if not headers[:, 0].any() and (headers[:, 1:_OWN] == headers[0, 1:_OWN]).all():
            return
        texts = [h[3:_OWN].numpy().tobytes().decode(errors="replace").rstrip() for h in headers]
        if failed := [f"{self.name_of(r)} failed with {t}" for r, t in enumerate(texts) if headers[r, 0]]:
            self.failures += 1
            raise error or RankError("; ".join(failed))
        told = "; ".join(f"{self.name_of(rank)}: {text}" for rank, text in enumerate(texts))
        raise RankError(
            f"the ranks are at different minibatches: {told}. Every rank must load the same state_dict() "
            "and take the same minibatches of its loaders in the same order"
        )

    @contextlib.contextmanager
    def _exchanging(self) -> Iterator[Any]:
        """Yields the process group for all but rows. Raises RankError, with the cause of torch's error."""
        if os.getpid() != self._pid:
            raise RankError(
                "this group of ranks is closed, or used by a forked process, which is no rank: use loaders "
                "in the process that opened their source"
            )
        try:
            yield self._process_groups.get("")
        except RuntimeError as error:
            cause = re.sub(r"\[/\S*\] ", "", str(error).splitlines()[0])  # without places in torch's code
            raise RankError(
                f"an exchange with the other ranks failed ({cause[:200]}): a rank ended, or did not come "
                "within the timeout= of init_process_group(). All ranks must make the same loaders and take "
                "the same minibatches. Start them again; after load_state_dict() they go on where they were"
            ) from error


def place_of(loader: int, epoch: int, step: int, what: str) -> str:
    """What a rank does. loader: its number among the loaders that the ranks made."""
    return f"loader {loader}, epoch {epoch}, step {step} ({what})"


@dataclass
class Ranks:
    """The rank of this process, for one loader.

    group: returns the ranks that compare arguments, as a context; None: the user gave the rank. loader: its
    number among those that a Group made. assumed: there was no process group that says the rank.
    """

    rank: int = 0
    world_size: int = 1
    group: Callable[[], contextlib.AbstractContextManager[Group]] | None = None
    loader: int = 0
    assumed: bool = field(default=False, compare=False, repr=False)

    def part(self, count: int) -> slice:
        """This rank's part of the `count` seeds of a step: 1 seed or more.

        The parts of two ranks differ by one seed at most. With fewer seeds than ranks, each rank has one
        seed, and some seeds are in several ranks: a rank without a seed would block the others.
        """
        begin = count * self.rank // self.world_size
        return slice(begin, max(begin + 1, count * (self.rank + 1) // self.world_size))

    @contextlib.contextmanager
    def comparing(
        self, made_with: Callable[[], Mapping[str, Any]], seed: int, shares: str | None = None
    ) -> Iterator[tuple[Group | None, int]]:
        """Compare a loader's arguments, which must be plain values, over all ranks. Collective.

        shares: what this rank can share with the ranks of its machine that give the same; None: nothing.
        Yields a group of these ranks, or None without any, and rank 0's seed. Raises ValueError on every rank
        if arguments differ, and RankError if a rank makes no loader within the time-out.
        """
        if self.group is None or self.world_size == 1:
            yield None, seed
            return
        with self.group() as group:
            self.loader, group.loaders = group.loaders, group.loaders + 1
            cure = "Give every rank the same arguments and all seeds: the loader gives each rank its part. "
            cure += "For a loader that shares no seeds: rank=0, world_size=1"
            group.agree(made_with, "made this loader", cure)
            mine = f"rank {self.rank}"  # which nobody else offers
            if shares is not None and os.path.exists("/proc/self/ns/pid"):
                boot = Path("/proc/sys/kernel/random/boot_id").read_text()
                mine = f"{shares} {boot} {os.readlink('/proc/self/ns/pid')}"
            told = group.gather(lambda: [mine, seed], "made this loader")
        offers, [seed, *_] = zip(*told, strict=True)
        machines = [[r for r, theirs in enumerate(offers) if theirs == o] for o in dict.fromkeys(offers)]
        with contextlib.nullcontext() if len(machines) == self.world_size else Group(machines) as peers:
            yield peers if peers is not None and peers.size > 1 else None, seed

    def check_process_group(self) -> None:
        """Raise ValueError if the process group was made after the loader."""
        if self.assumed and _initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "this loader was made before the process group, so the ranks would not share its seeds: make "
                "it after init_process_group(), with Lightning in LightningDataModule.train_dataloader(). "
                "For a loader that shares no seeds: rank=0, world_size=1"
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
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), Group)
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


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _timeout() -> timedelta | None:
    """The time-out of the default process group; None, which is torch's default, if torch does not say it."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            world: Any = dist.group.WORLD
            timeout: timedelta = world._get_backend(torch.device(device)).options._timeout
            return timeout
    return None
