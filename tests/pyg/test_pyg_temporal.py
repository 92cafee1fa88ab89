"""gids.pyg's loaders by time, on a device, on several ranks, and with other options of their source."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from open_options import tuned
from pyg_model import (
    AUTHORS,
    CITES,
    COUNTS,
    PAPERS,
    WRITES,
    WRITTEN,
    assert_all_same,
    assert_same_on,
    stores,
)
from torch_geometric.data import Data, HeteroData

import gids.pyg
from gids.cuda import Device
from gids.write import DatasetWriter, edge_list

LATEST = 1000


def timed(path: Path, data: Data | HeteroData, seed: int = 5) -> Path:
    """A dataset of data whose nodes have the times "when" and whose edges have the times "since"."""
    generator = torch.Generator().manual_seed(seed)

    def times(count: int) -> torch.Tensor:
        return torch.randint(LATEST, (count, 1), generator=generator)

    with DatasetWriter(path) as writer:
        for ntype, count in COUNTS.items():
            if isinstance(data, HeteroData) or ntype == "paper":
                writer.write_table("node", ntype, "feat", stores(data).get(ntype, data).x)
                writer.write_table("node", ntype, "when", times(count))
        for relation in (CITES, WRITES, WRITTEN) if isinstance(data, HeteroData) else (CITES,):
            row, col = stores(data).get(relation, data).edge_index
            writer.write_table("edge", relation, "since", times(len(row)))
            num_src, num_dst = COUNTS[relation[0]], COUNTS[relation[2]]
            writer.write_edges(relation, edge_list(row, col, num_src=num_src, num_dst=num_dst))
    return path


@pytest.fixture(scope="module")
def one_timed(tmp_path_factory: pytest.TempPathFactory, one: Data) -> Path:
    return timed(tmp_path_factory.mktemp("times") / "one.gids", one)


@pytest.fixture(scope="module")
def several_timed(tmp_path_factory: pytest.TempPathFactory, several: HeteroData) -> Path:
    return timed(tmp_path_factory.mktemp("times") / "several.gids", several)


def test_neighbors_are_not_later_than_the_seed(one: Data, one_timed: Path) -> None:
    """Times of nodes and of edges, from tables of any name."""
    store, source = gids.FeatureStore(one_timed), one_timed
    when = store.read_rows(range(PAPERS), "paper.when").view(-1)
    since = store.read_rows(range(one.num_edges), "paper.cites.paper.since").view(-1)
    generator = torch.Generator().manual_seed(5)
    seeds, times = torch.arange(100), torch.randint(1000, (100,), generator=generator)
    for attr, strategy in (("when", "uniform"), ("since", "uniform"), ("since", "last")):
        loader = gids.pyg.NeighborLoader(
            source,
            [2, -1],
            seeds,
            times,
            time_attr=attr,
            temporal_strategy=strategy,
            batch_size=30,
            seed=0,
        )
        found = 0
        for batch in loader:
            assert torch.equal(batch.seed_time, times[batch.input_id])
            tree = batch.batch[batch.edge_index[1]]
            sources = batch.n_id[batch.edge_index[0]]
            time = since[batch.e_id] if attr == "since" else when[sources]
            assert (time <= batch.seed_time[tree]).all()
            assert torch.equal(batch.n_id[batch.edge_index], one.edge_index[:, batch.e_id])
            found += len(tree)
        assert found > 50
    own = gids.pyg.NeighborLoader(source, [2], seeds, time_attr="when", batch_size=30, seed=0)
    for batch in own:  # without input_time the seeds' own times
        tree = batch.batch[batch.edge_index[1]]
        limits = when[seeds[batch.input_id]][tree]
        assert (when[batch.n_id[batch.edge_index[0]]] <= limits).all()
    edges, label_times = one.edge_index[:, :90], times[:90] + 200
    for negatives in ("binary", "triplet"):
        options: dict[str, Any] = {"time_attr": "when", "neg_sampling": negatives, "batch_size": 30}
        for batch in gids.pyg.LinkNeighborLoader(
            source, [-1], edges, None, label_times, **{"seed": 0} | options
        ):
            seed_time = batch.edge_label_time[:30] if negatives == "binary" else batch.seed_time
            assert torch.equal(seed_time, label_times[batch.input_id])
            tree = batch.batch[batch.edge_index[1]]
            assert (when[batch.n_id[batch.edge_index[0]]] <= seed_time[tree]).all()


@pytest.mark.slow
def test_minibatches_of_a_device_are_those_of_the_cpu(
    one: Data, one_timed: Path, several_timed: Path, device: Device, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(device)
    generator = torch.Generator().manual_seed(1)
    times = torch.randint(LATEST, (90,), generator=generator)
    by_time: dict[str, Any] = {"time_attr": "when", "input_time": times}
    authors = ("author", torch.arange(90))
    for path, seeds, edges in (
        (one_timed, torch.arange(90), one.edge_index[:, :90]),
        (several_timed, authors, (WRITES, torch.randint(AUTHORS, (2, 90), generator=generator))),
    ):
        nodes = partial(gids.pyg.NeighborLoader, path, [3, -1], seeds, batch_size=30, shuffle=True, seed=0)
        links = partial(gids.pyg.LinkNeighborLoader, path, [3, 2], edges, batch_size=40, shuffle=True, seed=0)
        for make, options in (
            (nodes, {"weight_attr": "since", "topology_on": "device"}),
            (nodes, {"disjoint": True, "subgraph_type": "bidirectional"}),
            (nodes, {**by_time, "replace": True}),
            (nodes, {**by_time, "time_attr": "since", "temporal_strategy": "last"}),
            (nodes, {**by_time, "time_attr": "since", "weight_attr": "since"}),
            (links, {"disjoint": True, "neg_sampling": "triplet"}),
            (links, {"time_attr": "when", "edge_label_time": times, "neg_sampling": "binary"}),
        ):
            assert_same_on(device, make, 2, **options)


def seeds_and_negatives(
    path: Path, edges: torch.Tensor, relation: Any, **options: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By step: the positions of the seed edges, int64[n], and their negatives, int64[2, amount, n]."""
    found = []
    given = edges if relation is None else (relation, edges)
    with gids.pyg.LinkNeighborLoader(path, [2], given, shuffle=True, seed=4, **options) as loader:
        for batch in loader:
            of = stores(batch)
            src, dst = (None, None) if relation is None else (relation[0], relation[2])
            seeds, sources, destinations = of[relation], of[src], of[dst]
            count = len(seeds.input_id)
            pairs = seeds.edge_label_index[:, count:]
            ends = torch.stack([sources.n_id[pairs[0]], destinations.n_id[pairs[1]]])
            found.append((seeds.input_id, ends.view(2, -1, count)))
    return found


def test_negatives_with_trees_are_the_same_on_any_number_of_ranks(
    one: Data, one_timed: Path, several: HeteroData, several_timed: Path
) -> None:
    """They are not later than their seed edge, which is that of their place."""
    times = torch.arange(101) * 7  # most draws are too late for the first edges
    for path, data, relation in ((one_timed, one, None), (several_timed, several, WRITES)):
        edges = stores(data)[relation].edge_index[:, :101]
        for options in (
            {"time_attr": "when", "edge_label_time": times},
            {"time_attr": "since", "edge_label_time": times},
            {"disjoint": True},
        ):
            given: dict[str, Any] = {"neg_sampling": {"mode": "binary", "amount": 3}, **options}
            alone = seeds_and_negatives(path, edges, relation, batch_size=40, **given)
            assert len(alone) == 3
            of_ranks = [
                seeds_and_negatives(path, edges, relation, batch_size=10, rank=rank, world_size=4, **given)
                for rank in range(4)
            ]
            for step, (ids, negatives) in enumerate(alone):
                assert torch.equal(torch.cat([rank[step][0] for rank in of_ranks]), ids)
                assert torch.equal(torch.cat([rank[step][1] for rank in of_ranks], 2), negatives)
            if options.get("time_attr") != "when":
                continue
            limits = times[torch.cat([ids for ids, _ in alone])]
            src, _, dst = relation or CITES
            for end, ntype in enumerate((src, dst)):
                table = gids.FeatureStore(path).table(f"{ntype}.when")
                when = table.read_rows(torch.arange(table.row_count)).view(-1)
                drawn = torch.cat([negatives[end] for _, negatives in alone], 1)
                late = when[drawn] > limits
                assert (when[drawn][late] == when.min()).all()  # no node was early enough
                assert late.sum() < 10
                assert len(drawn.unique()) > 60


def test_negatives_that_not_every_seed_edge_has_are_in_the_tree_of_theirs(one: Data, one_path: Path) -> None:
    options: dict[str, Any] = {"edge_label_index": one.edge_index[:, :9], "disjoint": True, "batch_size": 9}
    for amount, count in ((0.5, 5), (1.5, 14)):
        negatives = {"mode": "binary", "amount": amount}
        with gids.pyg.LinkNeighborLoader(
            one_path, [2], neg_sampling=negatives, **{"seed": 0} | options
        ) as loader:
            [batch] = loader
        for ends in batch.edge_label_index:
            assert torch.equal(batch.batch[ends], torch.arange(9 + count) % 9)


def test_wrong_times_are_refused(one: Data, one_timed: Path, tmp_path: Path) -> None:
    whole = torch.full((PAPERS,), 3)
    with DatasetWriter(tmp_path / "wrong.gids") as writer:
        writer.write_table("node", "paper", "two", torch.ones(PAPERS, 2, dtype=torch.int64))
        writer.write_table("edge", CITES, "float", torch.rand(one.num_edges, 1))
        writer.write_edges(CITES, edge_list(*one.edge_index, num_src=PAPERS, num_dst=PAPERS))
    for name, error, said in (
        (
            "two",
            ValueError,
            r"'two' of 'paper' has shape \[600, 2\]; it must have one number",
        ),
        ("float", TypeError, r"'float' of .* is torch\.float32; times must be integers"),
    ):
        with pytest.raises(error, match=said):
            gids.pyg.NeighborLoader(tmp_path / "wrong.gids", [2], None, whole, time_attr=name)
    with gids.pyg.NeighborLoader(one_timed, [2], time_attr="since", seed=0) as nodes:
        with pytest.raises(ValueError, match="the seeds need times, because time_attr= names times of edges"):
            next(iter(nodes))
    with gids.pyg.NeighborLoader(one_timed, [2], input_time=whole - 6.7, time_attr="when", seed=0) as nodes:
        with pytest.raises(TypeError, match=r"is torch\.float32: give int64\[n\]"):
            next(iter(nodes))


@pytest.mark.parametrize(
    "given",
    [
        {"time_attr": "when", "input_time": torch.arange(PAPERS).flip(0)},
        {"disjoint": True, "subgraph_type": "bidirectional"},
        {"replace": True, "subgraph_type": "induced"},
        {"edge_label_index": torch.arange(400).view(2, 200), "neg_sampling": "binary"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_minibatches_do_not_depend_on_window_or_threads(one_timed: Path, given: dict[str, Any]) -> None:
    make: Any = gids.pyg.LinkNeighborLoader if "neg_sampling" in given else gids.pyg.NeighborLoader
    found = []
    for opened in ({}, {"window": 0}, {"window": 8, "threads": 3}):
        with (
            gids.open(one_timed, memory=64 << 20, **tuned(opened)) as source,  # type: ignore[arg-type]
            make(source, [3, 2], batch_size=60, shuffle=True, seed=0, **given) as loader,
        ):
            found.append(list(loader))
    for others in found[1:]:
        assert_all_same(others, found[0])


def test_a_state_of_other_arguments_is_refused(one: Data, one_timed: Path, tmp_path: Path) -> None:
    """Also of other times of a table, which are not the times that conversion stores."""
    options: dict[str, Any] = {"num_neighbors": [2], "time_attr": "when"}
    options["input_time"] = torch.full((PAPERS,), LATEST // 2)
    with gids.pyg.NeighborLoader(one_timed, **{"seed": 0} | options) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    other = timed(tmp_path / "other.gids", one, seed=6)
    for path, changed, said in (
        (one_timed, {"time_attr": "since"}, r"sampler = .*tables=\{'paper.when': "),
        (other, {}, r"sampler = .*tables=\{'paper.when': "),
        (one_timed, {"replace": True}, "make the loader with the same arguments"),
    ):
        with gids.pyg.NeighborLoader(path, **{"seed": 0, **options, **changed}) as loader:
            with pytest.raises(ValueError, match=said):
                loader.load_state_dict(state)
    with gids.pyg.LinkNeighborLoader(one_timed, [2], neg_sampling="binary", seed=0) as links:
        state = links.state_dict()
    with gids.pyg.LinkNeighborLoader(one_timed, [2], neg_sampling="triplet", seed=0) as links:
        with pytest.raises(ValueError, match="negatives=binary"):
            links.load_state_dict(state)
