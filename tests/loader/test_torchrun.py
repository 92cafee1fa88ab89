"""Loaders find out by themselves that torchrun started several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_program import BATCH_SIZE, RELATION

import gids
from gids.write import DatasetWriter

pytestmark = pytest.mark.slow

NODES, RANKS = 700, 2
PROGRAM = Path(__file__).with_name("rank_program.py")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torchrun") / "one.gids"
    rng = np.random.default_rng(0)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 9, NODES))])
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.zeros(NODES, 4))
        writer.write_graph(RELATION, indptr, rng.integers(0, NODES, indptr[-1]), num_src=NODES)
    return path


@pytest.fixture(scope="module")
def ranks(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(PROGRAM), str(dataset), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def joined(parts: tuple[Any, ...]) -> list[Any]:
    return [item for part in parts for item in part]


def open_loader(dataset: Path, world_size: int) -> gids.NodeLoader:
    """What one process would make."""
    seeds = torch.arange(0, 611, 3)
    return gids.NodeLoader(
        dataset, seeds, [3, 4], batch_size=BATCH_SIZE * world_size, shuffle=True, tables=[]
    )


def test_ranks_have_different_seeds_in_as_many_steps(ranks: Any, dataset: Path) -> None:
    with open_loader(dataset, len(ranks)) as loader:
        expected = [m.seeds.tolist() for _ in range(2) for m in loader]  # type: ignore[union-attr]
    of_steps = zip(*(saw["nodes"] for saw in ranks), strict=True)
    assert [joined(parts) for parts in of_steps] == expected
    assert all(part for saw in ranks for part in saw["nodes"])


def test_ranks_resume_where_they_were(ranks: Any, dataset: Path) -> None:
    for saw in ranks:
        assert saw["state"] == ranks[0]["state"]
        assert saw["resumed"] == saw["nodes"][3:]
    with open_loader(dataset, len(ranks)) as loader:
        loader.load_state_dict(ranks[0]["state"])
        expected = [m.seeds.tolist() for _ in range(2) for m in loader]  # type: ignore[union-attr]
    assert [joined(parts) for parts in zip(*(saw["resumed"] for saw in ranks), strict=True)] == expected


def test_ranks_have_different_edges_and_negatives(ranks: Any) -> None:
    positive: list[int] = []
    for parts in zip(*(saw["pairs"] for saw in ranks), strict=True):
        destinations = [pairs[1][len(pairs[1]) // 2 :] for pairs in parts]
        assert all(destinations[0] != other for other in destinations[1:])
        positive += joined(tuple(pairs[0][: len(pairs[0]) // 2] for pairs in parts))
    assert sorted(positive) == list(range(211))


def test_pyg_minibatches_are_shared_and_name_their_seeds(ranks: Any) -> None:
    seeds = torch.arange(0, 611, 3)
    seen: list[int] = []
    for parts in zip(*(saw["pyg"] for saw in ranks), strict=True):
        for input_id, nodes in parts:
            assert seeds[input_id].tolist() == nodes
            seen += nodes
    assert sorted(seen) == seeds.tolist()


def test_sharing_is_turned_off_by_rank_0_of_1(ranks: Any) -> None:
    assert [saw["unshared"] for saw in ranks] == [11] * len(ranks)
    assert [saw["alone"] for saw in ranks if "alone" in saw] == [204]


def test_memory_is_divided_among_the_ranks(ranks: Any) -> None:
    assert [saw["local_ranks"] for saw in ranks] == [len(ranks)] * len(ranks)


def test_different_arguments_are_refused(ranks: Any) -> None:
    for saw in ranks:
        assert saw["split by hand"].startswith("rank 0 made this loader with seeds = '")
        assert "Give every rank the same arguments and all seeds" in saw["split by hand"]
        assert saw["other seed"].startswith("rank 0 made this loader with seed = 0, and rank 1 with 1.")
