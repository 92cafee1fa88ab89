"""RowRanges: the rows of a table that are written. Called by TableWriter; knows no files."""

from __future__ import annotations

from bisect import bisect_right


class RowRanges:
    """Disjoint ranges of rows. Neighbors are merged, so memory grows with the number of gaps."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Add rows start … stop (stop > start). Raises ValueError if one was added before."""
        at = bisect_right(self._starts, start)
        clashes = at > 0 and self._stops[at - 1] > start
        if clashes or (at < len(self._starts) and self._starts[at] < stop):
            first = start if clashes else self._starts[at]
            raise ValueError(
                f"row {first} was written already (this block has {start} to {stop - 1}): write each row once"
            )
        if at < len(self._starts) and self._starts[at] == stop:
            stop = self._stops[at]
            del self._starts[at], self._stops[at]
        if at > 0 and self._stops[at - 1] == start:
            self._stops[at - 1] = stop
        else:
            self._starts.insert(at, start)
            self._stops.insert(at, stop)

    def first_gap(self, row_count: int) -> tuple[int, int] | None:
        """The first and last row of the first gap before row_count, or None."""
        after = 0
        if self._starts and self._starts[0] == 0:
            after = self._stops[0]
        if after >= row_count:
            return None
        rest = [start for start in self._starts[:2] if start >= after]
        return after, (rest[0] if rest else row_count) - 1
