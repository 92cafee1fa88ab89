"""gids.pyg over gids.distributed.open: the minibatches that one process gets from the whole dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from datasets import CITES
from partition_example import AUTHORS, PAPERS, Datasets
from rank_pool import RankError, RankPool

from gids.write import DatasetWriter, edge_list
from gids.write.partition import partition

SEEDS = torch.arange(0, PAPERS, 3)


@pytest.fixture(scope="module")
def data(
    rich: Datasets, rich_types: Datasets, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """Datasets of one type and of several, and one with times of edges only; each with parts for 3 ranks."""
    folder, generator = tmp_path_factory.mktemp("pyg"), torch.Generator().manual_seed(4)
    with DatasetWriter(folder / "timed.gids", page_bytes=512) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(PAPERS, 9, generator=generator))
        ends = torch.randint(PAPERS, (2, 4000), generator=generator)
        times = torch.randint(1000, (4000,), generator=generator)
        writer.write_edges(CITES, edge_list(*ends, num_src=PAPERS, num_dst=PAPERS), times=times)
    partition(folder / "timed.gids", folder / "timed.parts", 3)
    pairs = {"one": (rich.whole, rich.parts(3)), "several": (rich_types.whole, rich_types.parts(3))}
    return pairs | {"timed": (folder / "timed.gids", folder / "timed.parts")}


def compare(
    ranks: RankPool, data: dict[str, tuple[Path, Path]], name: str, kind: str, size: int = 3, **arguments: Any
) -> list[int]:
    whole, parts = data[name]
    dataset, options = parts if size == 3 else whole, {"batch_size": 20, "shuffle": True, **arguments}
    told = ranks.run(size, programs.compare, dataset, whole, f"pyg.{kind}", options, {}, 1)
    return [of_rank["steps"] for of_rank in told]


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 3])
def test_nodes_of_one_type_with_edge_features(
    data: dict[str, tuple[Path, Path]], ranks: RankPool, size: int
) -> None:
    counts = compare(ranks, data, "one", "NeighborLoader", size, num_neighbors=[4, 3], input_nodes=SEEDS)
    assert counts == [-(-len(SEEDS) // (20 * size))] * size


def test_nodes_of_several_types_in_trees(data: dict[str, tuple[Path, Path]], ranks: RankPool) -> None:
    arguments: dict[str, Any] = {"num_neighbors": [4, -1], "disjoint": True}
    compare(ranks, data, "several", "NeighborLoader", input_nodes=("paper", SEEDS), **arguments)
    seeds = ("author", torch.arange(0, AUTHORS, 2))
    compare(ranks, data, "several", "NeighborLoader", input_nodes=seeds, **arguments)


def test_links_with_negatives(data: dict[str, tuple[Path, Path]], ranks: RankPool) -> None:
    edges = torch.randint(PAPERS, (2, 90), generator=torch.Generator().manual_seed(1))
    arguments = {"num_neighbors": [3, 2], "edge_label_index": edges, "neg_sampling": "binary"}
    compare(ranks, data, "one", "LinkNeighborLoader", **arguments)


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_times(data: dict[str, tuple[Path, Path]], ranks: RankPool, strategy: str) -> None:
    times = torch.randint(1000, (len(SEEDS),), generator=torch.Generator().manual_seed(2))
    arguments = {
        "input_nodes": SEEDS,
        "input_time": times,
        "time_attr": "time",
        "temporal_strategy": strategy,
    }
    compare(ranks, data, "timed", "NeighborLoader", num_neighbors=[4, 3], **arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "error"),
    [
        ("NeighborLoader", {"subgraph_type": "induced"}, "subgraph_type='induced' does not work"),
        ("NeighborLoader", {"subgraph_type": "bidirectional"}, "subgraph_type='bidirectional' does not work"),
        ("NeighborLoader", {"weight_attr": "weight"}, "weight_attr= does not work with a partitioned"),
        ("NeighborLoader", {"time_attr": "kind"}, "time_attr='kind' does not work with a partitioned"),
        ("LinkNeighborLoader", {}, "edge_label_index= without edges does not work"),
    ],
)
def test_what_needs_all_edges_is_refused(
    data: dict[str, tuple[Path, Path]], ranks: RankPool, kind: str, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(RankError, match=error):
        compare(ranks, data, "one", kind, num_neighbors=[2], **arguments)


@pytest.mark.few(2)
@pytest.mark.parametrize("after", [2, 9, 0])
def test_a_rank_that_fails_between_layers_is_named_on_all_others(
    data: dict[str, tuple[Path, Path]], ranks: RankPool, after: int
) -> None:
    """Minibatches are sampled four at once: ranks may be at different ones when one of them fails."""
    told = ranks.run(3, programs.fail_while_sampling, data["one"][1], after)
    for rank, (_, error) in enumerate(told):
        mine = "ArithmeticError: no such number"
        assert error == (mine if rank == 1 else f"RankError: rank 1 failed with {mine}")
