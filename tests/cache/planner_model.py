"""The obvious model of a plan: written for clarity, not speed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

USE_BITS = 24
HEAT_CLASSES = 8  # of pages with the same next use


@dataclass
class Model:
    """The pages that a lookahead, lru or static cache may hold after each plan.

    The choice within a bucket is free. So the model gives the number of pages of each bucket that stay, and
    check() adopts the implementation's choice after comparing it.

    keep: pages of heat 255 keep their lines for good.
    """

    lines: int
    policy: str
    heat: npt.NDArray[np.uint8]
    keep: bool = False
    resident: set[int] = field(default_factory=set)
    live: dict[int, set[int]] = field(default_factory=dict)  # entered, not retired
    planned: set[int] = field(default_factory=set)
    last_use: dict[int, int] = field(default_factory=dict)

    def enter(self, step: int, pages: npt.NDArray[np.int64]) -> None:
        assert len(self.live) < USE_BITS
        self.live[step] = set(pages.tolist())

    def retire(self, step: int) -> None:
        for page in self.live[step]:
            self.last_use[page] = step  # the order within a step is free
        del self.live[step]
        self.planned.discard(step)

    def kept(self, page: int) -> bool:
        return self.keep and self.heat[page] == 255

    def worth(self, page: int, *, missing: bool) -> tuple[int, ...]:
        if self.kept(page):
            assert missing
            # As the most that a page can be worth by lookahead; more than any other page by the others.
            return (1, -max(self.planned) - 1, HEAT_CLASSES - 1) if self.policy == "lookahead" else (2, 0)
        if self.policy == "lru":
            return (1, 0) if missing else (0, self.last_use.get(page, -1))
        if self.policy == "lookahead":
            uses = [s for s in self.live if s not in self.planned and page in self.live[s]]
            if uses:
                return (1, -min(uses), int(self.heat[page]) * HEAT_CLASSES // 256)
        return (0, int(self.heat[page]))

    def plan(self, step: int) -> tuple[int, dict[tuple[int, ...], int], set[int]]:
        """(hits, number of candidates that stay by worth, pages that must stay)."""
        wanted = self.live[step]
        hits = len(wanted & self.resident)
        self.planned.add(step)
        pinned = {p for p in self.resident if self.kept(p) or any(p in self.live[s] for s in self.planned)}
        worths = [self.worth(p, missing=False) for p in self.resident - pinned]
        worths += [self.worth(p, missing=True) for p in wanted - self.resident]
        worths.sort(reverse=True)
        keep: dict[tuple[int, ...], int] = {}
        for w in worths[: self.lines - len(pinned)]:
            keep[w] = keep.get(w, 0) + 1
        return hits, keep, pinned

    def check(
        self, step: int, resident: set[int], keep: dict[tuple[int, ...], int], pinned: set[int]
    ) -> None:
        """Check that the implementation keeps as many pages of each worth as the model, and no others."""
        assert len(resident) <= self.lines
        assert pinned <= resident
        assert resident <= self.resident | self.live[step]
        got: dict[tuple[int, ...], int] = {}
        for p in resident - pinned:
            w = self.worth(p, missing=p not in self.resident)
            got[w] = got.get(w, 0) + 1
        assert got == keep
        self.resident = set(resident)
