"""sample_bulk: bit by bit the minibatches that sample() makes one by one, whatever the sampler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from sampling_graphs import citations, mixed_degrees

from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Block, Labor, Ladies, LocalityBias, Minibatch, Neighbor, RandomWalk
from gids.sampler.device import PinnedGraph
from gids.sampler.layered import LayeredSampler
from gids.sampler.minibatch import PerType
from gids.store import Graph

NODES = 2000
PATH = [("author", "writes", "paper"), ("paper", "written by", "author")]
SAMPLERS: dict[str, Callable[..., LayeredSampler]] = {
    "neighbor": lambda **o: Neighbor([3, 5], **o),
    "all neighbors": lambda **o: Neighbor([-1, 2], **o),
    "with replacement": lambda **o: Neighbor([3, 5], replace=True, **o),
    "dependent": lambda **o: Neighbor([3, 5], batch_dependency=3, **o),
    "nested": lambda **o: Neighbor([3, 5], batch_dependency=3, nested=True, **o),
    "labor": lambda **o: Labor([3, 5], **o),
    "labor, fixed count": lambda **o: Labor([3, 5], fixed_count=True, batch_dependency=4, **o),
    "labor-1": lambda **o: Labor([3, 5], importance_sampling=1, **o),
    "labor-*": lambda **o: Labor([3, 5], importance_sampling=-1, batch_dependency=math.inf, **o),
    "ladies": lambda **o: Ladies([60, 40], **o),
    "poisson ladies": lambda **o: Ladies([60, 40], poisson=True, **o),
    "walks": lambda **o: RandomWalk([3, 3], **o),
}


def tensors(item: PerType) -> dict[str, torch.Tensor]:
    return item if isinstance(item, dict) else {"": item}


def all_blocks(minibatch: Minibatch) -> list[Block]:
    layers: list[Any] = minibatch.blocks
    return [b for layer in layers for b in (layer.values() if isinstance(layer, dict) else [layer])]


def assert_same(one: Minibatch, other: Minibatch) -> None:
    assert (one.epoch, one.step) == (other.epoch, other.step)
    for ours, theirs in ((one.seeds, other.seeds), (one.input_nodes, other.input_nodes)):
        assert type(ours) is type(theirs)
        ids, expected = tensors(ours), tensors(theirs)
        assert list(ids) == list(expected)
        assert all(torch.equal(ids[t], expected[t]) for t in ids)
    for a, b in zip(all_blocks(one), all_blocks(other), strict=True):
        assert (a.relation, a.num_src, a.weights is None) == (b.relation, b.num_src, b.weights is None)
        for name in ("indptr", "indices", "positions", "weights"):
            if getattr(a, name) is not None:
                assert torch.equal(getattr(a, name), getattr(b, name)), name


def seeds_of_steps() -> list[torch.Tensor]:
    """Seeds of very different numbers, with none, repeated and isolated ones."""
    rng = np.random.default_rng(5)
    sizes = (40, 0, 1, 700, 3, 64, 64, 64, 0, 200, 17)
    steps = [torch.from_numpy(rng.integers(0, NODES, size)) for size in sizes]
    steps[5][:] = 7
    return steps


@pytest.mark.parametrize("kind", SAMPLERS)
def test_each_minibatch_equals_the_one_sampled_alone(kind: str) -> None:
    graph = make_graph(mixed_degrees(NODES), dtype=np.int32)
    assert (np.diff(graph.indptr) == 0).any()
    numbers: dict[str, Any] = {"seed": 3, "epoch": 2}
    alone, first = SAMPLERS[kind](threads=1), 1 << 40
    expected = [
        alone.sample(graph, seeds, step=step, **numbers) for step, seeds in enumerate(seeds_of_steps(), first)
    ]
    assert sum(block.num_edges for minibatch in expected for block in all_blocks(minibatch)) > 2000
    for threads in (1, 2, 8):
        sampler = SAMPLERS[kind](threads=threads)
        for _ in range(2):  # the second time in used memory
            found = sampler.sample_bulk(graph, seeds_of_steps(), first_step=first, **numbers)
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)
        few = sampler.sample_bulk(graph, seeds_of_steps()[4:6], first_step=first + 4, **numbers)
        for one, other in zip(few, expected[4:6], strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_bulk_equals_single_with_several_relations(kind: str) -> None:
    graphs = citations()
    path = {"metapath": PATH} if kind == "walks" else {}
    steps: list[Any] = [
        {"paper": torch.arange(30), "author": torch.tensor([5, 5, 2])},
        {},
        {"venue": torch.tensor([1, 1]), "paper": torch.tensor([3])},
        {"paper": torch.arange(390, 400)},
        {"author": torch.arange(0), "paper": torch.arange(100, 200)},
    ]
    alone = SAMPLERS[kind](threads=1, **path)
    expected = [alone.sample(graphs, seeds, step=step) for step, seeds in enumerate(steps)]
    for threads in (1, 2, 8):
        found = SAMPLERS[kind](threads=threads, **path).sample_bulk(graphs, steps)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


def test_bulk_equals_single_with_weights_and_fanouts_by_relation() -> None:
    graphs = citations()
    cites = graphs[0]
    weights = {cites.relation: np.random.default_rng(1).random(cites.num_edges).astype(np.float32)}
    fanouts = [
        {g.relation: n for g, n in zip(graphs, numbers, strict=True)} for numbers in ((3, 0, -1, 1),) * 2
    ]
    steps: list[PerType] = [{"paper": torch.arange(n, n + 50)} for n in range(0, 350, 50)]
    one, many = (Neighbor(fanouts, weights=weights, threads=n) for n in (1, 2))
    for step, found in enumerate(many.sample_bulk(graphs, steps, seed=9)):
        assert_same(found, one.sample(graphs, steps[step], seed=9, step=step))


def test_bulk_equals_single_with_a_locality_bias() -> None:
    graph, near = make_graph(mixed_degrees(NODES)), torch.arange(NODES) % 3 == 0
    one, many = (Neighbor([3, 5], locality=LocalityBias(near, 4), threads=n) for n in (1, 2))
    for step, found in enumerate(many.sample_bulk(graph, seeds_of_steps())):
        assert_same(found, one.sample(graph, seeds_of_steps()[step], step=step))


def test_minibatches_belong_to_the_caller() -> None:
    graph = make_graph(mixed_degrees(NODES))
    sampler = Neighbor([3, 5], threads=2)
    steps = seeds_of_steps()
    kept = sampler.sample_bulk(graph, steps)
    before = [[t.clone() for t in minibatch.tensors()] for minibatch in kept]
    sampler.sample_bulk(graph, steps[::-1], epoch=1)
    for minibatch, copies in zip(kept, before, strict=True):
        assert all(map(torch.equal, minibatch.tensors(), copies))
    held = sampler.nbytes
    del kept, minibatch
    assert sampler.nbytes > held > 0  # their memory came back, and is told


def test_bulk_of_no_step_and_of_one_step() -> None:
    graph, sampler = make_graph([4] * 20), Neighbor([2], threads=2)
    assert sampler.sample_bulk(graph, []) == []
    [minibatch] = sampler.sample_bulk(graph, [torch.arange(5)], first_step=7)
    assert_same(minibatch, sampler.sample(graph, torch.arange(5), step=7))


def test_a_device_samples_one_after_the_other(device: Device) -> None:
    graph = make_graph(mixed_degrees(300))
    steps = [torch.arange(n, n + 20) for n in range(0, 60, 20)]
    sampler = Neighbor([3, 3])
    expected = sampler.sample_bulk(graph, steps, seed=1)
    with PinnedGraph(graph, device) as pinned:
        for one, other in zip(sampler.sample_bulk(pinned, steps, seed=1), expected, strict=True):
            assert one.input_nodes.tolist() == other.input_nodes.tolist()  # type: ignore[union-attr]
            for a, b in zip(all_blocks(one), all_blocks(other), strict=True):
                assert a.positions.tolist() == b.positions.tolist()
        with pytest.raises(IndexError, match="step 6: seed 300 is not a '_N' node"):
            sampler.sample_bulk(pinned, [steps[0], torch.tensor([300])], first_step=5)


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
    for one, other in zip(
        sampler.sample_bulk(graph, steps[:3]), sampler.sample_bulk(graph, steps[:3]), strict=True
    ):
        assert_same(one, other)


@pytest.mark.parametrize("kind", ["neighbor", "labor-1", "ladies", "walks"])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_inconsistent_topology_is_a_format_error(kind: str, threads: int) -> None:
    good = make_graph([4] * 60)
    indices = good.indices.copy()
    indices[4 * 40 :] = 60
    spoiled = Graph(good.relation, 60, 60, good.indptr, indices, None)
    indices[: 4 * 40] %= 20  # what is sound leads to what is sound
    sampler = SAMPLERS[kind](threads=threads)
    steps = [torch.arange(10), torch.arange(10, 20), torch.arange(35, 50), torch.arange(50, 60)]
    with pytest.raises(FormatError, match=r"^step 2: topology of .* indices\[1\d\d\] is outside 0 to 59"):
        sampler.sample_bulk(spoiled, steps)
    assert len(sampler.sample_bulk(spoiled, steps[:2])) == 2


def test_numbers_out_of_range_are_refused() -> None:
    graph, sampler, last = make_graph([4] * 20), Neighbor([2]), (1 << 64) - 1
    steps = [torch.arange(2)] * 2
    assert sampler.sample_bulk(graph, steps, first_step=last - 1)[1].step == last
    for numbers in ({"first_step": last}, {"first_step": -1}, {"seed": -1}, {"epoch": 1 << 64}):
        with pytest.raises(ValueError, match=r"seed, epoch and step must be 0 to 2\^64 - 1"):
            sampler.sample_bulk(graph, steps, **numbers)
