"""Queue: the sampled minibatches of one epoch, in order. A stream hands them out.

It counts them, so that no epoch ends early in silence, and keeps an error in its place. It knows nothing of
rows.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Queue(Generic[T]):
    """minibatches: are sampled when the queue asks for one. count: their number, if known.

    Attributes: held: minibatches that were sampled and not handed out; taken: number of those that were;
    end: what comes after the held ones: an error, or StopIteration; None before one of them is met.
    """

    def __init__(self, minibatches: Iterable[T], count: int | None = None) -> None:
        self._minibatches: Iterator[T] = iter(minibatches)
        self.count = count
        self.held: deque[T] = deque()
        self.taken = 0
        self.end: Exception | None = None

    @property
    def sampled(self) -> int:
        """Number of minibatches that were held, with those that were handed out."""
        return self.taken + len(self.held)

    @property
    def empty(self) -> bool:
        """Whether all minibatches of the epoch were handed out."""
        return isinstance(self.end, StopIteration) and not self.held

    def sample(self) -> T:
        """The next minibatch, which is not held yet. Raises StopIteration after the last one, RuntimeError if
        there are fewer than count."""
        try:
            return next(self._minibatches)
        except StopIteration:
            if self.count is None or self.sampled >= self.count:
                raise
        raise RuntimeError(
            f"the epoch has {self.count} minibatches, and its source ended after {self.sampled}"
        )

    def end_with(self, error: Exception) -> None:
        """Nothing comes after the held minibatches but this error, or StopIteration."""
        # A fresh one: the frames of the caught one would hold features, and workers of a framework.
        self.end = StopIteration() if isinstance(error, StopIteration) else without_frames(error)
        self._minibatches = iter(())

    def take_end(self) -> Exception:
        """What comes after the held minibatches, to be raised now. Nothing here refers to it any more: it is
        going to refer to frames, and they to the rows of the consumer."""
        end, self.end = self.end, StopIteration()
        return end or StopIteration()

    def take(self) -> T:
        """The first of the held minibatches. It is the consumer's now."""
        self.taken += 1
        return self.held.popleft()

    def close(self) -> None:
        """Drop the source and what was sampled. Idempotent."""
        self._minibatches = iter(())
        self.held.clear()


def without_frames(error: Exception) -> Exception:
    """An error that is raised later. A note says where it was raised; frames would keep a stream alive."""
    notes = vars(error).setdefault("__notes__", [])  # not by add_note(), which a frozen dataclass refuses
    notes.append("".join(traceback.format_exception(error)).rstrip())
    return BaseException.with_traceback(error, None)
