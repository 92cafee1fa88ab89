"""What ranks do in several test files. In a module of its own: the processes of ranks import it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import CITES, random_in_edges, same_bits
from open_options import tuned

import gids.distributed
from gids.sampler import Block, Minibatch
from gids.store.names import Relation
from gids.write import DatasetWriter

CITED: list[Relation] = [CITES, ("author", "writes", "paper"), ("paper", "rev_writes", "author")]
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


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


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
    if isinstance(theirs, Block):
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
    dataset: Path, whole: Path, kind: str, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> int:
    """Compare each rank's minibatches of two epochs with those that one process reads from the whole dataset.
    Returns their number in an epoch.

    kind: a loader of gids, or "pyg." and one of gids.pyg.
    """
    module, _, name = kind.rpartition(".")
    make = getattr(importlib.import_module(f"gids.{module}" if module else "gids"), name)
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    arguments = {"seed": 0, "batch_size": 20, "shuffle": True} | dict(arguments)
    shared = gids.distributed.open(dataset, **tuned({"memory": "64MB", **options}))
    with shared, gids.open(whole, memory="64MB", reads="random") as alone:
        with make(shared, **arguments) as mine, make(alone, **arguments, **place) as theirs:
            for _ in range(2):
                for a, b in zip(mine, theirs, strict=True):
                    check_same(a, b)
            return len(mine)


def by_type(ids: Any) -> dict[str, torch.Tensor]:
    return ids if isinstance(ids, dict) else {"paper": ids}


class Sage(torch.nn.Module):
    """For datasets of write_cited() with one type."""

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
            h = self.own[i](h[: block.num_dst]) + self.neighbors[i](_mean_of(block, h))
            h = h.relu() if i == 0 else h
        return h


def _mean_of(block: Block, h: torch.Tensor) -> torch.Tensor:
    """Of each destination, the mean of its sources' rows."""
    src, dst = block.coo()
    total = h.new_zeros(block.num_dst, h.shape[1]).index_add(0, dst, h[src])
    return total / block.indptr.diff().clamp(min=1)[:, None]
