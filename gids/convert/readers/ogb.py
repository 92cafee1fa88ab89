"""Reads OGB node property datasets as downloaded: raw/ and split/ of ogbn-arxiv, -mag, -papers100M, …

The graph is in raw/data.npz and raw/node-label.npz, or in raw/*.csv.gz, or in raw/relations/ if it has
several types. Reads .npz files as streams, and parses text to a scratch file first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from gids.convert.array_files import array_of, open_npz
from gids.convert.edges import edge_pairs, edge_rows
from gids.convert.labels import find_times, normalised
from gids.convert.readers.arrays import NamedArrays
from gids.convert.source import Choices, Reader, Source, described, folders_in, numbers
from gids.convert.source_files import reading, shown
from gids.convert.stream_rows import column_of
from gids.convert.text_table import open_text, read_matrix, read_pairs
from gids.convert.torch_file import load_torch_dict
from gids.errors import FormatError
from gids.store.dtypes import is_whole
from gids.store.names import NODE, RELATION, Relation, check_name
from gids.store.rows import Rows

_PARTS = {"train": "train", "valid": "val", "test": "test"}
_MIRRORED = ("ogbn_products", "ogbn_proteins", "products", "proteinfunc")  # OGB's loader adds reverse edges


def _recognises(path: Path) -> bool:
    return any((path / "raw" / name).is_file() for name in _FORMS)


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    source = Source(skip=choices.skip)
    raw = path / "raw"
    read = next((read for name, read in _FORMS.items() if (raw / name).is_file()), None)
    if read is None:
        raise FormatError(f"{path} is not an OGB dataset: raw/ has none of {', '.join(_FORMS)}")
    read(raw, scratch, source)
    _read_splits(path / "split", scratch, source)
    find_times(source, ("year", "time"))  # node_year, edge_year, edge_time
    if path.name.startswith(_MIRRORED):
        source.notes.append(
            "this dataset has one direction of each edge; --reverse-edges adds the other (as OGB does)"
        )
    return source


def _read_binary(raw: Path, scratch: Path, source: Source) -> None:
    file, labels = raw / "data.npz", raw / "node-label.npz"
    arrays = NamedArrays(str(file), open_npz(source.uses(file), scratch).items(), source)
    taken = arrays.take_all(("edge_index", "num_nodes_list", "num_edges_list"))
    if not taken:
        raise FormatError(f"{file} lacks edge_index")
    count = _only(taken[1], file)
    source.add_nodes(NODE, count, "num_nodes_list")
    edges = edge_rows(taken[0], f"edge_index of {file}", num_src=count, num_dst=count)
    _check_count(edges.count, _only(taken[2], file), "edge_index", "num_edges_list")
    source.graphs[RELATION] = edges
    for name, rows in arrays.rest():
        if name.startswith("edge_"):
            source.add_edge_table(RELATION, name.removeprefix("edge_"), rows)
        else:
            source.add_node_table(NODE, name.removeprefix("node_"), rows, arrays.describe(name))
    if labels.is_file():
        members = NamedArrays(str(labels), open_npz(source.uses(labels), scratch).items(), source)
        if (node_label := members.take("node_label")) is None:
            raise FormatError(f"{labels} lacks an array node_label")
        _add_labels(node_label, NODE, labels, source)


def _read_text(raw: Path, scratch: Path, source: Source) -> None:
    counted = raw / "num-node-list.csv.gz"
    source.add_nodes(NODE, _only(read_matrix(source.uses(counted), scratch), counted), counted.name)
    _read_edges(raw, RELATION, scratch, source)
    _read_nodes(raw, NODE, scratch, source)


def _read_types(raw: Path, scratch: Path, source: Source) -> None:
    counted = raw / "num-node-dict.csv.gz"
    names, *counts = _words(counted) or [[]]
    if len(counts) != 1 or len(counts[0]) != len(names):
        raise FormatError(f"{counted} is for {len(counts)} graphs; it must be for one")
    for ntype, count in zip(names, counts[0], strict=True):
        number = int(count) if count.isdecimal() else count
        source.add_nodes(ntype, number, f"{counted}, for {shown(ntype)},")
    listed = raw / "triplet-type-list.csv.gz"
    for relation in sorted(_words(listed)):
        if len(relation) != 3 or tuple(relation) in source.graphs:
            raise FormatError(f"{listed} has {shown(relation)}; it must be a triplet that is listed once")
        src, name, dst = relation
        _read_edges(raw / "relations" / "___".join(relation), (src, name, dst), scratch, source)
    if not source.graphs:
        raise FormatError(f"{listed} lists no relation; is it truncated?")
    for ntype in names:
        for kind in ("node-feat", "node-label"):
            _read_nodes(raw / kind / ntype, ntype, scratch, source)


def _read_nodes(folder: Path, ntype: str, scratch: Path, source: Source) -> None:
    for file in _files(folder, "node"):
        rows = read_matrix(source.uses(file), scratch)
        if _key(file) == "label":
            _add_labels(rows, ntype, file, source)
        else:
            source.add_node_table(ntype, _key(file), rows, str(file))


def _words(path: Path) -> list[list[str]]:
    """The comma-separated fields of each line of a small text file."""
    with reading(path), open_text(path) as file:
        return [line.strip().split(",") for line in file if line.strip()]


def _read_edges(folder: Path, relation: Relation, scratch: Path, source: Source) -> None:
    edges, counted = folder / "edge.csv.gz", folder / "num-edge-list.csv.gz"
    pairs = read_pairs(source.uses(edges), scratch)
    count = _only(read_matrix(source.uses(counted), scratch), counted)
    _check_count(pairs.shape[0], count, str(edges), counted.name)
    source.graphs[relation] = edge_pairs(pairs, str(edges), **source.ends(relation))
    for file in _files(folder, "edge"):
        source.add_edge_table(relation, _key(file), read_matrix(source.uses(file), scratch))


def _files(folder: Path, kind: str) -> list[Path]:
    """The files of features of nodes or edges: node-feat, node_year, edge-feat, edge_reltype, …"""
    return sorted(folder.glob(f"{kind}[-_]*.csv.gz"))


def _key(file: Path) -> str:
    return file.name.removesuffix(".csv.gz")[len("node-") :]


def _add_labels(rows: Rows, ntype: str, file: Path, source: Source) -> None:
    """Labels of one task become classes. Labels in several columns (ogbn-proteins) are not changed."""
    source.add_labels(ntype, normalised(rows, are_classes=True), str(file))


def _read_splits(folder: Path, scratch: Path, source: Source) -> None:
    kinds = folders_in(folder)
    if len(kinds) > 1:
        raise FormatError(f"{folder} has the splits {[k.name for k in kinds]}; keep one of them")
    for kind in kinds:
        if (kind / "split_dict.pt").is_file():
            read_split_dict(kind / "split_dict.pt", source)
            continue
        for ntype, part in product(source.nodes, _PARTS):
            file = kind / ntype / f"{part}.csv.gz"
            if ntype == NODE and not file.parent.is_dir():
                file = kind / file.name
            if file.is_file():
                ids = read_matrix(source.uses(file), scratch)
                if ids.shape[1] > 1 or not is_whole(ids.dtype):
                    raise FormatError(f"{file} is {described(ids)}; ids must be one column of whole numbers")
                source.add_split(ntype, _PARTS[part], column_of(ids, 0))


def read_split_dict(
    file: Path, source: Source, parts: Mapping[str, str] = _PARTS, default: str = NODE
) -> None:
    """Read splits of one node type, or by node type. parts: name in the file -> split. default: the type."""
    saved = load_torch_dict(source.uses(file), "splits")
    for part, split in parts.items():
        by_type = saved.get(part)
        for ntype, ids in by_type.items() if isinstance(by_type, dict) else [(default, by_type)]:
            if ids is not None and not source.skips(part):
                check_name(ntype, f"a node type of {file}")
                rows = array_of(ids).take(part, file, source)
                if rows is not None:
                    source.add_split(ntype, split, rows)


def _only(counts: Rows, file: Path) -> int:
    """The one number of a list with one entry per graph."""
    if (count := math.prod(counts.shape)) != 1:
        raise FormatError(f"{file} is for {count} graphs; it must be for one")
    return numbers(counts, 1, f"the count in {file}")[0]


def _check_count(count: int, expected: int, what: str, where: str) -> None:
    if count != expected:
        raise FormatError(f"{what} has {count} edges, but {where} gives {expected}")


_FORMS = {"triplet-type-list.csv.gz": _read_types, "data.npz": _read_binary, "edge.csv.gz": _read_text}
_LAYOUT = """\
raw/data.npz and raw/node-label.npz (not unpacked), or raw/*.csv.gz, or raw/relations/ for several types;
split/NAME/*.csv.gz or split_dict.pt. node_feat: table feat; node_year: table year, and the times of
nodes; edge_feat: table feat of edges; edge_year, edge_time: tables, and the times of edges; labels:
classes, -1 for none. For ogbn-products and ogbn-proteins, OGB's own loader adds the reverse of every
edge: use --reverse-edges."""

READER = Reader(
    "ogb",
    "an OGB node property dataset (ogbn-arxiv, ogbn-products, ogbn-mag, ogbn-papers100M, ...), as unzipped",
    _LAYOUT,
    _recognises,
    _read,
    takes=("--skip",),
    aside=("RELEASE*.txt", "mapping/*", "processed/*", "raw/num-*", "raw/*-list.csv.gz", "*/nodetype-has-*"),
)
