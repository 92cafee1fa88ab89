"""RandomWalk equals its model step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from sampling_model import citations, halves, layer_key, make_graph, mixed_degrees, philox, words

from gids.sampler import Block, RandomWalk
from gids.store import Graph


def visited(sampler: RandomWalk, path: Sequence[Graph], key: int, start: int) -> list[tuple[int, int]]:
    """(node, how often), by how often and then in order of the first visit."""

    def draw(i: int) -> int:
        return halves(philox((*words(start), *words(i // 2)), words(key)))[i % 2]

    visits: Counter[int] = Counter()
    i = 0
    for _ in range(sampler.num_walks):
        node = start
        for step in range(sampler.walk_length):
            if step and ((draw(i) >> 11) + 0.5) / 2**53 < sampler.restart:
                node = start
            for hop, graph in enumerate(path):
                begin, end = int(graph.indptr[node]), int(graph.indptr[node + 1])
                if begin == end:
                    node = start
                    break
                node = int(graph.indices[begin + (draw(i + 1 + hop) * (end - begin) >> 64)])
            else:
                if node != start:
                    visits[node] += 1
            i += 1 + len(path)
    return sorted(visits.items(), key=lambda item: -item[1])  # stable: by the first visit


def assert_walks(
    sampler: RandomWalk, path: Sequence[Graph], blocks: Sequence[Block], nodes: list[int]
) -> None:
    """Layers, the seeds' first. nodes: the input nodes."""
    counts = list(reversed(sampler.num_neighbors))
    for layer, (block, most) in enumerate(zip(blocks, counts, strict=True)):
        key = layer_key(7, 1, 5, layer, 0)
        found: list[tuple[int, float]] = []
        ends = [0]
        for node in nodes[: block.num_dst]:
            kept = visited(sampler, path, key, node)[:most]
            total = sum(times for _, times in kept)
            found += [(other, times / total) for other, times in kept]
            ends.append(len(found))
        assert block.indptr.tolist() == ends
        assert [nodes[i] for i in block.indices.tolist()] == [node for node, _ in found]
        assert block.weights is not None
        np.testing.assert_allclose(block.weights.numpy(), [share for _, share in found], rtol=1e-6)
        assert set(block.positions.tolist()) <= {-1}


def test_walks_equal_the_model() -> None:
    graph = make_graph(mixed_degrees(400), dtype=np.int32)
    seeds = torch.tensor([3, 7, 7, 100, 20])
    for restart in (0.0, 0.5):
        sampler = RandomWalk([4, 3], num_walks=6, walk_length=3, restart=restart, threads=2)
        minibatch = sampler.sample(graph, seeds, seed=7, epoch=1, step=5)
        nodes = minibatch.input_nodes.tolist()
        assert nodes[:5] == seeds.tolist()
        assert len(set(nodes)) == len(nodes) - 1
        assert_walks(sampler, [graph], minibatch.blocks[::-1], nodes)
    for seeds in (torch.empty(0, dtype=torch.int64), torch.tensor([1, 0, 1])):
        alone = RandomWalk([3, 3]).sample(make_graph([0] * 4), seeds, seed=0)
        assert torch.equal(alone.input_nodes, seeds)
        assert all(block.num_edges == 0 for block in alone.blocks)


def test_walks_follow_a_metapath() -> None:
    graphs = citations()
    by_relation = {g.relation: g for g in graphs}
    path = [("author", "writes", "paper"), ("paper", "written by", "author")]
    sampler = RandomWalk([5, 5], num_walks=8, walk_length=2, metapath=path)
    minibatch = sampler.sample(graphs, {"paper": torch.arange(15)}, seed=7, epoch=1, step=5)
    nodes = minibatch.input_nodes
    assert {t: len(of_type) for t, of_type in nodes.items() if t != "paper"} == {"author": 0, "venue": 0}
    blocks = []
    for layer in minibatch.blocks[::-1]:
        [(relation, block)] = layer.items()
        assert relation == block.relation == ("paper", "walks", "paper")
        blocks.append(block)
    assert_walks(sampler, [by_relation[r] for r in path], blocks, nodes["paper"].tolist())
    assert blocks[0].num_edges > 15
