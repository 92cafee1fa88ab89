"""What ranks do in tests. In a module of its own: the processes of ranks import it."""

from __future__ import annotations

import functools
import importlib
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import random_in_edges, same_bits
from open_options import tuned

import gids.distributed
from gids.distributed.sampling import GroupSampling, whole_graphs
from gids.loader.ranks import Group, Ranks
from gids.sampler import Block, LocalityBias, Minibatch, Neighbor, Sampler, Topology
from gids.store import Graph
from gids.store.names import Relation
from gids.write import DatasetWriter

CITED: list[Relation] = [
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "rev_writes", "author"),
]
COUNTS = {"paper": 900, "author": 300}


def write_cited(path: Path, relations: list[Relation], seed: int = 1) -> Path:
    """A dataset of these relations of CITED, with features and labels."""
    generator = torch.Generator().manual_seed(seed)
    with DatasetWriter(path, page_bytes=512) as writer:
        for ntype in sorted({t for r in relations for t in r[::2]}):
            rows = torch.randn(COUNTS[ntype], 24, generator=generator)
            writer.write_table("node", ntype, "feat", rows)
            writer.write_labels(ntype, torch.randint(0, 5, (COUNTS[ntype],), generator=generator))
        for i, relation in enumerate(relations):
            num_src, num_dst = COUNTS[relation[0]], COUNTS[relation[2]]
            writer.write_graph(relation, *random_in_edges(num_src, num_dst, i), num_src=num_src)
    return path


@contextmanager
def logged() -> Iterator[list[str]]:
    """What gids logs meanwhile."""
    lines, handler = list[str](), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gids").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("gids").removeHandler(handler)


def differences(mine: Any, theirs: Any, where: str = "minibatch") -> list[str]:
    """Where two minibatches, or parts of them, are not equal bit for bit."""
    if hasattr(theirs, "to_dict"):  # of PyG
        return differences(mine.to_dict(), theirs.to_dict(), where)
    if isinstance(theirs, torch.Tensor):
        equal = isinstance(mine, torch.Tensor) and same_bits(mine, theirs)
        return [] if equal else [f"{where}: {mine} {theirs}"]
    if isinstance(theirs, Mapping):
        if not isinstance(mine, Mapping) or list(mine) != list(theirs):
            return [f"{where}: {list(mine)} {list(theirs)}"]
        return [
            d for key, value in theirs.items() for d in differences(mine[key], value, f"{where}[{key!r}]")
        ]
    if isinstance(theirs, list):
        if len(mine) != len(theirs):
            return [f"{where}: {len(mine)} {len(theirs)}"]
        return [d for i, value in enumerate(theirs) for d in differences(mine[i], value, f"{where}[{i}]")]
    names: tuple[str, ...] = ()
    if isinstance(theirs, gids.sampler.Block):
        names = ("relation", "indptr", "indices", "edge_ids", "weights", "num_src")
    elif hasattr(theirs, "per_hop"):  # of gids.pyg, which not every process imports
        names = ("index", "ids", "per_hop")
    elif isinstance(theirs, Minibatch):
        names = ("seeds", "input_nodes", "blocks", "epoch", "step", "features", "labels", "batch", "times")
        names += ("edges", "nodes_per_hop") if hasattr(theirs, "nodes_per_hop") else ()
    if names:
        return [d for n in names for d in differences(getattr(mine, n), getattr(theirs, n), f"{where}.{n}")]
    return [] if mine == theirs else [f"{where}: {mine!r} {theirs!r}"]


def check_same(mine: Any, theirs: Any) -> None:
    found = differences(mine, theirs)
    assert not found, found[:5]


def compare(
    dataset: Path,
    whole: Path,
    kind: str,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    epochs: int = 2,
    look: Callable[[Any, int], None] = lambda _epoch, _step: None,
) -> dict[str, Any]:
    """Compare each rank's minibatches with those that one process reads from the whole dataset.

    kind: a loader of gids, or "pyg." and one of gids.pyg. look: called with each epoch of the ranks and the
    number of minibatches returned.
    """
    module, _, name = kind.rpartition(".")
    make = getattr(importlib.import_module(f"gids.{module}" if module else "gids"), name)
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    arguments = {"seed": 0} | dict(arguments)
    plain = {key: value for key, value in arguments.items() if key != "cooperative"}
    cooperative = bool(arguments.get("cooperative"))
    if cooperative:
        plain["batch_size"] *= place["world_size"]
        place = {"rank": 0, "world_size": 1}
    shared = gids.distributed.open(dataset, **tuned({"memory": "64MB", **options}))
    with shared, gids.open(whole, memory="64MB", reads="random") as alone:
        with make(shared, **arguments) as mine, make(alone, **plain, **place) as theirs:
            assert len(mine) == len(theirs)
            for _ in range(epochs):
                epoch = iter(mine)
                for count, (a, b) in enumerate(zip(epoch, theirs, strict=True), 1):
                    if cooperative:
                        check_cooperative(a, b, alone)
                        a.exchange(0, a.input_nodes)
                    else:
                        check_same(a, b)
                    look(epoch, count)
            if not module and not cooperative:
                theirs.load_state_dict(mine.state_dict())
                mine.load_state_dict(theirs.state_dict())
            return {"steps": len(mine), "stats": mine.stats(), "memory": shared.memory}


def part_of(graph: Graph, owners: np.ndarray, index: int) -> Graph:
    """The in-edges of the nodes that a part owns, the obvious way."""
    held = np.repeat(owners == index, np.diff(graph.indptr))
    degrees = np.where(owners == index, np.diff(graph.indptr), 0)
    ids = np.flatnonzero(held) if graph.edge_ids is None else graph.edge_ids[held]
    return replace(
        graph,
        indptr=np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64),
        indices=graph.indices[held],
        edge_ids=ids,
        edge_times=None if graph.edge_times is None else graph.edge_times[held],
    )


def sample_together(
    graphs: list[Graph],
    owners: Mapping[str, np.ndarray],
    sampler: Sampler,
    seeds: Any,
    weights_of_ids: Sampler | None,
) -> dict[str, int]:
    """Sample three steps with the edges divided among the ranks, and from the whole graphs.

    seeds: by rank and step. weights_of_ids: the sampler of the divided graph, if its weights are by edge id.
    """
    homogeneous = len(owners) == 1
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Group()
    local = [part_of(g, owners[g.relation[2]], rank) for g in graphs]
    wholes = whole_graphs(local, {g.relation: g.num_edges for g in graphs})
    whole, topology = (Topology(g[0] if homogeneous else g) for g in (wholes, local))
    owned = [owners[t].astype(np.uint8).__getitem__ for t in topology.node_types]
    counts = dict.fromkeys(("nodes asked", "edges sent", "bytes sent"), 0)
    sampling = GroupSampling(group, Ranks(rank, size), whole, owned, local=topology, counts=counts)
    mine = sampling.sample_steps(weights_of_ids or sampler, whole, seeds[rank], seed=5, epoch=2, first_step=7)
    for i, of_step in enumerate(seeds[rank]):
        theirs = sampler.sample(graphs[0] if homogeneous else graphs, of_step, seed=5, epoch=2, step=7 + i)
        check_same(mine[i], theirs)
    assert size == 1 or counts["edges sent"] > 0
    group.close()
    return counts


def by_type(ids: Any) -> dict[str, torch.Tensor]:
    return ids if isinstance(ids, dict) else {"paper": ids}


def edges_of(
    minibatch: Minibatch, sources: list[dict[str, torch.Tensor]] | None = None
) -> list[Counter[Any]]:
    """By layer: (relation, source, destination, id, weight) of every edge.

    sources: node ids, by layer and type.
    """
    layers = []
    for i, layer in enumerate(minibatch.blocks):
        found: Counter[Any] = Counter()
        nodes = sources[i] if sources is not None else by_type(minibatch.input_nodes)
        for block in layer.values() if isinstance(layer, dict) else [layer]:
            src, dst = block.coo()
            weights = block.weights if block.weights is not None else torch.ones(block.num_edges)
            ends = nodes[block.relation[0]][src], nodes[block.relation[2]][dst]
            columns = (*ends, block.edge_ids, weights)
            found.update((block.relation, *e) for e in zip(*(c.tolist() for c in columns), strict=True))
        layers.append(found)
    return layers


def cooperate(dataset: Path, sampler: Sampler, seeds: Any, batch_size: int) -> None:
    """Compare the parts of cooperative minibatches, put together, with the minibatches of one process."""
    size = dist.get_world_size()
    options = {"batch_size": batch_size, "shuffle": True}
    source = gids.distributed.open(dataset, memory="64MB", bulk=3)
    whole = gids.open(dataset, memory="64MB")
    with source, whole:
        mine = gids.NodeLoader(source, seeds, sampler, cooperative=True, **{"seed": 0} | options)
        alone = gids.NodeLoader(
            whole,
            seeds,
            sampler,
            rank=0,
            world_size=1,
            batch_size=batch_size * size,
            shuffle=True,
            seed=0,
        )
        assert len(mine) == len(alone)
        with pytest.raises(ValueError, match="loader with cooperative = True"):
            alone.load_state_dict(mine.state_dict())
        for _ in range(2):
            for part, expected in zip(mine, alone, strict=True):
                check_cooperative(part, expected, whole)
                parts: list[Any] = [None] * size
                sources = []
                for layer in range(len(part.blocks)):
                    owned = zip(by_type(part.input_nodes).items(), part.exchanges[layer], strict=True)
                    rows = {t: ids[: plan.rows].double()[:, None] for (t, ids), plan in owned}
                    came = part.exchange(layer, rows if isinstance(part.input_nodes, dict) else rows["paper"])
                    sources.append({t: r[:, 0].long() for t, r in by_type(came).items()})
                dist.all_gather_object(
                    parts, (edges_of(part, sources), by_type(part.seeds), by_type(part.input_nodes))
                )
                for layer, edges in enumerate(edges_of(expected)):
                    assert sum((p[0][layer] for p in parts), Counter()) == edges
                for ntype, ids in by_type(expected.seeds).items():
                    found = torch.cat([p[1][ntype] for p in parts if ntype in p[1]])
                    assert torch.equal(found.sort().values, ids.sort().values)
                for ntype, ids in by_type(expected.input_nodes).items():
                    found = torch.cat([p[2][ntype] for p in parts])
                    assert torch.equal(found.sort().values, ids.sort().values)
                assert part.seed_count == sum(len(i) for i in by_type(expected.seeds).values())


def read_with_placed_pages(dataset: Path, cache: str) -> tuple[int, int, int]:
    """With owners="heat": (pages of which this rank holds a copy, rows of them that it read, those of these
    rows that are in its lines after two epochs)."""
    source = gids.distributed.open(
        dataset, owners="heat", window=2, memory="8MB", reads="random", tuning=gids.Tuning(cache=cache)
    )
    with source:
        table, seeds = source.store.table("paper.feat"), torch.arange(0, table_rows := 1500, 2)
        loader = gids.NodeLoader(source, seeds, [4, 4], tables=[table], batch_size=10, shuffle=True, seed=0)
        features, wanted = loader.feature_loader, torch.zeros(table_rows, dtype=torch.bool)

        for _ in range(2):
            for minibatch in loader:
                wanted[minibatch.input_nodes] = True
                assert same_bits(minibatch.features[table.name], table.read_rows(minibatch.input_nodes))
        owners = source.owners_of(table)
        of_pages = torch.from_numpy(owners.held)[torch.arange(table_rows) // table.rows_per_page]
        cached = features.cached_rows(table.name)
        read = of_pages & wanted
        return int(owners.held.sum()), int(read.sum()), int((read & cached).sum())


def read_near(dataset: Path, options: Mapping[str, Any], factor: float) -> list[torch.Tensor]:
    """Read an epoch whose samplers favour the rows that each rank has. Returns these nodes, by rank.

    Rows that are asked of other ranks are counted, and are those of other nodes.
    """
    rank = dist.get_rank()
    with gids.distributed.open(dataset, **tuned({"memory": "64MB", **options})) as source:
        table = source.store.table("paper.feat")
        own = source.own_nodes(table.name)
        sampler = Neighbor([4, 4], locality=LocalityBias(own, factor))
        loader = gids.NodeLoader(
            source,
            torch.arange(0, table.id_count, 4),
            sampler,
            tables=[table],
            batch_size=20,
            shuffle=True,
            seed=0,
        )
        with loader:
            nodes = torch.cat([minibatch.input_nodes for minibatch in loader])  # type: ignore[misc]
            assert loader.stats()["group"]["rows asked"] == int((~own[rank][nodes]).sum())
        return [*own, own[rank][nodes]]


def cooperate_near(dataset: Path, masks: list[torch.Tensor]) -> None:
    """Cooperative minibatches: the rank that owns a seed draws its edges by its own mask."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sampler = Neighbor([3, 4], locality=LocalityBias(masks, 6, weights=True))
    with gids.distributed.open(dataset, memory="64MB", reads="random") as source:
        loader = gids.NodeLoader(
            source,
            torch.arange(0, 900, 3),
            sampler,
            batch_size=20,
            tables=["paper.feat"],
            cooperative=True,
            seed=0,
        )
        with loader:
            for m in loader:
                mine = sampler.of_rank(rank, size)
                numbers = {"seed": 0, "epoch": m.epoch, "step": m.step}
                alone = mine.sample(source.graphs()[0], m.seeds, **numbers).blocks[-1]
                assert torch.equal(m.blocks[-1].edge_ids, alone.edge_ids)
                assert same_bits(m.blocks[-1].weights, alone.weights)


def read_alone(dataset: Path) -> list[str]:
    """The errors of what reads or samples by itself with a source whose ranks read together."""
    errors = []
    calls: list[Callable[[gids.distributed.GroupSource], Any]] = [
        lambda source: gids.FeatureLoader(source, ["paper.feat"]),
        lambda source: gids.NodeLoader(source, torch.arange(9), [2], rank=0, world_size=1, seed=0),
        pickle.dumps,
        lambda source: gids.NodeLoader(source, torch.arange(9), [2], device="cuda", cooperative=True),
    ]
    with gids.distributed.open(dataset) as source:
        for call in calls:
            with pytest.raises((ValueError, TypeError)) as raised:
                call(source)
            errors.append(str(raised.value))
    return errors


def check_cooperative(part: Minibatch, expected: Minibatch, whole: gids.Source) -> None:
    assert (part.epoch, part.step) == (expected.epoch, expected.step)
    for name, rows in part.features.items():
        ids = by_type(part.input_nodes)[name.partition(".")[0]]
        assert same_bits(rows, whole.store.tables[name].read_rows(ids))
    for ntype, labels in by_type(part.labels if part.labels is not None else {}).items():
        assert torch.equal(labels, whole.store.labels[ntype][by_type(part.seeds)[ntype]])


def mean_of(block: Block, h: torch.Tensor) -> torch.Tensor:
    """Of each destination, the weighted mean of its sources' rows."""
    src, dst = block.coo()
    weights = block.weights if block.weights is not None else torch.ones(block.num_edges)
    total = h.new_zeros(block.num_dst, h.shape[1]).index_add(0, dst, h[src] * weights[:, None])
    norm = h.new_zeros(block.num_dst).index_add(0, dst, weights)
    return total / norm.clamp(min=1)[:, None]


class Sage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        widths = [(24, 16), (16, 5)]
        self.own = torch.nn.ModuleList(torch.nn.Linear(*w) for w in widths)
        self.neighbors = torch.nn.ModuleList(torch.nn.Linear(*w, bias=False) for w in widths)

    def forward(self, minibatch: Any) -> torch.Tensor:
        h = minibatch.features["paper.feat"]
        for i, block in enumerate(minibatch.blocks):
            h = minibatch.exchange(i, h) if hasattr(minibatch, "exchange") else h
            h = self.own[i](h[: block.num_dst]) + self.neighbors[i](mean_of(block, h))
            h = h.relu() if i == 0 else h
        return h


def count_epoch(
    dataset: Path, seeds: torch.Tensor, sampler: Sampler, batch_size: int, mode: str
) -> dict[str, float]:
    """What this rank works on, reads and gets in a step of an epoch, on average."""
    rank, size = dist.get_rank(), dist.get_world_size()
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True}
    if mode == "independent":
        source = gids.open(dataset, memory="64MB")
        options |= {"rank": rank, "world_size": size}
    else:
        source = gids.distributed.open(dataset, memory="64MB")
        options["cooperative"] = mode == "cooperative"
    counts = dict.fromkeys(("seeds", "nodes", "edges", "input", "received", "received inputs"), 0.0)
    with source, gids.NodeLoader(source, seeds, sampler, **{"seed": 0} | options) as loader:
        for minibatch in loader:
            counts["seeds"] += len(minibatch.seeds)
            counts["nodes"] += sum(b.num_dst for b in minibatch.blocks) + len(minibatch.input_nodes)
            counts["edges"] += sum(b.num_edges for b in minibatch.blocks)
            counts["input"] += len(minibatch.input_nodes)
            for layer, plans in enumerate(getattr(minibatch, "exchanges", [])):
                came = sum(sum(p.expected) - p.expected[rank] for p in plans)
                counts["received"] += came
                counts["received inputs"] += came if layer == 0 else 0
        stats = loader.stats()
        counts["pages"] = stats["pages"]
        counts |= stats.get("group", {})
        sampled = source.sampling_counts if isinstance(source, gids.distributed.GroupSource) else {}
        counts |= {f"sampling: {name}": value for name, value in sampled.items()}
        return {name: value / len(loader) for name, value in counts.items()}


def share_seeds(dataset: Path, seeds: torch.Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """What each step gives this rank, which loaders of gids.open() find out by themselves. "drawn": their
    random seeds."""
    from gids import pyg

    torch.manual_seed(dist.get_rank())

    def steps(loader: Any, look: Callable[[Any], Any]) -> list[Any]:
        found = []
        with loader:
            for minibatch in loader:
                found.append(look(minibatch))
                dist.all_reduce(torch.zeros(1))  # as gradients: unequal steps would hang
        return found

    if dist.get_rank() == 0:  # the others make none
        with gids.NodeLoader(dataset, seeds, [3, 4], rank=0, world_size=1, **options) as alone:
            assert sum(len(minibatch.seeds) for minibatch in alone) == len(seeds)
    edges = gids.EdgeLoader(dataset, torch.stack([seeds, seeds]), [3, 4], **options)
    of_pyg = pyg.NeighborLoader(dataset, [4, 3], seeds, **options)
    nodes = gids.NodeLoader(dataset, seeds, [3, 4], **options)
    return {
        "drawn": [loader.state_dict()["made_with"]["seed"] for loader in (nodes, edges, of_pyg)],
        "nodes": steps(nodes, lambda m: m.seeds.tolist()),
        "pairs": steps(edges, lambda m: m.seeds[m.pairs].tolist()),
        "pyg": steps(of_pyg, lambda data: (data.input_id, data.n_id[: data.batch_size])),
    }


class Marking(Neighbor):
    """A user's sampler, with work of its own in sample()."""

    @functools.wraps(Neighbor.sample)
    def sample(self, *args: Any, **numbers: Any) -> Minibatch:
        sampled = super().sample(*args, **numbers)
        sampled.marked = True  # type: ignore[attr-defined]
        return sampled


class Failing:
    """Samples by another sampler. Rank 1 fails after some minibatches."""

    repeatable = False

    def __init__(self, sampler: Any, after: int) -> None:
        self.sampler, self.after, self.calls = sampler, after, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def sample(self, *args: Any, **numbers: Any) -> Minibatch:
        sampled: Minibatch = self.sampler.sample(*args, **numbers)
        self.calls += 1
        if dist.get_rank() == 1 and self.calls > self.after:
            raise ArithmeticError("no such number")
        return sampled


def fail_while_sampling(dataset: Path, after: int) -> tuple[int, str]:
    """Rank 1 fails while it samples. The number of minibatches, and the error."""
    from gids import pyg

    count = 0
    with (
        gids.distributed.open(dataset, memory="64MB") as shared,
        pyg.NeighborLoader(
            shared,
            [3, 2],
            input_nodes=torch.arange(120),
            batch_size=4,
            seed=0,
        ) as loader,
    ):
        loader.sampler = Failing(loader.sampler, after)
        try:
            for _ in loader:
                count += 1
        except Exception as error:
            return count, f"{type(error).__name__}: {error}"
    return count, "no error"
