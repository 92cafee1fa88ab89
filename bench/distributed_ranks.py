"""The ranks of bench/distributed.py: processes that read an epoch together, verify it and count.

Row i of the features holds i.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import gids.distributed
from gids.sampler import Labor, Minibatch, Neighbor

TABLE = "_N.feat"
MODES = ("alone", "shared rows", "partitioned", "replicas 2", "cooperative")
_TIMEOUT_S = 300.0
Counts = dict[str, int]


def replicas_of(mode: str) -> int:
    return 2 if mode == "replicas 2" else 1


def make_sampler(config: Mapping[str, Any]) -> Neighbor | Labor:
    kind = Labor if config["sampler"] == "labor" else Neighbor
    return kind(config["fanouts"], threads=1)


def make_loader(source: gids.Source, config: Mapping[str, Any], **options: Any) -> gids.NodeLoader:
    options = {"tables": [TABLE], "batch_size": config["batch_size"], **options}
    seeds = torch.tensor(config["seeds"])
    return gids.NodeLoader(
        source, seeds, make_sampler(config), shuffle=True, seed=config["seed"], labels=False, **options
    )


def run_ranks(size: int, datasets: Mapping[str, Path], config: Mapping[str, Any]) -> dict[str, list[Counts]]:
    """By mode: what each rank counts in an epoch. datasets: by mode. Raises what a rank raises."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        paths = {mode: str(path) for mode, path in datasets.items()}
        mp.spawn(_serve, (size, paths, dict(config), folder), nprocs=size)
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    return {mode: [of_rank[mode] for of_rank in told] for mode in datasets}


def _serve(rank: int, size: int, paths: dict[str, str], config: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    try:
        counts = {
            mode: _alone(path, config) if mode == "alone" else _together(mode, path, config)
            for mode, path in paths.items()
        }
        (Path(folder) / f"{rank}.json").write_text(json.dumps(counts))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _alone(dataset: str, config: Mapping[str, Any]) -> Counts:
    rank, size = dist.get_rank(), dist.get_world_size()
    with (
        gids.open(dataset, memory=config["memory"], reads="random") as source,
        make_loader(source, config, rank=rank, world_size=size) as loader,
    ):
        rows = sum(_verified(minibatch) for minibatch in loader)
        stats = loader.stats()
    return {"steps": len(loader), "rows": rows, "pages": stats["pages"], "pages read": stats["pages_read"]}


def _together(mode: str, dataset: str, config: Mapping[str, Any]) -> Counts:
    cooperative, rank = mode == "cooperative", dist.get_rank()
    options = {
        "reads": "random",
        "replicas": replicas_of(mode),
        "memory": config["memory"],
        "timeout": _TIMEOUT_S,
    }
    sent = inner = rows = 0
    with (
        gids.distributed.open(dataset, **options) as source,
        make_loader(source, config, cooperative=cooperative) as loader,
    ):
        for minibatch in loader:
            rows += _verified(minibatch)
            for layer, plans in enumerate(minibatch.exchanges if cooperative else []):
                away = sum(sum(p.expected) - p.expected[rank] for p in plans)
                sent, inner = (sent + away, inner) if layer == 0 else (sent, inner + away)
        stats, group = loader.stats(), loader.stats().get("group", {})
    counts = {"steps": len(loader), "rows": rows, "pages": stats["pages"], "pages read": stats["pages_read"]}
    if cooperative:
        return counts | {"rows sent": sent, "ids sent": sent + inner}
    counts |= {"rows sent": group["rows asked"], "ids sent": group["rows asked"]}
    assert group["bytes sent"] == group["rows sent"] * config["row_bytes"]
    return counts | (source.sampling_counts if source.part is not None else {})


def _verified(minibatch: Minibatch) -> int:
    """The number of input rows, which must hold their node's id."""
    nodes = minibatch.input_nodes
    assert isinstance(nodes, torch.Tensor)
    assert torch.equal(minibatch.features[TABLE], nodes.float()[:, None].expand_as(minibatch.features[TABLE]))
    return len(nodes)
