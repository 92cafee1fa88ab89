"""EdgeLoader: seed edges and negatives, their ends among the seeds, blocks that do not tell the answer."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from open_options import edge_loader

import gids
from gids.loader import EdgeMinibatch
from gids.sampler import Block, Minibatch, Neighbor, RandomWalk
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


def test_without_seeds_an_epoch_has_every_edge_of_the_relation(
    one: Path, several: Path, edges: Pairs
) -> None:
    for path, relation in ((one, FOLLOWS), (several, BUYS), (several, BOUGHT)):
        given = None if path == one else relation
        with open_loader(path, None, relation=given, negatives=0, tables=[]) as loader:
            found = np.concatenate([ends_of(m, relation) for m in loader], axis=1)
        assert sorted(found.T.tolist()) == sorted(edges[relation].T.tolist())


def excluded_edges(
    m: EdgeMinibatch, exclude: str | None, relation: Relation, reverse: Relation | None
) -> dict[Relation, set[tuple[int, int]]]:
    """The edges, (source, destination), that the blocks of a minibatch must not have, by relation."""
    seeds: set[tuple[int, int]] = set(map(tuple, ends_of(m, relation)[:, : m.positive_count].T.tolist()))
    gone: dict[Relation, set[tuple[int, int]]] = defaultdict(set)
    if exclude is not None:
        gone[relation] |= seeds
    if exclude == "reverse":
        gone[reverse or relation] |= {(v, u) for u, v in seeds}
    return gone


@pytest.mark.parametrize("exclude", [None, "self", "reverse"])
def test_blocks_lack_the_excluded_edges_alone(one: Path, several: Path, exclude: str | None) -> None:
    """Against the same minibatches with nothing excluded."""
    for path, relation, reverse in ((one, FOLLOWS, None), (several, FOLLOWS, None), (several, BUYS, BOUGHT)):
        options: dict[str, Any] = {"relation": relation, "tables": [], "batch_size": 100}
        with (
            open_loader(path, None, **options) as whole,
            open_loader(path, None, exclude=exclude, reverse=reverse, **options) as loader,
        ):
            dropped = 0
            for m, other in zip(loader, whole, strict=True):
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
            assert (dropped > 0) == (exclude is not None)


@pytest.mark.parametrize("exclude", ["self", "reverse"])
def test_edges_that_are_made_from_excluded_edges_are_excluded(
    one: Path, edges: Pairs, rows: dict[str, torch.Tensor], tmp_path: Path, exclude: str
) -> None:
    """A bidirectional subgraph has reverses with the ids of their edges. Against one without exclusion."""
    back = ("item", "rev_buys", "user")
    both = write(tmp_path / "both.gids", {BUYS: edges[BUYS], back: edges[BOUGHT]}, rows, [BUYS, back])
    for path, relation, reverse in ((one, FOLLOWS, None), (both, BUYS, back), (both, back, BUYS)):
        options: dict[str, Any] = {"relation": relation, "tables": [], "batch_size": 40}
        options["sampler"] = Neighbor([2, 3], subgraph="bidirectional")
        relations = [FOLLOWS] if path == one else [BUYS, back]
        with (
            open_loader(path, None, **options) as whole,
            open_loader(path, None, exclude=exclude, reverse=reverse, **options) as loader,
        ):
            made_of_excluded = 0
            for m, other in zip(loader, whole, strict=True):
                gone = excluded_edges(m, exclude, relation, reverse)
                for which in relations:
                    [block], [every] = blocks_of(m, which), blocks_of(other, which)
                    kept = []
                    for (u, v), p in zip(edges_of(other, every), every.positions.tolist(), strict=True):
                        made = p < 0 and (v, u) in gone[every.reverse.relation]
                        made_of_excluded += made
                        if not made and (u, v) not in gone[which]:
                            kept.append(((u, v), p))
                    assert list(zip(edges_of(m, block), block.positions.tolist(), strict=True)) == kept
            assert made_of_excluded > 50


def test_walks_may_pass_over_seed_edges_so_none_can_be_excluded(one: Path) -> None:
    with open_loader(one, None, sampler=RandomWalk([3]), exclude="self") as loader:
        with pytest.raises(TypeError, match=r"makes blocks of .user\.follows\.user.*use exclude=None"):
            next(iter(loader))


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


def test_minibatches_depend_on_seed_and_epoch_alone_and_resume(several: Path) -> None:
    fixed: dict[str, Any] = {"relation": BUYS, "exclude": "reverse", "reverse": BOUGHT, "negatives": 2}

    def seen(m: Any) -> list[Any]:
        lists = [m.pairs, m.labels, *m.seeds.values(), *m.input_nodes.values()]
        lists += [b.positions for layer in m.blocks for b in layer.values()]
        return [t.tolist() for t in lists]

    def run(**options: Any) -> list[list[Any]]:
        with open_loader(several, None, **fixed, **options) as loader:
            return [seen(m) for _ in range(2) for m in loader]

    expected = run()
    length = len(expected) // 2
    assert run(window=0) == run(threads=1, tables=[]) == run(window=20) == expected
    assert run(seed=1) != expected
    with open_loader(several, None, **fixed) as loader:
        epoch = iter(loader)
        found = [seen(next(epoch)) for _ in range(4)]
        state = loader.state_dict()
    with open_loader(several, None, **fixed) as loader:
        loader.load_state_dict(state)
        found += [seen(m) for _ in range(2) for m in loader]
    assert found == expected
    assert length > 4
    for message, options in (
        ("negatives = 2", {**fixed, "negatives": 1}),
        ("exclude = 'reverse'", {**fixed, "exclude": "self"}),
        ("relation = ", {**fixed, "relation": BOUGHT, "reverse": BUYS}),
    ):
        with open_loader(several, None, **options) as loader, pytest.raises(ValueError, match=message):
            loader.load_state_dict(state)


def test_a_sampler_without_blocks_excludes_nothing(one: Path) -> None:
    class Seeds:
        def sample(
            self, graphs: Any, seeds: Any, *, seed: int = 0, epoch: int = 0, step: int = 0
        ) -> Minibatch:
            return Minibatch(seeds, seeds, [], epoch, step)

    with open_loader(one, None, sampler=Seeds()) as loader:
        assert sum(m.positive_count for m in loader) == 1800  # type: ignore[attr-defined]
    with open_loader(one, None, sampler=Seeds(), exclude="self") as loader:
        with pytest.raises(TypeError, match="use exclude=None"):
            next(iter(loader))


def test_wrong_arguments_are_refused(one: Path, several: Path) -> None:
    pairs = torch.zeros((2, 4), dtype=torch.int64)
    wrong = {"relation": BUYS, "exclude": "reverse", "reverse": FOLLOWS}
    for error, message, path, given, options in (
        (KeyError, "relation is not given: .* has 'user.follows.user', ", several, pairs, {}),
        (KeyError, "no topology of", several, pairs, {"relation": ("item", "x", "user")}),
        (TypeError, r"edges is torch.int64\[4\]: give", one, pairs[0], {}),
        (TypeError, r"edges is torch.int64\[3, 4\]", one, torch.zeros((3, 4), dtype=torch.int64), {}),
        (TypeError, "edges is torch.int32", one, pairs.int(), {}),
        (TypeError, "edges is list", one, [[0], [1]], {}),
        (IndexError, "ids run from 0 to 119", one, pairs + USERS, {}),
        (IndexError, "'item' nodes from 80 to 80", several, pairs + ITEMS, {"relation": BUYS}),
        (IndexError, "ids run from 0", one, pairs - 1, {}),
        (ValueError, "negatives=-1", one, pairs, {"negatives": -1}),
        (ValueError, "negatives=0.5", one, pairs, {"negatives": 0.5}),
        (ValueError, "exclude='both'", one, pairs, {"exclude": "both"}),
        (ValueError, "reverse=None", several, pairs, {"relation": BUYS, "exclude": "reverse"}),
        (ValueError, "from 'item' to 'user'", several, pairs, wrong),
        (ValueError, "batch_size=0", one, pairs, {"batch_size": 0}),
    ):
        with pytest.raises(error, match=message):
            open_loader(path, given, **options)
    with open_loader(one, pairs[:, :0]) as loader:
        assert list(loader) == []
