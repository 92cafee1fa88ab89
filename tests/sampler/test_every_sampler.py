"""What every sampler promises: the same minibatch for any threads, in bulk, pickled, in a loader; errors."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from every_sampler import (
    GRAPH,
    NEAR,
    NODES,
    PLAIN,
    SAMPLERS,
    assert_same,
    blocks_of,
    layers_for,
    make,
    spoiled,
)
from sampling_model import citations, mixed_degrees

from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Labor, Ladies, LocalityBias, Neighbor
from gids.sampler.device import PinnedGraph
from gids.sampler.layered import LayeredSampler

PATH = [("author", "writes", "paper"), ("paper", "written by", "author")]


def seeds_of_steps() -> list[torch.Tensor]:
    """Seeds of very different numbers, with none, repeated and isolated ones."""
    rng = np.random.default_rng(5)
    sizes = (40, 0, 1, 700, 3, 64, 64, 64, 0, 200, 17)
    steps = [torch.from_numpy(rng.integers(0, NODES, size)) for size in sizes]
    steps[5][:] = 7
    return steps


@pytest.mark.few(12)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_minibatches_do_not_depend_on_threads_bulk_or_pickling(kind: str) -> None:
    assert (np.diff(GRAPH.indptr) == 0).any()
    numbers: dict[str, Any] = {"seed": 3, "epoch": 2}
    alone, first = make(kind, layers_for(kind), threads=1), 1 << 40
    expected = [
        alone.sample(GRAPH, seeds, step=step, **numbers) for step, seeds in enumerate(seeds_of_steps(), first)
    ]
    assert sum(block.num_edges for minibatch in expected for block in blocks_of(minibatch)) > 2000
    assert alone.nbytes > 0
    for threads in (1, 2, 8):
        sampler = make(kind, layers_for(kind), threads=threads)
        for _ in range(2):  # the second time in used memory
            found = sampler.sample_bulk(GRAPH, seeds_of_steps(), first_step=first, **numbers)
            for one, same in zip(found, expected, strict=True):
                assert_same(one, same)
        few = sampler.sample_bulk(GRAPH, seeds_of_steps()[4:6], first_step=first + 4, **numbers)
        for one, other in zip(few, expected[4:6], strict=True):
            assert_same(one, other)
    for other in (sampler, pickle.loads(pickle.dumps(alone)), copy.deepcopy(alone)):
        assert_same(other.sample(GRAPH, seeds_of_steps()[3], step=first + 3, **numbers), expected[3])
        assert repr(other) == repr(alone)


class Twice(Neighbor):
    """A user's sampler, with a constructor, a slot and a property of its own."""

    __slots__ = ("layers",)

    def __init__(self, fanout: int, masks: list[torch.Tensor]) -> None:
        super().__init__([fanout, fanout], locality=LocalityBias(masks, 4))
        self.layers = 2
        vars(self)["fanout"] = fanout

    @property
    def fanout(self) -> int:
        return int(vars(self)["fanout"])


def test_a_subclass_has_the_masks_of_a_rank_and_can_be_pickled() -> None:
    masks, seeds = [torch.arange(NODES) % 2 == odd for odd in range(2)], seeds_of_steps()[3]
    for rank in range(2):
        expected = Neighbor([3, 3], locality=LocalityBias(masks[rank], 4)).sample(GRAPH, seeds, seed=0)
        mine = Twice(3, masks).of_rank(rank, 2)
        for other in (mine, pickle.loads(pickle.dumps(mine))):
            assert (type(other), other.fanout, other.layers) == (Twice, 3, 2)
            assert_same(other.sample(GRAPH, seeds, seed=0), expected)


@pytest.mark.parametrize("kind", ["neighbor", "labor", "labor-*"])
def test_large_minibatches_do_not_depend_on_threads(kind: str) -> None:
    """Each thread has thousands of edges: nodes are found by several of them at once."""
    graph = make_graph(mixed_degrees(30_000), dtype=np.int32)
    seeds = torch.from_numpy(np.random.default_rng(2).permutation(30_000)[:2000])
    samplers = [make(kind, [5, 10], threads=n) for n in (1, 2, 3, 4)]
    for step in range(2):
        first, *others = [s.sample(graph, seeds, seed=1, step=step) for s in samplers]
        assert sum(b.num_edges for b in blocks_of(first)) > 50_000
        for other in others:
            assert_same(first, other)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", PLAIN)
def test_bulk_equals_single_with_several_relations(kind: str) -> None:
    graphs = citations()
    path: dict[str, Any] = {"metapath": PATH} if kind == "walks" else {}
    steps: list[Any] = [
        {"paper": torch.arange(30), "author": torch.tensor([5, 5, 2])},
        {},
        {"venue": torch.tensor([1, 1]), "paper": torch.tensor([3])},
        {"paper": torch.arange(390, 400)},
        {"author": torch.arange(0), "paper": torch.arange(100, 200)},
    ]
    alone = make(kind, layers_for(kind), threads=1, **path)
    expected = [alone.sample(graphs, seeds, step=step, seed=0) for step, seeds in enumerate(steps)]
    for threads in (1, 2, 8):
        found = make(kind, layers_for(kind), threads=threads, **path).sample_bulk(graphs, steps, seed=0)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


def test_minibatches_of_bulk_belong_to_the_caller() -> None:
    sampler = Neighbor([3, 5], threads=2)
    steps = seeds_of_steps()
    kept = sampler.sample_bulk(GRAPH, steps, seed=0)
    before = [[t.clone() for t in minibatch.tensors()] for minibatch in kept]
    sampler.sample_bulk(GRAPH, steps[::-1], epoch=1, seed=0)
    for minibatch, copies in zip(kept, before, strict=True):
        assert all(map(torch.equal, minibatch.tensors(), copies))
    held = sampler.nbytes
    del kept, minibatch
    assert sampler.nbytes > held > 0  # their memory came back, and is told


def test_a_device_samples_in_bulk_one_after_the_other(device: Device) -> None:
    steps = [torch.arange(n, n + 20) for n in range(0, 60, 20)]
    sampler = Neighbor([3, 3])
    expected = sampler.sample_bulk(GRAPH, steps, seed=1)
    with PinnedGraph(GRAPH, device) as pinned:
        for one, other in zip(sampler.sample_bulk(pinned, steps, seed=1), expected, strict=True):
            assert_same(one, other)
        with pytest.raises(IndexError, match=f"step 6: seed {NODES} is not a '_N' node"):
            sampler.sample_bulk(pinned, [steps[0], torch.tensor([NODES])], first_step=5)


# --- what is refused ---


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_an_error_names_the_first_step_that_fails(threads: int) -> None:
    graph, sampler = make_graph([4] * 20), Neighbor([2], threads=threads)
    steps = [torch.arange(5)] * 7
    steps[3], steps[5] = torch.tensor([20]), torch.tensor([-1])
    with pytest.raises(IndexError, match=r"^step 13: seed 20 is not a '_N' node: ids run from 0 to 19$"):
        sampler.sample_bulk(graph, steps, first_step=10)
    with pytest.raises(IndexError, match=r"^step 5: seed -1 is not a '_N' node"):
        sampler.sample_bulk(graph, steps[5:6], first_step=5)
    with pytest.raises(TypeError, match=r"^step 1: seeds of '_N' are torch\.int32"):
        sampler.sample_bulk(graph, [steps[0], steps[0].int()])
    with pytest.raises(KeyError, match="step 2: seeds of type 'b': no relation has it"):
        sampler.sample_bulk([graph], [{"_N": steps[0]}, {"b": steps[0]}], first_step=1)
    assert sampler.sample_bulk(graph, [], seed=0) == []
    assert len(sampler.sample_bulk(graph, steps[:3], seed=0)) == 3


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "kind", ["neighbor", "labor", "labor of fixed count", "labor-1", "ladies", "poisson ladies", "walks"]
)
def test_an_inconsistent_topology_is_a_format_error(kind: str, threads: int) -> None:
    good = make_graph([4] * 60)
    # What is sound leads to what is sound.
    sound = spoiled(good, indices={edge: int(good.indices[edge]) % 20 for edge in range(160)})
    bad = spoiled(sound, indices=dict.fromkeys(range(160, 240), 60))
    steps = [torch.arange(10), torch.arange(10, 20), torch.arange(35, 50), torch.arange(50, 60)]
    for per_layer in (layers_for(kind), [2], [4]):
        sampler = make(kind, per_layer, threads=threads)
        with pytest.raises(FormatError, match=r"^topology of .* indices\[1\d\d\] is outside 0 to 59"):
            sampler.sample(bad, steps[2])
        with pytest.raises(FormatError, match=r"^step 2: topology of .* indices\[1\d\d\] is outside 0 to 59"):
            sampler.sample_bulk(bad, steps)
        for one, other in zip(
            sampler.sample_bulk(bad, steps[:2], seed=0),
            sampler.sample_bulk(sound, steps[:2], seed=0),
            strict=True,
        ):
            assert_same(one, other)
        with pytest.raises(FormatError, match="indptr decreases or exceeds the indices at node 10"):
            sampler.sample(spoiled(good, indptr={11: 10}), torch.arange(20))


def test_numbers_out_of_range_are_refused() -> None:
    graph, sampler, last = make_graph([4] * 20), Neighbor([2]), (1 << 64) - 1
    steps = [torch.arange(2)] * 2
    assert sampler.sample_bulk(graph, steps, first_step=last - 1, seed=0)[1].step == last
    for numbers in ({"first_step": last}, {"first_step": -1}, {"seed": -1}, {"epoch": 1 << 64}):
        with pytest.raises(ValueError, match=r"seed, epoch and step must be 0 to 2\^64 - 1"):
            sampler.sample_bulk(graph, steps, **numbers)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Labor([4]), "Labor([4])"),
        (
            Labor([2, 3], importance_sampling=1, batch_dependency=float("inf"), fixed_count=True, threads=1),
            "Labor([2, 3], importance_sampling=1, fixed_count=True, batch_dependency=inf)",
        ),
        (Ladies([4], poisson=True), "Ladies([4], poisson=True)"),
        (
            make("walks", [2], restart=0.25, metapath=[("a", "b", "a")], threads=3),
            "RandomWalk([2], restart=0.25, metapath=[('a', 'b', 'a')])",
        ),
        (
            Neighbor([3], temporal="edges", strategy="last"),
            "Neighbor([3], disjoint=True, temporal='edges', strategy='last')",
        ),
    ],
    ids=str,
)
def test_repr_shows_everything_that_minibatches_depend_on(sampler: LayeredSampler, expected: str) -> None:
    assert repr(sampler) == expected


def test_samplers_with_equal_repr_have_equal_masks() -> None:
    masks = [NEAR, NEAR.copy(), ~NEAR]
    told = [repr(Neighbor([2], locality=LocalityBias(m, f))) for m, f in itertools.product(masks, (2, 3))]
    assert told[0] == told[2]
    assert len(set(told)) == 4
    assert f"{NODES} nodes" in told[0]
    assert "factor=3.0" in told[1]
    assert repr(LocalityBias({"a": NEAR}, 2)) != repr(LocalityBias(NEAR, 2))
