"""RowSource: what loaders that sample ask of a source. Source is one; gids.distributed's GroupSource another.

Loaders take one in place of a dataset. RowLoader: what they ask of what reads their rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from gids.closing import Closing
from gids.loader.lending import Lender
from gids.loader.options import Options
from gids.loader.ranks import Ranks
from gids.sampler import Minibatch, Topology
from gids.store import FeatureStore, Graph

if TYPE_CHECKING:
    from gids.loader.epoch_stream import EpochStream
    from gids.loader.feature_loader import FeatureLoader
    from gids.loader.learned import Learned
    from gids.loader.sampling import EpochSampling
    from gids.loader.tables import Tables


class StepSampling(NamedTuple):
    """How a loader samples. sample: see gids.loader.sampling.sample_steps. bulk: number of minibatches to
    sample in one call; None: as suits the sampler's threads."""

    sample: Callable[..., list[Minibatch]]
    bulk: int | None


class RowLoader(Protocol):
    """Reads the rows of an epoch's minibatches: a FeatureLoader, or one whose ranks read together.

    feature_loader: reads this rank's rows. The others are those of FeatureLoader.
    """

    @property
    def feature_loader(self) -> FeatureLoader: ...
    @property
    def window(self) -> int: ...
    @property
    def waiting_batches(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    def attach_epoch(
        self,
        minibatches: EpochSampling,
        ids_of: Callable[[Minibatch], Mapping[str, torch.Tensor]],
        *,
        bytes_of: Callable[[Minibatch], int],
        waiting_batches: int,
        source_bytes: Callable[[int], int],
        growth: float,
        count: int | None,
        learned: Learned,
        following: Callable[[], EpochSampling | None] | None,
    ) -> EpochStream[Minibatch]: ...
    def stats_of(self, learned: Learned) -> dict[str, Any]: ...
    def leave(self, user: object) -> None: ...


class RowSource(Closing, ABC):
    """A dataset, or several, with options and one memory budget, for loaders that sample and read rows.

    Attributes: store (the first dataset's); stores; options; lender; together: whether all ranks of a process
    group sample and read together. A source of several parts of a dataset must.
    """

    together: bool

    def __init__(self, stores: Sequence[FeatureStore], options: Options, lender: Lender) -> None:
        self.store, self.stores = stores[0], list(stores)
        self.options, self.lender = options, lender

    @property
    def memory(self) -> int:
        """The budget in host memory, in bytes."""
        return self.lender.host_bytes

    def split(self, name: str, ntype: str | None = None) -> torch.Tensor:
        """The ids of a split, as FeatureStore.split."""
        return self.store.split(name, ntype)

    def stats(self) -> dict[str, Any]:
        """The sums of the stats() of all loaders of this source.

        One that was dropped without close() does not count.
        """
        return self.lender.stats()

    @abstractmethod
    def graphs(self) -> list[Graph]:
        """The graphs that loaders sample from."""

    @abstractmethod
    def ranks(self, rank: int | None, world_size: int | None) -> Ranks:
        """The ranks that share the seeds of a loader with these arguments."""

    @abstractmethod
    def sampling(
        self, topology: Topology, ranks: Ranks, device: torch.device, *, cooperative: bool
    ) -> StepSampling:
        """How a loader samples. topology: of graphs(). ranks: the loader's. cooperative: these work on one
        minibatch together. Raises ValueError if that, or the device, is impossible."""

    @abstractmethod
    def feature_loader(
        self,
        user: object,
        tables: Tables,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        minibatch_rows: int | Mapping[str, int] | None = None,
        cooperative: bool = False,
    ) -> RowLoader:
        """What reads rows of these tables for a loader, which calls leave(user) when it is closed."""

    def __getstate__(self) -> None:
        call = "gids.distributed.open()" if self.together else "gids.open()"
        raise TypeError(f"a {type(self).__name__} cannot be pickled; call {call} in each process")
