"""Train for an epoch, with features read by gids or by stock DGL, and measure it.

The model is GraphSAGE, with several relations R-GCN.

``python -m gids.measure.epoch`` is one side of a comparison, in its own process (isolation.py). Both sides
run this code with the same topology in memory, seeds and model. They differ only in
``Side._make_loader``: the ``gids=`` argument, or a memory-mapped array in ``g.ndata``.

The measurement starts when memory is limited and the features are opened, and ends with the last training
step. Before it come imports, loading the topology, and some training steps on made-up features, which measure
the memory of training. Both sides keep some rows of the same minibatches. They are compared with the
dataset after the measurement, without a memory limit.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gids.dgl  # isort: skip  # before dgl: makes it importable beside a current torch
import dgl
from torch import Tensor, nn

from gids.cache.output_dtype import out_dtype_of
from gids.io.engine import direct_works
from gids.measure.features import KeptRows, map_array
from gids.measure.isolation import (
    OwnPeak,
    cached_share,
    cpu_seconds,
    device_bytes_read,
    limit_own_memory,
    own_memory_bytes,
    resident_bytes,
    serve,
)
from gids.measure.sides import EpochConfig, EpochResult
from gids.store import FeatureStore, Table
from gids.store.names import Relation

PerType = dict[str, Tensor]

TRIAL_BATCHES, TRIAL_S = 8, 5.0  # trial training: steps, time limit
# More than measured: later minibatches are larger, and memory gets fragmented.
MARGIN, MARGIN_BYTES = 0.25, 16 << 20
LEARNING_RATE = 0.01


class Side:
    """One side: the graph and the seeds in memory, the dataset, and the model to train."""

    def __init__(self, config: EpochConfig) -> None:
        self.config = config
        self.store = FeatureStore(config.dataset, allow_dirs=config.allow_dirs)
        self.target = config.target or self.store.node_types[0]
        self.labels = self.store.labels[self.target].long()
        self.graph = load_graph(self.store)
        self.graph.nodes[self.target].data["label"] = self.labels
        self.tables = {str(table.type): table for table in map(self.store.table, config.tables)}
        self.train_ids = self.store.splits[self.target]["train"][: config.batches * config.batch_size]
        self.batches = -(-len(self.train_ids) // config.batch_size)
        torch.manual_seed(config.seed)
        self.model = GraphSage(
            {ntype: table.shape[0] for ntype, table in self.tables.items()},
            config.hidden,
            int(self.labels.max()) + 1,
            len(config.fanouts),
            self.graph.canonical_etypes,
            self.target,
        )

    def run(self) -> EpochResult:
        """Train. Blocks. Needs a fresh process, for a cold start and a correct peak of memory.

        Raises OSError if the memory limit cannot be set, and the loader's errors.
        """
        config = self.config
        kept = {ntype: KeptRows(self.batches, table) for ntype, table in self.tables.items()}
        headroom = self._headroom()
        shards = [shard for table in self.store.tables.values() for shard in table.shard_paths]
        cached_before = max(map(cached_share, shards), default=0.0)
        base_rss = resident_bytes("VmRSS")
        limit = None
        if config.memory_bytes:
            limit = own_memory_bytes() + headroom + config.memory_bytes
            limit_own_memory(limit)
        torch.manual_seed(config.seed)
        np.random.seed(config.seed)  # noqa: NPY002  (DGL shuffles with it)
        dgl.seed(config.seed)
        measured = self._train(kept)
        if limit is not None:
            limit_own_memory(None)  # the rest is not measured
        counts = [rows.compare(self.tables[ntype].read_rows) for ntype, rows in kept.items()]
        compared, wrong = map(sum, zip(*counts, strict=True))
        return EpochResult(
            side=config.side,
            base_rss_bytes=base_rss,
            memory_limit_bytes=limit,
            headroom_bytes=None if limit is None else headroom,
            compared_rows=compared,
            wrong_rows=wrong,
            cached_before=cached_before,
            **measured,
        )

    def _train(self, kept: Mapping[str, KeptRows]) -> dict[str, Any]:
        """The measured part: from opening the features to the last step. Returns fields of EpochResult."""
        config = self.config
        optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        waits = Waits(self.tables, self.target)
        training_s, batches = 0.0, 0
        rows = dict.fromkeys(self.tables, 0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        read_before, cpu_before, begun = device_bytes_read(), cpu_seconds(), time.perf_counter()
        with self._open_loader(waits) as loader:
            for input_nodes, x, labels, blocks in waits.of_next(loader):
                step_begun = time.perf_counter()
                _train_step(self.model, optimizer, blocks, x, labels)
                training_s, batches = training_s + time.perf_counter() - step_begun, batches + 1
                for ntype, ids in input_nodes.items():
                    rows[ntype] += len(ids)
                    kept[ntype].add(ids, x[ntype])
                if 0 < config.most_seconds < time.perf_counter() - begun:
                    break
            seconds = time.perf_counter() - begun
            stats = _stats(loader)
            read_bytes = _difference(device_bytes_read(), read_before)
            hit_ratio = stats["hit_ratio"] if stats.get("pages") else None
            if config.side == "stock":
                hit_ratio = _page_cache_hits(read_bytes, rows, self.tables)
            return {
                "seconds": seconds,
                "cpu_seconds": cpu_seconds() - cpu_before,
                "stages": {**waits.stages(stats), "training": training_s},
                "batches": batches,
                "rows": sum(rows.values()),
                "read_bytes": read_bytes,
                "hit_ratio": hit_ratio,
                "peak_rss_bytes": resident_bytes("VmHWM"),
                "loader": stats,
            }

    @contextmanager
    def _open_loader(self, waits: Waits) -> Iterator[Any]:
        loader = self._make_loader(waits)
        try:
            yield loader
        finally:
            if self.config.side == "gids":
                loader.close()
            del loader
            gc.collect()  # frees the memory for the next loader

    def _make_loader(self, waits: Waits) -> Any:
        """The only difference between the sides."""
        config = self.config
        sampler = dgl.dataloading.NeighborSampler(
            list(config.fanouts),
            prefetch_node_feats={ntype: [table.key] for ntype, table in self.tables.items()},
            prefetch_labels={self.target: ["label"]},
        )
        arguments = self.graph, self._seeds(self.train_ids), sampler
        options: dict[str, Any] = {"batch_size": config.batch_size, "shuffle": True}
        if config.side == "gids":
            shards = [path for table in self.tables.values() for path in table.shard_paths]
            source = gids.open(
                self.store,
                memory=config.gids_memory_bytes,
                window=config.window,
                reads=config.reads,
                scratch=config.scratch or None,
                tuning=gids.Tuning(direct=direct_works(shards)),
            )
            return gids.dgl.DataLoader(*arguments, gids=source, **options)
        for ntype, table in self.tables.items():
            array = map_array(table, random_access=config.random_access)
            self.graph.nodes[ntype].data[table.key] = array
        waits.watch_stock_reads()
        return dgl.dataloading.DataLoader(*arguments, **options)

    def _seeds(self, ids: Tensor) -> Any:
        """Seeds as DGL takes them."""
        return ids if self.graph.is_homogeneous else {self.target: ids}

    def _headroom(self) -> int:
        """Peak memory of training without features, in bytes, the same for both sides; 0 without a limit.

        Trains a copy of the model for some steps with DGL's loader on made-up features. This is also the
        warm-up.
        """
        with OwnPeak() if self.config.memory_bytes else nullcontext() as peak:
            self._train_trial(deepcopy(self.model))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # return the memory that the trial freed
        if peak is None:
            return 0
        measured = max(0, peak.peak_bytes - own_memory_bytes())
        headroom = self.config.headroom_bytes or int((1 + MARGIN) * measured) + MARGIN_BYTES
        return self.config.spare_bytes + headroom

    def _train_trial(self, model: GraphSage) -> None:
        config, count = self.config, len(self.train_ids)
        optimizer = torch.optim.Adam(model.parameters())
        sampler = dgl.dataloading.NeighborSampler(
            list(config.fanouts), prefetch_labels={self.target: ["label"]}
        )
        seeds = min(count, TRIAL_BATCHES * config.batch_size)
        ids = self.train_ids[torch.linspace(0, count - 1, seeds).long()]
        begun = time.perf_counter()
        for _, _, blocks in dgl.dataloading.DataLoader(
            self.graph, self._seeds(ids), sampler, batch_size=config.batch_size
        ):
            x = {
                ntype: torch.full(
                    (blocks[0].num_src_nodes(ntype), *table.shape), 0.1, dtype=out_dtype_of(table, None)
                )
                for ntype, table in self.tables.items()
            }
            _train_step(model, optimizer, blocks, x, blocks[-1].dstnodes[self.target].data["label"])
            if time.perf_counter() - begun > TRIAL_S:
                break


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


class Waits:
    """Time between training steps, by stage."""

    def __init__(self, tables: Mapping[str, Table], target: str) -> None:
        self._tables, self._target = tables, target
        self._next_s = 0.0
        self._stock_read_s = 0.0

    def of_next(self, loader: Any) -> Iterator[tuple[PerType, PerType, Tensor, Any]]:
        """Yield (input nodes, features, labels, blocks) of one epoch, and add up the time to get them.

        Input nodes and features are by the node types that have features.
        """
        begun = time.perf_counter()
        for _, _, blocks in loader:
            sources = {ntype: blocks[0].srcnodes[ntype].data for ntype in self._tables}
            input_nodes = {ntype: data[dgl.NID] for ntype, data in sources.items()}
            x = {ntype: data[self._tables[ntype].key] for ntype, data in sources.items()}
            labels = blocks[-1].dstnodes[self._target].data["label"]
            self._next_s += time.perf_counter() - begun
            yield input_nodes, x, labels, blocks
            del sources, input_nodes, x, labels, blocks  # frees the minibatch before the next one is made
            begun = time.perf_counter()
        self._next_s += time.perf_counter() - begun

    def watch_stock_reads(self) -> None:
        """Measure how long DGL fetches columns: page faults and copying."""
        storage = dgl.storages.pytorch_tensor.PyTorchTensorStorage
        if hasattr(storage, "watched"):
            return
        fetch, storage.watched = storage.fetch, True

        def timed_fetch(*arguments: Any, **keywords: Any) -> Any:
            begun = time.perf_counter()
            try:
                return fetch(*arguments, **keywords)
            finally:
                self._stock_read_s += time.perf_counter() - begun

        storage.fetch = timed_fetch

    def stages(self, stats: dict[str, Any]) -> dict[str, float]:
        """Seconds of "reading", "gather", "planning", and "sampling", which is the rest of next()."""
        seconds = stats.get("seconds")
        if seconds is None:
            stages = {"reading": self._stock_read_s, "gather": 0.0, "planning": 0.0}
        else:
            stages = {"reading": seconds["wait"], "gather": seconds["gather"], "planning": seconds["plan"]}
        return {"sampling": max(0.0, self._next_s - sum(stages.values())), **stages}


def _stats(loader: Any) -> dict[str, Any]:
    """FeatureLoader.stats(); {} for stock DGL."""
    feature_loader = getattr(loader, "feature_loader", None)
    return dict(feature_loader.stats()) if feature_loader else {}


def _train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Any, x: PerType, labels: Tensor
) -> None:
    logits = model(blocks, {ntype: rows.float() for ntype, rows in x.items()})
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _page_cache_hits(
    read_bytes: int | None, rows: Mapping[str, int], tables: Mapping[str, Table]
) -> float | None:
    """The share of pages that stock found in the page cache, if rows are whole pages."""
    if read_bytes is None or any(table.row_bytes % mmap.PAGESIZE for table in tables.values()):
        return None
    return max(0.0, 1 - read_bytes / sum(rows[ntype] * table.row_bytes for ntype, table in tables.items()))


def _run(values: dict[str, Any]) -> dict[str, Any]:
    return asdict(Side(EpochConfig(**values)).run())


class SageLayer(nn.Module):
    """For each node type, W x + the sum over relations of V mean(neighbors' x). Unlike SAGEConv it does not
    copy x.

    in_dims: by node type; relations from other types are left out. out_types: the types of the result.
    """

    def __init__(self, in_dims: Mapping[str, int], out_dim: int, relations: Sequence[Relation]) -> None:
        super().__init__()
        self._relations = [relation for relation in relations if relation[0] in in_dims]
        self._in_types = list(in_dims)
        self.own = nn.ModuleList(nn.Linear(dim, out_dim) for dim in in_dims.values())
        self.neighbors = nn.ModuleList(
            nn.Linear(in_dims[source], out_dim, bias=False) for source, _, _ in self._relations
        )
        self.out_types = list(dict.fromkeys([*in_dims, *(relation[2] for relation in self._relations)]))

    def forward(self, block: Any, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = {
            ntype: own(x[ntype][: block.num_dst_nodes(ntype)])
            for ntype, own in zip(self._in_types, self.own, strict=True)
        }
        for (source, name, target), neighbors in zip(self._relations, self.neighbors, strict=True):
            mean = dgl.ops.copy_u_mean(block[source, name, target], neighbors(x[source]))
            result[target] = result[target] + mean if target in result else mean
        return result


class GraphSage(nn.Module):
    """One layer per fanout. in_dims: of the types with features. target: the type that is classified.

    Raises ValueError if no features reach the target.
    """

    def __init__(
        self,
        in_dims: Mapping[str, int],
        hidden: int,
        classes: int,
        layer_count: int,
        relations: Sequence[Relation],
        target: str,
    ) -> None:
        super().__init__()
        self._target = target
        self.layers = nn.ModuleList()
        for depth in range(layer_count):
            is_last = depth == layer_count - 1
            used = [relation for relation in relations if not is_last or relation[2] == target]
            layer = SageLayer(in_dims, classes if is_last else hidden, used)
            self.layers.append(layer)
            in_dims = dict.fromkeys(layer.out_types, hidden)
        if target not in in_dims:
            raise ValueError(f"no features reach {target!r} nodes in {layer_count} layers")

    def forward(self, blocks: list[Any], x: Mapping[str, Tensor]) -> Tensor:
        """Logits of the seeds. x: the rows of the input nodes, by node type."""
        assert len(blocks) == len(self.layers)
        for depth, block in enumerate(blocks):
            x = self.layer(depth, block, x)
        return x[self._target]

    def layer(self, depth: int, block: Any, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply one layer to the output of the previous layer."""
        if depth:
            x = {ntype: torch.relu(values) for ntype, values in x.items()}
        result: dict[str, Tensor] = self.layers[depth](block, x)
        return result


if __name__ == "__main__":
    sys.exit(serve(_run))
