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
rank has the seeds of its part. The cost of all rows is compared with that of `placement`.

PaGraph (Lin et al., SoCC 2020): each rank gets the seeds that reach its own, and holds the rows with most
out-edges among the nodes that its seeds reach. Other rows come from the host; with "peers", from ranks that
hold them. Where PaGraph looks at all neighbors, this looks at those of one draw with the same fanouts, and
deals 64 seeds at a time.

--links: ranks 0 and 1, and 2 and 3, have a fast link ("2 + 2"); or 0 to 3, and 4 to 7 ("2 x 4"). A row over
a fast link costs 1, over another one 2, 4 or 8, of the host 10. placement: by this matrix; one cost: by the
mean of its links. bias: the sampler of each rank draws rows within reach 4 times as often (LocalityBias):
its own, or also those over a fast link.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from graphs import GRAPHS, Ids, Owners, OwnersOf, input_nodes, make_graph, seed_order
from harness import Figures, Script

from gids import dgl_finder
from gids.distributed.place import Placement, Rule, place
from gids.sampler import LocalityBias, Neighbor, Topology
from gids.store import Graph

LINKS = {"2 + 2": 2, "2 x 4": 4}
"""Ranks of each of the two groups."""

BIAS = 4
DEALT = 64
"""Seeds that PaGraph deals at a time."""
Heat = np.ndarray
Row = dict[str, Any]
Reading = list[tuple[int, Ids]]
"""(rank, rows) of each minibatch."""
T = TypeVar("T")


def by_part(heat: Heat, owners: Owners, capacity: int, ranks: int) -> list[Ids]:
    """Each rank holds the hottest rows of its part, then the hottest of the others."""
    order = np.argsort(-heat, kind="stable")
    of_order, held = owners[order], []
    for rank in range(ranks):
        own = order[of_order == rank][:capacity]
        others = order[of_order != rank][: capacity - len(own)]
        held.append(np.concatenate([own, others]))
    return held


def metis(graph: Graph, parts: int) -> Owners:
    """Parts with equally many nodes and in-edges."""
    count = graph.num_dst
    in_edges = np.diff(graph.indptr)
    sources, targets = graph.indices.astype(np.int64), np.repeat(np.arange(count), in_edges)
    sources, targets = sources[sources != targets], targets[sources != targets]
    both = np.unique(np.concatenate([targets * count + sources, sources * count + targets]))
    of_edges, neighbors = np.divmod(both, count)
    starts = np.searchsorted(of_edges, np.arange(count + 1))
    if parts == 1:
        return np.zeros(count, np.uint8)
    find = _by_pymetis if importlib.util.find_spec("pymetis") else _by_dgl
    return np.asarray(find(starts, neighbors, in_edges, parts)).astype(np.uint8)


def _by_pymetis(starts: Ids, neighbors: Ids, in_edges: Ids, parts: int) -> Any:
    weights = 500 + in_edges * 500 * len(in_edges) // max(1, int(in_edges.sum()))  # 1000 on average
    pymetis: Any = importlib.import_module("pymetis")
    arrays = {"xadj": starts.tolist(), "adjncy": neighbors.tolist(), "vweights": weights.tolist()}
    return pymetis.part_graph(parts, **arrays)[1]


def _by_dgl(starts: Ids, neighbors: Ids, in_edges: Ids, parts: int) -> Any:
    dgl = dgl_finder.import_dgl()
    arrays = (torch.from_numpy(a) for a in (starts, neighbors, np.empty(0, np.int64)))
    graph = dgl.graph(("csc", tuple(arrays)))
    # DGL prints how long each step takes, and leaves files open.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        return dgl.metis_partition_assignment(graph, parts, balance_edges=True).numpy()


def placements(
    heat: Heat, ranks: int, capacity: int, parts: Mapping[str, Owners], costs: tuple[Any, float], seed: int
) -> Iterator[tuple[str, Placement]]:
    """By way. capacity: rows of each rank. parts: owners, by way. costs: of a row; see place()."""
    peer_cost, host_cost = costs

    def placed(assumed_cost: Any, rule: Rule = "total") -> Placement:
        made = place(heat, [capacity] * ranks, assumed_cost, host_cost, rule=rule)
        return Placement(made.holders, ranks, *costs)

    def of_parts(hotness: Heat, owners: Owners) -> Placement:
        rows = by_part(hotness, owners, capacity, ranks)
        return Placement.of(rows, len(heat), peer_cost=peer_cost, host_cost=host_cost)

    yield "placement", placed(peer_cost)
    if np.ndim(peer_cost):
        yield "one cost", placed(peer_cost[peer_cost > 0].mean())
    else:
        yield "published", placed(peer_cost, "own")
    yield "hottest", placed(host_cost)
    yield "distinct", placed(0)
    yield "random", of_parts(np.random.default_rng([seed, 3]).random(len(heat)), parts["hash"])
    for way, owners in parts.items():
        yield way, of_parts(heat, owners)


def compare(
    ways: Iterable[tuple[str, Placement, Reading]], sources: Mapping[str, float], setting: Row
) -> Iterator[Row]:
    """A row of the table for each way; the first one is `placement`. sources: what a row costs, by where it
    comes from."""
    least = 0.0
    for way, placed, reading in ways:
        paid = np.concatenate([placed.row_costs(rows, rank) for rank, rows in reading])
        least = least or float(paid.sum())
        yield {
            **setting,
            "way": way,
            **{source: float(np.mean(paid == cost)) for source, cost in sources.items()},
            "cost of a row": float(paid.mean()),
            "cost over placement": float(paid.sum()) / least,
        }


def links_of(group: int, far_cost: float) -> np.ndarray:
    """Costs of the links of two groups of ranks."""
    of_rank = np.repeat([0, 1], group)
    costs = np.where(of_rank[:, None] == of_rank, 1.0, far_cost)
    np.fill_diagonal(costs, 0)
    return costs


class Case:
    """A graph, its parts, and what its ranks read: in an epoch, for the heat, and in the steps that count."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.graph = make_graph(name, args.log2_nodes, args.degree, args.seed)
        self.owners = OwnersOf(self.graph)
        self.held = self.graph.num_dst * args.percent // 100
        self._args, self._topology = args, Topology(self.graph)
        seeds = seed_order(self.graph, args.seed)
        self._seeds = seeds[: max(args.batch_size, len(seeds) // 10)]

    def heat(self) -> Heat:
        found = np.zeros(self._topology.node_counts[0], np.float32)
        size, sampler = self._args.batch_size, Neighbor(self._args.fanouts)
        for step, first in enumerate(range(0, len(self._seeds), size)):
            seeds = self._seeds[first : first + size]
            found[input_nodes(sampler, self._topology, seeds, epoch=1, step=step)] += 1
        # Good and Turing: unread rows together are as hot as rows that were read once. Without it, copies of
        # all other rows would seem better than an unread row.
        unread = np.count_nonzero(found == 0)
        found[found == 0] = np.count_nonzero(found == 1) / max(1, unread)
        return found

    def reads_of(self, ranks: int, owners: Owners | None, bias: LocalityBias | None = None) -> Reading:
        """owners: give each rank the seeds of its part."""
        sampler = Neighbor(self._args.fanouts, locality=bias)
        rng, found = np.random.default_rng([self._args.seed, 2]), []
        for rank in range(ranks):
            seeds = self._seeds if owners is None else self._seeds[owners[self._seeds] == rank]
            for step in range(self._args.steps):
                chosen = rng.choice(seeds, min(len(seeds), self._args.batch_size), replace=False)
                number = {"epoch": 2, "step": step * ranks + rank}
                rows = input_nodes(sampler.of_rank(rank, ranks), self._topology, chosen, **number)
                found.append((rank, rows))
        return found

    def pagraph(self, ranks: int) -> tuple[Owners, list[Ids]]:
        """The ranks of seeds, and by rank the nodes that its seeds reach, those with most out-edges first.

        A seed goes to the rank with the largest
        (seeds of the rank that it reaches) x (mean seeds - seeds of the rank) / (nodes of the rank).
        """
        count, sampler = self.graph.num_dst, Neighbor(self._args.fanouts, disjoint=True)
        owners = np.full(count, ranks, np.uint8)  # ranks: of nobody
        reached = np.zeros((ranks, count), np.bool_)
        seed_counts, mean = np.zeros(ranks, np.int64), len(self._seeds) / ranks
        for first in range(0, len(self._seeds), DEALT):
            seeds = self._seeds[first : first + DEALT]
            minibatch = sampler.sample(self._topology, torch.from_numpy(seeds))
            nodes, trees = minibatch.input_nodes.numpy(), minibatch.batch.numpy()
            met = np.bincount(trees * (ranks + 1) + owners[nodes], minlength=len(seeds) * (ranks + 1))
            room = mean - seed_counts
            scores = met.reshape(len(seeds), -1)[:, :ranks] * room / np.maximum(1, reached.sum(axis=1))
            chosen = (scores + 1e-9 * room).argmax(axis=1)  # without seeds that it reaches: the least busy
            owners[seeds] = chosen
            reached[chosen[trees], nodes] = True
            seed_counts += np.bincount(chosen, minlength=ranks)
        out_degrees = np.bincount(self.graph.indices, minlength=count)
        order = np.argsort(-out_degrees, kind="stable")
        return owners, [order[nodes[order]] for nodes in reached]

    def parts(self, ranks: int) -> dict[str, Owners]:
        parts = {method: self.owners(method, ranks) for method in ("hash", "community")}
        return parts | ({"METIS": metis(self.graph, ranks)} if self._args.metis else {})

    def capacities(self, ranks: int) -> tuple[int, int]:
        """Rows of a rank: if each rank holds the share of the rows, and if all of them together do."""
        return self.held, self.held // ranks


def count_links(name: str, case: Case, args: argparse.Namespace, figures: Figures) -> None:
    heat, host_cost = case.heat(), max(args.host_costs)
    for links, group in LINKS.items():
        ranks = 2 * group
        parts, minibatches = case.parts(ranks), case.reads_of(ranks, None)
        rows: list[Row] = []
        for capacity, far_cost in itertools.product(case.capacities(ranks), args.far_costs):
            costs = links_of(group, far_cost), host_cost
            placed = placements(heat, ranks, capacity, parts, costs, args.seed)
            ways = [(way, placement, minibatches) for way, placement in placed]
            best = ways[0][1]
            for within, reach in (("own", 0), ("own and fast", 1)):
                drawn = case.reads_of(ranks, None, LocalityBias(best.within(reach), BIAS))
                ways.append((f"placement, bias to {within}", best, drawn))
            sources = {"own": 0, "fast link": 1, "slow link": far_cost, "host": host_cost}
            rows += compare(ways, sources, {"held by a rank": capacity / len(heat), "slow cost": far_cost})
        figures.table(f"{name}, {links}: where rows come from", rows)
        add_ranges(f"{name}, {links}", rows, figures)


def count_costs(name: str, case: Case, args: argparse.Namespace, figures: Figures) -> None:
    rows: list[Row] = []
    heat = case.heat()
    for ranks in args.ranks:
        parts = case.parts(ranks)
        local = {way: case.reads_of(ranks, owners) for way, owners in parts.items() if way != "hash"}
        everyone = case.reads_of(ranks, None)
        of_seeds, reached = case.pagraph(ranks)
        local["PaGraph"] = case.reads_of(ranks, of_seeds)
        for capacity, host_cost in itertools.product(case.capacities(ranks), args.host_costs):
            ways = []
            for way, placed in placements(heat, ranks, capacity, parts, (1, host_cost), args.seed):
                ways.append((way, placed, everyone))
                if way in local:
                    ways.append((f"{way}, local seeds", placed, local[way]))
            held = [nodes[:capacity] for nodes in reached]
            for way, peer_cost in (("PaGraph", host_cost), ("PaGraph, peers", 1)):
                placed = Placement.of(held, len(heat), peer_cost=peer_cost, host_cost=host_cost)
                ways.append((way, placed, local["PaGraph"]))
            columns = {"P": ranks, "held by a rank": capacity / len(heat), "host cost": host_cost}
            rows += compare(ways, {"own": 0, "peer": 1, "host": host_cost}, columns)
    figures.table(f"{name}: where rows come from", rows)
    add_ranges(name, rows, figures)


def add_ranges(name: str, rows: Sequence[Row], figures: Figures) -> None:
    """The least and the greatest cost of each way over that of `placement`."""
    for way in dict.fromkeys(row["way"] for row in rows):
        if way != "placement":
            ratios = [row["cost over placement"] for row in rows if row["way"] == way]
            figures.add(f"{name}: {way} over placement, cost", (min(ratios), max(ratios)), "x")


def measure_preprocessing(name: str, case: Case, args: argparse.Namespace, figures: Figures) -> None:
    """Seconds of what must be computed before training: heat and placement, or parts."""
    rows: list[Row] = []
    heat, heat_s = timed(case.heat)
    for ranks in args.ranks:
        ways: dict[str, Callable[[], object]] = {
            "placement": partial(place, heat, [case.held] * ranks, 1, 10),
            "hash": partial(OwnersOf(case.graph), "hash", ranks),
            "community": partial(OwnersOf(case.graph), "community", ranks),
        }
        if args.metis:
            ways["METIS"] = partial(metis, case.graph, ranks)
        seconds = {way: timed(make)[1] for way, make in ways.items()}
        if args.metis:
            ratio = seconds["METIS"] / (heat_s + seconds["placement"])
            figures.add(f"{name}, {ranks} ranks: METIS over placement, time", ratio, "x")
        figures.add(f"{name}, {ranks} ranks: placement", seconds["placement"], "s", note="without heat")
        by_way = {f"{way}, s": taken for way, taken in seconds.items()}
        rows.append({"P": ranks, "heat by sampling, s": heat_s} | by_way)
    figures.table(f"{name}: seconds of preprocessing", rows)


def timed(make: Callable[[], T]) -> tuple[T, float]:
    begun = time.perf_counter()
    return make(), time.perf_counter() - begun


def placement(args: argparse.Namespace, figures: Figures) -> None:
    measure = count_links if args.links else measure_preprocessing if args.times else count_costs
    for name in args.graphs:
        measure(name, Case(name, args), args, figures)


if __name__ == "__main__":
    script = Script(__doc__, "seed")
    option = script.option
    option("graphs", list(GRAPHS), choices=GRAPHS)
    option("log2-nodes", 22, "size of the graphs", small=12)
    option("degree", 16)
    option("fanouts", [10, 10])
    option("batch-size", 256, "seeds per rank", small=8)
    option("ranks", [4, 8])
    option("percent", 20, "of the rows, on each rank or on all")
    option("host-costs", [2, 4, 10])
    option("far-costs", [2, 4, 8], "of a row over a slow link", small=[4])
    option("steps", 50, "steps to count", small=3)
    has_metis = any(importlib.util.find_spec(name) for name in ("pymetis", "dgl"))
    option("metis", has_metis, action=argparse.BooleanOptionalAction)
    kind = script.add_mutually_exclusive_group()
    kind.add_argument("--times", action="store_true", help="measure the preprocessing in place of the costs")
    kind.add_argument("--links", action="store_true", help="count costs over fast and slow links")
    script.run(placement)
