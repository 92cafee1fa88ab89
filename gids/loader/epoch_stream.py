"""EpochStream: one epoch of minibatches with their features. The only loop over minibatches; all loaders
return it.

It samples ahead, tells a Reader what enters, and hands out what it gathers. It counts, so that no epoch ends
early in silence. It raises the error of a minibatch when that minibatch is due. Another thread may close it.

The order is fixed, so that a run can be replayed exactly: before minibatch t is planned, minibatch t - D is
gathered and t + W has entered (W: the window, D: the planned minibatches). Only the first W steps differ: the
first minibatch is handed out when one is sampled; then each step enters two until the window is full.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from gids.closing import Closing, OwnLock
from gids.errors import StorageError
from gids.loader.readers import Features, Gathered, Ids, Reader
from gids.packs import ByReference
from gids.profiling import stage

if TYPE_CHECKING:
    from gids.loader.pack_switch import PackSwitch

T = TypeVar("T")
R = TypeVar("R")
IdsOf = Callable[[T], Ids]
_END = object()
log = logging.getLogger("gids")

NO_MEMORY = (
    "the system gives this process no more memory: raise the limit on its address space (ulimit -v), or give "
    "gids.open() a smaller memory= and threads="
)


@dataclass(slots=True)
class Failed(ByReference):
    """In place of a minibatch that could not be sampled: its error."""

    error: Exception

    def raise_error(self) -> NoReturn:
        """Raise it, once. It refers to the frames that it passes, so nothing here refers to it any more."""
        error = self.error
        del self.error
        try:
            raise error
        finally:
            del error

    @staticmethod
    def or_else(function: Callable[[T], R], value: R) -> Callable[[T], R]:
        """A function that returns `value` for a minibatch that could not be sampled."""
        return lambda minibatch: value if isinstance(minibatch, Failed) else function(minibatch)

    @classmethod
    def of(cls, error: Exception) -> Any:
        """In place of any minibatch."""
        return cls(without_frames(error))


class Sampled(Iterator[T]):
    """Counts the minibatches of an epoch, and returns a Failed for each that could not be sampled.

    Calls ``next`` with a default, because an exception keeps the frames that it passed through, and workers
    of a framework stop only when the last reference to their iterator is dropped.

    goes_on: whether there are more minibatches after an error. After a StorageError there always are. beside:
    other processes sample them while the consumer trains.
    Attributes: count: of the minibatches so far; ended: whether there are no more.
    """

    def __init__(
        self,
        minibatches: Iterable[T],
        *,
        goes_on: Callable[[Exception], bool] = lambda _: False,
        beside: bool = False,
    ) -> None:
        self._minibatches: Iterator[T] = iter(minibatches)
        self._goes_on, self.beside = goes_on, beside
        self._first: list[object] = []
        self._begun = False
        self.count = 0
        self.ended = False

    def failed_first(self) -> Failed | None:
        """Sample the first minibatch, if none is. If that failed, the next one is the first then."""
        if self._begun:
            return None
        if not self._first:
            self._first.append(self._sample())
        if not isinstance(self._first[0], Failed):
            return None
        self.count += 1
        return cast(Failed, self._first.pop())

    def peek(self) -> T | None:
        """The first minibatch, sampled now if need be. None if it was taken, failed, or there is none."""
        if self._begun:
            return None
        if not self._first:
            self._first.append(self._sample())
        first = self._first[0]
        return None if first is _END or isinstance(first, Failed) else cast(T, first)

    def __next__(self) -> T:
        self._begun = True
        minibatch = self._first.pop() if self._first else self._sample()
        if minibatch is _END:
            self.ended = True
            self.close()
            raise StopIteration
        self.count += 1
        return cast(T, minibatch)

    def close(self) -> None:
        """Drop the source. Idempotent. Also called by the stream of rows at its end."""
        close = getattr(self._minibatches, "close", None)
        running = getattr(self._minibatches, "gi_running", False)  # in a forked child: by no thread of it
        self._minibatches = iter(())
        self._first.clear()
        if close is not None and not running:
            close()

    def _sample(self) -> object:
        try:
            return next(self._minibatches, _END)
        except Exception as error:
            if not isinstance(error, StorageError) and not self._goes_on(error):
                self._minibatches, self.ended = iter(()), True
            return Failed.of(error)


class EpochStream(Closing, Generic[T], Iterator[tuple[T, Features]]):
    """An iterator of (minibatch, {table: features}).

    It goes on after an error of the source, as far as the source does, and after a StorageError; any other
    error ends it. close() waits for a next() in another thread. After close() there are no more minibatches.
    It closes itself when it returns the last minibatch: nobody has to ask for one more.

    ids_of: what a reader wants to know of a minibatch. count: number of minibatches, if known. begin: called
    before each minibatch while the stream has no window; it may call use() and take_window(). aside: makes a
    reader without lookahead. check: called before each minibatch; raises where none can be taken. on_turn:
    called before this stream reads or is closed: what is counted then is its own. turn: the same, as a
    context in which a stream that is dropped ends. ended: called with the number of minibatches at their
    end. seconds: gets what sampling takes, as "sample".
    """

    first_alone = True
    """Whether the error of the first minibatch is raised before anything is opened."""

    closes_itself = True
    """Whether it closes when it returns the last minibatch."""

    def __init__(
        self,
        source: Sampled[T],
        reader: Reader,
        ids_of: IdsOf[T] = lambda _: {},
        *,
        count: int | None = None,
        begin: Callable[[EpochStream[T]], None] | None = None,
        aside: Callable[[], Reader] = Reader,
        check: Callable[[], None] = lambda: None,
        on_turn: Callable[[], None] = lambda: None,
        turn: Callable[[], AbstractContextManager[object]] = nullcontext,
        ended: Callable[[int], None] = lambda _: None,
        seconds: dict[str, float] | None = None,
    ) -> None:
        self._check = check
        self.source, self._ids_of, self._count = source, ids_of, count
        self._find_window, self._aside, self._on_turn, self.has_window = begin, aside, on_turn, False
        self._ended, self._seconds = ended, {"sample": 0.0} if seconds is None else seconds
        self.warned = False  # that it has no window
        self._switch: PackSwitch[T] | None = None
        self._most_window: int | None = None  # where the window must be shorter
        self._returned, self._failed = 0, False  # by an error that may end the source
        self._closed = self._closes = self._all_closed = self._cut_short = self._busy = False
        self._ends = self._closed_within = False  # by itself; by a signal handler within __next__()
        self._lock = OwnLock()
        self.ending = Ending(turn)
        self._opened, self._at_end = self.ending.parts, self.ending.then
        self._finalizer = weakref.finalize(self, self.ending.close)
        self._reader = Reader()
        self._held: deque[T] = deque()  # entered, not yet handed out
        self._again: deque[T] = deque()  # that another reader did not gather
        self._end_again: BaseException | None = None  # that comes after them
        self.read(reader, source)

    def use(self, source: Sampled[T], switch: PackSwitch[T]) -> None:
        """Take the minibatches of this source, and let a switch choose how they are read. Before the first
        one only."""
        self.source, self._switch = source, switch
        self._minibatches, switch.opened = iter(source), self._opened

    def take_window(self, reader: Reader, on_close: Callable[[], None]) -> None:
        """Go on by a reader with lookahead. on_close: called once, when the window is free again."""
        self._go_on_by(reader)
        self.has_window = True
        self.ending.gathered = 0
        self._at_end.append(on_close)

    def set_aside(self) -> bool:
        """Go on without lookahead, for another stream. False if another thread uses this one, or by packs."""
        taken = list[bool]()
        try:
            taken += map(self._lock.acquire, [False])
            if True not in taken or self._busy:  # its own sampler begins another stream
                return False
            if self._switch is not None and not self._switch.may_wait():
                return False
            self._go_on_by(self._aside())
            for function in self._at_end:
                function()
            self._at_end.clear()
            self.has_window = False
            return True
        finally:
            if True in taken:
                self._lock.release()

    def _go_on_by(self, reader: Reader) -> None:
        """By another reader, with the same minibatches."""
        minibatches, end = self._minibatches, self._end or self._end_again
        again = self.take_back()
        self.read(reader, minibatches)
        self._again, self._end_again = deque(again), end

    def read(self, reader: Reader, minibatches: Iterable[T]) -> None:
        """Go on by another reader, with these minibatches."""
        self.take_back()
        self._reader, self._minibatches = reader, iter(minibatches)
        self._opened.append(reader)
        self._entered = self._planned = self._gathered = 0  # minibatches of this reader
        self._end: BaseException | None = None  # the error that ended the source
        self._again, self._end_again = deque(), None

    @property
    def fresh(self) -> bool:
        """Whether no minibatch was asked for."""
        return not self._returned and not self._held

    @property
    def closed(self) -> bool:
        """Whether it gives no more minibatches."""
        return self._closed

    @property
    def open(self) -> bool:
        """Whether it began, and may give more minibatches."""
        return not self._closed and (self.has_window or self._returned > 0)

    @property
    def ahead(self) -> int:
        """Number of minibatches that were sampled and not returned."""
        return self.source.count - self._returned

    @property
    def sampled_all(self) -> bool:
        """Whether nothing more will enter: at the end of the source, or after its error."""
        return self._end is not None or self._end_again is not None

    def take_back(self) -> list[T]:
        """End the reader, and return what it was told of and did not gather. read() must follow."""
        held, reader = [*self._held, *self._again], self._reader
        self._held.clear()
        self._again.clear()
        self._reader, self._minibatches = Reader(), iter(())
        reader.close()
        if reader in self._opened:
            self._opened.remove(reader)
        return held

    def __next__(self) -> tuple[T, Features]:
        self._check()
        with self._lock:
            self._busy = True
            try:
                taken = self._next()
            except Exception:
                if not self._closed_within:
                    raise
            finally:
                self._busy = False
                if self._closed_within:  # it may have opened something since
                    self._all_closed = False
                    self.close()
            if self._closed_within:  # it went on without what was closed
                raise StopIteration
            return taken

    def _next(self) -> tuple[T, Features]:
        if self._cut_short:
            self._cut_short = False
            most = "its" if self._count is None else self._count
            raise RuntimeError(
                f"an error ended this epoch after {self._returned} of {most} minibatches: begin it "
                "again, or resume it from the loader's state_dict()"
            )
        if self._closed:
            raise StopIteration
        if not self.has_window and self._find_window is not None:
            try:
                self._find_window(self)
            except BaseException:
                self._end_itself()
                raise
        self._on_turn()  # once another stream was set aside: its reads were its own
        if self.first_alone and (failed := self.source.failed_first()) is not None:
            self._returned += 1
            self._raise(failed)
        error: Exception | None = None
        try:
            minibatch, features, error = self._take()
            self._returned += 1
        except StopIteration:
            lost = self._lost()
            self._end_itself()
            if lost:
                raise RuntimeError(lost) from None
            self._ended(self._returned)
            raise
        except BaseException as raised:
            self._returned += 1
            self._failed = self._failed or not isinstance(raised, StorageError)
            if isinstance(raised, MemoryError):
                raised.add_note(NO_MEMORY)
            self._end_itself()
            self._cut_short = isinstance(raised, StorageError)
            raise
        try:
            if error is not None:
                if not isinstance(error, StorageError):
                    self._end_itself()
                raise error
            if isinstance(minibatch, Failed):
                self._raise(minibatch)
            self._close_at_end()
            return minibatch, features
        finally:
            error = None  # it refers to this frame, and so to this stream

    def limit_window(self, batches: int, reason: str) -> None:
        """Limit the window from now on; 0: hold the minibatch that is due only. Logs the reason."""
        if batches < self._window:
            log.warning("window lowered from %d to %d minibatches: %s", self._window, max(0, batches), reason)
            self._most_window = max(0, batches)

    def close(self) -> None:
        """Let reads finish, drop what was sampled ahead. Idempotent, and may be repeated after Ctrl-C."""
        with self._lock:
            if self._all_closed or self._closes:  # a signal handler may close it meanwhile
                return
            self._closed_within = self._closed_within or (self._busy and not self._ends)
            self._closed = self._closes = True
            try:
                self._on_turn()
                self._held.clear()
                self._again.clear()
                self._end = self._end_again = None
                if self._switch is not None:
                    self._switch.close()
                self.ending.close()
                self._finalizer.detach()
                self._reader, self._minibatches = Reader(), iter(())
                self.source.close()
                self._find_window = None
                self._all_closed = True
            finally:
                self._closes = False

    def _take(self) -> tuple[T, Features, Exception | None]:
        """The minibatch that is due, with its features, and an error if some could not be read."""
        switch, returned = self._switch, False
        if switch is None:
            return self._gather()
        try:
            switch.before(self)
            taken = self._gather()
            returned = True
        finally:
            switch.after(self, returned=returned)
        return taken

    def _gather(self) -> tuple[T, Features, Exception | None]:
        gathered: Gathered | None = None
        while gathered is None:
            self._fill()
            if self._gathered == self._planned:
                raise self._take_end()
            try:
                with stage("gather"):
                    gathered = self._reader.gather()
            except OSError as error:
                if self._switch is None or not self._switch.failed(self, error):
                    raise
        self._gathered += 1
        self.ending.gathered += 1
        return self._held.popleft(), *gathered

    @property
    def _window(self) -> int:
        window = self._reader.window
        return window if self._most_window is None else min(window, self._most_window)

    def _fill(self) -> None:
        """Plan as far ahead as allowed, entering the window first."""
        if not self._entered:
            self._enter(0)  # only then are the sizes of minibatches known
        warm = self._gathered + 1  # 1 for the first minibatch
        ahead = min(self._reader.planned, warm) if self._most_window != 0 else 1
        while self._planned < self._gathered + ahead:
            t = self._planned
            self._enter(t)
            if self._entered == t:
                return  # the source is exhausted
            with stage("plan"):
                self._reader.plan()
            self._planned += 1

    def _enter(self, t: int) -> None:
        """Enter the window of minibatch t. It may become shorter meanwhile."""
        while self._entered < t + 1 + min(self._window, t) and self._end is None:
            try:
                minibatch, ids = self._sample()
                with stage("enter"):
                    self._reader.enter(minibatch, ids)
            except StopIteration:
                self._end = StopIteration()  # a fresh one: the caught one's frames would hold features
                return
            except Exception as error:  # raised when it is due: earlier minibatches are handed out first
                self._end = without_frames(error)
                return
            self._held.append(minibatch)
            self._entered += 1

    def _sample(self) -> tuple[T, Ids]:
        if not self._reader.by_ids:  # the reader has sampled minibatches
            return next(self._minibatches), {}
        if not self._again and self._end_again is not None:
            raise self._end_again
        begun = time.perf_counter()
        with stage("sample"):
            minibatch = self._again.popleft() if self._again else next(self._minibatches)
            ids = cast(Ids, {})
            try:
                ids = self._ids_of(minibatch)
            except StorageError as error:
                minibatch = Failed.of(error)
        self._seconds["sample"] += time.perf_counter() - begun
        return minibatch, ids

    def _take_end(self) -> BaseException:
        end, self._end = self._end, None  # not kept: it refers to frames that refer to this stream
        return end or StopIteration()

    def _raise(self, failed: Failed) -> NoReturn:
        self._failed = self._failed or not isinstance(failed.error, StorageError)
        self._close_at_end()
        failed.raise_error()

    def _close_at_end(self) -> None:
        """Close, if the last minibatch was returned."""
        if not self.closes_itself:
            return
        if self._returned == self._count and self._switch is None and not self.source.ended:
            self._fill()  # the source may have more
        if self.source.ended and not self.ahead and not self._lost():
            self._end_itself()
            self._ended(self._returned)

    def _end_itself(self) -> None:
        self._ends = True
        self.close()

    def _lost(self) -> str:
        """What is missing at the end of the epoch."""
        if not self.source.ended or self.ahead:
            return f"gids returned {self._returned} of {self.source.count} minibatches; please report this"
        if self._count is not None and self._returned < self._count and not self._failed:
            return f"the epoch has {self._count} minibatches, and its source ended after {self._returned}"
        return ""


def without_frames(error: Exception) -> Exception:
    """An error that is raised later. A note says where it was raised first.

    A stream must end at once when it is dropped, so its errors must not keep it alive. Frames would: those of
    the traceback, and since Python 3.13 also those that called them. Causes lose their frames, too. An error
    that the user's own code handles meanwhile keeps them.
    """
    notes = list(vars(error).get("__notes__") or ())  # not by add_note(), which a frozen dataclass refuses
    told = any("Traceback (most recent call last)" in str(note) for note in notes)
    if not told and not isinstance(error, StorageError):  # that one says what cannot be read
        vars(error)["__notes__"] = [*notes, "".join(traceback.format_exception(error)).rstrip()]
    running = (frame for frame, _ in traceback.walk_stack(None))
    of_user = {frame for frame in running if not frame.f_globals.get("__name__", "").startswith("gids.")}
    errors: list[BaseException] = [error]
    seen = set[int]()
    for each in errors:
        frames = each.__traceback__
        if id(each) in seen or (frames is not None and frames.tb_frame in of_user):
            continue
        seen.add(id(each))
        BaseException.with_traceback(each, None)
        parts = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        errors += [e for e in (each.__cause__, each.__context__, *parts) if e is not None]
    return error


def forgetting(*lists: list[T]) -> Iterator[T]:
    """The minibatches of these lists, each removed when it is returned: its rows are the consumer's."""
    for minibatches in lists:
        while minibatches:
            yield minibatches.pop(0)


class Ending:
    """What is closed at the end of a stream. Refers to no stream: the finalizer must not keep it alive.

    parts: what was opened in this process, closed the last one first. then: functions that are called once
    all parts are closed, the first one first. turn: a context for both. gathered: number of minibatches that
    the stream gathered since it got the window.
    """

    def __init__(self, turn: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.parts: list[Any] = []
        self.then: list[Callable[[], None]] = []
        self.gathered = 0
        self._turn, self._pid, self._lock, self._closes = turn, os.getpid(), OwnLock(), False

    @property
    def here(self) -> bool:
        """Whether this process opened the parts: a forked child has neither the threads nor the memory."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """For finalizers. Idempotent. Does nothing in a forked child, or while another thread does it.

        A part that is busy waits for a thread that takes locks.
        """
        if not self.here:
            return
        busy = any(getattr(part, "busy", False) for part in self.parts)
        if busy or threading.current_thread().name.startswith("gids-"):
            # The garbage collector runs in one of the threads that this waits for, or where such a lock is
            # held.
            threading.Thread(target=self.finish, name="close gids").start()
        else:
            self.finish(0)

    def finish(self, timeout_s: float = -1) -> bool:
        """Close what is not closed: Ctrl-C may have interrupted close(). Waits for another thread that does
        it; False if that takes longer, or if this thread does it already."""
        taken = list[bool]()
        try:
            taken += map(self._lock.acquire, [True], [timeout_s])
            if True not in taken or self._closes:
                return False
            self._closes = True
            try:
                if self.parts or self.then:
                    with self._turn():
                        self._close_rest()
            finally:
                self._closes = False
            return True
        finally:
            if True in taken:
                self._lock.release()

    def _close_rest(self) -> None:
        """After an error, the others are closed all the same. After Ctrl-C, finish() must be repeated."""
        while self.parts or self.then:
            left: list[Any]
            left, first = (self.parts, -1) if self.parts else (self.then, 0)
            try:
                (left[first].close if left is self.parts else left[first])()
            except Exception:
                del left[first]
                self._close_rest()
                raise
            del left[first]
