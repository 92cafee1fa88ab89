"""NodeLoader and EdgeLoader with times: no minibatch has an edge that is later than its seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from open_loaders import edge_loader

import gids
from gids.sampler import Labor, Minibatch, Neighbor, TimedSeeds
from gids.write import DatasetWriter, edge_list

NODES, ITEMS, EDGES = 200, 90, 1500
KNOWS, BUYS, BOUGHT = ("user", "knows", "user"), ("user", "buys", "item"), ("item", "rev_buys", "user")


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return torch.randn(NODES, 16)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, rows: torch.Tensor) -> Path:
    """One node type and relation, with times of edges."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("times") / "one.gids"
    src, dst = rng.integers(0, NODES, (2, EDGES))
    with DatasetWriter(path) as writer:
        writer.write_table("node", "_N", "feat", rows)
        writer.write_edges(
            ("_N", "_E", "_N"),
            edge_list(src, dst, num_src=NODES, num_dst=NODES),
            times=rng.integers(0, 100, EDGES),
        )
    return path


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, rows: torch.Tensor) -> Path:
    """Edges between users and items have times."""
    rng = np.random.default_rng(1)
    path = tmp_path_factory.mktemp("times") / "several.gids"
    buys = np.stack([rng.integers(0, NODES, EDGES), rng.integers(0, ITEMS, EDGES)])
    knows, times = rng.integers(0, NODES, (2, 800)), rng.integers(0, 100, EDGES)
    with DatasetWriter(path) as writer:
        writer.write_table("node", "user", "feat", rows)
        writer.write_table("node", "item", "feat", torch.randn(ITEMS, 16))
        writer.write_edges(KNOWS, edge_list(*knows, num_src=NODES, num_dst=NODES))
        writer.write_edges(BUYS, edge_list(*buys, num_src=NODES, num_dst=ITEMS), times=times)
        writer.write_edges(BOUGHT, edge_list(*buys[::-1], num_src=ITEMS, num_dst=NODES), times=times)
    return path


def open_edges(path: Path, edges: Any = None, **options: Any) -> gids.EdgeLoader:
    given: dict[str, Any] = {"batch_size": 64, "shuffle": True, "memory": 32 << 20, "cache": 20_000} | options
    return edge_loader(path, edges, given.pop("sampler", [4, 4]), **given)


def assert_never_later(minibatch: Minibatch) -> int:
    """Returns the number of edges that have times."""
    times = minibatch.times
    if isinstance(times, dict):  # trees are numbered type after type
        of_trees = torch.cat([times[t] for t in ("user", "item") if t in times])
    else:
        of_trees = times
    found = 0
    for layer in minibatch.blocks:
        for block in layer.values() if isinstance(layer, dict) else [layer]:
            batch = minibatch.batch
            src, dst = (batch[t] if isinstance(batch, dict) else batch for t in block.relation[::2])
            sources, destinations = block.coo()
            assert torch.equal(src[sources], dst[destinations])
            if block.graph.edge_times is not None:
                latest = of_trees[dst[destinations]].numpy()
                assert (block.graph.edge_times[block.positions.numpy()] <= latest).all()
                found += block.num_edges
    return found


def same(one: Minibatch, other: Minibatch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


def test_seeds_of_a_node_loader_have_times(one: Path, rows: torch.Tensor) -> None:
    seeds, times = torch.arange(NODES).repeat(2), torch.arange(2 * NODES) % 120
    for strategy in (None, "last"):
        with gids.NodeLoader(
            one, seeds, [3, 3], time=times, strategy=strategy, batch_size=70, shuffle=True, seed=0
        ) as loader:
            for step, minibatch in enumerate(epoch := iter(loader)):
                assert_never_later(minibatch)
                positions = epoch.positions(step)
                assert torch.equal(minibatch.seeds, seeds[positions])  # type: ignore[arg-type]
                assert torch.equal(minibatch.times, times[positions])  # type: ignore[arg-type]
                assert torch.equal(minibatch.features["_N.feat"], rows[minibatch.input_nodes])  # type: ignore[index]
                sampler = Neighbor([3, 3], temporal="edges", strategy=strategy or "uniform")
                given = TimedSeeds(minibatch.seeds, times[positions])
                alone = sampler.sample(loader.store.graph(), given, step=step, seed=0)
                assert same(alone, minibatch)


def test_edges_have_their_own_times_by_default(one: Path) -> None:
    with open_edges(one, negatives=2) as loader:
        graph = loader.store.graph()
        assert "temporal='edges'" in repr(loader.sampler)
        ends = np.repeat(np.arange(NODES), np.diff(graph.indptr))
        position_of = np.argsort(graph.edge_ids)
        for step, minibatch in enumerate(epoch := iter(loader)):
            assert_never_later(minibatch)
            positions = position_of[epoch.positions(step).numpy()]
            seeds, times = minibatch.seeds, minibatch.times
            keys = list(zip(seeds.tolist(), times.tolist(), strict=True))
            assert keys == sorted(set(keys))  # each once, ascending
            src, dst = minibatch.pairs
            count = minibatch.positive_count
            assert np.array_equal(seeds[src[:count]], graph.indices[positions])
            assert np.array_equal(seeds[dst[:count]], ends[positions])
            of_pairs = np.concatenate([graph.edge_times[positions], graph.edge_times[positions].repeat(2)])
            assert np.array_equal(times[src], of_pairs)
            assert np.array_equal(times[dst], of_pairs)
    with open_edges(one, time=False) as loader:
        minibatch = next(iter(loader))
        assert (minibatch.times, minibatch.batch) == (None, None)
    with open_edges(one, sampler=Labor([3])) as loader:  # the sampler decides
        assert next(iter(loader)).times is None


@pytest.mark.parametrize("keep_ids", [True, False])
def test_numbers_of_all_edges_are_edge_ids(tmp_path: Path, keep_ids: bool) -> None:
    """Those of given times, of order() and of positions(). Without ids they are positions, by definition."""
    src, dst = np.random.default_rng(3).integers(0, 40, (2, 300))
    with DatasetWriter(tmp_path / "t.gids") as writer:
        edges = edge_list(src, dst, num_src=40, num_dst=40)
        writer.write_edges(("_N", "_E", "_N"), edges, times=src * 0, keep_ids=keep_ids)
    if not keep_ids:
        by_position = np.argsort(dst, kind="stable")
        src, dst = src[by_position], dst[by_position]
    times = torch.from_numpy(src * 1000 + dst)  # which name the edge
    with open_edges(tmp_path / "t.gids", time=times, negatives=1) as loader:
        ids = []
        for step, minibatch in enumerate(epoch := iter(loader)):
            ids.append(of_step := epoch.positions(step))
            (source, destination), count = minibatch.pairs, minibatch.positive_count
            assert minibatch.seeds[source[:count]].tolist() == src[of_step].tolist()  # type: ignore[index]
            assert minibatch.seeds[destination[:count]].tolist() == dst[of_step].tolist()  # type: ignore[index]
            of_pairs = times[of_step].repeat(2)
            assert torch.equal(minibatch.times[source], of_pairs)  # type: ignore[index]
            assert torch.equal(minibatch.times[destination], of_pairs)  # type: ignore[index]
        assert torch.equal(torch.cat(ids), epoch.order)
        assert torch.equal(loader.order(0), epoch.order)
        assert sorted(epoch.order.tolist()) == list(range(300))


def test_given_edges_have_given_times(one: Path) -> None:
    edges, times = torch.randint(0, NODES, (2, 100)), torch.randint(0, 100, (100,))
    with open_edges(one, edges, time=times - 1, shuffle=False, negatives=0, strategy="last") as loader:
        seen = 0
        for minibatch in loader:
            assert_never_later(minibatch)
            of = minibatch.times[minibatch.pairs[0]]  # type: ignore[index]
            assert torch.equal(of, times[seen : seen + len(of)] - 1)
            seen += len(of)
    with open_edges(one, edges) as loader:
        assert next(iter(loader)).times is None  # they have no times


def test_edges_between_types_have_times(several: Path) -> None:
    with open_edges(several, relation=BUYS, negatives=1, exclude="reverse", reverse=BOUGHT) as loader:
        timed = 0
        for minibatch in loader:
            timed += assert_never_later(minibatch)
            assert {t: len(ids) for t, ids in minibatch.seeds.items()} == {
                t: len(of) for t, of in minibatch.times.items()
            }
        assert timed > 1000


def test_ranks_share_what_one_process_would_have_drawn(one: Path) -> None:
    with open_edges(one, batch_size=64) as loader:
        whole = next(iter(loader))
    trees = {}
    for rank in (0, 1):
        with open_edges(one, batch_size=32, rank=rank, world_size=2) as loader:
            part = next(iter(loader))
        for tree, (node, time) in enumerate(zip(part.seeds.tolist(), part.times.tolist(), strict=True)):  # type: ignore[union-attr]
            trees[node, time] = part.input_nodes[part.batch == tree].tolist()  # type: ignore[index]
    for tree, (node, time) in enumerate(zip(whole.seeds.tolist(), whole.times.tolist(), strict=True)):  # type: ignore[union-attr]
        assert trees[node, time] == whole.input_nodes[whole.batch == tree].tolist()  # type: ignore[index]
    assert len(trees) == len(whole.times)  # type: ignore[arg-type]


def test_a_state_of_other_times_is_refused(one: Path) -> None:
    with open_edges(one) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with open_edges(one, strategy="last") as other, pytest.raises(ValueError, match="strategy='last'"):
        other.load_state_dict(state)
    with open_edges(one, time=torch.zeros(EDGES, dtype=torch.int64)) as other:
        with pytest.raises(ValueError, match="seeds"):
            other.load_state_dict(state)
