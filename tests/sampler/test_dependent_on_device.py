"""Neighbor with dependent minibatches, or with replacement, on a device, equal to the CPU bit by bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from sampling_graphs import citations, mixed_degrees

from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Block, Minibatch, Neighbor
from gids.sampler.device import PinnedGraph
from gids.store import Graph

OPTIONS: list[dict[str, Any]] = [
    {"batch_dependency": 4},
    {"batch_dependency": 64},
    {"batch_dependency": math.inf},
    {"replace": True},
    {"replace": True, "batch_dependency": 4},
]


def lists(minibatch: Minibatch) -> list[Any]:
    """All tensors of a minibatch."""
    nodes = minibatch.input_nodes
    found: list[Any] = [nodes] if isinstance(nodes, torch.Tensor) else list(nodes.values())
    for layer in minibatch.blocks:
        for block in layer.values() if isinstance(layer, dict) else [layer]:
            assert isinstance(block, Block)
            found += [block.indptr, block.indices, block.positions, torch.tensor(block.num_src)]
            assert block.weights is None
    return [tensor.tolist() for tensor in found]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_minibatches_of_a_device_equal_those_of_the_cpu(device: Device, options: dict[str, Any]) -> None:
    graph = make_graph(mixed_degrees(600), dtype=np.int32)
    seeds = torch.from_numpy(np.random.default_rng(1).permutation(600)[:30])
    with PinnedGraph(graph, device, topology_on="host") as pinned:
        for fanouts, step in (([3, 5], 5), ([40], 4), ([-1, 2], 7)):
            sampler = Neighbor(fanouts, **options)
            minibatch = sampler.sample(pinned, seeds, seed=7, epoch=2, step=step)
            assert lists(minibatch) == lists(sampler.sample(graph, seeds, seed=7, epoch=2, step=step))
        assert minibatch.input_nodes.device == device.torch_device  # type: ignore[union-attr]
        none = sampler.sample(pinned, seeds[:0])
        assert none.input_nodes.tolist() == []  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[4]], ids=str)
def test_relations_are_sampled_as_on_the_cpu(device: Device, options: dict[str, Any]) -> None:
    graphs = citations()
    fanouts = [
        {g.relation: n for g, n in zip(graphs, numbers, strict=True)}
        for numbers in ((3, 0, -1, 1), (5, 2, 4, 1))
    ]
    sampler = Neighbor(fanouts, **options)
    seeds = {"paper": torch.arange(5, 25), "author": torch.arange(9)}
    pinned = [PinnedGraph(g, device) for g in graphs]
    assert lists(sampler.sample(pinned, seeds, step=3)) == lists(sampler.sample(graphs, seeds, step=3))
    for p in pinned:
        p.close()


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]], ids=str)
def test_a_source_out_of_range_is_a_format_error(device: Device, options: dict[str, Any]) -> None:
    good = make_graph([4] * 20)
    indices = good.indices.copy()
    indices[40:44] = 20
    spoiled = Graph(good.relation, 20, 20, good.indptr, indices, None)
    with (
        PinnedGraph(spoiled, device) as pinned,
        pytest.raises(FormatError, match=r"indices\[4.\] is outside 0 to 19"),
    ):
        Neighbor([3], **options).sample(pinned, torch.arange(20))
