"""MAG240M of OGB-LSC as downloaded: meta.pt, split_dict.pt and processed/ with .npy files."""

from __future__ import annotations

from pathlib import Path

from gids.convert.array_files import open_npy
from gids.convert.counts import whole_number
from gids.convert.edges import edge_array
from gids.convert.labels import normalised
from gids.convert.readers.reader import Choices, Reader
from gids.convert.source import Source, TableSource
from gids.convert.torch_file import load_torch, value_rows
from gids.errors import FormatError
from gids.store.names import Relation
from gids.store.rows import Rows

_FOLDER = "mag240m_kddcup2021"
_SPLITS = {"train": ("train",), "val": ("valid",), "test": ("test", "test-whole")}


def _root(path: Path) -> Path:
    """The dataset's own folder, which the user's may contain."""
    return path / _FOLDER if (path / _FOLDER).is_dir() else path


def _recognises(path: Path) -> bool:
    root = _root(path)
    return (root / "meta.pt").is_file() and (root / "processed").is_dir()


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    root, source = _root(path), Source()
    counts = load_torch(root / "meta.pt")
    if not isinstance(counts, dict):
        raise FormatError(f"{root / 'meta.pt'} holds a {type(counts).__name__}, not numbers of nodes")
    folders = sorted(p for p in (root / "processed").iterdir() if p.is_dir())
    types = {name for folder in folders for name in _ends(folder)}
    for ntype in sorted(types):
        if ntype not in counts:
            raise FormatError(f"{root / 'meta.pt'} does not say how many {ntype!r} nodes there are")
        source.add_nodes(ntype, whole_number(counts[ntype], f"{ntype!r} of {root / 'meta.pt'}"), "meta.pt")
    for folder in folders:
        if "___" in folder.name:
            _read_edges(folder, source)
        else:
            _read_nodes(folder, source)
    _read_splits(root / "split_dict.pt", source)
    return source


def _ends(folder: Path) -> tuple[str, ...]:
    names = folder.name.split("___")
    if len(names) not in (1, 3):
        raise FormatError(f"{folder} must be called NODES or SOURCE___RELATION___DESTINATION")
    return (names[0], names[-1])


def _read_edges(folder: Path, source: Source) -> None:
    src, rel, dst = folder.name.split("___")
    relation: Relation = (src, rel, dst)
    rows = _array(folder / "edge_index.npy")
    if rows.shape[:1] != (2,):
        raise FormatError(f"{folder / 'edge_index.npy'} has shape {rows.shape}; it must be (2, E)")
    num_src, num_dst = source.node_count(src), source.node_count(dst)
    source.graphs[relation] = edge_array(
        rows, str(folder / "edge_index.npy"), num_src=num_src, num_dst=num_dst
    )


def _read_nodes(folder: Path, source: Source) -> None:
    for file in sorted(folder.glob("*.npy")):
        rows, key = _array(file), file.stem.removeprefix("node_")
        source.add_nodes(folder.name, rows.shape[0], str(file))
        if key == "label":
            source.labels[folder.name] = normalised(rows, are_classes=True)
        else:
            source.tables.append(TableSource("node", folder.name, key, rows))


def _array(file: Path) -> Rows:
    rows = open_npy(file).rows
    if rows is None or not rows.shape:
        raise FormatError(f"{file} holds no array of numbers")
    return rows


def _read_splits(file: Path, source: Source) -> None:
    if not file.is_file():
        return
    found = load_torch(file)
    if not isinstance(found, dict):
        raise FormatError(f"{file} holds a {type(found).__name__}, not a dictionary of splits")
    for split, names in _SPLITS.items():
        for name in names:
            if name in found:
                ids = value_rows(found[name], f"{name!r} of {file}", file)
                source.splits.setdefault("paper", {})[split] = ids


_LAYOUT = """\
meta.pt (numbers of nodes), split_dict.pt (train, valid, test), processed/paper/node_feat.npy (float16),
node_label.npy (classes, -1 for none), node_year.npy (table year), and
processed/SOURCE___RELATION___DESTINATION/edge_index.npy, (2, E). Authors and institutions have no
features."""

READER = Reader(
    "mag240m",
    "MAG240M of OGB-LSC, as unzipped (the folder, or what mag240m_kddcup2021 lies in)",
    _LAYOUT,
    _recognises,
    _read,
)
