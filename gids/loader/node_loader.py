"""NodeLoader: seeds and a sampler over a store's topology, with features and labels. It needs no DGL.

The composition of sampler and FeatureLoader: it decides which seeds come when, and nothing about how they are
sampled or how rows are read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from gids import cuda
from gids.heat.graphs import graphs_of
from gids.loader.feature_loader import FeatureLoader
from gids.loader.sample_stream import SampleStream
from gids.sampler import Minibatch, Neighbor, Sampler, Topology
from gids.sampler.layered import Fanout
from gids.sampler.minibatch import PerType
from gids.store import FeatureStore

log = logging.getLogger("gids")


class NodeLoader:
    """Minibatches for training on nodes: sampled from a store's topology, features read through a cache.

    Args:
        store: the dataset, or its path.
        seeds: nodes to train on, int64[n], or a dictionary by node type of such; may repeat. A tensor needs a
            dataset with one node type and one relation, and makes minibatches of tensors; a dictionary makes
            minibatches of dictionaries.
        sampler: fanouts, as ``gids.sampler.Neighbor`` takes them (one per layer, the last is that of the
            seeds), or a sampler.
        tables: names of the node tables to load, such as ``"paper.feat"``. None: all of
            nodes that the sampler can reach. Empty: none, for minibatches without features.
        batch_size: seeds of all types together.
        shuffle: in a new order every epoch, over all types; otherwise the given order, type after type.
        drop_last: leave out the last minibatch of an epoch when it is smaller.
        seed: of the order and of what is sampled.
        device: ``"cpu"``, or a CUDA device: then the topology is pinned, kernels sample it on a stream of
            the loader's own, beside the training, and minibatches are ready for torch's current stream.
        labels: give the seeds' labels, where the store has them.
        place: of the pinned topology, as ``Graph.pin`` takes it.
        options: of gids.FeatureLoader: ``window_batches``, ``memory_bytes``, ``policy``, …

    Every ``for`` is one epoch; ``epoch`` is the number of the next one, counts up, and may be set. What a
    minibatch holds depends on the store, the arguments and the epoch alone: neither on the window, the
    threads, the cache nor the device.

    Raises FormatError for a dataset without topology, KeyError for a table or type that the store does not
    have, IndexError for a seed that is no node, ValueError and TypeError for other arguments, and what
    FeatureLoader and Graph.pin raise. While iterating: StorageError belongs to one minibatch, and the next
    can be asked for; FormatError for a topology that contradicts itself ends the epoch.
    """

    def __init__(
        self,
        store: FeatureStore | str | os.PathLike[str],
        seeds: PerType,
        sampler: Sampler | Sequence[Fanout],
        *,
        tables: Sequence[str] | None = None,
        batch_size: int = 1024,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        device: str | torch.device = "cpu",
        labels: bool = True,
        place: str = "auto",
        **options: Any,
    ) -> None:
        self.store = store if isinstance(store, FeatureStore) else FeatureStore(store)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}; a minibatch has at least one seed")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed={seed}; it must be from 0 to 2^64 - 1")
        if isinstance(sampler, str | bytes):
            raise TypeError(f"sampler={sampler!r}; give fanouts, such as [10, 10], or a sampler")
        self.sampler: Sampler = (
            Neighbor(sampler, threads=options.get("threads")) if isinstance(sampler, Sequence) else sampler
        )
        self.batch_size, self.shuffle, self.drop_last, self.seed = batch_size, shuffle, drop_last, seed
        self.epoch = 0
        graphs = graphs_of(self.store)
        of_tensors = isinstance(seeds, torch.Tensor | np.ndarray)
        if of_tensors and len(graphs) > 1:
            raise TypeError(
                f"{self.store.name} has {len(graphs)} relations: give seeds by node type, such as "
                f"{{{graphs[0].relation[2]!r}: ids}}"
            )
        topology = Topology(graphs[0] if of_tensors else graphs)
        self._seeds = _Seeds(topology, seeds)
        self._tables = self._node_tables(topology, tables)
        self._labels = {
            t: self.store.labels[t] for t in topology.node_types if labels and t in self.store.labels
        }
        self._device: cuda.Device | None = None
        if torch.device(device).type != "cpu":
            self._device = cuda.open_device(device)
            pinned = [graph.pin(self._device, place=place) for graph in graphs]
            topology = Topology(pinned[0] if of_tensors else pinned)
        self._topology = topology
        self._stream = SampleStream(self._device)
        self._features: FeatureLoader | None = None
        if self._tables:
            self._features = FeatureLoader(self.store, list(self._tables), device=device, **options)
        elif options:
            log.info("no tables are loaded: %s have no effect", ", ".join(options))
        self._last_stats: dict[str, Any] | None = None  # once closed

    @property
    def feature_loader(self) -> FeatureLoader | None:
        """What reads the features; None when no tables are loaded."""
        return self._features

    def __len__(self) -> int:
        """Minibatches in an epoch."""
        count = self._seeds.count
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> NodeEpoch:
        if self._last_stats is not None:
            raise ValueError("this NodeLoader is closed; make a new one")
        epoch, self.epoch = self.epoch, self.epoch + 1
        source = _sampled(self, epoch)
        if self._features is None:
            return NodeEpoch(((minibatch, {}) for minibatch in source), self._stream)
        tables = self._tables

        def rows_of(minibatch: Minibatch) -> Mapping[str, torch.Tensor]:
            nodes = minibatch.input_nodes
            return {
                name: nodes[ntype] if isinstance(nodes, dict) else nodes for name, ntype in tables.items()
            }

        return NodeEpoch(self._features.attach(source, rows_of, bytes_of=lambda m: m.nbytes), self._stream)

    def stats(self) -> dict[str, Any]:
        """The FeatureLoader's counters, and ``memory`` with the sampler's and the topology's bytes as well.

        ``"topology"``: pinned host memory, none on the CPU, where the topology stays mapped; ``"topology on
        the device"`` and ``"sampler"`` (host and device). Goes on telling what they were once closed.
        """
        if self._last_stats is not None:
            return self._last_stats
        result = self._features.stats() if self._features is not None else {}
        memory = dict(result.get("memory", {}))
        memory["topology"] = sum(p.host_bytes for p in self._topology.pinned)
        memory["topology on the device"] = sum(p.device_bytes for p in self._topology.pinned)
        memory["sampler"] = int(getattr(self.sampler, "nbytes", 0))
        return {**result, "memory": memory, "epoch": self.epoch}

    def close(self) -> None:
        """End the open epoch, let reads and kernels finish, release cache and topology. Idempotent."""
        if self._last_stats is None:
            self._last_stats = self.stats()
            if self._features is not None:
                self._features.close()
            self._stream.synchronize()
            for pinned in self._topology.pinned:
                pinned.close()

    def __enter__(self) -> NodeLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> None:
        raise TypeError("a NodeLoader cannot be pickled; pass the FeatureStore and build one in each process")

    def _node_tables(self, topology: Topology, names: Sequence[str] | None) -> dict[str, str]:
        """Table name -> node type."""
        if names is None:
            every = self.store.tables.values()
            return {t.name: str(t.type) for t in every if t.kind == "node" and t.type in topology.node_types}
        if isinstance(names, str):
            raise TypeError(f"tables={names!r}; give a list, [{names!r}]")
        tables = {}
        for table in map(self.store.table, names):
            if table.kind != "node":
                raise ValueError(f"{table.name} has rows of edges; NodeLoader loads rows of nodes")
            if table.type not in topology.node_types:
                known = ", ".join(map(repr, topology.node_types))
                raise ValueError(
                    f"{table.name}: no relation leads to or from {table.type!r} (there are {known})"
                )
            tables[table.name] = str(table.type)
        return tables


class NodeEpoch(Iterator[Minibatch]):
    """One epoch of a NodeLoader. After a StorageError the next minibatch can be asked for."""

    def __init__(
        self, stream: Iterator[tuple[Minibatch, dict[str, torch.Tensor]]], sampled_on: SampleStream
    ) -> None:
        self._stream = stream
        self._sampled_on = sampled_on

    def __next__(self) -> Minibatch:
        minibatch, features = next(self._stream)
        self._sampled_on.hand_over(minibatch)
        minibatch.features = dict(features)
        return minibatch

    def close(self) -> None:
        """End the epoch here. Idempotent; the end, and dropping it, do the same."""
        cast(Any, self._stream).close()


class _Seeds:
    """The seeds of all types as one sequence, on the CPU."""

    def __init__(self, topology: Topology, seeds: PerType) -> None:
        self._types = topology.node_types
        self._homogeneous = topology.homogeneous
        self._ids = [ids.cpu() for ids in topology.seeds_by_type(seeds)]
        for ids, ntype, count in zip(self._ids, self._types, topology.node_counts, strict=True):
            if len(ids) and not (ids.min() >= 0 and ids.max() < count):
                raise IndexError(
                    f"seeds of {ntype!r} run from {ids.min()} to {ids.max()}; ids run from 0 to {count - 1}"
                )
        self._ends = np.cumsum([0, *map(len, self._ids)])
        self.count = int(self._ends[-1])

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Places of all seeds, in the order of an epoch."""
        if not shuffle:
            return np.arange(self.count)
        return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(self.count)

    def at(self, places: np.ndarray) -> PerType:
        if self._homogeneous:
            return self._ids[0][torch.from_numpy(places)]
        found = {}
        for ntype, ids, begin, end in zip(self._types, self._ids, self._ends, self._ends[1:], strict=False):
            of_type = places[(begin <= places) & (places < end)] - begin
            if len(of_type):
                found[ntype] = ids[torch.from_numpy(of_type)]
        return found


def _sampled(loader: NodeLoader, epoch: int) -> Iterator[Minibatch]:
    """The minibatches of an epoch, with labels and without features."""
    topology, sampler, all_seeds = loader._topology, loader.sampler, loader._seeds
    seed, batch_size, labels, stream = loader.seed, loader.batch_size, loader._labels, loader._stream
    order = all_seeds.order(seed, epoch, loader.shuffle)
    steps = len(loader)
    del loader  # an open epoch does not hold it

    def minibatch(step: int) -> Minibatch:
        seeds = all_seeds.at(order[step * batch_size : (step + 1) * batch_size])
        sampled = sampler.sample(topology, seeds, seed=seed, epoch=epoch, step=step)
        if isinstance(seeds, dict):
            found = {t: labels[t][ids] for t, ids in seeds.items() if t in labels}
            sampled.labels = {t: stream.to_device(values) for t, values in found.items()} or None
        elif labels:
            sampled.labels = stream.to_device(labels[topology.node_types[0]][seeds])
        return sampled

    return (stream.make(minibatch, step) for step in range(steps))
