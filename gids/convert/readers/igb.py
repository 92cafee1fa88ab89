"""Reads IGB and IGBH as downloaded: processed/TYPE/node_feat.npy and processed/A__REL__B/edge_index.npy.

Edges have shape (E, 2). In the large and full sizes, the .npy files of features and labels are raw float32
without a header.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from gids.convert.array_files import is_npy, open_numbers, open_raw
from gids.convert.edges import count_by_edges, edge_pairs
from gids.convert.labels import normalised
from gids.convert.source import Choices, Reader, Source, folders_in
from gids.convert.stream_rows import column_of, derived
from gids.errors import FormatError
from gids.store.names import SPLITS, Relation
from gids.store.rows import GeneratedRows, Rows

_DIM = 1024  # of the files without a header
_LABELLED = {"node_label_19": 227_130_858, "node_label_2K": 157_675_969}  # number of labelled papers in full
_FULL_PAPERS = 269_346_174


def _root(path: Path) -> Path:
    return path / "processed" if (path / "processed").is_dir() else path


def _recognises(path: Path) -> bool:
    root = _root(path)
    return any(root.glob("paper/node_label_*.npy")) and any(root.glob("*__*__*/edge_index.npy"))


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    root, source = _root(path), Source()
    edges: dict[Relation, Rows] = {}
    for folder in folders_in(root):
        if len(names := folder.name.split("__")) == 3:
            edges[names[0], names[1], names[2]] = _array(source.uses(folder / "edge_index.npy"))
        else:
            _read_nodes(folder, choices, source)
    ends = []
    for relation, rows in edges.items():
        if len(rows.shape) != 2 or rows.shape[1] != 2:
            raise FormatError(f"edge_index of {relation} has shape {rows.shape}; in IGB it must be (E, 2)")
        ends += [(relation[0], column_of(rows, 0)), (relation[2], column_of(rows, 1))]
    count_by_edges(source, ends)
    for relation, rows in edges.items():
        source.graphs[relation] = edge_pairs(rows, f"edge_index of {relation}", **source.ends(relation))
    source.notes.append("IGB's own loader gives every paper a self-loop: use --self-loops for the same")
    return source


def _read_nodes(folder: Path, choices: Choices, source: Source) -> None:
    labels = sorted(folder.glob("node_label_*.npy"))
    source.used.update(folder.glob("*.npy"))
    if labels:
        chosen = _chosen(labels, choices)
        rows = _array(chosen, raw_shape=(-1,))
        count = rows.shape[0]
        labelled = _LABELLED.get(chosen.stem, count) if count == _FULL_PAPERS else count
        source.add_labels(folder.name, _classes(rows, labelled), str(chosen))
        source.splits[folder.name] = _split(labelled)
        for other in labels:
            if other != chosen:
                source.leave_out(other.name, f"use --labels {other.stem} to take it instead of {chosen.stem}")
    for file in sorted({*folder.glob("*.npy")}.difference(labels)):
        if file.stem == "node_feat":
            source.add_node_table(folder.name, "feat", _array(file), str(file))
        else:
            source.leave_out(f"{file.name} of {folder.name!r}", "not an array of the graph")


def _chosen(labels: list[Path], choices: Choices) -> Path:
    if choices.labels is None:
        return labels[0]
    for path in labels:
        if choices.labels in (path.stem, path.name, path.stem.removeprefix("node_label_")):
            return path
    raise FormatError(f"--labels {choices.labels}: unknown; choose {', '.join(p.stem for p in labels)}")


def _array(file: Path, raw_shape: tuple[int, ...] = (-1, _DIM)) -> Rows:
    """The rows of a file with a header, or of raw_shape without one."""
    return open_numbers(file) if is_npy(file) else open_raw(file, "float32", raw_shape)


def _classes(rows: Rows, labelled: int) -> Rows:
    """int64 classes; -1 for the unlabelled papers of the full size, whose labels have no meaning."""

    def known(classes: torch.Tensor, first: int) -> torch.Tensor:
        classes[max(0, labelled - first) :] = -1
        return classes

    return derived(normalised(rows, are_classes=True), known, torch.int64)


def _split(labelled: int) -> dict[str, Rows]:
    """The split of IGB's loader: the first 60 % of the labelled nodes, the next 20 %, the rest."""
    train, val = int(labelled * 0.6), int(labelled * 0.2)
    bounds = pairwise((0, train, train + val, labelled))
    return {split: _numbers(*ends) for split, ends in zip(SPLITS, bounds, strict=True)}


def _numbers(first: int, stop: int) -> Rows:
    def fill(start: int, out: torch.Tensor) -> None:
        torch.arange(first + start, first + start + len(out), out=out)

    return GeneratedRows((stop - first,), torch.int64, fill)


_LAYOUT = """\
processed/TYPE/node_feat.npy (table feat; raw float32 of 1024 columns in the large and full sizes),
processed/paper/node_label_19.npy or node_label_2K.npy (--labels 2K), processed/A__REL__B/edge_index.npy,
(E, 2). Splits are the same as in IGB's loader: 60, 20, 20 % in order. Add its self-loops with --self-loops.
To sample papers from their authors, as its loader does with all_in_edges, use --reverse-edges."""

READER = Reader(
    "igb",
    "IGB or IGBH (tiny ... full): the folder of a size, or its processed/",
    _LAYOUT,
    _recognises,
    _read,
    takes=("--labels",),
    aside=("*/edge_index_cs*",),
)
