"""How many input nodes per second does a GPU sample from a topology in pinned host memory? Called by gpu.py.

An R-MAT graph; minibatches of uniform neighbor sampling without replacement; distinct input nodes of each
minibatch count. Compared with the same sampler on the CPU's threads, whose minibatches must equal the GPU's
bit for bit. The time is the host's, from the call to the result.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np
import torch
from device_timer import host_seconds
from figures import Figures
from harness import alternate, median_ratio

from gids.cuda import Device
from gids.sampler import Block, Minibatch, Neighbor, Topology
from gids.sampler.device import PinnedGraph
from gids.store import Graph
from gids.store.names import RELATION

BAR_NODES_PER_S = 77e6


@dataclass(frozen=True)
class SamplingSizes:
    log2_nodes: int = 23
    degree: int = 16
    seeds: int = 4096
    minibatches: int = 16
    cpu_minibatches: int = 3
    repeats: int = 5
    fanouts: Sequence[Sequence[int]] = ((10, 5, 5), (15, 10, 5))


SMALL = SamplingSizes(
    log2_nodes=9, degree=4, seeds=8, minibatches=1, cpu_minibatches=1, repeats=1, fanouts=((3, 2),)
)


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


def rmat(device: torch.device, log2_nodes: int, degree: int, seed: int) -> Graph:
    """An R-MAT graph (a = 0.57) with shuffled ids, drawn on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    nodes, edges, a, rest = 1 << log2_nodes, degree << log2_nodes, 0.57, 0.43 / 3
    ends = torch.zeros((2, edges), dtype=torch.int32, device=device)
    for _ in range(log2_nodes):
        r = torch.rand(edges, generator=generator, device=device)
        ends[0].mul_(2).add_(r >= a + rest)
        ends[1].mul_(2).add_(((r >= a) & (r < a + rest)) | (r >= a + 2 * rest))
    shuffled = torch.randperm(nodes, generator=generator, device=device).int()
    target, order = torch.sort(shuffled[ends[1].long()], stable=True)
    sources = shuffled[ends[0].long()][order].cpu().numpy()
    indptr = torch.zeros(nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(target, minlength=nodes).cumsum(0).cpu()
    return Graph(RELATION, nodes, nodes, indptr.numpy(), sources, None)


def same_minibatch(a: Minibatch, b: Minibatch) -> bool:
    """Whether two homogeneous minibatches have the same nodes and edges in the same order."""
    pairs = [(a.input_nodes, b.input_nodes), (a.seeds, b.seeds)]
    for x, y in zip(a.blocks, b.blocks, strict=True):
        assert isinstance(x, Block)
        assert isinstance(y, Block)
        pairs += [(x.indptr, y.indptr), (x.indices, y.indices), (x.positions, y.positions)]
    return all(torch.equal(cast(torch.Tensor, p).cpu(), cast(torch.Tensor, q).cpu()) for p, q in pairs)


def sampling(device: Device, _: Path, sizes: SamplingSizes, figures: Figures) -> None:
    graph = rmat(device.torch_device, sizes.log2_nodes, sizes.degree, seed=4)
    print(f"R-MAT: {graph.num_dst:,} nodes, {graph.num_edges:,} edges; {sizes.seeds} seeds", flush=True)
    with_edges = np.flatnonzero(np.diff(graph.indptr))
    seeds = torch.from_numpy(np.random.default_rng(5).permutation(with_edges))
    for place in ("host", "auto"):
        with closing(PinnedGraph(graph, device, topology_on=place)) as pinned:
            for fanouts in sizes.fanouts:
                _sample(device, Topology(graph), Topology(pinned), seeds, fanouts, place, sizes, figures)


def _sample(
    device: Device,
    on_cpu: Topology,
    on_device: Topology,
    seeds: torch.Tensor,
    fanouts: Sequence[int],
    place: str,
    sizes: SamplingSizes,
    figures: Figures,
) -> None:
    sampler, stream = Neighbor(list(fanouts)), device.current_stream()
    step = 0

    def nodes_per_s(topology: Topology, minibatches: int) -> float:
        nonlocal step
        found = 0

        def sample() -> None:
            nonlocal step, found
            for _ in range(minibatches):
                first = step * sizes.seeds % max(1, len(seeds) - sizes.seeds)
                chosen = seeds[first : first + sizes.seeds]
                found += len(sampler.sample(topology, chosen, seed=6, step=step).input_nodes)
                step += 1

        return 1.0 / (host_seconds(stream, sample) / found)

    on_both = [sampler.sample(t, seeds[: sizes.seeds], seed=6, step=99) for t in (on_cpu, on_device)]
    assert same_minibatch(*on_both), "CPU and GPU sample different minibatches"
    nodes_per_s(on_device, sizes.minibatches)
    sides = {
        "gpu": lambda: nodes_per_s(on_device, sizes.minibatches),
        "cpu": lambda: nodes_per_s(on_cpu, sizes.cpu_minibatches),
    }
    speeds = alternate(sides, sizes.repeats)
    text = ",".join(map(str, fanouts))
    where = {"host": "topology in pinned host memory", "auto": "indptr in device memory if it is small"}[
        place
    ]
    note = f"{len(on_both[0].input_nodes):,} input nodes from {sizes.seeds:,} seeds; {pcie_link()}"
    bar = BAR_NODES_PER_S if place == "host" else None
    name = f"neighbor sampling {text}, {where}"
    figures.add(name, median(speeds["gpu"]), "nodes/s", bar=bar, note=note)
    ratio = median_ratio(speeds["gpu"], speeds["cpu"])
    figures.add(f"{name}, over {sampler.threads} CPU threads", ratio, "x")
