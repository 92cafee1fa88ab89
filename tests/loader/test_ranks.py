"""Ranks share every step's seeds: together they see what one process with the whole batch sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import random_in_edges

import gids
from gids.loader.epoch_loader import EpochLoader
from gids.loader.ranks import Ranks
from gids.sampler import Labor, Minibatch, Neighbor, RandomWalk
from gids.store.names import Relation
from gids.write import DatasetWriter

pytestmark = pytest.mark.usefixtures("one_thread")
PAPERS, AUTHORS = 1500, 400
CITES: Relation = ("paper", "cites", "paper")
WRITES: Relation = ("author", "writes", "paper")
WRITTEN: Relation = ("paper", "written by", "author")
Ids = torch.Tensor | dict[str, torch.Tensor]


def write(path: Path, relations: list[Relation]) -> Path:
    counts = {"paper": PAPERS, "author": AUTHORS}
    with DatasetWriter(path) as writer:
        for ntype in sorted({t for r in relations for t in r[::2]}):
            rows = torch.arange(counts[ntype] * 16, dtype=torch.float32).view(-1, 16)
            writer.write_table("node", ntype, "feat", rows)
            writer.write_labels(ntype, torch.arange(counts[ntype]))
        for relation in relations:
            num_src, num_dst = counts[relation[0]], counts[relation[2]]
            writer.write_graph(relation, *random_in_edges(num_src, num_dst, num_dst), num_src=num_src)
    return path


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ranks") / "one.gids", [CITES])


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ranks") / "several.gids", [CITES, WRITES, WRITTEN])


def node_loader(
    path: Path | gids.Source, seeds: Any, sampler: Any = (3, 4), **options: Any
) -> gids.NodeLoader:
    return gids.NodeLoader(path, seeds, sampler, **{"seed": 0, "tables": [], "shuffle": True} | options)


def on_ranks(world_size: int, open_loader: Any, **options: Any) -> list[list[Minibatch]]:
    """The minibatches of two epochs, by rank."""
    made = []
    for rank in range(world_size):
        with open_loader(rank=rank, world_size=world_size, **options) as loader:
            assert (loader.rank, loader.world_size) == (rank, world_size)
            epochs = [list(loader) for _ in range(2)]
            assert [len(epoch) for epoch in epochs] == [len(loader)] * 2
            made.append([m for epoch in epochs for m in epoch])
    return made


def by_type(ids: Ids) -> dict[str, torch.Tensor]:
    return ids if isinstance(ids, dict) else {"": ids}


def seeds_of(minibatch: Minibatch) -> list[tuple[str, int]]:
    return [(t, i) for t, ids in by_type(minibatch.seeds).items() for i in ids.tolist()]


def edges_of(minibatch: Minibatch) -> list[set[Any]]:
    """By layer: (relation, source, destination, position, weight) of every edge."""
    nodes, layers = minibatch.input_nodes, []
    for layer in minibatch.blocks:
        found: set[Any] = set()
        for block in layer.values() if isinstance(layer, dict) else [layer]:
            ends = block.relation[0], block.relation[2]
            src, dst = (nodes[t] if isinstance(nodes, dict) else nodes for t in ends)
            local_src, local_dst = block.coo()
            weights = block.weights if block.weights is not None else torch.ones(block.num_edges)
            columns = (src[local_src], dst[local_dst], block.positions, weights)
            found |= {(block.relation, *edge) for edge in zip(*(c.tolist() for c in columns), strict=True)}
        layers.append(found)
    return layers


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_parts_cover_a_step_and_differ_by_one_seed_at_most(world_size: int) -> None:
    for count in range(1, 60):
        parts = [list(range(count))[Ranks(rank, world_size).part(count)] for rank in range(world_size)]
        sizes = [len(part) for part in parts]
        assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
        together = [position for part in parts for position in part]
        assert together == sorted(together)
        assert set(together) == set(range(count))
        assert len(together) == max(count, world_size)  # nothing is repeated unless seeds are too few


@pytest.mark.parametrize(
    ("world_size", "count", "batch_size", "drop_last", "shuffle"),
    [(2, 200, 50, True, True), (3, 200, 50, False, True), (3, 92, 30, True, False), (4, 3, 5, False, True)],
)
def test_ranks_take_equal_steps_and_all_seeds(
    one: Path, world_size: int, count: int, batch_size: int, drop_last: bool, shuffle: bool
) -> None:
    seeds = torch.from_numpy(np.random.default_rng(1).permutation(PAPERS)[:count])
    options = {"seeds": seeds, "batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    ranks = on_ranks(world_size, lambda **o: node_loader(one, **o), **options)
    size = world_size * batch_size
    length = count // size if drop_last else -(-count // size)
    assert {len(minibatches) for minibatches in ranks} == {2 * length}
    orders = []
    for epoch in range(2):
        seen: list[int] = []
        for step in range(length):
            of_step = [rank[epoch * length + step] for rank in ranks]
            assert {(m.epoch, m.step) for m in of_step} == {(epoch, step)}
            seen += dict.fromkeys(i for m in of_step for i in m.seeds.tolist())  # type: ignore[union-attr]
        assert len(seen) == len(set(seen)) == (length * size if drop_last else count)
        orders.append(seen)
    if not drop_last:
        assert sorted(orders[0]) == sorted(seeds.tolist())
    if count > 10:
        assert (orders[0] != orders[1]) == shuffle  # reshuffled over all ranks


SAMPLERS: dict[str, Any] = {
    "nested": Neighbor([3, 4], batch_dependency=4, nested=True),
    "layer dependency": Labor([3, 4], layer_dependency=True, batch_dependency=3),
    "RandomWalk": RandomWalk([3, 4], num_walks=6),
    "Neighbor, typed": Neighbor([3, 4]),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_sample_together_what_one_process_samples(one: Path, several: Path, name: str) -> None:
    path, seeds = one, torch.arange(0, PAPERS, 9)
    if name.endswith(", typed"):
        path, seeds = several, {"paper": seeds, "author": torch.arange(0, AUTHORS, 5)}
    options: dict[str, Any] = {"seeds": seeds, "sampler": SAMPLERS[name]}
    with node_loader(path, batch_size=120, **options) as loader:
        whole = [m for _ in range(2) for m in loader]
    compare(whole, on_ranks(3, lambda **o: node_loader(path, **o), batch_size=40, **options))


def compare(whole: list[Minibatch], ranks: list[list[Minibatch]]) -> None:
    for step in zip(whole, *ranks, strict=True):
        expected, *parts = step
        assert sorted(seeds_of(expected)) == sorted(seed for part in parts for seed in seeds_of(part))
        for layer, edges in enumerate(edges_of(expected)):
            assert edges == set().union(*(edges_of(part)[layer] for part in parts))
            assert edges
        for ntype, nodes in by_type(expected.input_nodes).items():
            found = torch.cat([by_type(part.input_nodes)[ntype] for part in parts])
            assert torch.equal(nodes.sort().values, found.unique())


def test_ranks_train_together_on_the_edges_and_negatives_of_one_process(several: Path) -> None:
    def open_loader(**options: Any) -> gids.EdgeLoader:
        options |= {"relation": WRITES, "negatives": 2, "exclude": "reverse", "reverse": WRITTEN}
        options |= {"tables": [], "shuffle": True}
        return gids.EdgeLoader(several, edges, [3, 4], **{"seed": 0} | options)

    indptr, indices = random_in_edges(AUTHORS, PAPERS, PAPERS)
    destinations = np.arange(PAPERS).repeat(np.diff(indptr))
    edges = torch.from_numpy(np.stack([indices, destinations])[:, ::64].copy())

    def pairs(m: Any) -> list[tuple[int, int, float]]:
        ends = [m.seeds[t][at].tolist() for t, at in zip(("author", "paper"), m.pairs, strict=True)]
        return list(zip(*ends, m.labels.tolist(), strict=True))

    with open_loader(batch_size=100) as loader:
        whole = [m for _ in range(2) for m in loader]
    ranks = on_ranks(2, open_loader, batch_size=50)
    for expected, *parts in zip(whole, *ranks, strict=True):
        assert sorted(pairs(expected)) == sorted(pair for part in parts for pair in pairs(part))
        for layer, edges in enumerate(edges_of(expected)):
            assert edges == set().union(*(edges_of(part)[layer] for part in parts))
        negatives = [[destination for _, destination, label in pairs(part) if label == 0] for part in parts]
        assert negatives[0] != negatives[1]


def open_kind(kind: str, path: Path, **options: Any) -> EpochLoader:
    if kind == "nodes":
        return node_loader(path, {"paper": torch.arange(0, PAPERS, 4)}, **options)
    edges = torch.stack([torch.arange(400) % AUTHORS, torch.arange(400)])
    return gids.EdgeLoader(
        path, edges, [3, 4], relation=WRITES, **{"seed": 0, "tables": [], "shuffle": True} | options
    )


@pytest.mark.parametrize(("kind", "before", "after"), [("nodes", 2, 3), ("edges", 3, 1)])
def test_a_run_resumes_on_any_number_of_ranks(several: Path, kind: str, before: int, after: int) -> None:
    """With the same seeds in a step, over all ranks."""

    def open_at(rank: int, world_size: int) -> EpochLoader:
        return open_kind(kind, several, rank=rank, world_size=world_size, batch_size=60 // world_size)

    states = []
    for rank in range(before):
        with open_at(rank, before) as loader:
            epoch = iter(loader)
            for _ in range(5):
                next(epoch)
            states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    with open_at(0, 1) as loader:
        expected = [m for _ in range(2) for m in loader][5:]
    resumed = []
    for rank in range(after):
        with open_at(rank, after) as loader:
            loader.load_state_dict(states[0])
            resumed.append([m for _ in range(2) for m in loader])
    for whole, *parts in zip(expected, *resumed, strict=True):
        assert {(m.epoch, m.step) for m in parts} == {(whole.epoch, whole.step)}
        assert set(seeds_of(whole)) == {seed for part in parts for seed in seeds_of(part)}
        assert edges_of(whole)[0] == set().union(*(edges_of(part)[0] for part in parts))


def test_torchrun_without_a_process_group_is_warned_of(
    one: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for world_size, options, warned in (
        ("2", {}, True),
        ("1", {}, False),
        ("2", {"rank": 0, "world_size": 2}, False),
    ):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        node_loader(one, torch.arange(90), **options).close()
        assert ("torchrun started 2 ranks, but there is no process group" in caplog.text) == warned
        caplog.clear()


def test_a_loader_that_is_older_than_the_process_group_is_refused(
    one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a script gives Lightning's Trainer a loader and strategy="ddp"."""
    for options, refused in (({}, True), ({"rank": 0, "world_size": 1}, False)):
        with node_loader(one, torch.arange(90), **options) as loader, monkeypatch.context() as later:
            next(iter(loader))
            later.setattr(dist, "is_initialized", lambda: True)
            later.setattr(dist, "get_world_size", lambda: 2)
            if refused:
                with pytest.raises(ValueError, match="made before the process group"):
                    next(iter(loader))
            else:
                next(iter(loader))


def test_ranks_of_one_machine_share_its_memory(
    one: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gids.loader.row_source.available_bytes", lambda ranks: (1 << 30) // ranks)
    for local, share in (("1", "537 MB"), ("4", "to each of 4 ranks, 134 MB")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with gids.open(one) as source, caplog.at_level("INFO", "gids"):
            assert source.memory == (1 << 29) // int(local)
        assert share in caplog.text
        caplog.clear()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with gids.open(one) as source:
        assert source.memory == (1 << 29) // 3
