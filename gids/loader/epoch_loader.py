"""EpochLoader: the base of NodeLoader and EdgeLoader. Epochs of sampled minibatches with features, resumable.

It composes a sampler and a FeatureLoader, and decides the order of the seeds. Its subclasses define a seed.
"""

from __future__ import annotations

import hashlib
import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch

from gids import cuda
from gids.closing import Closing
from gids.cuda.device import Consumed
from gids.cuda.pinned import check_pinning
from gids.loader.feature_loader import FeatureLoader
from gids.loader.options import Size, whole_number
from gids.loader.queue import Queue
from gids.loader.row_source import (
    RowLoader,
    RowSource,
    Tables,
    check_table_fits,
    chosen_tables,
    default_tables,
)
from gids.loader.rows import EpochInput, Rows
from gids.loader.sampling import (
    Epoch,
    EpochSampling,
    EpochSeeds,
    SampleStream,
    layered_of,
    spans_epochs,
)
from gids.loader.source import Dataset, as_row_source
from gids.loader.stats import no_rows
from gids.loader.stream import EpochStream
from gids.sampler import Minibatch, Neighbor, RandomWalk, Sampler, Topology
from gids.sampler.device import PinnedGraph
from gids.sampler.layered import Fanout, LayeredSampler, chosen_seed
from gids.sampler.minibatch import FeatureRows
from gids.sampler.neighbor import Strategy, check_ids_of_reverses
from gids.sampler.topology import By
from gids.store import Graph, Table

R = TypeVar("R")
log = logging.getLogger("gids")

_STATE_VERSION = 2
_SAID = {"batch_size": "batch_size * world_size", "topology_crc": "checksum of edges and times"}
"""Names of keys of a state in errors."""


@dataclass
class _Progress:
    """The position in an epoch. step: of the next minibatch. begun: an iterator has this epoch."""

    epoch: int
    step: int
    begun: bool = False


class EpochLoader(Closing, ABC):
    """Base class of NodeLoader and EdgeLoader, which users make.

    Attributes: source; store (its first dataset); sampler; tables: the tables to load, by name; batch_size,
    shuffle, drop_last, pin_memory: as given; seed: as given or drawn; rank, world_size: as given or detected;
    epoch: the number of the next epoch, may be set.
    """

    batch_sampler = None  # Lightning asks loaders with a sampler for it
    _seed_ids: np.ndarray | None = None  # by position, what users call the seeds, if not by their positions

    def __init__(
        self,
        source: RowSource | Dataset | Sequence[Dataset],
        sampler: Sampler | Sequence[Fanout],
        *,
        memory: Size | None,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        seed: int | None,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        self._opened = ExitStack()
        what = f"gids.{type(self).__name__}"
        self.source = as_row_source(source, self._opened, what=what, memory=memory)
        self.store = self.source.store
        batch_size = whole_number("batch_size", batch_size)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be 1 or more")
        self._given_seed = None if seed is None else whole_number("seed", seed)
        self.seed = chosen_seed(self._given_seed)
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed={seed} must be from 0 to 2^64 - 1")
        if isinstance(sampler, str | bytes) or not (
            isinstance(sampler, Sequence) or hasattr(sampler, "sample")
        ):
            raise TypeError(f"sampler={sampler!r}: give fanouts, such as [10, 10], or a sampler")
        self._ranks = self.source.ranks(rank, world_size)
        if seed is None and self.world_size > 1 and self._ranks.group is None:
            raise ValueError(
                f"rank={rank}, world_size={world_size} without seed=: each rank would draw its own: "
                "give all ranks the same seed="
            )
        self.sampler = (
            Neighbor(sampler, threads=self.source.options.threads)
            if isinstance(sampler, Sequence)
            else sampler
        )
        self._fanouts = sampler if isinstance(sampler, Sequence) else None
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self._progress = _Progress(0, 0)  # of the epoch that was begun last, or where the next one begins
        self._epochs: weakref.WeakSet[SampledEpoch] = weakref.WeakSet()  # the open ones, and perhaps others
        self._next: tuple[tuple[Any, ...], EpochSampling] | None = None  # what is sampled before its turn
        self._seeds_digest: str | None = None  # once asked for
        self._labels: Mapping[str, torch.Tensor] = {}  # of all nodes, by type
        self._last_stats: dict[str, Any] | None = None  # once closed

    @property
    def epoch(self) -> int:
        """The number of the next epoch. May be set."""
        return self._progress.epoch + self._progress.begun

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        epoch = whole_number("loader.epoch", epoch)
        if epoch != self.epoch:
            self._progress = _Progress(epoch, 0)

    @property
    def sampler(self) -> Sampler:
        """May be set between epochs."""
        return self._sampler

    @sampler.setter
    def sampler(self, sampler: Sampler) -> None:
        if isinstance(sampler, Neighbor):
            sampler = sampler.of_rank(self._ranks.rank, self._ranks.world_size)
        self._sampler = sampler

    @cached_property
    def _graphs(self) -> list[Graph]:
        return self.source.graphs()

    def _use_times(self, strategy: Strategy | None) -> None:
        """Make the sampler temporal, or check that the given one is. Raises ValueError."""
        if self._fanouts is None:
            if getattr(self.sampler, "temporal", None) is None:
                raise ValueError(
                    f"time= needs a temporal sampler, and {self.sampler!r} is not: give fanouts, or "
                    "gids.sampler.Neighbor(temporal=…)"
                )
            if strategy is not None:
                raise ValueError(f"strategy={strategy!r} is for fanouts: give it to the sampler")
            return
        kinds: dict[By, bool] = {
            "edges": any(g.edge_times is not None for g in self._graphs),
            "nodes": any(g.src_times is not None for g in self._graphs),
        }
        timed = [by for by, known in kinds.items() if known]
        if not timed:
            raise ValueError(
                f"time= needs times of edges or nodes, and {self.store.name} has none: convert a source "
                "that has them (docs/temporal.md)"
            )
        self.sampler = Neighbor(
            self._fanouts,
            temporal=timed[0],
            strategy="uniform" if strategy is None else strategy,
            threads=self.source.options.threads,
        )

    def _open(
        self,
        topology: Topology,
        tables: Tables | None,
        device: str | torch.device,
        topology_on: str,
        dtype: torch.dtype | None,
        minibatch_rows: int | Mapping[str, int] | None,
        *,
        pin_memory: bool,
        cooperative: bool = False,
    ) -> None:
        """The end of construction: allocate what holds memory."""
        check_pinning(pin_memory, device)
        self.pin_memory = bool(pin_memory)
        self._step_sampling = self.source.sampling(
            topology, self._ranks, torch.device(device), cooperative=cooperative
        )
        if self._subgraph == "induced" and torch.device(device).type != "cpu":
            raise ValueError(
                f"{self.sampler!r} samples on the CPU only: use device='cpu' and move minibatches to {device}"
            )
        self.tables: Mapping[str, Table] = self._tables_of(topology, tables)
        self._topology = topology
        self._device: cuda.Device | None = None
        on_cpu = torch.device(device).type == "cpu"
        shares = None if on_cpu else f"topology {self.store.content_crc:08x}"
        compared = partial(self._ranks.comparing, lambda: self._compared() | {"dtype": str(dtype)})
        with compared(self.seed, shares) as (peers, self.seed):
            if not on_cpu:
                self._device = cuda.open_device(device)
                pinned = [
                    PinnedGraph(graph, self._device, topology_on=topology_on, peers=peers)
                    for graph in topology.graphs
                ]
                self._topology = Topology(pinned[0] if topology.homogeneous else pinned)
        self._stream = SampleStream(self._device)
        self._features: RowLoader | None = None
        if self.tables:
            self._features = self.source.feature_loader(
                self,
                self.tables,
                dtype=dtype,
                device=device,
                minibatch_rows=minibatch_rows,
                cooperative=cooperative,
                pin_memory=self.pin_memory,
            )

    @property
    def feature_loader(self) -> FeatureLoader | None:
        """The FeatureLoader, which loaders of the same source may share; None if no tables are loaded."""
        return None if self._features is None else self._features.feature_loader

    @property
    def rank(self) -> int:
        """Rank of this process, 0 to world_size - 1. Its minibatches have its part of each step's seeds."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that share the seeds. A step has world_size * batch_size seeds over all ranks."""
        return self._ranks.world_size

    @property
    @abstractmethod
    def _seed_count(self) -> int: ...

    @abstractmethod
    def _sampling(self, epoch: Epoch) -> EpochSampling:
        """The minibatches of an epoch."""

    @abstractmethod
    def _hash_seeds(self, update: Callable[[Any], None]) -> None:
        """Call update with every array of seeds."""

    def order(self, epoch: int) -> torch.Tensor:
        """The order of an epoch's seeds: int64[seeds], positions among the seeds as given.

        The same on all ranks. Step s begins at s * world_size * batch_size, and each rank has a part of it:
        see ``SampledEpoch.positions``. EdgeLoader(edges=None): edge ids.
        """
        seeds = self._seeds_of(epoch)
        return seeds.named(seeds.order)

    def _seeds_of(self, epoch: int) -> EpochSeeds:
        """The seeds of an epoch, by step."""
        if self.shuffle:
            generator = np.random.Generator(np.random.Philox(key=np.array([self.seed, epoch], np.uint64)))
            order = generator.permutation(self._seed_count)
        else:
            order = np.arange(self._seed_count)
        return EpochSeeds(order, self.batch_size, self._ranks, self._seed_ids)

    def __len__(self) -> int:
        """Number of minibatches in an epoch, on each rank."""
        count, size = self._seed_count, self.batch_size * self.world_size
        return count // size if self.drop_last else -(-count // size)

    def __iter__(self) -> SampledEpoch:
        if not 0 <= self.epoch < 1 << 63:
            raise ValueError(f"loader.epoch={self.epoch} must be from 0 to 2^63 - 1")
        self._check_open()
        epoch = SampledEpoch(self)
        self._epochs.add(epoch)
        return epoch

    def _begin(self) -> tuple[EpochStream[Minibatch], _Progress, EpochSeeds]:
        """Begin the next epoch: what its iterator needs. Nothing is used up if this raises an error."""
        self._check_open()
        self._ranks.check_process_group()
        epoch = self.epoch
        progress = _Progress(epoch, 0 if self._progress.begun else self._progress.step, begun=True)
        if self._next is not None and self._next[0] == self._arguments_of(epoch, progress.step):
            sampling, self._next = self._next[1], None
        else:
            self._forget_next()
            sampling = self._sampling_of(epoch, progress.step)
        seeds, count = sampling.epoch.seeds, len(sampling.epoch.steps)
        if self._features is None:
            lender = self.source.lender
            stream = EpochStream(Queue(sampling, count), Rows(), pid=lender.pid, check=lender.check_open)
        else:
            stream = self._features.attach_epoch(
                EpochInput(
                    minibatches=sampling,
                    ids_of=sampling.ids,
                    bytes_of=attrgetter("nbytes"),
                    count=count,
                    growth=_growth(seeds, sampling.epoch.steps),
                    waiting_batches=self._at_once - 1,
                    source_bytes=self._sampler_bytes,
                    # A first epoch may be the only one.
                    following=partial(self._sample_next, epoch + 1) if self._progress.begun else None,
                )
            )
        self._progress = progress
        return stream, progress, seeds

    def _sample_next(self, epoch: int) -> EpochSampling | None:
        """The minibatches of the next epoch, before it begins; None if they may change until then."""
        if not getattr(self.sampler, "repeatable", False):
            return None
        self._next = self._arguments_of(epoch, 0), self._sampling_of(epoch, 0)
        return self._next[1]

    def _forget_next(self) -> None:
        """What is sampled of the next epoch is not needed."""
        if self._next is not None and self._features is not None:
            self._features.feature_loader.forget(self._next[1])
        self._next = None

    def _arguments_of(self, epoch: int, first_step: int) -> tuple[Any, ...]:
        """What the minibatches of an epoch depend on, and a user may set."""
        return epoch, first_step, self.sampler, self._made_with()

    def _check_open(self) -> None:
        if self._last_stats is not None or self.source.lender.closed:
            raise ValueError(f"this {type(self).__name__} is closed: make a new one")

    def _sampling_of(self, epoch: int, first_step: int) -> EpochSampling:
        """The minibatches of an epoch from a step on."""
        features, most = self._features, self._at_once
        return self._sampling(
            Epoch(
                epoch,
                range(first_step, len(self)),
                self._seeds_of(epoch),
                self._topology,
                self.sampler,
                self.seed,
                self.tables,
                self._stream,
                (lambda: most) if features is None else (lambda: 1 + features.waiting_batches),
                self._step_sampling.sample,
            )
        )

    @property
    def _at_once(self) -> int:
        """Number of minibatches to sample in one call, where memory allows.

        Two per thread, so that no thread idles for long; at most half a window, because minibatches that wait
        to enter it take memory.
        """
        if self._step_sampling.bulk is not None:
            return self._step_sampling.bulk
        sampler = self._host_sampler
        if sampler is not self.sampler or sampler.threads == 1:
            return 1
        window = math.inf if self._features is None else self._features.feature_loader.window
        return int(max(1, min(2 * sampler.threads, window // 2)))

    @cached_property
    def _sampler_bytes(self) -> _SamplerBytes:
        return _SamplerBytes(self._host_sampler)

    @property
    def _subgraph(self) -> str | None:
        return self.sampler.subgraph if isinstance(self.sampler, Neighbor) else None

    @property
    def _host_sampler(self) -> LayeredSampler | None:
        """The sampler, or the one that it samples by, if its host memory is known."""
        return layered_of(self.sampler) if self._device is None else None

    def state_dict(self) -> dict[str, Any]:
        """The position of the next minibatch, for ``load_state_dict`` of a loader with the same arguments.

        It is the minibatch after the last one that the latest epoch handed out; if that epoch is finished,
        the first one of the next. Plain numbers and text, for any checkpoint. The same on all ranks.
        """
        at = self._progress
        if at.begun and at.step >= len(self):
            at = _Progress(self.epoch, 0)
        return {"version": _STATE_VERSION, "epoch": at.epoch, "step": at.step, "made_with": self._made_with()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``for`` continue where state_dict() was taken, with the same minibatches.

        Sets ``epoch``, and ``seed`` if the loader drew it. Options of the source, tables, labels, dtype,
        threads, device and the dataset's path and rows may differ, and also the number of ranks if batch_size
        * world_size is the same. Raises ValueError for the state of a loader with other arguments, or of a
        dataset with other edges or times, and names the difference. A sampler is compared by its repr.
        """
        try:
            version, epoch, step = (int(state[key]) for key in ("version", "epoch", "step"))
            saved = dict(state["made_with"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"not a {type(self).__name__} state_dict: found keys {_brief(state)}") from None
        if version != _STATE_VERSION:
            raise ValueError(
                f"the state has version {version}; this version of gids reads version {_STATE_VERSION}"
            )
        made_with = self._made_with()
        if self._given_seed is None and "seed" in saved:
            made_with["seed"] = whole_number("the state's seed", saved["seed"])
        for key in made_with | saved:
            if saved.get(key) != made_with.get(key):
                raise ValueError(
                    f"the state was saved by a loader with {_SAID.get(key, key)} = {saved.get(key)!r}, and "
                    f"this one has {made_with.get(key)!r}: make the loader with the same arguments, for the "
                    "same dataset"
                )
        if type(self.sampler).__repr__ is object.__repr__:
            log.warning(
                "the sampler %s has no __repr__, so only its name was compared with the state's: give it one "
                "with all that its minibatches depend on",
                made_with["sampler"],
            )
        if epoch < 0 or not 0 <= step <= len(self):
            raise ValueError(f"the state is at epoch {epoch}, step {step}; an epoch has {len(self)} steps")
        self.seed, self._progress = made_with["seed"], _Progress(epoch, step)

    def stats(self) -> dict[str, Any]:
        """FeatureLoader.stats(): counters of the cache, which all loaders of a source with the same tables,
        dtype and device share; ``memory`` also has sampler and topology.

        ``"topology"``: pinned host memory that this process allocated; 0 on the CPU, where the topology is
        memory-mapped. Memory that the ranks of a machine share is counted only by the rank that allocated
        it. ``"topology on the device"``. Both include the weights of edges. ``"labels"``: of all nodes, which
        loaders of one dataset share. ``"sampler"``: host and device memory, without the minibatches that
        count as ``"window"``. After close(), the counters as they were then.
        """
        if self._last_stats is not None:
            return self._last_stats
        result = self._features.stats() if self._features is not None else no_rows()
        memory = dict(result["memory"])
        memory["topology"] = sum(p.host_bytes for p in self._topology.pinned)
        memory["topology on the device"] = sum(p.device_bytes for p in self._topology.pinned)
        memory["labels"] = sum(labels.nbytes for labels in self._labels.values())
        memory["sampler"] = int(getattr(self.sampler, "nbytes", 0))
        if self._features is not None and (sampler := self._host_sampler) is not None:
            scratch, minibatches = sampler.host_bytes()
            memory["sampler"] = scratch + max(0, minibatches - self._features.feature_loader.held_bytes)
        return {**result, "memory": memory, "epoch": self.epoch, "seed": self.seed}

    def close(self) -> None:
        """End the open epochs, let reads and kernels finish, release cache and topology. Idempotent.

        A cache that other loaders of the source use stays.
        """
        if self._last_stats is not None:
            return
        for epoch in list(self._epochs):
            epoch.close()
        stats = self.stats()
        self._forget_next()
        if self._features is not None:
            self._features.feature_loader.leave(self)
        self._stream.synchronize()
        for pinned in self._topology.pinned:
            pinned.close()
        self._opened.close()
        self._last_stats = stats

    def __repr__(self) -> str:
        shared = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        return (
            f"{type(self).__name__}({self.store.name!r}, {self.sampler!r}, {list(self.tables)}, "
            f"{len(self)} minibatches of {self.batch_size}, seed {self.seed}{shared})"
        )

    def __getstate__(self) -> None:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: pass the FeatureStore and make a loader in each "
            "process (for a checkpoint, use state_dict())"
        )

    def _made_with(self) -> dict[str, Any]:
        """Everything that minibatches depend on, except epoch and step."""
        if self._seeds_digest is None:  # seeds can be many, and do not change
            digest = hashlib.blake2b(digest_size=16)
            self._hash_seeds(digest.update)
            self._seeds_digest = digest.hexdigest()
        graphs = [[*g.relation, g.num_src, g.num_dst, g.num_edges] for g in self._topology.graphs]
        # A state of a version of gids that began anew in each epoch is refused.
        counted = {"steps": "counted over epochs"} if spans_epochs(self.sampler) else {}
        return {
            "topology": graphs,
            "topology_crc": self.store.topology_crc,
            "seed": self.seed,
            "batch_size": self.batch_size * self.world_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "seeds": f"{self._seed_count} ({self._seeds_digest})",
            "sampler": _name_of(self.sampler),
            **counted,
        }

    def _compared(self) -> dict[str, Any]:
        """What the ranks compare when they make this loader. Plain values. A drawn seed is rank 0's."""
        tables = {name: [str(t.type), list(t.shape), str(t.dtype)] for name, t in self.tables.items()}
        return self._made_with() | {"seed": self._given_seed, "tables": dict(sorted(tables.items()))}

    def _tables_of(self, topology: Topology, tables: Tables | None) -> dict[str, Table]:
        """The tables to load, by name."""
        if tables is None:
            tables = default_tables(self.source.stores, topology.node_types)
        chosen = chosen_tables(self.source, tables)
        for name, table in chosen.items():
            check_table_fits(table, topology, self.store.name)
            if table.kind == "edge" and isinstance(self.sampler, RandomWalk):
                raise ValueError(f"{name}: the edges of RandomWalk are not in the dataset, and have no rows")
            if not isinstance(table.type, str) and self._subgraph == "bidirectional":
                check_ids_of_reverses(topology, table.type)
        return chosen


class SampledEpoch(Iterator[Minibatch]):
    """One epoch of a loader. It begins, and uses up its number, when its first minibatch, ``order`` or
    ``positions`` is asked for.
    """

    def __init__(self, loader: EpochLoader) -> None:
        self._loader = loader
        self._begun: tuple[EpochStream[Minibatch], _Progress, EpochSeeds] | None = None
        self._consumed = Consumed()  # of torch's stream, if minibatches are pinned
        self._closed = False

    def _begin(self) -> tuple[EpochStream[Minibatch], _Progress, EpochSeeds]:
        if self._closed:
            raise ValueError("this iterator was closed before its epoch began: make a new one")
        self._begun = self._loader._begin()
        return self._begun

    @property
    def order(self) -> torch.Tensor:
        """int64[seeds], the loader's order() of this epoch, of all ranks."""
        _, _, seeds = self._begun or self._begin()
        return seeds.named(seeds.order)

    def __next__(self) -> Minibatch:
        pin = self._loader.pin_memory
        return self.hand_out(lambda minibatch: minibatch.pin_memory() if pin else minibatch)

    def hand_out(self, make: Callable[[Minibatch], R]) -> R:
        """What `make` makes of the next minibatch, which counts as handed out only then. An error of `make`
        ends the epoch, too."""
        if self._closed and self._begun is None:
            raise StopIteration
        stream, progress, _ = self._begun or self._begin()
        if self._loader.pin_memory:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._consumed.append(torch.cuda.current_stream().record_event(event))
            self._consumed.wait()
        minibatch, features = next(stream)
        try:
            self._loader._stream.hand_over(minibatch)
            minibatch.features = FeatureRows(features, {n: t.key for n, t in self._loader.tables.items()})
            made = make(minibatch)
        except BaseException as error:
            stream.fail(error)
            if isinstance(error, StopIteration):  # which would end the loop in silence
                raise RuntimeError(
                    "the transform raised StopIteration: let it return, or raise another error"
                ) from error
            raise
        progress.step += 1
        return made

    def positions(self, step: int) -> torch.Tensor:
        """This rank's seeds of a step: int64[n], positions among the seeds as given; EdgeLoader(edges=None):
        edge ids."""
        _, _, seeds = self._begun or self._begin()
        return seeds.named(seeds.at(step).own)

    def close(self) -> None:
        """End the epoch here. Idempotent. The end of the epoch, and dropping it, do the same."""
        self._closed = True
        if self._begun is not None:
            self._begun[0].close()


def check_order(call: str, sampler: Any) -> None:
    """Raise TypeError if seeds are where the fanouts belong. call: the right order."""
    if isinstance(sampler, str | torch.Tensor | np.ndarray | range):
        kind = type(sampler).__name__
        raise TypeError(f"the order is {call}, with fanouts such as [10, 10]: a {kind} has their place")


def check_range(ids: Any, count: int, what: str) -> None:
    """Raise IndexError if an id is below 0 or not below count. ids: a tensor or an array."""
    if len(ids) and not (ids.min() >= 0 and ids.max() < count):
        raise IndexError(f"{what} {ids.min()} to {ids.max()}; ids run from 0 to {count - 1}")


def _growth(seeds: EpochSeeds, steps: range) -> float:
    """How many times as many seeds as the first one of these steps the usual step has."""
    if not steps:
        return 1.0
    usual, first = (max(1, len(seeds.at(step).own)) for step in (0, steps.start))
    return usual / first


class _SamplerBytes:
    """Memory of a sampler that makes a minibatch and `waiting` more in one call."""

    def __init__(self, sampler: LayeredSampler | None) -> None:
        self._sampler, self._least_bytes = sampler, 0

    def __call__(self, waiting: int) -> int:
        if self._sampler is None:
            return 0
        _, minibatches_bytes = self._sampler.host_bytes()
        # A sampler holds least once it has sampled its first minibatch.
        self._least_bytes = min(self._least_bytes or minibatches_bytes, minibatches_bytes)
        return self._sampler.scratch_bytes(1 + waiting) + self._least_bytes


def _name_of(sampler: Sampler) -> str:
    """All that its minibatches depend on; its class, if it does not say that."""
    kind = type(sampler)
    return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(sampler)


def _brief(state: object) -> str:
    return ", ".join(map(repr, state)) or "none" if isinstance(state, Mapping) else type(state).__name__
