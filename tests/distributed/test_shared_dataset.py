"""Ranks that read one dataset together: each page is read by one of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import random_in_edges
from programs import (
    compare,
    cooperate_near,
    read_alone,
    read_near,
    read_with_placed_pages,
)
from rank_pool import RankPool

import gids
from gids.distributed.owners import PlacedOwners, hash_owners, range_owners
from gids.distributed.place import place
from gids.store.names import Relation
from gids.write import DatasetWriter

NODES = 1500
CITES: Relation = ("paper", "cites", "paper")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "one.gids"
    generator = torch.Generator().manual_seed(1)
    with DatasetWriter(path, page_bytes=512) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(NODES, 50, generator=generator))
        writer.write_table("node", "paper", "half", torch.randn(NODES, 7, generator=generator).half())
        writer.write_table(
            "node", "paper", "code", torch.randn(NODES, 9, generator=generator), dtype=torch.int8, scale="row"
        )
        writer.write_labels("paper", torch.arange(NODES) % 7)
        writer.write_graph(CITES, *random_in_edges(NODES, NODES, 3), num_src=NODES)
    return path


@pytest.mark.few(4)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("owners", ["hash", "range", "heat"])
def test_rows_are_those_of_one_process(one: Path, ranks: RankPool, size: int, owners: str) -> None:
    arguments = {"seeds": torch.arange(0, NODES, 3), "sampler": [3, 4], "batch_size": 30, "shuffle": True}
    told = ranks.run(size, compare, one, one, "NodeLoader", arguments, {"owners": owners})
    assert {t["steps"] for t in told} == {-(-500 // (30 * size))}


def test_placed_pages_stay_in_the_lines_of_their_rank(one: Path, ranks: RankPool) -> None:
    """The capacity is that of the lines, not of the memory."""
    for held, read, stayed in ranks.run(2, read_with_placed_pages, one, "30kB"):
        assert 0 < held <= 0.5 * 30_000 // 512
        assert 0 < read == stayed


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("owners", "replicas", "size"), [("hash", 1, 2), ("heat", 1, 3), ("range", 2, 4), ("range", 1, 2)]
)
def test_a_bias_to_the_rows_of_its_rank_asks_for_fewer(
    one: Path, ranks: RankPool, owners: str, replicas: int, size: int
) -> None:
    options = {"owners": owners, "replicas": replicas, "tuning": gids.Tuning(cache="20kB")}
    plain, near = (ranks.run(size, read_near, one, options, factor) for factor in (1, 8))
    for told in (plain, near):
        for *own, _ in told:
            holders = torch.stack(own).sum(0)
            assert all(map(torch.equal, own, told[0]))
            # By heat, the hottest pages may have copies.
            assert (holders >= 1 if owners == "heat" else holders == replicas).all()
    asked = [np.mean([1 - float(owned.float().mean()) for *_, owned in told]) for told in (plain, near)]
    assert asked[1] < 0.7 * asked[0]


def test_the_owner_of_a_node_of_cooperative_minibatches_draws_by_its_mask(one: Path, ranks: RankPool) -> None:
    ranks.run(2, cooperate_near, one, [torch.arange(NODES) % 2 == rank for rank in range(2)])


@pytest.mark.few(1)
@pytest.mark.parametrize("owners", ["hash", "range"])
def test_copies_of_a_whole_dataset_exchange_in_columns(one: Path, ranks: RankPool, owners: str) -> None:
    arguments = {"seeds": torch.arange(0, NODES, 3), "sampler": [3, 4], "batch_size": 30, "shuffle": True}
    whole, copied = (
        ranks.run(4, compare, one, one, "NodeLoader", arguments, {"owners": owners, "replicas": copies})
        for copies in (1, 2)
    )
    sent = [sum(t["stats"]["group"]["rows sent"] for t in told) for told in (whole, copied)]
    # Half of the rows, and not three quarters, are of another rank of the column.
    assert sent[1] / sent[0] == pytest.approx((1 / 2) / (3 / 4), rel=0.1)


def test_what_reads_or_samples_by_itself_is_refused(one: Path, ranks: RankPool) -> None:
    for errors in ranks.run(2, read_alone, one):
        assert "divides rows among ranks, so that all of them read together" in errors[0]
        assert "all ranks of gids.distributed.open() share the seeds" in errors[1]
        assert "call gids.distributed.open() in each process" in errors[2]
        assert "device='cuda': cooperative minibatches are sampled on the CPU" in errors[3]


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
