"""`gids bench sampling`: how many nodes and edges a second are sampled, by sampler, threads and device.

Topology and minibatches alone: no features are read.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.bench import arguments, text
from gids.bench.report import Figure, Report, Setting
from gids.bench.session import Session

if TYPE_CHECKING:
    import torch

    from gids.sampler import Minibatch, Sampler, Topology
    from gids.store import FeatureStore

HELP = "how many nodes and edges a second are sampled, by sampler, batch, threads and device"
EPILOG = """\
Nodes are the unique input nodes of minibatches, whose features would be read. Before a sampler is timed, the
edges of a few of its minibatches are looked up in the graph.
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
    add("path", metavar="DATASET", type=Path)
    add(
        "--allow-dir", action="append", default=[], metavar="DIR", help="where shards may lie outside DATASET"
    )
    arguments.add_sampling(parser, several=True, several_samplers=True)
    add(
        "--threads",
        type=arguments.numbers(1),
        metavar="N,…",
        help="on the CPU (default: 1, and torch's number)",
    )
    add("--device", type=arguments.device, default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")
    add(
        "--place",
        choices=["auto", "host", "indptr", "device"],
        help="of the topology on CUDA (default: auto)",
    )
    add(
        "--bulk",
        type=arguments.numbers(1),
        default=[1],
        metavar="N,…",
        help="minibatches that one call samples (default: 1; gids.NodeLoader: two for each thread)",
    )
    add("--batches", type=arguments.positive, default=50, metavar="N", help="of a run (default: 50)")


def measure(args: argparse.Namespace, session: Session, report: Report) -> None:
    """Fill the report; the figures' settings are sampler, batch, device, threads and at_once."""
    import torch

    from gids import cuda
    from gids.bench.minibatches import check_sampler, make_sampler, seeds_of
    from gids.sampler import Topology
    from gids.sampler.device import PinnedGraph
    from gids.store import FeatureStore, graphs_of

    for name in args.sampler:
        check_sampler(name)  # an unknown one is said at once
    on_cpu = args.device == "cpu"
    if on_cpu and args.place is not None:
        raise ValueError("--place says where the topology of --device cuda lies; on the CPU leave it out")
    if not on_cpu and args.threads is not None:
        raise ValueError("--threads is of sampling on the CPU: leave it out, or --device")
    store = FeatureStore(args.path, allow_dirs=args.allow_dir)
    graphs = graphs_of(store)
    seeds = seeds_of(store, args.seeds)
    _describe(store, args, report)
    threads = args.threads or sorted({1, torch.get_num_threads()})
    if not on_cpu:
        device, place = cuda.open_device(args.device), args.place or "auto"
        pinned = [PinnedGraph(graph, device, topology_on=place) for graph in graphs]
        topology = Topology(pinned[0] if isinstance(seeds, torch.Tensor) else pinned)
        report.subject.update(device=device.name, place=place)
        threads = [None]
    else:
        topology = Topology(graphs[0] if isinstance(seeds, torch.Tensor) else graphs)
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
            batches = list(itertools.islice(_seed_batches(seeds, batch_size, args.seed), args.batches))
            if not figure.values:
                for step in range(min(_VERIFIED, len(batches))):
                    verify(sampler.sample(topology, batches[step], step=step))
            done = _measure_run(figure, sampler, topology, batches, at_once, session)
            if done < len(batches):
                report.cut_short(f"runs that --seconds cut short have fewer than {len(batches)} minibatches")
            session.done()


def columns(_: Report) -> tuple[dict[str, str], list[text.Column]]:
    return SETTINGS, COLUMNS


def plot(report: Report, path: Path) -> None:
    from gids.bench.plot import save_plot

    runs = [f for f in report.figures if f.values]
    save_plot(path, lambda figure: _draw(runs, figure), width=7.2, height=1.1 + 0.28 * len(runs))


def verify(minibatch: Minibatch) -> None:
    """Every edge is the graph's, but of walks; none comes twice, no node does. Raises FormatError."""
    import numpy as np

    from gids.bench.minibatches import blocks_of
    from gids.errors import FormatError

    def nodes_of(ntype: str) -> np.ndarray[Any, Any]:
        nodes = minibatch.input_nodes
        found = nodes[ntype] if isinstance(nodes, dict) else nodes
        return np.asarray(found.cpu().numpy())

    for block in blocks_of(minibatch):
        source, _, destination = block.relation
        graph = block.graph
        src, dst = (ends.cpu().numpy() for ends in block.coo())
        positions = block.positions.cpu().numpy()
        if not (positions >= 0).any():
            continue  # walked: no edge of the graph stands behind it
        begin = graph.indptr[nodes_of(destination)[dst]]
        end = graph.indptr[nodes_of(destination)[dst] + 1]
        same = np.array_equal(graph.indices[positions], nodes_of(source)[src])
        inside = bool(((begin <= positions) & (positions < end)).all())
        once = len(np.unique(positions)) == len(positions)
        if not (same and inside and once):
            raise FormatError(
                f"a minibatch has edges of {block.relation} that the graph has not, or one twice"
            )
    for ntype in {end for block in blocks_of(minibatch) for end in (block.relation[0], block.relation[2])}:
        if len(np.unique(nodes_of(ntype))) != len(nodes_of(ntype)):
            raise FormatError(f"a minibatch names a node of {ntype!r} twice")


def _describe(store: FeatureStore, args: argparse.Namespace, report: Report) -> None:
    report.subject.update(
        dataset=str(store.path),
        nodes=sum(store.num_nodes(ntype) for ntype in store.node_types),
        edges=sum(store.num_edges(relation) for relation in store.relations),
        fanouts=list(args.fanouts),
        seeds=args.seeds,
    )


def _seed_batches(seeds: Any, batch_size: int, seed: int) -> Iterator[Any]:
    """Random seeds without end; of a dictionary's types, each by its share."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def draw(ids: torch.Tensor, count: int) -> torch.Tensor:
        return ids[torch.randperm(len(ids), generator=generator)[:count]]

    while True:
        if isinstance(seeds, torch.Tensor):
            yield draw(seeds, batch_size)
        else:
            total = sum(map(len, seeds.values()))
            yield {t: draw(ids, -(-batch_size * len(ids) // total)) for t, ids in seeds.items()}


def _measure_run(
    figure: Figure,
    sampler: Sampler,
    topology: Topology,
    batches: list[Any],
    at_once: int,
    session: Session,
) -> int:
    """Add the figures of one run. Returns its minibatches: fewer where the time is up."""
    from gids.bench.minibatches import counts
    from gids.loader.sampling import sample_steps

    device = topology.device
    nodes = edges = done = 0
    sample_steps(
        sampler, topology, batches[:at_once], seed=0, epoch=0, first_step=0
    )  # makes memory to use again
    begun = time.perf_counter()
    for step in range(0, len(batches), at_once):
        made = sample_steps(
            sampler, topology, batches[step : step + at_once], seed=0, epoch=0, first_step=step
        )
        for minibatch in made:
            found = counts(minibatch)
            nodes, edges, done = nodes + found[0], edges + found[1], done + 1
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


def _draw(runs: list[Figure], figure: Any) -> None:
    from gids.bench.plot import draw_bars, shared_settings

    panels = figure.subplots(1, 2, sharey=True)
    metrics = {"nodes_per_s": "input nodes", "edges_per_s": "edges"}
    for number, (panel, (name, title)) in enumerate(zip(panels, metrics.items(), strict=True)):
        draw_bars(panel, runs, {name: title}, first_colour=number)
        panel.set_xlabel(f"million {title} a second")
    shared = shared_settings(runs) - {"sampler"}
    panels[0].set_yticks(range(len(runs)), [_title(run.setting, shared) for run in runs], fontsize=8)
    figure.suptitle("Sampling", fontsize=10)


def _title(setting: Setting, shared: set[str]) -> str:
    """What tells a run from the others. shared: what it need not say."""
    parts = {
        "sampler": setting["sampler"],
        "batch": setting["batch"],
        "threads": None if (count := setting["threads"]) is None else f"{count} thread{'s' * (count != 1)}",
        "at_once": f"{setting['at_once']} at once",
    }
    return ", ".join(str(part) for key, part in parts.items() if part is not None and key not in shared)
