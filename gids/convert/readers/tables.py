"""Reads tables of nodes and of edges in Parquet, Arrow and CSV files. Column names give the meaning. Needs
pyarrow.

Nodes may have ids, text or whole numbers, in a column of their table; the edges then name nodes by them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import torch

from gids.convert.arrow_table import ArrowTable, is_arrow
from gids.convert.edges import count_by_edges, end_columns, is_end
from gids.convert.node_ids import NodesById, are_positions, resembling
from gids.convert.readers.arrays import ArraysByType, directory_arrays
from gids.convert.source import (
    LABELS,
    MASKS,
    Choices,
    Reader,
    Source,
    TableSource,
    dotted_relation,
    once_each,
)
from gids.convert.source_files import shown
from gids.convert.stream_rows import BLOCK_BYTES, saved
from gids.convert.table_files import Tables, check_order, file_stem, table_files, tables_in
from gids.convert.text_table import UNNAMED, TextTable, is_csv, table_layout
from gids.errors import FormatError
from gids.store.dtypes import is_whole
from gids.store.names import NODE, RELATION, Relation, describe_type
from gids.store.rows import FileRows, Rows, blocks, read_range
from gids.write.edges import edge_list

_NUMBERED = re.compile(r"(.+)_\d+")  # pos_0, pos_1, …: columns of one table
_INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+|" + re.escape(UNNAMED) + r" \d+")  # of pandas
_APART = (*LABELS, *MASKS, "split", "time")  # columns of nodes with a meaning, in any case
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


def _open(files: Sequence[Path], scratch: Path) -> ArrowTable:
    """The columns of a table."""
    if len({is_csv(file) for file in files}) > 1:
        raise FormatError(
            f"{files[0].parent} has CSV and other files: the parts of a table must be of one kind"
        )
    if is_csv(files[0]):
        return TextTable(files, [table_layout(f) for f in files], scratch)
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
    cure = "; or choose columns with --src-column and --dst-column"
    src, dst = end_columns(names, f"edges {describe_type(relation)}", chosen, cure)
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
            (ntype, table.rows([end], fill=0))  # add_edges refuses nulls
            for relation, (table, ends) in opened.items()
            for ntype, end in zip(relation[::2], ends, strict=True)
            if ntype not in source.nodes
        ),
    )
    for relation, (table, ends) in opened.items():
        reading.add_edges(relation, table, ends)
    arrays.read_edges()
    columns = {name for files in [*by_type.values(), *by_relation.values()] for name in _names(files)}
    if unknown := [name for name in choices.separate if name not in columns]:
        raise FormatError(f"--separate {unknown[0]}: the tables have no column of that name")
    return source


class _Reading:
    """The tables that are read to a source, and the ids of its nodes."""

    def __init__(self, source: Source, choices: Choices, scratch: Path, arrays: ArraysByType) -> None:
        self._source, self._choices, self._scratch, self._arrays = source, choices, scratch, arrays
        self._ids: dict[str, NodesById | None] = {}  # None: the ids are 0, 1, 2, …
        self._id_columns: dict[str, tuple[ArrowTable, str]] = {}
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
        table = _open(files, self._scratch)
        source.add_nodes(ntype, table.row_count, f"the table of {ntype!r}")
        if column is not None:
            self._ids[ntype], self._id_columns[ntype] = None, (table, column)
            if not are_positions(table, column):
                if ntype in self._arrays.nodes or any(ntype in r[::2] for r in self._arrays.edges):
                    raise FormatError(
                        f"column {column!r} of {files[0]} has ids other than 0, 1, 2, …, by which the arrays "
                        "beside it number nodes: put the arrays into the tables, or number the nodes so"
                    )
                nodes = NodesById(ntype, table, column, scratch=self._place())
                self._ids[ntype], source.ids[ntype] = nodes, nodes.arrays
        groups = _grouped(table, source, texts, ntype, self._choices.separate)
        if column is None and not groups and not self._choices.skip:
            raise FormatError(
                f"{files[0]} has neither a column of numbers nor one of ids; it has "
                f"{_listed(list(table.types))}. If it is a table of nodes, choose the ids with --id-column; "
                "if it is a table of edges, choose its ends with --src-column and --dst-column"
            )
        for group in groups:
            key, columns, is_matrix = group
            what, name = f"{key!r} of {ntype!r}", key.casefold()
            fill = -1 if name in LABELS and ntype not in source.labels else 0
            if not (fill or name in MASKS):
                source.tables.append(_table(table, ntype, *group))
                continue
            if nulls := sum(map(table.null_count, columns)):
                means = "no label" if fill else "not in the split"
                source.notes.append(f"{what} has {nulls} nulls in {table.row_count} rows: {means}")
            rows = table.rows(columns, is_matrix=is_matrix, fill=fill)
            source.add_node_array(ntype, name, rows, what)

    def open_edges(self, relation: Relation, files: Sequence[Path]) -> tuple[ArrowTable, tuple[str, str]]:
        """The table of a relation, and its columns of sources and destinations."""
        ends = _ends(relation, _names(files), self._choices)
        ntypes = relation[::2]
        known = self._source.nodes if self._choices.drop_unknown else self._ids
        named = [end for ntype, end in zip(ntypes, ends, strict=True) if ntype in known]
        if relation in self._arrays.edges:
            check_order(files)
        table = _open(files, self._scratch)
        table.ends = ends
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
                is_compared = ntype in self._ids or self._choices.drop_unknown
                numbers.append(table.number_ids(end) if is_compared else table.rows([end]))
        kept = self._without_unknown(relation, table, ends, numbers)
        made = edge_tables(source, relation, table, ends)
        if kept is not None:
            numbers = [_selected(rows, kept, self._place()) for rows in numbers]
            made = [replace(t, rows=_selected(t.rows, kept, self._place())) for t in made]
        src, dst = numbers
        source.graphs[relation] = edge_list(src, dst, **source.ends(relation))
        source.tables += made

    def _without_unknown(
        self, relation: Relation, table: ArrowTable, ends: tuple[str, str], numbers: Sequence[Rows]
    ) -> Rows | None:
        """Whether the ends of each edge are known, bool[edges]; None: all are.

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
                    example = self._unknown(relation[2 * end], table, ends[end], start + row)
                    if not drops:
                        raise FormatError(
                            f"{example}: write ids as in the table of nodes, add the node, or leave out such "
                            "edges with --drop-unknown"
                        )
                if drops:
                    out.write(kept.data)
                    count += int(kept.sum())
        if not example:
            return None
        if not count:
            raise FormatError(
                f"--drop-unknown would drop all {table.row_count} edges {describe_type(relation)}: {example}"
            )
        self._source.warnings.append(
            f"dropped {table.row_count - count} of {table.row_count} edges {describe_type(relation)}, whose "
            f"ends no nodes have as their ids, such as {example}"
        )
        return FileRows(target, (table.row_count,), torch.bool)

    def _unknown(self, ntype: str, table: ArrowTable, end: str, row: int) -> str:
        """A sentence about the end of an edge that is no node's id, and the id that it resembles."""
        id_, nodes = _id_at(table, end, row), self._id_columns.get(ntype)
        other = None if id_ is None or nodes is None else resembling(*nodes, str(id_))
        is_id = "empty" if id_ is None else shown(id_)
        hint = "" if other is None else f", but one has {shown(other)}"
        return f"{table.where(row)}: {end!r} is {is_id}, which no {ntype!r} node has as its id{hint}"


def _not_numbers(table: ArrowTable, column: str) -> str:
    """Why a column is not of numbers, for messages."""
    if column not in table.text_at:
        return f"of type {table.types[column]}, not numbers"
    return table.text_at[column]


def _id_at(table: ArrowTable, column: str, row: int) -> str | int | None:
    """The id in a row."""
    for ids in table.ids(column, as_text=table.ids_are_text(column)):
        if row < len(ids):
            id_: str | int | None = ids[row].as_py()
            return id_
        row -= len(ids)
    raise AssertionError("the row is in the table")


def _selected(rows: Rows, kept: Rows, target: Path) -> FileRows:
    """Some of the rows, in a file that is written now. kept: bool[rows]."""
    pieces = blocks(rows, BLOCK_BYTES)
    return saved(target, (block[read_range(kept, at, at + len(block))].numpy() for at, block in pieces), rows)


def edge_tables(
    source: Source, relation: Relation, table: ArrowTable, ends: Collection[str]
) -> list[TableSource]:
    """The tables of a relation, of all columns but its ends."""
    return [_table(table, relation, *group) for group in _grouped(table, source, ends, relation)]


def _table(
    table: ArrowTable, type_: str | Relation, key: str, columns: list[str], is_matrix: bool
) -> TableSource:
    rows = table.rows(columns, is_matrix=is_matrix)
    return TableSource(type_, key, rows, columns=tuple(columns) if is_matrix else ())


def _grouped(
    table: ArrowTable,
    source: Source,
    ids: Collection[str],
    type_: str | Relation,
    separate: Collection[str] = (),
) -> list[tuple[str, list[str], bool]]:
    """(key, columns, whether they are side by side) of each table, without ids and columns to skip.

    pos_0, pos_1, … are a table pos. Two and more other numbers of nodes are a table x, in the order of the
    file, except lists, those that a name gives a meaning, and those to separate; it is called columns if
    another one is called x or feat. Raises FormatError for columns that cannot be left out.
    """
    names = [name for name in table.types if name not in ids]
    numbered = {name for name in names if _NUMBERED.fullmatch(name) and not table.is_list(name)}
    stems = Counter(name.rpartition("_")[0] for name in numbered)
    ranges = {stem: [f"{stem}_{i}" for i in range(count)] for stem, count in stems.items() if count > 1}
    series = {
        name: stem for stem, of_stem in ranges.items() if numbered.issuperset(of_stem) for name in of_stem
    }
    names = [name for name in names if not source.skips(name)]
    if indices := [name for name in names if _INDEX.fullmatch(name)]:
        left_out = f"columns of {describe_type(type_)} without a name, or of pandas' index"
        source.notes.append(f"left out {left_out}: {_listed(indices)}")
        names = [name for name in names if name not in indices]
    apart = {*separate, *(name for name in names if name.casefold() in _APART)}
    alone, grouped, others = list[str](), dict[str, list[str]](), list[str]()
    for name in sorted(names, key=lambda name: int(name.rpartition("_")[2]) if name in series else 0):
        if table.dtype(name) is None:
            others.append(name)
        elif name in series and name not in separate:
            grouped.setdefault(series[name], []).append(name)
        elif isinstance(type_, tuple) or table.is_list(name) or name in apart:
            alone.append(name)
        else:
            grouped.setdefault("", []).append(name)
    _leave_out(table, source, others, type_, [name for name in others if series.get(name) in grouped])
    columns = grouped.pop("", [])
    if len(columns) == 1 and columns[0] not in grouped:
        alone += columns
    elif columns:
        is_taken = {"x", "feat"}.intersection(map(str.casefold, [*grouped, *alone]))
        grouped["columns" if is_taken else "x"] = columns
    return [(name, [name], False) for name in alone] + [(key, c, True) for key, c in grouped.items()]


def _leave_out(
    table: ArrowTable, source: Source, columns: Sequence[str], type_: str | Relation, series: Collection[str]
) -> None:
    """Warn of columns of text, which are left out. series: columns beside numbers of their series.

    Raises FormatError for these, labels and splits, numbers that are written as text, and other types.
    """
    texts, of_type = [column for column in columns if table.is_text(column)], describe_type(type_)
    numbers = table.numbers_as_text(texts)
    cures = _CURES if isinstance(type_, str) else {}
    refused = {*series, *numbers, *(c for c in columns if c not in texts or c.casefold() in cures)}
    if wrong := [column for column in columns if column in refused]:
        why, cure = _not_numbers(table, wrong[0]), cures.get(wrong[0].casefold(), "give numbers")
        if wrong[0] in numbers and wrong[0] not in table.text_at:
            why += f", such as {shown(numbers[wrong[0]])}"
        skips = " ".join(f"--skip {column}" for column in wrong)
        raise FormatError(f"column {wrong[0]!r} of {of_type}: {why}; {cure}, or leave it out with {skips}")
    if texts:
        names = _listed(texts, _MOST_NAMES)
        source.warnings.append(f"left out columns of {of_type}: {names}: {_not_numbers(table, texts[0])}")


_LAYOUT = """\
Needs pyarrow. A file of edges, if it has columns of sources and destinations, else of nodes; or several
files, nodes.parquet edges.parquet; or a directory with nodes.parquet and edges.parquet, or
nodes/TYPE.parquet and edges/SOURCE.RELATION.DESTINATION.parquet (or directories of parts, in the order of
the numbers in their names), and arrays beside them as in `directory`. Columns of
nodes: id | node_id | nid, or --id-column (optional; text or whole numbers, by which edges name nodes);
label | labels | y; train_mask, val_mask, test_mask; lists of one length are a table; pos_0, pos_1, ...
are one table pos; several other numbers are one table x, but for those to --separate. Columns of edges:
src | source | src_id | u | from, dst | destination | target | dst_id | v | to, or --src-column and
--dst-column; each other one is a table of edges."""

_CSV_LAYOUT = """\
Needs pyarrow. As parquet, in .csv and .tsv files (.gz too) whose first line has the names of the columns. A
table in a directory may be a CSV file and another one a Parquet file. Ids that are all whole numbers as
printed (7, not 007) are numbers, other ids are text. An empty field or NA is NaN among numbers."""

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
        "--separate",
    ),
)
CSV = replace(
    PARQUET,
    name="csv",
    summary="tables of nodes and edges in CSV files with names of columns (.csv, .tsv, .gz too)",
    layout=_CSV_LAYOUT,
    recognises=partial(_recognises, as_csv=True),
)
