"""What the GraphBolt tests share: two small datasets and minibatches over them; and the few classes of
GraphBolt that gids.graphbolt builds on, which stand for it where it cannot be imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import CITES, WRITES
from torch.utils.data import IterDataPipe

import gids.dgl  # noqa: F401  (makes dgl importable)
from gids.store import FeatureStore
from gids.write import DatasetWriter

import dgl  # isort: skip

COUNTS = {"author": 90, "paper": 400}
EDGES = {WRITES: 700, CITES: 900}


def _why_not() -> str:
    try:
        import gids.graphbolt  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


WHY_NOT = _why_not()
"""Why GraphBolt itself cannot be imported; empty when it can."""


@dataclass
class Dataset:
    """The store, and its source: (domain, GraphBolt's type, name) -> rows."""

    store: FeatureStore
    source: Mapping[tuple[str, str | None, str], torch.Tensor]
    node_keys: Any
    edge_keys: Any


def homogeneous(directory: Path) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    source = {
        ("node", None, "feat"): torch.randn(400, 6, generator=generator),
        ("node", None, "year"): torch.randint(2000, 2020, (400,), generator=generator),
        ("node", None, "known"): torch.rand(400, 3, generator=generator) < 0.5,
        ("edge", None, "weight"): torch.randn(900, 3, generator=generator).half(),
    }
    with DatasetWriter(directory / "one.gids") as writer:
        for (domain, _, name), rows in source.items():
            writer.write_table(domain, "_N" if domain == "node" else ("_N", "_E", "_N"), name, rows)
    return Dataset(FeatureStore(directory / "one.gids"), source, ["feat", "year", "known"], ["weight"])


def heterogeneous(directory: Path) -> Dataset:
    generator = torch.Generator().manual_seed(2)
    source = {
        ("node", "paper", "feat"): torch.randn(COUNTS["paper"], 1024, generator=generator),  # a page each
        ("node", "author", "feat"): torch.randn(COUNTS["author"], 5, generator=generator).to(torch.bfloat16),
        ("edge", "author:writes:paper", "weight"): torch.randn(EDGES[WRITES], 2, generator=generator),
    }
    with DatasetWriter(directory / "several.gids") as writer:
        for (domain, type_name, name), rows in source.items():
            writer.write_table(
                domain, type_name if domain == "node" else tuple(type_name.split(":")), name, rows
            )
    node_keys = {"paper": ["feat"], "author": ["feat"]}
    edge_keys = {"author:writes:paper": ["weight"]}
    return Dataset(FeatureStore(directory / "several.gids"), source, node_keys, edge_keys)


class Minibatches(IterDataPipe[Any]):
    """A pipe of minibatches that were sampled from `heterogeneous`, the same in each epoch.

    fails_at: the one that cannot be sampled. sampled: how many have left it.
    """

    def __init__(self, minibatch: Callable[..., Any], *, fails_at: int | None = None) -> None:
        self.minibatch, self.fails_at, self.sampled = minibatch, fails_at, 0

    def __iter__(self) -> Iterator[Any]:
        rng = np.random.default_rng(3)

        def ids(bound: int) -> torch.Tensor:
            return torch.from_numpy((bound * rng.random(rng.integers(0, 70)) ** 2).astype(np.int64))

        for number in range(40):
            if number == self.fails_at:
                raise OSError("sampler")
            layers: list[Any] = []
            for _ in range(2):
                edges = {":".join(r): ids(count) for r, count in EDGES.items() if r != WRITES or number % 3}
                layers.append(SimpleNamespace(original_edge_ids=edges))
            nodes = {ntype: ids(count) for ntype, count in COUNTS.items() if ntype != "author" or number % 4}
            self.sampled += 1
            yield self.minibatch(seed_nodes=number, input_nodes=nodes, sampled_subgraphs=layers)


def check(dataset: Dataset, minibatch: Any) -> int:
    """Features are the source's rows, bit for bit, of all types that the minibatch has, and of no other.

    Returns how many feature tensors there are.
    """
    expected = dict[Any, torch.Tensor]()
    layers: list[dict[Any, torch.Tensor]] = [{} for _ in minibatch.sampled_subgraphs]
    for (domain, type_name, name), rows in dataset.source.items():
        found = [minibatch.input_nodes] if domain == "node" else []
        found += [s.original_edge_ids for s in minibatch.sampled_subgraphs] if domain == "edge" else []
        for into, ids in zip([expected] if domain == "node" else layers, found, strict=True):
            if type_name in ids:
                into[type_name, name] = rows[ids[type_name]]
    for features, wanted in zip(
        [minibatch.node_features, *minibatch.edge_features], [expected, *layers], strict=True
    ):
        assert features.keys() == wanted.keys()
        for key, rows in wanted.items():
            assert features[key].dtype == rows.dtype
            assert torch.equal(features[key], rows)
    return len(expected) + sum(map(len, layers))


@contextlib.contextmanager
def importable() -> Iterator[Any]:
    """gids.graphbolt, on GraphBolt itself or on the stand-in."""
    if not WHY_NOT:
        import gids.graphbolt

        yield gids.graphbolt
        return
    before = sys.modules.get("dgl.graphbolt")  # None: DGL 1.1.3
    dgl.graphbolt = sys.modules["dgl.graphbolt"] = stand_in()
    import gids.graphbolt

    yield gids.graphbolt
    if before is None:
        del dgl.graphbolt, sys.modules["dgl.graphbolt"]
    else:
        dgl.graphbolt = sys.modules["dgl.graphbolt"] = before
    for name in [n for n in sys.modules if n.startswith("gids.graphbolt")]:
        del sys.modules[name]
    IterDataPipe.functions.pop("gids_fetch", None)  # it can be imported again


def stand_in() -> ModuleType:
    """A module in GraphBolt's place, with what gids.graphbolt uses of DGL 2.1.0's."""
    module = ModuleType("dgl.graphbolt")
    for each in (_Feature, _FeatureStore, _FeatureFetcher, _MiniBatch):
        setattr(module, each.__name__.removeprefix("_"), each)
    return module


class _Feature:
    pass


class _FeatureStore:
    pass


class _FeatureFetcher(IterDataPipe[Any]):
    """Without keys, as here, it fetches nothing."""

    def __init__(self, datapipe: Any, feature_store: Any) -> None:
        self.datapipe = datapipe

    def __iter__(self) -> Iterator[Any]:
        for minibatch in self.datapipe:
            minibatch.set_node_features({})
            minibatch.set_edge_features([{} for _ in range(minibatch.num_layers())])
            yield minibatch


@dataclass
class _MiniBatch:
    seed_nodes: Any = None
    input_nodes: Any = None
    sampled_subgraphs: Any = None
    node_features: Any = None
    edge_features: Any = None

    def node_ids(self) -> Any:
        return self.input_nodes

    def num_layers(self) -> int:
        return len(self.sampled_subgraphs or ())

    def edge_ids(self, layer: int) -> Any:
        return self.sampled_subgraphs[layer].original_edge_ids

    def set_node_features(self, features: Any) -> None:
        self.node_features = features

    def set_edge_features(self, features: Any) -> None:
        self.edge_features = features
