"""Dependent minibatches depend on each other over epochs: steps count from the first epoch on."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import random_in_edges
from open_loaders import node_loader

from gids.cuda import Device
from gids.loader.epoch_loader import EpochLoader
from gids.sampler import Labor, Minibatch, Neighbor, Topology
from gids.sampler.layered import LayeredSampler
from gids.write import DatasetWriter

PAPERS, LENGTH, EPOCHS = 600, 5, 3
SAMPLERS: dict[str, LayeredSampler] = {
    "labor": Labor([3, 4], batch_dependency=7),
    "nested": Neighbor([3, 4], batch_dependency=4, nested=True),
}


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("papers") / "one.gids"
    with DatasetWriter(path) as writer:
        edges = random_in_edges(PAPERS, PAPERS, 1)
        writer.write_graph(("paper", "cites", "paper"), *edges, num_src=PAPERS)
    return path


def open_loader(path: Path, sampler: Any, **options: Any) -> EpochLoader:
    options = {"batch_size": PAPERS // 3 // LENGTH, "shuffle": True, "tables": []} | options
    return node_loader(path, torch.arange(0, PAPERS, 3), sampler, **options)


def fingerprint(minibatch: Minibatch) -> list[Any]:
    blocks: list[Any] = minibatch.blocks
    lists: list[Any] = [minibatch.seeds, minibatch.input_nodes]
    for block in blocks:
        lists += [block.indptr, block.indices, block.positions]
    weights = [None if b.weights is None else b.weights.tolist() for b in blocks]
    return [minibatch.epoch, minibatch.step, [t.tolist() for t in lists], weights]


def drawn_by_hand(path: Path, sampler: LayeredSampler) -> list[list[Any]]:
    """The minibatches of all epochs, each sampled alone, with steps counted over epochs."""
    made = []
    with open_loader(path, sampler) as loader:
        topology = Topology(loader.store.graph())
        for epoch in range(EPOCHS):
            for step, positions in enumerate(loader.order(epoch).chunk(LENGTH)):
                minibatch = sampler.sample(topology, 3 * positions, seed=0, step=epoch * LENGTH + step)
                minibatch.epoch, minibatch.step = epoch, step
                made.append(fingerprint(minibatch))
    return made


@pytest.mark.parametrize("kind", SAMPLERS)
def test_steps_count_over_epochs(papers: Path, kind: str) -> None:
    expected = drawn_by_hand(papers, SAMPLERS[kind])
    with open_loader(papers, SAMPLERS[kind], threads=2) as loader:
        assert [fingerprint(m) for _ in range(EPOCHS) for m in loader] == expected
        loader.epoch = 2
        assert [fingerprint(m) for m in loader] == expected[2 * LENGTH :]


def test_steps_count_over_epochs_on_a_device(
    papers: Path, device: Device, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(device)
    with open_loader(papers, SAMPLERS["labor"], device="cuda") as loader:
        found = [fingerprint(m) for _ in range(EPOCHS) for m in loader]
    assert found == drawn_by_hand(papers, SAMPLERS["labor"])


def test_without_end_all_epochs_draw_alike(papers: Path) -> None:
    with open_loader(papers, Labor([3, 4], batch_dependency=math.inf), shuffle=False) as loader:
        first, second, _ = ([fingerprint(m)[2:] for m in loader] for _ in range(EPOCHS))
    assert first == second


def test_a_run_resumes_in_a_later_epoch_on_two_ranks(papers: Path) -> None:
    """They have as many minibatches together."""
    expected = drawn_by_hand(papers, SAMPLERS["nested"])
    with open_loader(papers, SAMPLERS["nested"]) as loader:
        list(loader)
        epoch = iter(loader)
        next(epoch), next(epoch)
        state = loader.state_dict()
    ranks = []
    for rank in range(2):
        options: dict[str, Any] = {"batch_size": PAPERS // 3 // LENGTH // 2, "rank": rank, "world_size": 2}
        with open_loader(papers, SAMPLERS["nested"], **options) as loader:
            loader.load_state_dict(state)
            ranks.append([m for _ in range(2) for m in loader])
    for whole, *parts in zip(expected[LENGTH + 2 :], *ranks, strict=True):
        assert {node for part in parts for node in part.input_nodes.tolist()} == set(whole[2][1])
        assert {(part.epoch, part.step) for part in parts} == {(whole[0], whole[1])}


class Counting:
    """A user's sampler."""

    def __init__(self, spans_epochs: bool) -> None:
        self.spans_epochs, self.calls, self._inner = spans_epochs, list[tuple[int, int]](), Neighbor([2])

    def sample(self, graphs: Any, seeds: Any, *, seed: int = 0, epoch: int = 0, step: int = 0) -> Minibatch:
        self.calls.append((epoch, step))
        return self._inner.sample(graphs, seeds, seed=seed, epoch=epoch, step=step)


def test_a_users_sampler_may_span_epochs(papers: Path) -> None:
    for spans in (False, True):
        sampler = Counting(spans)
        with open_loader(papers, sampler) as loader:
            of_loader = [(m.epoch, m.step) for _ in range(2) for m in loader]
        assert of_loader == [divmod(i, LENGTH) for i in range(2 * LENGTH)]
        assert sampler.calls == ([(0, i) for i in range(2 * LENGTH)] if spans else of_loader)
