"""Packer: prepares superbatches of an epoch, one after the other. PackedRows: the epoch's rows, in both ways.

A superbatch is sampled into a spool, its annex is planned and written, and its minibatches are read from
there: the first one in a pause, the next ones beside the one that is read. Once per superbatch, measured
seconds decide. If that fails, it is read at random.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gids import _core
from gids.errors import MemoryBudgetError
from gids.loader.annex_rows import AnnexRows, DeviceAnnexRows, divide
from gids.loader.queue import without_frames
from gids.loader.rows import CachedRows, EpochInput, Features, Ids, Rows
from gids.loader.superbatch import Ahead, Choice, Packs, Superbatch
from gids.packs.annex import Annex, RowUses
from gids.packs.spool import MOST_ROWS, NotSpoolable, Spool, rows_of
from gids.profiling import stage
from gids.sizes import format_bytes

LEAST_WAIT_S = 4.0
"""Packs are not considered, nor the disk measured, for an epoch that would wait for it less than this."""

_EARLY = 16
"""The last so many minibatches show how long the epoch will wait for the disk, …"""

_SOON_S = 0.5
"""… or fewer, if they waited so long together."""

_PACE = 4
"""Minibatches that are sampled ahead with each one that comes from the annex."""

MOST_STEPS = min(2048, _core.ANNEX_MOST_STEPS)
"""Minibatches of a superbatch, at most."""

_PREPARING_SHARE = 3
"""Preparing a superbatch takes at most a third of the memory, which limits its length."""

_SCRATCH_SHARE = 8
"""Its spool takes at most an eighth of the scratch, …"""

_COPIED_SHARE = 3
"""… and its copies a third, so that two superbatches find room. How many the first one has is not known."""


def most_rows(memory_bytes: int) -> int:
    """The most rows of a table for which this memory is enough to plan packs."""
    return min(MOST_ROWS - 1, memory_bytes // _PREPARING_SHARE // Annex.ROW_BYTES)


class Packer:
    """Prepares one superbatch of an epoch at a time.

    It is idle (coming is None), sampling (coming.swept is None), sweeping, or ready (coming.swept is done).
    ahead: the epoch's minibatches. coming: what is prepared of them already.
    """

    def __init__(
        self, packs: Packs, epoch: EpochInput[Any], ahead: Ahead[Any], coming: Superbatch | None
    ) -> None:
        self.packs, self._epoch, self.ahead, self.coming = packs, epoch, ahead, coming

    def count(self, done: int) -> int:
        """Minibatches of the epoch. If that is not known: twice as many as are done."""
        return 2 * done if self._epoch.count is None else self._epoch.count

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
                len(coming) < MOST_STEPS
                and packs.preparing_bytes(coming) < packs.memory_bytes // _PREPARING_SHARE
                and coming.spool.bytes_written < scratch.limit_bytes // _SCRATCH_SHARE
                and packs.copied_bytes(coming) < scratch.limit_bytes // _COPIED_SHARE
            )
        )

    @property
    def sampled(self) -> bool:
        """Whether a superbatch was sampled, is not prepared yet, and finds scratch beside the one that is
        read."""
        coming = self.coming
        if coming is None or coming.swept is not None or self.sampling:
            return False
        return self.packs.has_scratch(coming)

    def begin(self, first: int, entered: Sequence[Ids] = ()) -> None:
        """Begin to sample. first: the number of the first minibatch. entered: ids of those from there on that
        were sampled before."""
        self._begin(self.ahead, first, entered)

    def begin_next(self, first: int) -> None:
        """Begin to sample the minibatches that follow, perhaps of the next epoch, if there are some."""
        if self.coming is not None or self.packs.random_below == math.inf:
            return
        if self.packs.coming is not None and not self.ahead.can_sample:
            return  # another loader's next epoch is prepared
        if self.ahead.can_sample:
            return self._begin(self.ahead, first, ())
        if not isinstance(self.ahead.end, StopIteration) or self._epoch.following is None:
            return
        if (following := self._epoch.following()) is not None:
            self._begin(self.packs.new_ahead(following), 0, ())

    def _begin(self, ahead: Ahead[Any], first: int, entered: Sequence[Ids]) -> None:
        packs = self.packs
        try:
            spool = Spool(packs.scratch)
            ahead.spool(spool)
            uses = [RowUses(t, packs.scratch) for t in packs.tables]
            self.coming = Superbatch(ahead, first, spool, uses)
            for ids in entered:
                self._append(self.coming, rows_of(self._on_host(ids), packs.tables))
        except (OSError, MemoryError) as error:
            self._fail(error)

    def sample(self, count: int) -> None:
        """Sample so many minibatches more, while there is room. What fails comes in its place later."""
        begun = time.perf_counter()
        with stage("sample"):
            while count and self.sampling:
                self._sample()
                count -= 1
        coming = self.coming
        if coming is not None and not len(coming) and not coming.ahead.can_sample:
            self.stop()  # its first minibatch failed, or is too large, or there is none
        self.packs.sampled_s["sample"] += time.perf_counter() - begun

    def _sample(self) -> None:
        coming, self.coming = self.coming, None  # Ctrl-C leaves none that is half done
        assert coming is not None
        failed = None
        for minibatch in coming.ahead.sample():
            failed = self._put(coming, minibatch)
        self.coming = coming
        if failed is not None:
            self._fail(failed)

    def _put(self, coming: Superbatch, minibatch: Any) -> Exception | None:
        """Returns why it can be in no superbatch: then it comes at random."""
        packs = self.packs
        try:
            rows = rows_of(self._on_host(self._epoch.ids_of(minibatch)), packs.tables)
            nbytes = max(self._epoch.bytes_of(minibatch), 8 * sum(map(len, rows)))
        except Exception:  # raised when it is due
            coming.ahead.hold(minibatch)
            return None
        try:
            with self._spooling():
                coming.spool.put(minibatch)
        except (NotSpoolable, OSError, MemoryError) as error:
            coming.ahead.hold(minibatch)
            return without_frames(error)
        coming.minibatch_bytes = max(coming.minibatch_bytes, nbytes)
        try:
            self._append(coming, rows)
        except (OSError, MemoryError) as error:
            return without_frames(error)
        return None

    def _on_host(self, ids: Ids) -> Ids:
        on = self.packs.on_device
        return ids if on is None else on.ids_on_host(ids)

    def _spooling(self) -> AbstractContextManager[object]:
        on = self.packs.on_device
        return nullcontext() if on is None else on.spooling()

    @staticmethod
    def _append(coming: Superbatch, rows: Sequence[Any]) -> None:
        for uses, of_table in zip(coming.uses, rows, strict=True):
            uses.append(of_table)

    def prepare(self, kept_bytes: Mapping[str, int]) -> None:
        """Begin to prepare the superbatch that was sampled, in a thread. kept_bytes: memory that stays taken,
        by purpose."""
        coming, packs = self.coming, self.packs
        assert coming is not None
        if (least := packs.preparing_bytes(coming)) > packs.memory_bytes // 2:
            return self._fail(f"preparing minibatches as large as these takes {format_bytes(least)}")
        more = coming.ahead.can_sample or self._epoch.following is not None
        for coming.beside in (True, False) if more else (False,):
            kept = {"next superbatch": least} if coming.beside else {}
            try:
                coming.lines, coming.purposes = divide(packs, coming, {**kept_bytes, **kept})
            except MemoryBudgetError as error:
                failed = error
            else:
                return packs.begin(coming)
        self._fail(failed)

    def finish(self) -> AnnexRows | None:
        """Wait until the superbatch is prepared, and begin to read it. None: it is read at random."""
        coming, packs = self.coming, self.packs
        assert coming is not None
        assert coming.swept is not None
        begun, on = time.perf_counter(), packs.on_device
        try:
            by_packs = coming.swept.result()
            waited_s = time.perf_counter() - begun
            packs.counted.seconds["wait"] += waited_s
            coming.choice.actual_s += waited_s
            if by_packs:
                annex = AnnexRows(packs, coming) if on is None else DeviceAnnexRows(packs, coming, on)
                packs.counted.choices.append(coming.choice)
                packs.reading, self.coming = annex, None
                return annex
            packs.random_below = max(packs.random_below, self.count(coming.end))
            self.stop()
        # Of scratch, of memory, of the table's layout.
        except (OSError, MemoryError, ValueError, torch.OutOfMemoryError) as error:
            self._fail(error)
        return None

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
        self._waits: deque[float] = deque(maxlen=_EARLY)  # of the last minibatches at random
        self._entered: deque[Ids] = deque()  # of those that entered, and are gathered at random
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
        count, asked = packer.count(0), packs.options.reads == "pack" and packs.random_below < math.inf
        long = packs.random_s * count >= LEAST_WAIT_S and count > packs.random_below
        if packer.coming is None and (long or asked):
            packer.begin(0)
        if packer.coming is not None:
            self._read_by_packs(0)

    def ids(self, minibatch: Any) -> Ids:
        return self.random.ids(minibatch)

    def enter(self, t: int, minibatch: Any, ids: Ids) -> None:
        if self.annex is None or not self.annex.has(t):
            self.random.enter(t, minibatch, ids)
            self._entered.append(ids)

    def plan(self, t: int) -> None:
        if self.annex is None or not self.annex.has(t):
            self.random.plan(t)

    def gather(self, t: int, minibatch: Any) -> Features:
        packer = self._packer
        if self.annex is None and packer.coming is None and self._waits_long(t):
            packer.begin(t, list(self._entered))
            self._read_by_packs(t)
        begun, annex = time.perf_counter(), self.annex
        if annex is None:
            if self._entered:
                self._entered.popleft()
            features, choice = self.random.gather(t, minibatch), self._choice
        else:
            features, choice = annex.gather(self.ids(minibatch)), annex.choice
            self.random.gathered = t + 1
        seconds = time.perf_counter() - begun
        if annex is None:
            if not choice.minibatches:
                packer.packs.counted.choices.append(choice)
            choice.minibatches += 1
        choice.returned += 1
        choice.actual_s += seconds
        if annex is None:
            self._waits.append(seconds)
        else:
            self._go_on(annex)
        return features

    def _waits_long(self, t: int) -> bool:
        """Whether the epoch will wait for the disk long from minibatch t on, by those at random before it.

        Only the later half of the waits counts, because the cache is empty at first.
        """
        waits, packer = self._waits, self._packer
        count = packer.count(t)
        if not self.has_window or count <= packer.packs.random_below:
            return False
        if len(waits) < _EARLY and sum(waits) < _SOON_S:
            return False
        later = list(waits)[len(waits) // 2 :]
        packer.packs.random_s = sum(later) / len(later)
        return (count - t) * packer.packs.random_s >= LEAST_WAIT_S

    def _read_by_packs(self, t: int) -> None:
        """Read the superbatch that was sampled, or is, by packs, from minibatch t on. Blocks until it is
        prepared: the memory is used for that."""
        packer = self._packer
        packer.sample(MOST_STEPS)
        self.random.leave()
        self._kept_bytes = self._release_cache()
        if packer.coming is not None and packer.coming.swept is None:
            packer.prepare(self._kept_bytes)
        if packer.coming is None:
            return
        with stage("plan"):
            self.annex = packer.finish()
        if self.annex is not None:
            self._entered.clear()
            packer.begin_next(self.annex.end)

    def _go_on(self, annex: AnnexRows) -> None:
        """After a minibatch by packs: sample ahead, prepare, and go over to the next superbatch."""
        packer = self._packer
        packer.sample(_PACE)
        if packer.sampled and annex.beside:
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
