"""Train GraphSAGE for an epoch, with features read by gids or by stock DGL, and measure it.

``python -m gids.measure.epoch`` is one side of a comparison, in its own process (isolation.py). Both sides
run this code with the same topology in memory, seeds, model, workers and threads. They differ only in
``_make_loader``: the ``gids=`` argument, or a memory-mapped array in ``g.ndata``.

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
from gids.measure.isolation import cached_share, report_progress, serve
from gids.measure.kept_rows import KeptRows
from gids.measure.memory_group import OwnPeak, limit_own_memory, own_memory_bytes
from gids.measure.model import GraphSage
from gids.measure.sides import EpochConfig, EpochResult
from gids.sampler import Block
from gids.store import FeatureStore, Table
from gids.trace.timeline import Timeline

TRIAL_BATCHES, TRIAL_S = 8, 5.0  # trial training: steps per process, time limit
# More than measured: later minibatches are larger, and memory gets fragmented.
MARGIN, MARGIN_BYTES = 0.25, 16 << 20
LEARNING_RATE = 0.01


def run_epochs(config: EpochConfig) -> EpochResult:
    """Train one side. Blocks. Needs a fresh process, for a cold start and a correct peak of memory.

    Raises OSError if the memory limit cannot be set, and the loader's errors.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    graph, splits = _load_graph(Path(config.source))
    store = FeatureStore(config.dataset, allow_dirs=config.allow_dirs)
    table = store.find_table("node", store.node_types[0], config.feature_key)
    assert table is not None
    torch.manual_seed(config.seed)
    classes = int(graph.ndata["label"].max()) + 1
    model = GraphSage(table.shape[0], config.hidden, classes, len(config.fanouts))
    train_ids = splits["train"][: config.batches * config.batch_size]
    batches = -(-len(train_ids) // config.batch_size)
    kept = KeptRows(batches, table)
    headroom = _headroom(model, graph, train_ids, config, table)
    cached_before = max(map(cached_share, _feature_files(config, store)))
    base_rss = resident_bytes("VmRSS")
    limit = None
    if config.memory_bytes:
        limit = own_memory_bytes() + headroom + config.memory_bytes
        limit_own_memory(limit)
    torch.manual_seed(config.seed)
    dgl.seed(config.seed)
    measured = _train(model, graph, train_ids, config, store, kept)
    if limit is not None:
        limit_own_memory(None)  # the rest is not measured
    if config.side == "stock":
        measured["hit_ratio"] = _page_cache_hits(measured["read_bytes"], measured["rows"], table.row_bytes)
    val_accuracy = None
    if config.val_nodes and measured["batches"] == batches:
        val_accuracy = _validate(model, graph, splits["val"][: config.val_nodes], config, store)
    compared, wrong = kept.compare(_source_of(config, table))
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


def _train(
    model: nn.Module, graph: Any, ids: Tensor, config: EpochConfig, store: FeatureStore, kept: KeptRows
) -> dict[str, Any]:
    """The measured part: from opening the features to the last step. Returns fields of EpochResult."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    timeline = Timeline() if config.timeline else Timeline(most_events=0)
    waits = Waits(timeline, config.feature_key)
    training_s = 0.0
    accuracies: list[float] = []
    rows = 0
    total = -(-len(ids) // config.batch_size)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    read_before, cpu_before, begun = device_bytes_read(), cpu_seconds(), time.perf_counter()
    with _open_loader(graph, ids, config, store, waits, timeline) as loader:
        for input_nodes, x, labels, blocks in waits.of_next(loader):
            step_begun = time.perf_counter_ns()
            accuracies.append(_train_step(model, optimizer, blocks, x, labels))
            step_end = time.perf_counter_ns()
            training_s += (step_end - step_begun) * 1e-9
            timeline.add("training", step_begun, step_end)
            rows += len(input_nodes)
            kept.add(input_nodes, x)
            report_progress(len(accuracies) / total)
            if 0 < config.most_seconds < time.perf_counter() - begun:
                break
        seconds = time.perf_counter() - begun
        gc.collect()  # ends the workers, so that their CPU time counts
        stats = _stats(loader)
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds() - cpu_before,
            "stages": {**waits.stages(stats), "training": training_s},
            "batches": len(accuracies),
            "rows": rows,
            "read_bytes": _difference(device_bytes_read(), read_before),
            "hit_ratio": stats["hit_ratio"] if stats.get("pages") else None,
            "train_accuracy": float(np.mean(accuracies[total // 2 :])) if len(accuracies) == total else None,
            "peak_rss_bytes": resident_bytes("VmHWM"),
            "loader": stats,
        }


def _validate(
    model: GraphSage, graph: Any, ids: Tensor, config: EpochConfig, store: FeatureStore
) -> float | None:
    """Accuracy with full neighborhoods, from the dataset on both sides; not timed.

    None if a node's whole neighborhood needs too much memory.
    """

    def layer(index: int, block: Block, h: Tensor) -> Tensor:
        edges: Any = ("csc", (block.indptr, block.indices, []))
        dgl_block = dgl.create_block(edges, num_src_nodes=block.num_src, num_dst_nodes=block.num_dst)
        return model.layer(index, dgl_block, h)

    try:
        result = layerwise(
            layer,
            gids.open(store, memory=config.gids_memory_bytes, window=config.window),
            layer_count=len(config.fanouts),
            nodes=ids,
        )
    except MemoryBudgetError:
        return None
    assert isinstance(result.values, Tensor)
    return _accuracy(result.values, graph.ndata["label"][ids])


def _load_graph(source: Path) -> tuple[Any, dict[str, Tensor]]:
    indptr, indices = (torch.from_numpy(np.load(source / f"{name}.npy")) for name in ("indptr", "indices"))
    # Only the format for sampling: with workers, DGL makes all allowed formats.
    graph = dgl.graph(("csc", (indptr, indices, [])), num_nodes=len(indptr) - 1).formats("csc")
    graph.ndata["label"] = torch.from_numpy(np.load(source / "labels.npy"))
    splits = {name: torch.from_numpy(np.load(source / f"{name}_idx.npy")) for name in ("train", "val")}
    return graph, splits


def _feature_files(config: EpochConfig, store: FeatureStore) -> list[Path]:
    if config.side == "stock":
        return [Path(config.feature_file or Path(config.source) / "feat.npy")]
    return [shard for table in store.tables.values() for shard in table.shard_paths]


def _sampler(config: EpochConfig) -> Any:
    return dgl.dataloading.NeighborSampler(
        list(config.fanouts), prefetch_node_feats=[config.feature_key], prefetch_labels=["label"]
    )


@contextmanager
def _open_loader(
    graph: Any, ids: Tensor, config: EpochConfig, store: FeatureStore, waits: Waits, timeline: Timeline
) -> Iterator[Any]:
    """Open the loader; with config.timeline, follow it and write the file at the end, also after an error."""
    loader = _make_loader(graph, ids, config, store, waits)
    features = getattr(loader, "feature_loader", None)
    try:
        with timeline.follow(features) if config.timeline and features else nullcontext():
            yield loader
    finally:
        if config.timeline:
            timeline.write(config.timeline)
        if config.side == "gids":
            loader.close()
        del loader, features
        gc.collect()  # frees the memory for the next loader


def _make_loader(graph: Any, ids: Tensor, config: EpochConfig, store: FeatureStore, waits: Waits) -> Any:
    """The only difference between the sides."""
    options: dict[str, Any] = {
        "batch_size": config.batch_size,
        "shuffle": True,
        "num_workers": config.workers,
    }
    if config.side == "gids":
        return gids.dgl.DataLoader(
            graph,
            ids,
            _sampler(config),
            gids=gids.open(
                store,
                memory=config.gids_memory_bytes,
                window=config.window,
                reads=config.reads,
                scratch=config.scratch or None,
                scratch_bytes=config.scratch_bytes or None,
            ),
            **options,
        )
    graph.ndata[config.feature_key] = torch.from_numpy(
        _map_features(config, random_access=config.random_access)
    )
    waits.watch_stock_reads()
    return dgl.dataloading.DataLoader(graph, ids, _sampler(config), **options)


def _map_features(config: EpochConfig, *, random_access: bool) -> Any:
    # "c" maps the file like "r"; torch warns about arrays that cannot be written.
    features: Any
    if config.feature_file:
        shape = tuple(config.feature_shape)
        features = np.memmap(config.feature_file, np.dtype(config.feature_dtype), "c", shape=shape)
    else:
        features = np.load(Path(config.source) / "feat.npy", mmap_mode="c")
    if random_access:
        features._mmap.madvise(mmap.MADV_RANDOM)
    return features


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


def _headroom(model: GraphSage, graph: Any, ids: Tensor, config: EpochConfig, table: Table) -> int:
    """Peak memory of training without features, in bytes, the same for both sides; 0 without a limit.

    Trains a copy of the model for some steps with DGL's loader on made-up features. This is also the warm-up.
    """
    with OwnPeak() if config.memory_bytes else nullcontext() as peak:
        _trial(deepcopy(model), graph, ids, config, table)
    gc.collect()  # ends the loader's workers
    ctypes.CDLL(None).malloc_trim(0)  # return the memory that the trial freed
    if peak is None:
        return 0
    measured = max(0, peak.peak_bytes - own_memory_bytes())
    return config.spare_bytes + (config.headroom_bytes or int((1 + MARGIN) * measured) + MARGIN_BYTES)


def _trial(model: GraphSage, graph: Any, ids: Tensor, config: EpochConfig, table: Table) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    sampler = dgl.dataloading.NeighborSampler(list(config.fanouts), prefetch_labels=["label"])
    seeds = min(len(ids), TRIAL_BATCHES * (1 + config.workers) * config.batch_size)
    ids = ids[torch.linspace(0, len(ids) - 1, seeds).long()]
    begun = time.perf_counter()
    for input_nodes, _, blocks in dgl.dataloading.DataLoader(
        graph, ids, sampler, batch_size=config.batch_size, num_workers=config.workers
    ):
        x = torch.full((len(input_nodes), *table.shape), 0.1, dtype=out_dtype_of(table, None))
        _train_step(model, optimizer, blocks, x, blocks[-1].dstdata["label"])
        if time.perf_counter() - begun > TRIAL_S:
            break


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


def _source_of(config: EpochConfig, table: Table) -> Callable[[Tensor], Tensor]:
    """Return a function that reads rows by id."""
    if not config.plain_rows:
        return table.read_rows
    features = torch.from_numpy(_map_features(config, random_access=True))
    return lambda ids: features.index_select(0, ids)  # without the GIL


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _page_cache_hits(read_bytes: int | None, rows: int, row_bytes: int) -> float | None:
    """The share of pages that stock found in the page cache, if rows are whole pages."""
    if read_bytes is None or row_bytes % mmap.PAGESIZE:
        return None
    return max(0.0, 1 - read_bytes / (rows * row_bytes))


if __name__ == "__main__":
    sys.exit(serve(lambda config: asdict(run_epochs(EpochConfig(**config)))))
