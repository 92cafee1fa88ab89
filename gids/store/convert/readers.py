"""Reads a source's structure: a .npy or raw file, a .npz file, a directory. Called by `gids convert`.

DGL graph files are read by DGL itself, in the command; `dgl_graph.py` takes the graph.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from gids.errors import FormatError
from gids.store.convert.array_files import Found, directory_arrays, open_npy, open_npz, open_raw
from gids.store.convert.named import NamedArrays, read_homogeneous
from gids.store.convert.source import Source, TableSource, source_kind
from gids.store.names import NODE, Relation


def read_source(
    path: Path,
    scratch: Path,
    *,
    table: str = "feat",
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Source:
    """What the file or directory at `path` holds; its data is read later.

    scratch: a directory for unpacked .npz members, needed as long as the result. table: KEY or TYPE.KEY of a
    single array. dtype, shape: of raw binary. Raises FormatError, FileNotFoundError.
    """
    kind = source_kind(path)
    source = Source()
    if kind == "npy":
        _read_single(open_npy(path), path, table, source)
    elif kind == "raw":
        _read_single(Found(open_raw(path, dtype, shape)), path, table, source)
    elif kind == "npz":
        read_homogeneous(NamedArrays(path.name, open_npz(path, scratch).items(), source), source)
    elif kind == "directory":
        _read_directory(path, scratch, dtype, shape, source)
    else:
        raise FormatError(f"{path} is a DGL graph file, which DGL itself must open")
    if not source.tables:
        raise FormatError(f"{path} holds no features: nothing to convert")
    return source


def _read_single(found: Found, path: Path, table: str, source: Source) -> None:
    if found.rows is None:
        raise FormatError(f"{path} is {found.why}")
    if not found.rows.shape:
        raise FormatError(f"{path} is a single number; its first dimension must be rows")
    ntype, _, key = table.rpartition(".")
    source.add_nodes(ntype or NODE, found.rows.shape[0], path.name)
    source.tables.append(TableSource("node", ntype or NODE, key, found.rows))


def _read_directory(
    path: Path, scratch: Path, dtype: str | None, shape: tuple[int, ...] | None, source: Source
) -> None:
    def arrays(folder: Path) -> NamedArrays:
        return NamedArrays(str(folder), directory_arrays(folder, scratch, dtype, shape), source)

    nodes, edges = path / "nodes", path / "edges"
    if not nodes.is_dir():
        read_homogeneous(arrays(path), source)
        return
    arrays(path).reject_all()
    relations = [(folder, _relation(folder)) for folder in _folders(edges)] if edges.is_dir() else []
    edge_arrays = [(arrays(folder), relation) for folder, relation in relations]
    for found, relation in edge_arrays:
        found.learn_destinations(relation)
    for folder in _folders(nodes):
        arrays(folder).read_nodes(unquote(folder.name))
    for found, relation in edge_arrays:
        found.read_graph(relation)
        found.read_edge_tables(relation)


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir())


def _relation(folder: Path) -> Relation:
    names = [unquote(n) for n in folder.name.split(".")]
    if len(names) != 3 or not all(names):
        raise FormatError(
            f"{folder} must be called SOURCE.RELATION.DESTINATION (%2E stands for a dot in a name)"
        )
    return names[0], names[1], names[2]
