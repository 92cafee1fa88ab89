"""Packer: prepares superbatches of an epoch, one after the other. PackedRows: the epoch's rows, in both ways.

A superbatch is sampled ahead into a spool, while rows are read at random or another superbatch is read. Then
its annex is planned and written, and its minibatches are read from there. Once per superbatch, measured
seconds decide. If that fails, it is read at random.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from gids import _core
from gids.cache.feature_cache import read_error
from gids.cache.output_dtype import Outputs, out_dtype_of, overflow_error
from gids.cuda import on_host
from gids.errors import MemoryBudgetError
from gids.loader.queue import without_frames
from gids.loader.rows import CachedRows, EpochInput, Features, Ids, Rows
from gids.loader.stats import PACK_COUNTERS, PACK_SECONDS
from gids.packs.annex import Annex, RowUses, pieces_of
from gids.packs.annex import Superbatch as Planned
from gids.packs.predict import measure_rates, predict
from gids.packs.scratch import Scratch
from gids.packs.spool import NotSpoolable, Spool, rows_of
from gids.profiling import stage
from gids.sizes import format_bytes
from gids.store import Table
from gids.store.geometry import align_up

if TYPE_CHECKING:
    from gids.io import Engine
    from gids.loader.options import Options

T = TypeVar("T")
log = logging.getLogger("gids")

LEAST_WAIT_S = 4.0
"""Packs are not considered, nor the disk measured, for an epoch that would wait for it less than this."""

_EARLY = 16
"""So many minibatches show how long the epoch will wait for the disk, …"""

_SOON_S = 0.5
"""… or fewer, if they waited so long together."""

_PACE = 4
"""Minibatches that are sampled ahead with each one that comes from the annex."""

_UNKNOWN_COUNT = 4096
"""Minibatches of an epoch that does not say how many it has."""

_PREPARING_SHARE = 3
"""Preparing a superbatch takes at most a third of the memory, which limits its length."""

_WORK_SHARE = 16
"""Beside another superbatch, a sweep takes a sixteenth of the memory; else half."""

_SCRATCH_SHARE = 8
"""Its spool takes at most an eighth of the scratch."""


@dataclass
class Choice:
    """How the minibatches of a superbatch are read. stats()["packs"]["choices"] has the fields.

    way: "random" or "pack". predicted_s: seconds by way. returned, actual_s: minibatches that came so far,
    and the seconds of reading them.
    """

    way: str
    minibatches: int
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    returned: int = 0
    actual_s: float = 0.0


class Ahead(Generic[T], Iterator[T]):
    """The minibatches of an epoch. Some are sampled before they are asked for, and wait in spools.

    minibatches: what the epoch samples from. Attributes: end: what comes after the sampled ones; None before
    it is met.
    """

    def __init__(self, minibatches: Iterable[T]) -> None:
        self.minibatches = minibatches
        self.end: Exception | None = None
        self._source = iter(minibatches)
        self._spools: deque[Spool] = deque()
        self._held: deque[T] = deque()  # after those in the spools

    @property
    def can_sample(self) -> bool:
        """Whether more minibatches may be sampled ahead."""
        return self.end is None and not self._held

    def __next__(self) -> T:
        while self._spools:
            if len(self._spools[0]):
                minibatch: T = self._spools[0].take()
                return minibatch
            if len(self._spools) == 1 and self.can_sample:
                break  # more may come into it
            self._spools.popleft().close()
        if self._held:
            return self._held.popleft()
        for minibatch in self.sample():
            return minibatch
        assert self.end is not None
        raise self.end

    def sample(self) -> list[T]:
        """The next minibatch of the source, which the caller spools or holds; [] at its end, or after its
        error, which is raised in its place."""
        if self.end is None:
            try:
                return [next(self._source)]
            except StopIteration:
                self.end = StopIteration()
            except Exception as error:
                self.end = without_frames(error)
            self._source = iter(())
        return []

    def spool(self, spool: Spool) -> None:
        """The next minibatches that are sampled ahead go there."""
        self._spools.append(spool)

    def hold(self, minibatch: T) -> None:
        """Keep one in memory that goes into no spool. None is sampled ahead until it was asked for."""
        self._held.append(minibatch)

    def close(self) -> None:
        """Drop what was sampled. Idempotent."""
        while self._spools:
            self._spools.popleft().close()
        self._held.clear()
        self._source = iter(())


@dataclass(eq=False)
class Superbatch:
    """Minibatches that are read by packs together: those of an epoch from `first` on.

    uses, planned: by table. lines: of each table. purposes: the memory to read it, bytes by purpose.
    work_bytes: the memory to sweep it. swept: whether it may be read, once it is; None while it is sampled.
    """

    ahead: Ahead[Any]
    first: int
    spool: Spool
    uses: list[RowUses]
    minibatch_bytes: int = 0  # memory of the largest minibatch
    planned: list[Planned] = field(default_factory=list)
    lines: Sequence[int] = ()
    purposes: Mapping[str, int] = field(default_factory=dict)
    work_bytes: int = 0
    choice: Choice = field(default_factory=lambda: Choice("random", 0))
    swept: Future[bool] | None = None
    cancel: _core.Cancel = field(default_factory=_core.Cancel.create)

    def __len__(self) -> int:
        return len(self.uses[0])

    @property
    def end(self) -> int:
        return self.first + len(self)


class Packs:
    """What the epochs of a FeatureLoader share: scratch, annexes, what was measured, counters.

    memory_bytes: of the loader. Attributes: random_s: seconds that a minibatch waits for random reads, 0 if
    it is not known. random_below: epochs of at most so many minibatches do not consider packs. coming: what
    is prepared of a next epoch, or None. reading: the superbatch that is read, or None.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        options: Options,
        dtype: torch.dtype | None,
        engine: Engine,
        scratch: Scratch,
        memory_bytes: int,
    ) -> None:
        self.tables, self.options, self.dtype, self.engine = tables, options, dtype, engine
        self.scratch, self.memory_bytes = scratch, memory_bytes
        self.annexes = [Annex(t, scratch) for t in tables]
        self.workers = _core.Workers.create(options.threads or torch.get_num_threads())
        self.thread = ThreadPoolExecutor(1, "gids-packs")
        self.counters: Counter[str] = Counter(PACK_COUNTERS)
        self.seconds: dict[str, float] = dict(PACK_SECONDS)
        self.choices: list[Choice] = []
        self.random_s, self.random_below = 0.0, 0.0
        self.swept_bytes = 0
        self.coming: Superbatch | None = None
        self.reading: AnnexRows | None = None

    def preparing_bytes(self, superbatch: Superbatch) -> int:
        """Memory to plan and to sweep it beside another one, about: one table after the other."""
        plans = sum(a.plan_bytes(uses) for a, uses in zip(self.annexes, superbatch.uses, strict=True))
        passes = max(annex.passes_bytes() for annex in self.annexes)
        return plans + max(passes, self.memory_bytes // _WORK_SHARE)

    def prepare(self, superbatch: Superbatch) -> bool:
        """Plan it, and write its copies if that is faster, or asked for. Returns whether it is read by packs.
        Blocks. Raises OSError."""
        begun, first_file, choice = time.perf_counter(), 0, superbatch.choice
        for t, annex, uses, lines in self._parts(superbatch, superbatch.uses, superbatch.lines):
            planned = annex.plan(
                uses,
                lines=lines,
                work_bytes=superbatch.work_bytes,
                workers=self.workers,
                first_file=first_file,
                cancel=superbatch.cancel,
            )
            superbatch.planned.append(planned)
            first_file += len(t.shard_paths)
        planned_at = time.perf_counter()
        self.seconds["plan"] += planned_at - begun
        choice.minibatches = len(superbatch)
        if self.options.reads == "auto":
            choice.predicted_s = self._predict(superbatch)
            if choice.predicted_s["random"] <= choice.predicted_s["pack"]:
                return False
        choice.way = "pack"
        for t, annex, planned in self._parts(superbatch, superbatch.planned):
            crcs = t.checksums() if self.options.check_crc else None
            swept = annex.sweep(
                planned, self.engine, workers=self.workers, checksums=crcs, cancel=superbatch.cancel
            )
            self.swept_bytes += int(swept["bytes_read"])  # the engine counts them, too
            self.counters["bytes_read"] += int(swept["bytes_read"])
            self.counters["bytes_written"] += int(swept["bytes_written"])
        self.counters["superbatches"] += 1
        self.seconds["sweep"] += time.perf_counter() - planned_at
        return True

    def _parts(self, superbatch: Superbatch, *by_table: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """(table, annex, *of the table) of each table that the superbatch reads."""
        for i, (t, annex) in enumerate(zip(self.tables, self.annexes, strict=True)):
            yield t, annex, *(values[i] for values in by_table)

    def _predict(self, superbatch: Superbatch) -> Mapping[str, float]:
        rates = measure_rates(
            [shard for t in self.tables for shard in t.shards],
            self.scratch,
            direct=self.options.direct,
            engine=self.options.engine,
            memory_bytes=self.memory_bytes,
        )
        plans = [planned.plan for planned in superbatch.planned]
        sweeps = (
            min(t.page_count, plan.copies) * t.page_bytes for t, plan in zip(self.tables, plans, strict=True)
        )
        return predict(
            rates,
            random_s=self.random_s * len(superbatch),
            swept_bytes=sum(sweeps),
            copied_bytes=sum(plan.nbytes for plan in plans),
            uses=sum(uses.native.uses for uses in superbatch.uses),
        )

    def release(self, superbatch: Superbatch) -> None:
        """End preparing it; its scratch, but for the spool, may be used again. Idempotent."""
        superbatch.cancel.cancel()
        if superbatch.swept is not None:
            futures.wait([superbatch.swept])
        for annex, planned in zip(self.annexes, superbatch.planned, strict=False):
            annex.release(planned)
        for uses in superbatch.uses:
            uses.close()

    def give_up(self, reason: object) -> None:
        """Read at random from now on."""
        if self.random_below < math.inf:
            self.random_below = math.inf
            log.warning("rows are read at random from now on, not by packs: %s", reason)

    def keep(self, coming: Superbatch | None) -> None:
        """Keep what is prepared of a next epoch, in place of what is kept."""
        before, self.coming = self.coming, coming
        if before is not None:
            self.release(before)
            before.ahead.close()

    def ahead(self, minibatches: Iterable[T]) -> tuple[Ahead[T], Superbatch | None]:
        """The minibatches of an epoch that begins, and what is prepared of them."""
        coming = self.coming
        if coming is None or coming.ahead.minibatches is not minibatches:
            return Ahead(minibatches), None
        self.coming = None
        return coming.ahead, coming

    def close(self) -> None:
        """Give all scratch back. Idempotent. No superbatch may be read."""
        self.keep(None)
        self.thread.shutdown()
        for annex in self.annexes:
            annex.close()

    def stats(self) -> dict[str, Any]:
        """Counters, and each superbatch's choice."""
        counters, seconds = self.counters.copy(), dict(self.seconds)
        if self.reading is not None:
            self.reading.count(counters, seconds)
        return {
            **counters,
            "seconds": seconds,
            "choices": [dict(vars(choice)) for choice in self.choices],
            "scratch": [str(directory) for directory in self.scratch.directories],
        }


class AnnexRows:
    """Reads the minibatches of a superbatch from its annex, in their order.

    Attributes: next: the minibatch that is read next; end: after the last one.
    """

    def __init__(self, packs: Packs, superbatch: Superbatch) -> None:
        self._packs, self._superbatch = packs, superbatch
        self.choice = superbatch.choice
        packs.reading = self
        self.next, self.end = superbatch.first, superbatch.end
        most = {t.name: uses.native.longest for t, uses in zip(packs.tables, superbatch.uses, strict=True)}
        self._outputs = Outputs(
            packs.tables, packs.dtype, keep_bytes=superbatch.purposes["outputs"], rows=most
        )
        self._readers = []
        for t, annex, planned, lines in zip(
            packs.tables, packs.annexes, superbatch.planned, superbatch.lines, strict=True
        ):
            pieces, piece_bytes = pieces_of(packs.memory_bytes, len(packs.tables))
            memory = _core.RunMemory.create(
                lines=lines, row_bytes=t.row_bytes, pieces=pieces, piece_bytes=piece_bytes
            )
            form = self._outputs.forms[t.name]
            self._readers.append(annex.reader(planned, memory, form, workers=packs.workers))

    def has(self, t: int) -> bool:
        """Whether it has this minibatch of the epoch."""
        return self.next <= t < self.end

    def skip_to(self, t: int) -> None:
        """The minibatches before this one were read at random."""
        while self.next < t:
            for number in range(len(self._readers)):
                self._read(number, None)
            self.next += 1

    def gather(self, ids: Ids) -> Features:
        """The rows of the next minibatch, whose ids these are. Blocks.

        Raises StorageError, OverflowError, and RuntimeError if it is not the minibatch that was spooled.
        """
        step, features = self.next - self._superbatch.first, {}
        for number, (t, uses) in enumerate(zip(self._packs.tables, self._superbatch.uses, strict=True)):
            count, now = uses.native.count(step), len(ids.get(t.name, ()))
            if now != count:
                raise RuntimeError(
                    f"minibatch {self.next} reads {now} rows of {t.name!r}, and read {count} before it was "
                    "pickled: let its sampler return objects that pickle faithfully, or use reads='random'"
                )
            out = self._outputs.take(t, count)
            self._read(number, out)
            if t.name in ids:
                features[t.name] = self._outputs.tensor(t, out)
        self.next += 1
        return features

    def _read(self, number: int, out: Any) -> None:
        packs, table = self._packs, self._packs.tables[number]
        code, file, offset, overflowed = self._readers[number].read(out)
        if code:
            raise read_error(code, packs.scratch.directories[file], offset, " of scratch")
        if overflowed:
            raise overflow_error(table, out_dtype_of(table, packs.dtype))

    def memory(self) -> dict[str, int]:
        """Bytes by purpose."""
        return {**self._superbatch.purposes, "outputs": self._outputs.pool.peak_bytes}

    def count(self, counters: Counter[str], seconds: dict[str, float]) -> None:
        """Add what was read so far."""
        for number, reader in enumerate(self._readers):
            stats = reader.stats()
            counters["bytes_read"] += stats["bytes_read"]
            counters["minibatches"] += stats["steps"] if number == 0 else 0
            for name in ("wait", "gather"):
                seconds[name] += stats[f"{name}_s"]

    def close(self) -> None:
        """Let reads finish, and free the memory and the scratch."""
        packs = self._packs
        self.count(packs.counters, packs.seconds)
        self._readers.clear()
        packs.reading = None
        packs.release(self._superbatch)


class Packer:
    """Prepares one superbatch of an epoch at a time.

    It is idle (coming is None), sampling (coming.swept is None), sweeping, or ready (coming.swept is done).
    ahead: the epoch's minibatches. coming: what is prepared of them already.
    """

    def __init__(
        self, packs: Packs, epoch: EpochInput[Any], ahead: Ahead[Any], coming: Superbatch | None
    ) -> None:
        self.packs, self._epoch, self.ahead, self.coming = packs, epoch, ahead, coming

    @property
    def count(self) -> int:
        """Minibatches of the epoch; a guess if it is not known."""
        return _UNKNOWN_COUNT if self._epoch.count is None else self._epoch.count

    @property
    def sampling(self) -> bool:
        """Whether a superbatch is being sampled, and takes more minibatches."""
        coming = self.coming
        if coming is None or coming.swept is not None:
            return False
        packs, scratch = self.packs, self.packs.scratch
        return coming.ahead.can_sample and (
            not len(coming)
            or (
                len(coming) < _core.ANNEX_MOST_STEPS
                and packs.preparing_bytes(coming) < packs.memory_bytes // _PREPARING_SHARE
                and coming.spool.bytes_written < scratch.limit_bytes // _SCRATCH_SHARE
            )
        )

    @property
    def sampled(self) -> bool:
        """Whether a superbatch was sampled, and is not prepared yet."""
        return self.coming is not None and self.coming.swept is None and not self.sampling

    def begin(self, first: int, entered: Sequence[Ids] = ()) -> None:
        """Begin to sample. first: the number of the first minibatch. entered: ids of those from there on that
        were sampled before."""
        self._begin(self.ahead, first, entered)

    def begin_next(self, first: int) -> None:
        """Begin to sample the minibatches that follow, perhaps of the next epoch, if there are some."""
        if self.coming is not None or self.packs.random_below == math.inf:
            return
        if self.ahead.can_sample:
            return self._begin(self.ahead, first, ())
        again = self.packs.counters["minibatches"] >= self.count  # there were epochs before
        if not again or not isinstance(self.ahead.end, StopIteration) or self._epoch.following is None:
            return
        if (following := self._epoch.following()) is not None:
            self._begin(Ahead(following), 0, ())

    def _begin(self, ahead: Ahead[Any], first: int, entered: Sequence[Ids]) -> None:
        packs = self.packs
        try:
            spool = Spool(packs.scratch)
            ahead.spool(spool)
            uses = [RowUses(t, packs.scratch) for t in packs.tables]
            self.coming = Superbatch(ahead, first, spool, uses)
            for ids in entered:
                self._append(self.coming, rows_of(on_host(ids), packs.tables))
        except (OSError, MemoryError) as error:
            self._fail(error)

    def sample(self, count: int) -> None:
        """Sample so many minibatches more, while there is room. What fails comes in its place later."""
        with stage("sample"):
            for _ in range(count):
                if not self.sampling:
                    return
                self._sample()

    def _sample(self) -> None:
        coming = self.coming
        assert coming is not None
        for minibatch in coming.ahead.sample():
            self._put(coming, minibatch)

    def _put(self, coming: Superbatch, minibatch: Any) -> None:
        packs = self.packs
        try:
            rows = rows_of(on_host(self._epoch.ids_of(minibatch)), packs.tables)
        except Exception:
            return coming.ahead.hold(minibatch)
        nbytes = self._epoch.bytes_of(minibatch)
        try:
            coming.spool.put(minibatch)
        except (NotSpoolable, OSError, MemoryError) as error:
            coming.ahead.hold(minibatch)
            return self._fail(error)
        coming.minibatch_bytes = max(coming.minibatch_bytes, nbytes)
        try:
            self._append(coming, rows)
        except (OSError, MemoryError) as error:
            self._fail(error)

    def came(self, t: int, ids: Ids) -> None:
        """Minibatch t is read at random. It is in the superbatch, also if the spool did not have it."""
        coming = self.coming
        if coming is None or coming.swept is not None or coming.ahead is not self.ahead or t < coming.end:
            return
        try:
            self._append(coming, rows_of(on_host(ids), self.packs.tables))
        except (OSError, MemoryError) as error:
            self._fail(error)

    @staticmethod
    def _append(coming: Superbatch, rows: Sequence[Any]) -> None:
        for uses, of_table in zip(coming.uses, rows, strict=True):
            uses.append(of_table)

    def prepare(self, kept_bytes: Mapping[str, int]) -> None:
        """Begin to prepare the superbatch that was sampled, in a thread. kept_bytes: memory that stays taken,
        by purpose."""
        coming, packs = self.coming, self.packs
        assert coming is not None
        if coming.ahead.can_sample or self._epoch.following is not None:
            kept_bytes = {**kept_bytes, "next superbatch": packs.preparing_bytes(coming)}
        try:
            coming.lines, coming.purposes = _divide(packs, coming, kept_bytes)
        except MemoryBudgetError as error:
            return self._fail(error)
        coming.work_bytes = packs.memory_bytes // (2 if packs.reading is None else _WORK_SHARE)
        coming.swept = packs.thread.submit(packs.prepare, coming)

    def finish(self) -> AnnexRows | None:
        """Wait until the superbatch is prepared, and begin to read it. None: it is read at random."""
        coming, packs = self.coming, self.packs
        assert coming is not None
        assert coming.swept is not None
        try:
            by_packs = coming.swept.result()
        except (OSError, MemoryError) as error:
            self._fail(error)
            return None
        self.coming = None
        if not by_packs:
            packs.random_below = max(packs.random_below, self.count)
            packs.release(coming)
            return None
        packs.choices.append(coming.choice)
        return AnnexRows(packs, coming)

    def _fail(self, error: object) -> None:
        """Read the superbatch at random, and those after it."""
        self.packs.give_up(error)
        self.stop()

    def stop(self) -> None:
        """Drop what is being prepared. Minibatches of this epoch still come."""
        coming, self.coming = self.coming, None
        if coming is not None:
            self.packs.release(coming)
            if coming.ahead is not self.ahead:
                coming.ahead.close()

    def close(self) -> None:
        """End this epoch, and keep what is prepared of the next one. Idempotent."""
        if self.coming is not None and self.coming.ahead is not self.ahead:
            self.packs.keep(self.coming)
            self.coming = None
        self.stop()
        self.ahead.close()


def _divide(
    packs: Packs, superbatch: Superbatch, kept_bytes: Mapping[str, int]
) -> tuple[list[int], dict[str, int]]:
    """(lines by table, bytes by purpose) to read a superbatch. Raises MemoryBudgetError."""
    tables, uses = packs.tables, [u.native for u in superbatch.uses]
    forms = Outputs(tables, packs.dtype).forms
    longest = [u.longest for u in uses]
    output_bytes = sum(
        align_up(n * forms[t.name].out_row_bytes, 4096) for t, n in zip(tables, longest, strict=True)
    )
    pieces, piece_bytes = pieces_of(packs.memory_bytes, len(tables))
    purposes = {
        **kept_bytes,
        "outputs": 2 * output_bytes,  # one of them is the consumer's
        "window": 3 * superbatch.minibatch_bytes,
        "requests": 12 * sum(longest),
        "pieces": pieces * piece_bytes * len(tables),
    }
    left = packs.memory_bytes - sum(purposes.values())
    if left < 0:
        listing = " + ".join(f"{name} {format_bytes(n)}" for name, n in purposes.items())
        raise MemoryBudgetError(f"{format_bytes(packs.memory_bytes)} are too little for {listing}")
    read = [u.uses * t.row_bytes for t, u in zip(tables, uses, strict=True)]
    lines = [
        min(t.row_count, left * of_table // max(1, sum(read)) // _core.annex_row_bytes(t.row_bytes))
        for t, of_table in zip(tables, read, strict=True)
    ]
    purposes["lines"] = sum(
        n * _core.annex_row_bytes(t.row_bytes) for t, n in zip(tables, lines, strict=True)
    )
    return lines, purposes


class PackedRows(Rows):
    """Rows of an epoch, at random or by packs.

    begun: called when this has the window. release_cache: frees the cache, and returns the bytes that stay
    taken, by purpose.
    """

    def __init__(
        self,
        random: CachedRows,
        packer: Packer,
        *,
        begun: Callable[[PackedRows], None],
        release_cache: Callable[[], Mapping[str, int]],
    ) -> None:
        self.random, self._packer, self._begun = random, packer, begun
        self._release_cache = release_cache
        self.annex: AnnexRows | None = None  # that is read
        self._waits: list[float] = []  # of minibatches at random, until it is decided
        self._entered: deque[Ids] = deque()  # of minibatches that are read at random
        self._choice = Choice("random", 0)
        self._kept_bytes: Mapping[str, int] = {}

    @property
    def window(self) -> int:
        return self.random.window if self.annex is None else 0

    @property
    def planned(self) -> int:
        return self.random.planned if self.annex is None else 1

    def begin(self) -> None:
        self.random.begin()
        self._begun(self)
        packer, packs = self._packer, self._packer.packs
        long = packs.random_s * packer.count >= LEAST_WAIT_S
        asked = packs.options.reads == "pack"
        if packer.coming is None and (long or asked) and packer.count > packs.random_below:
            packer.begin(0)
        if packer.coming is not None:
            self._read_by_packs(0)

    def ids(self, minibatch: Any) -> Ids:
        return self.random.ids(minibatch)

    def enter(self, t: int, minibatch: Any, ids: Ids) -> None:
        if self.annex is None or not self.annex.has(t):
            self._packer.came(t, ids)
            self._entered.append(ids)
            self.random.enter(t, minibatch, ids)

    def plan(self, t: int) -> None:
        if self.annex is None or not self.annex.has(t):
            self.random.plan(t)

    def gather(self, t: int, minibatch: Any) -> Features:
        packer = self._packer
        if self.annex is None and packer.sampled and self.random.has_window:
            self._read_by_packs(t)
        begun, annex = time.perf_counter(), self.annex
        if annex is None:
            self._entered.popleft()
            while packer.sampling and not self.random.ready(t):
                packer.sample(1)
            features = self.random.gather(t, minibatch)
            choice = self._choice
        else:
            features = annex.gather(self.ids(minibatch))
            choice, self.random.gathered = annex.choice, t + 1
        seconds = time.perf_counter() - begun
        if annex is None:
            if not choice.minibatches:
                packer.packs.choices.append(choice)
            choice.minibatches += 1
        choice.returned += 1
        choice.actual_s += seconds
        if annex is None:
            self._consider(t, seconds)
        else:
            self._go_on(annex)
        return features

    def _consider(self, t: int, seconds: float) -> None:
        """After minibatch t at random: begin to sample ahead, if the rest of the epoch will wait for the disk
        long.

        Only the later half of the waits counts, because the cache is empty at first.
        """
        waits, packer = self._waits, self._packer
        if len(waits) == _EARLY or packer.coming is not None or packer.count <= packer.packs.random_below:
            return
        waits.append(seconds)
        if len(waits) < _EARLY and sum(waits) < _SOON_S:
            return
        later = waits[len(waits) // 2 :]
        packer.packs.random_s = sum(later) / len(later)
        if (packer.count - t - 1) * packer.packs.random_s >= LEAST_WAIT_S:
            packer.begin(t + 1, list(self._entered))

    def _read_by_packs(self, t: int) -> None:
        """Read the superbatch that was sampled, or is, by packs, from minibatch t on. Blocks until it is
        prepared: the memory is used for that."""
        packer = self._packer
        packer.sample(_core.ANNEX_MOST_STEPS)
        if packer.coming is not None and packer.coming.swept is None:
            self.random.leave()
            self._kept_bytes = self._release_cache()
            packer.prepare(self._kept_bytes)
        if packer.coming is None:
            return
        with stage("plan"):
            self.annex = packer.finish()
        if self.annex is not None:
            self.random.leave()
            self._release_cache()
            self._entered.clear()
            self.annex.skip_to(t)
            packer.begin_next(self.annex.end)

    def _go_on(self, annex: AnnexRows) -> None:
        """After a minibatch by packs: sample ahead, prepare, and go over to the next superbatch."""
        packer = self._packer
        packer.sample(_PACE)
        if packer.sampled:
            packer.prepare(self._kept_bytes)
        if annex.next < annex.end:
            return
        self._end_annex()
        if packer.coming is not None and packer.coming.ahead is packer.ahead:
            self._read_by_packs(annex.end)

    @property
    def has_window(self) -> bool:
        return self.random.has_window

    def lose_window(self) -> None:
        """Go on at random, without look-ahead: another epoch has begun."""
        self.random.lose_window()
        self._end_annex()
        self._packer.stop()

    def _end_annex(self) -> None:
        annex, self.annex = self.annex, None
        if annex is not None:
            annex.close()

    def close(self) -> None:
        self._end_annex()
        self._packer.close()
        self.random.close()
