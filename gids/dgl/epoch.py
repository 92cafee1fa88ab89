"""One pass over a loader: DGL's sampled minibatches go through the feature stream and come out complete.

Made by the DataLoader's ``__iter__``. DGL's own prefetching iterator is not used: it gives up when sampling
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
from gids.dgl.headroom import Headroom
from gids.loader import FeatureLoader

_END = object()


class Epoch:
    """An iterator of what the sampler returns. After an error in one minibatch the next can be asked for."""

    def __init__(self, loader: Any, feature_loader: FeatureLoader) -> None:
        self._loader = loader
        self._source = _Source(loader)
        self._headroom = Headroom() if loader.num_workers > 0 else None
        ids_of = _ids_on_cpu if feature_loader.device.type == "cpu" else attrgetter("ids")
        self._stream = feature_loader.attach(self._source, ids_of, bytes_of=attrgetter("nbytes"))
        self._handed_out = 0

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        self._handed_out += 1
        item: Any = next(self._stream, _END)
        if item is _END:
            raise StopIteration
        minibatch, rows = item
        if self._headroom is not None:
            limit = self._headroom.window_limit(self._source.sampled - self._handed_out)
            if limit is not None:
                self._stream.limit_window(*limit)
        # DGL fetches what is still lazy (labels and such), and moves the graphs to the device.
        batch, columns, _ = stock._prefetch(minibatch.batch, self._loader, None)
        batch = recursive_apply_pair(batch, columns, stock._assign_for)
        minibatch.fill(batch, rows, self._loader.device)
        return batch


def _ids_on_cpu(minibatch: SampledMinibatch) -> dict[str, torch.Tensor]:
    return {table: ids.cpu() for table, ids in minibatch.ids.items()}


class _Source:
    """The sampled minibatches of one epoch, from PyTorch's iterator.

    That iterator stops its workers when its last reference goes, and an exception keeps the frames that it
    passed through. Hence ``next`` with a default, here and above, and no reference to the loader.
    """

    def __init__(self, loader: Any) -> None:
        self._graph, self._tables = loader.graph, loader.served_tables
        self._minibatches: Iterator[Any] = torch.utils.data.DataLoader.__iter__(loader)
        self.sampled = 0

    def __iter__(self) -> _Source:
        return self

    def __next__(self) -> SampledMinibatch:
        batch = next(self._minibatches, _END)
        if batch is _END:
            self.close()
            raise StopIteration
        self.sampled += 1
        batch = recursive_apply(batch, stock.restore_parent_storage_columns, self._graph)
        return SampledMinibatch(batch, self._tables)

    def close(self) -> None:
        """Called by the stream, too, when it ends."""
        self._minibatches = iter(())
