"""Checks fanouts. Called by the methods of heat."""

from __future__ import annotations

from collections.abc import Sequence


def check_fanouts(fanouts: Sequence[int]) -> None:
    """Raise ValueError unless every fanout is 1 or more, or -1 for all neighbors."""
    if not fanouts or any(f < 1 and f != -1 for f in fanouts):
        raise ValueError(f"fanouts={list(fanouts)}; give one per layer: 1 or more, or -1 for all neighbors")
