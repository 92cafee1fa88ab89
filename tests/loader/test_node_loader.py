"""NodeLoader: seeds, states, counters, and what a minibatch is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import random_in_edges
from open_loaders import node_loader

import gids
from gids.sampler import Minibatch, Neighbor
from gids.write import DatasetWriter, edge_list

PAPERS, DIM = 2000, 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nodes") / "one.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(PAPERS, DIM))
        writer.write_labels("paper", torch.arange(PAPERS) % 9)
        writer.write_graph(("paper", "cites", "paper"), *random_in_edges(PAPERS, PAPERS, 1), num_src=PAPERS)
    return path


def fingerprint(minibatch: Minibatch) -> list[list[int]]:
    return [tensor.tolist() for tensor in minibatch.tensors()]


def open_loader(path: Path, **options: Any) -> gids.NodeLoader:
    given: dict[str, Any] = {"batch_size": 100, "shuffle": True, "memory": 1 << 30} | options
    seeds = given.pop("seeds", torch.arange(0, PAPERS, 3))
    return node_loader(path, seeds, given.pop("sampler", [3, 4]), **given)


def test_rows_of_reverses_need_the_ids_of_their_edges(tmp_path: Path) -> None:
    writes, back = ("author", "writes", "paper"), ("paper", "rev_writes", "author")
    sources, destinations = torch.arange(40) % 7, torch.arange(40) % 11
    options: dict[str, Any] = {"seeds": {"paper": torch.arange(11)}, "tables": ["author.writes.paper.year"]}
    for count in (40, 39):
        path, of_back = tmp_path / f"{count}.gids", (destinations[:count], sources[:count])
        with DatasetWriter(path) as writer:
            writer.write_edges(writes, edge_list(sources, destinations, num_src=7, num_dst=11))
            writer.write_edges(back, edge_list(*of_back, num_src=11, num_dst=7))
            writer.write_table("edge", writes, "year", torch.arange(40))
        options["sampler"] = Neighbor([2, 2], subgraph="bidirectional")
        if count == 39:
            with pytest.raises(ValueError, match="edges with features must have the ids of their reverses"):
                open_loader(path, **options)
            continue
        with open_loader(path, **options) as loader:
            [m] = loader
        block: Any = m.blocks[0][writes]  # type: ignore[index, call-overload]
        assert torch.equal(m.features["author.writes.paper.year"], block.edge_ids)
        assert torch.equal(m.input_nodes["author"][block.indices], sources[block.edge_ids])  # type: ignore[call-overload]


def test_seeds_that_the_user_changes_later_stay_those_given(path: Path) -> None:
    array = np.arange(0, PAPERS, 3)
    with open_loader(path, seeds={"paper": array}, tables=[]) as loader:
        epoch = iter(loader)
        first, expected = next(epoch).seeds, torch.from_numpy(array[loader.order(0).numpy()])
        array[:] = 1 << 40  # no node
        found = [first, *(m.seeds for m in epoch)]
    assert torch.equal(torch.cat([seeds["paper"] for seeds in found]), expected)  # type: ignore[call-overload]


def test_a_state_has_the_epoch_and_the_next_step(path: Path) -> None:
    with open_loader(path) as loader:

        def at() -> tuple[int, int]:
            state = loader.state_dict()
            return state["epoch"], state["step"]

        assert at() == (0, 0)
        epoch = iter(loader)
        assert at() == (0, 0)
        next(epoch)
        next(epoch)
        assert at() == (0, 2)
        saved = loader.state_dict()
        second = iter(loader)  # the one begun last counts
        next(second)
        assert at() == (1, 1)
        list(second)
        assert at() == (2, 0)
        loader.load_state_dict(saved)
        assert at() == (0, 2)
        loader.epoch = np.int64(5)  # asks for that epoch's beginning
        assert at() == (5, 0)
        assert type(loader.state_dict()["epoch"]) is int  # torch.load reads plain numbers only
        assert next(iter(loader)).step == 0
        loader.epoch = -1
        with pytest.raises(ValueError, match=r"loader\.epoch=-1 must be from 0"):
            iter(loader)


def test_a_state_of_another_loader_is_refused(path: Path) -> None:
    with open_loader(path, tables=[]) as loader:
        state = loader.state_dict()
        weighted = Neighbor([3, 4], weights=torch.ones(loader.store.graph().num_edges))
    for message, options in (
        ("seed = 0, and this one has 1", {"seed": 1}),
        (r"batch_size \* world_size = 100, and this one has 50", {"batch_size": 50}),
        ("shuffle = True", {"shuffle": False}),
        ("drop_last = False", {"drop_last": True}),
        ("seeds = '667 ", {"seeds": torch.arange(1, PAPERS, 3)}),
        (r"sampler = 'Neighbor\(\[3, 4\]\)'", {"sampler": [3, 5]}),
        (r"Neighbor\(\[3, 4\], weights='\d+ \(\w+\)'\)", {"sampler": weighted}),
    ):
        with open_loader(path, tables=[], **options) as other, pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    with open_loader(path, tables=[]) as loader:
        for message, wrong in (
            ("not a NodeLoader state_dict: found keys 'model'", {"model": 1}),
            ("not a NodeLoader state_dict: found keys none", {}),
            ("version 1; this version of gids reads version 2", {**state, "version": 1}),
            ("epoch -1", {**state, "epoch": -1}),
            ("step 8; an epoch has 7 steps", {**state, "step": 8}),
        ):
            with pytest.raises(ValueError, match=message):
                loader.load_state_dict(wrong)
        assert loader.state_dict() == state


def test_minibatches_depend_on_epoch_and_seed_alone(path: Path) -> None:
    def run(**options: Any) -> list[list[list[int]]]:
        with open_loader(path, tables=[], **options) as loader:
            return [fingerprint(m) for _ in range(2) for m in loader]

    expected = run(threads=4)
    assert run(threads=1, window=0) == expected != run(seed=2**64 - 1)
    assert expected[: len(expected) // 2] != expected[len(expected) // 2 :]


def test_stats_count_rows_and_memory(path: Path) -> None:
    with open_loader(path, cache=100_000) as loader:
        epoch = iter(loader)
        next(epoch)
        assert loader.stats()["memory"]["sampler"] > 0
        assert len(list(epoch)) == len(loader) - 1
        stats = loader.stats()
        assert stats["hits"] + stats["misses"] > 0
        assert stats["memory"]["sampler"] == 0  # freed once all is sampled
        assert stats["memory"]["topology"] == 0
        assert stats["memory"]["labels"] == 8 * PAPERS
        assert stats["epoch"] == 1
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(loader)
        loader.close()
        loader.close()
        assert loader.stats()["hits"] == stats["hits"]
        with pytest.raises(ValueError, match="closed"):
            iter(loader)


def test_seeds_may_be_integers_of_any_width_or_a_mask(path: Path) -> None:
    nodes = torch.arange(PAPERS)
    for seeds in (
        range(7, 40),
        np.arange(7, 40, dtype=np.uint16),
        torch.arange(7, 40, dtype=torch.int32),
        nodes.ge(7) & nodes.lt(40),
        [7 <= node < 40 for node in range(PAPERS)],
    ):
        with open_loader(path, seeds=seeds, shuffle=False, batch_size=50, tables=[]) as loader:
            (minibatch,) = loader
            assert minibatch.seeds.tolist() == list(range(7, 40))  # type: ignore[union-attr]
    with open_loader(path, seeds=[], batch_size=50) as loader:
        assert list(loader) == []


def test_a_minibatch_moves_to_another_device(path: Path) -> None:
    with open_loader(path, seeds=torch.arange(40)) as loader:
        minibatch = next(iter(loader))
    assert minibatch.to("cpu") is minibatch
    moved = minibatch.to("meta")
    assert type(moved) is type(minibatch)
    assert {tensor.device.type for tensor in moved.tensors()} == {"meta"}
    assert [t.shape for t in moved.tensors()] == [t.shape for t in minibatch.tensors()]
    assert moved.features.keys() == minibatch.features.keys()
    assert moved.step == minibatch.step
