"""`gids bench sampling`: nodes and edges sampled per second. Reads no features.

The other questions, gids.scale and bench/ take from here samplers by name, and minibatches as gids.NodeLoader
samples them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gids import cuda
from gids.bench import text
from gids.bench.arguments import DEPENDENT, check_sampler, open_store
from gids.bench.report import Figure, Session
from gids.errors import FormatError
from gids.heat import choose_seeds
from gids.loader.node_loader import NodeLoader
from gids.loader.sampling import sample_steps
from gids.sampler import Labor, Ladies, Minibatch, Neighbor, RandomWalk, Sampler, Topology
from gids.sampler.device import PinnedGraph
from gids.sampler.minibatch import Block, PerType
from gids.store import FeatureStore, graphs_of

SETTINGS = {
    "sampler": "sampler",
    "batch": "batch",
    "device": "device",
    "threads": "threads",
    "at_once": "at once",
}
COLUMNS = [
    text.Column("M nodes/s", "nodes_per_s", text.millions, spread=True),
    text.Column("M edges/s", "edges_per_s", text.millions, spread=True),
    text.Column("minibatch", "seconds_per_batch", text.seconds),
    text.Column("nodes", "nodes_per_batch", text.count),
    text.Column("edges", "edges_per_batch", text.count),
]
_VERIFIED = 2  # minibatches


def measure(session: Session) -> None:
    """Fill the report. Settings: sampler, batch, device, threads and at_once."""
    args, report = session.args, session.report
    for name in args.sampler:
        check_sampler(name)  # before the dataset is opened
    if args.device != "cpu" and args.threads is not None:
        raise ValueError("--threads works only on the CPU: remove it, or --device")
    store = open_store(args)
    graphs: list[Any] = graphs_of(store)
    homogeneous = len(graphs) == 1 and len(store.node_types) == 1
    seeds = SeedOrder(choose_seeds(store, args.seeds), homogeneous=homogeneous, seed=args.seed)
    report.subject.update(
        dataset=str(store.path),
        nodes=sum(store.num_nodes(ntype) for ntype in store.node_types),
        edges=sum(store.num_edges(relation) for relation in store.relations),
        fanouts=list(args.fanouts),
        seeds=args.seeds,
    )
    threads = args.threads or sorted({1, torch.get_num_threads()})
    if args.device != "cpu":
        device, threads = cuda.open_device(args.device), [None]
        graphs = [PinnedGraph(graph, device) for graph in graphs]
        report.subject.update(device=device.name)
    topology = Topology(graphs[0] if homogeneous else graphs)
    plans = list(itertools.product(dict.fromkeys(args.sampler), args.batch_size, threads, args.bulk))
    session.progress.total(len(plans) * args.repeat)
    for _ in range(args.repeat):
        for name, batch_size, count, at_once in plans:
            sampler = make_sampler(name, args.fanouts, batch_size, threads=count)
            setting = {"sampler": name, "batch": f"{batch_size} seeds", "device": args.device}
            figure = report.figure(**setting, threads=count, at_once=at_once)
            batches = [seeds.take(step * batch_size, batch_size) for step in range(args.batches)]
            if not figure.values:
                for step, batch in enumerate(batches[:_VERIFIED]):
                    verify(sampler.sample(topology, batch, step=step))
            _measure_run(figure, sampler, topology, batches, at_once)
            session.progress.add(1)


def verify(minibatch: Minibatch) -> None:
    """Check that every edge is in the graph (except edges of walks), and that no edge or node repeats.

    Raises FormatError.
    """

    def nodes_of(ntype: str) -> np.ndarray[Any, Any]:
        nodes = minibatch.input_nodes
        return np.asarray(cuda.on_host(nodes[ntype] if isinstance(nodes, dict) else nodes).numpy())

    types: set[str] = set()
    for block in blocks_of(minibatch):
        source, _, destination = block.relation
        types |= {source, destination}
        graph = block.graph
        src, dst = (cuda.on_host(ends).numpy() for ends in block.coo())
        positions = cuda.on_host(block.positions).numpy()
        if not (positions >= 0).any():
            continue  # the edges of random walks are not in the graph
        targets = nodes_of(destination)[dst]
        same = np.array_equal(graph.indices[positions], nodes_of(source)[src])
        inside = ((graph.indptr[targets] <= positions) & (positions < graph.indptr[targets + 1])).all()
        once = len(np.unique(positions)) == len(positions)
        if not (same and inside and once):
            raise FormatError(
                f"a minibatch has an edge of {block.relation} twice, or an edge that is not in the graph"
            )
    for ntype in types:
        if len(np.unique(nodes_of(ntype))) != len(nodes_of(ntype)):
            raise FormatError(f"a minibatch has a node of {ntype!r} twice")


def _measure_run(
    figure: Figure, sampler: Sampler, topology: Topology, batches: list[Any], at_once: int
) -> None:
    nodes = edges = 0

    def sample(first: int) -> list[Minibatch]:
        batch = batches[first : first + at_once]
        return sample_steps(sampler, topology, batch, seed=0, epoch=0, first_step=first)

    sample(0)  # allocates memory, which the measured calls reuse
    begun = time.perf_counter()
    for first in range(0, len(batches), at_once):
        for minibatch in sample(first):
            node_count, edge_count = counts(minibatch)
            nodes, edges = nodes + node_count, edges + edge_count
    if topology.device is not None:
        topology.device.current_stream().synchronize()
    seconds = time.perf_counter() - begun
    figure.add(
        nodes_per_s=nodes / seconds,
        edges_per_s=edges / seconds,
        seconds_per_batch=seconds / len(batches),
        nodes_per_batch=nodes / len(batches),
        edges_per_batch=edges / len(batches),
    )


def make_sampler(
    name: str, fanouts: Sequence[int], batch_size: int, *, threads: int | None = None, kappa: float = 1
) -> Sampler:
    """Make the sampler of this name. A layer of ladies draws batch_size x fanout nodes.

    threads: None takes torch's number. kappa: as batch_dependency; 1: independent minibatches. Raises
    ValueError for an unknown name, and for a kappa with a sampler that takes none.
    """
    check_sampler(name)
    if kappa != 1 and name not in DEPENDENT:
        raise ValueError(f"sampler {name!r} takes no kappa (samplers that do: {', '.join(DEPENDENT)})")
    if name == "neighbor":
        return Neighbor(fanouts, batch_dependency=kappa, threads=threads)
    if name == "walk":
        return RandomWalk(fanouts, threads=threads)
    if name in ("ladies", "ladies-poisson"):
        sizes = [batch_size * fanout if fanout > 0 else fanout for fanout in fanouts]
        return Ladies(sizes, poisson=name == "ladies-poisson", threads=threads)
    importance = {"labor": 0, "labor-1": 1, "labor-star": -1}[name]
    return Labor(fanouts, importance_sampling=importance, batch_dependency=kappa, threads=threads)


class SeedOrder:
    """The seeds of choose_seeds in random order, over all types, epoch after epoch."""

    def __init__(self, seeds: Mapping[str, npt.NDArray[np.int64]], *, homogeneous: bool, seed: int) -> None:
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


def endless(
    store: FeatureStore, sampler: Sampler, *, seeds: str, batch_size: int, seed: int
) -> Iterator[Minibatch]:
    """Yield the minibatches of a NodeLoader with these arguments, epoch after epoch.

    Raises FormatError for a dataset without topology, ValueError, IndexError.
    """
    ids = choose_seeds(store, seeds)
    homogeneous = len(store.node_types) == 1 and len(store.relations) == 1
    loader = NodeLoader(
        store,
        torch.from_numpy(*ids.values()) if homogeneous else {t: torch.from_numpy(ids[t]) for t in ids},
        sampler,
        tables=[],
        batch_size=batch_size,
        shuffle=True,
        seed=seed,
        labels=False,
    )
    while True:
        yield from loader


def input_nodes(minibatch: Minibatch, ntype: str) -> torch.Tensor:
    """The nodes of a type whose features the minibatch reads: int64[n] on the CPU, distinct."""
    nodes = minibatch.input_nodes
    if isinstance(nodes, dict):
        nodes = nodes.get(ntype, torch.empty(0, dtype=torch.int64))
    return cuda.on_host(nodes)


def counts(minibatch: Minibatch) -> tuple[int, int]:
    """(input nodes, edges) of all types and layers."""
    nodes = minibatch.input_nodes
    node_count = sum(map(len, nodes.values())) if isinstance(nodes, dict) else len(nodes)
    return node_count, sum(block.num_edges for block in blocks_of(minibatch))


def blocks_of(minibatch: Minibatch) -> list[Block]:
    """The blocks of all layers and relations."""
    return [b for layer in minibatch.blocks for b in (layer.values() if isinstance(layer, dict) else [layer])]
