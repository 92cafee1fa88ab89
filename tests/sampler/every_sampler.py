"""Every sampler by name, the graph that they sample from, and minibatches compared bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sampling_model import make_graph, mixed_degrees, with_times

from gids.sampler import Block, Labor, Ladies, LocalityBias, Minibatch, Neighbor, RandomWalk, TimedSeeds
from gids.store import Graph

NODES = 2000
GRAPH = with_times(make_graph(mixed_degrees(NODES), dtype=np.int32))
_RNG = np.random.default_rng(6)
POSITIVE = _RNG.exponential(1, GRAPH.num_edges).astype(np.float32)
SOME_ZERO = np.where(_RNG.random(GRAPH.num_edges) < 0.6, 0, POSITIVE)
MANY_SCALES = np.exp2(_RNG.integers(-140, 120, GRAPH.num_edges)).astype(np.float32)
NEAR = _RNG.random(NODES) < 0.3
WEIGHED = LocalityBias(NEAR, 1.7, weights=True)

ON_DEVICES: dict[str, Callable[..., Any]] = {
    "neighbor": Neighbor,
    "replaced": partial(Neighbor, replace=True),
    "dependent": partial(Neighbor, batch_dependency=3),
    "dependent, replaced": partial(Neighbor, batch_dependency=math.inf, replace=True),
    "nested": partial(Neighbor, batch_dependency=3, nested=True),
    "weights": partial(Neighbor, weights=MANY_SCALES),
    "weights, replaced": partial(Neighbor, weights=SOME_ZERO, replace=True),
    "weights, dependent": partial(Neighbor, weights=SOME_ZERO, batch_dependency=8),
    "locality": partial(Neighbor, locality=LocalityBias(NEAR, 4)),
    "locality, replaced": partial(Neighbor, locality=WEIGHED, replace=True),
    "locality and weights": partial(Neighbor, locality=WEIGHED, weights=SOME_ZERO, batch_dependency=4),
    "disjoint": partial(Neighbor, disjoint=True),
    "times of edges": partial(Neighbor, temporal="edges"),
    "times of edges, last": partial(Neighbor, temporal="edges", strategy="last"),
    "times of nodes": partial(Neighbor, temporal="nodes"),
    "times of nodes, last": partial(Neighbor, temporal="nodes", strategy="last"),
    "times, replaced": partial(Neighbor, temporal="edges", replace=True),
    "times and weights": partial(Neighbor, temporal="nodes", weights=SOME_ZERO, batch_dependency=4),
    "bidirectional": partial(Neighbor, temporal="edges", subgraph="bidirectional"),
    "labor": Labor,
    "labor, dependent": partial(Labor, batch_dependency=math.inf),
    "labor, nested": partial(Labor, batch_dependency=3, nested=True),
    "labor, one number in all layers": partial(Labor, layer_dependency=True),
    "labor of fixed count": partial(Labor, fixed_count=True),
    "labor of fixed count, dependent": partial(
        Labor, fixed_count=True, batch_dependency=16, layer_dependency=True
    ),
}
"""Samplers that work on a device too. Those with weights are for GRAPH."""

SAMPLERS = {
    **ON_DEVICES,
    "induced": partial(Neighbor, subgraph="induced"),
    "times, induced": partial(Neighbor, temporal="nodes", strategy="last", subgraph="induced"),
    "labor-1": partial(Labor, importance_sampling=1),
    "labor-2 of fixed count": partial(Labor, importance_sampling=2, fixed_count=True),
    "labor-*": partial(Labor, importance_sampling=-1),
    "ladies": Ladies,
    "poisson ladies": partial(Ladies, law="count", poisson=True),
    "distinct ladies": partial(Ladies, replace=False),
    "walks": RandomWalk,
}


def make(kind: str, per_layer: list[Any], **options: Any) -> Any:
    """The sampler of this name."""
    return SAMPLERS[kind](per_layer, **options)


def seeds_for(sampler: Any, ids: torch.Tensor | dict[str, torch.Tensor]) -> Any:
    """Seeds, with times for a temporal sampler."""
    if getattr(sampler, "temporal", None) is None:
        return ids
    times = [torch.arange(len(of_type)) * 7 % 60 - 5 for of_type in _by_type(ids).values()]
    return TimedSeeds(ids, dict(zip(ids, times, strict=True)) if isinstance(ids, dict) else times[0])


def _by_type(values: Any) -> dict[str, Any]:
    return values if isinstance(values, dict) else {"_N": values}


def blocks_of(minibatch: Minibatch) -> list[Block]:
    return [b for layer in minibatch.blocks for b in _by_type(layer).values()]


def assert_same(one: Minibatch, other: Minibatch) -> None:
    """The same minibatch of the same step."""
    assert (one.epoch, one.step) == (other.epoch, other.step)
    assert_same_tensors(one, other)


def assert_same_tensors(one: Minibatch, other: Minibatch) -> None:
    """Bit by bit, wherever the tensors are."""
    for ours, theirs in ((one.seeds, other.seeds), (one.input_nodes, other.input_nodes)):
        assert type(ours) is type(theirs)
        assert not isinstance(ours, dict) or list(ours) == list(theirs)
    for a, b in zip(blocks_of(one), blocks_of(other), strict=True):
        assert (a.relation, a.num_src, a.weights is None) == (b.relation, b.num_src, b.weights is None)
    for mine, yours in zip(one.tensors(), other.tensors(), strict=True):
        assert mine.dtype == yours.dtype
        assert torch.equal(mine.cpu(), yours.cpu())


def spoiled(
    graph: Graph, *, indptr: dict[int, int] | None = None, indices: dict[int, int] | None = None
) -> Graph:
    """The graph with other values at some positions, as a dataset that was damaged: marked as sorted."""
    arrays = graph.indptr.copy(), graph.indices.copy()
    for array, changes in zip(arrays, (indptr or {}, indices or {}), strict=True):
        for position, value in changes.items():
            array[position] = value
    return replace(graph, indptr=arrays[0], indices=arrays[1], sorted_by="nodes")
