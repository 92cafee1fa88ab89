"""In-memory stand-ins for gids.store and gids.loader, with the same contracts."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch


@dataclass
class Table:
    name: str
    kind: str
    type: object
    key: str
    rows: torch.Tensor

    @property
    def row_count(self):
        return len(self.rows)


class FeatureStore:
    registry: Mapping = {}

    def __init__(self, path):
        self.__dict__.update(self.registry[str(path)].__dict__)

    def table(self, name):
        return self.tables[name]

    def find_table(self, kind, type_, key):
        for t in self.tables.values():
            if (t.kind, t.type, t.key) == (kind, type_, key):
                return t
        return None

    def num_nodes(self, ntype=None):
        return self.counts[ntype or self.node_types[0]]

    def graph(self, relation=None):
        return self.graphs[relation or self.relations[0]]


class FeatureLoader:
    def __init__(self, store, tables, *, window_batches=16, **options):
        self.store, self.names, self.window, self.options = store, tables, window_batches, options
        self.live = None

    def attach(self, minibatches, ids_of, bytes_of=None):
        return Stream(self, iter(minibatches), ids_of)

    def stats(self):
        return {"window": self.window}

    def close(self):
        self.closed = True


class Stream:
    def __init__(self, loader, minibatches, ids_of):
        self.loader, self.minibatches, self.ids_of = loader, minibatches, ids_of
        self.window, self.queue, self.limits = loader.window, deque(), []

    def __iter__(self):
        return self

    def __next__(self):
        while len(self.queue) <= self.window:
            try:
                self.queue.append(next(self.minibatches))
            except StopIteration:
                break
        if not self.queue:
            raise StopIteration
        m = self.queue.popleft()
        ids = self.ids_of(m)
        for i in ids.values():
            assert i.dtype == torch.int64
            assert i.is_contiguous()
        return m, {name: self.loader.store.tables[name].rows[i] for name, i in ids.items()}

    def limit_window(self, n, reason):
        self.window = min(self.window, n)
        self.limits.append((n, reason))


Graph = SimpleNamespace
