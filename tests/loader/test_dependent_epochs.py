"""Dependent minibatches depend on each other over epochs: steps count from the first epoch on."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import random_in_edges
from open_options import node_loader

import gids
from gids.cuda import Device
from gids.loader.epoch_loader import EpochLoader
from gids.sampler import Labor, Minibatch, Neighbor, Topology
from gids.sampler.layered import LayeredSampler
from gids.write import DatasetWriter

PAPERS, LENGTH, EPOCHS = 600, 5, 3
CITES = ("paper", "cites", "paper")
SAMPLERS: dict[str, LayeredSampler] = {
    "labor": Labor([3, 4], batch_dependency=7),
    "labor, all epochs": Labor([3, 4], batch_dependency=math.inf),
    "labor-1": Labor([3, 4], importance_sampling=1, batch_dependency=64),
    "neighbor": Neighbor([3, 4], batch_dependency=8),
    "nested": Neighbor([3, 4], batch_dependency=4, nested=True),
}


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("papers") / "one.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(PAPERS, 8))
        writer.write_graph(CITES, *random_in_edges(PAPERS, PAPERS, 1), num_src=PAPERS)
    return path


def open_loader(path: Path, sampler: Any, **options: Any) -> EpochLoader:
    options = {"batch_size": PAPERS // 3 // LENGTH, "shuffle": True} | options
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
    sampler = SAMPLERS[kind]
    expected = drawn_by_hand(papers, sampler)
    for options in ({"tables": []}, {"window": 8, "threads": 2}, {"window": 0, "threads": 1}):
        with open_loader(papers, sampler, **options) as loader:
            assert [fingerprint(m) for _ in range(EPOCHS) for m in loader] == expected
    with open_loader(papers, sampler) as loader:
        loader.epoch = 2
        assert [fingerprint(m) for m in loader] == expected[2 * LENGTH :]


@pytest.mark.parametrize("kind", ["labor", "neighbor", "nested"])
def test_steps_count_over_epochs_on_a_device(
    papers: Path, kind: str, device: Device, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(device)
    with open_loader(papers, SAMPLERS[kind], device="cuda", tables=[]) as loader:
        found = [fingerprint(m) for _ in range(EPOCHS) for m in loader]
    assert found == drawn_by_hand(papers, SAMPLERS[kind])


def test_without_end_all_epochs_draw_alike(papers: Path) -> None:
    with open_loader(papers, Labor([3, 4], batch_dependency=math.inf), shuffle=False, tables=[]) as loader:
        first, second, _ = ([fingerprint(m)[2:] for m in loader] for _ in range(EPOCHS))
    assert first == second


def test_independent_minibatches_are_those_of_their_epoch_and_step(papers: Path) -> None:
    sampler = Labor([3, 4], batch_dependency=1)
    with open_loader(papers, sampler, tables=[]) as loader:
        topology = Topology(loader.store.graph())
        for minibatch in [m for _ in range(2) for m in loader]:
            alone = sampler.sample(
                topology, minibatch.seeds, seed=0, epoch=minibatch.epoch, step=minibatch.step
            )
            assert fingerprint(alone) == fingerprint(minibatch)


@pytest.mark.parametrize("kind", ["labor", "nested"])
def test_a_run_resumes_in_a_later_epoch(papers: Path, kind: str) -> None:
    """Also on another number of ranks, which have as many minibatches together."""
    expected = drawn_by_hand(papers, SAMPLERS[kind])
    with open_loader(papers, SAMPLERS[kind], tables=[]) as loader:
        list(loader)
        epoch = iter(loader)
        for _ in range(2):
            next(epoch)
        state = loader.state_dict()
    with open_loader(papers, SAMPLERS[kind], tables=[]) as loader:
        loader.load_state_dict(state)
        assert [fingerprint(m) for _ in range(2) for m in loader] == expected[LENGTH + 2 :]
    ranks = []
    for rank in range(2):
        options: dict[str, Any] = {"batch_size": PAPERS // 3 // LENGTH // 2, "rank": rank, "world_size": 2}
        with open_loader(papers, SAMPLERS[kind], tables=[], **options) as loader:
            loader.load_state_dict(state)
            ranks.append([m for _ in range(2) for m in loader])
    for whole, *parts in zip(expected[LENGTH + 2 :], *ranks, strict=True):
        nodes = {node for part in parts for node in part.input_nodes.tolist()}
        if kind == "nested":  # nodes draw by themselves
            assert nodes == set(whole[2][1])
        assert {(part.epoch, part.step) for part in parts} == {(whole[0], whole[1])}


def test_a_state_from_before_steps_were_counted_is_refused(papers: Path) -> None:
    with open_loader(papers, SAMPLERS["labor"], tables=[]) as loader:
        state = loader.state_dict()
        del state["made_with"]["steps"]
        with pytest.raises(ValueError, match="steps = None, and this one has 'counted over epochs'"):
            loader.load_state_dict(state)


def test_edges_are_seeds_of_dependent_minibatches_too(papers: Path) -> None:
    edges = torch.stack([torch.arange(40), torch.arange(40, 80)])
    sampler = Labor([3], batch_dependency=math.inf)
    options: dict[str, Any] = {"relation": CITES, "batch_size": 10, "negatives": 0, "seed": 0}
    with gids.EdgeLoader(papers, edges, sampler, tables=[], **options) as loader:
        first, second = ([fingerprint(m)[2:] for m in loader] for _ in range(2))
    assert first == second


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
        with open_loader(papers, sampler, tables=[]) as loader:
            of_loader = [(m.epoch, m.step) for _ in range(2) for m in loader]
        assert of_loader == [divmod(i, LENGTH) for i in range(2 * LENGTH)]
        assert sampler.calls == ([(0, i) for i in range(2 * LENGTH)] if spans else of_loader)
