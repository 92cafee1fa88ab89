"""RankRows: the rows that a rank reads for minibatches that all ranks sample together; Step and Due: those of
one minibatch.

LockstepStream calls it. The ids of a step go to their owners when the step is sampled, so the owner's window
sees what all ranks will ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from gids.cache.device.state import row_copy
from gids.cache.output_dtype import converted, out_dtype_of, overflow_error, row_form
from gids.cuda import on_host
from gids.distributed.owners import Dealt, Owners
from gids.loader.ranks import Group, Tensors
from gids.loader.rows import Features
from gids.store import Table
from gids.store.dtypes import make_bools_proper
from gids.store.names import Relation

if TYPE_CHECKING:
    from gids.cuda.device import Device
    from gids.loader.feature_loader import FeatureLoader

T = TypeVar("T")
Ids = Mapping[str, torch.Tensor]
OwnersOfEdges = Callable[[Any, Relation], np.ndarray]

_UNIT = "distributed/order_rows.cu"
_WARPS = 8  # of a block
_WAVES = 4  # blocks per multiprocessor; see the launch bounds of the kernel


@dataclass
class Step(Generic[T]):
    """What this rank reads for a step. Lists are by group of tables that are read alike.

    ids: positions of the rows that all ranks ask of this one, int64[n], in the order of ranks. inverse: for
    each row of the minibatch, its place among the rows that come in; empty if no rows are exchanged.
    """

    minibatch: T
    nbytes: int
    ids: list[torch.Tensor]
    inverse: list[torch.Tensor]


@dataclass
class Due(Generic[T]):
    """A step that was sampled and is not returned.

    wanted, expected: how many rows each rank asks of this one, and how many come from each, by group of
    tables, then by rank. step, rows: what was read, by table, until it is sent; or error. coming: by table,
    the rows that come, as of start_rows(). failed: a byte of each rank, not 0 if it could not read its rows.
    """

    wanted: list[list[int]]
    expected: list[list[int]]
    step: Step[T] | None = None
    rows: Features = field(default_factory=dict)
    error: Exception | None = None
    coming: dict[str, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    failed: tuple[torch.Tensor, Any] | None = None


class RankRows:
    """The rows of tables for the minibatches of all ranks of a group.

    feature_loader: reads this rank's rows; those that are exchanged as they are stored. tables: those that
    the user wants, by name. owners: the owners of each table's rows, or None for edges of a partitioned
    dataset, whose owners owners_of_edges finds for a minibatch. Without owners, every rank reads the rows of
    its minibatches itself: cooperative minibatches have no others. dtype: of the features, if rows are
    exchanged.

    Attributes: group: the ranks that exchange rows; everyone: all ranks, which skip a step together;
    waiting_batches: see RowLoader; exchanged: whether rows are exchanged; alike: names of tables whose rows
    have the same ids and owners; counts: what was exchanged since the beginning.
    """

    def __init__(
        self,
        group: Group,
        everyone: Group,
        feature_loader: FeatureLoader,
        tables: Mapping[str, Table],
        owners: Mapping[str, Owners | None] | None,
        *,
        owners_of_edges: OwnersOfEdges,
        dtype: torch.dtype | None,
        waiting_batches: int,
    ) -> None:
        self.group, self.everyone, self.waiting_batches = group, everyone, waiting_batches
        self.feature_loader, self.tables = feature_loader, dict(tables)
        self._owners, self._owners_of_edges, self._dtype = owners or {}, owners_of_edges, dtype
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
                values = converted(values, table, out_dtype_of(table, self._dtype))
            features[name] = make_bools_proper(values)
        return features

    def _order_on(
        self, device: Device, table: Table, stored: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """The rows at these places of `stored`, converted, on torch's current stream.

        Blocks only if a value may overflow.
        """
        form = row_form(table, self._dtype)
        if table.name not in self._row_copies:
            scales = 0 if form.scales is None else torch.from_numpy(form.scales).to(device.torch_device)
            self._row_copies[table.name] = (*row_copy(form), scales)
        if places.device != device.torch_device:
            places = places.pin_memory().to(device.torch_device, non_blocking=True)
        out = device.empty((len(places), *table.shape), out_dtype_of(table, self._dtype))
        overflowed = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
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
            overflowed,
        )
        if form.narrows and int(overflowed):
            raise overflow_error(table, out.dtype)
        return out

    def stats(self) -> dict[str, Any]:
        """Those of FeatureLoader, of the rows that this rank reads; ``"group"`` if rows are exchanged."""
        stats = self.feature_loader.stats()
        return stats | {"group": dict(self.counts)} if self.exchanged else stats

    def ask(
        self,
        minibatch: T | Exception,
        ids_of: Callable[[T], Ids],
        bytes_of: Callable[[T], int],
        place: str,
    ) -> tuple[Step[T], Due[T]]:
        """Send the ids of a minibatch to the owners of their rows. Collective.

        minibatch: or the error that sampling it raised, which this raises. The other ranks raise one that
        names this rank.
        """
        inverses: list[torch.Tensor] = []
        expected: list[list[int]] = []
        own: list[torch.Tensor] = []

        def ask() -> Tensors:
            if isinstance(minibatch, Exception):  # the other ranks wait
                raise minibatch
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
        assert not isinstance(minibatch, Exception)
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
        return self._owners_of_edges(minibatch, type_)
