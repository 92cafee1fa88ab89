"""Reads edge lists: pairs of node ids in a text or .npy file, alone or with arrays of nodes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from gids.convert.array_files import is_npy, open_numbers
from gids.convert.edges import count_by_edges, edge_pairs, edge_rows, end_columns, have_ends, is_edge_array
from gids.convert.readers.arrays import ArraysByType, directory_arrays
from gids.convert.readers.tables import edge_tables, is_node_csv
from gids.convert.source import Choices, Reader, Source, described
from gids.convert.source_files import starts_with
from gids.convert.table_files import tables_in
from gids.convert.text_table import UNNAMED, TextTable, list_layout, named
from gids.errors import FormatError
from gids.store.names import NODE, RELATION
from gids.store.rows import ColumnRows, FileRows, Rows
from gids.write.edges import EdgeSource, edge_list

_TEXT = (".csv", ".tsv", ".txt", ".el", ".edges")
_KONECT = ("src", "dst", "weight", "time")


def _is_text(path: Path) -> bool:
    """Whether a file is text by its name, or a file out.* of KONECT."""
    named = path.name.removesuffix(".gz").endswith(_TEXT) and path.is_file()
    return named or starts_with(path, b"% ")


def _edge_file(path: Path) -> Path | None:
    """The file itself, or the only one called edges.* in a directory."""
    if path.is_file():
        return path
    files = [p for p in path.glob("edges.*") if _is_text(p) or p.suffix == ".npy"]
    return files[0] if len(files) == 1 else None


def _recognises(path: Path) -> bool:
    if not path.is_file():
        file = _edge_file(path)
        return file is not None and not (_is_text(file) and tables_in(path)[0])
    if is_npy(path):  # if its shape is that of edges, --from must choose, as it may be a table
        with contextlib.suppress(FormatError):
            return is_edge_array(open_numbers(path))
    return _is_text(path) and not is_node_csv(path)


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    file = _edge_file(path)
    if file is None:
        raise FormatError(f"{path} must have one file edges.csv, .tsv, .txt or .npy")
    source, arrays = Source(skip=choices.skip, used={file}), ArraysByType({}, {})
    if path.is_dir():
        arrays = directory_arrays(path, scratch, source, has_types=False)
        arrays.read_nodes()
    if choices.num_nodes is not None:
        source.add_nodes(NODE, choices.num_nodes, "--num-nodes")
    if _is_text(file):
        ends = _text_edges(file, scratch, source)
        make: Callable[..., EdgeSource] = partial(edge_list, *ends)
    else:
        ends, make = _array_edges(file, source)
    count_by_edges(source, ((NODE, end) for end in ends), "; --num-nodes sets another number")
    source.graphs[RELATION] = make(**source.ends(RELATION))
    arrays.read_edges()
    return source


def _array_edges(file: Path, source: Source) -> tuple[list[Rows], Callable[..., EdgeSource]]:
    """The ids in a .npy file, in the order of the file, and the function that makes edges of them."""
    rows = open_numbers(file)
    if rows.shape == (2, 2):
        source.warnings.append(f"{file.name} has shape (2, 2), read as (2, E): its first row is the sources")
    if not is_edge_array(rows):
        raise FormatError(
            f"{file} is {described(rows)}; edges must be whole numbers of shape (2, E) or (E, 2)"
        )
    make = edge_rows if rows.shape[0] == 2 else edge_pairs
    elements = rows.elements if isinstance(rows, ColumnRows) else rows
    assert isinstance(elements, FileRows)
    return [elements.reshaped((math.prod(rows.shape),))], partial(make, rows, str(file))


def _text_edges(file: Path, scratch: Path, source: Source) -> list[Rows]:
    """The sources and the destinations. The other columns become tables of edges."""
    layout, names = list_layout(file, have_ends)
    count, ends = len(layout.names) - layout.names.count(UNNAMED), (0, 1)
    if not count:
        raise FormatError(f"{file} has no edges")
    if names:
        cure = "; if these are nodes, call the file nodes.csv, or give --id-column"
        ends = end_columns(names, f"the edges of {file}", cure=cure)
    elif count not in (2, 3, 4 if starts_with(file, b"%") else 3):
        raise FormatError(
            f"{file} has {count} columns; edges must have 2, or 3 with weights, or names in the first line"
        )
    names = named(file, (names or list(_KONECT[:count])) + [""] * (len(layout.names) - count))
    table = TextTable([file], [replace(layout, names=names)], scratch)
    for end in (names[end] for end in ends):
        if table.types[end] != "int64":
            why = table.text_at.get(end, f"{file} has ids that are not whole numbers of int64")
            raise FormatError(
                f"{why}; if the ends of edges are ids, convert them together with a table of nodes that has "
                f"these ids: gids convert nodes.csv {file.name} DST"
            )
    source.tables += edge_tables(source, RELATION, table, [names[end] for end in ends])
    return [table.rows([names[end]]) for end in ends]


_LAYOUT = """\
Text needs pyarrow. Pairs of ids, source first, separated by one tab, comma, semicolon or blank, after lines
of comments (# or %); gzipped (.gz) too; a third column is table weight of edges, a fourth one of KONECT's
files table time. With a line of names:
src | source | src_id | u | from, dst | destination | target | dst_id | v | to; the rest are tables of
edges. .npy: (2, E) or (E, 2); (2, 2) is read as (2, E). Number of nodes: --num-nodes, or the largest id
plus 1. A .npy file of that shape may also be a table: choose --from edges or --from npy. SRC may be a
directory with edges.csv (.tsv, .txt, .npy) and arrays of nodes as in `directory`."""

READER = Reader(
    "edges",
    "an edge list: a .csv, .tsv or .txt file (.gz too), --from edges for .npy",
    _LAYOUT,
    _recognises,
    _read,
    takes=("--num-nodes", "--skip"),
)
