"""Ranks that read one dataset together: each page is read by one of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import CITES, random_in_edges, same_bits
from programs import error_of
from rank_pool import RankPool

import gids.distributed
from gids.distributed.owners import PlacedOwners, hash_owners, range_owners
from gids.distributed.place import place
from gids.sampler import LocalityBias, Neighbor
from gids.write import DatasetWriter

NODES = 1500


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "one.gids"
    generator = torch.Generator().manual_seed(1)
    with DatasetWriter(path, page_bytes=512) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(NODES, 50, generator=generator))
        writer.write_graph(CITES, *random_in_edges(NODES, NODES, 3), num_src=NODES)
    return path


def read_with_placed_pages(dataset: Path, cache: str) -> tuple[int, int, int, int]:
    """With owners="heat": (lines of this rank, pages of which it holds a copy, those of them that it read,
    and those that it read and has in its lines after two epochs)."""
    tuning = gids.Tuning(cache=cache, planned=2)
    options: Any = {"window": 12, "memory": "8MB", "reads": "random", "tuning": tuning}
    with gids.distributed.open(dataset, owners="heat", **options) as source:
        table, seeds = source.store.table("paper.feat"), torch.arange(0, NODES, 4)
        loader = gids.NodeLoader(source, seeds, [2, 2], tables=[table], batch_size=2, shuffle=True, seed=0)
        wanted = torch.zeros(table.page_count, dtype=torch.bool)
        for _ in range(2):
            for minibatch in loader:
                wanted[minibatch.input_nodes // table.rows_per_page] = True
                assert same_bits(minibatch.features[table.name], table.read_rows(minibatch.input_nodes))
        held = torch.from_numpy(source.owners_of(table).held)
        cached, read = loader.feature_loader.cached_rows(table.name)[:: table.rows_per_page], held & wanted
        lines = loader.stats()["memory"]["lines"] // table.page_bytes
        return lines, int(held.sum()), int(read.sum()), int((read & cached).sum())


def test_placed_pages_stay_in_the_lines_of_their_rank(one: Path, ranks: RankPool) -> None:
    """The capacity is that of the lines, not of the memory. Half of the lines keep pages for good: pages are
    placed before it is known how many lines fit beside the outputs, so a few may be more than that."""
    for lines, held, read, stayed in ranks.run(2, read_with_placed_pages, one, "30kB"):
        assert 0 < held <= 0.5 * 30_000 // 512
        assert 0 < read <= stayed + max(0, held - lines // 2)


def read_near(dataset: Path, options: dict[str, Any], factor: float) -> list[torch.Tensor]:
    """Read an epoch whose samplers favour the rows that each rank has. Returns these nodes, by rank.

    Rows that are asked of other ranks are counted, and are those of other nodes.
    """
    rank = dist.get_rank()
    with gids.distributed.open(dataset, memory="64MB", **options) as source:
        table = source.store.table("paper.feat")
        own = source.own_nodes(table.name)
        sampler = Neighbor([4, 4], locality=LocalityBias(own, factor))
        seeds = torch.arange(0, NODES, 4)
        given: dict[str, Any] = {"tables": [table], "batch_size": 20, "shuffle": True, "seed": 0}
        with gids.NodeLoader(source, seeds, sampler, **given) as loader:
            nodes = torch.cat([minibatch.input_nodes for minibatch in loader])  # type: ignore[misc]
            assert loader.stats()["group"]["rows asked"] == int((~own[rank][nodes]).sum())
        return [*own, own[rank][nodes]]


@pytest.mark.parametrize(("owners", "replicas", "size"), [("range", 2, 4), ("heat", 1, 2)])
def test_a_bias_to_the_rows_of_its_rank_asks_for_fewer(
    one: Path, ranks: RankPool, owners: str, replicas: int, size: int
) -> None:
    options = {"owners": owners, "replicas": replicas, "tuning": gids.Tuning(cache="20kB")}
    plain, near = (ranks.run(size, read_near, one, options, factor) for factor in (1, 8))
    for *own, _ in (*plain, *near):
        holders = torch.stack(own).sum(0)
        # By heat, the hottest pages may have copies.
        assert (holders >= 1 if owners == "heat" else holders == replicas).all()
    for *own, _ in plain:
        assert all(map(torch.equal, own, plain[0]))
    asked = [np.mean([1 - float(owned.float().mean()) for *_, owned in told]) for told in (plain, near)]
    assert asked[1] < 0.7 * asked[0]


def read_alone(dataset: Path) -> list[str]:
    """The errors of what reads or samples by itself with a source whose ranks read together."""
    seeds = torch.arange(9)
    calls: list[Callable[[gids.distributed.GroupSource], Any]] = [
        lambda source: gids.FeatureLoader(source, ["paper.feat"]),
        lambda source: gids.NodeLoader(source, seeds, [2], rank=0, world_size=1, seed=0),
        pickle.dumps,
        lambda source: gids.NodeLoader(source, seeds, [2], device="cuda", cooperative=True),
        lambda source: source.own_nodes("paper.colour"),
    ]
    with gids.distributed.open(dataset) as source:
        return [error_of(lambda call=call: call(source)) for call in calls]


def test_what_reads_or_samples_by_itself_is_refused(one: Path, ranks: RankPool) -> None:
    for errors in ranks.run(2, read_alone, one):
        assert "divides rows among ranks, so that all of them read together" in errors[0]
        assert "all ranks of gids.distributed.open() share the seeds" in errors[1]
        assert "call gids.distributed.open() in each process" in errors[2]
        assert "device='cuda': cooperative minibatches are sampled on the CPU" in errors[3]
        assert "no table 'paper.colour'" in errors[4]


@pytest.mark.parametrize("ordered", [False, True])
def test_the_rows_of_a_page_have_one_owner(ordered: bool) -> None:
    order = np.random.default_rng(2).permutation(NODES).astype(np.uint32) if ordered else None
    ids = np.arange(NODES)
    pages = (ids if order is None else order.astype(np.int64)) // 10
    for owners in (hash_owners(3, 10, order), range_owners(3, NODES, 10, order)):
        found = owners(ids)
        assert set(found) == {0, 1, 2}
        assert len(set(zip(pages, found, strict=True))) == NODES // 10


def test_a_placed_page_has_the_owners_that_hold_a_copy() -> None:
    rng = np.random.default_rng(1)
    order = rng.permutation(NODES)
    placement = place(rng.random(150), [30, 40, 0], peer_cost=1.0, host_cost=4.0)
    ids = rng.integers(0, NODES, 400)
    rest = hash_owners(3, 10, order)
    pages = order[ids] // 10
    held = np.stack([placement.holds(pages, rank) for rank in range(3)])
    assert held.any(0).sum() > held.all(0).sum()
    for rank in range(3):
        found = PlacedOwners(placement, rank, rest, 10, order)(ids)
        placed = held.any(0)
        assert (held[found[placed], np.flatnonzero(placed)]).all()
        assert (found[held[rank]] == rank).all()
        assert np.array_equal(found[~placed], rest(ids[~placed]))
