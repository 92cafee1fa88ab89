"""RowSource: what loaders that sample ask of a source. Source is one; gids.distributed's GroupSource another.

Loaders take one in place of a dataset. RowLoader: what they ask of what reads their rows. EpochInput: what
they tell it of an epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from gids.closing import Closing
from gids.loader.lending import Lender
from gids.loader.options import Options
from gids.loader.ranks import Ranks
from gids.sampler import Minibatch, Topology
from gids.store import FeatureStore, Graph

if TYPE_CHECKING:
    from gids.loader.epoch_stream import EpochStream, IdsOf
    from gids.loader.feature_loader import FeatureLoader
    from gids.loader.learned import Learned
    from gids.loader.pack_chooser import Together
    from gids.loader.tables import Tables

T = TypeVar("T")


class StepSampling(NamedTuple):
    """How a loader samples. sample: see gids.loader.sampling.sample_steps. bulk: number of minibatches to
    sample in one call; None: as suits the sampler's threads."""

    sample: Callable[..., list[Minibatch]]
    bulk: int | None


@dataclass(frozen=True, kw_only=True)
class EpochInput(Generic[T]):
    """The minibatches of an epoch, and what is known of them.

    minibatches, ids_of, bytes_of, count: as of FeatureLoader.attach(). learned: what earlier epochs of the
    same loader taught. growth: size of the other minibatches, relative to the first. waiting_batches: the
    most sampled minibatches that `minibatches` itself holds, which RowLoader.waiting_batches limits after the
    first minibatch. source_bytes: returns other memory of `minibatches`, for the number of minibatches that
    it holds. packs: whether rows may be read by packs. together: what processes that sample together decide
    about packs. following: returns the minibatches of the next epoch, or None. Called from the second epoch
    on, if packs can be made for them while this one is trained. The next epoch is attached with the same
    object then; if it has others, that work is thrown away.
    """

    minibatches: Iterable[T]
    ids_of: IdsOf[T]
    learned: Learned
    bytes_of: Callable[[T], int] = lambda _: 0
    count: int | None = None
    growth: float = 1.0
    waiting_batches: int = 0
    source_bytes: Callable[[int], int] = lambda _waiting: 0
    packs: bool = True
    together: Together | None = None
    following: Callable[[], Iterable[T] | None] | None = None


class RowLoader(Protocol):
    """Reads the rows of an epoch's minibatches: a FeatureLoader, or one whose ranks read together.

    feature_loader: reads this rank's rows; who closes a loader calls its leave(). The others are those of
    FeatureLoader.
    """

    @property
    def feature_loader(self) -> FeatureLoader: ...
    @property
    def waiting_batches(self) -> int: ...
    def attach_epoch(self, epoch: EpochInput[Minibatch]) -> EpochStream[Minibatch]: ...
    def stats_of(self, learned: Learned) -> dict[str, Any]: ...


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
        """What reads rows of these tables for a loader, its user."""

    @property
    def made_by(self) -> str:
        """The call that makes it, for errors."""
        return "gids.distributed.open()" if self.together else "gids.open()"

    def __getstate__(self) -> None:
        raise TypeError(f"a {type(self).__name__} cannot be pickled; call {self.made_by} in each process")
