"""Loaders of gids.open() find the ranks by themselves, and divide the seeds of each step among them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_pool import RankPool

import gids

SEEDS = torch.arange(0, 611, 3)
OPTIONS: dict[str, Any] = {"batch_size": 20, "shuffle": True, "tables": []}


def share_seeds(dataset: Path) -> dict[str, Any]:
    """What each step gives this rank. "drawn": the random seeds of the loaders."""
    from gids import pyg

    torch.manual_seed(dist.get_rank())

    def steps(loader: Any, look: Callable[[Any], Any]) -> list[Any]:
        found = []
        with loader:
            for minibatch in loader:
                found.append(look(minibatch))
                dist.all_reduce(torch.zeros(1))  # as gradients: unequal steps would hang
        return found

    if dist.get_rank() == 0:  # the others make none
        with gids.NodeLoader(dataset, SEEDS, [3, 4], rank=0, world_size=1, **OPTIONS) as alone:
            assert sum(len(minibatch.seeds) for minibatch in alone) == len(SEEDS)
    edges = gids.EdgeLoader(dataset, torch.stack([SEEDS, SEEDS]), [3, 4], **OPTIONS)
    of_pyg = pyg.NeighborLoader(dataset, [4, 3], SEEDS, **OPTIONS)
    nodes = gids.NodeLoader(dataset, SEEDS, [3, 4], **OPTIONS)
    return {
        "drawn": [loader.state_dict()["made_with"]["seed"] for loader in (nodes, edges, of_pyg)],
        "nodes": steps(nodes, lambda m: m.seeds.tolist()),
        "pairs": steps(edges, lambda m: m.seeds[m.pairs].tolist()),
        "pyg": steps(of_pyg, lambda data: (data.input_id, data.n_id[: data.batch_size])),
    }


def test_ranks_have_different_seeds_in_as_many_steps(cited: Path, ranks: RankPool) -> None:
    """With the random seed that rank 0 drew, whatever the others drew."""
    saw = ranks.run(2, share_seeds, cited)
    assert saw[0]["drawn"] == saw[1]["drawn"]
    assert len(set(saw[0]["drawn"])) == 3
    seed = saw[0].pop("drawn")[0]
    with gids.NodeLoader(cited, SEEDS, [3, 4], **OPTIONS | {"batch_size": 40, "seed": seed}) as alone:
        expected = [minibatch.seeds.tolist() for minibatch in alone]
    by_step = {kind: list(zip(*(of_rank[kind] for of_rank in saw), strict=True)) for kind in saw[0]}
    assert [[*first, *second] for first, second in by_step["nodes"]] == expected
    assert all(map(all, by_step["nodes"]))
    positive = []
    for pairs in by_step["pairs"]:
        halves = [len(destinations) // 2 for _, destinations in pairs]
        negatives = [of_rank[1][half:] for of_rank, half in zip(pairs, halves, strict=True)]
        assert negatives[0] != negatives[1]
        for (sources, _), half in zip(pairs, halves, strict=True):
            positive += sources[:half]
    assert sorted(positive) == SEEDS.tolist()
    of_pyg = [of_rank for of_ranks in by_step["pyg"] for of_rank in of_ranks]
    assert all(torch.equal(SEEDS[input_id], nodes) for input_id, nodes in of_pyg)
    assert torch.equal(torch.cat([nodes for _, nodes in of_pyg]).sort().values, SEEDS)
