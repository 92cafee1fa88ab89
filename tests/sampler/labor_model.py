"""The obvious model of LABOR: one node at a time, c_s by bisection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sampling_model import MASK, Draw, Node, Taken, layer_key, words

from gids.store import Graph


def philox2(counter: int, key: int) -> int:
    c0, c1 = words(counter)
    for _ in range(10):
        product = 0xD256D193 * c0
        c0, c1 = product >> 32 ^ key ^ c1, product & MASK
        key = key + 0x9E3779B9 & MASK
    return c0 | c1 << 32


def variate(key: int, node: int) -> int:
    return philox2(node | key >> 32 << 32, key & MASK)


def factor(pi: Sequence[float], k: int) -> float:
    """c with sum of 1 / min(1, c pi) = d^2 / min(k, d)."""
    d = len(pi)
    if d <= k:
        return max((1 / p for p in pi), default=0.0)
    low, high = 0.0, 1 / min(pi)
    each = np.array(pi)
    for _ in range(45):
        c = (low + high) / 2
        low, high = (c, high) if (1 / np.minimum(1, c * each)).sum() > d * d / k else (low, c)
    return (low + high) / 2


def probabilities(neighbors: Sequence[Sequence[int]], k: int, times: int) -> dict[int, float]:
    pi = {t: 1.0 for of_node in neighbors for t in of_node}
    before = float("inf")
    while times:
        most = dict.fromkeys(pi, 0.0)
        for of_node in neighbors:
            c = factor([pi[t] for t in of_node], k)
            for t in of_node:
                most[t] = max(most[t], c)
        pi = {t: p * most[t] for t, p in pi.items()}
        expected = sum(min(1, p) for p in pi.values())
        if times < 0 and expected >= before * (1 - 1e-4):
            break
        before, times = expected, times - 1
    return pi


def choose(
    of_node: Sequence[int], pi: dict[int, float], k: int, key: int, fixed_count: bool, plain: bool
) -> list[tuple[int, float]]:
    """(which in-edge, weight)."""
    d = len(of_node)
    if k == -1 or d <= k:
        return [(e, 1.0) for e in range(d)]
    bits = [variate(key, t) for t in of_node]
    r = [((b >> 11) + 0.5) / 2**53 for b in bits]
    if plain and not fixed_count:
        return [(e, d / k) for e in range(d) if bits[e] * d >> 64 < k]
    if fixed_count:
        order = sorted(range(d), key=lambda e: (r[e] / pi[of_node[e]], e))
        last = r[order[k]] / pi[of_node[order[k]]]
        return [(e, d / k if plain else 1 / min(1, pi[of_node[e]] * last)) for e in sorted(order[:k])]
    c = factor([pi[t] for t in of_node], k)
    p = [min(1, c * pi[t]) for t in of_node]
    return [(e, 1 / p[e]) for e in range(d) if r[e] <= p[e]]


def labor(
    graphs: Sequence[Graph],
    numbers: tuple[int, int, int],
    *,
    times: int,
    fixed_count: bool,
    layer_dependency: bool,
) -> Draw:
    """How Labor draws."""
    types = list(dict.fromkeys(t for g in graphs for t in (g.relation[0], g.relation[2])))

    def draw(graph: Graph, relation: int, layer: int, k: int, nodes: list[Node]) -> Taken:
        key = layer_key(*numbers, 0 if layer_dependency else layer, types.index(graph.relation[0]))
        begins = [int(graph.indptr[node]) for _, node in nodes]
        neighbors = [graph.indices[graph.indptr[v] : graph.indptr[v + 1]].tolist() for _, v in nodes]
        pi = probabilities(neighbors, k, times if k > 0 else 0)
        plain = times == 0 or k < 1
        return [
            [(begin + e, weight) for e, weight in choose(of_node, pi, k, key, fixed_count, plain)]
            for begin, of_node in zip(begins, neighbors, strict=True)
        ]

    return draw


# Examples of docs/internals/sampling-methods.md: the fanout, the sources of each destination, and the
# probability of each edge of the last destination, by the number of rounds.
EXAMPLES = [
    (2, [[0], [0, 1, 2, 3]], {0: [1 / 2] * 4, 1: [7 / 8, *[7 / 16] * 3], -1: [1, *[3 / 7] * 3]}),
    (3, [[0], [1, 2], [1], [3], [4], [5], [0, 1, 2, 3, 4, 5]], dict.fromkeys((0, 1, 2, -1), [1 / 2] * 6)),
]
