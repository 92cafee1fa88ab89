"""Reads a .npy, .npz or raw file, or a directory of them. Names give the arrays their meaning."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from gids.convert.array_files import Found, open_npy, open_npz, open_raw
from gids.convert.named import NamedArrays, directory_arrays, read_homogeneous
from gids.convert.readers.reader import Choices, Reader
from gids.convert.source import Source, dotted_relation
from gids.convert.sparse import as_sparse_parts, is_scipy_sparse
from gids.convert.untrusted import open_zip, starts_with
from gids.errors import FormatError
from gids.store.names import NODE

_NAMES = """\
label | labels | y                            labels
train_idx, val_idx | valid_idx, test_idx      splits as node ids; ..._mask: as a mask
num_nodes                                     number of nodes, for a type without features
indptr, indices, edge_ids                     in-edges (CSC)
edge_index                                    edges, (2, E), sources first
edge_KEY                                      table KEY of edges (homogeneous)
attr_data, attr_indices, attr_indptr, attr_shape   features as a CSR matrix: table feat
adj_data, adj_indices, adj_indptr, adj_shape       edges as a CSR matrix, row u lists destinations of u
any other                                     a table of that name, one row per node (edge)"""


_MEANING = {
    "adj_": "square, so it is the graph: row u lists the destinations of u",
    "attr": "not square, so it is table feat",
}


def is_npz(path: Path) -> bool:
    """Whether a file is a zip file with .npy members."""
    if not starts_with(path, b"PK\x03\x04"):
        return False
    try:
        with open_zip(path, "is not a valid .npz file") as archive:
            return any(n.endswith(".npy") for n in archive.namelist())
    except FormatError:
        return path.suffix != ".pt"  # the reader reports the fault


def _read_npy(path: Path, scratch: Path, choices: Choices) -> Source:
    return _single(open_npy(path), path, choices.table)


def _read_raw(path: Path, scratch: Path, choices: Choices) -> Source:
    return _single(Found(open_raw(path, choices.dtype, choices.shape)), path, choices.table)


def _read_npz(path: Path, scratch: Path, choices: Choices) -> Source:
    source = Source(skip=choices.skip)
    found = open_npz(path, scratch)
    if is_scipy_sparse(found):
        found = as_sparse_parts(path, found)
        source.notes.append(f"{path.name} is a SciPy sparse matrix, {_MEANING[next(iter(found))[:4]]}")
    read_homogeneous(NamedArrays(path.name, found.items(), source), source)
    return source


def _single(found: Found, path: Path, table: str) -> Source:
    source = Source()
    if found.rows is None:
        raise FormatError(f"{path} is {found.why}")
    ntype, _, key = table.rpartition(".")
    source.add_node_table(ntype or NODE, key, found.rows, str(path))
    return source


def _read_directory(path: Path, scratch: Path, choices: Choices) -> Source:
    source = Source(skip=choices.skip)
    if choices.shape is not None and not any(path.rglob("*.bin")):
        raise FormatError(f"--shape is for raw binary, but {path} has no .bin file")

    def arrays(folder: Path) -> NamedArrays:
        found = directory_arrays(folder, scratch, choices.dtype, choices.shape)
        return NamedArrays(str(folder), found, source)

    nodes, edges = path / "nodes", path / "edges"
    if not nodes.is_dir():
        read_homogeneous(arrays(path), source)
        return source
    arrays(path).reject_all()
    relations = [(f, dotted_relation(f.name, f)) for f in _folders(edges)] if edges.is_dir() else []
    edge_arrays = [(arrays(folder), relation) for folder, relation in relations]
    for found, relation in edge_arrays:
        found.learn_destinations(relation)
    for folder in _folders(nodes):
        arrays(folder).read_nodes(unquote(folder.name))
    for found, relation in edge_arrays:
        found.read_graph(relation)
        found.read_edge_tables(relation)
    return source


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir())


NPY = Reader(
    "npy",
    "one array in a .npy file",
    "One row per node; --table [TYPE.]KEY is its name (default: feat of node type _N). C or Fortran order,\n"
    "either byte order.",
    lambda path: starts_with(path, b"\x93NUMPY"),
    _read_npy,
    takes=("--table",),
)
NPZ = Reader(
    "npz",
    "a graph of one type in a .npz file",
    "Members by name (np.savez or np.savez_compressed), as the files of `directory`.",
    is_npz,
    _read_npz,
    takes=("--skip",),
)
DIRECTORY = Reader(
    "directory",
    "a directory of .npy, .npz and .bin files",
    "Files by name, for a graph of one type:\n" + _NAMES + "\n"
    "Several types: such files in nodes/TYPE/ and edges/SOURCE.RELATION.DESTINATION/. Write %2E for a dot\n"
    "in a name.",
    Path.is_dir,
    _read_directory,
    takes=("--shape", "--skip"),
)
RAW = Reader(
    "raw",
    "one array in a raw binary file",
    "--dtype float32 --shape ROWS,DIM (-1: as many as the file has); --table is its name.",
    Path.is_file,
    _read_raw,
    is_raw=lambda _: True,
    takes=("--table", "--shape"),
)
