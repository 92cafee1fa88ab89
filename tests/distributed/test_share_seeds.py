"""Loaders of gids.open() find the ranks by themselves, and divide the seeds of each step among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from programs import share_seeds
from rank_pool import RankPool

import gids

SEEDS = torch.arange(0, 611, 3)
OPTIONS: dict[str, Any] = {"batch_size": 20, "shuffle": True, "tables": []}


def test_ranks_have_different_seeds_in_as_many_steps(cited: Path, ranks: RankPool) -> None:
    """With the random seed that rank 0 drew, whatever the others drew."""
    saw = ranks.run(2, share_seeds, cited, SEEDS, OPTIONS)
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
