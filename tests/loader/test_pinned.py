"""pin_memory=True: the same minibatches, in pinned memory. Torch's allocator is replaced, but for the GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import random_in_edges, same_bits
from host_allocator import HostAllocator
from loader_example import check, ids_of, minibatches

import gids
import gids.distributed
from gids.cuda import Device
from gids.sampler import Minibatch
from gids.write import DatasetWriter

PAPERS = 1500
MIB = 1 << 20


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pinned") / "papers.gids"
    generator = torch.Generator().manual_seed(1)
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(PAPERS, 192, generator=generator))
        writer.write_table("node", "paper", "new", torch.rand(PAPERS, 5, generator=generator) < 0.5)
        writer.write_labels("paper", torch.randint(0, 9, (PAPERS,), generator=generator))
        writer.write_graph(("paper", "cites", "paper"), *random_in_edges(PAPERS, PAPERS, 1), num_src=PAPERS)
    return path


def all_tensors(minibatch: Minibatch) -> Iterator[torch.Tensor]:
    yield from minibatch.tensors()
    yield from minibatch.features.values()


def nodes(source: Any, **options: Any) -> gids.NodeLoader:
    seeds = torch.arange(0, PAPERS, 2)
    return gids.NodeLoader(source, seeds, [4, 4], batch_size=100, shuffle=True, seed=3, **options)


def opened(path: Path, reads: Any = "random") -> gids.Source:
    return gids.open(path, memory=8 * MIB, window=4, reads=reads)


@pytest.mark.parametrize("reads", ["random", "pack"])
def test_all_tensors_are_pinned_and_features_are_gathered_into_pinned_memory(
    papers: Path, pinning: HostAllocator, reads: str
) -> None:
    expected = list(nodes(opened(papers)))
    loader = nodes(opened(papers, reads), pin_memory=True)
    pinning.sizes.clear()
    for a, b in zip(expected, loader, strict=True):
        assert sum(pinning.copied) == b.nbytes
        pinning.copied.clear()
        assert all(map(pinning.is_pinned, all_tensors(b)))
        for one, other in zip(all_tensors(a), all_tensors(b), strict=True):
            assert same_bits(one, other)
    assert len(pinning.sizes) == 2 * len(expected)
    stats = loader.stats()
    if reads == "random":  # torch takes a power of two for each table, and keeps it
        taken = sum(1 << (max(pinning.sizes[i::2]) - 1).bit_length() for i in range(2))
        assert stats["memory"]["outputs"] >= 3 * taken  # one in use and two that are planned
    assert stats["packs"]["minibatches"] == (len(expected) if reads == "pack" else 0)
    assert sum(n for name, n in stats["memory"].items() if name != "labels") <= 8 * MIB
    loader.close()


def test_the_features_of_a_feature_loader_are_pinned(
    path: Path, source: dict[str, torch.Tensor], pinning: HostAllocator
) -> None:
    loader = gids.FeatureLoader(
        gids.open(path, memory=16 * MIB), list(source), dtype=torch.float16, pin_memory=True
    )
    for minibatch, features in loader.attach(minibatches(4), ids_of):
        check(source, minibatch, features, torch.float16)
        assert all(map(pinning.is_pinned, features.values()))
    assert not pinning.copied
    loader.close()


def test_the_host_is_at_most_a_minibatch_ahead_of_the_gpu(papers: Path, pinning: HostAllocator) -> None:
    """Before a minibatch is read, the work on the one before the last is done, and its memory is free."""
    loader = nodes(opened(papers), pin_memory=True)
    for count, _ in enumerate(loader, 1):
        assert len(pinning.recorded) == count
        assert pinning.awaited == pinning.recorded[:-1]
    loader.close()


def test_loaders_that_pin_and_loaders_that_do_not_have_caches_of_their_own(
    papers: Path, pinning: HostAllocator
) -> None:
    with opened(papers) as source:
        pinned, not_pinned = (nodes(source, pin_memory=pin) for pin in (True, False))
        for _ in range(2):
            for loader in (pinned, not_pinned):
                minibatch = next(iter(loader))
                assert pinning.is_pinned(minibatch.features["paper.feat"]) is (loader is pinned)


@pytest.mark.parametrize("cooperative", [False, True])
def test_rows_that_ranks_read_together_are_pinned(
    papers: Path, pinning: HostAllocator, cooperative: bool
) -> None:
    expected = list(nodes(opened(papers)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with gids.distributed.open(papers, memory=8 * MIB, window=4) as source:
            with nodes(source, pin_memory=True, cooperative=cooperative) as loader:
                for a, b in zip(expected, loader, strict=True):
                    assert all(map(pinning.is_pinned, all_tensors(b)))
                    for name, rows in a.features.items():
                        assert same_bits(rows, b.features[name])
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_the_loader_raises_pytorchs_error(papers: Path) -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(1, pin_memory=True)
    for make in (nodes, lambda path, **options: gids.FeatureLoader(path, ["paper.feat"], **options)):
        with pytest.raises(RuntimeError, match=re.escape(str(torchs.value))):
            make(papers, pin_memory=True)


@pytest.mark.gpu
@pytest.mark.parametrize("reads", ["random", "pack"])
def test_rows_are_right_while_copies_are_in_flight(papers: Path, gpu: Device, reads: str) -> None:
    """Minibatches are dropped while the GPU is busy, before it copies them."""
    expected, found = list(nodes(opened(papers))), []
    loader = nodes(opened(papers, reads), pin_memory=True)
    for minibatch in loader:
        assert all(tensor.is_pinned() for tensor in all_tensors(minibatch))
        torch.cuda._sleep(50_000_000)
        found.append(minibatch.to("cuda", non_blocking=True))
        del minibatch
    for a, b in zip(expected, found, strict=True):
        for one, other in zip(all_tensors(a), all_tensors(b), strict=True):
            assert same_bits(one, other.cpu())
    loader.close()
