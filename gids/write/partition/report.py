"""Report: how a partition divides a dataset: rows, training seeds, in-edges and bytes of each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PartFigures:
    """Of one part: the nodes that it owns (rows), those of the train splits (seeds), their in-edges; bytes of
    its files."""

    rows: int
    seeds: int
    in_edges: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """Of all parts. cut_edges: edges whose source is in another part than their destination."""

    method: str
    parts: tuple[PartFigures, ...]
    edges: int
    cut_edges: int

    @property
    def cut_share(self) -> float:
        return self.cut_edges / max(1, self.edges)

    def balance(self, figure: str) -> float:
        """The largest part divided by the mean: 1 is perfect. figure: a field of PartFigures."""
        return balance([getattr(part, figure) for part in self.parts])

    def to_json(self) -> dict[str, Any]:
        names = ("rows", "seeds", "in_edges", "bytes")
        return {
            "method": self.method,
            "parts": [asdict(part) for part in self.parts],
            "edges": self.edges,
            "cut_edges": self.cut_edges,
            "cut_share": self.cut_share,
            "balance": {name: self.balance(name) for name in names},
        }


def balance(values: Sequence[int]) -> float:
    """max / mean; 1 for nothing."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
