"""One side of a comparison, in its own process: train GraphSAGE on features that gids reads, or on a map.

Side has the measurement; the side of a framework (dgl_side.py, pyg_side.py, torch_side.py) has its loaders
and its model. Both sides of a comparison run this code with the same topology, seeds and model. They differ
in ``make_loader`` only.

The measurement starts when the features are opened, and ends with the last training step. Before it come
imports, loading the topology, and a step on made-up features, which warms up. Both sides keep some rows of
the minibatches, and compare them with the dataset afterwards. Started by sides.py.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gids
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

LEARNING_RATE = 0.01


class Side(ABC):
    """One side: the dataset, its seeds in the order of the epoch, and the model to train.

    A minibatch is what a loader of the framework yields.
    """

    def __init__(self, config: EpochConfig) -> None:
        self.config = config
        self.store = FeatureStore(config.dataset, allow_dirs=config.allow_dirs)
        self.tables = [self.store.table(name) for name in config.tables]
        self.shards = [path for table in self.tables for path in table.shard_paths]
        self.target = str(self.tables[0].type)
        self.all_labels = self.store.labels[self.target].long().flatten()
        ids = self.store.splits[self.target]["train"][: config.batches * config.batch_size]
        self.train_ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(config.seed))]
        self.batches = -(-len(ids) // config.batch_size)
        torch.manual_seed(config.seed)
        self.model = self.make_model(int(self.all_labels.max()) + 1) if config.hidden else None

    @abstractmethod
    def make_model(self, classes: int) -> nn.Module: ...

    @abstractmethod
    def sample(self, seeds: Tensor) -> Any:
        """Minibatches of these seeds, without features. Called before the measurement, too."""

    @abstractmethod
    def gids_loader(self, source: gids.Source) -> Any:
        """A loader of minibatches of train_ids, in their order. It has close()."""

    @abstractmethod
    def stock_loader(self, features: list[Tensor]) -> Any:
        """The same with the framework's loader. features: the mapped tables."""

    @abstractmethod
    def input_nodes(self, minibatch: Any) -> list[Tensor]:
        """The ids of the nodes whose rows the model gets, by table."""

    @abstractmethod
    def features(self, minibatch: Any) -> list[Tensor]:
        """The rows of the input nodes, by table. Some stock loaders read them here."""

    @abstractmethod
    def labels(self, minibatch: Any) -> Tensor:
        """The labels of the seeds."""

    @abstractmethod
    def logits(self, model: nn.Module, minibatch: Any, x: list[Tensor]) -> Tensor:
        """The model's logits of the seeds. x: the rows of the input nodes, by table."""

    def stats(self, loader: Any) -> dict[str, Any]:
        """FeatureLoader.stats() of gids_loader()."""
        stats: dict[str, Any] = loader.stats()
        return stats

    def make_loader(self) -> Any:
        """The only difference between the sides."""
        config = self.config
        if config.side != OURS:
            return self.stock_loader(
                [map_array(t, random_access=config.side == ADVISED) for t in self.tables]
            )
        tuning = gids.Tuning(direct=direct_works(self.shards))
        return self.gids_loader(
            gids.open(self.store, memory=config.memory_bytes, tuning=tuning, **config.source)
        )

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
        optimizer = _optimizer(self.model)
        loading_s, training_s, batches, rows, row_bytes = 0.0, 0.0, 0, 0, 0
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        read_before, cpu_before, begun = device_bytes_read(), cpu_seconds(), time.perf_counter()
        loader = self.make_loader()
        with closing(loader) if config.side == OURS else nullcontext():
            minibatches = iter(loader)
            while batches < self.batches:
                asked = time.perf_counter()
                minibatch = next(minibatches)
                x, labels = self.features(minibatch), self.labels(minibatch)
                came, batches = time.perf_counter(), batches + 1
                self._step(self.model, optimizer, minibatch, x, labels)
                loading_s, training_s = loading_s + came - asked, training_s + time.perf_counter() - came
                for table, ids, of_table, keep in zip(
                    self.tables, self.input_nodes(minibatch), x, kept, strict=True
                ):
                    rows, row_bytes = rows + len(ids), row_bytes + len(ids) * table.row_bytes
                    keep.add(ids, of_table)
                del minibatch, x, labels, ids, of_table  # frees it before the next one is made
                if 0 < config.most_seconds < time.perf_counter() - begun:
                    break
            seconds = time.perf_counter() - begun
            if config.side == OURS:
                stats = self.stats(loader)
            del minibatches  # ends the workers, whose reads and CPU time count from then on
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
        """Sample a minibatch, and train a copy of the model on it, with made-up features."""
        model = deepcopy(self.model)
        optimizer = _optimizer(model)
        for minibatch in islice(self.sample(self.train_ids[: self.config.batch_size]), 1):
            x = [
                torch.full((len(ids), *table.shape), 0.1, dtype=out_dtype_of(table, None))
                for table, ids in zip(self.tables, self.input_nodes(minibatch), strict=True)
            ]
            self._step(model, optimizer, minibatch, x, self.labels(minibatch))

    def _step(
        self,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        minibatch: Any,
        x: list[Tensor],
        labels: Tensor,
    ) -> None:
        if model is None or optimizer is None:  # the epoch is loaded only
            return
        logits = self.logits(model, minibatch, [rows.float() for rows in x])
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _optimizer(model: nn.Module | None) -> torch.optim.Optimizer | None:
    return None if model is None else torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
