"""`gids bench sampling`: nodes and edges sampled per second. Reads no features."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids import cuda
from gids.bench import arguments, text
from gids.bench.arguments import check_sampler
from gids.bench.report import Figure, Report
from gids.bench.session import Session

if TYPE_CHECKING:
    from gids.sampler import Minibatch, Sampler, Topology
    from gids.store import FeatureStore

HELP = "nodes and edges sampled per second, by sampler, batch size, threads and device"
EPILOG = """\
Nodes are the unique input nodes of the minibatches: training reads their features. The edges of some
minibatches are compared with the graph before the measurement.
"""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    option = arguments.adder(parser)
    add("path", metavar="DATASET", type=Path, help="dataset, written by gids convert")
    arguments.add_allow_dir(parser)
    arguments.add_sampling(parser, several=True, several_samplers=True)
    option(
        "--threads",
        arguments.numbers(1),
        "threads of sampling on the CPU (default: 1, and torch's number)",
        metavar="N,…",
    )
    option("--device", arguments.device, "device that samples: cpu or cuda", "cpu", "NAME")
    option(
        "--bulk",
        arguments.numbers(1),
        "minibatches per call (default: 1; gids.NodeLoader uses two per thread)",
        [1],
        "N,…",
    )
    option("--batches", arguments.positive, "minibatches per run", 50, "N")


def measure(args: argparse.Namespace, session: Session, report: Report) -> None:
    """Fill the report. Settings: sampler, batch, device, threads and at_once."""
    import torch

    from gids import cuda
    from gids.bench.minibatches import SeedOrder, make_sampler
    from gids.heat import choose_seeds
    from gids.sampler import Topology
    from gids.sampler.device import PinnedGraph
    from gids.store import FeatureStore, graphs_of
    from gids.store.part import refuse_part

    for name in args.sampler:
        check_sampler(name)  # before the dataset is opened
    on_cpu = args.device == "cpu"
    if not on_cpu and args.threads is not None:
        raise ValueError("--threads works only on the CPU: remove it, or --device")
    store = FeatureStore(args.path, allow_dirs=args.allow_dir)
    refuse_part(store, "gids bench", "measure with the whole dataset")
    graphs = graphs_of(store)
    homogeneous = len(graphs) == 1 and len(store.node_types) == 1
    seeds = SeedOrder(choose_seeds(store, args.seeds), homogeneous=homogeneous, seed=args.seed)
    _describe(store, args, report)
    threads = args.threads or sorted({1, torch.get_num_threads()})
    if not on_cpu:
        device, threads = cuda.open_device(args.device), [None]
        pinned = [PinnedGraph(graph, device) for graph in graphs]
        topology = Topology(pinned[0] if homogeneous else pinned)
        report.subject.update(device=device.name)
    else:
        topology = Topology(graphs[0] if homogeneous else graphs)
    plans = list(itertools.product(dict.fromkeys(args.sampler), args.batch_size, threads, args.bulk))
    session.total(len(plans) * session.repeat)
    for _ in range(session.repeat):
        for name, batch_size, count, at_once in plans:
            sampler = make_sampler(name, args.fanouts, batch_size, threads=count)
            figure = report.figure(
                sampler=name,
                batch=f"{batch_size} seeds",
                device=args.device,
                threads=count,
                at_once=at_once,
            )
            batches = [seeds.take(step * batch_size, batch_size) for step in range(args.batches)]
            if not figure.values:
                for step in range(min(_VERIFIED, len(batches))):
                    verify(sampler.sample(topology, batches[step], step=step))
            done = _measure_run(figure, sampler, topology, batches, at_once, session)
            if done < len(batches):
                report.cut_short(f"runs that --seconds stopped have fewer than {len(batches)} minibatches")
            session.done()


def columns(_: Report) -> tuple[dict[str, str], list[text.Column]]:
    return SETTINGS, COLUMNS


def verify(minibatch: Minibatch) -> None:
    """Check that every edge is in the graph (except edges of walks), and that no edge or node repeats.

    Raises FormatError.
    """
    import numpy as np

    from gids.bench.minibatches import blocks_of
    from gids.errors import FormatError

    def nodes_of(ntype: str) -> np.ndarray[Any, Any]:
        nodes = minibatch.input_nodes
        ids = nodes[ntype] if isinstance(nodes, dict) else nodes
        return np.asarray(cuda.on_host(ids).numpy())

    for block in blocks_of(minibatch):
        source, _, destination = block.relation
        graph = block.graph
        src, dst = (cuda.on_host(ends).numpy() for ends in block.coo())
        positions = cuda.on_host(block.positions).numpy()
        if not (positions >= 0).any():
            continue  # the edges of random walks are not in the graph
        begin = graph.indptr[nodes_of(destination)[dst]]
        end = graph.indptr[nodes_of(destination)[dst] + 1]
        same = np.array_equal(graph.indices[positions], nodes_of(source)[src])
        inside = bool(((begin <= positions) & (positions < end)).all())
        once = len(np.unique(positions)) == len(positions)
        if not (same and inside and once):
            raise FormatError(
                f"a minibatch has an edge of {block.relation} twice, or an edge that is not in the graph"
            )
    for ntype in {end for block in blocks_of(minibatch) for end in (block.relation[0], block.relation[2])}:
        if len(np.unique(nodes_of(ntype))) != len(nodes_of(ntype)):
            raise FormatError(f"a minibatch has a node of {ntype!r} twice")


def _describe(store: FeatureStore, args: argparse.Namespace, report: Report) -> None:
    report.subject.update(
        dataset=str(store.path),
        nodes=sum(store.num_nodes(ntype) for ntype in store.node_types),
        edges=sum(store.num_edges(relation) for relation in store.relations),
        fanouts=list(args.fanouts),
        seeds=args.seeds,
    )


def _measure_run(
    figure: Figure,
    sampler: Sampler,
    topology: Topology,
    batches: list[Any],
    at_once: int,
    session: Session,
) -> int:
    """Measure one run. Returns its number of minibatches, which is smaller if the time is up."""
    from gids.bench.minibatches import counts
    from gids.loader.sampling import sample_steps

    device = topology.device
    nodes = edges = done = 0

    def sample(first: int) -> list[Minibatch]:
        batch = batches[first : first + at_once]
        return sample_steps(sampler, topology, batch, seed=0, epoch=0, first_step=first)

    sample(0)  # allocates memory, which the measured calls reuse
    begun = time.perf_counter()
    for first in range(0, len(batches), at_once):
        for minibatch in sample(first):
            node_count, edge_count = counts(minibatch)
            nodes, edges, done = nodes + node_count, edges + edge_count, done + 1
        if session.left_s() <= 0:
            break
    if device is not None:
        device.current_stream().synchronize()
    seconds = time.perf_counter() - begun
    figure.add(
        nodes_per_s=nodes / seconds,
        edges_per_s=edges / seconds,
        seconds_per_batch=seconds / done,
        nodes_per_batch=nodes / done,
        edges_per_batch=edges / done,
    )
    return done
