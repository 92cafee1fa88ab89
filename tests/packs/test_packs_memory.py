"""memory= holds for packs: what is listed stays within it, and the process within what is listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from datasets import in_edges, same_bits
from packs_example import PAPERS, assert_all_same, cut_small, open_loader, open_source

import gids
from gids import _core
from gids.io import open_engine
from gids.loader import pack_chooser, pack_reads
from gids.packs import Superbatch, memory
from gids.packs import superbatch as superbatch_module
from gids.sampler import Minibatch
from gids.store.geometry import align_up
from gids.write import DatasetWriter

ROWS, DIM = 600_000, 128
PROGRAM = Path(__file__).with_name("memory_program.py")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """307 MB of rows of 512 bytes, with a graph of 3 million edges."""
    path = tmp_path_factory.mktemp("large") / "large.gids"
    rng = np.random.default_rng(0)
    indptr, indices = in_edges(rng.integers(0, 11, ROWS), ROWS, rng)
    values = torch.arange(ROWS * DIM, dtype=torch.int32).view(ROWS, DIM)
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", values)
        writer.write_graph(("paper", "cites", "paper"), indptr, indices, num_src=ROWS)
    return path


def run(large: Path, reads: str, memory: int, superbatch: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", PROGRAM, large, reads, memory, superbatch, *more]
    # glibc keeps freed blocks for later, unless the size above which it maps them is fixed.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_the_process_stays_within_the_memory_that_is_listed(large: Path) -> None:
    """From 1/16 of the rows' bytes on. 16 MB are for what libraries take when they are first used."""
    checksums = set()
    for share, superbatch in ((16, 6), (2, 24)):
        memory = ROWS * DIM * 4 // share
        found = run(large, "pack", memory, superbatch)
        assert found["minibatches"] == 48
        assert {choice["way"] for choice in found["choices"]} == {"pack"}
        listed = sum(found["memory"].values())
        assert listed <= memory
        assert found["most"] - found["before"] <= listed + (16 << 20)
        checksums.add(found["checksum"])
    assert len(checksums) == 1


@pytest.mark.slow
def test_the_memory_of_a_superbatch_is_free_before_the_next_one_takes_its_own(large: Path) -> None:
    memory = ROWS * DIM * 4 // 2
    found = run(large, "pack", memory, 12, "anew")
    assert [choice["minibatches"] for choice in found["choices"]] == [12, 12, 12, 12]
    used = found["most"] - found["before"]
    assert used >= memory // 2
    assert used <= sum(found["memory"].values()) + (16 << 20)


def test_a_sweep_keeps_every_disk_busy_within_an_eighth_of_the_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []

    def opening(*args: Any, depth: int, **options: Any) -> Any:
        depths.append(depth)
        return open_engine(*args, depth=depth, **options)

    monkeypatch.setattr(superbatch_module, "open_engine", opening)
    epochs, sweeps = [], []
    for disks in (1, 3, 1000):
        monkeypatch.setattr(pack_reads, "disk_count", lambda paths, disks=disks: disks)
        with open_source(path, "pack", memory=64 << 20) as source:
            loader = open_loader(source)
            epochs.append(list(loader))
            sweeps.append(loader.stats()["memory"]["sweep"])
    assert sorted(set(depths)) == [32, 96, 128]
    assert sweeps == [sweeps[0], 3 * sweeps[0], 4 * sweeps[0]]
    for epoch in epochs[1:]:
        assert_all_same(epochs[0], epoch)


@pytest.mark.parametrize("device_bytes", [None, 8 << 30])
def test_a_large_memory_is_not_listed_for_what_cannot_use_it(path: Path, device_bytes: int | None) -> None:
    tables = list(gids.FeatureStore(path).tables.values())
    plans = [
        memory.PackBudget(
            tables=tables,
            output_row_bytes={t.name: t.row_bytes for t in tables},
            bounce_bytes=0,
            sampler_bytes=0,
            waiting=0,
            memory_bytes=memory_bytes,
            device_bytes=device_bytes,
        ).share({t.name: 500 for t in tables}, 1 << 20, overlap=True)
        for memory_bytes in (64 << 20, 128 << 30)
    ]
    assert plans[0] is not None
    assert plans[1] is not None
    if device_bytes is not None:
        small = plans[0].purposes
        assert small["row lists"] + small["write buffers"] > 40 << 20
        assert plans[1].purposes["row lists"] <= 2 * 2048 * sum(t.row_count for t in tables)
    count, nbytes = plans[1].buffers(2048, plans[1].write_bytes(0))
    assert plans[1].purposes["write buffers"] == count * nbytes


@pytest.mark.parametrize("check_crc", [False, True])
def test_the_outputs_of_a_second_stream_are_listed(
    path: Path, rows: dict[str, torch.Tensor], check_crc: bool
) -> None:
    rng = np.random.default_rng(0)
    names = ["paper.text", "paper.feat"]
    with open_source(path, "pack", memory=16 << 20, check_crc=check_crc) as source:
        loader = gids.FeatureLoader(source, names)
        many = [dict.fromkeys(names, torch.arange(i, i + 100)) for i in range(10)]
        first = loader.attach(many, lambda ids: ids, count=10)
        next(first)
        ids = [torch.from_numpy(rng.integers(0, PAPERS, count)) for count in (0, 1, 3000)]
        second = loader.attach([dict.fromkeys(names, of) for of in ids], lambda ids: ids)
        for of, (_, features) in zip(ids, second, strict=True):
            for name in names:
                assert same_bits(features[name], rows[name][of])
        listed = loader.stats()["memory"]
        assert listed["second stream"] >= sum(3000 * rows[name][0].nbytes for name in names)
        assert len(list(first)) == 9


@pytest.mark.parametrize("most", [4000, 6000, 9000])
def test_the_row_lists_of_a_superbatch_take_no_more_than_planned(
    path: Path, expected: list[Minibatch], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists_bytes: list[int] = []

    def prepare(self: Superbatch, **options: Any) -> None:
        lists = [pack.lists for pack in self._packs] + list(self.layout.lists.values())
        lists_bytes.append(sum(rows.nbytes for pack in lists for rows in pack))
        before(self, **options)

    before = Superbatch.prepare
    monkeypatch.setattr(Superbatch, "prepare", prepare)
    cut_small(monkeypatch, pack_bytes=1 << 20)
    monkeypatch.setattr(memory.PackPlan, "lists_bytes", lambda *_: most)
    with open_source(path, "pack") as source:
        assert_all_same(expected, open_loader(source))
    assert len(lists_bytes) > 1
    assert max(lists_bytes) <= most


def test_outputs_of_any_sizes_stay_within_what_all_have_room_for() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        rooms = rng.integers(1, 400_000, rng.integers(1, 4)).tolist()
        planned = 2 * sum(align_up(room, 4096) for room in rooms)
        pool, taken = _core.BufferPool.create(planned), []
        for _ in range(20):
            shares = rng.choice([1.0, rng.random()]) * rng.uniform(0.7, 1, len(rooms))
            taken = [pool.take(int(room * share), room) for room, share in zip(rooms, shares, strict=True)]
        assert len(taken) == len(rooms)
        assert pool.peak_bytes <= planned


def test_without_memory_for_packs_rows_are_read_at_random(
    path: Path, expected: list[Minibatch], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a limit on the address space of the process."""
    monkeypatch.setattr(pack_chooser, "HostRows", Mock(side_effect=MemoryError("std::bad_alloc")))
    with open_source(path, "pack") as source, open_loader(source) as loader:
        assert_all_same(expected, loader)
    [warned] = [r.getMessage() for r in caplog.records if "packs cannot be used" in r.getMessage()]
    assert "ulimit -v" in warned
