"""LABOR-0 on a device, dependent or not, equals the CPU bit by bit."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from sampling_graphs import citations, mixed_degrees

from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Block, Labor, Minibatch
from gids.sampler.device import PinnedGraph
from gids.store import Graph


def all_blocks(minibatch: Minibatch) -> list[Block]:
    layers: list[Any] = minibatch.blocks
    return [b for layer in layers for b in (layer.values() if isinstance(layer, dict) else [layer])]


def assert_same(on_device: Minibatch, on_host: Minibatch) -> None:
    for one, other in zip(all_blocks(on_device), all_blocks(on_host), strict=True):
        assert one.num_src == other.num_src
        for name in ("indptr", "indices", "positions", "weights"):
            ours, theirs = getattr(one, name), getattr(other, name)
            assert (ours is None) == (theirs is None), name
            assert ours is None or torch.equal(ours.cpu(), theirs), name
    found, wanted = on_device.input_nodes, on_host.input_nodes
    if isinstance(found, dict):
        assert isinstance(wanted, dict)
        assert {t: n.tolist() for t, n in found.items()} == {t: n.tolist() for t, n in wanted.items()}
    else:
        assert found.tolist() == wanted.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_minibatches_of_a_device_equal_those_of_the_cpu(device: Device, dtype: type) -> None:
    graph = make_graph(mixed_degrees(600), dtype=dtype)
    seeds = torch.from_numpy(np.random.default_rng(1).permutation(600)[:30])
    with PinnedGraph(graph, device, topology_on="indptr" if dtype == np.int32 else "host") as pinned:
        for options in (
            {},
            {"layer_dependency": True},
            {"batch_dependency": 4},
            {"batch_dependency": math.inf},
            {"fixed_count": True},
            {"fixed_count": True, "batch_dependency": 16, "layer_dependency": True},
        ):
            for fanouts in ([3, 5], [40], [-1, 2]):
                sampler = Labor(fanouts, **options)  # type: ignore[arg-type]
                for given in (seeds, seeds[:0], torch.tensor([5, 5, 2])) if not options else (seeds,):
                    minibatch = sampler.sample(pinned, given, seed=7, epoch=2, step=5)
                    assert_same(minibatch, sampler.sample(graph, given, seed=7, epoch=2, step=5))
        assert minibatch.input_nodes.device == device.torch_device  # type: ignore[union-attr]


def test_relations_are_sampled_as_on_the_cpu(device: Device) -> None:
    graphs = citations()
    fanouts = [
        {g.relation: n for g, n in zip(graphs, numbers, strict=True)}
        for numbers in ((3, 0, -1, 1), (5, 2, 4, 1))
    ]
    seeds = {"paper": torch.arange(5, 25), "author": torch.arange(9)}
    pinned = [PinnedGraph(g, device) for g in graphs]
    for fixed_count in (False, True):
        sampler = Labor(fanouts, fixed_count=fixed_count)
        assert_same(sampler.sample(pinned, seeds, step=3), sampler.sample(graphs, seeds, step=3))
    for p in pinned:
        p.close()


def test_a_device_refuses_other_variants(device: Device) -> None:
    good = make_graph([4] * 20)
    indices = good.indices.copy()
    indices[[41, 42]] = 20, -1
    spoiled = Graph(good.relation, 20, 20, good.indptr, indices, None)
    for fanout, fixed_count in itertools.product((3, 4), (False, True)):
        with (
            PinnedGraph(spoiled, device) as pinned,
            pytest.raises(FormatError, match=r"indices\[41\] is outside 0 to 19"),
        ):
            Labor([fanout], fixed_count=fixed_count).sample(pinned, torch.arange(20))
    with (
        PinnedGraph(good, device) as pinned,
        pytest.raises(ValueError, match=r"on the CPU only, .*: pass graphs that are not pinned"),
    ):
        Labor([3], importance_sampling=1).sample(pinned, torch.arange(20))
