"""Train GraphSAGE for an epoch, with features read by gids or by stock DGL, and measure it.

``python -m gids.measure.epoch`` is one side of a comparison, in its own process (isolation.py). Both sides
run this code with the same topology in memory, seeds, model, workers and threads. They differ only in
``Side._make_loader``: the ``gids=`` argument, or a memory-mapped array in ``g.ndata``.

The measurement starts when memory is limited and the features are opened, and ends with the last training
step. Before it come imports, loading the topology, and some training steps on made-up features, which measure
the memory of training. Both sides keep some rows of the same minibatches. They are compared with the source
after the measurement, without a memory limit.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import time
from collections.abc import Callable, Iterator
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
from gids.errors import MemoryBudgetError
from gids.inference import layerwise
from gids.measure.counters import cpu_seconds, device_bytes_read, resident_bytes
from gids.measure.features import array_file, map_array, why_no_array
from gids.measure.isolation import cached_share, serve
from gids.measure.kept_rows import KeptRows
from gids.measure.memory_group import OwnPeak, limit_own_memory, own_memory_bytes
from gids.measure.model import GraphSage
from gids.measure.sides import EpochConfig, EpochResult
from gids.sampler import Block
from gids.store import FeatureStore
from gids.trace.timeline import Timeline

TRIAL_BATCHES, TRIAL_S = 8, 5.0  # trial training: steps per process, time limit
# More than measured: later minibatches are larger, and memory gets fragmented.
MARGIN, MARGIN_BYTES = 0.25, 16 << 20
LEARNING_RATE = 0.01


class Side:
    """One side: the graph and the seeds in memory, the dataset, and the model to train."""

    def __init__(self, config: EpochConfig) -> None:
        self.config = config
        source = Path(config.source)
        self.graph = _load_graph(source)
        self.store = FeatureStore(config.dataset, allow_dirs=config.allow_dirs)
        table = self.store.find_table("node", self.store.node_types[0], config.feature_key)
        assert table is not None
        self.table = table
        self.array_file = array_file(source, table)
        seeds = torch.from_numpy(np.load(source / "train_idx.npy"))
        self.train_ids = seeds[: config.batches * config.batch_size]
        self.batches = -(-len(self.train_ids) // config.batch_size)
        torch.manual_seed(config.seed)
        classes = int(self.graph.ndata["label"].max()) + 1
        self.model = GraphSage(table.shape[0], config.hidden, classes, len(config.fanouts))

    def run(self) -> EpochResult:
        """Train. Blocks. Needs a fresh process, for a cold start and a correct peak of memory.

        Raises OSError if the memory limit cannot be set, and the loader's errors.
        """
        config = self.config
        kept = KeptRows(self.batches, self.table)
        headroom = self._headroom()
        cached_before = max(map(cached_share, self._feature_files()))
        base_rss = resident_bytes("VmRSS")
        limit = None
        if config.memory_bytes:
            limit = own_memory_bytes() + headroom + config.memory_bytes
            limit_own_memory(limit)
        torch.manual_seed(config.seed)
        dgl.seed(config.seed)
        measured = self._train(kept)
        if limit is not None:
            limit_own_memory(None)  # the rest is not measured
        val_accuracy = None
        if config.val_nodes and measured["batches"] == self.batches:
            val_accuracy = self._validate()
        compared, wrong = kept.compare(self._source_rows())
        return EpochResult(
            side=config.side,
            val_accuracy=val_accuracy,
            base_rss_bytes=base_rss,
            memory_limit_bytes=limit,
            headroom_bytes=None if limit is None else headroom,
            compared_rows=compared,
            wrong_rows=wrong,
            cached_before=cached_before,
            **measured,
        )

    def _train(self, kept: KeptRows) -> dict[str, Any]:
        """The measured part: from opening the features to the last step. Returns fields of EpochResult."""
        config, total = self.config, self.batches
        optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        timeline = Timeline() if config.timeline else Timeline(most_events=0)
        waits = Waits(timeline, config.feature_key)
        training_s = 0.0
        accuracies: list[float] = []
        rows = 0
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        read_before, cpu_before, begun = device_bytes_read(), cpu_seconds(), time.perf_counter()
        with self._open_loader(waits, timeline) as loader:
            for input_nodes, x, labels, blocks in waits.of_next(loader):
                step_begun = time.perf_counter_ns()
                accuracies.append(_train_step(self.model, optimizer, blocks, x, labels))
                step_end = time.perf_counter_ns()
                training_s += (step_end - step_begun) * 1e-9
                timeline.add("training", step_begun, step_end)
                rows += len(input_nodes)
                kept.add(input_nodes, x)
                if 0 < config.most_seconds < time.perf_counter() - begun:
                    break
            seconds = time.perf_counter() - begun
            gc.collect()  # ends the workers, so that their CPU time counts
            stats = _stats(loader)
            read_bytes = _difference(device_bytes_read(), read_before)
            hit_ratio = stats["hit_ratio"] if stats.get("pages") else None
            if config.side == "stock":
                hit_ratio = _page_cache_hits(read_bytes, rows, self.table.row_bytes)
            whole = len(accuracies) == total
            return {
                "seconds": seconds,
                "cpu_seconds": cpu_seconds() - cpu_before,
                "stages": {**waits.stages(stats), "training": training_s},
                "batches": len(accuracies),
                "rows": rows,
                "read_bytes": read_bytes,
                "hit_ratio": hit_ratio,
                "train_accuracy": float(np.mean(accuracies[total // 2 :])) if whole else None,
                "peak_rss_bytes": resident_bytes("VmHWM"),
                "loader": stats,
            }

    @contextmanager
    def _open_loader(self, waits: Waits, timeline: Timeline) -> Iterator[Any]:
        """Open the loader. With config.timeline, follow it and write the file, also after an error."""
        loader = self._make_loader(waits)
        features = getattr(loader, "feature_loader", None)
        try:
            with timeline.follow(features) if self.config.timeline and features else nullcontext():
                yield loader
        finally:
            if self.config.timeline:
                timeline.write(self.config.timeline)
            if self.config.side == "gids":
                loader.close()
            del loader, features
            gc.collect()  # frees the memory for the next loader

    def _make_loader(self, waits: Waits) -> Any:
        """The only difference between the sides."""
        config = self.config
        sampler = dgl.dataloading.NeighborSampler(
            list(config.fanouts), prefetch_node_feats=[config.feature_key], prefetch_labels=["label"]
        )
        arguments = self.graph, self.train_ids, sampler
        options: dict[str, Any] = {
            "batch_size": config.batch_size,
            "shuffle": True,
            "num_workers": config.workers,
        }
        if config.side == "gids":
            source = gids.open(
                self.store,
                memory=config.gids_memory_bytes,
                window=config.window,
                reads=config.reads,
                scratch=config.scratch or None,
                scratch_bytes=config.scratch_bytes or None,
            )
            return gids.dgl.DataLoader(*arguments, gids=source, **options)
        if self.array_file is None:
            raise ValueError(f"stock DGL cannot map {self.table.name!r}: {why_no_array(self.table)}")
        self.graph.ndata[config.feature_key] = map_array(
            self.array_file, self.table, random_access=config.random_access
        )
        waits.watch_stock_reads()
        return dgl.dataloading.DataLoader(*arguments, **options)

    def _validate(self) -> float | None:
        """Accuracy with full neighborhoods, from the dataset on both sides; not timed.

        None if a node's whole neighborhood needs too much memory.
        """
        config = self.config
        ids = torch.from_numpy(np.load(Path(config.source) / "val_idx.npy"))[: config.val_nodes]

        def layer(index: int, block: Block, h: Tensor) -> Tensor:
            edges: Any = ("csc", (block.indptr, block.indices, []))
            dgl_block = dgl.create_block(edges, num_src_nodes=block.num_src, num_dst_nodes=block.num_dst)
            return self.model.layer(index, dgl_block, h)

        try:
            result = layerwise(
                layer,
                gids.open(self.store, memory=config.gids_memory_bytes, window=config.window),
                layer_count=len(config.fanouts),
                nodes=ids,
            )
        except MemoryBudgetError:
            return None
        assert isinstance(result.values, Tensor)
        return _accuracy(result.values, self.graph.ndata["label"][ids])

    def _headroom(self) -> int:
        """Peak memory of training without features, in bytes, the same for both sides; 0 without a limit.

        Trains a copy of the model for some steps with DGL's loader on made-up features. This is also the
        warm-up.
        """
        with OwnPeak() if self.config.memory_bytes else nullcontext() as peak:
            self._train_trial(deepcopy(self.model))
        gc.collect()  # ends the loader's workers
        ctypes.CDLL(None).malloc_trim(0)  # return the memory that the trial freed
        if peak is None:
            return 0
        measured = max(0, peak.peak_bytes - own_memory_bytes())
        headroom = self.config.headroom_bytes or int((1 + MARGIN) * measured) + MARGIN_BYTES
        return self.config.spare_bytes + headroom

    def _train_trial(self, model: GraphSage) -> None:
        config, count = self.config, len(self.train_ids)
        optimizer = torch.optim.Adam(model.parameters())
        sampler = dgl.dataloading.NeighborSampler(list(config.fanouts), prefetch_labels=["label"])
        seeds = min(count, TRIAL_BATCHES * (1 + config.workers) * config.batch_size)
        ids = self.train_ids[torch.linspace(0, count - 1, seeds).long()]
        begun = time.perf_counter()
        for input_nodes, _, blocks in dgl.dataloading.DataLoader(
            self.graph, ids, sampler, batch_size=config.batch_size, num_workers=config.workers
        ):
            shape = len(input_nodes), *self.table.shape
            x = torch.full(shape, 0.1, dtype=out_dtype_of(self.table, None))
            _train_step(model, optimizer, blocks, x, blocks[-1].dstdata["label"])
            if time.perf_counter() - begun > TRIAL_S:
                break

    def _feature_files(self) -> list[Path]:
        if self.config.side == "stock" and self.array_file is not None:
            return [self.array_file]
        return [shard for table in self.store.tables.values() for shard in table.shard_paths]

    def _source_rows(self) -> Callable[[Tensor], Tensor]:
        """A function that reads rows by id."""
        if self.array_file is None:
            return self.table.read_rows
        rows = map_array(self.array_file, self.table, random_access=True)
        return lambda ids: rows.index_select(0, ids)  # without the GIL


def _load_graph(source: Path) -> Any:
    """The DGL graph, with labels."""
    indptr, indices, labels = (
        torch.from_numpy(np.load(source / f"{name}.npy")) for name in ("indptr", "indices", "labels")
    )
    # Only the format for sampling: with workers, DGL makes all allowed formats.
    graph = dgl.graph(("csc", (indptr, indices, [])), num_nodes=len(indptr) - 1).formats("csc")
    graph.ndata["label"] = labels
    return graph


class Waits:
    """Time between training steps, by stage."""

    def __init__(self, timeline: Timeline, feature_key: str) -> None:
        self._timeline, self._feature_key = timeline, feature_key
        self._next_s = 0.0
        self._stock_read_s = 0.0

    def of_next(self, loader: Any) -> Iterator[tuple[Tensor, Tensor, Tensor, Any]]:
        """Yield (input nodes, features, labels, blocks) of one epoch, and add up the time to get them."""
        begun = time.perf_counter_ns()
        for input_nodes, _, blocks in loader:
            x, labels = blocks[0].srcdata[self._feature_key], blocks[-1].dstdata["label"]
            self._took(begun)
            yield input_nodes, x, labels, blocks
            del input_nodes, x, labels, blocks  # frees the minibatch before the next one is made
            begun = time.perf_counter_ns()
        self._took(begun)

    def _took(self, begun_ns: int) -> None:
        now = time.perf_counter_ns()
        self._next_s += (now - begun_ns) * 1e-9
        self._timeline.add("next minibatch", begun_ns, now)

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
    model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Any, x: Tensor, labels: Tensor
) -> float:
    logits = model(blocks, x.float())
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return _accuracy(logits, labels)


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.detach().argmax(1) == labels).float().mean())


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _page_cache_hits(read_bytes: int | None, rows: int, row_bytes: int) -> float | None:
    """The share of pages that stock found in the page cache, if rows are whole pages."""
    if read_bytes is None or row_bytes % mmap.PAGESIZE:
        return None
    return max(0.0, 1 - read_bytes / (rows * row_bytes))


def _run(values: dict[str, Any]) -> dict[str, Any]:
    config = EpochConfig(**values)
    if config.threads:
        torch.set_num_threads(config.threads)
    return asdict(Side(config).run())


if __name__ == "__main__":
    sys.exit(serve(_run))
