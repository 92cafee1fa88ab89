"""FeatureStore: an open dataset. Called by loaders, adapters and users. Immutable and shared.

Graph: the topology of one relation, memory-mapped, as in-edges (CSC). Made by FeatureStore.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch

from gids.errors import FormatError, MissingError, StorageError
from gids.store.files import load_array, open_dataset
from gids.store.ids import ID_ROLES, NodeIds
from gids.store.manifest import OWNER, ArrayEntry, NodesEntry, Part, RelationEntry, TableEntry
from gids.store.names import HEAT_ROLES, SPLITS, Relation, describe_type
from gids.store.numbering import Numbering
from gids.store.part import Held
from gids.store.table import Table

_BLOCK_EDGES = 1 << 20


@dataclass(frozen=True)
class Graph:
    """In-edges of one relation (source type, relation, destination type).

    indptr: int64[num_dst + 1]. indices: int32 or int64[num_edges]; the sources of destination v are at
    indptr[v]:indptr[v + 1]. edge_ids: the id of each edge in that order, or None if ids are positions.

    edge_times: int32 or int64[num_edges] in the order of indices; src_times, dst_times: the same for the
    nodes at the ends; None: there are none. sorted_by: "edges" if the edges of every destination are in the
    order of edge_times, "nodes" if in that of src_times[indices], None: not known.

    All are read-only memory maps. `gids verify` checks their values; opening does not.
    """

    relation: Relation
    num_src: int
    num_dst: int
    indptr: np.ndarray
    indices: np.ndarray
    edge_ids: np.ndarray | None
    edge_times: np.ndarray | None = None
    src_times: np.ndarray | None = None
    dst_times: np.ndarray | None = None
    sorted_by: str | None = None
    edge_count: int | None = None
    """The number of edges, if they are not in `indices`: other processes have them, and edge_ids is None."""

    @property
    def num_edges(self) -> int:
        return len(self.indices) if self.edge_count is None else self.edge_count


def first_out_of_order(graph: Graph, by: str) -> int | None:
    """The first position whose edge is earlier than the one before it at the same destination, or None.

    by: "edges" or "nodes", whose times the graph must have. Reads all edges, block by block.
    """
    for first in range(0, graph.num_edges, _BLOCK_EDGES):
        last = min(first + _BLOCK_EDGES + 1, graph.num_edges)  # one more, to compare with
        begins = np.zeros(last - first, bool)
        firsts = graph.indptr[slice(*np.searchsorted(graph.indptr, [first, last]))]
        begins[firsts[(first <= firsts) & (firsts < last)] - first] = True
        if by == "edges":
            assert graph.edge_times is not None
            times = graph.edge_times[first:last]
        else:
            assert graph.src_times is not None
            times = graph.src_times[graph.indices[first:last]]
        bad = np.flatnonzero((times[1:] < times[:-1]) & ~begins[1:])
        if len(bad):
            return first + 1 + int(bad[0])
    return None


K = TypeVar("K")
T = TypeVar("T")


class FeatureStore:
    """An open dataset.

    path: the dataset's directory. allow_dirs: directories outside it that may contain its shards.

    Opening reads the manifest and the size and header of every file, but no data (`gids verify` reads all).
    Raises FileNotFoundError; FormatError if the manifest was changed, has another version or names a shard
    that is not allowed, or if a file is missing or truncated. A dataset never changes. If it is removed while
    it is open, what was opened can still be read, and what was not raises StorageError.

    Attributes: path; name (`mag.gids`); part (which part of a dataset it is; None: a whole one); tables (name
    -> Table, in the order written); labels (node type -> Tensor, loaded when first used); splits (node type
    -> {"train", "val", "test": int64 ids}); content_crc (equal for copies, and for no other datasets);
    topology_crc (equal for datasets with the same edges, edge ids and times, and for their parts); owners_crc
    (equal for the parts of one division).
    """

    def __init__(
        self, path: str | os.PathLike[str], *, allow_dirs: Sequence[str | os.PathLike[str]] = ()
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self.name: str = self.path.name
        self.locate, manifest = open_dataset(self.path, allow_dirs)
        self.manifest = manifest
        self._allow_dirs = tuple(map(os.path.abspath, allow_dirs))  # to open it again from elsewhere
        self.part: Part | None = manifest.part
        self.topology_crc = manifest.topology_crc
        self._nodes = {n.type: n for n in manifest.nodes}
        self._relations = {r.type: r for r in manifest.relations}
        tables = [self._table(entry) for entry in manifest.tables]
        self.tables: Mapping[str, Table] = MappingProxyType({t.name: t for t in tables})
        # Names and checksums. Copies may have other paths and shards.
        edges = [(str(r.type), role, a.crc32c) for r in manifest.relations for role, a in r.arrays.items()]
        nodes = [(n.type, role, a.crc32c) for n in manifest.nodes for role, a in n.arrays.items()]
        self.owners_crc = zlib.crc32(str(sorted(array for array in nodes if array[1] == OWNER)).encode())
        rows = [(t.name, t.kind, t.content_crc) for t in tables]
        self.content_crc = zlib.crc32(str(sorted(edges + nodes + rows)).encode())
        self.labels: Mapping[str, torch.Tensor] = _Loaded(
            f"{self.name} has no labels",
            {n.type: n.arrays["label"].describe() for n in manifest.nodes if "label" in n.arrays},
            lambda ntype: self._load(self._nodes[ntype].arrays["label"]),
        )
        self.splits: Mapping[str, dict[str, torch.Tensor]] = _Loaded(
            f"{self.name} has no splits",
            {ntype: _described(arrays) for ntype in self._nodes if (arrays := self._split_entries(ntype))},
            lambda ntype: {s: self._load(a) for s, a in self._split_entries(ntype).items()},
        )

    def __reduce__(self) -> tuple[Callable[..., FeatureStore], tuple[object, ...]]:
        return _opened_again, (os.fspath(self.path), self._allow_dirs, self.locate.contents)

    def __repr__(self) -> str:
        return f"FeatureStore({os.fspath(self.path)!r}, tables={list(self.tables)})"

    def close(self) -> None:
        """Close the dataset's directory. Idempotent. Tables that are in use stay readable.

        Garbage collection also closes a store.
        """
        self.locate.close()

    @property
    def node_types(self) -> list[str]:
        return list(self._nodes)

    @property
    def relations(self) -> list[Relation]:
        return list(self._relations)

    def table(self, name: str | None = None) -> Table:
        """The table with this name, or with this key if only one table has it; None: the only table of nodes.

        Raises MissingError.
        """
        if name is None:
            return self._only({n: t for n, t in self.tables.items() if t.kind == "node"}, "node table")
        if name in self.tables:
            return self.tables[name]
        matches = [t for t in self.tables.values() if t.key == name]
        if len(matches) == 1:
            return matches[0]
        names = ", ".join(repr(t.name) for t in matches or self.tables.values())
        if matches:
            raise MissingError(f"{len(matches)} tables of {self.name} have key {name!r}: say which ({names})")
        raise MissingError(f"no table {name!r} in {self.name} (has {names or 'none'})")

    def find_table(self, kind: str, type_: str | Relation, key: str) -> Table | None:
        """The table of a kind ("node" or "edge"), type (node type or (src, rel, dst)) and key, or None."""
        wanted = (kind, type_, key)
        return next((t for t in self.tables.values() if (t.kind, t.type, t.key) == wanted), None)

    def read_rows(
        self, ids: torch.Tensor | np.ndarray | Sequence[int], table: str | None = None
    ) -> torch.Tensor:
        """Call `Table.read_rows` of this table, or of the only table."""
        return (self.table(table) if table is not None else self._only(self.tables, "table")).read_rows(ids)

    def owners(self, ntype: str | None = None) -> np.ndarray | None:
        """The part that owns each node of a type, or of the only type; None: this is no part.

        uint8[num_nodes] (uint16 for more than 256 parts), a read-only memory map. An edge is held by the
        owner of its destination.
        """
        return self._map_if_stored(ntype, OWNER)

    def num_nodes(self, ntype: str | None = None) -> int:
        """The number of nodes of a type, or of the only type; in a part, of the whole dataset."""
        return self._nodes_entry(ntype).count

    def num_edges(self, relation: Relation | None = None) -> int:
        """The number of edges of a relation, or of the only relation; in a part, of the whole dataset."""
        return self._relation_entry(relation).count

    def graph(self, relation: Relation | None = None) -> Graph:
        """The memory-mapped topology of a relation, or of the only relation. Raises MissingError.

        A part has the in-edges of the nodes that it owns; edge_ids are those of the whole dataset.
        """
        entry = self._relation_entry(relation)
        if not entry.arrays:
            raise MissingError(
                f"relation {describe_type(entry.type)} in {self.name} has edge features but no topology"
            )
        arrays = {role: self.locate.map(array) for role, array in entry.arrays.items()}
        return Graph(
            relation=entry.type,
            num_src=self.num_nodes(entry.type[0]),
            num_dst=self.num_nodes(entry.type[2]),
            indptr=arrays["indptr"],
            indices=arrays["indices"],
            edge_ids=arrays.get("edge_ids"),
            edge_times=arrays.get("time"),
            src_times=self.node_times(entry.type[0]),
            dst_times=self.node_times(entry.type[2]),
            sorted_by=entry.sorted_by,
        )

    def node_times(self, ntype: str | None = None) -> np.ndarray | None:
        """The times of the nodes of a type, int32 or int64[num_nodes], memory-mapped; None: it has none.

        Those of edges are graph().edge_times, in the order of graph().indices.
        """
        return self._map_if_stored(ntype, "time")

    def ids(self, ntype: str | None = None) -> NodeIds:
        """The ids that the source of the dataset gave the nodes of a type, or of the only type.

        ids[7] is the id of node 7: a str if ids are text, else an int. ids[5:9], and ids[nodes] for an array
        or tensor of nodes, is a list of str, or int64[n]; only these ids are read. ids.find(["a", "b"]) is
        the nodes of ids. Nodes without ids of their own have their numbers as ids. A part has all ids.
        """
        numbering = self.numbering(self._nodes_entry(ntype).type)
        assert numbering is not None
        return numbering.ids

    def numbering(self, type_: str | Relation) -> Numbering | None:
        """What the numbers of the nodes of a type, or of the edges of a relation, are; None: it has none."""
        if isinstance(type_, str):
            if (nodes := self._nodes.get(type_)) is None:
                return None
            stored = {role: nodes.arrays[role] for role in ID_ROLES if role in nodes.arrays}
            maps = {role: partial(self.locate.map, entry) for role, entry in stored.items()}
            contents = tuple(entry.crc32c for entry in stored.values())
            ids = partial(NodeIds, type_, nodes.count, maps)
            return Numbering(self.name, type_, nodes.count, contents, open_ids=ids)
        if (relation := self._relations.get(type_)) is None:
            return None
        crcs = {role: entry.crc32c for role, entry in relation.arrays.items()}
        has_ids = "edge_ids" in crcs and self.part is None  # a part has them even if they are positions
        topology = (crcs["indptr"], crcs["indices"], crcs["edge_ids"] if has_ids else None) if crcs else ()
        ends = tuple(n for end in type_[::2] if (n := self.numbering(end)) is not None)
        return Numbering(self.name, type_, relation.count, topology, ends)

    def split(self, name: str, ntype: str | None = None) -> torch.Tensor:
        """The int64 ids of a split ("train", "val" or "test"), on the CPU.

        ntype: optional if exactly one node type has this split. Raises MissingError, a KeyError,
        that lists the splits of the dataset.
        """
        of_type = self.split_type(name, ntype)
        return self.splits[of_type][name]

    def split_type(self, name: str, ntype: str | None = None) -> str:
        """The node type that has this split, or the given one of those that have it. Raises as split()."""
        ntypes = [t for t in self.splits if name in self._split_entries(t) and ntype in (None, t)]
        if len(ntypes) == 1:
            return ntypes[0]
        if ntypes:
            types = ", ".join(map(repr, ntypes))
            raise MissingError(
                f"{len(ntypes)} node types of {self.name} have a split {name!r}: say which ({types})"
            )
        if ntype is not None:
            self._nodes_entry(ntype)
        listed = [f"{s!r} of {t!r}" for t in self.splits for s in self._split_entries(t)]
        of_type = f" of {ntype!r} nodes" if ntype is not None else ""
        raise MissingError(f"no split {name!r}{of_type} in {self.name} (has {', '.join(listed) or 'none'})")

    def out_degrees(self, ntype: str | None = None) -> np.ndarray | None:
        """The number of out-edges of each node in all relations, at most 2^32 - 1.

        uint32[num_nodes], a read-only memory map; None if no graph of the dataset has this source type.
        """
        return self.heat("out-degree", ntype) if "out-degree" in self.heat_methods(ntype) else None

    def heat_methods(self, ntype: str | None = None) -> list[str]:
        """The methods whose heat is stored for a node type, the best first.

        Conversion stores "out-degree"; `gids heat` stores "reverse-pagerank" and "sampled".
        """
        arrays = self._nodes_entry(ntype).arrays
        return [method for method, role in HEAT_ROLES.items() if role in arrays]

    def heat(self, method: str, ntype: str | None = None) -> np.ndarray:
        """The expected heat of each node; its unit depends on the method.

        Returns float32[num_nodes] (uint32 for "out-degree"), a read-only memory map. Raises MissingError if
        no heat of this method is stored.
        """
        nodes = self._nodes_entry(ntype)
        entry = nodes.arrays.get(HEAT_ROLES.get(method, ""))
        if entry is None:
            stored = ", ".join(map(repr, self.heat_methods(nodes.type))) or "none"
            computed = method in HEAT_ROLES and method != "out-degree"
            cure = f": compute it with `gids heat {self.path} --method {method}`" if computed else ""
            raise MissingError(
                f"no heat {method!r} of {nodes.type!r} nodes in {self.name} (has {stored}){cure}"
            )
        return self.locate.map(entry)

    def _table(self, entry: TableEntry) -> Table:
        part, type_ = self.part, entry.type
        numbering = self.numbering(type_)
        if part is None:
            return Table(entry, self.locate, self.name, numbering=numbering)
        of_nodes = isinstance(type_, str)
        described = self._nodes[type_] if isinstance(type_, str) else self._relations[type_]
        array = described.arrays[OWNER if of_nodes else "edge_ids"]
        read = partial(self.locate.map, array)
        held = partial(Held, entry.name, part, described.count, read, of_nodes=of_nodes)
        options = {"numbering": numbering, "id_count": described.count, "find_held": held}
        return Table(entry, self.locate, self.name, **options)  # type: ignore[arg-type]

    def _map_if_stored(self, ntype: str | None, role: str) -> np.ndarray | None:
        entry = self._nodes_entry(ntype).arrays.get(role)
        return None if entry is None else self.locate.map(entry)

    def _nodes_entry(self, ntype: str | None) -> NodesEntry:
        return self._entry(self._nodes, ntype, "node type")

    def _relation_entry(self, relation: Relation | None) -> RelationEntry:
        return self._entry(self._relations, relation, "relation")

    def _entry(self, items: Mapping[K, T], key: K | None, what: str) -> T:
        """The item with this key; None: the only one."""
        if key is None:
            return self._only(items, what)
        if key not in items:
            raise MissingError(f"no {what} {key!r} in {self.name} (has {', '.join(map(repr, items))})")
        return items[key]

    def _only(self, items: Mapping[K, T], what: str) -> T:
        if not items:
            raise MissingError(f"{self.name} has no {what}")
        if len(items) > 1:
            raise MissingError(
                f"{self.name} has {len(items)} {what}s ({', '.join(map(repr, items))}): say which"
            )
        return next(iter(items.values()))

    def _load(self, entry: ArrayEntry) -> torch.Tensor:
        return torch.from_numpy(load_array(self.locate.array(entry), entry))

    def _split_entries(self, ntype: str) -> dict[str, ArrayEntry]:
        arrays = self._nodes[ntype].arrays
        return {s: arrays[f"{s}_idx"] for s in SPLITS if f"{s}_idx" in arrays}


def _described(arrays: Mapping[str, ArrayEntry]) -> str:
    return "{" + ", ".join(f"{name!r}: {array.describe()}" for name, array in arrays.items()) + "}"


class _Loaded(Mapping[str, T]):
    """Values that are read from files when first used, and kept.

    missing: the beginning of the error for a node type without a value. described: of each type, for repr.
    """

    def __init__(self, missing: str, described: Mapping[str, str], load: Callable[[str], T]) -> None:
        self._missing, self._described, self._load = missing, described, load
        self._values: dict[str, T] = {}

    def __getitem__(self, key: str) -> T:
        if key not in self._described:
            known = f" (only for {', '.join(map(repr, self._described))})" if self._described else ""
            raise MissingError(f"{self._missing} for node type {key!r}{known}")
        if key not in self._values:
            self._values[key] = self._load(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{key!r}: {text}" for key, text in self._described.items()) + "}"


def open_store(store: FeatureStore | str | os.PathLike[str], closing: ExitStack) -> FeatureStore:
    """Return the store, or open the one at a path, which `closing` then closes. Raises as FeatureStore."""
    if isinstance(store, FeatureStore):
        return store
    opened = FeatureStore(store)
    closing.callback(opened.close)
    return opened


def _opened_again(path: str, allow_dirs: tuple[str, ...], contents: Mapping[str, int]) -> FeatureStore:
    """A pickled store's copy."""
    store = FeatureStore(path, allow_dirs=allow_dirs)
    if store.locate.contents != contents:
        raise StorageError(errno.ESTALE, "the dataset is not the one that was pickled: open it again", path)
    return store


def graphs_of(store: FeatureStore) -> list[Graph]:
    """The graphs of all relations with a topology. Raises FormatError if there are none."""
    graphs = []
    for relation in store.relations:
        try:
            graphs.append(store.graph(relation))
        except MissingError:  # a relation with edge features only
            continue
    if not graphs:
        raise FormatError(f"{store.name} has no topology: convert the edges too")
    return graphs
