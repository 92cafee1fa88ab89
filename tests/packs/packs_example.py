"""A small dataset with several tables, loaders of it, and what the tests of packs compare and look for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import random_in_edges, same_bits
from open_options import tuned

import gids
from gids.sampler import Minibatch
from gids.write import DatasetWriter

PAPERS, AUTHORS = 4000, 700


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
