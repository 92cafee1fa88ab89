"""Ranks of one machine sample from one copy of the topology in host memory."""

from __future__ import annotations

import mmap
import signal
from pathlib import Path
from typing import Any

import emulator
import pytest
import topology_programs
import torch
from datasets import random_in_edges
from emulator import EmulatedDevice
from processes import Processes
from rank_pool import RankPool

import gids
from gids.store.names import Relation
from gids.write import DatasetWriter

PAPERS, AUTHORS = 6000, 2500
CITES: Relation = ("paper", "cites", "paper")
WRITES: Relation = ("author", "writes", "paper")
PAPER_SEEDS = torch.arange(0, PAPERS, 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compiled kernels, which the ranks would else compile each."""
    if emulator.folder is None:
        emulator.folder = tmp_path_factory.mktemp("emulator")
    EmulatedDevice().preload("sampler/neighbor.cu")
    return str(emulator.folder)


def write(path: Path, relations: dict[Relation, tuple[int, int]]) -> Path:
    with DatasetWriter(path) as writer:
        for number, (relation, (num_src, num_dst)) in enumerate(relations.items()):
            writer.write_graph(relation, *random_in_edges(num_src, num_dst, number), num_src=num_src)
    return path


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("topology") / "one.gids", {CITES: (PAPERS, PAPERS)})


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    relations = {CITES: (PAPERS, PAPERS), WRITES: (AUTHORS, PAPERS)}
    return write(tmp_path_factory.mktemp("topology") / "several.gids", relations)


def pages(path: Path) -> list[int]:
    """Bytes of indptr and indices of each relation in a copy, rounded up to memory pages."""
    with gids.open(path) as source:
        nbytes = [n for g in source.graphs() for n in (8 * len(g.indptr), 4 * len(g.indices))]
    return [-(-n // mmap.PAGESIZE) * mmap.PAGESIZE for n in nbytes]


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("size", "opened_by"), [(2, "open"), (3, "distributed"), (3, "open")])
@pytest.mark.parametrize("dataset", ["one", "several"])
def test_ranks_have_one_copy_and_the_minibatches_of_their_own(
    request: pytest.FixtureRequest, ranks: RankPool, dataset: str, size: int, opened_by: str, where: str
) -> None:
    if where == "cuda":
        request.getfixturevalue("gpu")
    folder = None if where == "cuda" else request.getfixturevalue("folder")
    path: Path = request.getfixturevalue(dataset)
    seeds = PAPER_SEEDS if dataset == "one" else {"paper": PAPER_SEEDS}
    options = {"device": "cuda", "topology_on": "host"}
    saw = ranks.run(
        size, topology_programs.share, folder, path, seeds, opened_by, options, by_rank=[{}] * size
    )
    copy = pages(path)
    assert [s["alone"] for s in saw] == [sum(copy)] * size
    assert [s["allocated"] for s in saw] == [sum(copy)] + [0] * (size - 1)
    assert [s["borrowed"] for s in saw] == [0] + [sum(copy)] * (size - 1)
    assert f"0 bytes of host memory and {copy[0] + copy[1]} of another rank" in saw[1]["repr"]
    assert all(all(s["over bus"]) for s in saw)
    inodes = [m["inode"] for m in saw[0]["mappings"]]
    assert len(set(inodes)) == len(copy)
    for s in saw:
        assert sorted(m["inode"] for m in s["mappings"]) == sorted(inodes)
        assert sorted(m["Size"] for m in s["mappings"]) == sorted(copy)
        assert s["left"] == []
    for inode in inodes:
        of_ranks = [m for s in saw for m in s["mappings"] if m["inode"] == inode]
        assert sum(m["Pss"] for m in of_ranks) <= of_ranks[0]["Size"] < sum(m["Rss"] for m in of_ranks)


def test_only_arrays_that_several_ranks_keep_on_the_host_are_shared(
    one: Path, ranks: RankPool, folder: str
) -> None:
    given = [{"topology_on": on} for on in ("host", "indptr", "device")]
    saw = ranks.run(
        3, topology_programs.share, folder, one, PAPER_SEEDS, "open", {"device": "cuda"}, by_rank=given
    )
    indptr, indices = pages(one)
    assert [s["allocated"] for s in saw] == [indptr + indices, 0, 0]
    assert [s["borrowed"] for s in saw] == [0, indices, 0]
    assert [len(s["mappings"]) for s in saw] == [1, 1, 0]
    assert [s["over bus"] for s in saw] == [[True], [True], [False]]
    assert saw[0]["on the device"] == 0 < saw[1]["on the device"] < saw[2]["on the device"]


def test_ranks_on_the_cpu_take_no_part(one: Path, ranks: RankPool, folder: str) -> None:
    cuda = {"device": "cuda", "topology_on": "host"}
    for devices, mappings in (([{}, cuda, cuda], [0, 2, 2]), ([cuda, {}, {}], [0, 0, 0])):
        saw = ranks.run(3, topology_programs.share, folder, one, PAPER_SEEDS, "open", {}, by_rank=devices)
        assert [len(s["mappings"]) for s in saw] == mappings


def test_a_rank_that_cannot_share_makes_all_copy(one: Path, ranks: RankPool, folder: str) -> None:
    saw = ranks.run(3, topology_programs.refuse, folder, one, PAPER_SEEDS, 1)
    for s in saw:
        assert s["mappings"] == []
        assert (s["allocated"], s["borrowed"]) == (sum(pages(one)), 0)
    assert [len(s["log"]) for s in saw] == [1, 0, 0]
    assert "do not share the topology of" in saw[0]["log"][0]
    assert "rank 1: [Errno 13] Permission denied" in saw[0]["log"][0]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_ends_the_making_of_the_loader_on_all(
    one: Path, ranks: RankPool, folder: str, failing: int
) -> None:
    for rank, (kind, message) in enumerate(
        ranks.run(2, topology_programs.fail, folder, one, PAPER_SEEDS, failing)
    ):
        assert kind == ("MemoryError" if rank == failing else "RankError")
        assert ("no memory to convert" if rank == failing else "an exchange with the other ranks") in message


def mapped_anywhere(inodes: list[int]) -> list[str]:
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it ended
            continue
        found += [at for at in lines if "memfd:gids" in at and int(at.split()[4]) in inodes]
    return found


@pytest.mark.slow
def test_the_memory_outlives_the_rank_that_made_it_and_no_rank_leaves_anything(
    one: Path, folder: str, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    with Processes(2, topology_programs.live_on, folder, one, PAPER_SEEDS, killed) as processes:
        inodes: list[Any] = [processes.told(rank) for rank in processes.ranks]
        assert inodes[0] == inodes[1]
        assert len(inodes[0]) == 2
        processes.signal(0, signal.SIGKILL)
        assert processes.has_ended(0)
        killed.touch()
        outcome = processes.outcome(1)
        assert outcome.error is None, outcome
        assert outcome.value == -(-len(PAPER_SEEDS) // 40)
    assert mapped_anywhere(inodes[0]) == []
