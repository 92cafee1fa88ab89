"""Graphs for the tests of samplers."""

from __future__ import annotations

import numpy as np
from datasets import make_graph

from gids.store import Graph


def mixed_degrees(nodes: int, seed: int = 0) -> np.ndarray:
    """Degrees of 0, few, about the fanout, and some hubs with many more."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 10, nodes)
    degrees = np.where(kind < 2, 0, rng.integers(1, 25, nodes))
    return np.where(kind == 9, rng.integers(200, 400, nodes), degrees)


def citations(dtype: type = np.int32) -> list[Graph]:
    """Four relations over three types; no relation ends in "venue"."""
    papers, authors, venues = 400, 150, 7
    return [
        make_graph(mixed_degrees(papers, 1), relation=("paper", "cites", "paper"), dtype=dtype, seed=1),
        make_graph(
            mixed_degrees(papers, 2),
            num_src=authors,
            relation=("author", "writes", "paper"),
            dtype=np.int64,
            seed=2,
        ),
        make_graph(
            mixed_degrees(authors, 3), num_src=papers, relation=("paper", "written by", "author"), seed=3
        ),
        make_graph(
            np.ones(papers, int), num_src=venues, relation=("venue", "prints", "paper"), dtype=dtype, seed=4
        ),
    ]
