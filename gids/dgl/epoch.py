"""One epoch of a DataLoader: adds the features to DGL's sampled minibatches.

Made by the DataLoader's ``__iter__``. It replaces DGL's own prefetching iterator, which fails if sampling
takes 30 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from dgl.dataloading import dataloader as stock
from dgl.utils import recursive_apply, recursive_apply_pair

from gids.dgl.columns import SampledMinibatch
from gids.loader import FeatureLoader
from gids.loader.framework_epoch import FrameworkEpoch, prefetch_factor


class Epoch(Iterator[Any]):
    """An iterator of the sampler's minibatches. After an error it continues with the next one."""

    def __init__(self, loader: Any, feature_loader: FeatureLoader) -> None:
        self._loader = loader
        self._minibatches = FrameworkEpoch(
            feature_loader,
            _sampled(loader),
            attrgetter("ids"),
            bytes_of=attrgetter("nbytes"),
            in_workers=loader.num_workers > 0,
            learned=loader.learned,
        )

    def __next__(self) -> Any:
        minibatch, rows = next(self._minibatches)
        # DGL fetches the other lazy columns, such as labels, and moves the graphs to the device.
        batch, columns, _ = stock._prefetch(minibatch.batch, self._loader, None)
        batch = recursive_apply_pair(batch, columns, stock._assign_for)
        minibatch.fill(batch, rows, self._loader.device)
        return batch

    def close(self) -> None:
        """End the epoch here. Idempotent; dropping it does the same."""
        self._minibatches.close()


def _sampled(loader: Any) -> Iterator[SampledMinibatch]:
    """PyTorch's iterator, which does not hold the loader. A generator would end at the first error."""
    graph, tables = loader.graph, loader.served_tables

    def without_served_columns(batch: Any) -> SampledMinibatch:
        return SampledMinibatch(recursive_apply(batch, stock.restore_parent_storage_columns, graph), tables)

    if loader.num_workers:
        loader.prefetch_factor = prefetch_factor(loader.num_workers, loader.prefetch_factor)
    return map(without_served_columns, torch.utils.data.DataLoader.__iter__(loader))
