"""NodeLoads: what each node adds to its part: a row of its type, a training seed, in-edges. Called by run.py.

Nodes of all types have one range of ids: see union.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from gids.store import FeatureStore

_BLOCK = 1 << 20


class NodeLoads:
    """The loads of all nodes: rows of each type, then training seeds, then in-edges. count: how many loads.

    starts: the id of the first node of each type.
    """

    def __init__(self, store: FeatureStore, starts: Mapping[str, int]) -> None:
        self._store, self._starts = store, starts
        self.count = len(starts) + 2

    def __call__(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (number of the load, first node, float32[n] of the nodes from there)."""
        for row_load, (ntype, start) in enumerate(self._starts.items()):
            count = self._store.num_nodes(ntype)
            seeds = self._seeds(ntype)
            for first in range(0, count, _BLOCK):
                last = min(first + _BLOCK, count)
                yield row_load, start + first, np.ones(last - first, np.float32)
                if seeds is not None:
                    yield self.count - 2, start + first, seeds[first:last].astype(np.float32)
                yield self.count - 1, start + first, self._in_edges(ntype, first, last).astype(np.float32)

    def kinds(self) -> np.ndarray:
        """A number for the type of each node and whether it is a training seed, int64[nodes]."""
        kinds = [np.full(self._store.num_nodes(t), 2 * i) for i, t in enumerate(self._starts)]
        for ntype, values in zip(self._starts, kinds, strict=True):
            if (seeds := self._seeds(ntype)) is not None:
                values += seeds
        return np.concatenate(kinds)

    def in_edges(self) -> np.ndarray:
        """The number of in-edges of each node, int64[nodes]."""
        return np.concatenate([self._in_edges(t, 0, self._store.num_nodes(t)) for t in self._starts])

    def _seeds(self, ntype: str) -> np.ndarray | None:
        """Whether each node is a training seed, bool[n]."""
        if ntype not in self._store.splits or "train" not in self._store.splits[ntype]:
            return None
        seeds = np.zeros(self._store.num_nodes(ntype), np.bool_)
        seeds[self._store.splits[ntype]["train"].numpy()] = True
        return seeds

    def _in_edges(self, ntype: str, first: int, last: int) -> np.ndarray:
        counts = np.zeros(last - first, np.int64)
        for relation in self._store.relations:
            if relation[2] == ntype:
                counts += np.diff(self._store.graph(relation).indptr[first : last + 1])
        return counts
