"""A small dataset with several tables, loaders of it, and what the tests of packs compare and look for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import random_in_edges, same_bits
from open_options import tuned

import gids
from gids.loader import pack_reads, pack_switch, sampled_ahead
from gids.loader.epoch_stream import EpochStream
from gids.loader.pack_switch import PackSwitch
from gids.packs import DiskRates, memory
from gids.sampler import Minibatch
from gids.write import DatasetWriter

PAPERS, AUTHORS = 4000, 700
SLOW_AT_RANDOM = DiskRates(4096, 10.0, 1e9, 1e9)


def write(path: Path) -> Path:
    """Rows of 96, 512, 24 and 8 bytes in three shards: of papers, of authors and of edges."""
    generator = torch.Generator().manual_seed(1)
    with DatasetWriter(path, stripe=3) as writer:
        for ntype, count, key, values in (
            ("paper", PAPERS, "feat", torch.randn(PAPERS, 24, generator=generator)),
            ("paper", PAPERS, "text", torch.randn(PAPERS, 256, generator=generator).to(torch.float16)),
            ("author", AUTHORS, "feat", torch.randn(AUTHORS, 12, generator=generator).to(torch.bfloat16)),
        ):
            assert len(values) == count
            writer.write_table("node", ntype, key, values)
        edges = random_in_edges(AUTHORS, PAPERS, PAPERS)
        years = torch.arange(len(edges[1])).view(-1, 1)
        writer.write_table("edge", ("author", "writes", "paper"), "year", years)
        writer.write_labels("paper", torch.randint(0, 9, (PAPERS,), generator=generator))
        for relation, num_src, num_dst in (
            (("paper", "cites", "paper"), PAPERS, PAPERS),
            (("author", "writes", "paper"), AUTHORS, PAPERS),
            (("paper", "written by", "author"), PAPERS, AUTHORS),
        ):
            writer.write_graph(relation, *random_in_edges(num_src, num_dst, num_dst), num_src=num_src)
    return path


def open_source(path: Path, reads: str, memory: int | None = 16 << 20, **options: Any) -> gids.Source:
    return gids.open(path, reads=reads, memory=memory, window=4, **tuned(options, queue_depth=16))  # type: ignore[arg-type]


def open_loader(source: gids.Source, *, every: int = 3, **options: Any) -> gids.NodeLoader:
    """A loader whose seeds are every third paper: 21 minibatches an epoch."""
    options = {"batch_size": 64, "shuffle": True, "seed": 3, **options}
    return gids.NodeLoader(
        source,
        {"paper": torch.arange(0, PAPERS, every)},
        [4, 4],
        tables=list(source.store.tables),
        **{"seed": 0} | options,
    )


def assert_same(a: Minibatch, b: Minibatch) -> None:
    for one, other in zip(a.tensors(), b.tensors(), strict=True):
        assert same_bits(one, other)
    assert a.features.keys() == b.features.keys()
    for name in a.features:
        assert same_bits(a.features[name], b.features[name]), name


def assert_all_same(expected: Iterable[Minibatch], found: Iterable[Minibatch]) -> None:
    for a, b in zip(expected, found, strict=True):
        assert_same(a, b)


def scratch_files(path: Path) -> list[str]:
    """Unnamed files beside a dataset that this process has open."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(str(path)) and target.endswith("(deleted)"):
            found.append(target)
    return found


def background_threads() -> list[str]:
    """Threads of this process that sweep, write packs, or read sampled minibatches."""
    found = [
        t.name for t in threading.enumerate() if t.name.startswith(("gids-spool", "gids-count", "gids-cut"))
    ]
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name.startswith(("gids-sweep", "gids-write")):
            found.append(name)
    return found


def wait_until_all_has_ended(scratch: Path, limit_s: float = 10) -> None:
    """Of what packs do in the background, and the scratch files in this directory."""
    end = time.monotonic() + limit_s
    while (left := [*background_threads(), *scratch_files(scratch)]) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left, left


def take_over_at(monkeypatch: pytest.MonkeyPatch, minibatch: int) -> None:
    """Make packs take over at this minibatch of an epoch that begins with random reads."""

    def are_so_many(self: PackSwitch[Any], stream: EpochStream[Any], waits: list[float]) -> bool:
        return len(waits) >= minibatch and not stream.sampled_all

    monkeypatch.setattr(PackSwitch, "_waits_long", are_so_many)


def consider_packs(
    monkeypatch: pytest.MonkeyPatch, rates: DiskRates, early: int, least_wait_s: float = 1e-6
) -> None:
    """With tables of any size, for disks of these rates, after so many minibatches that wait so long."""
    monkeypatch.setattr(gids.FeatureLoader, "may_use_packs", lambda self, *_: self._options.reads == "auto")
    monkeypatch.setattr(pack_reads, "measure_rates", lambda *_, **__: rates)
    monkeypatch.setattr(pack_switch, "LEAST_WAIT_S", least_wait_s)
    monkeypatch.setattr(pack_switch, "EARLY", early)


def cut_small(
    monkeypatch: pytest.MonkeyPatch,
    *,
    minibatches: int | None = None,
    pack_bytes: int | None = None,
    packs: int | None = None,
) -> None:
    """Limit the minibatches of a superbatch, the memory for the resident rows and two packs, the packs of a
    sweep."""
    if minibatches is not None:
        monkeypatch.setattr(pack_switch, "EARLY", min(minibatches, 2))
        monkeypatch.setattr(sampled_ahead, "MOST_MINIBATCHES", minibatches)
    share = memory.PackBudget.share

    def less(*args: Any) -> memory.PackPlan | None:
        plan = share(*args)
        purposes = dict(plan.purposes)
        if pack_bytes is not None:
            assert purposes["packs"] > pack_bytes
            purposes["packs"] = pack_bytes
        return replace(plan, purposes=purposes)

    monkeypatch.setattr(memory.PackBudget, "share", less)
    if packs is not None:
        monkeypatch.setattr(memory.PackPlan, "most_packs", lambda *_: packs)
