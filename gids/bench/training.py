"""One side of a comparison, in its own process: train for an epoch, with features read by gids or stock DGL.

Both sides run this code with the same topology in memory, seeds and model: GraphSAGE, with several relations
R-GCN. They differ only in ``_make_loader``: the ``gids=`` argument, or a memory-mapped array in ``g.ndata``.

The measurement starts when the features are opened, and ends with the last training step. Before it come
imports, loading the topology, and a step on made-up features, which warms up. Both sides keep some rows of
the same minibatches, and compare them with the dataset afterwards. Started by sides.py.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict
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
from gids.store import FeatureStore, Table
from gids.store.names import Relation

PerType = dict[str, Tensor]
LEARNING_RATE = 0.01


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train as an EpochConfig says; the fields of its EpochResult. Called by run_fresh."""
    return asdict(Side(EpochConfig(**values)).train())


class Side:
    """One side: the graph and the seeds in memory, the dataset, and the model to train."""

    def __init__(self, config: EpochConfig) -> None:
        self.config = config
        self.store = FeatureStore(config.dataset, allow_dirs=config.allow_dirs)
        self.target = config.target or self.store.node_types[0]
        labels = self.store.labels[self.target].long()
        self.graph = load_graph(self.store)
        self.graph.nodes[self.target].data["label"] = labels
        self.tables = {str(table.type): table for table in map(self.store.table, config.tables)}
        self.train_ids = self.store.splits[self.target]["train"][: config.batches * config.batch_size]
        self.batches = -(-len(self.train_ids) // config.batch_size)
        torch.manual_seed(config.seed)
        self.model = GraphSage(
            {ntype: table.shape[0] for ntype, table in self.tables.items()},
            config.hidden,
            int(labels.max()) + 1,
            len(config.fanouts),
            self.graph.canonical_etypes,
            self.target,
        )

    def train(self) -> EpochResult:
        """Train. Blocks. Needs a fresh process, for a cold start and a correct peak of memory.

        Raises OSError if the memory limit cannot be set, and the loader's errors.
        """
        config = self.config
        self._warm_up()
        ctypes.CDLL(None).malloc_trim(0)  # return the memory that the step freed
        kept = {ntype: KeptRows(self.batches, table) for ntype, table in self.tables.items()}
        cached_before = max(map(_empty_page_cache, self._shards), default=0.0)
        base_rss = resident_bytes("VmRSS")
        if config.memory_bytes and config.side != OURS:
            limit_own_memory(config.memory_bytes)
        torch.manual_seed(config.seed)
        np.random.seed(config.seed)  # noqa: NPY002  (DGL shuffles with it)
        dgl.seed(config.seed)
        measured = self._train_epoch(kept)
        counts = [rows.compare(self.tables[ntype].read_rows) for ntype, rows in kept.items()]
        compared, wrong = map(sum, zip(*counts, strict=True))
        return EpochResult(
            side=config.side,
            base_rss_bytes=base_rss,
            compared_rows=compared,
            wrong_rows=wrong,
            cached_before=cached_before,
            **measured,
        )

    @property
    def _shards(self) -> list[Path]:
        return [path for table in self.tables.values() for path in table.shard_paths]

    def _train_epoch(self, kept: Mapping[str, KeptRows]) -> dict[str, Any]:
        """The measured part: from opening the features to the last step. Returns fields of EpochResult."""
        config = self.config
        optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        loading_s, training_s, batches = 0.0, 0.0, 0
        rows = dict.fromkeys(self.tables, 0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        read_before, cpu_before, begun = device_bytes_read(), cpu_seconds(), time.perf_counter()
        loader = self._make_loader()
        with closing(loader) if config.side == OURS else nullcontext():
            minibatches = iter(loader)
            while batches < self.batches:
                asked = time.perf_counter()
                blocks = next(minibatches)[2]
                sources = {ntype: blocks[0].srcnodes[ntype].data for ntype in self.tables}
                x = {
                    ntype: data[self.tables[ntype].key] for ntype, data in sources.items()
                }  # stock reads here
                labels = blocks[-1].dstnodes[self.target].data["label"]
                came, batches = time.perf_counter(), batches + 1
                _train_step(self.model, optimizer, blocks, x, labels)
                loading_s, training_s = loading_s + came - asked, training_s + time.perf_counter() - came
                for ntype, data in sources.items():
                    rows[ntype] += len(x[ntype])
                    kept[ntype].add(data[dgl.NID], x[ntype])
                del blocks, sources, x, labels, data  # frees the minibatch before the next one is made
                if 0 < config.most_seconds < time.perf_counter() - begun:
                    break
            seconds = time.perf_counter() - begun
            stats: dict[str, Any] = loader.feature_loader.stats() if config.side == OURS else {}
        read_after = device_bytes_read()
        read_bytes = None if read_after is None or read_before is None else read_after - read_before
        hit_ratio = stats["hit_ratio"] if stats.get("pages") else None
        if config.side != OURS:
            hit_ratio = _page_cache_hits(read_bytes, rows, self.tables)
        stages = {"loading": loading_s, "training": training_s}
        if stats:
            stages["reading"] = stats["seconds"]["wait"]
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds() - cpu_before,
            "stages": stages,
            "batches": batches,
            "rows": sum(rows.values()),
            "read_bytes": read_bytes,
            "hit_ratio": hit_ratio,
            "peak_rss_bytes": resident_bytes("VmHWM"),
            "loader": stats,
        }

    def _make_loader(self) -> Any:
        """The only difference between the sides."""
        config = self.config
        sampler = dgl.dataloading.NeighborSampler(
            list(config.fanouts),
            prefetch_node_feats={ntype: [table.key] for ntype, table in self.tables.items()},
            prefetch_labels={self.target: ["label"]},
        )
        arguments = self.graph, self._seeds(self.train_ids), sampler
        options: dict[str, Any] = {"batch_size": config.batch_size, "shuffle": True}
        if config.side == OURS:
            tuning = gids.Tuning(direct=direct_works(self._shards))
            source = gids.open(self.store, memory=config.memory_bytes, tuning=tuning, **config.source)
            return gids.dgl.DataLoader(*arguments, gids=source, **options)
        for ntype, table in self.tables.items():
            array = map_array(table, random_access=config.side == ADVISED)
            self.graph.nodes[ntype].data[table.key] = array
        return dgl.dataloading.DataLoader(*arguments, **options)

    def _seeds(self, ids: Tensor) -> Any:
        """Seeds as DGL takes them."""
        return ids if self.graph.is_homogeneous else {self.target: ids}

    def _warm_up(self) -> None:
        """Train a copy of the model for a step with DGL's loader, on made-up features."""
        config, model = self.config, deepcopy(self.model)
        sampler = dgl.dataloading.NeighborSampler(
            list(config.fanouts), prefetch_labels={self.target: ["label"]}
        )
        seeds = self._seeds(self.train_ids[: config.batch_size])
        for _, _, blocks in dgl.dataloading.DataLoader(
            self.graph, seeds, sampler, batch_size=config.batch_size
        ):
            x = {
                ntype: torch.full(
                    (blocks[0].num_src_nodes(ntype), *table.shape), 0.1, dtype=out_dtype_of(table, None)
                )
                for ntype, table in self.tables.items()
            }
            labels = blocks[-1].dstnodes[self.target].data["label"]
            _train_step(model, torch.optim.Adam(model.parameters()), blocks, x, labels)


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


def _empty_page_cache(shard: Path) -> float:
    """Drop a file from the page cache; the share of it that stays there."""
    with suppress(OSError):  # cached_before shows it
        drop_page_cache(shard)
    return cached_share(shard)


def _train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Any, x: PerType, labels: Tensor
) -> None:
    logits = model(blocks, {ntype: rows.float() for ntype, rows in x.items()})
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _page_cache_hits(
    read_bytes: int | None, rows: Mapping[str, int], tables: Mapping[str, Table]
) -> float | None:
    """The share of pages that stock found in the page cache, if rows are whole pages."""
    if read_bytes is None or any(table.row_bytes % mmap.PAGESIZE for table in tables.values()):
        return None
    return max(0.0, 1 - read_bytes / sum(rows[ntype] * table.row_bytes for ntype, table in tables.items()))


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
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, {ntype: torch.relu(rows) for ntype, rows in x.items()} if depth else x)
        return x[self._target]
