"""Loaders of partitioned datasets: each rank has a part, and gets what the whole dataset gives it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import CITES
from partition_example import PAPERS, Datasets
from programs import compare, error_of
from rank_pool import RankError, RankPool

import gids.distributed
from gids.sampler import LocalityBias, Minibatch, Neighbor
from gids.write import DatasetWriter, edge_list
from gids.write.partition import partition

SEEDS = torch.arange(0, PAPERS, 3)
LOADERS: dict[str, dict[str, Any]] = {
    "NodeLoader": {"seeds": SEEDS, "sampler": [3, 4]},
    "pyg.NeighborLoader": {"num_neighbors": [3, 4], "input_nodes": SEEDS},
    "pyg.LinkNeighborLoader": {"num_neighbors": [3, 4]},
}


def test_owners_draw_by_the_masks_of_the_rank_that_asks_and_exchange_in_columns(
    rich: Datasets, ranks: RankPool
) -> None:
    masks = [torch.arange(PAPERS) % 4 == rank for rank in range(4)]
    sampler = Neighbor([3, 4], locality=LocalityBias(masks, 6))
    arguments, options = LOADERS["NodeLoader"] | {"sampler": sampler}, {"replicas": 2, "bulk": 3}
    steps = ranks.run(4, compare, rich.parts(2), rich.whole, "NodeLoader", arguments, options)
    assert steps == [-(-len(SEEDS) // 80)] * 4


def test_times(rich: Datasets, ranks: RankPool) -> None:
    arguments = LOADERS["NodeLoader"] | {"time": torch.arange(len(SEEDS)) << 32}
    ranks.run(3, compare, rich.parts(3), rich.whole, "NodeLoader", arguments, {})


def test_times_of_pyg(ranks: RankPool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    with DatasetWriter(tmp_path / "timed.gids", page_bytes=512) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(PAPERS, 9, generator=generator))
        ends = torch.randint(PAPERS, (2, 4000), generator=generator)
        times = torch.randint(1000, (4000,), generator=generator)
        writer.write_edges(CITES, edge_list(*ends, num_src=PAPERS, num_dst=PAPERS), times=times)
    partition(tmp_path / "timed.gids", tmp_path / "parts", 3)
    given = {"input_time": torch.randint(1000, (len(SEEDS),), generator=generator), "time_attr": "time"}
    arguments = LOADERS["pyg.NeighborLoader"] | given | {"temporal_strategy": "last"}
    paths = tmp_path / "parts", tmp_path / "timed.gids"
    ranks.run(3, compare, *paths, "pyg.NeighborLoader", arguments, {})


class Marking(Neighbor):
    """A user's sampler, with work of its own in sample()."""

    @functools.wraps(Neighbor.sample)
    def sample(self, *args: Any, **numbers: Any) -> Minibatch:
        sampled = super().sample(*args, **numbers)
        sampled.marked = True  # type: ignore[attr-defined]
        return sampled


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("NodeLoader", {"sampler": Marking([3])}, "a sampler of gids.sampler, without a sample() of your own"),
    ("NodeLoader", {"sampler": Marking([3]), "cooperative": True}, "without a sample() of your own"),
    ("NodeLoader", {"sampler": Neighbor([3], subgraph="induced")}, "cannot sample from a partitioned"),
    ("NodeLoader", {"device": "cuda"}, "a partitioned dataset is sampled on the CPU"),
    ("pyg.NeighborLoader", {"subgraph_type": "induced"}, "subgraph_type='induced' does not work"),
    ("pyg.NeighborLoader", {"weight_attr": "weight"}, "weight_attr= does not work with a partitioned"),
    ("pyg.NeighborLoader", {"time_attr": "kind"}, "time_attr='kind' does not work with a partitioned"),
    ("pyg.LinkNeighborLoader", {}, "edge_label_index= without edges does not work"),
]


def refuse(dataset: Path, cases: list[tuple[str, dict[str, Any], str]]) -> list[str]:
    """The error of each case."""
    from gids import pyg

    makers = {"NodeLoader": gids.NodeLoader, "pyg.NeighborLoader": pyg.NeighborLoader}
    makers["pyg.LinkNeighborLoader"] = pyg.LinkNeighborLoader
    with gids.distributed.open(dataset, memory="64MB") as source:

        def load(kind: str, given: dict[str, Any]) -> None:
            with makers[kind](source, seed=0, **LOADERS[kind] | given) as loader:
                list(loader)

        return [error_of(functools.partial(load, kind, given)) for kind, given, _ in cases]


def test_what_needs_all_edges_is_refused(rich: Datasets, ranks: RankPool) -> None:
    for errors in ranks.run(2, refuse, rich.parts(2), REFUSED):
        for error, (_, _, said) in zip(errors, REFUSED, strict=True):
            assert said in error


def test_a_missing_part_is_an_error_on_every_rank(rich: Datasets, ranks: RankPool, tmp_path: Path) -> None:
    for part in sorted(rich.parts(3).iterdir())[:2]:
        (tmp_path / part.name).symlink_to(part)
    arguments = LOADERS["NodeLoader"]
    with pytest.raises(RankError) as told:
        ranks.run(3, compare, tmp_path, rich.whole, "NodeLoader", arguments, {})
    assert str(told.value).count("RankError: rank 2 failed with FileNotFoundError") == 2
    with pytest.raises(RankError, match="has 3 parts, for 2 ranks"):
        ranks.run(2, compare, rich.parts(3), rich.whole, "NodeLoader", arguments, {})


class Failing:
    """Samples by another sampler. Rank 1 fails after some minibatches."""

    repeatable = False

    def __init__(self, sampler: Any, after: int) -> None:
        self.sampler, self.after, self.calls = sampler, after, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def sample(self, *args: Any, **numbers: Any) -> Minibatch:
        sampled: Minibatch = self.sampler.sample(*args, **numbers)
        self.calls += 1
        if dist.get_rank() == 1 and self.calls > self.after:
            raise ArithmeticError("no such number")
        return sampled


def fail_while_sampling(dataset: Path) -> str:
    """Rank 1 fails while it samples."""
    from gids import pyg

    given: dict[str, Any] = {"input_nodes": torch.arange(120), "batch_size": 4, "seed": 0}
    with gids.distributed.open(dataset, memory="64MB") as shared:
        with pyg.NeighborLoader(shared, [3, 2], **given) as loader:
            loader.sampler = Failing(loader.sampler, after=9)
            return error_of(lambda: list(loader))


def test_a_rank_that_fails_between_layers_is_named_on_all_others(rich: Datasets, ranks: RankPool) -> None:
    """Minibatches are sampled four at once: ranks may be at different ones when one of them fails."""
    mine = "ArithmeticError: no such number"
    failed = f"RankError: rank 1 failed with {mine}"
    assert ranks.run(3, fail_while_sampling, rich.parts(3)) == [failed, mine, failed]
