"""Finds the files below a source that may be data, and the parts of each table. Called by the readers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

from gids.convert.source import Reader, Source, source_files
from gids.convert.text_table import CSV_SUFFIXES
from gids.errors import FormatError
from gids.store.names import NODE, RELATION

_TABLE_SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", *CSV_SUFFIXES)
_NO_DATA = re.compile(
    r"(.*/)?(\..*|_[^./]*|(readme|licen[cs]e|copying|changelog|notice|version)(\.txt)?|nohup\.out"
    r"|.*\.(md|rst|tex|bib|cff|pyc?|ipynb|sh|log|pdf|png|jpe?g|svg|html?|toml|cfg|ini|ya?ml|lock|crc|md5|sha\d+))",
    re.IGNORECASE,
)
_PART = re.compile(r"part[-_.]?\d|.*=", re.IGNORECASE)
_TYPED = re.compile(r"[^.]+\.(?!c\d+\.)[^.]+\.[^.]+")  # but Spark's part-0-UUID.c000.snappy
_UUID = re.compile(r"[0-9a-f]{8}(-?)([0-9a-f]{4}\1){3}[0-9a-f]{12}", re.IGNORECASE)
_NUMBER = re.compile(r"(\d+)(?![0-9A-Za-z])")  # that ends a word: 10 of part10, not the one of 10k
Tables = dict[str, list[Path]]
"""The files of each table, by name."""


def data_files(path: Path) -> list[Path]:
    """The files in a directory, at any depth, but hidden ones and those that are certainly no data."""
    files = [(file, str(file.relative_to(path))) for file in source_files(path)]
    if table := next((file for file, name in files if re.search(r"\b_delta_log/|\.hoodie/", name)), None):
        raise FormatError(
            f"{table} is of a Delta or Hudi table, of which some files may be outdated: write its rows to "
            "Parquet files with the library of such tables, and convert these"
        )
    data = sorted(file for file, name in files if not _NO_DATA.fullmatch(name))
    if missing := next((file for file in data if not file.exists()), None):
        raise FormatError(f"{missing} is a link to a file that is missing: get the file, or remove the link")
    return data


def refuse_unused(path: Path, source: Source, reader: Reader) -> None:
    """Raise FormatError for files in a directory that may be data and that the reader did not use."""
    files = [file.relative_to(path) for file in data_files(path) if file not in source.used]
    files = [file for file in files if not any(fnmatch(str(file), pattern) for pattern in reader.aside)]
    if names := [str(file) for file in files if not source.skips_file(file)]:
        listed = ", ".join(map(repr, names[:10])) + f", … ({len(names)} files)" * (len(names) > 10)
        skips = f", or leave them out with --skip {names[0]}" * ("--skip" in reader.takes)
        raise FormatError(
            f"{path} is read as {reader.name}, and {listed} would be left out: see `gids convert --list` "
            f"for the names of files; or move them to another directory{skips}"
        )


def file_stem(path: Path) -> str:
    """The name of a table: of its file, or of the directory of its files, without the suffix."""
    suffix = next((s for s in _TABLE_SUFFIXES if path.name.endswith(s)), "")
    return path.name.removesuffix(suffix)


def table_files(path: Path) -> list[Path]:
    """The files of a table: the file itself, or those in the directory, at any depth, by the numbers in their
    names. Not those that Spark and pyarrow leave out, below names that begin with _."""
    files = [f for f in (data_files(path) if path.is_dir() else [path]) if f.name.endswith(_TABLE_SUFFIXES)]
    names = {file: str(file.relative_to(path)) for file in files}
    if part := next((file for file in files if re.search("=.*/", names[file])), None):
        raise FormatError(
            f"{part} is in a folder KEY=VALUE, which stands for a column that gids does not read: write the "
            "table again with the column in the files, such as with pyarrow.dataset.write_dataset"
        )
    return sorted((file for file in files if not re.match(r"(.*/)?_", names[file])), key=_order)


def _order(path: Path) -> list[tuple[str, int]]:
    """The words of a path, and the number behind each (-1: none). The digits of a UUID are letters."""
    name = _UUID.sub(lambda uuid: re.sub(r"\d", lambda digit: chr(ord(digit[0]) + 64), uuid[0]), str(path))
    pieces = _NUMBER.split(name)
    return [(word, int(number)) for word, number in zip(pieces[::2], [*pieces[1::2], "-1"], strict=True)]


def check_order(files: Sequence[Path]) -> None:
    """Raise FormatError if the numbers in the names of the parts of a table do not give their order."""
    for first, second in pairwise(files):
        words = zip(_order(first), _order(second), strict=False)
        if next((a[0] != b[0] for a, b in words if a != b), True):
            raise FormatError(
                f"{first} and {second}: no numbers in these names give the order of the parts, in which "
                "their rows are numbered: call them part-0, part-1, …, or give the table of nodes a column "
                "of ids, and choose it with --id-column"
            )


def tables_in(path: Path) -> tuple[Tables, Tables]:
    """The tables of nodes, nodes/TYPE.* or nodes.*; and of edges, edges.* or edges/SRC.RELATION.DST.*

    nodes/ and edges/ may also have the parts of one table. Raises FormatError if there are two of a name.
    """
    alone, alone_edges = _tables(path, "nodes", "edges"), ".".join(RELATION)
    nodes, edges = _tables(path / "nodes"), _tables(path / "edges")
    if not any(map(_TYPED.fullmatch, edges)):
        nodes, edges = _joined(path / "nodes", nodes, NODE), _joined(path / "edges", edges, alone_edges)
    edges = {alone_edges: alone["edges"]} if "edges" in alone else edges
    return nodes or ({NODE: alone["nodes"]} if "nodes" in alone else {}), edges


def _joined(folder: Path, tables: Tables, name: str) -> Tables:
    """The tables in nodes/ or edges/. name: of the only one, if they are its parts."""
    return {name: table_files(folder)} if tables and all(map(_PART.match, tables)) else tables


def _tables(folder: Path, *names: str) -> Tables:
    """name -> files, of the tables in a directory: of each file and each directory of files; or of those with
    these names only."""
    tables: Tables = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = file_stem(path)
        if names and (name not in names or (path.is_dir() and path.name == name)):
            continue
        if not (files := table_files(path)) or name.startswith("."):
            continue
        if name in tables:
            raise FormatError(f"{tables[name][0]} and {files[0]} are both the table {name!r}: keep one")
        tables[name] = files
    return tables
