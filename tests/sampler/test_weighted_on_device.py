"""Neighbor with weights and masks on a device equals the CPU bit by bit; the weights' memory."""

from __future__ import annotations

import gc
import mmap
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from sampling_graphs import citations, mixed_degrees

from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Block, LocalityBias, Minibatch, Neighbor
from gids.sampler.device import PinnedGraph, pinned_graph
from gids.store import Graph

NODES = 500
GRAPH = make_graph(mixed_degrees(NODES), dtype=np.int32)
RNG = np.random.default_rng(6)
POSITIVE = RNG.exponential(1, GRAPH.num_edges).astype(np.float32)
SOME_ZERO = np.where(RNG.random(GRAPH.num_edges) < 0.6, 0, POSITIVE)
MANY_SCALES = np.exp2(RNG.integers(-140, 120, GRAPH.num_edges)).astype(np.float32)
HELD = RNG.random(NODES) < 0.3
OPTIONS: dict[str, dict[str, Any]] = {
    "weights": {"weights": POSITIVE},
    "some zero": {"weights": SOME_ZERO},
    "many scales": {"weights": MANY_SCALES},
    "replaced": {"weights": POSITIVE, "replace": True},
    "some zero, replaced": {"weights": SOME_ZERO, "replace": True},
    "many scales, replaced": {"weights": MANY_SCALES, "replace": True},
    "gradual": {"weights": SOME_ZERO, "batch_dependency": 8},
    "nested": {"weights": SOME_ZERO, "batch_dependency": 8, "nested": True},
    "gradual, replaced": {"weights": SOME_ZERO, "replace": True, "batch_dependency": 8},
    "locality": {"locality": LocalityBias(HELD, 4)},
    "locality, replaced": {"locality": LocalityBias(HELD, 1.7), "replace": True},
    "locality and weights": {"locality": LocalityBias(HELD, 3), "weights": SOME_ZERO, "batch_dependency": 4},
    "locality of 1": {"locality": LocalityBias(HELD, 1), "weights": SOME_ZERO},
}


def lists(minibatch: Minibatch) -> list[Any]:
    """All tensors of a minibatch, weights as bits."""
    nodes = minibatch.input_nodes
    found: list[Any] = [nodes] if isinstance(nodes, torch.Tensor) else list(nodes.values())
    for layer in minibatch.blocks:
        for block in layer.values() if isinstance(layer, dict) else [layer]:
            assert isinstance(block, Block)
            found += [block.indptr, block.indices, block.positions, torch.tensor(block.num_src)]
            found.append(torch.empty(0) if block.weights is None else block.weights.view(torch.int32))
            assert block.weights is None or block.weights.dtype == torch.float32
    return [tensor.tolist() for tensor in found]


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", OPTIONS)
def test_minibatches_of_a_device_equal_those_of_the_cpu(device: Device, kind: str) -> None:
    seeds = torch.from_numpy(np.random.default_rng(1).permutation(NODES)[:30])
    with PinnedGraph(GRAPH, device, topology_on="host") as pinned:
        for fanouts, step in (([3, 5], 5), ([40], 4), ([-1, 2], 7), ([1], 1)):
            sampler = Neighbor(fanouts, **OPTIONS[kind])
            minibatch = sampler.sample(pinned, seeds, seed=7, epoch=2, step=step)
            assert lists(minibatch) == lists(sampler.sample(GRAPH, seeds, seed=7, epoch=2, step=step))
        assert minibatch.input_nodes.device == device.torch_device  # type: ignore[union-attr]
        none = sampler.sample(pinned, seeds[:0])
        assert none.input_nodes.tolist() == []  # type: ignore[union-attr]
        again = pickle.loads(pickle.dumps(sampler)).sample(pinned, seeds, step=1)
        assert lists(again) == lists(sampler.sample(GRAPH, seeds, step=1))


@pytest.mark.parametrize("replace", [False, True])
def test_relations_are_sampled_as_on_the_cpu(device: Device, replace: bool) -> None:
    """Two relations lead from one type, one with weights; another has only a mask."""
    graphs = citations()
    cites, _, written, _ = (g.relation for g in graphs)
    fanouts = [
        {g.relation: n for g, n in zip(graphs, numbers, strict=True)}
        for numbers in ((3, 0, -1, 1), (5, 2, 4, 1), (0, 3, 2, 2))
    ]
    weights = {
        cites: np.arange(graphs[0].num_edges, dtype=np.float32) % 3,
        written: np.ones(graphs[2].num_edges, np.float32),
    }
    bias = LocalityBias({"author": np.arange(150) < 40}, 5)
    seeds = {"paper": torch.arange(5, 25), "author": torch.arange(9)}
    pinned = [PinnedGraph(g, device) for g in graphs]
    for dependency in (1, 4):
        sampler = Neighbor(
            fanouts, weights=weights, locality=bias, replace=replace, batch_dependency=dependency
        )
        sampled = sampler.sample(pinned, seeds, step=3)
        assert lists(sampled) == lists(sampler.sample(graphs, seeds, step=3))
        for layer in sampled.blocks:
            assert isinstance(layer, dict)
            has = [block.weights is not None for block in layer.values()]
            assert has == [True, True, True, False]
    for p in pinned:
        p.close()


def test_a_hub_with_few_drawable_edges(device: Device) -> None:
    """As many drawable edges as wanted, one less, one more, none; far from each other."""
    graph = make_graph([3000] * 6, num_src=3000, relation=("a", "to", "b"))
    weights = np.zeros(graph.num_edges, np.float32)
    for v, possible in enumerate((0, 1, 4, 5, 40)):
        weights[v * 3000 + np.linspace(0, 2999, possible).astype(int)] = 2
    weights[15_000:] = np.arange(3000) % 2
    with PinnedGraph(graph, device) as pinned:
        for fanout in (4, 5, -1):
            for replace in (False, True):
                sampler = Neighbor([fanout], weights=weights, replace=replace)
                got, expected = (sampler.sample([g], {"b": torch.arange(6)}) for g in (pinned, graph))
                assert lists(got) == lists(expected)


@pytest.mark.parametrize("kind", ["weights", "replaced", "locality", "locality, replaced"])
def test_a_source_out_of_range_is_a_format_error(device: Device, kind: str) -> None:
    good = make_graph([4] * 20)
    indices = good.indices.copy()
    indices[40:44] = 20
    spoiled = Graph(good.relation, 20, 20, good.indptr, indices, None)
    options = OPTIONS[kind] | (
        {"locality": LocalityBias(np.ones(20, bool), 2)} if "locality" in kind else {"weights": np.ones(80)}
    )
    messages = []
    with PinnedGraph(spoiled, device) as pinned:
        for graph in (spoiled, pinned):
            with pytest.raises(FormatError, match=r"indices\[4.\] is outside 0 to 19") as caught:
                Neighbor([3], **options).sample(graph, torch.arange(20))  # type: ignore[arg-type]
            messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("topology_on", ["host", "indptr", "device"])
def test_weights_are_copied_once_beside_the_indices_and_freed(device: Device, topology_on: str) -> None:
    weights, seeds = POSITIVE.copy(), torch.arange(20)
    with PinnedGraph(GRAPH, device, topology_on=topology_on) as pinned:
        topology = pinned.host_bytes, pinned.device_bytes

        def of_weights() -> tuple[int, int]:
            return pinned.host_bytes - topology[0], pinned.device_bytes - topology[1]

        assert of_weights() == (0, 0)
        samplers = [Neighbor([2], weights=weights) for _ in range(2)]
        for sampler in samplers:
            sampler.sample(pinned, seeds)
            sampler.sample(pinned, seeds, step=1)
        pages = -(-weights.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        once = (0, weights.nbytes) if topology_on == "device" else (pages, 0)
        assert of_weights() == once
        assert str(pinned.host_bytes) in repr(pinned)
        Neighbor([2], weights=weights + 1).sample(pinned, seeds)
        gc.collect()
        assert of_weights() == once
        del sampler, samplers, weights
        gc.collect()
        assert of_weights() == (0, 0)
        kept = Neighbor([2], weights=POSITIVE)
        expected = lists(kept.sample(GRAPH, seeds))
        assert lists(kept.sample(pinned, seeds)) == expected
    with pytest.raises(ValueError, match="closed: pin the graph again"):
        kept.sample(pinned, seeds)
    with PinnedGraph(GRAPH, device) as again:
        assert lists(kept.sample(again, seeds)) == expected


def test_weights_go_to_the_host_if_the_device_has_little_room(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PinnedGraph(GRAPH, device, topology_on="device") as pinned:
        monkeypatch.setattr(device, "memory_info", lambda: (8 * POSITIVE.nbytes - 1, 1 << 40))
        Neighbor([2], weights=POSITIVE).sample(pinned, torch.arange(20))
        assert pinned.host_bytes >= POSITIVE.nbytes


def test_memory_of_masks_is_counted(device: Device) -> None:
    with PinnedGraph(GRAPH, device) as pinned:
        biased, plain = Neighbor([2], locality=LocalityBias(HELD, 2)), Neighbor([2])
        plain.sample(pinned, torch.arange(0))
        biased.sample(pinned, torch.arange(0))
        assert biased.nbytes >= plain.nbytes + -(-NODES // 8)


def test_weights_that_do_not_fit_are_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_graph([3, 4])
    with PinnedGraph(graph, device, topology_on="host") as pinned:
        sampler = Neighbor([2], weights=np.ones(7))
        with monkeypatch.context() as short:
            short.setattr(pinned_graph, "available_bytes", lambda: 27)
            message = (
                r"pinning the weights of '_N\._E\._N' needs weights 28 = 28 bytes of host memory, but 27"
            )
            with pytest.raises(MemoryError, match=message):
                sampler.sample(pinned, torch.arange(2))
        with monkeypatch.context() as locked:

            def refuse(address: int, nbytes: int, **options: Any) -> None:
                raise RuntimeError("cudaErrorMemoryAllocation")

            locked.setattr(device, "map_host", refuse)
            with pytest.raises(RuntimeError, match=r"weights of '_N\._E\._N': .*: free host memory$"):
                sampler.sample(pinned, torch.arange(2))
        assert sampler.sample(pinned, torch.arange(2)).blocks[0].num_edges == 4  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"weights of .* must have 7 values.*\(got 6\)"):
            Neighbor([2], weights=np.ones(6)).sample(pinned, torch.arange(2))
