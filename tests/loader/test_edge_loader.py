"""EdgeLoader: seed edges and negatives, their ends among the seeds, blocks that do not tell the answer."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from open_loaders import edge_loader

import gids
from gids.loader import EdgeMinibatch
from gids.sampler import Block, Neighbor
from gids.store.names import Relation
from gids.write import DatasetWriter
from gids.write.edges import edge_list

USERS, ITEMS = 120, 80
FOLLOWS: Relation = ("user", "follows", "user")
BUYS: Relation = ("user", "buys", "item")
BOUGHT: Relation = ("item", "bought by", "user")
Pairs = dict[Relation, np.ndarray]


@pytest.fixture(scope="module")
def edges() -> Pairs:
    """int64[2, n] each. Some edges are there twice, and BOUGHT is BUYS reversed."""
    rng = np.random.default_rng(0)
    buys = np.stack([rng.integers(0, USERS, 600), rng.integers(0, ITEMS, 600)])
    follows = np.stack([rng.integers(0, USERS, 900), rng.integers(0, USERS, 900)])
    both_ways = np.concatenate([follows, follows[::-1]], axis=1)
    return {FOLLOWS: both_ways, BUYS: buys, BOUGHT: buys[::-1].copy()}


@pytest.fixture(scope="module")
def rows() -> dict[str, torch.Tensor]:
    return {"user": torch.randn(USERS, 16), "item": torch.randn(ITEMS, 8)}


def write(path: Path, edges: Pairs, rows: dict[str, torch.Tensor], relations: list[Relation]) -> Path:
    counts = {"user": USERS, "item": ITEMS}
    with DatasetWriter(path) as writer:
        for ntype in sorted({t for r in relations for t in r[::2]}):
            writer.write_table("node", ntype, "feat", rows[ntype])
        for relation in relations:
            sizes = {"num_src": counts[relation[0]], "num_dst": counts[relation[2]]}
            writer.write_edges(relation, edge_list(*map(torch.from_numpy, edges[relation]), **sizes))
    return path


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, edges: Pairs, rows: dict[str, torch.Tensor]) -> Path:
    return write(tmp_path_factory.mktemp("edges") / "one.gids", edges, rows, [FOLLOWS])


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, edges: Pairs, rows: dict[str, torch.Tensor]) -> Path:
    return write(tmp_path_factory.mktemp("edges") / "several.gids", edges, rows, [FOLLOWS, BUYS, BOUGHT])


def open_loader(path: Path, edges: Any, **options: Any) -> gids.EdgeLoader:
    given: dict[str, Any] = {"batch_size": 64, "shuffle": True, "memory": 32 << 20, "cache": 20_000} | options
    return edge_loader(path, edges, given.pop("sampler", [5, -1]), **given)


def ends_of(m: EdgeMinibatch, relation: Relation) -> np.ndarray:
    """The pairs as ids of the dataset, int64[2, n]."""
    seeds = m.seeds if isinstance(m.seeds, dict) else dict.fromkeys(relation[::2], m.seeds)
    ends = [seeds[t][at].tolist() for t, at in zip(relation[::2], m.pairs, strict=True)]
    return np.array(ends, np.int64).reshape(2, -1)


def blocks_of(m: EdgeMinibatch, relation: Relation) -> list[Block]:
    return [layer[relation] if isinstance(layer, dict) else layer for layer in m.blocks]


def edges_of(m: EdgeMinibatch, block: Block) -> list[tuple[int, int]]:
    """As ids of the dataset, in order."""
    nodes = m.input_nodes
    src, dst = block.coo()
    of = (lambda t: nodes[t]) if isinstance(nodes, dict) else (lambda t: nodes)
    return list(zip(of(block.relation[0])[src].tolist(), of(block.relation[2])[dst].tolist(), strict=True))


def test_negatives_are_uniform(several: Path) -> None:
    counts = np.zeros(ITEMS)
    with open_loader(several, None, relation=BUYS, negatives=20, tables=[], sampler=[1]) as loader:
        for m in loader:
            counts += np.bincount(ends_of(m, BUYS)[1, m.positive_count :], minlength=ITEMS)  # type: ignore[attr-defined]
    expected = 600 * 20 / ITEMS
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 124.8, counts  # 79 degrees of freedom: 1 in 1000


def excluded_edges(
    m: EdgeMinibatch, exclude: str, relation: Relation, reverse: Relation | None
) -> dict[Relation, set[tuple[int, int]]]:
    """The edges, (source, destination), that the blocks of a minibatch must not have, by relation."""
    seeds: set[tuple[int, int]] = set(map(tuple, ends_of(m, relation)[:, : m.positive_count].T.tolist()))
    gone: dict[Relation, set[tuple[int, int]]] = defaultdict(set)
    gone[relation] |= seeds
    if exclude == "reverse":
        gone[reverse or relation] |= {(v, u) for u, v in seeds}
    return gone


@pytest.mark.parametrize("exclude", ["self", "reverse"])
def test_blocks_lack_the_excluded_edges_alone(one: Path, several: Path, exclude: str) -> None:
    """Against the same minibatches with nothing excluded."""
    for path, relation, reverse in ((one, FOLLOWS, None), (several, FOLLOWS, None), (several, BUYS, BOUGHT)):
        options: dict[str, Any] = {"relation": relation, "tables": [], "batch_size": 100}
        with (
            open_loader(path, None, **options) as whole,
            open_loader(path, None, exclude=exclude, reverse=reverse, **options) as loader,
        ):
            dropped = 0
            for m, other in islice(zip(loader, whole, strict=True), 4):
                assert torch.equal(m.pairs, other.pairs)
                gone = excluded_edges(m, exclude, relation, reverse)
                for which in (FOLLOWS,) if path == one else (FOLLOWS, BUYS, BOUGHT):
                    for block, all_of_it in zip(blocks_of(m, which), blocks_of(other, which), strict=True):
                        every = list(
                            zip(edges_of(other, all_of_it), all_of_it.positions.tolist(), strict=True)
                        )
                        kept = [(e, p) for e, p in every if e not in gone[which]]
                        assert list(zip(edges_of(m, block), block.positions.tolist(), strict=True)) == kept
                        assert block.num_src == all_of_it.num_src
                        assert block.num_dst == all_of_it.num_dst
                        dropped += len(every) - len(kept)
            assert dropped > 0


def test_edges_that_are_made_from_excluded_edges_are_excluded(
    one: Path, edges: Pairs, rows: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """A bidirectional subgraph has reverses with the ids of their edges. Against one without exclusion."""
    back = ("item", "rev_buys", "user")
    both = write(tmp_path / "both.gids", {BUYS: edges[BUYS], back: edges[BOUGHT]}, rows, [BUYS, back])
    for path, relation, reverse in ((one, FOLLOWS, None), (both, BUYS, back)):
        options: dict[str, Any] = {"relation": relation, "tables": [], "batch_size": 40}
        options["sampler"] = Neighbor([2, 3], subgraph="bidirectional")
        relations = [FOLLOWS] if path == one else [BUYS, back]
        with (
            open_loader(path, None, **options) as whole,
            open_loader(path, None, exclude="self", reverse=reverse, **options) as loader,
        ):
            made_of_excluded = 0
            for m, other in islice(zip(loader, whole, strict=True), 4):
                gone = excluded_edges(m, "self", relation, reverse)
                for which in relations:
                    [block], [every] = blocks_of(m, which), blocks_of(other, which)
                    kept = []
                    for (u, v), p in zip(edges_of(other, every), every.positions.tolist(), strict=True):
                        made = p < 0 and (v, u) in gone[every.reverse.relation]
                        made_of_excluded += made
                        if not made and (u, v) not in gone[which]:
                            kept.append(((u, v), p))
                    assert list(zip(edges_of(m, block), block.positions.tolist(), strict=True)) == kept
            assert made_of_excluded > 0


def test_edges_that_the_user_changes_later_stay_those_given(several: Path) -> None:
    given = torch.tensor([range(30), range(30)])
    expected = given.clone()
    with open_loader(several, given, relation=BUYS, shuffle=False, batch_size=7, negatives=0) as loader:
        epoch = iter(loader)
        found = [next(epoch)]
        given += 1 << 40  # no nodes
        found += epoch
    ends = [torch.stack([m.seeds["user"][m.pairs[0]], m.seeds["item"][m.pairs[1]]]) for m in found]
    assert torch.equal(torch.cat(ends, dim=1), expected)


def test_a_state_of_other_negatives_exclusion_or_relation_is_refused(several: Path) -> None:
    fixed: dict[str, Any] = {"relation": BUYS, "exclude": "reverse", "reverse": BOUGHT, "negatives": 2}
    with open_loader(several, None, **fixed) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for message, options in (
        ("negatives = 2", {**fixed, "negatives": 1}),
        ("exclude = 'reverse'", {**fixed, "exclude": "self"}),
        ("relation = ", {**fixed, "relation": BOUGHT, "reverse": BUYS}),
    ):
        with open_loader(several, None, **options) as other, pytest.raises(ValueError, match=message):
            other.load_state_dict(state)


def test_no_edges_are_no_minibatches(one: Path) -> None:
    with open_loader(one, torch.zeros((2, 0), dtype=torch.int64)) as loader:
        assert list(loader) == []
