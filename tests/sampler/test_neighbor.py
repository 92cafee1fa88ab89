"""Neighbor sampling equals the model bit by bit, on the CPU and on a device; blocks; random numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from children import ended
from every_sampler import assert_same
from labor_model import philox2
from sampling_model import citations, make_graph, mixed_degrees, philox, sample_neighbors

from gids import _core
from gids.cuda import Device
from gids.sampler import Minibatch, Neighbor, Topology
from gids.sampler.device import PinnedGraph
from gids.store import Graph


def check(
    minibatch: Minibatch, graphs: list[Graph], seeds: dict[str, torch.Tensor], fanouts: list[list[int]]
) -> None:
    """fanouts: by layer, the seeds' first, and relation."""
    of_types = {t: [(node, 0) for node in ids.tolist()] for t, ids in seeds.items()}
    sample_neighbors(graphs, of_types, fanouts, (7, minibatch.epoch, minibatch.step)).check(minibatch)


def check_one(minibatch: Minibatch, graph: Graph, seeds: torch.Tensor, fanouts: list[int]) -> None:
    check(minibatch, [graph], {"_N": seeds}, [[f] for f in reversed(fanouts)])
    assert torch.equal(minibatch.seeds.cpu(), seeds)


@pytest.mark.parametrize(
    ("fanouts", "dtype"),
    [([3, 5, 10], np.int32), ([-1, 4], np.int64), ([2, -1], np.int32), ([48], np.int64), ([49, 1], np.int32)],
    ids=str,
)
def test_minibatches_equal_the_model(device: Device, fanouts: list[int], dtype: type) -> None:
    graph = make_graph(mixed_degrees(600), dtype=dtype)
    seeds = torch.from_numpy(np.random.default_rng(1).permutation(600)[:30])
    sampler = Neighbor(fanouts, threads=1)
    with PinnedGraph(graph, device, topology_on="indptr") as pinned:
        for given, epoch, step in ((graph, 3, 1 << 40), (pinned, 2, 5)):
            check_one(sampler.sample(given, seeds, seed=7, epoch=epoch, step=step), graph, seeds, fanouts)


def test_seed_epoch_step_and_layer_each_change_the_draws_as_in_the_model() -> None:
    graph = make_graph([1000] * 8, dtype=np.int64)  # eight edges of a thousand are hardly ever drawn twice
    rng, drawn, rounds = np.random.default_rng(5), set(), 5
    for _ in range(rounds):
        numbers = [int(n) for n in rng.integers(0, (1 << 63) - 1, 3)]
        for changed in (None, 0, 1, 2):
            seed, epoch, step = (n + (i == changed) for i, n in enumerate(numbers))
            minibatch = Neighbor([8, 8]).sample(graph, torch.arange(1), seed=seed, epoch=epoch, step=step)
            sample_neighbors([graph], {"_N": [(0, 0)]}, [[8], [8]], (seed, epoch, step)).check(minibatch)
            for block in minibatch.blocks:
                drawn.add(tuple(block.positions[:8].tolist()))  # the seed's
    assert len(drawn) == 2 * 4 * rounds


def test_relations_are_sampled_as_in_the_model(device: Device) -> None:
    graphs, fanouts = citations(), [[5, 2, 40, 1], [2, 3, -1, 0]]
    relations = [g.relation for g in graphs]
    sampler = Neighbor([dict(zip(relations, layer, strict=True)) for layer in reversed(fanouts)], threads=2)
    pinned = [PinnedGraph(g, device) for g in graphs]
    some = {"paper": torch.arange(0, 400, 39), "author": torch.arange(9)}
    for step, seeds in enumerate([some, {"author": some["author"]}, {"venue": torch.arange(3)}]):
        for given in (dict(zip(relations, graphs, strict=True)), Topology(pinned)):
            minibatch = sampler.sample(given, seeds, seed=7, epoch=1, step=step)
            check(minibatch, graphs, seeds, fanouts)
            assert minibatch.seeds.keys() == seeds.keys()
    for p in pinned:
        p.close()


def test_one_sampler_can_sample_several_graphs(device: Device) -> None:
    """Large, small, large: memory kept between minibatches has no effect on them."""
    sampler = Neighbor([4, 12], threads=3)
    for nodes in (3000, 40, 1, 2000):
        graph = make_graph(mixed_degrees(nodes, nodes), seed=nodes)
        seeds = torch.from_numpy(np.random.default_rng(nodes).permutation(nodes)[:20])
        with PinnedGraph(graph, device) as pinned:
            for given in (graph, pinned):
                check_one(sampler.sample(given, seeds, seed=7), graph, seeds, [4, 12])
    assert sampler.nbytes > 0


def test_graphs_may_have_no_edges_and_seeds_may_be_none_or_repeat(device: Device) -> None:
    none = make_graph([0] * 9)
    none.indptr.flags.writeable = none.indices.flags.writeable = False  # as of a mapped file
    for graph, seeds in ((make_graph(mixed_degrees(50)), ([], [5, 5, 2, 5])), (none, ([], [1, 1, 8]))):
        for ids in (torch.tensor(nodes, dtype=torch.int64) for nodes in seeds):
            with PinnedGraph(graph, device) as pinned:
                for given, fanouts in product((graph, pinned), ([2, 3], [-1])):
                    check_one(Neighbor(fanouts).sample(given, ids, seed=7), graph, ids, fanouts)
                on_device = ids.to(device.torch_device)
                check_one(Neighbor([-1]).sample(pinned, on_device, seed=7), graph, ids, [-1])


def test_a_seed_that_is_no_node_is_an_error(device: Device) -> None:
    graph, sampler = make_graph(mixed_degrees(50)), Neighbor([2])
    with PinnedGraph(graph, device) as pinned:
        for given, bad in product((graph, pinned), (50, -1, 1 << 40)):
            for draws in (sampler, Neighbor([2], disjoint=True)):
                with pytest.raises(IndexError, match=f"seed {bad} is not a '_N' node: ids run from 0 to 49"):
                    draws.sample(given, torch.tensor([3, bad, 51]), seed=0)
            sampler.sample(given, torch.tensor([3]), seed=0)  # as good as before


def test_a_block_has_edges_and_their_ids(device: Device) -> None:
    plain = make_graph(mixed_degrees(100))
    ids = np.random.default_rng(0).permutation(plain.num_edges)
    graph = Graph(plain.relation, 100, 100, plain.indptr, plain.indices, ids)
    with PinnedGraph(graph, device) as pinned:
        for given in (graph, pinned):
            minibatch = Neighbor([6, 3]).sample(given, torch.arange(10, 40), seed=0)
            for block in minibatch.blocks:
                src, dst = (end.cpu() for end in block.coo())
                assert len(src) == len(dst) == block.num_edges
                positions, nodes = block.positions.cpu(), minibatch.input_nodes.cpu()
                assert torch.equal(nodes[src], torch.from_numpy(graph.indices)[positions])
                ends = np.searchsorted(graph.indptr, positions.numpy(), side="right") - 1
                assert torch.equal(nodes[dst], torch.from_numpy(ends))
                assert torch.equal(block.edge_ids.cpu(), torch.from_numpy(ids)[positions])
                assert block.edge_ids.device == block.indices.device
            edges = sum(block.num_edges for block in minibatch.blocks)
            ends = sum(block.num_dst + 1 for block in minibatch.blocks)
            assert minibatch.nbytes == 8 * (30 + len(minibatch.input_nodes) + 2 * edges + ends)
    block = Neighbor([2]).sample(plain, torch.arange(5), seed=0).blocks[0]
    assert block.edge_ids is block.positions


def test_a_sampler_works_in_a_forked_child() -> None:
    """The child has none of its parent's threads."""
    sampler, graph = Neighbor([4, 4], threads=3), make_graph(mixed_degrees(3000))
    expected = sampler.sample(graph, torch.arange(3000), seed=0)
    ended(lambda: assert_same(sampler.sample(graph, torch.arange(3000), seed=0), expected))


def test_the_repr_of_a_minibatch_shows_its_sizes() -> None:
    graph = make_graph([3, 0], relation=("a", "r", "a"))
    minibatch = Neighbor([2], weights=np.ones(3)).sample(graph, torch.tensor([0]), seed=0)
    minibatch.features = {"a.feat": torch.zeros(3, 8)}
    assert repr(minibatch).startswith("Minibatch(seeds=int64[1], input_nodes=int64[")
    assert " -> 1 nodes, 2 edges, weights)]" in repr(minibatch)
    assert "features={'a.feat': float32[3, 8]}, labels=None)" in repr(minibatch)
    several = Neighbor([2]).sample([graph], {"a": torch.tensor([0])}, seed=0)
    assert "seeds={'a': int64[1]}" in repr(several)
    assert "blocks=[{('a', 'r', 'a'): Block(" in repr(several)


# --- random numbers ---


def test_philox_gives_the_published_vectors() -> None:
    """Some of the authors' kat_vectors (Random123)."""
    vectors: list[Any] = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in vectors:
        assert _core.philox(counter, key) == philox(counter, key) == expected
    for two_words, word, number in (
        (0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF, 0xAB4FD7AD2C3F628B),
        (0x85A308D3243F6A88, 0x13198A2E, 0xF62A4C12DD7CE038),
    ):
        assert _core.philox2(two_words, word) == philox2(two_words, word) == number
