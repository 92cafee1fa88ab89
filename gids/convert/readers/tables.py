"""Reads tables of nodes and of edges in Parquet, Arrow and CSV files. Column names give the meaning. Needs
pyarrow.

Nodes may have ids, text or whole numbers, in a column of their table; the edges then name nodes by them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import torch

from gids.convert.arrow_table import ArrowTable, is_arrow
from gids.convert.edges import count_by_edges, end_columns, is_end
from gids.convert.node_ids import NodesById, are_positions
from gids.convert.readers.arrays import ArraysByType, directory_arrays
from gids.convert.source import (
    LABELS,
    MASKS,
    Choices,
    Reader,
    Source,
    dotted_relation,
    once_each,
)
from gids.convert.source_files import shown
from gids.convert.stream_rows import BLOCK_BYTES
from gids.convert.table_files import Tables, check_order, file_stem, table_files, tables_in
from gids.convert.text_table import TextTable, is_csv, table_layout
from gids.errors import FormatError
from gids.store.dtypes import is_whole
from gids.store.names import NODE, RELATION, Relation, describe_type
from gids.store.rows import FileRows, GeneratedRows, Rows, read_range
from gids.write.edges import edge_list

_NUMBERED = re.compile(r"(.+)_\d+")  # x_0, x_1, …: columns of one table
_IDS = ("id", "node_id", "nid")
_BLOCK_ROWS = 1 << 20
_MOST_NAMES = 8  # of columns in a warning
_CURES = {
    **dict.fromkeys(LABELS, "give labels as whole numbers, -1 for none"),
    **dict.fromkeys(
        (*MASKS, "split"), "give columns train_mask, val_mask and test_mask of 1 and 0, or of True and False"
    ),
}

# Files


def _separate(paths: Sequence[Path], choices: Choices) -> tuple[Tables, Tables]:
    """The tables of nodes and of edges among those given one by one: their columns, or else names, tell."""
    nodes: Tables = {}
    edges: Tables = {}
    chooses_ends = bool(choices.src_column or choices.dst_column)
    for path in paths:
        files, name = table_files(path), file_stem(path)
        if not files:
            raise FormatError(f"{path} is no table: give .parquet, .pq, .arrow, .feather, .csv or .tsv files")
        if len(paths) == 1 and (choices.id_column or chooses_ends):
            are_edges = chooses_ends
        elif name in ("nodes", "edges") or (len(paths) > 1 and name.count(".") == 2):
            are_edges = name != "nodes"
        else:
            are_edges = _has_ends(files, choices)
        known = edges if are_edges else nodes
        if name in known:
            raise FormatError(f"{known[name][0]} and {path} are both the table {name!r}: rename one")
        known[name] = files
    if len(nodes) > 1 or len(edges) > 1 or (len(paths) > 1 and any(name.count(".") == 2 for name in edges)):
        return nodes, edges
    alone = ".".join(RELATION)
    return dict(zip([NODE], nodes.values(), strict=False)), dict(zip([alone], edges.values(), strict=False))


def _has_ends(files: Sequence[Path], choices: Choices) -> bool:
    try:
        _ends(RELATION, _names(files), choices)
    except FormatError:
        return False
    return True


def is_node_csv(path: Path) -> bool:
    """Whether a file is a CSV table of nodes: it is called so, or has ids of nodes and no end of edges."""
    if not is_csv(path) or file_stem(path) == "edges":
        return False
    if file_stem(path) == "nodes":
        return True
    try:
        names = table_layout(path).names
    except FormatError:
        return False
    return any(name.casefold() in _IDS for name in names) and not any(map(is_end, names))


def is_table(path: Path) -> bool:
    """Whether a path is a file of a table."""
    return is_csv(path) or is_arrow(path)


def _recognises(path: Path, *, as_csv: bool) -> bool:
    if path.is_file():
        return is_node_csv(path) if as_csv else is_arrow(path)
    nodes, edges = tables_in(path)
    files = _all_files(nodes, edges)
    is_edge_list = not nodes and any(is_csv(file) and file.parent == path for file in files)
    return bool(files) and not is_edge_list and any(map(is_csv, files)) == as_csv


def _all_files(*tables: Tables) -> list[Path]:
    return [file for by_name in tables for files in by_name.values() for file in files]


# Columns


def _names(files: Sequence[Path]) -> list[str]:
    if is_csv(files[0]):
        return table_layout(files[0]).names
    return list(ArrowTable(files[:1]).types)


def _series(column: str) -> str:
    """The table of a column: x of x_0, x_1, …."""
    numbered = _NUMBERED.fullmatch(column)
    return numbered[1] if numbered else column


def _open(files: Sequence[Path], texts: Collection[str], scratch: Path) -> ArrowTable:
    """The columns of a table. texts: columns of a CSV file that are kept as text."""
    if len({is_csv(file) for file in files}) > 1:
        raise FormatError(
            f"{files[0].parent} has CSV and other files: the parts of a table must be of one kind"
        )
    if is_csv(files[0]):
        return TextTable(files, [table_layout(f) for f in files], scratch, texts=texts, group=_series)
    return ArrowTable(files)


def _check(choices: Choices, ntypes: Collection[str], relations: Collection[Relation]) -> None:
    """Raise FormatError if an option names a node type or relation that the source does not have."""
    known_relations = [".".join(relation) for relation in relations]
    for option, columns, known in (
        ("--id-column", choices.id_column, list(ntypes)),
        ("--src-column", choices.src_column, known_relations),
        ("--dst-column", choices.dst_column, known_relations),
    ):
        if unknown := [name for name in columns if name and name not in known]:
            raise FormatError(
                f"{option} {unknown[0]}={columns[unknown[0]]}: there is no {shown(unknown[0])}, only "
                f"{_listed(known) or 'none'}"
            )


def _id_column(ntype: str, names: Sequence[str], choices: Choices) -> str | None:
    """The column of ids of a table of nodes; None: it has none. Raises FormatError if there are several."""
    chosen = choices.id_column.get(ntype, choices.id_column.get(""))
    if chosen is not None and chosen not in names:
        raise FormatError(
            f"--id-column: {ntype!r} nodes have no column {shown(chosen)}; they have {_listed(names)}"
        )
    ids = [name for name in names if (name.casefold() in _IDS if chosen is None else name == chosen)]
    if len(ids) > 1:
        raise FormatError(
            f"the table of {ntype!r} nodes has the columns {' and '.join(ids)}: choose the ids with "
            f"--id-column {ids[0]}"
        )
    return ids[0] if ids else None


def _ends(relation: Relation, names: Sequence[str], choices: Choices) -> tuple[str, str]:
    """The columns of sources and of destinations. Raises FormatError."""
    name = ".".join(relation)
    chosen = [columns.get(name, columns.get("")) for columns in (choices.src_column, choices.dst_column)]
    try:
        src, dst = end_columns(names, f"edges {describe_type(relation)}", chosen)
    except FormatError as error:
        raise FormatError(f"{error}; or choose columns with --src-column and --dst-column") from None
    return names[src], names[dst]


def _listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(map(shown, names[:most])) + ", …" * (len(names) > most)


# Reading


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    source, arrays = Source(skip=choices.skip), ArraysByType({}, {})
    if path.is_dir() and not choices.others:
        nodes, edges = tables_in(path)
        has_types = bool({*nodes, *edges} - {NODE, ".".join(RELATION)})
        arrays = directory_arrays(path, scratch, source, has_types=has_types or None)
        ntypes = {*nodes, *arrays.nodes}
        if ntypes and NODE not in ntypes and [*edges] == [".".join(RELATION)]:
            raise FormatError(
                f"{edges['.'.join(RELATION)][0]} does not say which types of nodes its edges join: call the "
                "table edges/SOURCE.RELATION.DESTINATION, or put the only table of nodes into nodes"
            )
    else:
        nodes, edges = _separate([path, *choices.others], choices)
        if edges and not choices.others:
            source.notes.append(
                f"{path.name} is an edge list, because it has columns of sources and destinations; to make "
                f"tables of nodes of them, call it nodes{path.suffix}"
            )
    by_type = once_each((unquote(name), files) for name, files in nodes.items())
    by_relation = once_each((dotted_relation(name, files[0]), files) for name, files in edges.items())
    _check(choices, by_type, by_relation)
    source.used.update(_all_files(nodes, edges))
    reading = _Reading(source, choices, scratch, arrays)
    for ntype, files in by_type.items():
        reading.add_nodes(ntype, files)
    arrays.read_nodes()
    if choices.num_nodes is not None:
        source.add_nodes(NODE, choices.num_nodes, "--num-nodes")
    opened = {relation: reading.open_edges(relation, files) for relation, files in by_relation.items()}
    count_by_edges(
        source,
        (
            (ntype, table.rows([end]))
            for relation, (table, ends) in opened.items()
            for ntype, end in zip(relation[::2], ends, strict=True)
            if ntype not in source.nodes
        ),
    )
    for relation, (table, ends) in opened.items():
        reading.add_edges(relation, table, ends)
    arrays.read_edges()
    return source


class _Reading:
    """The tables that are read to a source, and the ids of its nodes."""

    def __init__(self, source: Source, choices: Choices, scratch: Path, arrays: ArraysByType) -> None:
        self._source, self._choices, self._scratch, self._arrays = source, choices, scratch, arrays
        self._ids: dict[str, NodesById | None] = {}  # None: the ids are 0, 1, 2, …
        self._numbered = 0

    def _place(self) -> Path:
        """A new path in scratch."""
        self._numbered += 1
        return self._scratch / f"table-{self._numbered}"

    def add_nodes(self, ntype: str, files: Sequence[Path]) -> None:
        source, column = self._source, _id_column(ntype, _names(files), self._choices)
        texts = [] if column is None else [column]
        if column is None:
            check_order(files)
        table = _open(files, texts, self._scratch)
        source.add_nodes(ntype, table.row_count, f"the table of {ntype!r}")
        if column is not None:
            self._ids[ntype] = None
            if not are_positions(table, column):
                if ntype in self._arrays.nodes or any(ntype in r[::2] for r in self._arrays.edges):
                    raise FormatError(
                        f"column {column!r} of {files[0]} has ids other than 0, 1, 2, …, by which the arrays "
                        "beside it number nodes: put the arrays into the tables, or number the nodes so"
                    )
                nodes = NodesById(ntype, table, column, scratch=self._place())
                self._ids[ntype], source.ids[ntype] = nodes, nodes.arrays
        groups = _grouped(table, source, texts, ntype)
        if column is None and not groups and not self._choices.skip:
            raise FormatError(
                f"{files[0]} has neither a column of numbers nor one of ids; it has "
                f"{_listed(list(table.types))}. If it is a table of nodes, choose the ids with --id-column; "
                "if it is a table of edges, choose its ends with --src-column and --dst-column"
            )
        for key, columns in groups.items():
            source.add_node_array(ntype, key, table.rows(columns), f"{key!r} of {ntype!r}")

    def open_edges(self, relation: Relation, files: Sequence[Path]) -> tuple[ArrowTable, tuple[str, str]]:
        """The table of a relation, and its columns of sources and destinations."""
        ends = _ends(relation, _names(files), self._choices)
        ntypes = relation[::2]
        named = [end for ntype, end in zip(ntypes, ends, strict=True) if ntype in self._ids]
        if relation in self._arrays.edges:
            check_order(files)
        table = _open(files, named, self._scratch)
        for ntype, end in zip(ntypes, ends, strict=True):
            dtype = table.dtype(end)
            is_compared = self._ids.get(ntype) or (end in named and isinstance(table, TextTable))
            if not is_compared and (dtype is None or not is_whole(dtype)):
                why = _not_numbers(table, end) if dtype is None else f"of type {table.types[end]}"
                raise FormatError(
                    f"column {end!r} of edges {describe_type(relation)} must be of whole numbers, but "
                    f"{why if end in table.text_at else f'it is {why}'}, and {ntype!r} nodes have no ids but "
                    "0, 1, 2, …: give their table a column of ids, and choose it with --id-column; if "
                    f"{files[0]} is a table of nodes, call it nodes{files[0].suffix}"
                )
        return table, ends

    def add_edges(self, relation: Relation, table: ArrowTable, ends: tuple[str, str]) -> None:
        source, numbers = self._source, list[Rows]()
        for ntype, end in zip(relation[::2], ends, strict=True):
            if nodes := self._ids.get(ntype):
                numbers.append(nodes.nodes_of(table, end, self._place()))
            else:
                numbers.append(table.number_ids(end) if ntype in self._ids else table.rows([end]))
        kept = self._without_unknown(relation, table, ends, numbers)
        src, dst = numbers if kept is None else (_selected(rows, kept) for rows in numbers)
        source.graphs[relation] = edge_list(src, dst, **source.ends(relation))
        for key, columns in _grouped(table, source, ends, relation).items():
            rows: Rows = table.rows(columns)
            source.add_edge_table(relation, key, rows if kept is None else _selected(rows, kept))

    def _without_unknown(
        self, relation: Relation, table: ArrowTable, ends: tuple[str, str], numbers: Sequence[Rows]
    ) -> Rows | None:
        """The rows of the edges whose ends are known; None: all.

        Raises FormatError for other edges, unless they are to be dropped.
        """
        drops = self._choices.drop_unknown
        named = [i for i in (0, 1) if relation[2 * i] in self._ids or drops]
        limits = list(self._source.ends(relation).values())
        target, count, example = self._place(), 0, ""
        with open(target, "wb") as out:
            for start in range(0, table.row_count if named else 0, _BLOCK_ROWS):
                stop = min(start + _BLOCK_ROWS, table.row_count)
                nodes = {i: read_range(numbers[i], start, stop).numpy() for i in named}
                known = {i: (nodes[i] >= 0) & (nodes[i] < limits[i]) for i in named}
                kept = np.logical_and.reduce(list(known.values()))
                if not example and not kept.all():
                    row = int(kept.argmin())
                    end = next(i for i in named if not known[i][row])
                    id_ = _shown_id(table, ends[end], start + row)
                    example = f"{table.where(start + row)}: {ends[end]!r} is {id_}"
                    if not drops:
                        raise FormatError(
                            f"{example}, which no {relation[2 * end]!r} node has as its id: add the node, or "
                            "leave out such edges with --drop-unknown"
                        )
                if drops:
                    out.write((start + np.flatnonzero(kept)).data)
                    count += int(kept.sum())
        if not example:
            return None
        self._source.warnings.append(
            f"dropped {table.row_count - count} of {table.row_count} edges {describe_type(relation)}, whose "
            f"ends no nodes have as their ids, such as {example}"
        )
        return FileRows(target, (count,), torch.int64)


def _not_numbers(table: ArrowTable, column: str) -> str:
    """Why a column is not of numbers, for messages."""
    if column not in table.text_at:
        return f"of type {table.types[column]}, not numbers"
    return table.text_at[column]


def _shown_id(table: ArrowTable, column: str, row: int) -> str:
    """The id in a row, for messages."""
    for ids in table.ids(column, as_text=table.ids_are_text(column)):
        if row < len(ids):
            return shown(ids[row].as_py()) if ids[row].is_valid else "empty"
        row -= len(ids)
    raise AssertionError("the row is in the table")


def _selected(rows: Rows, kept: Rows) -> Rows:
    """Some of the rows. kept: their numbers, ascending."""
    step = max(1, BLOCK_BYTES // max(1, int(np.prod(rows.shape[1:])) * rows.dtype.itemsize))

    def fill(start: int, out: torch.Tensor) -> None:
        numbers = read_range(kept, start, start + len(out)).numpy()
        done = 0
        while done < len(numbers):
            first = int(numbers[done])
            stop = int(np.searchsorted(numbers, first + step))
            block = read_range(rows, first, int(numbers[stop - 1]) + 1).numpy()
            out.numpy()[done:stop] = block[numbers[done:stop] - first]
            done = stop

    return GeneratedRows((kept.shape[0], *rows.shape[1:]), rows.dtype, fill)


def _grouped(
    table: ArrowTable, source: Source, ids: Collection[str], type_: str | Relation
) -> dict[str, list[str]]:
    """key -> columns, without those of ids and those to skip. x_0, x_1, … of one type are one table x, also
    if some of them are skipped.

    Leaves out columns without numbers. Raises FormatError for one among x_0, x_1, ….
    """
    groups: dict[str, list[str]] = {}
    for column in [name for name in table.types if name not in ids]:
        groups.setdefault(_series(column), []).append(column)
    tables, left_out = {}, list[str]()
    for stem, named in groups.items():
        columns = [column for column in named if not source.skips(column)]
        ordered = [f"{stem}_{i}" for i in range(len(named))]
        is_series = len(named) > 1 and set(named) == set(ordered)
        usable = [column for column in columns if table.dtype(column) is not None]
        others = [column for column in columns if column not in usable]
        if is_series and usable and others:
            raise FormatError(
                f"column {others[0]!r} of table {stem!r} ({ordered[0]}, …, {ordered[-1]}): "
                f"{_not_numbers(table, others[0])}; correct it, or leave the column out with --skip "
                f"{others[0]}"
            )
        kinds = {table.types[c] for c in usable}
        if is_series and len(kinds) == 1 and not table.is_list(*kinds):
            tables[stem] = [column for column in ordered if column in columns]
        else:
            tables |= {column: [column] for column in usable}
        left_out += others
    _leave_out(table, source, left_out, type_)
    return tables


def _leave_out(table: ArrowTable, source: Source, columns: Sequence[str], type_: str | Relation) -> None:
    """Warn of columns without numbers."""
    if columns:
        why = _not_numbers(table, columns[0])
        source.leave_out(f"columns of {describe_type(type_)}: {_listed(columns, _MOST_NAMES)}", why)
    for column in [c for c in columns if c in _CURES]:
        source.warnings.append(f"no {column!r} of {describe_type(type_)}: {_CURES[column]}")


_LAYOUT = """\
Needs pyarrow. A file of edges, if it has columns of sources and destinations, else of nodes; or several
files, nodes.parquet edges.parquet; or a directory with nodes.parquet and edges.parquet, or
nodes/TYPE.parquet and edges/SOURCE.RELATION.DESTINATION.parquet (or directories of parts, in the order of
the numbers in their names), and arrays beside them as in `directory`. Columns of
nodes: id | node_id | nid, or --id-column (optional; text or whole numbers, by which edges name nodes);
label | labels | y; train_mask, val_mask, test_mask; any other column of numbers, or of lists of one
length, is a table; x_0, x_1, ... are one table x. Columns of edges: src | source | src_id | u | from,
dst | destination | target | dst_id | v | to, or --src-column and --dst-column; the rest are tables of
edges."""

_CSV_LAYOUT = """\
Needs pyarrow. As parquet, in .csv and .tsv files (.gz too) whose first line has the names of the columns. A
table in a directory may be a CSV file and another one a Parquet file. Ids that are all whole numbers as
printed (7, not 007) are numbers, other ids are text. An empty field is NaN among numbers."""

PARQUET = Reader(
    "parquet",
    "tables of nodes and edges in Parquet or Arrow files (.parquet, .arrow, .feather)",
    _LAYOUT,
    partial(_recognises, as_csv=False),
    _read,
    takes=(
        "--num-nodes",
        "--skip",
        "several SRC",
        "--id-column",
        "--src-column",
        "--dst-column",
        "--drop-unknown",
    ),
)
CSV = replace(
    PARQUET,
    name="csv",
    summary="tables of nodes and edges in CSV files with names of columns (.csv, .tsv, .gz too)",
    layout=_CSV_LAYOUT,
    recognises=partial(_recognises, as_csv=True),
)
