"""PackSwitch: lets an EpochStream read by packs where that is faster. PackReader: reads a superbatch.

Made by FeatureLoader for an epoch that may use packs. An epoch begins with random reads, unless packs are
asked for, or read the epoch before and saved time until it ended or was left, or the disk is so slow that one
minibatch would wait long. If the epoch would wait for the disk for long, the rest is sampled ahead,
PackChooser chooses how to read it, and packs are made. While one superbatch is trained, the next one is
prepared. If random reads are cheaper, or packs fail, the stream goes on by random reads.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gids.errors import MemoryBudgetError, StorageError
from gids.loader.epoch_stream import NO_MEMORY, EpochStream, Failed, Sampled, forgetting
from gids.loader.learned import Choice, NextEpoch
from gids.loader.memory import page_bytes_read, rows_read
from gids.loader.pack_chooser import EARLY, PackChooser
from gids.loader.pack_reads import PackReads
from gids.loader.readers import Gathered, Reader
from gids.loader.row_source import EpochInput
from gids.loader.sampled_ahead import SampledAhead
from gids.packs import Layout, Reads, ScratchFull, Superbatch
from gids.profiling import stage

if TYPE_CHECKING:
    from gids.loader.feature_loader import FeatureLoader

T = TypeVar("T")

LEAST_WAIT_S = 4.0
"""Packs are not considered, nor the disk measured, for an epoch that would wait for it less than this."""

_MANY_ROWS = 10_000
"""Fewer rows are read soon enough from any SSD, and the disk is not measured for them."""

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
        prepared: NextEpoch | None = None,
    ) -> None:
        self._source, self._epoch, self._loader, self._packs = source, epoch, loader, packs
        self._prepared, self._learned = prepared, epoch.learned
        self._chooser = PackChooser(packs, loader, epoch)
        self._ids_of, self._following, device = epoch.ids_of, None, packs.device
        if device is not None:
            self._ids_of = lambda minibatch: device.ids_on_host(epoch.ids_of(minibatch))
        elif epoch.learned.longest:
            self._following = epoch.following
        self._size = 0  # minibatches of a superbatch, once it is known
        self._base = 0  # minibatches before the first superbatch
        self._begun = self._at_random = False
        self._waits: list[float] | None = None  # of the first minibatches, by random reads
        self._seconds = seconds
        self._superbatch: Superbatch | None = None  # that is trained
        self._sampled: SampledAhead[T] | None = None  # its minibatches
        self._next: Superbatch | None = None  # that is swept
        self._ahead: SampledAhead[T] | None = None  # its minibatches, or those that are being sampled
        self._tried_next = False
        self._only_random = False  # after this superbatch
        self._choice = Choice("random", 0)  # until one is made
        self._asked_at, self._sampled_s, self._consumed_s = 0.0, 0.0, 0.0
        self._saved_s = 0.0  # by packs, so far
        self._returned_at: float | None = None
        self._warm = False  # the consumer
        self._pid = os.getpid()
        self.opened: list[Any] = []

    # --- what the stream calls ---

    def before(self, stream: EpochStream[T]) -> None:
        """Called before each minibatch. Afterwards the stream has one that is due, or came to its end."""
        if os.getpid() != self._pid:  # a forked child has neither the threads nor the memory
            raise RuntimeError("this epoch was begun before a fork: call gids.open() in this process")
        self._asked_at, self._sampled_s = time.perf_counter(), self._seconds["sample"]
        if self._returned_at is not None:
            self._consumed_s = self._asked_at - self._returned_at
            self._consumed(self._consumed_s)
        if not self._begun:
            self._begin(stream)
        if not stream.has_window:
            return
        if (waits := self._waits) is not None and self._waits_long(stream, waits):
            self._end_random(stream, len(waits))
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
            ahead_s = now - self._returned_at - (self._seconds["sample"] - sampled_s)
            self._choice.actual_s += ahead_s
            self._returned_at = now
            if self._sampled is not None:
                # Random reads go on while the consumer works.
                self._saved_s += max(0.0, self._choice.random_s - self._consumed_s) - took_s - ahead_s
                came = self._sampled.base + self._superbatch.next
                lost_s = self._sampled.each_s * (self._source.count - came)  # if the epoch is left now
                self._learned.unpaid = 0 if self._saved_s >= lost_s else came
        elif self._waits is not None and stream.has_window:
            self._waits.append(took_s)

    def may_wait(self) -> bool:
        """Whether the stream may go on without lookahead for a while: what was swept would be lost."""
        return self._at_random

    def close(self) -> None:
        """End what is prepared. The stream closes all that is in `opened`."""
        self._superbatch = self._sampled = self._next = self._ahead = None

    # --- the beginning ---

    def _begin(self, stream: EpochStream[T]) -> None:
        """Begin with random reads, or with none if packs come first."""
        self._begun = True
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            self._go_on_with(prepared)
        elif self._packs.options.reads == "auto" and (self._learned.unpaid or not self._learned.by_packs):
            self._packs.release()  # of the epoch before
            if self._learned.unpaid or not self._first_waits_long():
                self._read_at_random(stream, self._source)
                self._waits = []

    def _first_waits_long(self) -> bool:
        """Whether the loader's first minibatch, which finds the cache empty, would wait for the disk long."""
        packs = self._packs
        first = None if self._learned.consumer_s else self._source.peek()
        if first is None:
            return False
        try:
            ids = self._ids_of(first)
            if sum(rows_read(ids, [t.name for t in packs.tables]).values()) < _MANY_ROWS:
                return False
            pages = sum(page_bytes_read(ids, [t]) / t.page_bytes for t in packs.tables)
            return pages / packs.random_reads_per_s() >= LEAST_WAIT_S
        except OSError:  # raised again by who reads
            return False

    def _go_on_with(self, prepared: NextEpoch) -> None:
        """Begin with what the epoch before prepared."""
        self._ahead, self._size = prepared.sampled, prepared.sampled.most
        self._next = superbatch = prepared.take()
        self.opened += prepared.opened
        with self._loader.source.lender.lock:
            self._loader.free_cache(self._epoch)
            if superbatch is not None:
                self._packs.machine = prepared.machine
        if superbatch is not None:
            self._chooser.chosen(superbatch.layout, prepared.sampled)

    def _waits_long(self, stream: EpochStream[T], waits: list[float]) -> bool:
        """After long waits, and at the latest after EARLY minibatches: whether the rest of the epoch would
        wait for the disk long.

        Only the later half of the waits counts, because the cache is empty at first. Waits come in bursts, as
        minibatches are read together, so that only EARLY of them show that the rest does not wait long. If
        worker processes sample the minibatches, packs are not considered before EARLY of them, however long
        the waits are.
        """
        done = len(waits)
        if done < EARLY and (self._source.beside or sum(waits) < _SOON_S):
            return False
        if done < self._learned.unpaid:  # this epoch, too, may be left before packs save time
            return False
        later = waits[done // 2 :]
        left = self._chooser.expected_count(self._epoch.count) - done
        long = left * sum(later) / len(later) >= LEAST_WAIT_S and not stream.sampled_all
        if long or done >= EARLY:
            self._waits = None
        return long

    def _end_random(self, stream: EpochStream[T], done: int) -> None:
        """End random reads, and prepare packs for the minibatches after those that are done."""
        self._waits, self._base = None, done
        held = stream.take_back()
        self._ahead = self._sample_ahead(held)
        if self._ahead is None:
            return self._read_at_random(stream, itertools.chain(forgetting(held), self._source))
        self._at_random = False

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
        if self._superbatch is not None:
            done = self._finish_superbatch()
            if done.last_pack < len(done.layout.packs):  # more packs than one superbatch may have
                superbatch = self._make(done.layout, done.last_pack, fill_resident=False)
                return self._train(stream, superbatch, done.end)
            self._end_of_sampled(stream)
            if self._at_random:
                return
        prepared, self._next, self._tried_next = self._next, None, False
        self._sampled, self._ahead = self._ahead or self._sample_ahead([]), None
        if self._sampled is None:
            return self._random(stream, 0)
        self._sampled.sample(1)
        if not len(self._sampled.spool):
            return self._end_of_sampled(stream)
        if prepared is None:
            prepared = self._prepare(self._sampled)
        self._train(stream, prepared, 0)

    def _prepare(self, sampled: SampledAhead[T]) -> Superbatch | None:
        """Sample a superbatch, choose how it is read, and make its packs. None: by random reads."""
        packs, layout = self._packs, None
        try:
            self._loader.free_cache(self._epoch)
            if self._size or self._choose_size(sampled):
                sampled.sample()
                begun = time.perf_counter()
                with stage("plan"):
                    layout = self._chooser.choose(sampled, self._left(sampled))
                packs.seconds["cut"] += time.perf_counter() - begun
            if layout is None:
                return None
            with self._loader.source.lender.lock:
                self._loader.free_cache(self._epoch)  # another stream may have built one meanwhile
                packs.machine = self._chooser.new_machine(sampled)
        except MemoryBudgetError as error:  # others have the memory
            if packs.options.reads != "auto":
                raise
            self._give_up(error)
            return None
        except (OSError, MemoryError) as error:
            self._give_up(NO_MEMORY if isinstance(error, MemoryError) else error)
            return None
        self._learned.by_packs = True
        return self._make(layout, fill_resident=True)

    def _choose_size(self, sampled: SampledAhead[T]) -> bool:
        """Choose the size of superbatches, once EARLY minibatches are sampled. False: random reads."""
        sampled.sample(EARLY - len(sampled.spool))
        while sampled.beside_s is None and not sampled.full:
            sampled.sample(1)
        if not sampled.full and self._chooser.choose_early(sampled, self._left(sampled)):
            return False
        self._size = sampled.most
        return bool(self._size)

    def _left(self, sampled: SampledAhead[T]) -> int | None:
        """Minibatches of the epoch from this superbatch on, if known."""
        return None if self._epoch.count is None else self._epoch.count - sampled.base

    def _sample_ahead(self, first: list[T], next_epoch: Sampled[T] | None = None) -> SampledAhead[T] | None:
        """To sample further; None without scratch. first: those that are sampled. next_epoch: the source of
        the next epoch."""
        packs, before = self._packs, self._sampled
        base = self._base if before is None else before.base + len(before.spool)
        try:
            if packs.scratch is None:
                self._only_random = True
                self._learned.read_at_random("there is no scratch")
                return None
            sampled = SampledAhead(
                self._source if next_epoch is None else next_epoch,
                self._ids_of,
                self._epoch.bytes_of,
                packs,
                self._seconds,
                first=first,
                base=base if next_epoch is None else 0,
                goes_on=self._following is not None or next_epoch is not None,
                spare=next_epoch is not None,
            )
        except OSError as error:
            self._give_up(error)
            return None
        if self._size:
            sampled.most = self._size
        if next_epoch is None:
            self.opened.append(sampled)
        return sampled

    def _make(self, layout: Layout, first_pack: int = 0, *, fill_resident: bool) -> Superbatch | None:
        """A superbatch whose sweep has started; None if scratch or a file does not allow it.

        If scratch has no room for it beside the one that is trained, that is tried again afterwards.
        """
        packs, beside = self._packs, self._superbatch is not None
        sampled = self._ahead if beside else self._sampled
        assert packs.machine is not None
        assert packs.scratch is not None
        assert sampled is not None
        if not beside:
            sampled.forget_counts()
        begun, superbatch = time.perf_counter(), None
        try:
            superbatch = Superbatch(
                packs.machine,
                sampled.spool,
                layout,
                first_pack,
                packs.scratch,
                room_bytes=self._chooser.room_bytes(sampled),
                fill_resident=fill_resident,
            )
            self.opened.append(superbatch)
            packs.seconds["cut"] += time.perf_counter() - begun
            superbatch.prepare()
        except OSError as error:
            if superbatch is not None:
                self._drop(superbatch)
            if not (beside and isinstance(error, ScratchFull)):
                self._give_up(error)
            return None
        sampled.forget_counts()
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
                with stage("sweep"):
                    superbatch.begin()
            except OSError as error:
                self._drop(superbatch)
                self._give_up(error)
                return self._random(stream, first)
        self._superbatch = superbatch
        reader = PackReader(superbatch)
        stream.read(reader, reader.minibatches())
        self._choice = choice = self._learned.choices[-1]
        choice.superbatches += 1
        choice.packs += superbatch.pack_count
        choice.resident_rows = superbatch.resident_rows
        packs.counters["superbatches"] += 1
        packs.counters["packs"] += superbatch.pack_count

    def _work_ahead(self, superbatch: Superbatch) -> None:
        """Prepare the next superbatch a little: sample, then sweep, then read its first pack."""
        sampled = self._sampled
        assert sampled is not None
        if not sampled.overlap or self._only_random or superbatch.last_pack < len(superbatch.layout.packs):
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
                self._next = self._make(layout, fill_resident=False)
                if self._next is not None:
                    self._chooser.chosen(layout, ahead)
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
        try:
            if not ahead.full:
                expected = min(ahead.most, self._chooser.expected_count(self._epoch.count))
                ahead.sample(-(-2 * max(1, expected - len(ahead.spool)) // max(1, left)))
            elif not coming.begun and len(ahead.spool):
                self._chooser.make_next(coming, superbatch.layout.resident)
        except MemoryError:  # no room for more packs, such as by `ulimit -v`: the next epoch makes its own
            learned.drop_next()
        except BaseException as error:  # Ctrl-C, too: a minibatch that was sampled may be lost
            dropped = not coming.open  # by another thread, which iterates the same loader
            if learned.next_epoch is coming:
                learned.drop_next()
            if not (dropped and isinstance(error, Exception)):
                raise

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
        self._drop_next()
        if sampled is None:
            minibatches: Iterator[T] = self._source
        elif ahead is None:
            minibatches = sampled.rest(first)
            if sampled.reason:
                self._give_up(sampled.reason)
        else:
            minibatches = itertools.chain(sampled.spooled(first), ahead.rest())
        if self._learned.choices:
            self._choice = self._chooser.random_choice(len(sampled.spool) - first if sampled else 0)
        self._read_at_random(stream, minibatches)

    def _read_at_random(self, stream: EpochStream[T], minibatches: Iterator[T]) -> None:
        self._at_random = True
        stream.read(self._loader.cache_reader(self._epoch), minibatches)
