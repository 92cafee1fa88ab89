"""PackSwitch: lets an EpochStream read by packs where that is faster. PackReader: reads a superbatch.

Made by FeatureLoader for an epoch that may use packs. The epoch begins with random reads. If it waits
for the disk, a superbatch is sampled ahead in that time, and PackChooser chooses how to read it. Packs take
over once they are made; if that takes long, random reads go on meanwhile: a race. If packs are asked for, or
read the epoch before, there are no random reads beside them. While one superbatch is trained, the next one is
prepared. If random reads are cheaper, or packs fail, the stream goes on by random reads.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gids.errors import MemoryBudgetError, StorageError
from gids.loader.epoch_stream import EpochStream, Failed, Sampled, forgetting
from gids.loader.learned import Choice, NextEpoch
from gids.loader.memory import rows_read
from gids.loader.observer import Observers
from gids.loader.pack_chooser import EARLY, LEAST_WAIT_S, MOST_READS_PER_S, Alone, PackChooser
from gids.loader.pack_reads import PackReads
from gids.loader.readers import Gathered, Reader
from gids.loader.row_source import EpochInput
from gids.loader.sampled_ahead import SampledAhead
from gids.packs import Ahead, Layout, PackMachine, Reads, Superbatch

if TYPE_CHECKING:
    from gids.loader.feature_loader import FeatureLoader

T = TypeVar("T")

_POLL_S = 0.001

_LONG_S = 5.0
"""Random reads go on during sweeps that take longer."""

_REST = 3
"""Random reads beside packs that are prepared rest three times as long as they take."""

_SOON_S = 0.5
"""So many seconds of waiting for the disk show how long the epoch will wait."""


class PackReader(Reader):
    """Reads the minibatches of a superbatch, which come from its spool."""

    by_ids = False

    def __init__(self, superbatch: Superbatch) -> None:
        self._superbatch = superbatch
        self._reads: Reads | None = None  # of the minibatch that is due; None if it could not be read

    def minibatches(self) -> Iterator[Any]:
        """To the end of the superbatch. Each is taken when the one before was gathered."""
        superbatch = self._superbatch
        while superbatch.next < superbatch.end:
            try:
                minibatch, self._reads = superbatch.take()
            except StorageError as error:
                minibatch, self._reads = Failed.of(error), None
            yield minibatch
            del minibatch

    def gather(self) -> Gathered:
        reads, self._reads = self._reads, None
        return ({} if reads is None else self._superbatch.gather(reads)), None


class PackSwitch(Generic[T]):
    """For one epoch. packs: of the loader. prepared: what is made of this epoch already.

    It must not refer to the stream, which is to end when it is dropped.

    Attributes: opened: what must be closed with the stream.
    """

    def __init__(
        self,
        source: Sampled[T],
        epoch: EpochInput[T],
        loader: FeatureLoader,
        packs: PackReads,
        *,
        seconds: dict[str, float],
        observers: Observers,
        prepared: NextEpoch | None = None,
    ) -> None:
        self._source, self._epoch, self._loader, self._packs = source, epoch, loader, packs
        self._prepared, self._learned = prepared, epoch.learned
        self._chooser = PackChooser(packs, loader, epoch)
        self._together = epoch.together or Alone()
        self._ids_of, self._following, device = epoch.ids_of, None, packs.device
        if device is not None:
            self._ids_of = lambda minibatch: device.ids_on_host(epoch.ids_of(minibatch))
        elif epoch.together is None and epoch.learned.longest:
            self._following = epoch.following
        self._count, self._size = epoch.count, 0  # minibatches of the epoch, and of a superbatch
        self._base = 0  # minibatches before the first superbatch
        self._begun = self._at_random = False
        self._waits: list[float] | None = None  # of the first minibatches, by random reads
        self._racing = False  # packs are being prepared
        self._beside = False  # random reads go on meanwhile
        self._coming: PackMachine | None = None  # the memory of these packs
        self._judged = False
        self._resume_at = 0.0  # random reads
        self._seconds, self._observers = seconds, observers
        self._superbatch: Superbatch | None = None  # that is trained
        self._sampled: SampledAhead[T] | None = None  # its minibatches
        self._next: Superbatch | None = None  # that is swept
        self._ahead: SampledAhead[T] | None = None  # its minibatches, or those that are being sampled
        self._tried_next = False
        self._only_random = False  # after this superbatch
        self._choice = Choice("random", 0)  # until one is made
        self._asked_at, self._sampled_s = 0.0, 0.0
        self._returned_at: float | None = None
        self._warm = False  # the consumer
        self._pid = os.getpid()
        self.opened: list[Any] = []

    # --- what the stream calls ---

    def before(self, stream: EpochStream[T]) -> None:
        """Called before each minibatch. Afterwards the stream has one that is due, or came to its end."""
        if os.getpid() != self._pid:  # a forked child has neither the threads nor the memory
            raise RuntimeError("this epoch was begun before a fork: make a new loader in this process")
        self._asked_at, self._sampled_s = time.perf_counter(), self._seconds["sample"]
        if self._returned_at is not None:
            self._consumed(self._asked_at - self._returned_at)
        if not self._begun:
            self._begin(stream)
        if not stream.has_window:
            return
        if self._racing:
            self._race(stream)
        while not self._at_random:
            superbatch = self._superbatch
            if superbatch is not None and superbatch.next < superbatch.end:
                return
            self._advance(stream)

    def failed(self, stream: EpochStream[T], error: OSError) -> bool:
        """Called when gathering failed. Returns whether it will succeed now, by random reads."""
        if self._superbatch is None:
            return False
        self._give_up(error)
        index = self._finish_superbatch().next
        self._drop_next()
        self._random(stream, index)
        return True

    def after(self, stream: EpochStream[T], *, returned: bool) -> None:
        """Called after each minibatch, or its error."""
        self._returned_at = time.perf_counter()
        took_s = self._returned_at - self._asked_at - (self._seconds["sample"] - self._sampled_s)
        self._choice.actual_s += took_s
        if not returned:
            return
        self._choice.returned += 1
        if self._superbatch is not None:
            self._packs.counters["minibatches"] += 1
            sampled_s = self._seconds["sample"]
            try:
                self._work_ahead(self._superbatch)
            except OSError as failed:  # of scratch; this minibatch is whole
                self._give_up(failed)
            now = time.perf_counter()
            self._choice.actual_s += now - self._returned_at - (self._seconds["sample"] - sampled_s)
            self._returned_at = now
        elif self._waits is not None and stream.has_window:
            self._judge(stream, self._waits, took_s)

    def may_wait(self) -> bool:
        """Whether the stream may go on without lookahead for a while: what was swept would be lost."""
        return self._at_random and self._next is None

    def close(self) -> None:
        """End what is prepared. The stream closes all that is in `opened`."""
        self._superbatch = self._sampled = self._next = self._ahead = None
        self._racing, self._coming = False, None

    # --- the first packs, which are prepared alone or beside random reads ---

    def _begin(self, stream: EpochStream[T]) -> None:
        """Begin with random reads, unless packs are asked for, or were chosen in the epoch before.

        Prepare packs at once if no disk could read the epoch soon.
        """
        self._begun = True
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            return self._go_on_with(prepared)
        auto = self._packs.options.reads == "auto"
        self._beside = auto and self._together.overlap and not self._learned.by_packs
        if not self._beside:
            self._loader.free_cache(self._epoch)
            return self._begin_race(stream, 0, [])
        first, packs, rows = self._source.peek(), self._packs, 0
        with suppress(Exception):  # raised again where this minibatch is due
            if first is not None and not isinstance(first, Failed):
                rows = sum(rows_read(self._ids_of(first), [t.name for t in packs.tables]).values())
        packs.release()  # of the epoch before
        count = self._chooser.expected_count(self._count)
        if rows * count >= LEAST_WAIT_S * MOST_READS_PER_S and not self._source.beside:
            self._begin_race(stream, 0, [])
        else:
            self._read_at_random(stream, self._source)
            self._waits = []

    def _go_on_with(self, prepared: NextEpoch) -> None:
        """Begin with what the epoch before prepared."""
        self._loader.free_cache(self._epoch)
        self._ahead, self._size = prepared.sampled, prepared.sampled.most
        self._next = superbatch = prepared.take()
        self.opened += prepared.opened
        if superbatch is not None:
            self._packs.machine = prepared.machine
            self._chooser.chosen(superbatch.layout, prepared.sampled)

    def _judge(self, stream: EpochStream[T], waits: list[float], waited_s: float) -> None:
        """Consider packs after EARLY minibatches, or long waiting, if the rest would wait for the disk long.

        Only the later half of the waits counts, because the cache is empty at first. If worker processes
        sample the minibatches, packs are not considered before EARLY of them, however long the waits are.
        """
        waits.append(waited_s)
        done = len(waits)
        if done < EARLY and (self._source.beside or sum(waits) < _SOON_S):
            return
        later = waits[done // 2 :]
        left = self._chooser.expected_count(self._count) - done
        if left * sum(later) / len(later) >= LEAST_WAIT_S and not stream.sampled_all:
            self._begin_race(stream, done, stream.take_back())
        self._waits = None

    def _begin_race(self, stream: EpochStream[T], done: int, held: list[T]) -> None:
        """Sample into a spool from now on. done: minibatches that were returned. held: sampled and not."""
        self._base = done
        try:
            self._sampled = self._sample_ahead(held)
        except OSError as error:
            self._give_up(error)
        if self._sampled is None:
            self._read_at_random(stream, itertools.chain(forgetting(held), self._source))
        else:
            self._racing, self._size = True, self._sampled.most
            self.opened.append(self._packs.beside)
            if self._beside:
                self._read_at_random(stream, self._sampled.all(), reads_ahead=False)

    def _race(self, stream: EpochStream[T]) -> None:
        """Prepare packs until a minibatch is there by random reads, if they go on, or packs take over.

        Random reads get a share of the time: many short reads starve the long ones.
        """
        sampled = self._sampled
        assert sampled is not None
        begun = time.perf_counter()  # the reads of the minibatch that is due, about
        while self._racing:
            superbatch = self._next
            if superbatch is not None and superbatch.ready:
                return self._hand_over(stream, superbatch, sampled)
            now = time.perf_counter()
            enough = len(sampled.spool) >= EARLY and sampled.beside_s is not None
            if stream.idle and not self._judged and (enough or (sampled.full and len(sampled.spool))):
                self._judge_early(stream, sampled)
                continue
            try:
                if stream.idle and sampled.full and superbatch is None:
                    self._prepare(stream, sampled)
                elif self._beside and not (stream.idle and now < self._resume_at) and stream.ready():
                    self._resume_at = now + _REST * (now - begun)
                    return
                elif sampled.full:
                    time.sleep(_POLL_S)
                else:
                    sampled.sample(1, settle=False)
                    self._packs.beside.nbytes = sampled.counts_bytes
            except OSError as error:
                self._give_up(error)
                self._end_race(stream, sampled)
            if stream.idle:
                begun = time.perf_counter()

    def _judge_early(self, stream: EpochStream[T], sampled: SampledAhead[T]) -> None:
        """Agree on the minibatches of a superbatch, or random reads."""
        self._judged, sampled.done = True, stream.index
        wanted, left, together = sampled.most, self._left(sampled), self._together
        try:
            sampled.settle()
            overlap = not self._beside and together.overlap and (left is None or wanted <= left)
            ahead = Ahead.SWEPT if overlap else Ahead.NOTHING
            if not sampled.full and self._chooser.choose_early(sampled, left, ahead):
                wanted = 0
        except OSError as error:
            self._give_up(error)
            wanted = 0
        if agreed := together.agree(wanted, sampled.room):
            self._size = sampled.most = min(sampled.most, agreed)
            return
        if wanted and sampled.room < EARLY:
            reason = f"scratch ({self._packs.scratch}) has room for too few minibatches"
            self._chooser.give_up(reason, self._count or 0)
        elif wanted and self._count is not None:
            self._learned.read_at_random("another process reads by random reads", self._count)
        self._end_race(stream, sampled)

    def _prepare(self, stream: EpochStream[T], sampled: SampledAhead[T]) -> None:
        """Choose how the rest of the sampled minibatches is read, and make packs; if that is long, beside."""
        packs, begun, layout = self._packs, time.perf_counter(), None
        sampled.done = index = stream.index if self._beside else 0
        if index < len(sampled.spool):
            with self._observers.stage("plan"):
                if not self._beside:
                    self._loader.free_cache(self._epoch)
                layout = self._chooser.choose(sampled, self._left(sampled))
        packs.seconds["cut"] += time.perf_counter() - begun
        if layout is None:
            return self._end_race(stream, sampled)
        first_pack = layout.first_pack(index)
        if self._beside and self._chooser.sweep_s(sampled) > _LONG_S and not packs.on_device:
            self._coming = self._chooser.new_machine(sampled)
            self._next = self._make(layout, first_pack, self._coming, fill_resident=True, beside=True)
            packs.beside.nbytes = self._coming.plan.beside_bytes(layout.resident.lists_bytes)
            if self._next is None:
                self._end_race(stream, sampled)
        else:
            self._end_random(stream, sampled)
            self._learned.by_packs = True
            self._train(stream, self._make_first(layout, first_pack, sampled), index)

    def _hand_over(self, stream: EpochStream[T], superbatch: Superbatch, sampled: SampledAhead[T]) -> None:
        """Read by packs from now on, in place of random reads."""
        packs, index = self._packs, stream.index
        try:
            superbatch.finish_sweep()
        except OSError as error:
            self._give_up(error)
            return self._end_race(stream, sampled)
        if index >= superbatch.end:
            return self._end_race(stream, sampled)
        self._end_random(stream, sampled)
        self._next = None
        packs.machine, self._coming = self._coming, None
        self._train(stream, superbatch, index)

    def _end_random(self, stream: EpochStream[T], sampled: SampledAhead[T]) -> None:
        """End random reads, and free their memory."""
        self._racing = self._at_random = False
        self._packs.beside.close()
        after = len(sampled.spool) - stream.index
        sampled.put_back(stream.take_back()[after:])
        self._loader.free_cache(self._epoch)

    def _end_race(self, stream: EpochStream[T], sampled: SampledAhead[T]) -> None:
        """Go on by random reads only."""
        self._racing, stream.reads_ahead = False, True
        self._packs.beside.close()
        self._packs.release()
        minibatches = sampled.rest()
        self._drop_next()
        if self._coming is not None:
            self._coming.close()
            self._coming = None
        if sampled.reason:
            self._give_up(sampled.reason)
        if self._learned.choices:
            self._choice = self._chooser.random_choice(len(sampled.spool))
        if not self._beside:
            self._read_at_random(stream, minibatches)

    def _consumed(self, seconds: float) -> None:
        """Keep a moving average of the consumer's seconds per minibatch. The first one warms up."""
        learned = self._learned
        if not self._warm:
            self._warm = True
            return
        before = learned.consumer_s
        learned.consumer_s = seconds if not before else 0.9 * before + 0.1 * seconds

    def _give_up(self, reason: object) -> None:
        """Read at random, once this superbatch is trained, and in later epochs."""
        self._only_random = True
        self._chooser.give_up(str(reason))

    # --- one superbatch after the other ---

    def _advance(self, stream: EpochStream[T]) -> None:
        """Begin the next superbatch, or go on by random reads, or come to the end of the minibatches."""
        packs = self._packs
        if self._superbatch is not None:
            done = self._finish_superbatch()
            if done.last_pack < len(done.layout.packs):  # more packs than one superbatch may have
                superbatch = self._make(done.layout, done.last_pack, packs.machine, fill_resident=False)
                return self._train(stream, superbatch, done.end)
            self._end_of_sampled(stream)
            if self._at_random:
                return
        prepared, self._next = self._next, None
        sampled = self._next_sampled()
        if sampled is None:
            return self._random(stream, 0)
        sampled.sample(1)
        if not len(sampled.spool):
            return self._end_of_sampled(stream)
        if prepared is not None:
            return self._train(stream, prepared, 0)
        self._racing, self._judged, self._beside = True, True, False
        self._race(stream)

    def _left(self, sampled: SampledAhead[T]) -> int | None:
        """Minibatches of the epoch from this superbatch on, if known."""
        return None if self._count is None else self._count - sampled.base

    def _next_sampled(self) -> SampledAhead[T] | None:
        """The minibatches of the next superbatch, sampled as far as they are; None without scratch."""
        if self._ahead is not None:
            self._sampled, self._ahead = self._ahead, None
        else:
            try:
                self._sampled = self._sample_ahead([])
            except OSError as error:
                self._give_up(error)
                self._sampled = None
        self._tried_next = False
        return self._sampled

    def _sample_ahead(
        self, first: Iterable[T], next_epoch: Sampled[T] | None = None
    ) -> SampledAhead[T] | None:
        """To sample further. first: those that are sampled. next_epoch: the source of the next epoch."""
        packs, before = self._packs, self._sampled
        if packs.scratch is None:
            self._only_random = True
            self._learned.read_at_random("there is no scratch")
            return None

        base = self._base if before is None else before.base + len(before.spool)
        sampled = SampledAhead(
            self._source if next_epoch is None else next_epoch,
            self._ids_of,
            self._epoch.bytes_of,
            packs,
            self._observers,
            self._seconds,
            first=first,
            base=base if next_epoch is None else 0,
            next_epoch=Ahead.SWEPT if self._following or next_epoch else Ahead.NOTHING,
            spare=next_epoch is not None,
        )
        if self._size:
            sampled.most = self._size
        if next_epoch is None:
            self.opened.append(sampled)
        return sampled

    def _make_first(self, layout: Layout, first_pack: int, sampled: SampledAhead[T]) -> Superbatch | None:
        """As _make(), with new memory. None also if others have taken a device's memory meanwhile."""
        try:
            machine = self._packs.machine = self._chooser.new_machine(sampled)
        except MemoryBudgetError as error:
            if self._packs.options.reads != "auto":
                raise
            self._give_up(error)
            return None
        return self._make(layout, first_pack, machine, fill_resident=True)

    def _make(
        self,
        layout: Layout,
        first_pack: int,
        machine: PackMachine | None,
        *,
        fill_resident: bool,
        beside: bool = False,
    ) -> Superbatch | None:
        """A superbatch whose sweep has started; None if scratch or a file does not allow it."""
        packs, sampled = self._packs, self._ahead if self._superbatch is not None else self._sampled
        assert machine is not None
        assert packs.scratch is not None
        assert sampled is not None
        sampled.forget_counts()
        begun, superbatch = time.perf_counter(), None
        try:
            superbatch = Superbatch(
                machine,
                sampled.spool,
                layout,
                first_pack,
                packs.scratch,
                room_bytes=self._chooser.room_bytes(sampled),
                fill_resident=fill_resident,
                beside=beside,
            )
            self.opened.append(superbatch)
            packs.seconds["cut"] += time.perf_counter() - begun
            superbatch.prepare()
        except OSError as error:
            if superbatch is not None:
                self._drop(superbatch)
            self._give_up(error)
            return None
        return superbatch

    def _train(self, stream: EpochStream[T], superbatch: Superbatch | None, first: int) -> None:
        """Train a superbatch from a minibatch on, once it is swept. Samples the next one meanwhile.

        Without a superbatch, which could not be made, these minibatches are read at random.
        """
        packs, sampled = self._packs, self._sampled
        if superbatch is None:
            return self._random(stream, first)
        assert sampled is not None
        if not superbatch.begun:
            try:
                if not sampled.last and self._ahead is None:
                    self._ahead = self._sample_ahead(sampled.left)
                while self._ahead is not None and not self._ahead.full and not superbatch.ready:
                    self._ahead.sample(1)
                begun = time.perf_counter()
                with self._observers.stage("sweep"):
                    self._together.wait_for(lambda: superbatch.ready)
                    packs.seconds["sweep"] += time.perf_counter() - begun
                    superbatch.begin(first=first)
            except OSError as error:
                self._drop(superbatch)
                self._give_up(error)
                return self._random(stream, max(first, superbatch.first))
        self._superbatch = superbatch
        reader = PackReader(superbatch)
        minibatches = reader.minibatches()
        # Only who observes reads ids at once; features are read in the order of the device's stream.
        stream.read(reader, packs.settled(minibatches) if self._observers.any else minibatches)
        self._choice = choice = self._learned.choices[-1]
        if first > superbatch.first:
            self._learned.choice = None  # what it takes is not what was predicted
        choice.superbatches += 1
        choice.packs += superbatch.pack_count
        choice.resident_rows = superbatch.resident_rows
        packs.counters["superbatches"] += 1
        packs.counters["packs"] += superbatch.pack_count

    def _work_ahead(self, superbatch: Superbatch) -> None:
        """Prepare the next superbatch a little: sample, then sweep, then read its first pack."""
        sampled, packs = self._sampled, self._packs
        assert sampled is not None
        if not sampled.ahead or self._only_random or superbatch.last_pack < len(superbatch.layout.packs):
            return
        if sampled.last:
            return self._prepare_next_epoch(superbatch)
        if self._ahead is None:
            self._ahead = self._sample_ahead(sampled.left)
        ahead = self._ahead
        if ahead is None:
            return
        if not ahead.full:
            left = superbatch.end - superbatch.next  # sampled when half of them are trained
            ahead.sample(-(-2 * (ahead.most - len(ahead.spool)) // max(1, left)))
        elif self._next is None and not self._tried_next and len(ahead.spool):
            self._tried_next = True
            layout = self._chooser.choose_again(ahead, superbatch.layout.resident)
            if layout is not None:
                self._next = self._make(layout, 0, packs.machine, fill_resident=False)
        coming = self._next
        if coming is not None and not coming.begun and superbatch.in_last_pack and coming.ready:
            try:
                coming.begin(1 - superbatch.last_half)
            except OSError as error:
                self._drop_next()
                self._give_up(error)

    def _prepare_next_epoch(self, superbatch: Superbatch) -> None:
        """Sample the next epoch a little; once that is done, make its packs in the background."""
        packs, learned = self._packs, self._learned
        if learned.next_epoch is None and self._following is not None:
            following, self._following = self._following(), None
            if following is None:
                return
            source = Sampled(following)
            sampled = self._sample_ahead([], source)
            if sampled is not None:
                packs.prepare_next(learned, NextEpoch(following, source, sampled))
        coming = learned.next_epoch
        if coming is None or not coming.open:
            return
        ahead, left = coming.sampled, superbatch.end - superbatch.next
        if not ahead.full:
            expected = min(ahead.most, self._chooser.expected_count(self._count))
            ahead.sample(-(-2 * max(1, expected - len(ahead.spool)) // max(1, left)))
        elif not coming.begun and len(ahead.spool):
            self._chooser.make_next(coming, superbatch.layout.resident)

    def _finish_superbatch(self) -> Superbatch:
        superbatch, self._superbatch = self._superbatch, None
        assert superbatch is not None
        self._drop(superbatch)
        return superbatch

    def _drop_next(self) -> None:
        superbatch, self._next = self._next, None
        if superbatch is not None:
            self._drop(superbatch)

    def _drop(self, superbatch: Superbatch) -> None:
        superbatch.close()
        self.opened.remove(superbatch)

    def _end_of_sampled(self, stream: EpochStream[T]) -> None:
        """All minibatches in the spool were returned: what comes after them."""
        sampled = self._sampled
        assert sampled is not None
        sampled.close()
        self.opened.remove(sampled)
        if sampled.reason:
            self._give_up(sampled.reason)
        if sampled.end is not None:
            self._read_at_random(stream, sampled.rest(len(sampled.spool)))
        elif self._only_random:
            self._random(stream, len(sampled.spool))
        self._sampled = None

    def _random(self, stream: EpochStream[T], first: int) -> None:
        """Go on by random reads to the end: what is in the spool from `first` on, then the rest."""
        sampled, ahead = self._sampled, self._ahead
        self._packs.release()
        if self._learned.choices:
            self._choice = self._chooser.random_choice(len(sampled.spool) - first if sampled else 0)
        if sampled is None:
            self._read_at_random(stream, self._source)
        elif ahead is None:
            self._read_at_random(stream, sampled.rest(first))
        else:
            self._read_at_random(stream, itertools.chain(sampled.spooled(first), ahead.rest()))

    def _read_at_random(
        self, stream: EpochStream[T], minibatches: Iterator[T], *, reads_ahead: bool = True
    ) -> None:
        self._at_random = True
        stream.read(self._loader.cache_reader(self._epoch), minibatches, reads_ahead=reads_ahead)
