"""NodeLoader: seeds and a sampler over a store's topology, with features and labels. It needs no DGL.

The user's entry to training on nodes. It knows what a seed is; the rest is EpochLoader's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from gids.loader.epoch_loader import EpochLoader
from gids.loader.option_names import explain_names
from gids.loader.sampling import Epoch, EpochSampling, sample_steps
from gids.loader.source import Dataset, Source
from gids.loader.tables import Tables
from gids.sampler import Minibatch, Sampler, Topology
from gids.sampler.layered import Fanout
from gids.sampler.minibatch import PerType


class NodeLoader(EpochLoader):
    """Minibatches for training on nodes: sampled from a store's topology, features read through a cache.

    Args:
        store: the dataset, or its path.
        seeds: nodes to train on, int64[n], which may repeat, or bool[num_nodes]; or a dictionary by node type
            of such. They are copied, 8 bytes each: what changes later has no effect. A tensor needs a dataset
            with one node type and one relation, and makes minibatches of tensors; a dictionary makes
            minibatches of dictionaries.
        sampler: fanouts, as ``gids.sampler.Neighbor`` takes them (one per layer, the last is that of the
            seeds), or a sampler.
        tables: the tables to load: names, such as ``"paper.feat"``, and tables of other stores of the same
            nodes, such as ``other.table("paper.text")``; or a mapping from the names that features go by to
            these. None: all of nodes that the sampler can reach. Empty: none, for minibatches without
            features. Of a table of edges a minibatch gets the rows of all its blocks' edges, one block after
            the other, the input layer's first.
        batch_size: seeds of all types together, on each rank.
        shuffle: in a new order every epoch, over all types; otherwise the given order, type after type.
        drop_last: leave out the last minibatch of an epoch when it is smaller.
        seed: of the order and of what is sampled.
        rank, world_size: share each step's seeds among world_size processes, this one being rank 0 to
            world_size - 1; every rank gives all seeds. None: as torch.distributed's process group says, if it
            is initialized; then every rank must make the loader, with the same arguments. rank=0,
            world_size=1: no sharing.
        device: ``"cpu"``, or a CUDA device: then the topology is pinned, kernels sample it on a stream of
            the loader's own, beside the training, and minibatches are ready for torch's current stream.
        labels: give labels, where the store has them: of the seeds, or (``"inputs"``) of all input nodes.
        place: of the pinned topology, the topology_on of ``gids.sampler.device.PinnedGraph``.
        options: of gids.FeatureLoader: ``window_batches``, ``memory_bytes``, ``policy``, …

    Every ``for`` is one epoch; ``epoch`` is the number of the next one, counts up, and may be set. What a
    minibatch holds depends on the store, the arguments and the epoch alone: neither on the window, the
    threads, the cache nor the device. ``state_dict()`` in the middle of an epoch, and ``load_state_dict()``
    of a loader made alike, go on with the minibatches that were still to come.

    Raises FormatError for a dataset without topology, KeyError for a table or type that the store does not
    have, IndexError for a seed that is no node, ValueError and TypeError for other arguments, and what
    FeatureLoader and PinnedGraph raise. While iterating: StorageError belongs to one minibatch, and the next
    can be asked for; FormatError for a topology that contradicts itself ends the epoch.
    """

    @explain_names("gids.NodeLoader")
    def __init__(
        self,
        source: Source | Dataset | Sequence[Dataset],
        seeds: PerType,
        sampler: Sampler | Sequence[Fanout],
        *,
        tables: Tables | None = None,
        batch_size: int = 1024,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        device: str | torch.device = "cpu",
        labels: bool | Literal["inputs"] = True,
        topology_on: str = "auto",
        dtype: torch.dtype | None = None,
        minibatch_rows: int | Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(
            source,
            sampler,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        if labels not in (True, False, "inputs"):
            raise ValueError(f"labels={labels!r}; it must be True, False or 'inputs'")
        by_type = isinstance(seeds, dict)
        if not by_type and len(self._graphs) > 1:
            raise TypeError(
                f"{self.store.name} has {len(self._graphs)} relations: give seeds by node type, such as "
                f"{{{self._graphs[0].relation[2]!r}: ids}}"
            )
        topology = Topology(self._graphs if by_type else self._graphs[0])
        self._seeds = _Seeds(topology, seeds)
        self._labels = {
            t: self.store.labels[t] for t in topology.node_types if labels and t in self.store.labels
        }
        self._label_inputs = labels == "inputs"
        self._open(topology, tables, device, topology_on, dtype, minibatch_rows)

    @property
    def _seed_count(self) -> int:
        return self._seeds.count

    def _hash_seeds(self, update: Callable[[Any], None]) -> None:
        self._seeds.hash(update)

    def _sampling(self, epoch: Epoch) -> EpochSampling:
        return _NodeSampling(epoch, self._seeds, self._labels, of_inputs=self._label_inputs)


class _NodeSampling(EpochSampling):
    """labels: by node type. of_inputs: minibatches get those of all input nodes, rather than of the seeds."""

    def __init__(
        self, epoch: Epoch, seeds: _Seeds, labels: Mapping[str, torch.Tensor], *, of_inputs: bool
    ) -> None:
        super().__init__(epoch)
        self._seeds, self._labels, self._of_inputs = seeds, labels, of_inputs

    def sample(self, steps: range) -> list[Minibatch]:
        of = self.epoch
        seeds = [self._seeds.at(of.seeds.at(step).own) for step in steps]
        sampled = sample_steps(
            of.sampler, of.topology, seeds, seed=of.seed, epoch=of.number, first_step=steps.start
        )
        for minibatch, of_step in zip(sampled, seeds, strict=True):
            self._label(minibatch, of_step)
        return sampled

    def _label(self, minibatch: Minibatch, seeds: PerType) -> None:
        labels, on = self._labels, self.epoch.stream
        labelled = minibatch.input_nodes if self._of_inputs else seeds
        if isinstance(labelled, dict):
            found = {t: labels[t][ids.cpu()] for t, ids in labelled.items() if t in labels}
            minibatch.labels = {t: on.to_device(values) for t, values in found.items()} or None
        elif labels:
            minibatch.labels = on.to_device(next(iter(labels.values()))[labelled.cpu()])


class _Seeds:
    """The seeds of all types as one sequence, on the CPU. They are its own: what is checked stays so."""

    def __init__(self, topology: Topology, seeds: PerType) -> None:
        self._types = topology.node_types
        self._homogeneous = topology.homogeneous
        self._ids = [ids.to("cpu", copy=True) for ids in topology.seeds_by_type(seeds)]
        for ids, ntype, count in zip(self._ids, self._types, topology.node_counts, strict=True):
            if len(ids) and not (ids.min() >= 0 and ids.max() < count):
                raise IndexError(
                    f"seeds of {ntype!r} run from {ids.min()} to {ids.max()}; ids run from 0 to {count - 1}"
                )
        self._ends = np.cumsum([0, *map(len, self._ids)])
        self.count = int(self._ends[-1])

    def at(self, positions: np.ndarray) -> PerType:
        if self._homogeneous:
            return self._ids[0][torch.from_numpy(positions)]
        found = {}
        for ntype, ids, begin, end in zip(self._types, self._ids, self._ends, self._ends[1:], strict=False):
            of_type = positions[(begin <= positions) & (positions < end)] - begin
            if len(of_type):
                found[ntype] = ids[torch.from_numpy(of_type)]
        return found

    def hash(self, update: Callable[[Any], None]) -> None:
        for ntype, ids in zip(self._types, self._ids, strict=True):
            update(f"{ntype} {len(ids)};".encode())
            update(ids.contiguous().numpy())
