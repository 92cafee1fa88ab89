"""The formats that `gids convert` takes. Each file here reads one; `READERS` lists them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from gids.convert.edges import is_edge_array
from gids.convert.readers import (
    arrays,
    dataset,
    dgl_graph,
    edge_list,
    graphbolt,
    igb,
    mag240m,
    matlab,
    ogb,
    pyg,
    tables,
)
from gids.convert.source import Choices, Reader, Source
from gids.convert.table_files import data_files, refuse_unused
from gids.errors import FormatError

__all__ = ["READERS", "Choices", "Reader", "find_reader", "open_source"]

READERS = (
    dataset.READER,
    ogb.READER,
    mag240m.READER,
    igb.READER,
    dgl_graph.READER,
    pyg.READER,
    graphbolt.READER,
    tables.PARQUET,
    tables.CSV,
    matlab.READER,
    edge_list.READER,
    arrays.NPY,
    arrays.NPZ,
    arrays.DIRECTORY,
    arrays.RAW,
)
_BY_NAMES = (tables.PARQUET, tables.CSV, edge_list.READER)  # of files in a directory, also of other formats
_GENERAL = (arrays.DIRECTORY, arrays.RAW)  # read paths that no other reader recognises


def find_reader(
    path: Path, name: str | None = None, others: Sequence[Path] = (), *, by_column: bool = False
) -> Reader:
    """The reader with that name, or the only one that recognises the path. others: more files of tables.
    by_column: whether the user chose columns of tables.

    Raises FileNotFoundError, and FormatError for an unknown name or a path that several readers recognise.
    """
    for source in (path, *others):
        if not source.exists():
            advice = "" if source.suffix else f"; `gids generate {source} --nodes 50000` makes a graph to try"
            raise FileNotFoundError(f"no such file or directory: {source}{advice}")
    if name is None and (others or (by_column and tables.is_table(path))):
        return tables.PARQUET
    if dataset.READER.recognises(path) and name in (None, dataset.READER.name):
        return dataset.READER
    if name is not None:
        if named := [reader for reader in READERS if reader.name == name]:
            return named[0]
        raise FormatError(f"unknown format {name!r}; choose {_names(READERS)} (see `gids convert --list`)")
    readers = [r for r in READERS if r not in _GENERAL and r.recognises(path)]
    if path.is_dir():
        readers = [reader for reader in readers if reader not in _BY_NAMES] or readers
    if len(readers) > 1:
        raise FormatError(f"{path} may be {_names(readers)}: choose one with --from NAME")
    return readers[0] if readers else arrays.DIRECTORY if path.is_dir() else arrays.RAW


def _names(readers: tuple[Reader, ...] | list[Reader]) -> str:
    return ", ".join(r.name for r in readers)


def open_source(reader: Reader, path: Path, scratch: Path, choices: Choices) -> Source:
    """Read the path with a reader. Raises FormatError, also if the path holds nothing to convert."""
    for option in choices.changed():
        if option not in reader.takes:
            takers = ", ".join(r.name for r in READERS if option in r.takes)
            raise FormatError(
                f"{option} has no effect: {path} is read as {reader.name}, and the option is for {takers}"
            )
    roots = [*filter(Path.is_dir, (path, *choices.others))]
    for root in roots:
        data_files(root)  # which refuses links to missing files
    source = reader.read(path, scratch, choices)
    if source.lost:
        skips = " ".join(f"--skip {shlex.quote(name)}" for name in source.lost)
        raise FormatError(
            f"{path} has data that cannot be converted; correct it, or leave it out with {skips}: "
            + "; ".join(source.lost.values())
        )
    if source.stored is None:
        for root in roots:
            refuse_unused(root, source, reader)
    if unknown := [name for name in choices.skip if name not in source.skipped]:
        raise FormatError(f"--skip {unknown[0]}: {path} has no array of that name")
    for table in source.tables if source.stored is None else ():
        if table.kind == "edge" and table.type not in source.graphs and is_edge_array(table.rows):
            cure = "call this array edge_index, or leave it out with --skip"
            raise FormatError(f"{path} has no graph for table {table.name!r}, which may be its edges: {cure}")
    if source.stored is None and not source.tables and not source.graphs:
        raise FormatError("; ".join([f"{path} has no features and no graph", *source.warnings]))
    return source
