"""Graphs for the tests of samplers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gids.store import Graph
from gids.store.names import RELATION, Relation


def make_graph(
    degrees: Sequence[int] | np.ndarray,
    *,
    num_src: int | None = None,
    relation: Relation = RELATION,
    dtype: type = np.int64,
    seed: int = 0,
) -> Graph:
    """In-edges of destinations with these degrees; sources with small ids are frequent, edges may repeat."""
    num_src = len(degrees) if num_src is None else num_src
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    rng = np.random.default_rng(seed)
    indices = (num_src * rng.random(indptr[-1]) ** 2).astype(dtype)
    return Graph(relation, num_src, len(degrees), indptr, indices, None)


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
