"""One side of a comparison, in its own process: train GraphSAGE, with features read by gids or stock DGL.

Both sides run this code with the same topology in memory, seeds and model. They differ only in
``make_loader``: the ``gids=`` argument, or a memory-mapped array in ``g.ndata``.

The measurement starts when the features are opened, and ends with the last training step. Before it come
imports, loading the topology, and a step on made-up features, which warms up. Both sides keep some rows of
the same minibatches, and compare them with the dataset afterwards. Started by sides.py; bench/rgcn_side.py
trains on several node types.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gids.dgl  # isort: skip  # before dgl: makes it importable beside a current torch
import dgl
from torch import Tensor, nn

from gids.bench.features import KeptRows, map_array
from gids.bench.isolation import (
    cached_share,
    cpu_seconds,
    device_bytes_read,
    limit_own_memory,
    resident_bytes,
)
from gids.bench.sides import ADVISED, OURS, EpochConfig, EpochResult
from gids.cache.output_dtype import out_dtype_of
from gids.io import drop_page_cache
from gids.io.engine import direct_works
from gids.store import FeatureStore
from gids.store.names import Relation

LEARNING_RATE = 0.01


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train as an EpochConfig says; the fields of its EpochResult. Called by run_fresh."""
    return asdict(Side(EpochConfig(**values)).train())


class Side:
    """One side: the graph and the seeds in memory, the dataset, and the model to train."""

    def __init__(self, config: EpochConfig) -> None:
        self.config = config
        self.store = FeatureStore(config.dataset, allow_dirs=config.allow_dirs)
        self.tables = [self.store.table(name) for name in config.tables]
        self.shards = [path for table in self.tables for path in table.shard_paths]
        self.graph = load_graph(self.store)
        self.target = str(self.tables[0].type)
        labels = self.store.labels[self.target].long().flatten()
        self.graph.nodes[self.target].data["label"] = labels
        self.train_ids = self.store.splits[self.target]["train"][: config.batches * config.batch_size]
        self.batches = -(-len(self.train_ids) // config.batch_size)
        torch.manual_seed(config.seed)
        self.model = self.make_model(int(labels.max()) + 1)

    def make_model(self, classes: int) -> nn.Module:
        hidden = [self.config.hidden] * (len(self.config.fanouts) - 1)
        return GraphSage([*self.tables[0].shape, *hidden, classes])

    def seeds(self, ids: Tensor) -> Any:
        """Seeds as DGL takes them."""
        return ids

    def make_sampler(self, **prefetched: Any) -> Any:
        return dgl.dataloading.NeighborSampler(
            list(self.config.fanouts), prefetch_labels=["label"], **prefetched
        )

    def features(self, blocks: Any) -> list[Tensor]:
        """The rows of the input nodes, by table. Stock DGL reads them here."""
        return [blocks[0].srcdata[self.tables[0].key]]

    def labels(self, blocks: Any) -> Tensor:
        labels: Tensor = blocks[-1].dstnodes[self.target].data["label"]
        return labels

    def input_nodes(self, blocks: Any) -> list[Tensor]:
        """Their ids."""
        return [blocks[0].srcdata[dgl.NID]]

    def make_loader(self) -> Any:
        """The only difference between the sides."""
        config = self.config
        sampler = self.make_sampler(prefetch_node_feats=[self.tables[0].key])
        arguments = self.graph, self.seeds(self.train_ids), sampler
        options: dict[str, Any] = {"batch_size": config.batch_size, "shuffle": True}
        if config.side == OURS:
            tuning = gids.Tuning(direct=direct_works(self.shards))
            source = gids.open(self.store, memory=config.memory_bytes, tuning=tuning, **config.source)
            return gids.dgl.DataLoader(*arguments, gids=source, **options)
        for table in self.tables:
            array = map_array(table, random_access=config.side == ADVISED)
            self.graph.nodes[table.type].data[table.key] = array
        return dgl.dataloading.DataLoader(*arguments, **options)

    def train(self) -> EpochResult:
        """Train. Blocks. Needs a fresh process, for a cold start and a correct peak of memory.

        Raises OSError if the memory limit cannot be set, and the loader's errors.
        """
        config = self.config
        self._warm_up()
        ctypes.CDLL(None).malloc_trim(0)  # return the memory that the step freed
        kept = [KeptRows(self.batches, table) for table in self.tables]
        for shard in self.shards:
            with suppress(OSError):  # cached_before shows it
                drop_page_cache(shard)
        cached_before = max(map(cached_share, self.shards), default=0.0)
        base_rss = resident_bytes("VmRSS")
        if config.memory_bytes and config.side != OURS:
            limit_own_memory(config.memory_bytes)
        torch.manual_seed(config.seed)
        np.random.seed(config.seed)  # noqa: NPY002  (DGL shuffles with it)
        dgl.seed(config.seed)
        measured = self._train_epoch(kept)
        counts = [rows.compare(table.read_rows) for table, rows in zip(self.tables, kept, strict=True)]
        compared, wrong = map(sum, zip(*counts, strict=True))
        return EpochResult(
            side=config.side,
            base_rss_bytes=base_rss,
            compared_rows=compared,
            wrong_rows=wrong,
            cached_before=cached_before,
            **measured,
        )

    def _train_epoch(self, kept: Sequence[KeptRows]) -> dict[str, Any]:
        """The measured part: from opening the features to the last step. Returns fields of EpochResult."""
        config, stats = self.config, {}
        optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        loading_s, training_s, batches, rows, row_bytes = 0.0, 0.0, 0, 0, 0
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        read_before, cpu_before, begun = device_bytes_read(), cpu_seconds(), time.perf_counter()
        loader = self.make_loader()
        with closing(loader) if config.side == OURS else nullcontext():
            minibatches = iter(loader)
            while batches < self.batches:
                asked = time.perf_counter()
                blocks = next(minibatches)[2]
                x, labels = self.features(blocks), self.labels(blocks)
                came, batches = time.perf_counter(), batches + 1
                train_step(self.model, optimizer, blocks, x, labels)
                loading_s, training_s = loading_s + came - asked, training_s + time.perf_counter() - came
                for table, ids, of_table, keep in zip(
                    self.tables, self.input_nodes(blocks), x, kept, strict=True
                ):
                    rows, row_bytes = rows + len(ids), row_bytes + len(ids) * table.row_bytes
                    keep.add(ids, of_table)
                del blocks, x, labels, ids, of_table  # frees the minibatch before the next one is made
                if 0 < config.most_seconds < time.perf_counter() - begun:
                    break
            seconds = time.perf_counter() - begun
            if config.side == OURS:
                stats = loader.feature_loader.stats()
        read_after = device_bytes_read()
        read_bytes = None if read_after is None or read_before is None else read_after - read_before
        stages, hit_ratio = {"loading": loading_s, "training": training_s}, None
        if stats:
            stages["reading"] = stats["seconds"]["wait"]
            hit_ratio = stats["hit_ratio"] if stats["pages"] else None
        elif read_bytes is not None and not any(t.row_bytes % mmap.PAGESIZE for t in self.tables):
            hit_ratio = max(0.0, 1 - read_bytes / row_bytes)  # of the page cache
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds() - cpu_before,
            "stages": stages,
            "batches": batches,
            "rows": rows,
            "read_bytes": read_bytes,
            "hit_ratio": hit_ratio,
            "peak_rss_bytes": resident_bytes("VmHWM"),
            "loader": stats,
        }

    def _warm_up(self) -> None:
        """Train a copy of the model for a step with DGL's loader, on made-up features."""
        size, model = self.config.batch_size, deepcopy(self.model)
        seeds = self.seeds(self.train_ids[:size])
        loader = dgl.dataloading.DataLoader(self.graph, seeds, self.make_sampler(), batch_size=size)
        for _, _, blocks in loader:
            x = [
                torch.full((blocks[0].num_src_nodes(t.type), *t.shape), 0.1, dtype=out_dtype_of(t, None))
                for t in self.tables
            ]
            train_step(model, torch.optim.Adam(model.parameters()), blocks, x, self.labels(blocks))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Any, x: Sequence[Tensor], labels: Tensor
) -> None:
    logits = model(blocks, [rows.float() for rows in x])
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def load_graph(store: FeatureStore) -> Any:
    """The DGL graph, in memory."""
    edges: dict[Relation, tuple[str, Any]] = {}
    for relation in store.relations:
        graph = store.graph(relation)
        # DGL takes one type for all.
        indptr, indices = (torch.from_numpy(a.astype(np.int64)) for a in (graph.indptr, graph.indices))
        edges[relation] = ("csc", (indptr, indices, []))
    counts = {ntype: store.num_nodes(ntype) for ntype in store.node_types}
    return dgl.heterograph(edges, counts).formats("csc")


class SageLayer(nn.Module):
    """W x + V mean(neighbors' x). Unlike SAGEConv it does not copy x."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.own = nn.Linear(in_dim, out_dim)
        self.neighbors = nn.Linear(in_dim, out_dim, bias=False)

    def forward(self, block: Any, x: Tensor) -> Tensor:
        own: Tensor = self.own(x[: block.num_dst_nodes()])
        mean: Tensor = dgl.ops.copy_u_mean(block, self.neighbors(x))
        return own + mean


class GraphSage(nn.Module):
    """dims: of the rows, of each hidden layer, and of the output."""

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SageLayer(a, b) for a, b in pairwise(dims))

    def forward(self, blocks: Sequence[Any], x: Sequence[Tensor]) -> Tensor:
        """Logits of the seeds. x: the rows of the input nodes, by table."""
        rows = x[0]  # of the only table
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            rows = layer(block, torch.relu(rows) if depth else rows)
        return rows
