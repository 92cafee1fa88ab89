"""LockstepStream: the minibatches of an epoch and their rows, where ranks sample and read together.

Made by RankRows for each epoch. If rows are exchanged, those of the next step are on their way.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from gids.distributed.steps import Due, Step, Steps
from gids.errors import RankError, StorageError
from gids.loader.epoch_stream import EpochStream, without_frames
from gids.loader.learned import Learned
from gids.loader.options import MAX_PLANNED
from gids.loader.readers import Features, Reader
from gids.loader.row_source import EpochInput

if TYPE_CHECKING:
    from gids.distributed.rows import RankRows

T = TypeVar("T")


class LockstepStream(EpochStream[T]):
    """The minibatches of an epoch with their features, where sampling is collective.

    By random reads, all ranks sample equally far ahead, so that they exchange in the same order: a rank with
    less memory has a shorter window, but takes part. By packs, each superbatch has a stream of its own.
    Before rows are sent, the ranks have compared where they are, when they sampled or without that.
    """

    first_alone = closes_itself = False  # the other ranks hear of its error, and of its end, first

    def __init__(
        self,
        rank_rows: RankRows,
        steps: Steps[T],
        growth: float,
        count: int | None,
        learned: Learned,
    ) -> None:
        check = rank_rows.feature_loader.check_device
        super().__init__(steps.minibatches, Reader(), count=count, check=check)
        self._rank_rows, self._group, self._loader = rank_rows, rank_rows.group, rank_rows.feature_loader
        self._steps, self._growth, self._learned = steps, growth, learned
        self._local: EpochStream[Step[T]] | None = None  # reads this rank's rows
        self._sampled_ahead: int | None = None  # steps, by random reads, the same on all ranks
        self._taken = 0  # steps

    def _take(self) -> tuple[T, Features, Exception | None]:
        group, everyone = self._group, self._rank_rows.everyone
        with group.lock:
            failures = group.failures
            try:
                return self._take_step()
            except Exception as error:
                if group.failures > failures and everyone is not group:
                    everyone.meet(self._place("ends its epoch"), error)  # other columns hear of it here
                raise

    def _take_step(self) -> tuple[T, Features, Exception | None]:
        group, comparisons = self._group, self._group.comparisons
        if self._sampled_ahead is not None:
            self._steps.sample_ahead(self._sampled_ahead)
        elif not self._steps.known:
            self._begin()
        if not self._steps.known:
            raise StopIteration
        if group.comparisons == comparisons:  # nothing was sampled
            group.meet(self._place("takes a minibatch"))
        self._send(2 if self._rank_rows.exchanged else 1)
        due = self._steps.known.popleft()
        features, error = self._receive(due)
        self._taken += 1
        return cast(T, due.step and due.step.minibatch), features, error

    def close(self) -> None:
        """Drop what was sampled ahead and let reads finish. Idempotent. Not collective."""
        with self._lock:
            self._steps.drop()
            if self._local is not None:
                self._local.close()
            super().close()

    def _begin(self) -> None:
        """Begin the next superbatch, or to read all that is left by random reads. Collective."""
        steps = self._steps
        if self._local is not None:
            next(self._local, None)  # the superbatch before ends, and is counted
            self._local.close()
        steps.sample_ahead(1)
        if not steps.known:
            return
        place = self._place("considers packs")
        packs = self._rank_rows.agree_on_packs(self._learned, self._left, place)
        if packs:
            steps.begin_superbatch()
        self._local = self._loader.attach_epoch(
            EpochInput(
                minibatches=steps,
                ids_of=self._rank_rows.ids_of,
                learned=self._learned,
                bytes_of=lambda step: step.nbytes,
                count=self._left,
                growth=self._growth,
                packs=packs,
                together=steps,
            )
        )
        self._read(steps.known[0])  # the loader learns the size of a minibatch
        if not (packs and steps.complete()):
            ahead = self._loader.window + MAX_PLANNED + 2
            [ahead] = self._group.most([ahead], self._place("chooses a window"))
            steps.sample_ahead(ahead)
            self._sampled_ahead = ahead

    def _place(self, what: str) -> str:
        return self._steps.place(self._taken, what)

    @property
    def _left(self) -> int | None:
        """Minibatches of the epoch that were not returned, if known."""
        done = self._steps.number - len(self._steps.known)
        return None if self._count is None else self._count - done

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
            if due.status is not None:
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
            due.status = group.start_most([int(due.error is not None)])

    def _no_rows(self, name: str, count: int) -> torch.Tensor:
        """What is sent in place of rows that could not be read."""
        table = next(t for t in self._loader.tables if t.name == name)
        return torch.zeros(count, table.row_bytes, dtype=torch.uint8, device=self._loader.device)

    def _receive(self, due: Due[T]) -> tuple[Features, StorageError | None]:
        """The features of a step; or why some rank could not read its rows."""
        group, received = self._group, {}
        for name, (rows, handle) in due.coming.items():
            group.wait_for(handle)
            received[name] = rows
        status, handle = due.status
        group.wait_for(handle)
        failed = int(status.item())
        if (everyone := self._rank_rows.everyone) is not group:
            [failed] = everyone.most([failed], self._place("has its rows"))
        if failed:
            return {}, self._error_of(due.error)
        assert due.step is not None
        if self._rank_rows.exchanged:
            due.coming.clear()
            return self._rank_rows.features_of(due.step, received), None
        return {name: due.rows[name] for name in self._rank_rows.tables}, None

    def _error_of(self, mine: Exception | None) -> StorageError:
        """What to raise for a step that some rank could not read. Collective."""
        everyone = self._rank_rows.everyone
        said = everyone.gather(None if mine is None else _plain(mine), self._place("could not read"))
        if isinstance(mine, StorageError):
            return mine
        if mine is not None:
            raise mine
        rank = next(r for r, theirs in enumerate(said) if theirs is not None)
        name = everyone.name_of(rank)
        if isinstance(said[rank], str):
            raise RankError(f"{name} failed with {said[rank]}")
        errno, message, path, offset = said[rank]
        return StorageError(errno, f"{name}: {message}", path, offset)


def _plain(error: Exception) -> Any:
    """What this rank tells the others of its error."""
    if not isinstance(error, StorageError):
        return f"{type(error).__name__}: {error}"
    what = (error.strerror or "").partition(": ")[0]
    return error.errno or 0, what, error.filename, error.offset
