"""Reads edge lists: pairs of node ids in a text, .npy or raw file, alone or with arrays of nodes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from gids.convert.array_files import is_npy, open_numbers, open_raw
from gids.convert.edges import edge_pairs, edge_rows, end_columns, is_edge_array, largest_id
from gids.convert.readers.arrays import NamedArrays, directory_arrays
from gids.convert.readers.reader import Choices, Reader
from gids.convert.readers.tables import has_node_tables, is_node_csv, refuse_folders
from gids.convert.source import Source, described
from gids.convert.text_table import NotANumber, header_of, read_columns
from gids.convert.untrusted import shown
from gids.errors import FormatError
from gids.store.dtypes import equal_values
from gids.store.names import NODE, RELATION
from gids.store.rows import GeneratedRows, Rows, read_range

_TEXT = (".csv", ".tsv", ".txt", ".el", ".edges")


def _is_text(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(_TEXT) and path.is_file()


def _is_raw(path: Path) -> bool:
    return path.is_file() and not _is_text(path) and not is_npy(path)


def _edge_file(path: Path) -> Path | None:
    """The file itself, or the only one called edges.* in a directory."""
    if path.is_file():
        return path
    files = [p for p in path.glob("edges.*") if _is_text(p) or p.suffix in (".npy", ".bin")]
    return files[0] if len(files) == 1 else None


def _recognises(path: Path) -> bool:
    if not path.is_file():
        file = _edge_file(path)
        return file is not None and not (_is_text(file) and has_node_tables(path))
    if is_npy(path):  # if its shape is that of edges, --from must choose, as it may be a table
        with contextlib.suppress(FormatError):
            return is_edge_array(open_numbers(path))
    return (_is_text(path) and not is_node_csv(path)) or path.name == "edges.bin"


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    file = _edge_file(path)
    if file is None:
        raise FormatError(f"{path} must have one file edges.csv, .tsv, .txt, .npy or .bin")
    source = Source(skip=choices.skip)
    if path.is_dir():
        refuse_folders(path, file.name)
        arrays = NamedArrays(str(path), directory_arrays(path, scratch, leave_out=(file,)), source)
        arrays.read_sparse_features(NODE)
        arrays.read_nodes(NODE)
    if choices.num_nodes is not None:
        source.add_nodes(NODE, choices.num_nodes, "--num-nodes")
    rows, tables, are_pairs = _edges(file, scratch, choices, source)
    if not are_pairs and rows.shape == (2, 2):
        source.warnings.append(f"{file.name} has shape (2, 2), read as (2, E): its first row is the sources")
    if not is_edge_array(rows):
        raise FormatError(
            f"{file} is {described(rows)}; edges must be whole numbers of shape (2, E) or (E, 2)"
        )
    is_rows = not are_pairs and rows.shape[0] == 2
    if NODE not in source.nodes:
        count = 1 + largest_id(rows)
        source.add_nodes(NODE, count, file.name)
        source.notes.append(
            f"assuming {count} nodes (the largest id of {file.name} plus 1); --num-nodes sets another number"
        )
    ends = source.ends(RELATION)
    source.graphs[RELATION] = (edge_rows if is_rows else edge_pairs)(rows, str(file), **ends)
    for name, values in tables.items():
        source.add_edge_table(RELATION, name, values)
    return source


def _edges(file: Path, scratch: Path, choices: Choices, source: Source) -> tuple[Rows, dict[str, Rows], bool]:
    """(edges, tables of edges, whether the shape is certainly (E, 2)) of a file."""
    if choices.shape is not None and (is_npy(file) or _is_text(file)):
        raise FormatError(f"--shape is for raw binary, and {file.name} has its own shape")
    if is_npy(file):
        return open_numbers(file), {}, False
    if _is_text(file):
        return *_text_edges(file, scratch, source), True
    shape = choices.shape or (-1, 2)
    return open_raw(file, choices.dtype or "int64", shape), {}, choices.shape is None


def _text_edges(file: Path, scratch: Path, source: Source) -> tuple[Rows, dict[str, Rows]]:
    """The edges, int64[E, 2], and the other columns by name."""
    names, is_comment = header_of(file)
    try:
        columns = read_columns(file, scratch)
    except NotANumber as error:
        raise FormatError(
            f"{error}; if the ends of edges are ids, convert them together with a table of nodes that has "
            f"these ids: gids convert nodes.csv {file.name} DST"
        ) from None
    ends = (0, 1)
    if is_comment and not _names_ends(names, len(columns)):
        names = []
    if names:
        ends = end_columns(names, f"the edges of {file}")
        if len(names) != len(columns):
            raise FormatError(f"{file} has {len(names)} names for {len(columns)} columns")
    elif len(columns) not in (2, 3):
        raise FormatError(
            f"{file} has {len(columns)} columns; edges must have 2, or 3 with weights, or names in the first "
            "line"
        )
    tables: dict[str, Rows] = {}
    for index, column in enumerate(columns):
        name = names[index] if names else "weight"
        if index in ends or source.skips(name):
            continue
        if not name:
            source.leave_out(f"column {index + 1} of {file.name}", "it has no name")
        elif name in tables:
            raise FormatError(f"{file} has two columns {shown(name)}")
        else:
            tables[name] = column
    return _pairs([columns[i] for i in ends], file), tables


def _names_ends(names: list[str], count: int) -> bool:
    """Whether a comment is a header of `count` columns."""
    with contextlib.suppress(FormatError):
        return len(names) == count and bool(end_columns(names, ""))
    return False


def _pairs(ends: list[Rows], file: Path) -> Rows:
    """Sources and destinations side by side, as int64."""

    def fill(start: int, out: torch.Tensor) -> None:
        for index, column in enumerate(ends):
            ids = read_range(column, start, start + len(out))
            out[:, index] = ids
            if not bool(equal_values(out[:, index], ids).all()):
                raise FormatError(f"{file} has ids with fractions near edge {start}: use whole numbers")

    return GeneratedRows((ends[0].shape[0], 2), torch.int64, fill)


_LAYOUT = """\
Pairs of ids, source first, separated by commas or blanks; # begins a comment; a third column is table
weight of edges. With a first line of names: src | source, dst | destination | target; the rest are
tables of edges. .npy: (2, E) or (E, 2); (2, 2) is read as (2, E). Raw: pairs of --dtype int64 (default)
or int32. Number of nodes: --num-nodes, or the largest id plus 1. A .npy file of that shape may also be
a table: choose --from edges or --from npy. SRC may be a directory with edges.csv (.tsv,
.txt, .npy, .bin) and arrays of nodes as in `directory`."""

READER = Reader(
    "edges",
    "an edge list: a .csv, .tsv or .txt file (.gz too), --from edges for .npy or raw pairs",
    _LAYOUT,
    _recognises,
    _read,
    is_raw=_is_raw,
    takes=("--num-nodes", "--shape", "--skip"),
)
