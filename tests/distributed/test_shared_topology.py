"""Ranks of one machine sample from one copy of the topology in host memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import emulator
import pytest
import torch
import torch.distributed as dist
from datasets import CITES, WRITES, random_in_edges
from emulator import EmulatedDevice
from programs import check_same
from rank_pool import RankPool

import gids
from gids import cuda
from gids.sampler.device import pinned_graph
from gids.store.names import Relation
from gids.write import DatasetWriter

PAPERS, AUTHORS = 2000, 900
SEEDS = torch.arange(0, PAPERS, 100)
SEVERAL: dict[Relation, tuple[int, int]] = {CITES: (PAPERS, PAPERS), WRITES: (AUTHORS, PAPERS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compiled kernels, which the ranks would else compile each."""
    if emulator.folder is None:
        emulator.folder = tmp_path_factory.mktemp("emulator")
    EmulatedDevice().preload("sampler/neighbor.cu")
    return str(emulator.folder)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("topology") / "several.gids"
    with DatasetWriter(path) as writer:
        for number, (relation, (num_src, num_dst)) in enumerate(SEVERAL.items()):
            writer.write_graph(relation, *random_in_edges(num_src, num_dst, number), num_src=num_src)
    return path


def pages(path: Path) -> list[int]:
    """Bytes of indptr and indices of each relation in a copy, rounded up to memory pages."""
    with gids.open(path) as source:
        nbytes = [n for g in source.graphs() for n in (8 * len(g.indptr), 4 * len(g.indices))]
    return [-(-n // mmap.PAGESIZE) * mmap.PAGESIZE for n in nbytes]


@contextlib.contextmanager
def emulated(folder: str | None) -> Iterator[None]:
    """In a rank: the emulated device in place of a GPU. Its kernels are in the folder; None: a GPU."""
    if folder is None:
        yield
        return
    emulator.folder = Path(folder)
    device = EmulatedDevice()
    with patch.object(cuda, "open_device", lambda name=None: device):
        yield
    assert not device.mapped


def shared_mappings() -> list[dict[str, int]]:
    """The mappings of shared memory of this process: inode, and bytes by the kernel's name."""
    found: list[dict[str, int]] = []
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        head, *lines = entry.splitlines()
        if head.partition("memfd:")[2].startswith("gids"):
            sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", "\n".join(lines), re.MULTILINE))
            found.append({"inode": int(head.split()[4])} | {k: 1024 * int(v) for k, v in sizes.items()})
    return found


def share(folder: str | None, path: Path, refusing: int | None, own: dict[str, Any]) -> dict[str, Any]:
    """What a rank holds. Its loader is compared with one that has a copy of its own.

    own: options of this rank. refusing: the rank that may not open the memory of others.
    """
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    common: dict[str, Any] = {"seed": 0, "batch_size": 4, "shuffle": True, "tables": []}
    with contextlib.ExitStack() as stack:
        stack.enter_context(emulated(folder))
        source = stack.enter_context(gids.open(path))
        if place["rank"] == refusing:
            denied = PermissionError(13, "Permission denied")
            stack.enter_context(patch.object(pinned_graph, "open_shared", side_effect=denied))
        lines = list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("gids").addHandler(handler)
        stack.callback(logging.getLogger("gids").removeHandler, handler)
        mine = stack.enter_context(gids.NodeLoader(source, {"paper": SEEDS}, [3], **common, **own))
        memory = mine.stats()["memory"]
        dist.barrier()  # all ranks have the loader
        saw = {
            "mappings": shared_mappings(),
            "allocated": memory["topology"],
            "on the device": memory["topology on the device"],
            "log": [line for line in lines if "do not share" in line],
        }
        dist.barrier()
        alone = gids.NodeLoader(source, {"paper": SEEDS}, [3], **common, **own, **place)
        for a, b in zip(mine, stack.enter_context(alone), strict=True):
            check_same(a, b)
    gc.collect()
    return saw | {"left": shared_mappings()}


ON_HOST = {"device": "cuda", "topology_on": "host"}


@pytest.mark.parametrize("where", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ranks_have_one_copy_and_the_minibatches_of_their_own(
    request: pytest.FixtureRequest, ranks: RankPool, several: Path, where: str
) -> None:
    folder = request.getfixturevalue("gpu" if where == "cuda" else "folder")
    saw = ranks.run(
        3, share, None if where == "cuda" else folder, several, None, by_rank=[ON_HOST, ON_HOST, ON_HOST]
    )
    copy = pages(several)
    assert [s["allocated"] for s in saw] == [sum(copy), 0, 0]
    inodes = sorted(m["inode"] for m in saw[0]["mappings"])
    assert len(set(inodes)) == len(copy)
    for s in saw:
        assert sorted(m["inode"] for m in s["mappings"]) == inodes
        assert sorted(m["Size"] for m in s["mappings"]) == sorted(copy)
        assert s["left"] == []


def test_only_arrays_that_several_ranks_keep_on_the_host_are_shared(
    several: Path, ranks: RankPool, folder: str
) -> None:
    on_cuda = [{"device": "cuda", "topology_on": on} for on in ("host", "indptr", "device")]
    saw = ranks.run(4, share, folder, several, None, by_rank=[*on_cuda, {}])
    copy = pages(several)
    assert [s["allocated"] for s in saw[:3]] == [sum(copy), 0, 0]
    for s, shared in zip(saw, (copy[1::2], copy[1::2], [], []), strict=True):
        assert sorted(m["Size"] for m in s["mappings"]) == sorted(shared), "of indices"
    assert saw[0]["on the device"] == 0 < saw[1]["on the device"] < saw[2]["on the device"]


def test_a_rank_that_cannot_share_makes_all_copy(several: Path, ranks: RankPool, folder: str) -> None:
    saw = ranks.run(3, share, folder, several, 1, by_rank=[ON_HOST, ON_HOST, ON_HOST])
    for s in saw:
        assert s["mappings"] == []
        assert s["allocated"] == sum(pages(several))
    assert [len(s["log"]) for s in saw] == [2, 0, 0], "for each relation"
    assert "rank 1: [Errno 13] Permission denied" in saw[0]["log"][0]


def fail(folder: str, path: Path) -> None:
    no_memory = patch.object(pinned_graph, "share_memory", side_effect=MemoryError)  # rank 0 calls it
    error = (MemoryError, gids.RankError)[dist.get_rank()]
    with emulated(folder), gids.open(path) as source, no_memory, pytest.raises(error):
        gids.NodeLoader(source, {"paper": SEEDS}, [3], batch_size=4, seed=0, **ON_HOST)


def test_a_rank_without_memory_ends_the_making_on_all(several: Path, ranks: RankPool, folder: str) -> None:
    ranks.run(2, fail, folder, several)
