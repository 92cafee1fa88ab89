"""Source: what a reader found in a format, as rows that are read a range at a time. Used by run.py.

Reader: one input format of `gids convert`. Each file of readers/ defines one or a few. A reader looks at
names, headers and sizes. It returns a Source whose arrays are read later, block by block.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

import numpy as np
import torch

from gids.convert.options import option_name
from gids.convert.source_files import shown
from gids.convert.stream_rows import PackedRows
from gids.errors import FormatError
from gids.store.dtypes import is_whole
from gids.store.geometry import MAX_ROWS
from gids.store.names import Relation, check_name, describe_type, table_name
from gids.store.rows import FileRows, Rows, TensorRows, read_range
from gids.write.edges import EdgeSource
from gids.write.workplace import is_dataset, is_shard_folder, is_workplace

K = TypeVar("K", str, Relation)
V = TypeVar("V")

LABELS = ("label", "labels", "y")
MASKS = {"train_mask": "train", "val_mask": "val", "valid_mask": "val", "test_mask": "test"}
IDS = {"train_idx": "train", "val_idx": "val", "valid_idx": "val", "test_idx": "test"}
FEATURES = ("feat", "feats", "feature", "features", "x")
_EDGES = ("edge_index", "indptr", "indices", "edge_ids", "adj", "adj_t", "edge_attr", "edge_weight")
NAMED = {*FEATURES, *LABELS, *MASKS, *IDS, *_EDGES, "num_nodes"}
"""Names of what training needs, whatever it is."""


@dataclass(frozen=True)
class StoredTable:
    """How a gids dataset stores a table that is read from it.

    scale: of int8, None without. order: the position of each row on disk; None: its id.
    """

    dtype: torch.dtype
    scale: str | None
    row_bytes: int
    page_bytes: int
    order: np.ndarray | None


@dataclass(frozen=True)
class TableSource:
    """One table. type: the node type, or (src, rel, dst) for features of edges. stored: in a gids dataset.
    columns: the names of the values of a row, if it is made of columns."""

    type: str | Relation
    key: str
    rows: Rows
    stored: StoredTable | None = None
    columns: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "node" if isinstance(self.type, str) else "edge"

    @property
    def name(self) -> str:
        return table_name(self.type, self.key)


@dataclass(frozen=True)
class InEdges:
    """A graph that is already sorted by destination (CSC)."""

    indptr: Rows
    indices: Rows
    edge_ids: Rows | None


@dataclass(frozen=True)
class Mask:
    """A split as a mask, not read yet. what: its name in messages."""

    rows: Rows
    what: str


@dataclass
class StoredGraph:
    """How a gids dataset stores what is not in its tables. index_dtypes: of the topology of each relation.
    unsorted: relations whose edges are not sorted by the times of their sources. heat: by node type and
    method.
    """

    index_dtypes: dict[Relation, str] = field(default_factory=dict)
    unsorted: set[Relation] = field(default_factory=set)
    heat: dict[str, dict[str, Rows]] = field(default_factory=dict)


@dataclass
class Source:
    """Everything that a dataset is made from.

    nodes: number of nodes per type, as far as known. splits: node type -> "train", "val" or "test" -> node
    ids; masks: the same as masks, which masks_to_splits turns into splits. node_times, edge_times: int[n] by
    node type and relation, edges in the order of their ids. ids: the arrays of ids of nodes, by node type and
    role. notes: sentences about what was found; warnings: sentences that --quiet prints too, such as about
    what was left out. lost: name -> what cannot be converted, see leave_out. skip: names of arrays to leave
    out; skipped: those that were found. used: the files that were read. stored: of a gids dataset; a
    conversion keeps what no option changes.
    """

    nodes: dict[str, int] = field(default_factory=dict)
    tables: list[TableSource] = field(default_factory=list)
    graphs: dict[Relation, InEdges | EdgeSource] = field(default_factory=dict)
    labels: dict[str, Rows] = field(default_factory=dict)
    splits: dict[str, dict[str, Rows]] = field(default_factory=dict)
    masks: dict[str, dict[str, Mask]] = field(default_factory=dict)
    node_times: dict[str, Rows] = field(default_factory=dict)
    edge_times: dict[Relation, Rows] = field(default_factory=dict)
    ids: dict[str, dict[str, Rows]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    skipped: set[str] = field(default_factory=set)
    used: set[Path] = field(default_factory=set)
    stored: StoredGraph | None = None
    _counted_by: dict[str, str] = field(default_factory=dict)

    def uses(self, file: Path) -> Path:
        """Remember that a file is read. Returns it."""
        self.used.add(file)
        return file

    def leave_out(self, what: str, why: str, skip: str = "") -> None:
        """Leave a part of the source out of the dataset, with a warning.

        skip: the part's name for --skip, if it may be data of nodes or edges: open_source then raises an
        error that lists all such parts.
        """
        if skip:
            self.lost[skip] = f"{what}: {why}"
        else:
            self.warnings.append(f"left out {what}: {why}")

    def skips(self, name: str) -> bool:
        """Whether the user wants this array left out. Remembers that it was found."""
        if name in self.skip:
            self.skipped.add(name)
        return name in self.skip

    def skips_file(self, file: Path) -> bool:
        """Whether the user wants a file left out, or its directory. file: relative to the source."""
        return any(map(self.skips, map(str, (file, *file.parents))))

    def add_nodes(self, ntype: str, count: object, what: str, skip: str = "") -> None:
        """Set the number of nodes of a type, which `what` gives. skip: the array to leave out if it is wrong.

        Raises FormatError if another array gave another number, and for an invalid name or number.
        """
        check_name(ntype, f"the node type of {what}")
        number = whole_number(count, what)
        known = self.nodes.setdefault(ntype, number)
        first = self._counted_by.setdefault(ntype, what)
        if known != number:
            cure = f"; leave it out with --skip {skip}" if skip else ""
            if f"{skip}_idx" in IDS:
                cure = f"; call it {skip}_idx if these are the ids of a split, or else --skip {skip}"
            raise FormatError(
                f"{what} gives {number} {ntype!r} nodes, but there are {known} (from {first}){cure}"
            )

    def add_node_table(self, ntype: str, key: str, rows: Rows, what: str, skip: str = "") -> None:
        """Add a table with a row per node. what, skip: as for add_nodes."""
        self.add_nodes(ntype, row_count(rows, what), what, skip)
        self.tables.append(TableSource(ntype, key, rows))

    def add_labels(self, ntype: str, rows: Rows, what: str, skip: str = "") -> None:
        """Set the labels of all nodes of a type. what, skip: as for add_nodes."""
        self.add_nodes(ntype, row_count(rows, what), what, skip)
        self.labels[ntype] = rows

    def add_edge_table(self, relation: Relation, key: str, rows: Rows) -> None:
        self.tables.append(TableSource(relation, key, rows))

    def add_split(self, ntype: str, split: str, ids: Rows) -> None:
        self.splits.setdefault(ntype, {})[split] = ids

    def add_node_array(
        self, ntype: str, name: str, rows: Rows, what: str, skip: str = "", *, may_be_ids: bool = False
    ) -> None:
        """Add an array of nodes whose name gives the meaning. what, skip: as for add_nodes.

        may_be_ids: train_idx and so on are the ids of a split. Raises FormatError for a second split.
        """
        if may_be_ids and (split := IDS.get(name)):
            if rows.dtype == torch.bool:
                raise FormatError(f"{what} is a mask: rename it to {name.removesuffix('_idx')}_mask")
            if split in self.splits.get(ntype, {}):
                raise FormatError(f"{what} is a second {split} split of {ntype!r} nodes: keep one")
            self.add_split(ntype, split, rows)
        elif name in LABELS and ntype not in self.labels:
            self.add_labels(ntype, rows, what, skip)
        elif split := MASKS.get(name):
            self.add_nodes(ntype, row_count(rows, what), what, skip)
            masks = self.masks.setdefault(ntype, {})
            if split in masks:
                raise FormatError(f"{masks[split].what} and {what} are both the {split} mask: keep one")
            masks[split] = Mask(rows, what)
        else:
            self.add_node_table(ntype, name, rows, what, skip)

    def node_count(self, ntype: str) -> int:
        if ntype not in self.nodes:
            unknown = f"the number of {ntype!r} nodes is unknown: add their features, labels or num_nodes.npy"
            raise FormatError("; ".join([unknown, *self.warnings, *self.lost.values()]))
        return self.nodes[ntype]

    def times_of(self, relation: Relation) -> Rows | Literal["nodes"] | None:
        """The times that sort the edges of a relation: their own, in the order of ids; "nodes": those of
        their sources; None: they are not sorted by time."""
        if relation in self.edge_times:
            return self.edge_times[relation]
        is_sorted = self.stored is None or relation not in self.stored.unsorted
        return "nodes" if relation[0] in self.node_times and is_sorted else None

    def ends(self, relation: Relation) -> dict[str, int]:
        """num_src and num_dst of a relation, as the functions that make edges take them."""
        return {"num_src": self.node_count(relation[0]), "num_dst": self.node_count(relation[2])}


def check_source(source: Source) -> None:
    """Raise FormatError for names, shapes and numbers of tables that a dataset cannot have."""
    for type_ in [*source.graphs, *(table.type for table in source.tables)]:
        for part in (type_,) if isinstance(type_, str) else type_:
            check_name(part, "a node type or relation")
    for relation, topology in source.graphs.items():
        for what, rows in vars(topology).items() if isinstance(topology, InEdges) else ():
            name = f"{what} of {describe_type(relation)}"
            if rows is not None and len(rows.shape) != 1:
                raise FormatError(f"{name} has shape {rows.shape}; it must have one dimension")
            if what == "indptr" and not rows.shape[0]:
                raise FormatError(f"{name} is empty; it must begin with 0")
    names = set()
    for table in source.tables:
        check_name(table.key, "the name of a table")
        row_count(table.rows, f"table {table.name!r}")
        if table.name in names:
            cure = f"rename one, or leave it out with --skip {table.key}"
            raise FormatError(f"the source has two tables {table.name!r}: {cure}")
        names.add(table.name)


def whole_number(value: object, what: str) -> int:
    """A number of nodes or edges, from an int or an array with one integer.

    Raises FormatError unless it is a whole number from 0 to MAX_ROWS.
    """
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ROWS:
        raise FormatError(f"{what} is {shown(value)}; it must be a whole number from 0 to {MAX_ROWS}")
    return value


def numbers(rows: Rows, count: int, what: str) -> list[int]:
    """The whole numbers of an array, which must have `count` entries. Raises FormatError."""
    if math.prod(rows.shape) != count or not is_whole(rows.dtype):
        raise FormatError(f"{what} is {described(rows)}; it must be {count} whole number{'s' * (count > 1)}")
    if isinstance(rows, TensorRows):
        values = rows.values
    else:
        flat = rows.reshaped((count,)) if isinstance(rows, (FileRows, PackedRows)) else rows
        values = read_range(flat, 0, flat.shape[0])
    return [whole_number(value, what) for value in values.reshape(-1).tolist()]


def described(rows: Rows) -> str:
    """The type and shape of an array, for messages."""
    return f"{str(rows.dtype).removeprefix('torch.')}{list(rows.shape)}"


def row_count(rows: Rows, what: str) -> int:
    """Number of rows of an array. Raises FormatError for a single number."""
    if not rows.shape:
        raise FormatError(f"{what} is a single number; its first dimension must be rows")
    return rows.shape[0]


def split_relation(text: str, separator: str, what: object) -> Relation:
    """SOURCE.RELATION.DESTINATION, with another separator perhaps. Raises FormatError. what: names it."""
    parts = text.split(separator)
    if len(parts) != 3 or not all(parts):
        form = separator.join(("SOURCE", "RELATION", "DESTINATION"))
        raise FormatError(f"{what}: the name of a relation must be {form}")
    return parts[0], parts[1], parts[2]


def dotted_relation(name: str, what: object) -> Relation:
    """The relation of a file name SOURCE.RELATION.DESTINATION, in which %2E stands for a dot."""
    src, relation, dst = split_relation(name, ".", what)
    return unquote(src), unquote(relation), unquote(dst)


def once_each(named: Iterable[tuple[K, V]]) -> dict[K, V]:
    """What belongs to each type or relation. Raises FormatError if two have the same name, once decoded."""
    result: dict[K, V] = {}
    for name, value in named:
        if result.setdefault(name, value) is not value:
            raise FormatError(f"two files or directories are of {describe_type(name)}: rename one")
    return result


def folders_in(path: Path) -> list[Path]:
    """The directories in a directory, sorted; none if it is none."""
    return sorted(p for p in path.iterdir() if p.is_dir()) if path.is_dir() else []


def source_files(path: Path) -> list[Path]:
    """The files of a source, also links to missing ones, sorted. Follows links, to each directory once.

    Leaves out what gids writes into a source's directory: datasets, finished or not, and their shards.
    """
    if not path.is_dir():
        return [path]
    files, walked = [], set()
    for folder, subfolders, names in os.walk(path, onerror=_unreadable, followlinks=True):
        subfolders[:] = [name for name in subfolders if not _is_written(Path(folder, name))]
        if (real := os.path.realpath(folder)) in walked:
            subfolders.clear()
            continue
        walked.add(real)
        paths = [Path(folder, name) for name in names]
        files += [file for file in paths if file.is_file() or not file.exists()]
    return sorted(files)


def _unreadable(error: OSError) -> None:
    if Path(error.filename).name != "lost+found":
        raise error


def _is_written(folder: Path) -> bool:
    try:
        return is_workplace(folder) or is_shard_folder(folder) or is_dataset(folder)
    except PermissionError:  # such as of lost+found: the reader, too, may not read it
        return False


@dataclass(frozen=True)
class Choices:
    """The user's options for a reader.

    table: KEY or TYPE.KEY of a single array. dtype, shape: of raw binary. labels: name of the label array, if
    there are several. num_nodes: number of nodes of an edge list. skip: names of arrays to leave out.
    allow_dirs: directories outside a gids dataset that may contain its shards. others: further files of
    tables, beside the path. id_column, src_column, dst_column: node type or relation ("" for all others) ->
    column. drop_unknown: leave out edges whose ends no node has as its id. separate: columns of numbers that
    are tables of their own.
    """

    table: str = "feat"
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    labels: str | None = None
    num_nodes: int | None = None
    skip: tuple[str, ...] = ()
    allow_dirs: tuple[str, ...] = ()
    others: tuple[Path, ...] = ()
    id_column: Mapping[str, str] = field(default_factory=dict)
    src_column: Mapping[str, str] = field(default_factory=dict)
    dst_column: Mapping[str, str] = field(default_factory=dict)
    drop_unknown: bool = False
    separate: tuple[str, ...] = ()

    def key(self) -> dict[str, Any]:
        """The options that a resumed conversion must have in common with the first run."""
        return {option_name(f.name): getattr(self, f.name) for f in fields(self) if f.name not in _FREE}

    def changed(self) -> list[str]:
        """The options that are not as by default, except --dtype, which also applies to tables."""
        default = Choices()
        names = [f.name for f in fields(self) if f.name != "dtype"]
        return [option_name(name) for name in names if getattr(self, name) != getattr(default, name)]


_FREE = ("allow_dirs", "others")


@dataclass(frozen=True)
class Reader:
    """A format.

    name: for --from. summary: one line. layout: the files that it reads, and their use. recognises:
    whether an existing path is certainly of this format. read(path, scratch, choices): the Source; keep the
    directory scratch as long as it is used. Raises FormatError. takes: the options that apply, as in
    Choices.changed. files: those that the source consists of. aside: patterns of files that may be in its
    directory and are not read.
    """

    name: str
    summary: str
    layout: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path, Path, Choices], Source]
    takes: tuple[str, ...] = ()
    files: Callable[[Path], list[Path]] = source_files
    aside: tuple[str, ...] = ()
