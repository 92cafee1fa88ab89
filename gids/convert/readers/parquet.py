"""Reads Parquet and Arrow tables of nodes and of edges. Column names give the meaning. Needs pyarrow."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import torch

from gids.convert.arrow_table import ArrowTable, is_arrow
from gids.convert.edges import BLOCK_BYTES, count_by_edges, end_columns
from gids.convert.readers.reader import Choices, Reader
from gids.convert.source import Source, dotted_relation
from gids.errors import FormatError
from gids.store.dtypes import equal_values, is_whole
from gids.store.names import NODE, RELATION, Relation
from gids.store.rows import Rows, blocks
from gids.write.edges import edge_list

_SUFFIXES = (".parquet", ".arrow", ".feather")
_IDS = ("id", "node_id", "nid")


def _tables(folder: Path) -> dict[str, list[Path]]:
    """name -> files, of NAME.parquet and NAME/*.parquet in a directory."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
        files = [f for f in files if f.suffix in _SUFFIXES]
        if files:
            found[path.name if path.is_dir() else path.name.removesuffix(path.suffix)] = files
    return found


def _recognises(path: Path) -> bool:
    return is_arrow(path) if path.is_file() else bool(_nodes(path) or _edges(path))


def _nodes(path: Path) -> dict[str, list[Path]]:
    """Node type -> files, of nodes.parquet, or of nodes/TYPE.parquet and nodes/TYPE/."""
    if typed := _tables(path / "nodes"):
        return {unquote(name): files for name, files in typed.items()}
    alone = _tables(path).get("nodes", [])
    return {NODE: alone} if alone else {}


def _edges(path: Path) -> dict[Relation, list[Path]]:
    alone = [f for f in _tables(path).get("edges", []) if f.parent == path]
    if alone:
        return {RELATION: alone}
    folder = path / "edges"
    return {dotted_relation(name, folder / name): files for name, files in _tables(folder).items()}


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    source = Source()
    nodes = {ntype: ArrowTable(files, choices.memory_bytes) for ntype, files in _nodes(path).items()}
    edges = {relation: ArrowTable(files, choices.memory_bytes) for relation, files in _edges(path).items()}
    if path.is_file():
        table = ArrowTable([path], choices.memory_bytes)
        if _is_edge_list(table, path):
            edges = {RELATION: table}
            source.notes.append(
                f"{path.name} is an edge list, because it has columns of sources and destinations; to make "
                f"tables of nodes of them, call it nodes{path.suffix}"
            )
        else:
            nodes = {NODE: table}
    for ntype, table in nodes.items():
        _read_nodes(ntype, table, source)
    if choices.num_nodes is not None:
        source.add_nodes(NODE, choices.num_nodes, "--num-nodes")
    ends = {relation: _ends(relation, _grouped(table, Source())) for relation, table in edges.items()}
    count_by_edges(
        source,
        ((relation[2 * i], edges[relation].rows([ends[relation][i]])) for relation in edges for i in (0, 1)),
    )
    for relation, table in edges.items():
        _read_edges(relation, table, source)
    return source


def _is_edge_list(table: ArrowTable, path: Path) -> bool:
    """Whether a file alone is of edges: one called edges, or one that names both of their ends.

    Raises FormatError if the ends are not whole numbers.
    """
    names = list(table.types)
    if path.stem == "nodes":
        return False
    try:
        ends = [names[i] for i in end_columns(names, f"the edges of {path}")]
    except FormatError:
        if path.stem == "edges":
            raise
        return False
    if not all((dtype := table.dtype(name)) is not None and is_whole(dtype) for name in ends):
        raise FormatError(
            f"{path} may be an edge list or a table of nodes: its columns {' and '.join(ends)} are not whole "
            f"numbers; make them whole, or call it nodes{path.suffix}"
        )
    return True


def _read_nodes(ntype: str, table: ArrowTable, source: Source) -> None:
    source.add_nodes(ntype, table.row_count, f"the table of {ntype!r}")
    for key, columns in _grouped(table, source).items():
        if key in _IDS:
            _check_positions(table.rows(columns), ntype, key)
        else:
            source.add_node_array(ntype, key, table.rows(columns), f"{key!r} of {ntype!r}")


def _read_edges(relation: Relation, table: ArrowTable, source: Source) -> None:
    columns = _grouped(table, source)
    ends = _ends(relation, columns)
    src, dst = (table.rows([name]) for name in ends)
    source.graphs[relation] = edge_list(src, dst, **source.ends(relation))
    for key, group in columns.items():
        if key not in ends:
            source.add_edge_table(relation, key, table.rows(group))


def _ends(relation: Relation, columns: dict[str, list[str]]) -> list[str]:
    """The names of the columns of sources and of destinations. Raises FormatError."""
    names = list(columns)
    return [names[i] for i in end_columns(names, f"edges {relation}")]


def _grouped(table: ArrowTable, source: Source) -> dict[str, list[str]]:
    """key -> columns. x_0, x_1, … of one type are one table x. Leaves out columns without numbers."""
    groups: dict[str, list[str]] = {}
    for column, kind in table.types.items():
        if table.dtype(column) is None and column.lower() == "id":
            raise FormatError(
                f"column {column!r} is of type {kind}: replace the ids of nodes by their positions "
                "0, 1, 2, …, in the edges too; or drop the column if the rows are in the order of the ids"
            )
        if table.dtype(column) is None:
            source.leave_out(f"column {column!r}", f"of type {kind}, not numbers")
        else:
            numbered = re.fullmatch(r"(.+)_(\d+)", column)
            groups.setdefault(numbered[1] if numbered else column, []).append(column)
    tables = {}
    for stem, found in groups.items():
        ordered = [f"{stem}_{i}" for i in range(len(found))]
        kinds = {table.types[c] for c in found}
        if len(found) > 1 and set(found) == set(ordered) and len(kinds) == 1 and not table.is_list(*kinds):
            tables[stem] = ordered
        else:
            tables |= {column: [column] for column in found}
    return tables


def _check_positions(rows: Rows, ntype: str, key: str) -> None:
    for start, block in blocks(rows, BLOCK_BYTES):
        if not bool(equal_values(block, torch.arange(start, start + len(block))).all()):
            raise FormatError(
                f"{key!r} of {ntype!r} is not 0, 1, 2, … from row {start} on: sort the table by it and close "
                "the gaps, because edges use positions as node ids"
            )


_LAYOUT = """\
Needs pyarrow. A file of edges, if it has columns of sources and destinations, else of nodes; or a
directory with nodes.parquet and edges.parquet, or nodes/TYPE.parquet and
edges/SOURCE.RELATION.DESTINATION.parquet (or directories of parts). Columns of nodes: id (optional; must
be the position); label | labels | y; train_mask, val_mask, test_mask; any other column of numbers, or of
lists of one length, is a table; x_0, x_1, ... are one table x. Columns of edges: src | source,
dst | destination | target; the rest are tables of edges."""

READER = Reader(
    "parquet",
    "tables of nodes and edges in Parquet or Arrow files (.parquet, .arrow, .feather)",
    _LAYOUT,
    _recognises,
    _read,
    takes=("--num-nodes",),
)
