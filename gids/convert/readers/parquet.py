"""Parquet and Arrow tables of nodes and of edges. Columns give the meaning by name; needs pyarrow."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import torch

from gids.convert.arrow_table import ArrowTable, is_arrow
from gids.convert.edges import most_id
from gids.convert.named import LABELS, MASKS
from gids.convert.readers.reader import Choices, Reader
from gids.convert.source import Source, TableSource
from gids.errors import FormatError
from gids.store.names import NODE, RELATION, Relation
from gids.store.rows import Rows, blocks
from gids.write.edges import edge_list

_SUFFIXES = (".parquet", ".arrow", ".feather")
_SOURCES = ("src", "source", "src_id", "u", "from")
_DESTINATIONS = ("dst", "destination", "target", "dst_id", "v", "to")
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
    return {_relation(name): files for name, files in _tables(path / "edges").items()}


def _relation(name: str) -> Relation:
    parts = [unquote(n) for n in name.split(".")]
    if len(parts) != 3 or not all(parts):
        raise FormatError(f"the edges {name} must be called SOURCE.RELATION.DESTINATION")
    return parts[0], parts[1], parts[2]


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    source = Source()
    if path.is_file():
        _read_nodes(NODE, ArrowTable([path], choices.memory_bytes), source)
        return source
    for ntype, files in _nodes(path).items():
        _read_nodes(ntype, ArrowTable(files, choices.memory_bytes), source)
    edges = {relation: ArrowTable(files, choices.memory_bytes) for relation, files in _edges(path).items()}
    _learn_ends(edges, source)
    for relation, table in edges.items():
        _read_edges(relation, table, source)
    return source


def _read_nodes(ntype: str, table: ArrowTable, source: Source) -> None:
    source.add_nodes(ntype, table.row_count, f"the table of {ntype!r}")
    for key, columns in _grouped(table, source).items():
        rows = table.rows(columns)
        if key in _IDS:
            _check_positions(rows, ntype, key)
        elif key in LABELS and ntype not in source.labels:
            source.labels[ntype] = rows
        elif key in MASKS:
            source.add_mask(ntype, MASKS[key], rows, f"{key!r} of {ntype!r}")
        else:
            source.tables.append(TableSource("node", ntype, key, rows))


def _read_edges(relation: Relation, table: ArrowTable, source: Source) -> None:
    columns = _grouped(table, source)
    ends = [_end(columns, names, relation) for names in (_SOURCES, _DESTINATIONS)]
    num_src, num_dst = (source.node_count(t) for t in (relation[0], relation[2]))
    source.graphs[relation] = edge_list(
        table.rows([ends[0]]), table.rows([ends[1]]), num_src=num_src, num_dst=num_dst
    )
    for key, group in columns.items():
        if key not in ends:
            source.tables.append(TableSource("edge", relation, key, table.rows(group)))


def _end(columns: dict[str, list[str]], names: tuple[str, ...], relation: Relation) -> str:
    found = [n for n in names if n in columns]
    if len(found) != 1:
        raise FormatError(
            f"edges {relation} have the columns {', '.join(columns)}; one must be {' or '.join(names)}"
        )
    return found[0]


def _learn_ends(edges: dict[Relation, ArrowTable], source: Source) -> None:
    """Count the nodes of types without a table by their edges."""
    counts: dict[str, int] = {}
    for relation, table in edges.items():
        columns = _grouped(table, Source())
        for ntype, names in ((relation[0], _SOURCES), (relation[2], _DESTINATIONS)):
            if ntype not in source.nodes:
                ids = table.rows([_end(columns, names, relation)])
                counts[ntype] = max(counts.get(ntype, 0), 1 + most_id(ids))
    for ntype, count in counts.items():
        source.add_nodes(ntype, count, "the edges")
        source.notes.append(f"{ntype!r} has no table: {count} nodes, by the edges")


def _grouped(table: ArrowTable, source: Source) -> dict[str, list[str]]:
    """key -> columns: x_0, x_1, … of one type are one table x; columns without numbers are left out."""
    numbers = []
    for column, kind in table.types.items():
        if table.dtype(column) is None:
            source.notes.append(f"left out column {column!r}: of type {kind}, not numbers")
        else:
            numbers.append(column)
    groups: dict[str, list[str]] = {}
    for column in numbers:
        numbered = re.fullmatch(r"(.+)_(\d+)", column)
        stem = numbered[1] if numbered else column
        group = groups.setdefault(stem if numbered else column, [])
        group.append(column)
    return {
        key: columns
        for stem, found in groups.items()
        for key, columns in _checked_group(stem, found, table).items()
    }


def _checked_group(stem: str, found: list[str], table: ArrowTable) -> dict[str, list[str]]:
    """The group as one table when it is stem_0 … stem_n of one scalar type, else each column for itself."""
    ordered = [f"{stem}_{i}" for i in range(len(found))]
    kinds = {table.types[c] for c in found}
    if len(found) > 1 and set(found) == set(ordered) and len(kinds) == 1 and not table.is_list(found[0]):
        return {stem: ordered}
    return {column: [column] for column in found}


def _check_positions(rows: Rows, ntype: str, key: str) -> None:
    for start, block in blocks(rows, 8 << 20):
        if not torch.equal(block.to(torch.int64), torch.arange(start, start + len(block))):
            raise FormatError(
                f"{key!r} of {ntype!r} is not 0, 1, 2, … from row {start} on: sort the table by it, "
                "without gaps, since edges name nodes by their position"
            )


_LAYOUT = """\
Needs pyarrow. A file of nodes; or a directory with nodes.parquet and edges.parquet, or
nodes/TYPE.parquet and edges/SOURCE.RELATION.DESTINATION.parquet (or directories of parts). Nodes: id, if
there, must be the position; label | labels | y; train_mask, val_mask, test_mask; every other column of
numbers or of lists of one length is a table; x_0, x_1, ... are one table x. Edges: src | source, dst |
destination | target; the rest are tables of edges."""

READER = Reader(
    "parquet",
    "tables of nodes and edges in Parquet or Arrow files (.parquet, .arrow, .feather)",
    _LAYOUT,
    _recognises,
    _read,
)
