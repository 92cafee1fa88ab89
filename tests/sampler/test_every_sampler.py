"""What every sampler promises: minibatches of the model, for any threads, in bulk, pickled; errors."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from every_sampler import (
    GRAPH,
    NEAR,
    NODES,
    ON_DEVICES,
    SAMPLERS,
    assert_same,
    blocks_of,
    make,
    seeds_for,
    spoiled,
)
from labor_model import labor
from sampling_model import Model, citations, make_graph, mixed_degrees, sample_neighbors, with_times

from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Labor, Ladies, LocalityBias, Neighbor, RandomWalk, TimedSeeds, Topology
from gids.sampler.device import PinnedGraph
from gids.store import Graph

MODELLED = [
    *("neighbor", "nested", "disjoint", "induced", "times, induced"),
    *("times of edges", "times of edges, last", "times of nodes", "times of nodes, last"),
    *("labor", "labor, nested", "labor, one number in all layers", "labor of fixed count"),
    *("labor-1", "labor-2 of fixed count", "labor-*"),
]


def model_of(sampler: Any, graphs: Sequence[Graph], seeds: Any, numbers: tuple[int, int, int]) -> Model:
    """What a sampler must draw. Nested minibatches are parts of a large one: they draw by its step."""
    seed, epoch, step = numbers
    kappa = sampler.batch_dependency
    numbers = (seed, epoch, step if kappa == 1 else step // kappa)
    ids, times = (seeds.ids, seeds.times) if isinstance(seeds, TimedSeeds) else (seeds, None)
    if isinstance(ids, torch.Tensor):
        ids, times = {"_N": ids}, None if times is None else {"_N": times}
    fanouts = sampler.fanouts_of(Topology(graphs))
    if isinstance(sampler, Labor):
        rounds, fixed_count, shared = (
            sampler.importance_sampling,
            sampler.fixed_count,
            sampler.layer_dependency,
        )
        draw = labor(graphs, numbers, times=rounds, fixed_count=fixed_count, layer_dependency=shared)
        return Model(graphs, {t: [(0, v) for v in of.tolist()] for t, of in ids.items()}).run(fanouts, draw)
    timed = {
        t: list(zip(of.tolist(), times[t].tolist() if times else [0] * len(of), strict=True))
        for t, of in ids.items()
    }
    last, induced = sampler.strategy == "last", sampler.subgraph == "induced"
    options: dict[str, Any] = {"disjoint": sampler.disjoint, "by": sampler.temporal}
    return sample_neighbors(graphs, timed, fanouts, numbers, last=last, induced=induced, **options)


@pytest.mark.parametrize("kind", MODELLED)
def test_minibatches_equal_the_model(kind: str) -> None:
    rng = np.random.default_rng(1)
    one = with_times(make_graph(mixed_degrees(200), dtype=np.int32))
    several = [graph if r == 1 else with_times(graph, r) for r, graph in enumerate(citations())]
    relations = [graph.relation for graph in several]
    of_relations = [dict(zip(relations, layer, strict=True)) for layer in ((2, 4, 3, 1), (3, 2, 0, -1))]
    for graphs, per_layer in (([one], [-1, 3]), ([one], [60, 2]), (several, of_relations)):
        sampler, steps = make(kind, per_layer, threads=2), []
        for count in (8, 0, 4):  # some come twice
            ids = {t: torch.from_numpy(rng.integers(0, 150, count)) for t in ("author", "paper")}
            steps.append(seeds_for(sampler, ids if graphs is several else ids["paper"]))
        given = graphs if graphs is several else one
        found = sampler.sample_bulk(given, steps, seed=7, epoch=2, first_step=5)
        for step, (seeds, minibatch) in enumerate(zip(steps, found, strict=True), 5):
            model = model_of(sampler, graphs, seeds, (7, 2, step))
            model.check(minibatch, weighted=isinstance(sampler, Labor))
            assert (minibatch.times is None) == (not isinstance(seeds, TimedSeeds))


# --- the same minibatch in every way ---


def ids_of_steps() -> list[torch.Tensor]:
    """Seeds of very different numbers, with none, repeated and isolated ones."""
    rng = np.random.default_rng(5)
    sizes = (40, 0, 1, 900, 3, 64, 64, 0, 100, 17)
    steps = [torch.from_numpy(rng.integers(0, NODES, size)) for size in sizes]
    steps[5][:] = 7
    return steps


@pytest.mark.parametrize("kind", SAMPLERS)
def test_minibatches_do_not_depend_on_threads_bulk_or_pickling(kind: str) -> None:
    numbers: dict[str, Any] = {"seed": 3, "epoch": 2}
    per_layer = [400, 250] if "ladies" in kind else [20, 12] if "weights" in kind else [10, 8]
    alone, first = make(kind, per_layer, threads=1), 1 << 40
    steps = [seeds_for(alone, ids) for ids in ids_of_steps()]
    expected = [alone.sample(GRAPH, seeds, step=step, **numbers) for step, seeds in enumerate(steps, first)]
    # In one layer, so that several threads find the same nodes at once.
    assert max(block.num_edges for block in blocks_of(expected[3])) > 8192
    for threads in (2, 8):
        sampler = make(kind, per_layer, threads=threads)
        found = sampler.sample_bulk(GRAPH, steps, first_step=first, **numbers)
        for one, same in zip(found, expected, strict=True):
            assert_same(one, same)
        few = sampler.sample_bulk(GRAPH, steps[4:6], first_step=first + 4, **numbers)  # in used memory
        for one, other in zip(few, expected[4:6], strict=True):
            assert_same(one, other)
    for other in (sampler, pickle.loads(pickle.dumps(alone)), copy.deepcopy(alone)):
        assert_same(other.sample(GRAPH, steps[3], step=first + 3, **numbers), expected[3])
        assert repr(other) == repr(alone)


def test_minibatches_of_bulk_belong_to_the_caller() -> None:
    sampler, steps = Neighbor([3, 5], threads=2), ids_of_steps()
    kept = sampler.sample_bulk(GRAPH, steps, seed=0)
    before = [[t.clone() for t in minibatch.tensors()] for minibatch in kept]
    sampler.sample_bulk(GRAPH, steps[::-1], epoch=1, seed=0)
    for minibatch, copies in zip(kept, before, strict=True):
        assert all(map(torch.equal, minibatch.tensors(), copies))
    held = sampler.nbytes
    del kept, minibatch
    assert sampler.nbytes > held > 0  # their memory came back, and is told


# --- errors ---


@pytest.mark.parametrize("threads", [1, 16])
def test_an_error_names_the_first_step_that_fails(threads: int) -> None:
    graph, sampler = make_graph([4] * 20), Neighbor([2], threads=threads)
    steps = [torch.arange(5)] * 7
    steps[3], steps[5] = torch.tensor([20]), torch.tensor([-1])
    with pytest.raises(IndexError, match=r"^step 13: seed 20 is not a '_N' node: ids run from 0 to 19$"):
        sampler.sample_bulk(graph, steps, first_step=10, seed=0)
    with pytest.raises(TypeError, match=r"^step 1: seeds of '_N' are torch\.int32"):
        sampler.sample_bulk(graph, [steps[0], steps[0].int()], seed=0)
    assert sampler.sample_bulk(graph, [], seed=0) == []
    assert len(sampler.sample_bulk(graph, steps[:3], seed=0)) == 3


@pytest.mark.parametrize(
    "kind",
    [
        *("neighbor", "replaced", "dependent", "weights", "weights, replaced", "locality", "times of nodes"),
        *("labor", "labor of fixed count", "labor-1", "ladies", "poisson ladies", "walks"),
    ],
)
def test_an_inconsistent_topology_is_a_format_error(device: Device, kind: str) -> None:
    """Whatever the device. The sampler can be used again."""
    degrees = np.diff(GRAPH.indptr)
    [node, _, other, *_] = np.flatnonzero((degrees > 10) & (degrees < 25)).tolist()
    begin, end = GRAPH.indptr[node : node + 2].tolist()
    outside = rf"indices\[\d+\] is outside 0 to {NODES - 1}"
    for bad, message in (
        (spoiled(GRAPH, indices=dict.fromkeys(range(begin, end), NODES)), outside),
        (spoiled(GRAPH, indices=dict.fromkeys(range(begin, end), -1)), outside),
        (spoiled(GRAPH, indptr={node + 1: begin - 1}), f"indptr decreases or exceeds .* at node {node}"),
        (spoiled(GRAPH, indptr={node + 1: GRAPH.num_edges + 1}), f"indptr decreases or exceeds .* {node}"),
    ):
        for per_layer in ([2], [-1])[: 1 if kind == "walks" else 2]:
            sampler, said = make(kind, per_layer, threads=2), f"^topology of '_N._E._N': {message}"
            wrong, right = (seeds_for(sampler, torch.tensor([v])) for v in (node, other))
            if isinstance(wrong, TimedSeeds):
                wrong = TimedSeeds(wrong.ids, torch.tensor([99]))
            with pytest.raises(FormatError, match=said):
                sampler.sample(bad, wrong, seed=0)
            with pytest.raises(FormatError, match=f"^step 2: {said[1:]}"):
                sampler.sample_bulk(bad, [right, right, wrong], seed=0)
            if kind in ON_DEVICES:
                with PinnedGraph(bad, device) as pinned, pytest.raises(FormatError, match=said):
                    sampler.sample(pinned, wrong, seed=0)
            assert_same(sampler.sample(bad, right, seed=1), sampler.sample(GRAPH, right, seed=1))


# --- repr, by which loaders compare samplers ---


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Labor([2, 3], importance_sampling=1, threads=1), "Labor([2, 3], importance_sampling=1)"),
        (Ladies([4], poisson=True), "Ladies([4], poisson=True)"),
        (RandomWalk([2], restart=0.25, metapath=[("a", "b", "a")]), "0.25, metapath=[('a', 'b', 'a')]"),
        (Neighbor([3], temporal="edges", strategy="last"), "temporal='edges', strategy='last'"),
    ],
    ids=str,
)
def test_repr_shows_everything_that_minibatches_depend_on(sampler: Any, expected: str) -> None:
    assert expected in repr(sampler)


def test_samplers_with_equal_repr_have_equal_masks() -> None:
    masks = [NEAR, NEAR.copy(), ~NEAR]
    told = [repr(Neighbor([2], locality=LocalityBias(m, f))) for m, f in itertools.product(masks, (2, 3))]
    assert told[0] == told[2]
    assert len(set(told)) == 4
    assert f"{NODES} nodes" in told[0]
    assert "factor=3.0" in told[1]
