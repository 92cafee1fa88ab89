"""Reads edge lists: pairs of node ids in a text, .npy or raw file, alone or with arrays of nodes."""

from __future__ import annotations

from pathlib import Path

import torch

from gids.convert.array_files import open_numbers, open_raw
from gids.convert.edges import check_edge_array, column_of, edge_pairs, edge_rows, largest_id
from gids.convert.named import NamedArrays, directory_arrays
from gids.convert.readers.reader import Choices, Reader
from gids.convert.source import Source, starts_with
from gids.convert.text_table import read_text
from gids.errors import FormatError
from gids.store.names import NODE, RELATION
from gids.store.rows import FileRows, GeneratedRows, Rows, read_range

_TEXT = (".csv", ".tsv", ".txt", ".el", ".edges")


def _is_text(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(_TEXT) and path.is_file()


def _is_raw(path: Path) -> bool:
    return path.is_file() and not _is_text(path) and not starts_with(path, b"\x93NUMPY")


def _edge_file(path: Path) -> Path | None:
    """The file itself, or the only one called edges.* in a directory."""
    if path.is_file():
        return path
    named = path.glob("edges.*") if path.is_dir() else []
    found = [p for p in named if _is_text(p) or p.suffix in (".npy", ".bin")]
    return found[0] if len(found) == 1 else None


def _recognises(path: Path) -> bool:
    return _is_text(path) if path.is_file() else _edge_file(path) is not None


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    file = _edge_file(path)
    if file is None:
        raise FormatError(f"{path} must have one file edges.csv, .tsv, .txt, .npy or .bin")
    source = Source(skip=choices.skip)
    if path.is_dir():
        _read_nodes(path, file, scratch, choices, source)
    if choices.num_nodes is not None:
        source.add_nodes(NODE, choices.num_nodes, "--num-nodes")
    rows, weights, are_pairs = _edges(file, scratch, choices)
    if not are_pairs and rows.shape == (2, 2):
        source.warnings.append(f"{file.name} has shape (2, 2), read as (2, E): its first row is the sources")
    check_edge_array(rows, str(file))
    if NODE not in source.nodes:
        count = 1 + largest_id(rows)
        source.add_nodes(NODE, count, file.name)
        source.notes.append(
            f"assuming {count} nodes (the largest id of {file.name} plus 1); --num-nodes sets another number"
        )
    ends = source.ends(RELATION)
    is_rows = not are_pairs and rows.shape[0] == 2
    source.graphs[RELATION] = edge_rows(rows, str(file), **ends) if is_rows else edge_pairs(rows, **ends)
    if weights is not None:
        source.add_edge_table(RELATION, "weight", weights)
    return source


def _read_nodes(path: Path, file: Path, scratch: Path, choices: Choices, source: Source) -> None:
    """The other arrays of a directory, all of nodes."""
    found = directory_arrays(path, scratch, leave_out=(file,))
    arrays = NamedArrays(str(path), found, source)
    arrays.read_sparse_features(NODE)
    arrays.read_nodes(NODE)


def _edges(file: Path, scratch: Path, choices: Choices) -> tuple[Rows, Rows | None, bool]:
    """(edges, weights or None, whether the shape is certainly (E, 2)) of a file."""
    is_npy = starts_with(file, b"\x93NUMPY")
    if choices.shape is not None and (is_npy or _is_text(file)):
        raise FormatError(f"--shape is for raw binary, and {file.name} has its own shape")
    if is_npy:
        return open_numbers(file), None, False
    if _is_text(file):
        return *_text_edges(file, scratch), True
    shape = choices.shape or (-1, 2)
    return open_raw(file, choices.dtype or "int64", shape), None, choices.shape is None


def _text_edges(file: Path, scratch: Path) -> tuple[Rows, Rows | None]:
    rows = read_text(file, scratch)
    if rows.dtype != torch.int64:
        rows = read_text(file, scratch, torch.float64)  # weights with fractions; ids are exact up to 2^53
    if rows.shape[1] not in (2, 3):
        raise FormatError(f"{file} has {rows.shape[1]} columns; edges must have 2, or 3 with weights")
    if rows.shape[1] == 2 and rows.dtype == torch.int64:
        return rows, None
    if rows.shape[1] == 2:
        raise FormatError(f"{file} has numbers with fractions; edges must be pairs of whole numbers")
    return _ids(rows, file), column_of(rows, 2)


def _ids(rows: FileRows, file: Path) -> Rows:
    """The first two of three columns, as int64."""

    def fill(start: int, out: torch.Tensor) -> None:
        ids = read_range(rows, start, start + len(out))[:, :2]
        out.copy_(ids)
        if not torch.equal(out.to(ids.dtype), ids):
            raise FormatError(f"{file} has ids with fractions near edge {start}; ids must be whole numbers")

    return GeneratedRows((rows.shape[0], 2), torch.int64, fill)


_LAYOUT = """\
Pairs of ids, source first, separated by commas or blanks; # begins a comment; a third column is table
weight of edges. .npy: (2, E) or (E, 2); (2, 2) is read as (2, E). Raw: pairs of --dtype int64 (default)
or int32. Number of nodes: --num-nodes, or the largest id plus 1. SRC may be a directory with edges.csv
(.tsv, .txt, .npy, .bin) and arrays of nodes as in `directory`."""

READER = Reader(
    "edges",
    "an edge list: a .csv, .tsv or .txt file (.gz too), --from edges for .npy or raw pairs",
    _LAYOUT,
    _recognises,
    _read,
    is_raw=_is_raw,
    takes=("--num-nodes", "--shape", "--skip"),
)
