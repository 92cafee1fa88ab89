"""What node n, or edge n, of a dataset is in another one: matched by ids, by number, or refused.

`matched` alone decides it: for the tables of all datasets but the first in gids.open(), and for each Table
that a loader gets.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gids.errors import StorageError
from gids.store.files import MappedArray
from gids.store.ids import NodeIds
from gids.store.manifest import position_dtype
from gids.store.names import Relation, describe_type

if TYPE_CHECKING:
    from gids.store.feature_store import FeatureStore
    from gids.store.table import Table

log = logging.getLogger("gids")
_BLOCK_IDS = 1 << 14  # of up to 1 KiB
_BLOCK_ROWS = 1 << 20
_BY_IDS, _BY_NUMBER = "by ids", "by number"
_EDGES = "Write the same edges to both datasets, or do not ask for this table"
_OTHER_EDGES = (
    "their edges, or the ids of these, differ, or are stored in another order or index type (--index-dtype, "
    f"--sort-neighbors, --no-times). {_EDGES}"
)


@dataclass(frozen=True)
class Numbering:
    """What number n of a node type, or of a relation, is. Equal: n is the same node or edge.

    dataset: its name. contents: checksums, of the ids of nodes (empty: a node's id is its number) or of
    indptr, indices and edge ids (None: positions, or not known; empty: no topology). ends: of the nodes of
    a relation. open_ids: opens the ids of nodes.
    """

    dataset: str = field(compare=False)
    type: str | Relation
    count: int
    contents: tuple[int | None, ...]
    ends: tuple[Numbering, ...] = ()
    open_ids: Callable[[], NodeIds] | None = field(default=None, compare=False)

    @property
    def ids(self) -> NodeIds:
        assert self.open_ids is not None, "edges"
        return self.open_ids()


class NodeMap:
    """The nodes of one dataset (theirs) by the numbers of the nodes with the same ids in another one (ours).

    The arrays are in files without names, which each process makes for itself. directories: for these; the
    temporary directory if none can be written.
    """

    def __init__(self, ours: Numbering, theirs: Numbering, directories: Sequence[str] = ()) -> None:
        self.ours, self.theirs, self._directories = ours, theirs, directories

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "nodes"}

    @cached_property
    def nodes(self) -> np.ndarray:
        """int32 or int64[n]. Raises ValueError if an id is in one of the datasets only."""
        if self.theirs.count > self.ours.count:
            for _ in _found(self.theirs, self.ours):  # which raises
                pass
        return self._saved(_found(self.ours, self.theirs))

    def order(self, own: np.ndarray | None) -> np.ndarray:
        """The position of the row of each of our nodes. own: Table.order, by their nodes."""
        if own is None:
            return self.nodes
        starts = range(0, len(self.nodes), _BLOCK_ROWS)
        return self._saved(own[self.nodes[first : first + _BLOCK_ROWS]] for first in starts)

    def _saved(self, pieces: Iterable[np.ndarray]) -> np.ndarray:
        count, dtype = self.ours.count, position_dtype(self.ours.count)
        directory = next((d for d in self._directories if os.access(d, os.W_OK)), tempfile.gettempdir())
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                for piece in pieces:
                    file.write(piece.astype(dtype).data)
                file.flush()
                return MappedArray.of(file.fileno(), f"rows of {self.theirs.dataset}", dtype, 0, (count,))
        except StorageError:  # of ids
            raise
        except OSError as error:
            what = "cannot write the numbers of nodes that are matched by ids"
            raise StorageError(error.errno or 0, what, directory) from None


MakeMap = Callable[[Numbering, Numbering], NodeMap]


def _found(ours: Numbering, theirs: Numbering) -> Iterator[np.ndarray]:
    """Their nodes with the ids of ours, in blocks. Raises ValueError at the end if an id was not found."""
    our_ids, their_ids, missing, example = ours.ids, theirs.ids, 0, None
    for first in range(0, ours.count, _BLOCK_IDS):
        nodes = their_ids.nodes_of(our_ids, first, min(first + _BLOCK_IDS, ours.count))
        lost = np.flatnonzero(nodes < 0)
        if len(lost) and not missing:
            example = our_ids[first + int(lost[0])]
        missing += len(lost)
        yield nodes
    if missing:
        raise ValueError(
            f"{theirs.dataset} lacks {missing} of the {ours.count} ids of {ours.type!r} nodes in "
            f"{ours.dataset}, such as {example!r}: convert both from the same nodes"
        )


def matched(table: Table, stores: Sequence[FeatureStore], make_map: MakeMap = NodeMap) -> Table:
    """The table by the numbers of the first dataset that has its type.

    Raises ValueError for nodes or edges that are, or may be, others.
    """
    ours, theirs = numbering_of(stores, table.type), table.numbering
    if theirs is None or ours is None or ours == theirs:
        return table
    if (how := _match(ours, theirs)) == _BY_NUMBER:
        return table
    if how == _BY_IDS and table.in_part is None:
        node_map = make_map(ours, theirs)
        _ = node_map.nodes  # raises ValueError for ids that only one has
        return table.renumbered(node_map)
    if how == _BY_IDS:
        how = "it is in a part, whose nodes are in another order: give the table of the whole dataset"
    raise ValueError(
        f"rows of {table.name} in {theirs.dataset} may be those of other {table.kind}s than in "
        f"{ours.dataset}: {how}"
    )


def matched_tables(stores: Sequence[FeatureStore], scratch: Sequence[str]) -> dict[Table, Table]:
    """The tables of nodes of the datasets to what matched() makes of them. Logs how. scratch: for NodeMap.

    Tables of edges are matched when a loader takes one.
    """
    done: dict[Table, Table] = {}
    said = []
    for index, store in enumerate(stores):
        make_map = cache(partial(NodeMap, directories=(*scratch, str(store.path))))
        done |= {t: matched(t, stores, make_map) for t in store.tables.values() if t.kind == "node"}
        for type_ in dict.fromkeys(t.type for t in store.tables.values()):
            ours, theirs = numbering_of(stores[:index], type_), store.numbering(type_)
            if ours is not None and theirs is not None:
                how = _match(ours, theirs)
                known = how if how in (_BY_IDS, _BY_NUMBER) else "not (other edges)"
                said.append(f"{describe_type(type_)} of {store.name} {known}")
    if said:
        log.info("rows are matched to those of %s: %s", stores[0].name, ", ".join(said))
    return done


def numbering_of(stores: Sequence[FeatureStore], type_: str | Relation) -> Numbering | None:
    """That of the first dataset that has the type."""
    return next((n for store in stores if (n := store.numbering(type_)) is not None), None)


def _match(ours: Numbering, theirs: Numbering) -> str:
    """_BY_IDS, _BY_NUMBER, or why neither is right, and what to do."""
    with_ids = [n for n in (ours, theirs) if n.contents]
    if not ours.ends:
        if len(with_ids) == 1:
            one = with_ids[0].dataset
            return (
                f"only {one} stores ids of {ours.type!r} nodes (ids 0, 1, 2, … in order are not stored: if "
                f"the other's are these, sort the rows of {one} by id and convert it again). Convert both "
                "with the same column of ids, or both without and in the same order. DatasetWriter."
                "copy_ids() writes the ids of a dataset"
            )
        if len({n.ids.is_text for n in with_ids}) == 2:
            return f"ids of {ours.type!r} nodes are text in one, numbers in the other: convert both alike"
        return _BY_IDS if with_ids else _BY_NUMBER
    for mine, other in zip(ours.ends, theirs.ends, strict=True):
        if mine.count != other.count or (mine.contents and other.contents and mine != other):
            return f"their {mine.type!r} nodes are others, or in another order. {_EDGES}"
    if ours.count != theirs.count:
        return f"it has {theirs.count} edges, not {ours.count}. {_EDGES}"
    if len(with_ids) == 2 and ours.contents != theirs.contents:
        return _OTHER_EDGES
    if len(with_ids) == 1 and with_ids[0].contents[2] is None:
        return f"the edges of {with_ids[0].dataset} have no ids of their own. {_EDGES}"
    return _BY_NUMBER
