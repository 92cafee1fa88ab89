"""Counts what each part will hold, and the edges between parts. Called by run.py, once nodes have owners.

Checks the checksums of the topology and of the training seeds on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gids.store.manifest import Manifest, RelationEntry
from gids.write.partition.edge_blocks import edge_blocks
from gids.write.partition.source_arrays import SourceArrays

_BLOCK = 1 << 20
_EDGE_BYTES = 40
"""Memory per edge of a block."""


def count_parts(
    manifest: Manifest,
    arrays: SourceArrays,
    owners_of: Callable[[str], np.ndarray],
    parts: int,
    *,
    memory_bytes: int,
    on_bytes: Callable[[int], None],
) -> dict[str, Any]:
    """The nodes (by type), edges (by relation) and training seeds of each part, and the number of cut edges.

    owners_of(node type): the part of each node. on_bytes(n): progress, 8 bytes per edge. Raises StorageError
    for a damaged array.
    """
    nodes, edges, cut = [], [], 0
    seeds = np.zeros(parts, np.int64)
    for entry in manifest.nodes:
        owners = owners_of(entry.type)
        counts = np.zeros(parts, np.int64)
        for start in range(0, entry.count, _BLOCK):
            counts += np.bincount(owners[start : start + _BLOCK], minlength=parts)
        nodes.append(counts.tolist())
        train = entry.arrays.get("train_idx")
        if train is not None:
            arrays.check(train)
            for start in range(0, train.shape[0], _BLOCK):
                ids = arrays.read(train, start, min(start + _BLOCK, train.shape[0]))
                seeds += np.bincount(owners[ids], minlength=parts)
    for relation in manifest.relations:
        for array in relation.arrays.values():
            arrays.check(array)
        sources, owners = owners_of(relation.type[0]), owners_of(relation.type[2])
        found, found_cut = _count_edges(relation, arrays, sources, owners, parts, memory_bytes, on_bytes)
        edges.append(found)
        cut += found_cut
    return {"nodes": nodes, "edges": edges, "seeds": seeds.tolist(), "cut": cut}


def _count_edges(
    relation: RelationEntry,
    arrays: SourceArrays,
    sources: np.ndarray,
    destinations: np.ndarray,
    parts: int,
    memory_bytes: int,
    on_bytes: Callable[[int], None],
) -> tuple[list[int], int]:
    """(the edges of each part, the number of cut edges). sources, destinations: their owners."""
    counts, cut = np.zeros(parts, np.int64), 0
    step = max(1, min(_BLOCK, memory_bytes // _EDGE_BYTES))
    for begin, end, of in edge_blocks(arrays.mapped(relation.arrays["indptr"]), destinations, step):
        counts += np.bincount(of, minlength=parts)
        cut += int(np.count_nonzero(sources[arrays.read(relation.arrays["indices"], begin, end)] != of))
        on_bytes(8 * (end - begin))
    return counts.tolist(), cut
