"""time_attr and disjoint of gids.pyg's loaders on a device, and negatives with times on several ranks."""

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
    PAPERS,
    WRITES,
    WRITTEN,
    assert_same,
    assert_same_on,
    random_edges,
    stores,
)
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import gids.pyg
from gids.cuda import Device
from gids.write import DatasetWriter, edge_list

LATEST = 1000
COUNTS = {"paper": PAPERS, "author": AUTHORS}


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


@pytest.mark.slow
def test_trees_of_a_device_are_those_of_the_cpu(
    one_timed: Path, several_timed: Path, device: Device, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(device)
    times = torch.randint(LATEST, (70,), generator=torch.Generator().manual_seed(1))
    by_time: dict[str, Any] = {"time_attr": "when", "input_time": times}
    for path, seeds in ((one_timed, torch.arange(70)), (several_timed, ("author", torch.arange(70)))):
        for options in (
            {"disjoint": True},
            {"disjoint": True, "subgraph_type": "bidirectional"},
            {"time_attr": "when"},
            {**by_time, "replace": True},
            {**by_time, "temporal_strategy": "last", "transform_sampler_output": lambda output: output},
            {**by_time, "time_attr": "since", "temporal_strategy": "last"},
            {**by_time, "time_attr": "since", "weight_attr": "since", "subgraph_type": "bidirectional"},
        ):
            make = partial(gids.pyg.NeighborLoader, path, [3, -1], seeds)
            assert_same_on(device, make, batch_size=30, shuffle=True, **options)


@pytest.mark.slow
def test_links_with_times_on_a_device_are_those_of_the_cpu(
    one: Data,
    one_timed: Path,
    several_timed: Path,
    device: Device,
    cuda_is: Callable[[Device], None],
) -> None:
    cuda_is(device)
    for path, edges, count in ((one_timed, one.edge_index[:, :90], 90), (several_timed, WRITES, 2400)):
        times = torch.randint(LATEST, (count,), generator=torch.Generator().manual_seed(2))
        for options in (
            {"disjoint": True, "neg_sampling": "triplet"},
            {"time_attr": "when", "edge_label_time": times, "neg_sampling": "binary"},
            {"time_attr": "since", "edge_label_time": times, "neg_sampling": "triplet"},
        ):
            make = partial(gids.pyg.LinkNeighborLoader, path, [3, 2], edges)
            assert_same_on(device, make, 2, batch_size=40, shuffle=True, **options)


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
            for ranks in (4,):
                together = [
                    seeds_and_negatives(
                        path, edges, relation, batch_size=40 // ranks, rank=rank, world_size=ranks, **given
                    )
                    for rank in range(ranks)
                ]
                for step, (ids, negatives) in enumerate(alone):
                    assert torch.equal(torch.cat([rank[step][0] for rank in together]), ids)
                    assert torch.equal(torch.cat([rank[step][1] for rank in together], 2), negatives)
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


def test_negatives_that_not_every_seed_edge_has_are_in_the_tree_of_theirs(
    one: Data, one_path: Path, several: HeteroData, several_path: Path
) -> None:
    for path, data, relation in ((one_path, one, None), (several_path, several, WRITES)):
        edges = stores(data)[relation].edge_index[:, :9]
        given: Any = edges if relation is None else (relation, edges)
        options: dict[str, Any] = {"disjoint": True, "batch_size": 9}
        for amount, count in ((0.5, 5), (1.5, 14)):
            negatives = {"mode": "binary", "amount": amount}
            with gids.pyg.LinkNeighborLoader(path, [2], given, neg_sampling=negatives, **options) as loader:
                [batch] = loader
            of, tree = stores(batch), torch.arange(9 + count) % 9
            for ntype, ends in zip(
                (None, None) if relation is None else relation[::2],
                of[relation].edge_label_index,
                strict=True,
            ):
                assert torch.equal(of[ntype].batch[ends], tree)


@pytest.mark.parametrize("group", [None, "default"])
@pytest.mark.parametrize("name", ["time", "since"])
def test_times_in_other_peoples_stores_of_one_type(group: str | None, name: str) -> None:
    """As in PyG, the group says nothing: "time" is of nodes, another name of edges."""
    edges, count = random_edges(50, 50, 3), 50
    times = torch.arange(count if name == "time" else edges.shape[1]).flip(0)
    edges = edges[:, edges[1].argsort()]
    features, graphs = MyFeatureStore(), MyGraphStore()
    graphs.put_edge_index(edges, edge_type=None, layout="coo", is_sorted=True, size=(count, count))
    features.put_tensor(torch.zeros(count, 2), group_name=group, attr_name="x", index=None)
    features.put_tensor(times, group_name=group, attr_name=name, index=None)
    data = Data(torch.zeros(count, 2), edges, **{name: times})
    inputs = NodeSamplerInput(None, torch.arange(count), torch.arange(count) * (len(times) // count))
    drawn = []
    for source in (data, (features, graphs)):
        torch.manual_seed(0)
        sampler = gids.pyg.NeighborSampler(source, [3, -1], time_attr=name)
        assert sampler.topology(False).node_counts == [count]
        drawn.append(sampler.sample_from_nodes(inputs))
    assert str(drawn[0]) == str(drawn[1])
    limits = inputs.time[drawn[0].batch[drawn[0].row]]
    sampled = drawn[0].node[drawn[0].row] if name == "time" else drawn[0].edge
    assert len(sampled) > 20
    assert (times[sampled] <= limits).all()
    features.put_tensor(times, group_name="other", attr_name=name, index=None)
    with pytest.raises(ValueError, match=f"2 groups .* have '{name}', and the edges have no type: give one"):
        gids.pyg.NeighborSampler((features, graphs), [3], time_attr=name)


def test_times_of_another_number_are_refused(one: Data) -> None:
    several = HeteroData({"a": {"x": one.x, "t": torch.arange(PAPERS + 1)}})
    several["a", "to", "a"].edge_index = one.edge_index
    with pytest.raises(
        ValueError, match=r"'t' of 'a' has shape \[601\]; it must have one number for each of the 600 nodes"
    ):
        gids.pyg.NeighborSampler(several, [2], time_attr="t")
    del several["a"].t
    several["a", "to", "a"].t = torch.arange(one.num_edges + 1)
    with pytest.raises(ValueError, match="one number for each of the 2400 edges"):
        gids.pyg.NeighborSampler(several, [2], time_attr="t")


def test_seeds_without_whole_times_are_refused_where_pyg_needs_them(one: Data, one_timed: Path) -> None:
    sampler = gids.pyg.NeighborSampler(one_timed, [2], time_attr="when")
    with gids.pyg.NeighborLoader(one_timed, [2], time_attr="since") as nodes:
        with pytest.raises(ValueError, match="the seeds need times, because time_attr= names times of edges"):
            next(iter(nodes))
    times = torch.full((PAPERS,), -3.7)
    with gids.pyg.NeighborLoader(one_timed, [2], input_time=times, time_attr="when") as nodes:
        with pytest.raises(TypeError, match=r"is torch\.float32: give int64\[n\]"):
            next(iter(nodes))
    with gids.pyg.LinkNeighborLoader(
        one_timed, None, one.edge_index, neighbor_sampler=sampler, neg_sampling="binary"
    ) as links:
        with pytest.raises(ValueError, match="or there are negatives: give input_time= or edge_label_time="):
            next(iter(links))


def test_a_state_of_other_times_is_refused(one: Data, one_timed: Path, tmp_path: Path) -> None:
    """Times of a table, which are not the times that conversion stores."""
    given = {"time_attr": "when", "input_time": torch.full((PAPERS,), LATEST // 2)}
    with gids.pyg.NeighborLoader(one_timed, [2], **given) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    other = timed(tmp_path / "other.gids", one, seed=6)
    for path, name in ((one_timed, "since"), (other, "when")):
        with gids.pyg.NeighborLoader(path, [2], **{**given, "time_attr": name}) as loader:
            with pytest.raises(ValueError, match=r"sampler = .*tables=\{'paper.when': "):
                loader.load_state_dict(state)


def test_induced_subgraphs_are_refused_on_a_device(one_path: Path) -> None:
    with pytest.raises(ValueError, match="subgraph_type='induced' is not supported with device='cuda': use"):
        gids.pyg.NeighborLoader(one_path, [2], device="cuda", subgraph_type="induced", disjoint=True)


def test_trees_do_not_depend_on_window_threads_or_packs(one_timed: Path, tmp_path: Path) -> None:
    times = torch.randint(LATEST, (PAPERS,), generator=torch.Generator().manual_seed(3))
    for given in (
        {"time_attr": "when", "input_time": times},
        {"time_attr": "since", "input_time": times, "subgraph_type": "induced"},
        {"disjoint": True, "subgraph_type": "bidirectional"},
    ):
        found = []
        for opened in (
            {},
            {"window": 0},
            {"window": 8, "threads": 3},
            {"reads": "pack", "scratch": tmp_path},
        ):
            with (
                gids.open(one_timed, memory=64 << 20, **tuned(opened)) as source,  # type: ignore[arg-type]
                gids.pyg.NeighborLoader(source, [3, 2], batch_size=100, shuffle=True, **given) as loader,
            ):
                found.append(list(loader))
        for first, *others in zip(*found, strict=True):
            for other in others:
                assert_same(other, first)
