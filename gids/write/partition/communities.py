"""Owners by community: nodes that are near each other get one part. Called by run.py.

Communities are packed into parts so that rows of each type, training seeds and in-edges are balanced. Then
nodes move to the part of most of their neighbors, as long as the balance stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gids import _core
from gids.errors import FormatError
from gids.write.row_order import MAX_ROWS, InEdges, find_communities

_SHARE = 20  # a community has at most 1/20 of the rows of a part
_HEAVY = 8  # a community with more than 1/8 of another load of a part is packed node by node
_MOST = 1.03  # times the mean: the largest load of a part that nodes may move to
_ROUNDS = 8
_SETTLED = 200  # stop when fewer than one node in this many moves
_BLOCK = 1 << 20

Loads = Callable[[], Iterator[tuple[int, int, np.ndarray]]]
"""Yields (number of the load, first node, float32 of each node from there): all that is not 0."""


def memory_needed(node_count: int, load_count: int) -> int:
    """Bytes of memory for community_owners, besides memory maps."""
    return node_count * (16 + 4 * load_count)


def check_memory(node_count: int, load_count: int, memory_bytes: int) -> None:
    """Raise FormatError, with the bytes needed, if the nodes do not fit in memory."""
    if node_count > MAX_ROWS:
        raise FormatError(f"--method community supports at most {MAX_ROWS} nodes, not {node_count}")
    needed = memory_needed(node_count, load_count)
    if needed > memory_bytes:
        raise FormatError(
            f"--method community of {node_count} nodes needs {needed} bytes, but --memory is {memory_bytes}: "
            f"give --memory {needed // 1_000_000 + 1}MB, or --method hash"
        )


def community_owners(
    graphs: Sequence[InEdges], loads_of: Loads, node_count: int, load_count: int, part_count: int
) -> np.ndarray:
    """The part of each node: uint16[node_count].

    graphs: in-edges between all nodes. The last load is the number of in-edges. Deterministic. Raises
    ValueError for a damaged topology.
    """
    most_rows = min(MAX_ROWS, max(1, node_count // (_SHARE * part_count)))
    labels, sizes = find_communities(graphs, node_count, most_rows)
    order = np.empty(node_count, np.uint32)
    _core.by_weight(sizes, order)
    weights = np.zeros((node_count, load_count), np.float32)
    for load, first, values in loads_of():
        _core.add_weights(labels[first : first + len(values)], values, load, weights)
    totals = weights.sum(axis=0, dtype=np.float64)
    loads = np.zeros((part_count, load_count))
    of_label = np.full(node_count, _core.NO_PART, np.uint16)
    _core.pack(order, weights, totals, 1 / (_HEAVY * part_count), loads, of_label)
    parts = np.empty(node_count, np.uint16)
    for start in range(0, node_count, _BLOCK):
        parts[start : start + _BLOCK] = of_label[labels[start : start + _BLOCK]]
    del labels, of_label
    weights[:] = 0
    for load, first, values in loads_of():
        nodes = np.arange(first, first + len(values), dtype=np.uint32)
        _core.add_weights(nodes, values, load, weights)
    for start in range(0, node_count, _BLOCK):
        sizes[start : start + _BLOCK] = np.minimum(weights[start : start + _BLOCK, -1], 1 << 31)
    _core.by_weight(sizes, order)
    _core.pack(order, weights, totals, 1.0, loads, parts)
    for _ in range(_ROUNDS):
        moved = sum(
            _core.refine(indptr, indices, weights, totals, _MOST, loads, parts) for indptr, indices in graphs
        )
        if moved * _SETTLED < node_count:
            break
    return parts
