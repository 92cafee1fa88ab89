"""RankRows: the rows that a rank reads, for minibatches that all ranks sample together.

Made by GroupSource in place of a FeatureLoader. The ids of a step go to their owners when the step is
sampled, so the owner's window sees what all ranks will ask for. The rows of step s + 1 are on their way while
step s is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from gids.cache.device.state import row_copy
from gids.cache.output_dtype import out_dtype_of, row_form
from gids.cuda import on_host
from gids.distributed.group import Tensors
from gids.distributed.owners import Dealt, Owners
from gids.distributed.stream import Due, LockstepStream, Step, Steps
from gids.loader.epoch_stream import EpochStream, Failed
from gids.loader.learned import Learned
from gids.loader.row_source import EpochInput
from gids.loader.sampling import EpochSampling
from gids.sampler import Minibatch
from gids.store import Table
from gids.store.dtypes import make_bools_proper

if TYPE_CHECKING:
    from gids.cuda.device import Device
    from gids.distributed.source import GroupSource
    from gids.loader.feature_loader import FeatureLoader

T = TypeVar("T")
Ids = Mapping[str, torch.Tensor]

_UNIT = "distributed/order_rows.cu"
_WARPS = 8  # of a block
_WAVES = 4  # blocks per multiprocessor; see the launch bounds of the kernel


class RankRows:
    """The rows of tables for the minibatches of all ranks of a group.

    feature_loader: reads this rank's rows; those that are exchanged as they are stored. tables: those that
    the user wants, by name. owners: the owners of each table's rows, or None for edges of a partitioned
    dataset, whose owners the source finds for a minibatch. Without owners, every rank reads the rows of its
    minibatches itself: cooperative minibatches have no others. dtype: of the features, if rows are exchanged.

    Attributes: group: the ranks that exchange rows; everyone: all ranks, which use packs and skip a step
    together; exchanged: whether rows are exchanged; alike: names of tables whose rows have the same ids and
    owners; counts: what was exchanged since the beginning.
    """

    def __init__(
        self,
        source: GroupSource,
        feature_loader: FeatureLoader,
        tables: Mapping[str, Table],
        owners: Mapping[str, Owners | None] | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._source, self.group, self.reads = source, source.group, source.options.reads
        self.everyone = source.everyone
        self.feature_loader, self.tables = feature_loader, dict(tables)
        self._owners, self._dtype = owners or {}, dtype
        self._row_copies: dict[str, tuple[int | torch.Tensor, ...]] = {}  # of tables, for kernels
        if owners is not None and feature_loader.cuda_device is not None:
            feature_loader.cuda_device.preload(_UNIT)
        self.exchanged = owners is not None
        alike: dict[Any, list[str]] = {}
        for name in sorted(tables):  # ranks send them in this order, and each may be given its own one
            key = (tables[name].type, id(self._owners.get(name)), tables[name].in_part is None)
            alike.setdefault(key, []).append(name)
        self.alike = list(alike.values())
        self.counts = {"rows sent": 0, "bytes sent": 0, "rows asked": 0, "exchanges": 0}

    @property
    def waiting_batches(self) -> int:
        """The same on all ranks."""
        return self._source.bulk - 1

    def attach_epoch(self, epoch: EpochInput[Minibatch]) -> EpochStream[Minibatch]:
        """Iterate over (minibatch, {table: features}), as FeatureLoader.attach. Collective.

        The ranks sample together, and none is ahead of its epoch: epoch.following is not used.
        """
        steps = Steps(self, cast(EpochSampling, epoch.minibatches), epoch.ids_of, epoch.bytes_of)
        return LockstepStream(self, steps, epoch.growth, epoch.count, epoch.learned)

    def agree_on_packs(self, learned: Learned, count: int | None, place: str) -> bool:
        """Whether all ranks may read the next minibatches by packs. Collective if the options allow packs.

        Raises ValueError on all ranks if packs are asked for and impossible on one.
        """
        if self.reads == "random" or self.feature_loader.device.type != "cpu":
            return False
        may, reason = False, ""
        try:
            may = self.feature_loader.may_use_packs(learned, count)
        except ValueError as error:
            reason = str(error)
        said: list[tuple[bool, str]] = self.everyone.gather((may, reason), place)
        for rank, (_, reason) in enumerate(said):
            if reason:
                raise ValueError(f"{self.everyone.name_of(rank)}: {reason}")
        return all(may for may, _ in said)

    def ids_of(self, step: Step[Any]) -> Ids:
        """The positions of the rows that this rank reads for a step, by table."""
        return self.by_table(step.ids)

    def by_table(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The value of each table, from one for each group of tables that are alike."""
        return {name: value for names, value in zip(self.alike, values, strict=True) for name in names}

    def features_of(self, step: Step[Any], rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The features of a step. rows: as they came by table, uint8[n, row_bytes] each, which are freed."""
        inverse, features = self.by_table(step.inverse), {}
        device = self.feature_loader.cuda_device
        for name, table in self.tables.items():
            stored, places = rows.pop(name), inverse[name]
            if device is not None:
                values = self._order_on(device, table, stored, places)
            else:
                stored = stored.index_select(0, places)
                if table.scale is None:
                    values = stored.view(table.dtype).view(len(stored), *table.shape)
                else:
                    values = table.decode(stored.numpy())
                values = values.to(out_dtype_of(table, self._dtype))
            features[name] = make_bools_proper(values)
        return features

    def _order_on(
        self, device: Device, table: Table, stored: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """The rows at these places of `stored`, converted, on torch's current stream. Does not block."""
        if table.name not in self._row_copies:
            form = row_form(table, self._dtype)
            scales = 0 if form.scales is None else torch.from_numpy(form.scales).to(device.torch_device)
            self._row_copies[table.name] = (*row_copy(form), scales)
        if places.device != device.torch_device:
            places = places.pin_memory().to(device.torch_device, non_blocking=True)
        out = device.empty((len(places), *table.shape), out_dtype_of(table, self._dtype))
        device.launch(
            device.current_stream(),
            _UNIT,
            "gids_order_rows",
            min(-(-len(places) // _WARPS), _WAVES * device.sm_count),
            32 * _WARPS,
            stored,
            table.row_bytes,
            places,
            len(places),
            out,
            *self._row_copies[table.name],
        )
        return out

    def stats_of(self, learned: Learned) -> dict[str, Any]:
        """Those of FeatureLoader, of the rows that this rank reads; ``"group"`` if rows are exchanged."""
        stats = self.feature_loader.stats_of(learned)
        return stats | {"group": dict(self.counts)} if self.exchanged else stats

    def ask(
        self, minibatch: T | Failed, ids_of: Callable[[T], Ids], bytes_of: Callable[[T], int], place: str
    ) -> tuple[Step[T], Due[T]]:
        """Send the ids of a minibatch to the owners of their rows. Collective.

        Raises the minibatch's error, or one that names the rank that has one.
        """
        inverses: list[torch.Tensor] = []
        expected: list[list[int]] = []
        own: list[torch.Tensor] = []

        def ask() -> Tensors:
            if isinstance(minibatch, Failed):  # the other ranks wait
                raise minibatch.error
            ids = on_host(ids_of(minibatch))
            if not self.exchanged:
                own.extend(ids[names[0]] for names in self.alike)
                return []
            messages = []
            for names in self.alike:
                wanted = ids[names[0]].numpy()
                dealt = Dealt(self._owners_of(minibatch, names[0], wanted), self.group.size)
                inverses.append(dealt.inverse())
                expected.append(dealt.counts.tolist())
                messages.append(dealt.parts(wanted))
                self.counts["rows asked"] += len(wanted) - int(dealt.counts[self.group.rank])
            return messages

        dtypes = [torch.int64] * (len(self.alike) if self.exchanged else 0)
        received = self.group.exchange(ask, dtypes, place)
        assert not isinstance(minibatch, Failed)
        wanted = [[len(ids) for ids in by_rank] for by_rank in received]
        asked = [torch.cat(by_rank) for by_rank in received] if self.exchanged else own
        rows = []
        for names, ids in zip(self.alike, asked, strict=True):  # positions in this rank's part
            held = self.tables[names[0]].held
            rows.append(ids if held is None else torch.from_numpy(held.rows_of(ids.numpy())))
        nbytes = bytes_of(minibatch)
        if self.exchanged:
            nbytes += sum(values.nbytes for values in (*rows, *inverses))
        return Step(minibatch, nbytes, rows, inverses), Due(wanted, expected)

    def _owners_of(self, minibatch: Any, name: str, ids: np.ndarray) -> np.ndarray:
        """The owners of the rows of a table that a minibatch reads."""
        owners, type_ = self._owners[name], self.tables[name].type
        if owners is not None:
            return owners(ids)
        assert not isinstance(type_, str)
        return self._source.owners_of_edges(minibatch, type_)
