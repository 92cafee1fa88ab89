"""Curves by batch size: nodes and edges of each layer, rows and pages read, and pages that a cache misses.

Measured by sampling minibatches of a dataset in one process, at sizes that double, and interpolated between
them. The cache is static, with the pages that have the most heat, or LRU. Called by scale.py and ranks.py;
docs/papers.md has the formulas.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.bench.sampling import input_nodes, make_sampler
from gids.bench.trace import TouchedPages
from gids.cache.feature_cache import page_weights
from gids.heat import choose_seeds
from gids.sampler import Block, Minibatch, Topology
from gids.sampler.minibatch import PerType
from gids.store import FeatureStore, Table, graphs_of
from gids.store.names import Relation

_LEAST_SEEDS = 8192  # small minibatches differ: more of them are sampled
_MOST_MINIBATCHES = 64
_MOST_EDGES = 40_000_000  # of a minibatch, to bound memory

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Uses = dict[str, npt.NDArray[np.int64]]
"""By node type: how many sources have 0, 1, 2, ... edges of a layer."""

# The sizes of caches, as shares of a table's pages.
_STATIC = np.concatenate([[0.0], np.geomspace(1e-4, 1, 121)])
_LRU = np.concatenate([[0.0], np.geomspace(1 / 256, 1, 9)])
_LRU_MINIBATCHES = 16
_LRU_PAGES = 4_000_000  # fewer minibatches if they read more pages than this together
_LRU_LEAST = 4


@dataclass(frozen=True)
class Setting:
    """What is sampled, as a NodeLoader would.

    batch_size: seeds per rank. policy: "static" keeps the pages with the most heat, "lru" those used last.
    seconds: time for sampling, about; larger minibatches are extrapolated.
    """

    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1024
    sampler: str = "neighbor"
    kappa: float = 1
    seeds: str = "train"
    policy: str = "static"
    seed: int = 0
    seconds: float = 20.0
    threads: int | None = None


@dataclass(frozen=True)
class Users:
    """How many edges of a layer begin at each source: `sources` of them have `edges` edges. One node type."""

    edges: npt.NDArray[np.int64]
    sources: Floats

    def received(self, ranks: int) -> float:
        """Sources that ranks other than their owner need, counted once per rank, with owners at random.

        A rank needs a source unless each of its k edges ends at a node of another rank.
        """
        missed = (1 - 1 / ranks) ** self.edges
        return float(((ranks - 1) * (1 - missed) * self.sources).sum())


@dataclass(frozen=True)
class Point:
    """Means over minibatches of one size. Layers are counted from the seeds.

    nodes: of each layer, those that draw, and last the input nodes: float64[layers + 1]. edges:
    float64[layers]. input_nodes: by type. users: by layer, then by type. pages: distinct pages, by table.
    misses: by table.
    """

    batch_size: int
    minibatches: int
    nodes: Floats
    edges: Floats
    input_nodes: Mapping[str, float]
    users: Sequence[Mapping[str, Users]]
    pages: Mapping[str, float]
    misses: Mapping[str, Misses]


@dataclass(frozen=True)
class Curves:
    """The points by ascending batch size, and facts of the dataset.

    epoch_seeds: seeds of an epoch. tables: of nodes. relations: number of edges by relation.
    """

    setting: Setting
    points: Sequence[Point]
    epoch_seeds: int
    tables: Mapping[str, Table] = field(repr=False)
    node_counts: Mapping[str, int] = field(default_factory=dict)
    relations: Mapping[Relation, int] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """The largest batch size that was measured. Others are extrapolated, with the last slope."""
        return self.points[-1].batch_size

    def at(self, batch_size: float, value: Callable[[Point], float], most: float = math.inf) -> float:
        """value at this batch size, interpolated in log-log; at most `most`."""
        sizes = [p.batch_size for p in self.points]
        high = int(np.searchsorted(sizes, batch_size))
        if high < len(sizes) and sizes[high] == batch_size:
            return min(most, value(self.points[high]))
        if len(sizes) == 1:
            return min(most, value(self.points[0]) * batch_size / sizes[0])
        high = min(max(high, 1), len(sizes) - 1)
        (b0, v0), (b1, v1) = ((sizes[i], value(self.points[i])) for i in (high - 1, high))
        if v0 <= 0 or v1 <= 0:
            share = min(max((batch_size - b0) / (b1 - b0), 0), 1)
            return min(most, v0 + share * (v1 - v0))
        slope = math.log(v1 / v0) / math.log(b1 / b0)
        return float(min(most, v0 * (batch_size / b0) ** slope))


def measure(store: FeatureStore, setting: Setting, largest: int) -> Curves:
    """The curves of a dataset up to minibatches of `largest` seeds, or of all seeds if these are fewer.

    Raises FormatError for a dataset without
    topology, ValueError for a wrong setting.
    """
    graphs = graphs_of(store)
    homogeneous = len(graphs) == 1 and len(store.node_types) == 1
    topology = Topology(graphs[0] if homogeneous else graphs)
    seeds = SeedOrder(choose_seeds(store, setting.seeds), homogeneous=homogeneous, seed=setting.seed)
    if not len(seeds):
        raise ValueError(f"{store.name} has no nodes, so there are no seeds: give another dataset")
    tables = {t.name: t for t in store.tables.values() if isinstance(t.type, str)}
    ranks = {n: rank_of_pages(store, t) for n, t in tables.items()} if setting.policy == "static" else {}
    points: list[Point] = []
    begun, before = time.monotonic(), 0.0
    for size in _sizes(setting.batch_size, min(largest, len(seeds)), largest):
        left = setting.seconds - (time.monotonic() - begun)
        if len(points) > 1 and (2.5 * before > left or 2 * points[-1].edges.sum() > _MOST_EDGES):
            break
        start = time.monotonic()
        points.append(_point(setting, topology, tables, ranks, seeds, size))
        before = time.monotonic() - start
    return Curves(
        setting,
        points,
        len(seeds),
        tables,
        dict(zip(topology.node_types, topology.node_counts, strict=True)),
        {g.relation: g.num_edges for g in graphs},
    )


def _sizes(batch_size: int, most: int, largest: int) -> list[int]:
    """Sizes that double, from batch_size to `most`; smaller ones where ranks share fewer seeds than that."""
    first, sizes = batch_size, []
    while first > 1 and (first > most or (most < largest and first * (largest // batch_size) > most)):
        first = -(-first // 2)
    while first < most:
        sizes.append(first)
        first *= 2
    return [*sizes, most]


def _point(
    setting: Setting,
    topology: Topology,
    tables: Mapping[str, Table],
    ranks: Mapping[str, npt.NDArray[np.int64]],
    seeds: SeedOrder,
    size: int,
) -> Point:
    """Sample minibatches of one size. ranks: of the tables whose caches are static; see rank_of_pages()."""
    # Layers of LADIES grow with the minibatch.
    sampler = make_sampler(
        setting.sampler, setting.fanouts, size, threads=setting.threads, kappa=setting.kappa
    )
    caches: dict[str, Static | LeastRecent] = {
        name: Static(ranks[name]) if name in ranks else LeastRecent(table.page_count)
        for name, table in tables.items()
    }

    touched = {
        name: TouchedPages(table.page_count, table.rows_per_page, table.order)
        for name, table in tables.items()
    }

    def sample(number: int) -> tuple[list[int], list[int], dict[str, int], list[Uses], dict[str, int]]:
        """Of a minibatch: nodes and edges by layer, input nodes by type, layers_of()'s uses, pages by table.

        Gives its pages to the caches.
        """
        first = number * size
        minibatch = sampler.sample(
            topology, seeds.take(first, size), seed=setting.seed, epoch=first // len(seeds), step=number
        )
        rows = {t: len(input_nodes(minibatch, t)) for t in topology.node_types}
        page_counts = {}
        for name, table in tables.items():
            pages = touched[name].of(input_nodes(minibatch, str(table.type)).numpy())
            caches[name].add(pages)
            page_counts[name] = len(pages)
        nodes_by_layer, edges, uses = layers_of(minibatch)
        return [*nodes_by_layer, sum(rows.values())], edges, rows, uses, page_counts

    count = 1
    if size < len(seeds):
        count = min(_MOST_MINIBATCHES, -(-_LEAST_SEEDS // size), len(seeds) // size)
    nodes, edges, rows, uses, pages = zip(*(sample(number) for number in range(count)), strict=True)
    number = count
    while any(cache.needs_more for cache in caches.values()):
        sample(number)
        number += 1
    none = np.zeros(0, np.int64)
    return Point(
        size,
        count,
        np.mean(nodes, axis=0),
        np.mean(edges, axis=0),
        {t: float(np.mean([of_minibatch[t] for of_minibatch in rows])) for t in topology.node_types},
        [
            {t: _mean_users([histograms.get(t, none) for histograms in layer]) for t in topology.node_types}
            for layer in zip(*uses, strict=True)
        ],
        {name: float(np.mean([of_minibatch[name] for of_minibatch in pages])) for name in tables},
        {name: cache.misses() for name, cache in caches.items()},
    )


class SeedOrder:
    """Seeds by node type in random order, over all types, epoch after epoch."""

    def __init__(self, seeds: Mapping[str, Ids], *, homogeneous: bool, seed: int) -> None:
        self._homogeneous, self._names = homogeneous, list(seeds)
        types = np.repeat(np.arange(len(seeds)), [len(ids) for ids in seeds.values()])
        order = np.random.default_rng(seed).permutation(len(types))
        self._ids, self._types = np.concatenate(list(seeds.values()))[order], types[order]

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, first: int, count: int) -> PerType:
        """`count` seeds from a position of the endless order on; all seeds, if there are fewer."""
        chosen = np.arange(first, first + min(count, len(self))) % len(self)
        ids, types = self._ids[chosen], self._types[chosen]
        if self._homogeneous:
            return torch.from_numpy(ids)
        return {name: torch.from_numpy(ids[types == i]) for i, name in enumerate(self._names)}


def layers_of(minibatch: Minibatch) -> tuple[list[int], list[int], list[Uses]]:
    """By layer, from the seeds on: nodes that draw, edges, and histograms of edges per source."""
    nodes: list[int] = []
    edges: list[int] = []
    uses: list[Uses] = []
    for layer in minibatch.blocks[::-1]:
        blocks = [layer] if isinstance(layer, Block) else list(layer.values())
        destinations = {b.relation[2]: b.num_dst for b in blocks}
        nodes.append(sum(destinations.values()))
        edges.append(sum(b.num_edges for b in blocks))
        counted: Uses = {}  # edges of each source, by type
        for block in blocks:
            of_block = np.bincount(block.indices.numpy(), minlength=block.num_src)
            counted[block.relation[0]] = counted.get(block.relation[0], 0) + of_block
        uses.append({t: np.bincount(of_sources[of_sources > 0]) for t, of_sources in counted.items()})
    return nodes, edges, uses


def _mean_users(histograms: Sequence[npt.NDArray[np.int64]]) -> Users:
    total = np.zeros(max(map(len, histograms)), np.float64)
    for histogram in histograms:
        total[: len(histogram)] += histogram
    edges = np.flatnonzero(total)
    return Users(edges, total[edges] / len(histograms))


@dataclass(frozen=True)
class Misses:
    """pages: of a minibatch, missed by a cache that holds a share of the table: by ascending share."""

    shares: Floats
    pages: Floats

    def at(self, share: float) -> float:
        return float(np.interp(share, self.shares, self.pages))


class Static:
    """A cache that holds the pages whose rows have the most heat: the best that is stored, or out-degrees."""

    needs_more = False

    def __init__(self, rank: Ids) -> None:
        """rank: of rank_of_pages()."""
        self._rank = rank
        self._total = np.zeros(len(_STATIC), np.float64)
        self._minibatches = 0

    def add(self, pages: Ids) -> None:
        ranks = np.sort(self._rank[pages])
        lines = np.round(_STATIC * len(self._rank)).astype(np.int64)
        self._total += len(ranks) - np.searchsorted(ranks, lines)
        self._minibatches += 1

    def misses(self) -> Misses:
        return Misses(_STATIC, self._total / self._minibatches)


class LeastRecent:
    """Caches of several sizes that keep the pages used last. The second half of the minibatches counts."""

    def __init__(self, page_count: int) -> None:
        lines = np.maximum(1, np.round(_LRU[1:] * page_count)).astype(np.int64)
        self._caches = [_core.Planner(page_count, int(n), "lru") for n in lines]
        self._missed: list[list[int]] = []
        self._asked: list[int] = []

    def add(self, pages: Ids) -> None:
        step, missed = len(self._missed), []
        for cache in self._caches:
            if step:
                cache.retire(step - 1)
            cache.enter(step, pages)
            missed.append(len(pages) - cache.plan(step)[0])
        self._missed.append(missed)
        self._asked.append(len(pages))

    @property
    def needs_more(self) -> bool:
        """Whether more minibatches must be added: the first ones only fill the caches."""
        done = len(self._missed)
        return done < _LRU_LEAST or (done < _LRU_MINIBATCHES and sum(self._asked) < _LRU_PAGES)

    def misses(self) -> Misses:
        warm = len(self._missed) // 2
        missed = np.mean(self._missed[warm:], axis=0)
        return Misses(_LRU, np.concatenate([[np.mean(self._asked[warm:])], missed]))


def rank_of_pages(store: FeatureStore, table: Table) -> Ids:
    """The place of each page by decreasing heat: int64[page_count]."""
    assert isinstance(table.type, str)
    weights: npt.NDArray[np.floating] = np.zeros(table.page_count)
    if methods := store.heat_methods(table.type):
        weights = page_weights(store.heat(methods[0], table.type), table.rows_per_page, table.order)
    rank = np.empty(table.page_count, np.int64)
    rank[np.argsort(-weights, kind="stable")] = np.arange(table.page_count)
    return rank
