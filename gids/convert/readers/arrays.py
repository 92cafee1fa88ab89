"""Reads a .npy, .npz or raw file, or a directory of them. Names give the arrays their meaning: features,
graph, labels, splits. A name that is not known is the name of a table.

A source of one type has all names in one folder or file; another has a folder per node type and relation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from gids.convert.array_files import (
    SourceArray,
    SparseRows,
    is_npy,
    open_hdf5,
    open_npy,
    open_npz,
    open_raw,
    open_safetensors,
    open_torch,
)
from gids.convert.edges import add_weights, edge_rows
from gids.convert.source import (
    IDS,
    LABELS,
    MASKS,
    Choices,
    InEdges,
    Reader,
    Source,
    dotted_relation,
    folders_in,
    numbers,
    once_each,
    row_count,
)
from gids.convert.source_files import open_zip, starts_with
from gids.errors import FormatError
from gids.store.names import NODE, RELATION, Relation, check_name, describe_type
from gids.store.rows import Rows
from gids.write.edges import out_edges

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
_NO_HEADER = "without the header of .npy; write it with np.save or np.lib.format.open_memmap"
Opener = Callable[[Path, Path], Mapping[str, SourceArray]]
_OPEN: dict[str, Opener] = {
    ".npy": lambda p, _: {p.stem: open_npy(p) if is_npy(p) else SourceArray(None, _NO_HEADER, True)},
    ".npz": open_npz,
    ".pt": lambda path, _: open_torch(path),
    ".h5": lambda path, _: open_hdf5(path),
    ".hdf5": lambda path, _: open_hdf5(path),
    ".safetensors": lambda path, _: open_safetensors(path),
}


def _in_folder(folder: Path, root: Path, scratch: Path, source: Source) -> Iterator[tuple[str, SourceArray]]:
    """(name, array) of each array in the files of a directory, by file name, but of used files."""
    for path in sorted(p for p in folder.glob("[!.]*") if p.suffix in _OPEN and p not in source.used):
        if source.skips_file(path.relative_to(root)) or source.skips(path.name):
            continue
        yield from _OPEN[path.suffix](source.uses(path), scratch).items()


class NamedArrays:
    """The arrays of one file or folder (`where`). Each is taken once."""

    def __init__(self, where: str, arrays: Iterable[tuple[str, SourceArray]], source: Source) -> None:
        self._where, self._source = where, source
        self._arrays: dict[str, Rows] = {}
        for name, array in arrays:
            if name in self._arrays:
                raise FormatError(f"{where} has two arrays {name!r}")
            if source.skips(name):
                continue
            if (rows := array.take(name, where, source)) is not None:
                self._arrays[check_name(name, f"the name of an array of {where}")] = rows

    def split_off(self, belongs: Callable[[str], bool]) -> NamedArrays:
        """Move the arrays whose name belongs to a new NamedArrays."""
        other = NamedArrays(self._where, (), self._source)
        other._arrays = {n: self._arrays.pop(n) for n in list(self._arrays) if belongs(n)}
        return other

    def __len__(self) -> int:
        return len(self._arrays)

    def describe(self, name: str) -> str:
        return f"{name!r} of {self._where}"

    def take(self, *names: str) -> Rows | None:
        """The array with one of these names, or None. Raises FormatError if there are two."""
        known = [n for n in names if n in self._arrays]
        if len(known) > 1:
            raise FormatError(
                f"{self._where} has both {known[0]!r} and {known[1]!r}, which mean the same: keep one"
            )
        return self._arrays.pop(known[0]) if known else None

    def take_all(self, names: tuple[str, ...]) -> list[Rows]:
        """All arrays with these names, or none. Raises FormatError if only some are missing."""
        missing = [n for n in names if n not in self._arrays]
        if 0 < len(missing) < len(names):
            raise FormatError(
                f"{self._where} has {', '.join(set(names) - set(missing))} but lacks {', '.join(missing)}"
            )
        return [] if missing else [self._arrays.pop(n) for n in names]

    def rest(self) -> list[tuple[str, Rows]]:
        """Take all arrays that are left."""
        taken, self._arrays = list(self._arrays.items()), {}
        return taken

    def read_nodes(self, ntype: str) -> None:
        """Take the number, labels and splits of a node type; all other arrays are its features."""
        if (count := self.take("num_nodes")) is not None:
            what = self.describe("num_nodes")
            self._source.add_nodes(ntype, numbers(count, 1, what)[0], what)
        if (labels := self.take(*LABELS)) is not None:
            if ntype in self._source.labels:
                raise FormatError(f"{self.describe('label')} is a second array of labels: keep one")
            self._source.add_labels(ntype, labels, self.describe("label"))
        order = [*IDS, *MASKS]  # of what is written to a dataset
        rest = sorted(self.rest(), key=lambda named: order.index(named[0]) if named[0] in order else -1)
        for name, rows in rest:
            self._source.add_node_array(ntype, name, rows, self.describe(name), name, may_be_ids=True)

    def read_sparse_features(self, ntype: str) -> None:
        """Take attr_data, attr_indices, attr_indptr, attr_shape: a CSR matrix of features, table `feat`."""
        if parts := self.take_all(("attr_data", "attr_indices", "attr_indptr", "attr_shape")):
            what = self.describe("attr_shape")
            row_count, width = numbers(parts[3], 2, what)
            rows = SparseRows(*parts[:3], shape=(row_count, width))
            self._source.add_node_table(ntype, "feat", rows, what)

    def read_sparse_graph(self, relation: Relation) -> None:
        """Take adj_*: a CSR matrix, row u lists the destinations of u. Weights other than 1 are a table."""
        if parts := self.take_all(("adj_data", "adj_indices", "adj_indptr", "adj_shape")):
            weights, indices, indptr, shape = parts
            what = self.describe("adj_shape")
            counts = numbers(shape, 2, what)
            if indptr.shape != (counts[0] + 1,):
                raise FormatError(
                    f"{self.describe('adj_indptr')} has shape {indptr.shape}; it must have {counts[0] + 1} "
                    "entries"
                )
            for ntype, count in zip(relation[::2], counts, strict=True):
                self._source.add_nodes(ntype, count, what)
            self._source.graphs[relation] = out_edges(indptr, indices, num_dst=counts[1])
            add_weights(self._source, relation, weights)

    def learn_destinations(self, relation: Relation) -> None:
        """Set the number of destination nodes from indptr."""
        if (indptr := self._arrays.get("indptr")) is not None:
            what = self.describe("indptr")
            self._source.add_nodes(relation[2], row_count(indptr, what) - 1, what)

    def read_graph(self, relation: Relation, prefix: str = "") -> None:
        """Take the graph of a relation, if there is one: indptr, indices (CSC) or edge_index (COO).

        All arrays that are left are tables of edges. prefix: removed from their names.
        """
        edge_index, edge_ids = self.take("edge_index"), self.take("edge_ids")
        in_edges = self.take_all(("indptr", "indices"))
        if in_edges and edge_index is not None:
            raise FormatError(f"{self._where} has both edge_index and indptr: keep one of the two graphs")
        if edge_ids is not None and not in_edges:
            raise FormatError(f"{self._where} has edge_ids but no indptr and indices")
        if relation in self._source.graphs and (in_edges or edge_index is not None):
            raise FormatError(f"{self._where} has a second graph {describe_type(relation)}: keep one")
        if in_edges:
            self._source.graphs[relation] = InEdges(in_edges[0], in_edges[1], edge_ids)
        elif edge_index is not None:
            what, ends = self.describe("edge_index"), self._source.ends(relation)
            self._source.graphs[relation] = edge_rows(edge_index, what, **ends)
        for name, rows in self.rest():
            self._source.add_edge_table(relation, name.removeprefix(prefix), rows)


@dataclass(frozen=True)
class ArraysByType:
    """The arrays of node types and of relations. prefix: removed from the names of tables of edges."""

    nodes: dict[str, NamedArrays]
    edges: dict[Relation, NamedArrays]
    prefix: str = ""

    def read_nodes(self) -> None:
        """Read everything but the edges."""
        for relation, arrays in self.edges.items():
            arrays.read_sparse_graph(relation)
            arrays.learn_destinations(relation)
        for ntype, arrays in self.nodes.items():
            arrays.read_sparse_features(ntype)
            arrays.read_nodes(ntype)

    def read(self, source: Source) -> Source:
        """Read everything."""
        self.read_nodes()
        self.read_edges()
        return source

    def read_edges(self) -> None:
        for relation, arrays in self.edges.items():
            arrays.read_graph(relation, self.prefix)


def _of_one_type(arrays: NamedArrays) -> ArraysByType:
    """All arrays of a graph with one node type and one relation. `edge_KEY` is a feature of edges."""
    edges = arrays.split_off(lambda n: n in ("indptr", "indices") or n.startswith(("edge_", "adj_")))
    return ArraysByType({NODE: arrays} if arrays else {}, {RELATION: edges} if edges else {}, "edge_")


def directory_arrays(path: Path, scratch: Path, source: Source, *, has_types: bool | None) -> ArraysByType:
    """The arrays in nodes/TYPE/ and edges/SOURCE.RELATION.DESTINATION/, or in the directory itself, but in
    files that are used. has_types: which of both; None: the former if there are any."""

    def arrays(folder: Path) -> NamedArrays:
        return NamedArrays(str(folder), _in_folder(folder, path, scratch, source), source)

    of_nodes, of_edges = (
        [folder for folder in folders_in(path / kind) if any(p.suffix in _OPEN for p in folder.iterdir())]
        for kind in ("nodes", "edges")
    )
    if has_types or (has_types is None and (of_nodes or of_edges)):
        return ArraysByType(
            once_each((unquote(folder.name), arrays(folder)) for folder in of_nodes),
            once_each((dotted_relation(folder.name, folder), arrays(folder)) for folder in of_edges),
        )
    return _of_one_type(arrays(path))


def is_npz(path: Path) -> bool:
    """Whether a file is a zip file with .npy members."""
    if not starts_with(path, b"PK\x03\x04"):
        return False
    try:
        with open_zip(path) as archive:
            return any(n.endswith(".npy") for n in archive.namelist())
    except FormatError:
        return path.suffix != ".pt"  # the reader reports the fault


def _read_npy(path: Path, scratch: Path, choices: Choices) -> Source:
    return single(open_npy(path), path, choices.table)


def _read_raw(path: Path, scratch: Path, choices: Choices) -> Source:
    return single(SourceArray(open_raw(path, choices.dtype, choices.shape)), path, choices.table)


def _opener(path: Path) -> Opener | None:
    """What opens the arrays in a file that has names for them."""
    if starts_with(path, b"\x89HDF\r\n\x1a\n"):
        return _OPEN[".h5"]
    is_safetensors = path.is_file() and path.suffix == ".safetensors"
    return _OPEN[path.suffix] if is_safetensors else open_npz if is_npz(path) else None


def _read_members(path: Path, scratch: Path, choices: Choices) -> Source:
    source = Source(skip=choices.skip)
    members = (_opener(path) or open_npz)(path, scratch)
    return _of_one_type(NamedArrays(path.name, members.items(), source)).read(source)


def single(array: SourceArray, path: Path, table: str) -> Source:
    """A source of one table. Raises FormatError for an array that cannot be one."""
    if array.rows is None:
        raise FormatError(f"{path} is {array.why}")
    source = Source()
    ntype, _, key = table.rpartition(".")
    source.add_node_table(ntype or NODE, key, array.rows, str(path))
    return source


def _read_directory(path: Path, scratch: Path, choices: Choices) -> Source:
    source = Source(skip=choices.skip)
    return directory_arrays(path, scratch, source, has_types=None).read(source)


NPY = Reader(
    "npy",
    "one array in a .npy file",
    "One row per node; --table [TYPE.]KEY is its name (default: feat of node type _N). C or Fortran order.",
    is_npy,
    _read_npy,
    takes=("--table",),
)
NPZ = Reader(
    "npz",
    "a graph of one type in a .npz, HDF5 (.h5) or .safetensors file",
    "Arrays by name, as the files of `directory`. HDF5 needs h5py, .safetensors needs safetensors.",
    lambda path: _opener(path) is not None,
    _read_members,
    takes=("--skip",),
)
DIRECTORY = Reader(
    "directory",
    "a directory of .npy, .npz, .pt, .h5 and .safetensors files",
    "Files, and members of .npz, .h5 and .safetensors, by name, for a graph of one type (a .pt file has one\n"
    "tensor, or a dictionary of tensors):\n" + _NAMES + "\n"
    "Several types: such files in nodes/TYPE/ and edges/SOURCE.RELATION.DESTINATION/. Write %2E for a dot\n"
    "in a name.",
    Path.is_dir,
    _read_directory,
    takes=("--skip",),
)
RAW = Reader(
    "raw",
    "one array in a raw binary file",
    "--dtype float32 --shape ROWS,DIM (-1: as many as the file has); --table is its name.",
    Path.is_file,
    _read_raw,
    takes=("--table", "--shape"),
)
