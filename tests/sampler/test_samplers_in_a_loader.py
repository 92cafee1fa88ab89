"""NodeLoader with every sampler: the same minibatches for every window and from every epoch on."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import make_graph
from open_options import tuned
from sampling_graphs import mixed_degrees

import gids
from gids.sampler import Block, Labor, Ladies, LocalityBias, Minibatch, Neighbor, RandomWalk
from gids.write import DatasetWriter

NODES = 1500
SAMPLERS: dict[str, Any] = {
    "neighbor": lambda: Neighbor([3, 4], batch_dependency=8),
    "with replacement": lambda: Neighbor([3, 4], replace=True),
    "labor": lambda: Labor([3, 4], batch_dependency=4),
    "nested": lambda: Labor([3, 4], batch_dependency=4, nested=True),
    "locality": lambda: Neighbor([3, 4], locality=LocalityBias(torch.arange(NODES) % 5 == 0, 4)),
    "labor-*": lambda: Labor([3, 4], importance_sampling=-1, batch_dependency=math.inf),
    "ladies": lambda: Ladies([200, 100]),
    "walks": lambda: RandomWalk([3, 3]),
    "poisson ladies": lambda: Ladies([200, 100], poisson=True),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samplers") / "one.gids"
    graph = make_graph(mixed_degrees(NODES))
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.arange(NODES * 16.0).reshape(NODES, 16))
        writer.write_graph(("paper", "cites", "paper"), graph.indptr, graph.indices, num_src=NODES)
    return path


def contents(minibatch: Minibatch) -> list[list[float]]:
    lists = [minibatch.seeds, minibatch.input_nodes]
    for block in minibatch.blocks:
        assert isinstance(block, Block)
        lists += [block.indptr, block.indices, block.positions]
        lists += [] if block.weights is None else [block.weights]
    return [tensor.tolist() for tensor in lists]  # type: ignore[union-attr]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_minibatches_do_not_depend_on_the_window_or_earlier_minibatches(dataset: Path, kind: str) -> None:
    def epochs(window: int, first: int, count: int) -> list[list[list[float]]]:
        found = []
        options: dict[str, Any] = {"memory": 64 << 20, "window": window, "threads": 2}
        seeds, sampler = torch.arange(NODES), SAMPLERS[kind]()
        with gids.NodeLoader(
            gids.open(dataset, **tuned(options)), seeds, sampler, batch_size=128, shuffle=True
        ) as loader:
            loader.epoch = first
            for minibatch in itertools.chain(*(loader for _ in range(count))):
                rows = minibatch.features["paper.feat"][:, 0].long() // 16
                assert torch.equal(rows, minibatch.input_nodes)  # type: ignore[arg-type]
                found.append(contents(minibatch))
        return found

    both = epochs(8, 0, 2)
    assert both == epochs(0, 0, 2)
    assert both[len(both) // 2 :] == epochs(3, 1, 1)
