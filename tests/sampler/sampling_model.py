"""The obvious model of neighbor sampling: random numbers, choice and numbering, one node at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gids.store import Graph

MASK = (1 << 32) - 1


def philox(counter: Sequence[int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & MASK, a >> 32 ^ c3 ^ k1, a & MASK
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return c0, c1, c2, c3


def words(value: int) -> tuple[int, int]:
    return value & MASK, value >> 32


def halves(out: tuple[int, int, int, int]) -> tuple[int, int]:
    return out[0] | out[1] << 32, out[2] | out[3] << 32


def layer_key(seed: int, epoch: int, step: int, layer: int, relation: int) -> int:
    """The key of one relation in one layer of one minibatch. Layer 0 is the seeds' layer."""
    minibatch = halves(philox((*words(epoch), *words(step)), words(seed)))[0]
    return halves(philox((*words(layer), *words(relation)), words(minibatch)))[0]


def choose(degree: int, fanout: int, key: int, node: int) -> list[int]:
    """A node's sampled in-edges, in order: Floyd's algorithm."""
    if fanout == -1 or degree <= fanout:
        return list(range(degree))
    chosen: list[int] = []
    for i in range(fanout):
        bits = halves(philox((*words(node), *words(i // 2)), words(key)))[i % 2]
        last = degree - fanout + i
        drawn = bits * (last + 1) >> 64
        chosen.append(last if drawn in chosen else drawn)
    return chosen


@dataclass
class ModelBlock:
    indptr: list[int]
    indices: list[int]
    positions: list[int]
    num_src: int


def sample(
    graphs: Sequence[Graph],
    seeds: dict[str, list[int]],
    fanouts: Sequence[Sequence[int]],
    seed: int,
    epoch: int,
    step: int,
) -> tuple[dict[str, list[int]], list[list[ModelBlock]]]:
    """(nodes by type, blocks by layer and relation); layers and their fanouts go from the seeds on."""
    types = list(dict.fromkeys(t for g in graphs for t in (g.relation[0], g.relation[2])))
    nodes = {t: list(seeds.get(t, [])) for t in types}
    local: dict[str, dict[int, int]] = {t: {} for t in types}
    for t in types:
        for at, node in enumerate(nodes[t]):
            local[t].setdefault(node, at)
    layers = []
    for layer, layer_fanouts in enumerate(fanouts):
        frontier = {t: list(nodes[t]) for t in types}
        blocks = []
        for r, (graph, fanout) in enumerate(zip(graphs, layer_fanouts, strict=True)):
            src, _, dst = graph.relation
            key = layer_key(seed, epoch, step, layer, r)
            block = ModelBlock([0], [], [], 0)
            for node in frontier[dst]:
                begin, end = int(graph.indptr[node]), int(graph.indptr[node + 1])
                for offset in choose(end - begin, fanout, key, node):
                    source = int(graph.indices[begin + offset])
                    if source not in local[src]:
                        local[src][source] = len(nodes[src])
                        nodes[src].append(source)
                    block.indices.append(local[src][source])
                    block.positions.append(begin + offset)
                block.indptr.append(len(block.indices))
            blocks.append(block)
        for graph, block in zip(graphs, blocks, strict=True):
            block.num_src = len(nodes[graph.relation[0]])
        layers.append(blocks)
    return nodes, layers
