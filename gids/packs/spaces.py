"""Spaces: tables that a minibatch reads by the same rows. Packs are cut by spaces, so rows are counted once.

Made once per loader. Knows tables, and no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.feature_cache import check_ids
from gids.store.table import positions_of

if TYPE_CHECKING:
    from gids.store import Table

Rows = npt.NDArray[np.uint32]
"""Positions of rows on disk, as a minibatch reads them."""

MOST_ROWS = 1 << 32
"""Rows of a table that packs can hold: positions take 4 bytes."""

_CPU = torch.device("cpu")


class OtherIdsError(ValueError):
    """Tables that were read by the same ids before are not any more."""


@dataclass(frozen=True)
class Space:
    """Tables of one node or edge type whose rows are in the same order on disk."""

    tables: tuple[Table, ...]

    @property
    def row_count(self) -> int:
        return self.tables[0].row_count

    @property
    def row_bytes(self) -> int:
        """Bytes on disk of a row of all tables."""
        return sum(t.row_bytes for t in self.tables)

    @property
    def set_bytes(self) -> int:
        """Memory of the row set of one pack."""
        nbytes: int = _core.row_set_bytes(self.row_count)
        return nbytes


def spaces_of(tables: Sequence[Table], ids: Mapping[str, torch.Tensor]) -> list[Space]:
    """The tables grouped into spaces.

    ids: of the first minibatch. Tables with an order on disk, and tables that it reads by other ids than the
    others of their type, have a space of their own.
    """
    groups: list[list[Table]] = []
    for table in tables:
        for members in groups:
            first = members[0]
            if (
                table.type == first.type
                and table.row_count == first.row_count
                and table.order is None is first.order
                and _alike(ids.get(table.name), ids.get(first.name))
            ):
                members.append(table)
                break
        else:
            groups.append([table])
    return [Space(tuple(members)) for members in groups]


def _alike(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and (a is b or torch.equal(a, b))


def rows_of(ids: Mapping[str, torch.Tensor], spaces: Sequence[Space]) -> list[Rows]:
    """The rows that a minibatch reads in each space: uint32[n] each, in the order of its ids.

    ids: int64[n] on the CPU, by table. Raises IndexError for an id out of range, KeyError for an unknown
    table, TypeError or ValueError for a wrong dtype, device or shape, OtherIdsError if the tables of a space
    are not read by the same ids.
    """
    check_ids(ids, [t.name for space in spaces for t in space.tables], _CPU)
    rows = []
    for space in spaces:
        arrays = [ids[t.name] for t in space.tables if t.name in ids]
        if not arrays:
            rows.append(np.empty(0, np.uint32))
            continue
        first = arrays[0]
        if not all(_alike(other, first) for other in arrays):
            raise OtherIdsError(f"tables of {space.tables[0].type!r} are now read by different ids")
        array = first.contiguous().numpy()
        try:
            _core.check_rows(array, space.row_count)
        except IndexError as error:
            raise IndexError(f"table '{space.tables[0].name}': {error}") from None
        order = space.tables[0].order
        rows.append((array if order is None else positions_of(array, order)).astype(np.uint32))
    return rows
