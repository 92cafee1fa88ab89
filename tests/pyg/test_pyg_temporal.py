"""gids.pyg's loaders by time, and with trees, whose negatives are the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pyg_model import CITES, COUNTS, PAPERS, WRITES, WRITTEN, assert_all_same, stores
from torch_geometric.data import Data, HeteroData

import gids.pyg
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


def times_of(path: Path, count: int, table: str) -> torch.Tensor:
    return gids.FeatureStore(path).read_rows(range(count), table).view(-1)


@pytest.mark.parametrize(
    ("attr", "strategy"), [("when", "uniform"), ("since", "uniform"), ("since", "last"), ("own", "uniform")]
)
def test_neighbors_are_not_later_than_the_seed(one: Data, one_timed: Path, attr: str, strategy: str) -> None:
    """Times of nodes and of edges, from tables of any name; without input_time the seeds' own times."""
    when = times_of(one_timed, PAPERS, "paper.when")
    since = times_of(one_timed, one.num_edges, "paper.cites.paper.since")
    generator = torch.Generator().manual_seed(5)
    times = torch.randint(1000, (100,), generator=generator) if attr != "own" else when[:100]
    options: dict[str, Any] = {"time_attr": "when" if attr == "own" else attr, "temporal_strategy": strategy}
    given, found = None if attr == "own" else times, 0
    with gids.pyg.NeighborLoader(
        one_timed, [2, -1], torch.arange(100), given, batch_size=30, seed=0, **options
    ) as loader:
        for batch in loader:
            assert given is None or torch.equal(batch.seed_time, times[batch.input_id])
            tree = batch.batch[batch.edge_index[1]]
            time = since[batch.e_id] if attr == "since" else when[batch.n_id[batch.edge_index[0]]]
            assert (time <= times[batch.input_id][tree]).all()
            assert torch.equal(batch.n_id[batch.edge_index], one.edge_index[:, batch.e_id])
            found += len(tree)
    assert found > 50


@pytest.mark.parametrize("negatives", ["binary", "triplet"])
def test_neighbors_are_not_later_than_the_seed_edge(one: Data, one_timed: Path, negatives: str) -> None:
    when = times_of(one_timed, PAPERS, "paper.when")
    edges, label_times = one.edge_index[:, :90], torch.arange(90) * 7 + 200
    options: dict[str, Any] = {"time_attr": "when", "neg_sampling": negatives, "batch_size": 30, "seed": 0}
    for batch in gids.pyg.LinkNeighborLoader(one_timed, [-1], edges, None, label_times, **options):
        seed_time = batch.edge_label_time[:30] if negatives == "binary" else batch.seed_time
        assert torch.equal(seed_time, label_times[batch.input_id])
        tree = batch.batch[batch.edge_index[1]]
        assert (when[batch.n_id[batch.edge_index[0]]] <= seed_time[tree]).all()


def test_minibatches_of_a_device_are_those_of_the_cpu(one_timed: Path, device: Any, cuda_is: Any) -> None:
    cuda_is(device)
    source = gids.open(one_timed, tuning=gids.Tuning(staging=1 << 18))
    by_time = {"time_attr": "since", "temporal_strategy": "last", "input_time": torch.arange(8) * 99}
    both_ways = {"disjoint": True, "subgraph_type": "bidirectional"}
    for options in (by_time, {"weight_attr": "since"}, both_ways):
        options |= {"batch_size": 4, "shuffle": True, "seed": 0}
        on_cpu, on_device = (
            gids.pyg.NeighborLoader(source, [3, -1], torch.arange(8), device=name, **options)
            for name in ("cpu", "cuda")
        )
        assert_all_same((batch.cpu() for batch in on_device), on_cpu)


def seeds_and_negatives(
    path: Path, edges: torch.Tensor, **options: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By step: the positions of the seed edges, int64[n], and their negatives, int64[2, amount, n]."""
    found = []
    with gids.pyg.LinkNeighborLoader(path, [2], (WRITES, edges), shuffle=True, seed=4, **options) as loader:
        for batch in loader:
            seeds = batch[WRITES]
            count = len(seeds.input_id)
            pairs = seeds.edge_label_index[:, count:]
            ends = torch.stack([batch["author"].n_id[pairs[0]], batch["paper"].n_id[pairs[1]]])
            found.append((seeds.input_id, ends.view(2, -1, count)))
    return found


@pytest.mark.parametrize("attr", ["when", None])
def test_negatives_with_trees_are_the_same_on_any_number_of_ranks(
    several: HeteroData, several_timed: Path, attr: str | None
) -> None:
    """They are not later than their seed edge, which is that of their place."""
    edges, times = several[WRITES].edge_index[:, :101], torch.arange(101) * 7  # most draws are too late
    options: dict[str, Any] = {"time_attr": attr, "edge_label_time": times} if attr else {"disjoint": True}
    options["neg_sampling"] = {"mode": "binary", "amount": 3}
    alone = seeds_and_negatives(several_timed, edges, batch_size=40, **options)
    assert len(alone) == 3
    of_ranks = [
        seeds_and_negatives(several_timed, edges, batch_size=10, rank=rank, world_size=4, **options)
        for rank in range(4)
    ]
    for step, (ids, negatives) in enumerate(alone):
        assert torch.equal(torch.cat([rank[step][0] for rank in of_ranks]), ids)
        assert torch.equal(torch.cat([rank[step][1] for rank in of_ranks], 2), negatives)
    limits = times[torch.cat([ids for ids, _ in alone])]
    for end, ntype in enumerate(("author", "paper") if attr else ()):
        when = times_of(several_timed, COUNTS[ntype], f"{ntype}.when")
        drawn = torch.cat([negatives[end] for _, negatives in alone], 1)
        late = when[drawn] > limits
        assert (when[drawn][late] == when.min()).all()  # no node was early enough
        assert late.sum() < 10
        assert len(drawn.unique()) > 60


def test_negatives_that_not_every_seed_edge_has_are_in_the_tree_of_theirs(one: Data, one_path: Path) -> None:
    options: dict[str, Any] = {"edge_label_index": one.edge_index[:, :9], "disjoint": True, "batch_size": 9}
    for amount, count in ((0.5, 5), (1.5, 14)):
        negatives = {"mode": "binary", "amount": amount}
        with gids.pyg.LinkNeighborLoader(one_path, [2], neg_sampling=negatives, seed=0, **options) as loader:
            [batch] = loader
        for ends in batch.edge_label_index:
            assert torch.equal(batch.batch[ends], torch.arange(9 + count) % 9)


def test_a_state_of_other_arguments_is_refused(one: Data, one_timed: Path, tmp_path: Path) -> None:
    """Also of other times of a table, which are not the times that conversion stores."""
    options: dict[str, Any] = {"num_neighbors": [2], "time_attr": "when", "seed": 0}
    options["input_time"] = torch.full((PAPERS,), LATEST // 2)
    with gids.pyg.NeighborLoader(one_timed, **options) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    other = timed(tmp_path / "other.gids", one, seed=6)
    for path, changed, said in (
        (one_timed, {"time_attr": "since"}, r"sampler = .*tables=\{'paper.when': "),
        (other, {}, r"sampler = .*tables=\{'paper.when': "),
        (one_timed, {"replace": True}, "make the loader with the same arguments"),
    ):
        with gids.pyg.NeighborLoader(path, **options | changed) as loader:
            with pytest.raises(ValueError, match=said):
                loader.load_state_dict(state)
    with gids.pyg.LinkNeighborLoader(one_timed, [2], neg_sampling="binary", seed=0) as links:
        state = links.state_dict()
    with gids.pyg.LinkNeighborLoader(one_timed, [2], neg_sampling="triplet", seed=0) as links:
        with pytest.raises(ValueError, match="negatives=binary"):
            links.load_state_dict(state)
