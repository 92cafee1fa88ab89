"""Mapped files that cannot be read: StorageError where gids reads them, and the process lives."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Fork

import gids
from gids import _core
from gids.errors import StorageError
from gids.heat import reverse_pagerank
from gids.sampler import Labor, Ladies, Neighbor, RandomWalk, TimedSeeds, Topology
from gids.store import FeatureStore
from gids.write import DatasetWriter, edge_list

NODES, EDGES, KEPT = 3000, 30_000, 4096
"""KEPT: bytes of a file that are left."""


def check(path: Path, read: Callable[[], torch.Tensor]) -> None:
    """Reads the whole file, a file that ends early, and the whole file again."""
    whole, before, status = path.read_bytes(), read(), path.stat()
    os.truncate(path, KEPT)
    with pytest.raises(StorageError) as caught:
        read()
    assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(path))
    assert caught.value.offset is None or caught.value.offset >= KEPT
    path.write_bytes(whole)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert torch.equal(read(), before)


def read_all(folder: Path) -> None:
    rng = np.random.default_rng(0)
    edges = edge_list(*rng.integers(0, NODES, (2, EDGES)), num_src=NODES, num_dst=NODES)
    with DatasetWriter(folder / "a.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.randn(NODES, 4))
        writer.write_edges(("_N", "_E", "_N"), edges, times=rng.integers(0, 100, EDGES))
    store = FeatureStore(folder / "a.gids")
    graph = store.graph()
    arrays: list[Any] = [graph.indptr, graph.indices, graph.edge_times]
    indptr, indices, times = (Path(array.filename) for array in arrays)
    topology, seeds = Topology(graph), torch.arange(1200, 1264)

    def sample(sampler: Any, seeds: Any = seeds) -> Callable[[], torch.Tensor]:
        return lambda: sampler.sample(topology, seeds, seed=0).input_nodes

    for path in (indptr, indices):
        for sampler in (
            *(Neighbor([5, 5], threads=threads) for threads in (1, 2)),
            Neighbor([5, 5], subgraph="induced"),
            Labor([5, 5], importance_sampling=-1),
            Ladies([200, 200]),
            RandomWalk([5, 5], num_walks=4, walk_length=3),
        ):
            check(path, sample(sampler))
    check(times, sample(Neighbor([5, 5], temporal="edges"), TimedSeeds(seeds, torch.full((64,), 50))))
    check(indices, lambda: torch.from_numpy(reverse_pagerank(store, {"_N": np.arange(9)})["_N"]))
    check(indices, lambda: torch.from_numpy(graph.indices[::7].astype(np.int64)))
    with gids.open(store, memory="16MB", threads=2) as source:
        loader = gids.NodeLoader(source, torch.arange(2400, NODES), [2], batch_size=30, seed=0)

        def first_epoch() -> torch.Tensor:
            loader.epoch = 0
            with closing(iter(loader)) as epoch:
                return torch.cat([minibatch.input_nodes for minibatch in epoch])

        check(indices, first_epoch)


@pytest.mark.slow
def test_readers_of_a_file_that_ends_early_raise_storage_error(tmp_path: Path) -> None:
    """The same as before once the file is whole again. A read that nothing guards ends the process."""
    done = Fork(tmp_path / "fork", read_all, tmp_path, modules=("gids.convert", "forks")).done()
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_error_names_a_path_of_any_bytes(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"\xff")
    file.write_bytes(bytes(8192))
    with open(file, "r+b") as opened:
        mapped, _ = _core.map_file(opened.fileno(), 8192, os.fspath(file))
        opened.truncate(0)
        with pytest.raises(StorageError) as caught, _core.MapGuard():
            bytes(mapped)
    assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(file))


FOREIGN = """
import faulthandler, mmap, os, signal, sys, tempfile
from gids import _core  # it sets its handler when it first maps a file

def run(order, how):
    if order == "before":
        faulthandler.enable()
    own, foreign = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    for file in own, foreign:
        file.truncate(8192)
    mapped, _ = _core.map_file(own.fileno(), 8192, "own")
    if order == "after":
        faulthandler.enable()
    foreign_map = mmap.mmap(foreign.fileno(), 8192, prot=mmap.PROT_READ)
    for file in own, foreign:
        file.truncate(0)
    try:
        with _core.MapGuard():
            bytes(mapped)
    except OSError as error:
        print(error.errno, flush=True)
    if how == "guarded":
        with _core.MapGuard():
            foreign_map[0]
    elif how == "no guard":
        bytes(mapped)
    else:
        os.kill(os.getpid(), signal.SIGBUS)
    print("lives", flush=True)

for case in sys.argv[1:]:
    if not (child := os.fork()):
        for number in (1, 2):
            os.dup2(os.open(f"{case} {number}", os.O_WRONLY | os.O_CREAT), number)
        run(*case.split(", "))
        os._exit(0)
    print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


def test_other_bus_errors_go_to_the_handler_before(tmp_path: Path) -> None:
    """faulthandler prints once and the process ends, whether it was enabled before gids or after it."""
    cases = ["before, guarded", "before, sent", "after, guarded", "after, no guard", "never, guarded"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", FOREIGN, *cases], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(int(signal.SIGBUS))] * len(cases), done.stderr
    for case in cases:
        printed, errors = [(tmp_path / f"{case} {number}").read_text() for number in (1, 2)]
        assert printed == "61\n", case  # ENODATA, and nothing after it
        assert errors.count("Fatal Python error: Bus error") == (not case.startswith("never")), case
