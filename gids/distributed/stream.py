"""LockstepStream: the minibatches of an epoch and their rows, where ranks sample and read together.

Made by LockstepRows, which is what loaders have in place of a FeatureLoader, for each epoch. All ranks sample
equally far ahead, and read at random. If rows are exchanged, those of the next step are on their way while a
step is trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar, cast

import torch

from gids.distributed.rows import Due, RankRows, Step
from gids.errors import StorageError
from gids.loader.options import MAX_PLANNED
from gids.loader.queue import Queue, without_frames
from gids.loader.ranks import place_of
from gids.loader.rows import EpochInput, Features, IdsOf, Rows
from gids.loader.sampling import EpochSampling
from gids.loader.stream import EpochStream
from gids.sampler import Minibatch

T = TypeVar("T")


class LockstepRows(RankRows):
    """The rows of ranks that read together, for loaders. See RowLoader."""

    def attach_epoch(self, epoch: EpochInput[Minibatch]) -> EpochStream[Minibatch]:
        """Iterate over (minibatch, {table: features}), as FeatureLoader.attach. Collective."""
        sampling, queue = cast(EpochSampling, epoch.minibatches), Queue(epoch.minibatches, epoch.count)
        steps = Steps(self, sampling, queue, epoch.ids_of, epoch.bytes_of)
        return LockstepStream(self, queue, steps, epoch.growth)


class Steps(Iterator[Step[T]], Generic[T]):
    """An iterator of the steps that this rank's stream of rows has not taken yet.

    queue: of the minibatches of sampling. ids_of, bytes_of: of a minibatch, as of FeatureLoader.attach.

    Attributes: known: the steps that were sampled and not handed out.
    """

    def __init__(
        self,
        rank_rows: RankRows,
        sampling: EpochSampling,
        queue: Queue[T],
        ids_of: IdsOf[T],
        bytes_of: Callable[[T], int],
    ) -> None:
        self._rank_rows, self._epoch, self._queue = rank_rows, sampling.epoch, queue
        self._ids_of, self._bytes_of = ids_of, bytes_of
        self._waiting: deque[Step[T]] = deque()  # sampled, not taken
        self.known: deque[Due[T]] = deque()

    def __next__(self) -> Step[T]:
        if self._waiting:
            return self._waiting.popleft()
        if self._queue.end is not None:
            raise StopIteration
        raise RuntimeError("the window of the owner is longer than what the ranks sampled ahead")

    def place(self, step: int, what: str) -> str:
        """See Group. step: counted from the first one of this iterator."""
        epoch = self._epoch
        return place_of(epoch.seeds.ranks.loader, epoch.number, epoch.steps.start + step, what)

    def sample_ahead(self, count: int) -> bool:
        """Sample until so many steps are known, or there are no more. Collective. Returns whether any was."""
        group, queue, before = self._rank_rows.group, self._queue, self._queue.sampled
        while len(self.known) < count and queue.end is None:
            failures = group.failures
            try:
                minibatch: T | Exception = queue.sample()
            except StopIteration as end:
                queue.end_with(end)
                break
            except Exception as error:
                if group.failures > failures:  # all ranks know of it
                    raise
                minibatch = error
            place = self.place(queue.sampled, "asks for rows")
            step, due = self._rank_rows.ask(minibatch, self._ids_of, self._bytes_of, place)
            queue.held.append(step.minibatch)
            self.known.append(due)
            self._waiting.append(step)
        return queue.sampled > before

    def drop(self) -> None:
        """Drop what was sampled ahead, and end. Idempotent."""
        self._waiting.clear()
        self.known.clear()
        self._queue.close()


class LockstepStream(EpochStream[T]):
    """The minibatches of an epoch with their features, where sampling is collective.

    All ranks sample equally far ahead, so that they exchange in the same order: a rank with less memory has a
    shorter window, but takes part. Before rows are sent, the ranks have compared where they are, when they
    sampled or without that.
    """

    def __init__(self, rank_rows: RankRows, queue: Queue[T], steps: Steps[T], growth: float) -> None:
        loader = rank_rows.feature_loader
        super().__init__(queue, Rows(), pid=loader.source.lender.pid, check=loader.check)
        self._rank_rows, self._group, self._loader = rank_rows, rank_rows.group, rank_rows.feature_loader
        self._steps, self._growth = steps, growth
        self._local: EpochStream[Step[T]] | None = None  # reads this rank's rows
        self._sampled_ahead = 1  # steps, the same on all ranks

    def close(self) -> None:
        """Drop what was sampled ahead and let reads finish. Idempotent. Not collective."""
        self._steps.drop()
        if self._local is not None:
            self._local.close()
        super().close()

    def _take(self) -> tuple[T, Features]:
        sampled = self._steps.sample_ahead(self._sampled_ahead)
        if not self._steps.known:
            raise StopIteration
        if self._local is None:
            self._begin()
        elif not sampled:
            self._group.meet(self._place("takes a minibatch"))
        self._send(2 if self._rank_rows.exchanged else 1)
        due = self._steps.known.popleft()
        features = self._receive(due)
        return self._queue.take(), features

    def _close_at_end(self) -> None:
        """Not before the end is asked for: the other ranks hear of it first."""

    def _begin(self) -> None:
        """Begin to read this rank's rows, and choose how far to sample ahead. Collective."""
        self._local = self._loader.attach_epoch(
            EpochInput(
                minibatches=self._steps,
                ids_of=self._rank_rows.ids_of,
                bytes_of=lambda step: step.nbytes,
                growth=self._growth,
            )
        )
        self._read(self._steps.known[0])  # the loader learns the size of a minibatch
        ahead = self._loader.window + MAX_PLANNED + 2
        [self._sampled_ahead] = self._group.most([ahead], self._place("chooses a window"))
        self._steps.sample_ahead(self._sampled_ahead)

    def _place(self, what: str) -> str:
        return self._steps.place(self._queue.taken, what)

    def _read(self, due: Due[T]) -> None:
        """Read this rank's rows for the step, unless that was done."""
        assert self._local is not None
        if due.step is not None or due.error is not None:
            return
        try:
            due.step, due.rows = next(self._local)
        except StopIteration:
            due.error = RuntimeError("there are no rows for a step that was sampled")
        except Exception as error:  # the other ranks wait
            due.error = without_frames(error)

    def _send(self, most: int) -> None:
        """Begin to send the rows of further steps, until those of so many are on their way."""
        group, counters = self._group, self._rank_rows.counts
        for due in list(islice(self._steps.known, most)):
            if due.failed is not None:
                continue
            self._read(due)
            if self._rank_rows.exchanged:
                rows, due.rows = due.rows, {}  # they are with the exchange
                for names, wanted, expected in zip(
                    self._rank_rows.alike, due.wanted, due.expected, strict=True
                ):
                    away = sum(wanted) - wanted[group.rank]
                    for name in names:
                        sent = rows.pop(name) if due.error is None else self._no_rows(name, sum(wanted))
                        due.coming[name] = group.start_rows(sent, wanted, expected)
                        counters["rows sent"] += away
                        counters["bytes sent"] += away * sent.shape[1]
                counters["exchanges"] += 1
            failed = torch.full((group.size, 1), due.error is not None, dtype=torch.uint8)
            due.failed = group.start_rows(failed, [1] * group.size, [1] * group.size)

    def _no_rows(self, name: str, count: int) -> torch.Tensor:
        """What is sent in place of rows that could not be read."""
        table = next(t for t in self._loader.tables if t.name == name)
        return torch.zeros(count, table.row_bytes, dtype=torch.uint8, device=self._loader.device)

    def _receive(self, due: Due[T]) -> Features:
        """The features of a step. Raises StorageError if some rank could not read its rows."""
        group, received = self._group, {}
        for name, (rows, handle) in due.coming.items():
            group.wait_for(handle)
            received[name] = rows
        assert due.failed is not None
        failed, handle = due.failed
        group.wait_for(handle)
        any_failed = int(failed.any())
        if (everyone := self._rank_rows.everyone) is not group:
            [any_failed] = everyone.most([any_failed], self._place("has its rows"))
        if any_failed:
            raise self._error_of(due.error)
        assert due.step is not None
        if self._rank_rows.exchanged:
            due.coming.clear()
            return self._rank_rows.features_of(due.step, received)
        return {name: due.rows[name] for name in self._rank_rows.tables}

    def _error_of(self, mine: Exception | None) -> StorageError:
        """What to raise for a step whose rows some rank could not read. Collective."""

        def say() -> Any:
            if mine is not None and not isinstance(mine, StorageError):
                raise mine
            return mine and [mine.errno, str(mine.strerror).partition(": ")[0], mine.filename, mine.offset]

        everyone = self._rank_rows.everyone
        said = everyone.gather(say, self._place("could not read"))
        if isinstance(mine, StorageError):
            return mine
        rank, (errno, message, path, offset) = next((r, told) for r, told in enumerate(said) if told)
        return StorageError(errno, f"{everyone.name_of(rank)}: {message}", path, offset)
