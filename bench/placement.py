"""How many rows do P ranks move with each placement of the feature rows, and at what cost?

    python bench/placement.py           # 4 million nodes, 4 and 8 ranks; ten minutes
    python bench/placement.py --links   # the same for two pairs, and two machines with four ranks each
    python bench/placement.py --times   # seconds of preprocessing, compared with METIS
    python bench/placement.py --small   # seconds; only shows that it works

Counted in one process; nothing is sent. Neighbor sampling, 256 seeds per rank from a tenth of the nodes,
fanouts 10, 10. Heat is the number of minibatches of one epoch that read a row (for unread rows, Good and
Turing's estimate); other minibatches are counted.
Each rank holds 20 % of the rows, or all ranks together do. A row of another rank costs 1, of the host 2, 4
or 10.

placement: gids.distributed.place; published: the same with the condition as published. hottest: the hottest
rows on every rank. distinct: the hottest rows, none twice. hash, community, METIS (if pymetis or DGL is
installed; `--no-metis` leaves it out, because it takes long on large graphs): each rank holds the hottest
rows of its part, then the hottest of the others; random: random rows of its part by hash. local seeds: each
rank has the seeds of its part. Each cost is compared with that of `placement`.

--links: ranks 0 and 1, and 2 and 3, have a fast link ("2 + 2"); or 0 to 3, and 4 to 7 ("2 x 4"). A row over
a fast link costs 1, over another one 2, 4 or 8, of the host 10. placement: by this matrix; one cost: by the
mean of its links. bias: the sampler of each rank draws rows within reach 4 times as often (LocalityBias):
its own, or also those over a fast link.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from graphs import GRAPHS, Ids, Owners, OwnersOf, make_graph, seed_order
from harness import Figures, integers, make_parser

from gids.distributed.place import Moved, Placement, Rule, place
from gids.sampler import LocalityBias, Neighbor, Topology
from gids.store import Graph
from gids.write.partition.owners import find_metis, metis_owners

LINKS = {"2 + 2": 2, "2 x 4": 4}
"""Ranks of each of the two groups."""

BIAS = 4
Heat = np.ndarray
Row = dict[str, Any]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "seed")
    add = parser.add_argument
    add("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    add("--log2-nodes", type=int, default=22, help="size of the graphs (default: 22)")
    add("--degree", type=int, default=16)
    add("--fanouts", type=integers, default=[10, 10])
    add("--batch-size", type=int, default=256, help="seeds per rank (default: 256)")
    add("--ranks", type=integers, default=[4, 8])
    add("--percent", type=int, default=20, help="of the rows, on each rank or on all (default: 20)")
    add("--host-costs", type=integers, default=[2, 4, 10])
    add("--far-costs", type=integers, default=[2, 4, 8], help="of a row over a slow link (default: 2,4,8)")
    add("--steps", type=int, default=50, help="steps to count (default: 50)")
    add("--metis", action=argparse.BooleanOptionalAction, default=_has_metis())
    add("--threads", type=int)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--times", action="store_true", help="measure the preprocessing in place of the costs")
    kind.add_argument("--links", action="store_true", help="count costs over fast and slow links")
    args = parser.parse_args(argv)
    if args.small:
        args.log2_nodes, args.batch_size, args.steps, args.far_costs = 12, 8, 3, [4]
    return args


def by_part(heat: Heat, owners: Owners, capacity: int, ranks: int) -> list[Ids]:
    """Each rank holds the hottest rows of its part, then the hottest of the others."""
    order = np.argsort(-heat, kind="stable")
    of_order, found = owners[order], []
    for rank in range(ranks):
        own = order[of_order == rank][:capacity]
        others = order[of_order != rank][: capacity - len(own)]
        found.append(np.concatenate([own, others]))
    return found


def _has_metis() -> bool:
    return any(importlib.util.find_spec(name) for name in ("pymetis", "dgl"))


def metis(graph: Graph, parts: int) -> Owners:
    """Parts with equally many nodes and in-edges."""
    count = graph.num_dst
    in_edges = np.diff(graph.indptr)
    sources, targets = graph.indices.astype(np.int64), np.repeat(np.arange(count), in_edges)
    sources, targets = sources[sources != targets], targets[sources != targets]
    both = np.unique(np.concatenate([targets * count + sources, sources * count + targets]))
    of_edges, neighbors = np.divmod(both, count)
    starts = np.searchsorted(of_edges, np.arange(count + 1))
    kinds = np.zeros(count, np.uint8)
    return metis_owners(find_metis(), (starts, neighbors), kinds, in_edges, parts).astype(np.uint8)


class Reads:
    """The rows that the ranks read: in an epoch, for the heat, and in the steps that are counted."""

    def __init__(self, graph: Graph, args: argparse.Namespace) -> None:
        self._args, self._topology = args, Topology(graph)
        seeds = seed_order(graph, args.seed)
        self._seeds = seeds[: max(args.batch_size, len(seeds) // 10)]

    def heat(self) -> Heat:
        found = np.zeros(self._topology.node_counts[0], np.float32)
        size, sampler = self._args.batch_size, Neighbor(self._args.fanouts, threads=self._args.threads)
        for step, first in enumerate(range(0, len(self._seeds), size)):
            found[self._sample(self._seeds[first : first + size], 1, step, sampler)] += 1
        # Good and Turing: unread rows together are as hot as rows that were read once. Without it, copies of
        # all other rows would seem better than an unread row.
        unread = np.count_nonzero(found == 0)
        found[found == 0] = np.count_nonzero(found == 1) / max(1, unread)
        return found

    def of_ranks(
        self, ranks: int, owners: Owners | None, bias: LocalityBias | None = None
    ) -> list[tuple[int, Ids]]:
        """(rank, rows) of each minibatch. owners: give each rank the seeds of its part."""
        sampler = Neighbor(self._args.fanouts, locality=bias, threads=self._args.threads)
        rng, found = np.random.default_rng([self._args.seed, 2]), []
        for rank in range(ranks):
            seeds = self._seeds if owners is None else self._seeds[owners[self._seeds] == rank]
            for step in range(self._args.steps):
                chosen = rng.choice(seeds, min(len(seeds), self._args.batch_size), replace=False)
                of_rank = sampler.of_rank(rank, ranks)
                found.append((rank, self._sample(chosen, 2, step * ranks + rank, of_rank)))
        return found

    def _sample(self, seeds: Ids, epoch: int, step: int, sampler: Neighbor) -> Ids:
        made = sampler.sample(self._topology, torch.from_numpy(seeds), epoch=epoch, step=step)
        assert isinstance(made.input_nodes, torch.Tensor)
        return made.input_nodes.numpy()


def count(placed: Placement, reads: Sequence[tuple[int, Ids]]) -> Moved:
    return Moved(*np.sum([placed.moved(rows, rank) for rank, rows in reads], axis=0).tolist())


@dataclass(frozen=True)
class Setting:
    """capacity: rows of each rank. parts: owners, by way. host_cost, peer_cost: of a row; see place()."""

    heat: Heat
    ranks: int
    capacity: int
    parts: Mapping[str, Owners]
    host_cost: float
    peer_cost: Any = 1

    def placements(self, rng: np.random.Generator) -> Iterator[tuple[str, Placement]]:
        yield "placement", self._placed(self.peer_cost, "total")
        if np.ndim(self.peer_cost):
            yield "one cost", self._placed(self.peer_cost[self.peer_cost > 0].mean(), "total")
        else:
            yield "published", self._placed(self.peer_cost, "own")
        yield "hottest", self._placed(self.host_cost, "total")
        yield "distinct", self._placed(0, "total")
        yield "random", self._of_parts(rng.random(len(self.heat)), self.parts["hash"])
        for way, owners in self.parts.items():
            yield way, self._of_parts(self.heat, owners)

    def _placed(self, peer_cost: Any, rule: Rule) -> Placement:
        made = place(self.heat, [self.capacity] * self.ranks, peer_cost, self.host_cost, rule=rule)
        return Placement(made.holders, self.ranks, self.peer_cost, self.host_cost)

    def _of_parts(self, heat: Heat, owners: Owners) -> Placement:
        rows = by_part(heat, owners, self.capacity, self.ranks)
        return Placement.of(rows, len(heat), peer_cost=self.peer_cost, host_cost=self.host_cost)


def compare(setting: Setting, reads: Mapping[str, Sequence[tuple[int, Ids]]], seed: int) -> Iterator[Row]:
    """A row of the table for each way. reads: minibatches with seeds of the parts, by way; "": of all."""
    best = 0.0
    for way, placed in setting.placements(np.random.default_rng([seed, 3])):
        for seeds in ("", way) if way in reads else ("",):
            moved = count(placed, reads[seeds])
            total = sum(moved)
            assert total == sum(len(rows) for _, rows in reads[seeds])
            cost = (setting.peer_cost * moved.peer + setting.host_cost * moved.host) / total
            best = best or cost
            yield {
                "P": setting.ranks,
                "held by a rank": setting.capacity / len(setting.heat),
                "host cost": setting.host_cost,
                "way": f"{way}, local seeds" if seeds else way,
                **{name: rows / total for name, rows in zip(Moved._fields, moved, strict=True)},
                "cost": cost,
                "over placement": cost / best,
            }


def links_of(group: int, far_cost: float) -> np.ndarray:
    """Costs of the links of two groups of ranks."""
    of_rank = np.repeat([0, 1], group)
    costs = np.where(of_rank[:, None] == of_rank, 1.0, far_cost)
    np.fill_diagonal(costs, 0)
    return costs


def compare_links(
    setting: Setting,
    reads: Sequence[tuple[int, Ids]],
    draw: Callable[[LocalityBias], list[tuple[int, Ids]]],
    seed: int,
) -> Iterator[Row]:
    """A row of the table for each way. draw: minibatches of samplers with a bias."""
    ways = [(way, placed, reads) for way, placed in setting.placements(np.random.default_rng([seed, 3]))]
    best = ways[0][1]
    for within, reach in (("own", 0), ("own and fast", 1)):
        ways.append((f"placement, bias to {within}", best, draw(LocalityBias(best.within(reach), BIAS))))
    least = 0.0
    for way, placed, of_ranks in ways:
        paid = np.concatenate([placed.row_costs(rows, rank) for rank, rows in of_ranks])
        least = least or float(paid.sum())
        far = float(np.max(setting.peer_cost))
        shares = {"own": 0, "fast link": 1, "slow link": far, "host": setting.host_cost}
        yield {
            "held by a rank": setting.capacity / len(setting.heat),
            "slow cost": far,
            "way": way,
            **{source: float(np.mean(paid == cost)) for source, cost in shares.items()},
            "cost of a row": float(paid.mean()),
            "cost over placement": float(paid.sum()) / least,
        }


def measure_links(name: str, args: argparse.Namespace, figures: Figures) -> None:
    graph = make_graph(name, args.log2_nodes, args.degree, args.seed)
    reads, owners_of = Reads(graph, args), OwnersOf(graph)
    heat, host_cost = reads.heat(), max(args.host_costs)
    for links, group in LINKS.items():
        ranks = 2 * group
        parts = {method: owners_of(method, ranks) for method in ("hash", "community")}
        if args.metis:
            parts["METIS"] = metis(graph, ranks)
        minibatches, rows = reads.of_ranks(ranks, None), graph.num_dst * args.percent // 100
        found: list[Row] = []
        for capacity in (rows, rows // ranks):
            for far_cost in args.far_costs:
                setting = Setting(heat, ranks, capacity, parts, host_cost, links_of(group, far_cost))
                found += compare_links(setting, minibatches, partial(reads.of_ranks, ranks, None), args.seed)
        figures.table(f"{name}, {links}: where rows come from", found)
        for way in dict.fromkeys(row["way"] for row in found):
            if way != "placement":
                ratios = [row["cost over placement"] for row in found if row["way"] == way]
                figures.add(f"{name}, {links}: {way} over placement, cost", (min(ratios), max(ratios)), "x")


def measure(name: str, args: argparse.Namespace) -> list[Row]:
    graph = make_graph(name, args.log2_nodes, args.degree, args.seed)
    reads, owners_of, found = Reads(graph, args), OwnersOf(graph), []
    heat = reads.heat()
    for ranks in args.ranks:
        parts = {method: owners_of(method, ranks) for method in ("hash", "community")}
        if args.metis:
            parts["METIS"] = metis(graph, ranks)
        minibatches = {way: reads.of_ranks(ranks, owners) for way, owners in parts.items() if way != "hash"}
        minibatches[""] = reads.of_ranks(ranks, None)
        rows = graph.num_dst * args.percent // 100
        for capacity in (rows, rows // ranks):
            for host in args.host_costs:
                setting = Setting(heat, ranks, capacity, parts, host)
                found += compare(setting, minibatches, args.seed)
    return found


def seconds_of(make: Callable[[], object]) -> float:
    begun = time.perf_counter()
    make()
    return time.perf_counter() - begun


def preprocess(name: str, args: argparse.Namespace, figures: Figures) -> list[Row]:
    """Seconds of what must be computed before training: heat and placement, or parts."""
    graph = make_graph(name, args.log2_nodes, args.degree, args.seed)
    reads, rows = Reads(graph, args), []
    heat_s = seconds_of(reads.heat)
    heat = reads.heat()
    for ranks in args.ranks:
        capacities = [graph.num_dst * args.percent // 100] * ranks
        row: Row = {"P": ranks, "heat by sampling, s": heat_s}
        row["placement, s"] = seconds_of(partial(place, heat, capacities, 1, 10))
        row["hash, s"] = seconds_of(partial(OwnersOf(graph), "hash", ranks))
        row["community, s"] = seconds_of(partial(OwnersOf(graph), "community", ranks))
        if args.metis:
            row["METIS, s"] = seconds_of(partial(metis, graph, ranks))
            prepared = heat_s + row["placement, s"]
            figures.add(f"{name}, {ranks} ranks: METIS over placement, time", row["METIS, s"] / prepared, "x")
        figures.add(f"{name}, {ranks} ranks: placement", row["placement, s"], "s", note="without heat")
        rows.append(row)
    return rows


def main() -> None:
    args = parse()
    figures = Figures(args)
    for name in args.graphs:
        if args.links:
            measure_links(name, args, figures)
        elif args.times:
            figures.table(f"{name}: seconds of preprocessing", preprocess(name, args, figures))
        else:
            figures.table(f"{name}: where rows come from", measure(name, args))


if __name__ == "__main__":
    main()
