"""NodeLoader: seeds and a sampler over a store's topology, with features and labels. It needs no DGL.

The user's entry to training on nodes. It defines the seeds; EpochLoader does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from gids.cuda import on_host
from gids.loader.epoch_loader import EpochLoader, check_order, check_range
from gids.loader.facts import seeds_of
from gids.loader.options import Size, explain_names
from gids.loader.row_source import RowSource, Tables
from gids.loader.sampling import Epoch, EpochSampling
from gids.loader.source import Dataset
from gids.sampler import Minibatch, Sampler, TimedSeeds, Topology
from gids.sampler.forest import AnySeeds
from gids.sampler.layered import Fanout
from gids.sampler.minibatch import PerType
from gids.sampler.neighbor import Strategy


class NodeLoader(EpochLoader):
    """Minibatches for training on nodes: sampled from a store's topology, features read through a cache.

    Args:
        source: gids.open(...), or a path or FeatureStore for default options; or a list of these.
        seeds: nodes to train on: the name of a split, such as ``"train"``; integers of any width, may repeat,
            or bool[num_nodes]; a tensor, an array, a list or a range; or one of these by node type, as a
            mapping or as ``("paper", ids)``. They are copied, 8 bytes each. By node type, minibatches have
            dictionaries; otherwise, which only a dataset with one node type and one relation allows, tensors.
        sampler: fanouts (one per layer, the last one applies to the seeds), or a sampler.
        time: the time of each seed, int64[n], or by node type like seeds. Minibatches are then temporal:
            every seed has a tree of its own, without edges that are later than the seed. Fanouts use the
            times of edges if the dataset has them, else those of nodes; a sampler needs ``temporal``.
        strategy: with fanouts and time: ``"uniform"`` (default), or ``"last"`` for the latest neighbors.
        tables: the tables to load: names, such as ``"paper.feat"``, and tables of other stores of the same
            nodes, such as ``other.table("paper.text")``; or a mapping from feature names to these. None: all
            tables of nodes that the sampler can reach. Empty: no features. From a table of edges a minibatch
            gets the rows of the edges of all blocks, one block after the other, the input layer's first.
        batch_size: number of seeds of all types together, on each rank (default 1024).
        shuffle: shuffle the seeds of all types in every epoch. Default: the given order, type after type.
        drop_last: leave out the last minibatch of an epoch if it is smaller.
        seed: random seed of the order and of the sampling, 0 to 2^64 - 1. None: drawn from torch's default
            generator, so torch.manual_seed() governs it; ranks that share the seeds use rank 0's. The
            attribute ``seed``, ``repr``, ``stats()`` and ``state_dict()`` have it.
        rank, world_size: share the seeds of each step among world_size processes, of which this one is
            `rank`, 0 to world_size - 1. Give every rank all seeds. None: taken from torch.distributed's
            process group, if it is initialized; then every rank must make the loader, with the same
            arguments. rank=0, world_size=1: no sharing. A given rank needs a given seed.
        cooperative: the ranks work on one minibatch of world_size * batch_size seeds together, in which each
            node belongs to one of them; needs gids.distributed.open(). Minibatches are
            gids.distributed.CooperativeMinibatch.
        device: ``"cpu"`` (default) or a CUDA device. On CUDA kernels sample the pinned topology on a separate
            stream, and minibatches are ready for torch's current stream.
        labels: include labels, if the store has them: of the seeds (True, default), or of all input nodes
            (``"inputs"``).
        topology_on: on CUDA, the part of the topology in device memory: ``"host"``, ``"indptr"``,
            ``"device"`` or ``"auto"`` (default). See gids.sampler.device.PinnedGraph.
        dtype, minibatch_rows: as in gids.FeatureLoader.
        pin_memory: with ``device="cpu"``, all tensors of minibatches are in pinned memory, so that
            ``minibatch.to("cuda", non_blocking=True)`` copies them while training goes on (default False). A
            minibatch is read when training is done with the one before the last.
        memory: with a path or a FeatureStore, as in gids.open().

    Arguments of torch's DataLoader about workers are ignored, with a warning: threads sample and read ahead.

    Each ``for`` is one epoch. ``epoch`` is the number of the next one; it may be set. A minibatch depends
    only on the dataset, the arguments, the epoch and the step, not on window, threads, cache or device.
    ``state_dict()`` in the middle of an epoch, and ``load_state_dict()`` of a loader with the same arguments,
    resume it.

    Raises FormatError for a dataset without topology, KeyError for a table or type that the dataset does not
    have, IndexError for a seed out of range, ValueError and TypeError for other arguments, and the errors of
    FeatureLoader and PinnedGraph. While iterating: StorageError for a page that cannot be read, FormatError
    for a damaged topology. An error is raised when its minibatch is due, and ends the epoch, which
    ``state_dict()`` resumes.
    """

    @explain_names("gids.NodeLoader", of_torch=True)
    def __init__(
        self,
        source: RowSource | Dataset | Sequence[Dataset],
        seeds: PerType | str | tuple[str, Any] | Mapping[str, Any],
        sampler: Sampler | Sequence[Fanout],
        *,
        time: PerType | None = None,
        strategy: Strategy | None = None,
        tables: Tables | None = None,
        batch_size: int = 1024,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        cooperative: bool = False,
        device: str | torch.device = "cpu",
        labels: bool | Literal["inputs"] = True,
        topology_on: str = "auto",
        dtype: torch.dtype | None = None,
        minibatch_rows: int | Mapping[str, int] | None = None,
        pin_memory: bool = False,
        memory: Size | None = None,
    ) -> None:
        check_order("gids.NodeLoader(source, seeds, fanouts)", sampler)
        super().__init__(
            source,
            sampler,
            memory=memory,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        self.cooperative = bool(cooperative)
        if labels not in (True, False, "inputs"):
            raise ValueError(f"labels={labels!r} must be True, False or 'inputs'")
        several = len(self._graphs) > 1 or len(self.store.node_types) > 1
        ids: PerType = seeds_of(self.store, seeds, by_type=several)
        by_type = isinstance(ids, dict)
        if not by_type and len(self._graphs) > 1:
            raise TypeError(
                f"{self.store.name} has {len(self._graphs)} relations: give seeds by node type, such as "
                f"{{{self._graphs[0].relation[2]!r}: ids}}"
            )
        topology = Topology(self._graphs if by_type else self._graphs[0])
        if time is not None:
            self._use_times(strategy)
        elif strategy is not None:
            raise ValueError(f"strategy={strategy!r} needs times of the seeds: give time=")
        self._seeds = _Seeds(topology, ids, time)
        self._labels = {
            t: self.store.labels[t] for t in topology.node_types if labels and t in self.store.labels
        }
        self._label_inputs = labels == "inputs"
        self._open(
            topology,
            tables,
            device,
            topology_on,
            dtype,
            minibatch_rows,
            pin_memory=pin_memory,
            cooperative=self.cooperative,
        )

    @property
    def _seed_count(self) -> int:
        return self._seeds.count

    def _hash_seeds(self, update: Callable[[Any], None]) -> None:
        self._seeds.hash(update)

    def _made_with(self) -> dict[str, Any]:
        return super()._made_with() | {"cooperative": self.cooperative}

    def _compared(self) -> dict[str, Any]:
        labels = [*self._labels, "of inputs" if self._label_inputs else "of seeds"]
        return super()._compared() | {"labels": labels}

    def _sampling(self, epoch: Epoch) -> EpochSampling:
        return _NodeSampling(
            epoch, self._seeds, self._labels, of_inputs=self._label_inputs, cooperative=self.cooperative
        )


class _NodeSampling(EpochSampling):
    """labels: by node type. of_inputs: minibatches get the labels of all input nodes, not of the seeds.
    cooperative: the ranks draw the seeds of all ranks, and each gets a part of them.
    """

    def __init__(
        self,
        epoch: Epoch,
        seeds: _Seeds,
        labels: Mapping[str, torch.Tensor],
        *,
        of_inputs: bool,
        cooperative: bool,
    ) -> None:
        super().__init__(epoch)
        self._seeds, self._labels, self._of_inputs = seeds, labels, of_inputs
        self._cooperative = cooperative

    def draw(self, step: int) -> tuple[AnySeeds, Callable[[Minibatch], Minibatch]]:
        of_step = self.epoch.seeds.at(step)
        seeds = self._seeds.at(of_step.of_all_ranks if self._cooperative else of_step.own)
        return seeds, partial(self._label, seeds.ids if isinstance(seeds, TimedSeeds) else seeds)

    def _label(self, seeds: PerType, minibatch: Minibatch) -> Minibatch:
        labels, on = self._labels, self.epoch.stream
        if not labels:
            return minibatch
        if self._cooperative:
            seeds = minibatch.seeds
        labelled = minibatch.input_nodes if self._of_inputs else seeds
        if isinstance(labelled, dict):
            values_of = {t: labels[t][on_host(ids)] for t, ids in labelled.items() if t in labels}
            minibatch.labels = {t: on.to_device(rows) for t, rows in values_of.items()}
        else:
            minibatch.labels = on.to_device(next(iter(labels.values()))[on_host(labelled)])
        return minibatch


def _as_tensors(seeds: Any) -> Any:
    """Integers of any width as int64[n], by type if they are. All else as it is: it is refused later."""
    if isinstance(seeds, Mapping):
        return {ntype: _as_tensors(ids) for ntype, ids in seeds.items()}
    if isinstance(seeds, list | tuple | range):
        seeds = np.asarray(seeds) if len(seeds) else np.empty(0, np.int64)
    if isinstance(seeds, np.ndarray) and seeds.dtype.kind in "US":
        raise TypeError("seeds are texts: give the numbers of the nodes, store.ids(node_type).find(texts)")
    if isinstance(seeds, np.ndarray) and seeds.dtype.kind in "iu":
        return torch.from_numpy(seeds.astype(np.int64))
    integers = torch.uint8, torch.int8, torch.int16, torch.int32
    return seeds.long() if isinstance(seeds, torch.Tensor) and seeds.dtype in integers else seeds


class _Seeds:
    """The seeds of all types as one sequence, on the CPU. A copy, so that checked seeds do not change.

    times: of the seeds, or None.
    """

    def __init__(self, topology: Topology, seeds: PerType, times: PerType | None) -> None:
        self._types = topology.node_types
        self._homogeneous = topology.homogeneous
        self._ids = [on_host(ids).clone() for ids in topology.seeds_by_type(_as_tensors(seeds))]
        for ids, ntype, count in zip(self._ids, self._types, topology.node_counts, strict=True):
            check_range(ids, count, f"seeds of {ntype!r} run from")
        self._ends = np.cumsum([0, *map(len, self._ids)])
        self.count = int(self._ends[-1])
        self._times: list[torch.Tensor] | None = None
        if times is not None:
            self._times = [on_host(t).clone() for t in topology.seeds_by_type(times, what="time")]
            for values, ids, ntype in zip(self._times, self._ids, self._types, strict=True):
                if len(values) != len(ids):
                    raise ValueError(
                        f"time has {len(values)} values for {len(ids)} {ntype!r} seeds: give one each"
                    )

    def at(self, positions: np.ndarray) -> PerType | TimedSeeds:
        ids = self._at(self._ids, positions)
        return ids if self._times is None else TimedSeeds(ids, self._at(self._times, positions))

    def _at(self, values: list[torch.Tensor], positions: np.ndarray) -> PerType:
        if self._homogeneous:
            return values[0][torch.from_numpy(positions)]
        chosen = {}
        for ntype, of_all, begin, end in zip(self._types, values, self._ends, self._ends[1:], strict=False):
            of_type = positions[(begin <= positions) & (positions < end)] - begin
            if len(of_type):
                chosen[ntype] = of_all[torch.from_numpy(of_type)]
        return chosen

    def hash(self, update: Callable[[Any], None]) -> None:
        for ntype, ids in zip(self._types, self._ids, strict=True):
            update(f"{ntype} {len(ids)};".encode())
            update(ids.contiguous().numpy())
        for times in self._times or ():
            update(times.numpy())
