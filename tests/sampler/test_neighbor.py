"""Neighbor sampling equals the model bit by bit, on the CPU with any threads, and on a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from children import ended
from datasets import make_graph
from emulator import EmulatedDevice
from every_sampler import assert_refused, assert_same, spoiled
from labor_model import philox2
from sampling_model import citations, mixed_degrees, philox, sample, uniform

from gids import _core
from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Block, Minibatch, Neighbor, Topology
from gids.sampler.device import PinnedGraph
from gids.store import Graph

Layers = Sequence[Sequence[int]]


def check(
    minibatch: Minibatch, graphs: Sequence[Graph], seeds: dict[str, torch.Tensor], fanouts: Layers
) -> None:
    ids = {t: ids.tolist() for t, ids in seeds.items()}
    sample(graphs, ids, fanouts, uniform((7, minibatch.epoch, minibatch.step))).check(minibatch)


def assert_homogeneous(minibatch: Minibatch, graph: Graph, seeds: torch.Tensor, fanouts: list[int]) -> None:
    check(minibatch, [graph], {graph.relation[0]: seeds}, [[f] for f in reversed(fanouts)])
    assert torch.equal(minibatch.seeds.cpu(), seeds)  # type: ignore[union-attr]


FANOUTS = [[10], [1, 2], [3, 5, 10], [-1, 4], [2, -1], [48], [49, 1], [100, 3], [300]]


@pytest.mark.few(9)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("fanouts", FANOUTS, ids=str)
def test_minibatches_equal_the_model(device: Device, fanouts: list[int], dtype: type) -> None:
    graph = make_graph(mixed_degrees(600), dtype=dtype)
    seeds = torch.from_numpy(np.random.default_rng(1).permutation(600)[:50])
    topology_on, sampler = "indptr" if dtype == np.int32 else "host", Neighbor(fanouts, threads=1)
    with PinnedGraph(graph, device, topology_on=topology_on) as pinned:
        for given, epoch, step in ((graph, 0, 0), (graph, 3, 1 << 40), (pinned, 2, 5)):
            minibatch = sampler.sample(given, seeds, seed=7, epoch=epoch, step=step)
            assert_homogeneous(minibatch, graph, seeds, fanouts)
        for tensor in (minibatch.seeds, minibatch.input_nodes, minibatch.blocks[0].indices):  # type: ignore[union-attr]
            assert tensor.device == device.torch_device  # type: ignore[union-attr]


def test_seed_epoch_step_and_layer_each_change_the_draws_as_in_the_model() -> None:
    graph = make_graph([1000] * 8, dtype=np.int64)  # eight edges of a thousand are hardly ever drawn twice
    rng, drawn, rounds = np.random.default_rng(5), set(), 20
    for _ in range(rounds):
        numbers = [int(n) for n in rng.integers(0, (1 << 63) - 1, 3)]
        for changed in (None, 0, 1, 2):
            seed, epoch, step = (n + (i == changed) for i, n in enumerate(numbers))
            minibatch = Neighbor([8, 8]).sample(graph, torch.arange(1), seed=seed, epoch=epoch, step=step)
            draw = uniform((seed, epoch, step))
            sample([graph], {graph.relation[0]: [0]}, [[8], [8]], draw).check(minibatch)
            for block in minibatch.blocks:
                drawn.add(tuple(block.positions[:8].tolist()))  # type: ignore[union-attr]  # the seed's
    assert len(drawn) == 2 * 4 * rounds


@pytest.mark.parametrize(
    "fanouts", [[[3, 3, 3, 3]], [[5, 2, 40, 1], [2, 3, -1, 0]], [[4, 4, 4, 4]] * 3], ids=str
)
def test_relations_are_sampled_as_in_the_model(device: Device, fanouts: Layers) -> None:
    graphs = citations()
    rng = np.random.default_rng(3)
    some = {
        "paper": torch.from_numpy(rng.permutation(400)[:20]),
        "author": torch.from_numpy(rng.permutation(150)[:9]),
    }
    relations = [g.relation for g in graphs]
    sampler = Neighbor([dict(zip(relations, layer, strict=True)) for layer in reversed(fanouts)], threads=2)
    pinned = [PinnedGraph(g, device) for g in graphs]
    for step, seeds in enumerate([some, {"author": some["author"]}, {"venue": torch.arange(3)}]):
        for given in (graphs, dict(zip(relations, graphs, strict=True)), pinned, Topology(pinned)):
            minibatch = sampler.sample(given, seeds, seed=7, epoch=1, step=step)  # type: ignore[arg-type]
            check(minibatch, graphs, seeds, fanouts)
            assert minibatch.seeds.keys() == seeds.keys()
    for p in pinned:
        p.close()


@pytest.mark.parametrize(
    ("fanouts", "options", "waits"),
    [
        ([5, 3, 4], {}, 1),
        ([5, 3, 4], {"replace": True}, 1),
        ([-1, 3, 4], {}, 3),  # a layer of all in-edges needs their number first, and the layers before it
        ([5, 3, -1], {}, 2),
    ],
)
def test_the_host_waits_for_a_device_once_per_minibatch(
    monkeypatch: pytest.MonkeyPatch, fanouts: list[int], options: dict[str, Any], waits: int
) -> None:
    """It waits where it needs sizes, in tolist()."""
    graph, waited = make_graph(mixed_degrees(400)), []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: (waited.append(1), tolist(tensor))[1])
    sampler = Neighbor(fanouts, **options)
    with PinnedGraph(graph, EmulatedDevice()) as pinned:
        got = sampler.sample(pinned, torch.arange(50), seed=0)
    assert len(waited) == waits
    assert_same(got, sampler.sample(graph, torch.arange(50), seed=0))


def test_one_sampler_can_sample_several_graphs(device: Device) -> None:
    """Large, small, large: memory kept between minibatches has no effect on them."""
    sampler = Neighbor([4, 12], threads=3)
    for nodes in (3000, 40, 1, 2000):
        graph = make_graph(mixed_degrees(nodes, nodes), seed=nodes)
        seeds = torch.from_numpy(np.random.default_rng(nodes).permutation(nodes)[:100])
        assert_homogeneous(sampler.sample(graph, seeds, seed=7), graph, seeds, [4, 12])
        with PinnedGraph(graph, device) as pinned:
            assert_homogeneous(sampler.sample(pinned, seeds[:20], seed=7), graph, seeds[:20], [4, 12])
    assert sampler.nbytes > 0


def test_graphs_may_have_no_edges_and_seeds_may_be_none_or_repeat(device: Device) -> None:
    none = make_graph([0] * 9)
    none.indptr.flags.writeable = none.indices.flags.writeable = False  # as of a mapped file
    for graph, seeds in ((make_graph(mixed_degrees(50)), ([], [5, 5, 2, 5], [0])), (none, ([], [1, 1, 8]))):
        for ids in (torch.tensor(nodes, dtype=torch.int64) for nodes in seeds):
            with PinnedGraph(graph, device) as pinned:
                for given, fanouts in product((graph, pinned), ([2, 3], [-1])):
                    minibatch = Neighbor(fanouts).sample(given, ids, seed=7)
                    assert_homogeneous(minibatch, graph, ids, fanouts)
                on_device = ids.to(device.torch_device)
                assert_homogeneous(Neighbor([-1]).sample(pinned, on_device, seed=7), graph, ids, [-1])


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
                positions = block.positions.cpu()
                nodes = minibatch.input_nodes.cpu()
                assert torch.equal(nodes[src], torch.from_numpy(graph.indices)[positions])
                ends = np.searchsorted(graph.indptr, positions.numpy(), side="right") - 1
                assert torch.equal(nodes[dst], torch.from_numpy(ends))
                assert torch.equal(block.edge_ids.cpu(), torch.from_numpy(ids)[positions])
                assert block.edge_ids.device == block.indices.device
            edges = sum(block.num_edges for block in minibatch.blocks)  # type: ignore[union-attr]
            ends = sum(block.num_dst + 1 for block in minibatch.blocks)  # type: ignore[union-attr]
            assert minibatch.nbytes == 8 * (30 + len(minibatch.input_nodes) + 2 * edges + ends)
    assert plain.edge_ids is None
    block = Neighbor([2]).sample(plain, torch.arange(5), seed=0).blocks[0]
    assert block.edge_ids is block.positions  # type: ignore[union-attr]


def test_a_sampler_works_in_a_forked_child() -> None:
    """The child has none of its parent's threads."""
    sampler, graph = Neighbor([4, 4], threads=3), make_graph(mixed_degrees(3000))
    expected = sampler.sample(graph, torch.arange(3000), seed=0)

    def sample_again() -> None:
        assert_same(sampler.sample(graph, torch.arange(3000), seed=0), expected)

    ended(sample_again)


# --- what is refused ---


@pytest.mark.parametrize(
    "fanouts", [[], [3, -2], [0], [True], [2.5], [1 << 31], [{("a", "b", "a"): -3}]], ids=str
)
def test_bad_fanouts(fanouts: list[int]) -> None:
    with pytest.raises(ValueError, match="fanouts="):
        Neighbor(fanouts)


def test_bad_seeds(device: Device) -> None:
    graph, sampler = make_graph(mixed_degrees(50)), Neighbor([2])
    numbers: Any = {g.relation: 2 for g in citations()}
    with PinnedGraph(graph, device) as pinned:
        for given in (graph, pinned):
            for bad in (50, -1, 1 << 40):
                with pytest.raises(IndexError, match=f"seed {bad} is not a '_N' node: ids run from 0 to 49"):
                    sampler.sample(given, torch.tensor([3, bad, 51]))
            sampler.sample(given, torch.tensor([3]), seed=0)  # as good as before
            refused: Any = partial(sampler.sample, given)
            assert_refused(
                (TypeError, "give int64", lambda: refused(torch.arange(3, dtype=torch.int32))),  # noqa: B023
                (TypeError, "give int64", lambda: refused(torch.zeros((2, 2), dtype=torch.int64))),  # noqa: B023
                (TypeError, "give a tensor", lambda: refused([1, 2])),  # noqa: B023
                (TypeError, "dictionary", lambda: refused({"_N": torch.arange(3)})),  # noqa: B023
            )
    seeds, papers = torch.arange(3), {"paper": torch.arange(3)}
    some, more = Neighbor([dict(list(numbers.items())[:3])]), Neighbor([{**numbers, ("a", "b", "c"): 1}])
    assert_refused(
        (TypeError, "must be a dictionary", lambda: sampler.sample([graph], seeds)),
        (KeyError, "no relation has it", lambda: sampler.sample([graph], papers)),
        (ValueError, r"must be 0 to .*step=-1", lambda: sampler.sample(graph, seeds, step=-1)),
        (ValueError, r"lacks 'venue\.prints\.paper'", lambda: some.sample(citations(), papers)),
        (ValueError, "no graph has that relation", lambda: more.sample(citations(), papers)),
    )


def test_bad_sets_of_graphs(device: Device) -> None:
    graph, bipartite, seeds = make_graph([1, 2]), citations()[1], torch.arange(2)
    papers = make_graph([1], relation=("paper", "x", "paper"))
    short = Graph(graph.relation, 2, 2, graph.indptr[:2], graph.indices, None)
    floats = Graph(graph.relation, 2, 2, graph.indptr, graph.indices.astype(float), None)
    huge = Graph(("a", "b", "c"), 1 << 33, 0, np.zeros(1, np.int64), np.zeros(0, np.int64), None)
    pinned = PinnedGraph(graph, device)
    with PinnedGraph(short, device) as of_short:
        assert_refused(
            (ValueError, r"pass \[graph\]", lambda: Neighbor([2]).sample(bipartite, seeds)),
            (TypeError, "one or more", lambda: Neighbor([2]).sample([], seeds)),
            (ValueError, "given twice", lambda: Topology([graph, graph])),
            (ValueError, "another relation has 400", lambda: Topology([citations()[0], papers])),
            (ValueError, r"2 destinations; it needs indptr\[3\]", lambda: Topology(short)),
            (ValueError, "2 destinations", lambda: Topology(of_short)),
            (TypeError, "indices float64", lambda: Topology(floats)),
            (ValueError, "pin all for one device, or none", lambda: Topology([pinned, bipartite])),
            (ValueError, "at most 4294967295", lambda: Topology([huge])),
        )
    pinned.close()
    with pytest.raises(ValueError, match="closed"):
        Neighbor([2]).sample(pinned, seeds)


@pytest.mark.parametrize("fanout", [3, -1])
def test_an_inconsistent_topology_is_a_format_error(device: Device, fanout: int) -> None:
    good = make_graph([4] * 20)
    cases = [
        (spoiled(good, indices={41: 20, 42: -1}), r"indices\[41\] is outside 0 to 19"),
        (spoiled(good, indptr={11: 10}), "indptr decreases or exceeds the indices at node 10"),
        (spoiled(good, indptr={7: -3, 20: 81}), "indptr decreases or exceeds the indices at node 6"),
        (spoiled(good, indptr={20: 81}), "at node 19"),
    ]
    for graph, message in cases:
        sampler = Neighbor([fanout, -1], threads=2)
        with PinnedGraph(graph, device) as pinned:
            for given in (graph, pinned):
                with pytest.raises(FormatError, match=message):
                    sampler.sample(given, torch.arange(20))
                again = sampler.sample(good, torch.arange(20), seed=7)
                assert_homogeneous(again, good, torch.arange(20), [fanout, -1])


def test_the_repr_of_a_minibatch_shows_its_sizes() -> None:
    block = Block(torch.tensor([0, 2]), torch.tensor([1, 2]), torch.tensor([0, 1]), 3, citations()[0])
    seeds, nodes = torch.tensor([4]), torch.tensor([4, 5, 6])
    minibatch = Minibatch(seeds, nodes, [block], epoch=1, step=2, features={"_N.feat": torch.zeros(3, 8)})
    assert repr(minibatch) == (
        "Minibatch(seeds=int64[1], input_nodes=int64[3], blocks=[Block(3 -> 1 nodes, 2 edges)], epoch=1, "
        "step=2, features={'_N.feat': float32[3, 8]}, labels=None)"
    )
    block.weights = torch.ones(2)
    several = Minibatch({"a": seeds}, {"a": nodes}, [{("a", "r", "a"): block}])
    assert "seeds={'a': int64[1]}, input_nodes={'a': int64[3]}" in repr(several)
    assert "blocks=[{('a', 'r', 'a'): Block(3 -> 1 nodes, 2 edges, weights)}]" in repr(several)


# --- random numbers ---


# From the authors' kat_vectors (Random123).
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert _core.philox(counter, key) == expected  # type: ignore[arg-type]
    assert philox(counter, key) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (0, 0, 0x6CD10DF2FF1DAE59),
        (0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF, 0xAB4FD7AD2C3F628B),
        (0x85A308D3243F6A88, 0x13198A2E, 0xF62A4C12DD7CE038),
    ],
)
def test_philox2_gives_the_published_vectors(counter: int, key: int, expected: int) -> None:
    assert _core.philox2(counter, key) == philox2(counter, key) == expected
