"""Parts: datasets that `gids partition` made of a larger one. Ids are those of the larger dataset.

Held translates ids of nodes or edges to rows of a part's table. Made by Table; called by loaders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gids import _core
from gids.errors import FormatError
from gids.store.manifest import Part

if TYPE_CHECKING:
    from gids.store.feature_store import FeatureStore

_BLOCK_IDS = 1 << 22


def part_name(index: int) -> str:
    """The name of a part in the directory of all parts."""
    return f"part-{index:03d}.gids"


def part_paths(directory: str | os.PathLike[str]) -> list[Path]:
    """The parts in a directory that `gids partition` made, by name; [] for any other directory."""
    return sorted(Path(directory).glob("part-[0-9]*.gids"), key=lambda path: (len(path.name), path.name))


class NotHeldError(IndexError):
    """The row of an id is in another part of the dataset. Attributes: id; owner (a part, None: not known)."""

    def __init__(self, message: str, id_: int, owner: int | None) -> None:
        super().__init__(message)
        self.id, self.owner = id_, owner

    def __reduce__(self) -> tuple[type[NotHeldError], tuple[object, ...]]:
        return NotHeldError, (self.args[0], self.id, self.owner)


class Held:
    """The ids whose rows a part's table has. Row i of the table is that of the i-th id, ascending.

    Immutable; any thread may call. Takes 1.5 bits of memory per id of the whole dataset.

    Attributes: id_count (ids of the whole dataset); row_count (ids held); nbytes.
    """

    def __init__(
        self, table: str, part: Part, id_count: int, read: Callable[[], np.ndarray], *, of_nodes: bool
    ) -> None:
        """read: returns the owners of all nodes, uint8 or uint16[id_count], for a table of nodes; else the
        ids of the edges that the part holds, int32 or int64[n].
        """
        self._table, self._part = table, part
        self._owners = read if of_nodes else None
        self.id_count = id_count
        self._rows = _core.HeldRows(id_count)
        values = read()
        for first in range(0, len(values), _BLOCK_IDS):
            block = values[first : first + _BLOCK_IDS]
            if of_nodes:
                self._rows.add_owned(block, first, part.index)
            elif (bad := self._rows.add(block)) is not None:
                raise FormatError(
                    f"edge_ids[{first + bad}] of {table!r} is {block[bad]}, which is out of range or "
                    "repeated: `gids verify` lists all faults"
                )
        self._rows.seal()
        self.row_count = len(self._rows)

    def __repr__(self) -> str:
        return f"Held({self._table!r}, {self.row_count} of {self.id_count} ids, {self._part})"

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """The positions of rows in this part's table: int64[n]. ids: int64[n], of the whole dataset.

        Raises NotHeldError, an IndexError, that names the part that has the row, and IndexError for an id out
        of range.
        """
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise TypeError(f"ids of {self._table!r} are {ids.dtype}{list(ids.shape)}; they must be int64[n]")
        ids = np.ascontiguousarray(ids)
        out = np.empty(len(ids), np.int64)
        bad = self._rows.positions_of(ids, out)
        if bad is not None:
            raise self._missing(int(ids[bad]))
        return out

    def ids(self) -> np.ndarray:
        """The ids of all rows, in the order of the rows: int64[row_count], ascending."""
        out = np.empty(self.row_count, np.int64)
        self._rows.ids(out)
        return out

    def _missing(self, id_: int) -> IndexError:
        if not 0 <= id_ < self.id_count:
            return IndexError(f"row {id_} is out of range for {self._table!r} ({self.id_count} rows)")
        part = self._part
        owner = None if self._owners is None else int(self._owners()[id_])
        where = "another part" if owner is None else f"part {owner} of {part.count}"
        this = f"part {part.index}" + f" of {part.count}" * (owner is None)
        return NotHeldError(f"row {id_} of {self._table!r} is in {where}; this is {this}", id_, owner)


def refuse_part(store: FeatureStore, what: str, cure: str = "") -> None:
    """Raise ValueError if a store is a part. what: what needs the whole dataset. cure: what to do instead."""
    if store.part is not None:
        do = cure or "open the directory of all parts with gids.distributed.open(), or the whole dataset"
        raise ValueError(f"{store.name} is {store.part}: {do} ({what} needs all parts)")
