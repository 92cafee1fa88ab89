"""Parts: datasets that `gids partition` made of a larger one. Ids are those of the larger dataset.

Held translates ids of nodes or edges to rows of a part's table. Made by Table; called by loaders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gids import _core
from gids.errors import FormatError
from gids.store.files import Locator, read_manifest
from gids.store.manifest import OWNER, Manifest, NodesEntry, Part, RelationEntry
from gids.store.names import describe_type
from gids.store.rows import MARK_ROWS

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


_BLOCK = 1 << 20


def owner_faults(nodes: NodesEntry, part: Part, locate: Locator) -> Iterator[str]:
    """Yield one line if an owner is no part, or if the part does not own as many nodes as it says."""
    entry = nodes.arrays[OWNER]
    path, owners = locate.array(entry), locate.map(entry)
    held = 0
    for first in range(0, nodes.count, _BLOCK):
        block = owners[first : first + _BLOCK]
        wrong = np.flatnonzero(block >= part.count)
        if len(wrong):
            bad = first + int(wrong[0])
            yield f"{path}: owner[{bad}] is {owners[bad]}; it must be from 0 to {part.count - 1}"
            return
        held += int(np.count_nonzero(block == part.index))
    if held != nodes.held:
        yield f"{path}: {held} nodes belong to part {part.index}, but the manifest says {nodes.held}"


def edge_faults(
    relation: RelationEntry, destinations: NodesEntry, part: Part, locate: Locator
) -> Iterator[str]:
    """Yield a line if the part has edges to a node of another part, and one if an edge id is repeated.

    destinations: the entry of the destinations' type. The values of indptr and edge_ids are in range.
    """
    arrays = {role: locate.map(entry) for role, entry in relation.arrays.items()}
    owners = locate.map(destinations.arrays[OWNER])
    for first in range(0, destinations.count, _BLOCK):
        degrees = np.diff(arrays["indptr"][first : first + _BLOCK + 1])
        foreign = np.flatnonzero((degrees > 0) & (owners[first : first + _BLOCK] != part.index))
        if len(foreign):
            bad = first + int(foreign[0])
            yield (
                f"{locate.array(relation.arrays['indptr'])}: node {bad} has in-edges here, but belongs to "
                f"part {owners[bad]}; this is part {part.index}"
            )
            break
    ids = arrays["edge_ids"]
    marks = np.empty(min(MARK_ROWS, relation.count), np.uint8)
    for lowest in range(0, relation.count, MARK_ROWS):
        marks[:] = 0
        for first in range(0, len(ids), _BLOCK):
            bad_at = _core.mark_positions(ids[first : first + _BLOCK], relation.count, lowest, marks)
            if bad_at is not None:
                at = first + bad_at
                path = locate.array(relation.arrays["edge_ids"])
                yield f"{path}: edge_ids[{at}] is {ids[at]}, as is an entry before it"
                return


def directory_faults(paths: Sequence[Path]) -> Iterator[str]:
    """Yield one line for each way in which the parts of a directory do not fit together."""
    manifests: dict[Path, Manifest] = {}
    for path in paths:
        try:
            manifests[path] = read_manifest(path)
        except (FormatError, OSError) as error:
            yield str(error)
            return
    whole = [path for path, manifest in manifests.items() if manifest.part is None]
    if whole:
        yield f"{whole[0]} is not a part, but a whole dataset"
        return
    first_path, first = next(iter(manifests.items()))
    assert first.part is not None
    count = first.part.count
    names = {path.name for path in paths}
    yield from (
        f"{first_path.parent} has no {part_name(i)}, part {i} of {count}: copy it there"
        for i in range(count)
        if part_name(i) not in names
    )
    for path, manifest in manifests.items():
        assert manifest.part is not None
        if path.name != part_name(manifest.part.index):
            yield f"{path} is {manifest.part}: its name must be {part_name(manifest.part.index)}"
        for what, property_of in _SAME.items():
            if property_of(manifest) != property_of(first):
                yield f"{path} and {first_path} differ in {what}: they are not parts of one dataset"
                return
    if len(manifests) != count:
        return
    for what, kind in (("nodes", "nodes"), ("edges", "relations")):
        for index, entry in enumerate(getattr(first, kind)):
            total = sum(getattr(m, kind)[index].held or 0 for m in manifests.values())
            if total != entry.count:
                name = describe_type(entry.type)
                yield f"the parts hold {total} {what} of {name}; there are {entry.count}"


_SAME: dict[str, Callable[[Manifest], object]] = {
    "the dataset that was partitioned": lambda m: m.part and (m.part.count, m.part.of, m.part.method),
    "their nodes": lambda m: [(n.type, n.count) for n in m.nodes],
    "their relations": lambda m: [(r.type, r.count, r.sorted_by) for r in m.relations],
    "the owners of nodes": lambda m: [n.arrays[OWNER].crc32c for n in m.nodes],
    "their tables": lambda m: [(t.name, t.dtype, t.shape, t.page_bytes) for t in m.tables],
}
