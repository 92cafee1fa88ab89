"""Reads MAG240M of OGB-LSC as downloaded: meta.pt, split_dict.pt and processed/ with .npy files."""

from __future__ import annotations

from pathlib import Path

from gids.convert.array_files import open_numbers
from gids.convert.edges import edge_rows
from gids.convert.labels import normalised
from gids.convert.readers.ogb import read_split_dict
from gids.convert.source import Choices, Reader, Source, folders_in, split_relation
from gids.convert.torch_file import load_torch_dict

_FOLDER = "mag240m_kddcup2021"
_SPLITS = {"train": "train", "valid": "val", "test": "test", "test-whole": "test"}


def _root(path: Path) -> Path:
    """The dataset's own folder, which may be in the given folder."""
    return path / _FOLDER if (path / _FOLDER).is_dir() else path


def _recognises(path: Path) -> bool:
    root = _root(path)
    return (root / "meta.pt").is_file() and (root / "processed").is_dir()


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    root, source = _root(path), Source()
    counts = load_torch_dict(source.uses(root / "meta.pt"), "numbers of nodes")
    folders = folders_in(root / "processed")
    relations = {f: split_relation(f.name, "___", f) for f in folders if "___" in f.name}
    types = {f.name for f in folders if f not in relations}
    for ntype in sorted(types.union(*(relation[::2] for relation in relations.values()))):
        source.add_nodes(ntype, counts.get(ntype), f"{ntype!r} of {root / 'meta.pt'}")
    for folder in folders:
        if relation := relations.get(folder):
            file = source.uses(folder / "edge_index.npy")
            source.graphs[relation] = edge_rows(open_numbers(file), str(file), **source.ends(relation))
        else:
            _read_nodes(folder, source)
    if (root / "split_dict.pt").is_file():
        read_split_dict(root / "split_dict.pt", source, _SPLITS, "paper")
    return source


def _read_nodes(folder: Path, source: Source) -> None:
    for file in sorted(folder.glob("*.npy")):
        rows, key = open_numbers(source.uses(file)), file.stem.removeprefix("node_")
        if key == "label":
            source.add_labels(folder.name, normalised(rows, are_classes=True), str(file))
        else:
            source.add_node_table(folder.name, key, rows, str(file))


_LAYOUT = """\
meta.pt (numbers of nodes), split_dict.pt (train, valid, test), processed/paper/node_feat.npy (float16),
node_label.npy (classes, -1 for none), node_year.npy (table year), and
processed/SOURCE___RELATION___DESTINATION/edge_index.npy, (2, E). Authors and institutions have no
features."""

READER = Reader(
    "mag240m",
    "MAG240M of OGB-LSC, as unzipped (the folder mag240m_kddcup2021, or the folder that contains it)",
    _LAYOUT,
    _recognises,
    _read,
    aside=("*mapping/*", "*RELEASE*.txt", "*.zip"),
)
