"""How many input nodes per second does a GPU sample from a topology in pinned host memory? Called by gpu.py.

An R-MAT graph; minibatches of uniform neighbor sampling without replacement; distinct input nodes of each
minibatch count. Compared with the same sampler on the CPU's threads, whose minibatches must equal the GPU's
bit for bit. The time is the host's, from the call to the result.

Then by gids.NodeLoader without tables, which enqueues a minibatch while the one before is used, and by a CUDA
build of DGL with UVA, if there is one: the time of an epoch of as many minibatches, after a first one.

by_size: R-MAT graphs of more and more nodes, sampled by the CPU's threads and by the GPU, which has the graph
in pinned host memory or in its own. Figure 7 of Park et al., "GIDS", PVLDB 17(6), 2024.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import median

import torch
from gpu_harness import Bench, assert_same_minibatch, host_seconds
from graphs import graph_of, rmat, seed_order
from harness import alternate

import gids
from gids.loader import NodeLoader
from gids.sampler import Neighbor, Topology
from gids.sampler.device import PinnedGraph
from gids.store import Graph
from gids.store.names import RELATION
from gids.write import DatasetWriter

BAR_NODES_PER_S = 77e6
SIZES = {
    "log2_nodes": (23, 9),
    "degree": (16, 4),
    "seeds": (4096, 8),
    "minibatches": (16, 1),
    "cpu_minibatches": (3, 1),
    "repeats": (5, 1),
    "fanouts": (((10, 5, 5), (15, 10, 5)), ((3, 2),)),
}
BY_SIZE = SIZES | {
    "log2_nodes": ((17, 20, 23, 26), (7, 9)),
    "fanouts": ((10, 5, 5), (3, 2)),
    "repeats": (3, 1),
}
_PLACES = {"host": "topology in pinned host memory", "auto": "indptr in device memory if it is small"}


def pcie_link() -> str:
    """The GPU's fastest link, such as "PCIe 5 x16"; "PCIe unknown" if the driver does not report it."""
    query = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader", "--id=0"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        generation, lanes = (part.strip() for part in output.split(","))
    except (OSError, ValueError, subprocess.SubprocessError):
        return "PCIe unknown"
    return f"PCIe {generation} x{lanes}"


def sampling(bench: Bench) -> None:
    generator = torch.Generator(bench.device.torch_device).manual_seed(4)
    graph = graph_of(*rmat(bench.sizes.log2_nodes, bench.sizes.degree, generator))
    print(f"R-MAT: {graph.num_dst:,} nodes, {graph.num_edges:,} edges", flush=True)
    for place in _PLACES:
        with closing(PinnedGraph(graph, bench.device, topology_on=place)) as pinned:
            for fanouts in bench.sizes.fanouts:
                _sample(
                    bench,
                    Topology(graph),
                    Topology(pinned),
                    list(fanouts),
                    _PLACES[place],
                    bar=BAR_NODES_PER_S if place == "host" else None,
                )
    path = bench.directory / "graph.gids"
    with DatasetWriter(path) as writer:
        writer.write_graph(RELATION, graph.indptr, graph.indices, num_src=graph.num_src)
    for fanouts in bench.sizes.fanouts:
        _by_loaders(bench, graph, path, list(fanouts))


def by_size(bench: Bench) -> None:
    for log2_nodes in bench.sizes.log2_nodes:
        generator = torch.Generator(bench.device.torch_device).manual_seed(4)
        graph = graph_of(*rmat(log2_nodes, bench.sizes.degree, generator))
        for place in ("host", "device"):
            with closing(PinnedGraph(graph, bench.device, topology_on=place)) as pinned:
                name = f"2^{log2_nodes} nodes, topology on the {place}"
                _sample(bench, Topology(graph), Topology(pinned), list(bench.sizes.fanouts), name)


def _by_loaders(bench: Bench, graph: Graph, path: Path, fanouts: list[int]) -> None:
    sizes, stream = bench.sizes, bench.device.current_stream()
    seeds = torch.from_numpy(seed_order(graph, 5))[: sizes.seeds * (sizes.minibatches + 1)]

    def nodes_per_s(input_nodes: Iterator[torch.Tensor]) -> float:
        next(input_nodes)
        counts: list[int] = []
        seconds = host_seconds(stream, lambda: counts.extend(map(len, input_nodes)))
        return sum(counts) / seconds

    def of_gids() -> float:
        options = {"tables": [], "batch_size": sizes.seeds, "shuffle": False, "device": "cuda"}
        with gids.open(path, window=0) as source, NodeLoader(source, seeds, fanouts, **options) as loader:
            return nodes_per_s(m.input_nodes for m in loader)

    sides = {"NodeLoader": of_gids}
    if (of_dgl := _dgl_loader(graph, seeds, fanouts, sizes.seeds)) is not None:
        sides["DGL with UVA"] = lambda: nodes_per_s(of_dgl())
    for side, rates in alternate(sides, sizes.repeats).items():
        name = f"neighbor sampling {','.join(map(str, fanouts))}, by {side}"
        bench.figures.add(name, median(rates), "nodes/s", note=f"{len(seeds):,} seeds; {pcie_link()}")


def _dgl_loader(
    graph: Graph, seeds: torch.Tensor, fanouts: list[int], batch_size: int
) -> Callable[[], Iterator[torch.Tensor]] | None:
    """Makes the input nodes of DGL's minibatches; None, and says why, if DGL has no CUDA here."""
    try:
        import dgl

        arrays = (torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices), torch.tensor([]))
        stored = dgl.graph(("csc", arrays), num_nodes=graph.num_dst).int()
        sampler, there = dgl.dataloading.NeighborSampler(fanouts), seeds.int().cuda()
        options = {"batch_size": batch_size, "device": "cuda", "use_uva": True}

        def loader() -> Iterator[torch.Tensor]:
            return (nodes for nodes, _, _ in dgl.dataloading.DataLoader(stored, there, sampler, **options))

        next(loader())
    except Exception as error:  # DGL raises errors of its own
        print(f"DGL: {error}", flush=True)
        return None
    return loader


def _sample(
    bench: Bench,
    on_cpu: Topology,
    on_device: Topology,
    fanouts: list[int],
    where: str,
    *,
    bar: float | None = None,
) -> None:
    sizes = bench.sizes
    sampler, stream = Neighbor(fanouts), bench.device.current_stream()
    seeds = torch.from_numpy(seed_order(on_cpu.graphs[0], 5))
    steps = itertools.count()

    def nodes_per_s(topology: Topology, minibatches: int) -> float:
        nodes = 0

        def sample() -> None:
            nonlocal nodes
            for step in itertools.islice(steps, minibatches):
                first = step * sizes.seeds % max(1, len(seeds) - sizes.seeds)
                chosen = seeds[first : first + sizes.seeds]
                nodes += len(sampler.sample(topology, chosen, seed=6, step=step).input_nodes)

        seconds = host_seconds(stream, sample)
        return nodes / seconds

    minibatches = [sampler.sample(t, seeds[: sizes.seeds], seed=6, step=99) for t in (on_cpu, on_device)]
    assert_same_minibatch(*minibatches)
    nodes_per_s(on_device, sizes.minibatches)
    sides = {
        "gpu": lambda: nodes_per_s(on_device, sizes.minibatches),
        "cpu": lambda: nodes_per_s(on_cpu, sizes.cpu_minibatches),
    }
    speeds = alternate(sides, sizes.repeats)
    note = f"{len(minibatches[0].input_nodes):,} input nodes from {sizes.seeds:,} seeds; {pcie_link()}"
    name = f"neighbor sampling {','.join(map(str, fanouts))}, {where}"
    bench.figures.add(name, median(speeds["gpu"]), "nodes/s", bar=bar, note=note)
    bench.figures.ratio(f"{name}, over {sampler.threads} CPU threads", speeds["gpu"], speeds["cpu"])
