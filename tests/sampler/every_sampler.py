"""Every sampler by name, the graph that they sample from, and minibatches compared bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from sampling_model import mixed_degrees

from gids.sampler import Block, Labor, Ladies, LocalityBias, Minibatch, Neighbor, RandomWalk
from gids.sampler.layered import LayeredSampler
from gids.store import Graph

NODES = 2000
GRAPH = make_graph(mixed_degrees(NODES), dtype=np.int32)
_RNG = np.random.default_rng(6)
POSITIVE = _RNG.exponential(1, GRAPH.num_edges).astype(np.float32)
SOME_ZERO = np.where(_RNG.random(GRAPH.num_edges) < 0.6, 0, POSITIVE)
MANY_SCALES = np.exp2(_RNG.integers(-140, 120, GRAPH.num_edges)).astype(np.float32)
NEAR = _RNG.random(NODES) < 0.3

ON_DEVICES: dict[str, tuple[type[LayeredSampler], dict[str, Any]]] = {
    "neighbor": (Neighbor, {}),
    "replaced": (Neighbor, {"replace": True}),
    "dependent": (Neighbor, {"batch_dependency": 3}),
    "dependent for an epoch": (Neighbor, {"batch_dependency": math.inf}),
    "dependent, replaced": (Neighbor, {"batch_dependency": 4, "replace": True}),
    "nested": (Neighbor, {"batch_dependency": 3, "nested": True}),
    "weights": (Neighbor, {"weights": POSITIVE}),
    "some zero": (Neighbor, {"weights": SOME_ZERO}),
    "many scales": (Neighbor, {"weights": MANY_SCALES}),
    "weights, replaced": (Neighbor, {"weights": POSITIVE, "replace": True}),
    "some zero, replaced": (Neighbor, {"weights": SOME_ZERO, "replace": True}),
    "many scales, replaced": (Neighbor, {"weights": MANY_SCALES, "replace": True}),
    "weights, dependent": (Neighbor, {"weights": SOME_ZERO, "batch_dependency": 8}),
    "weights, nested": (Neighbor, {"weights": SOME_ZERO, "batch_dependency": 8, "nested": True}),
    "weights, dependent, replaced": (
        Neighbor,
        {"weights": SOME_ZERO, "replace": True, "batch_dependency": 8},
    ),
    "locality": (Neighbor, {"locality": LocalityBias(NEAR, 4)}),
    "locality with weights": (Neighbor, {"locality": LocalityBias(NEAR, 4, weights=True)}),
    "locality, replaced": (Neighbor, {"locality": LocalityBias(NEAR, 1.7, weights=True), "replace": True}),
    "locality and weights": (
        Neighbor,
        {
            "locality": LocalityBias(NEAR, 3, weights=True),
            "weights": SOME_ZERO,
            "batch_dependency": 4,
        },
    ),
    "locality of 1": (Neighbor, {"locality": LocalityBias(NEAR, 1), "weights": SOME_ZERO}),
    "labor": (Labor, {}),
    "labor, dependent": (Labor, {"batch_dependency": 4}),
    "labor, dependent for an epoch": (Labor, {"batch_dependency": math.inf}),
    "labor, nested": (Labor, {"batch_dependency": 4, "nested": True}),
    "labor, one number in all layers": (Labor, {"layer_dependency": True}),
    "labor of fixed count": (Labor, {"fixed_count": True}),
    "labor of fixed count, dependent": (
        Labor,
        {"fixed_count": True, "batch_dependency": 16, "layer_dependency": True},
    ),
}
"""Samplers that work on a device too, and their options."""

SAMPLERS = {
    **ON_DEVICES,
    "labor-1": (Labor, {"importance_sampling": 1}),
    "labor-2 of fixed count": (Labor, {"importance_sampling": 2, "fixed_count": True}),
    "labor-*": (Labor, {"importance_sampling": -1, "batch_dependency": math.inf}),
    "ladies": (Ladies, {}),
    "poisson ladies": (Ladies, {"poisson": True}),
    "distinct ladies": (Ladies, {"replace": False}),
    "ladies by count": (Ladies, {"law": "count"}),
    "poisson ladies by count": (Ladies, {"law": "count", "poisson": True}),
    "walks": (RandomWalk, {}),
}


def make(kind: str, per_layer: list[Any], **options: Any) -> Any:
    """The sampler of this name."""
    sampler, own = SAMPLERS[kind]
    return sampler(per_layer, **own, **options)  # type: ignore[call-arg]


def layers_for(kind: str) -> list[int]:
    """Usual numbers per layer: LADIES draws for all nodes together."""
    return [60, 40] if SAMPLERS[kind][0] is Ladies else [3, 5]


PLAIN = [kind for kind, (_, options) in SAMPLERS.items() if not {"weights", "locality"} & options.keys()]
"""Samplers that take any graph."""


def blocks_of(minibatch: Minibatch) -> list[Block]:
    layers: list[Any] = minibatch.blocks
    return [b for layer in layers for b in (layer.values() if isinstance(layer, dict) else [layer])]


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


def assert_refused(*cases: tuple[type[Exception], str, Callable[[], object]]) -> None:
    """Each call raises its error with its text."""
    for error, said, call in cases:
        with pytest.raises(error, match=said):
            call()


def spoiled(
    graph: Graph, *, indptr: dict[int, int] | None = None, indices: dict[int, int] | None = None
) -> Graph:
    """The graph with other values at some positions."""
    arrays = graph.indptr.copy(), graph.indices.copy()
    for array, changes in zip(arrays, (indptr or {}, indices or {}), strict=True):
        for position, value in changes.items():
            array[position] = value
    return Graph(graph.relation, graph.num_src, graph.num_dst, *arrays, None)
