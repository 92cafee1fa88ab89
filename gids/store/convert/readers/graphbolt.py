"""GraphBolt's OnDiskDataset: a directory with metadata.yaml, as written for it (not what it preprocessed).

The yaml file names every file; the schema is that of dgl.graphbolt.OnDiskDataset.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gids.errors import FormatError
from gids.store.convert.array_files import open_npy
from gids.store.convert.edges import edge_array, edge_pairs
from gids.store.convert.readers.reader import Choices, Reader
from gids.store.convert.source import Source, TableSource
from gids.store.convert.text_table import read_text
from gids.store.convert.torch_file import load_torch, mapped_rows
from gids.store.names import NODE, RELATION, Relation
from gids.store.rows import Rows, TensorRows, read_range

_SETS = {"train_set": "train", "validation_set": "val", "test_set": "test"}


def _recognises(path: Path) -> bool:
    return (path / "metadata.yaml").is_file()


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    meta = _load_yaml(path / "metadata.yaml")
    source = Source()
    files = _Files(path, scratch)
    if "graph_topology" in meta and "graph" not in meta:
        raise FormatError(
            f"{path} is what GraphBolt preprocessed, whose graph only its library can unpickle; "
            "convert the directory above, with the metadata.yaml that you wrote"
        )
    graph = _dict(meta.get("graph") or {}, "graph", path)
    for entry in _entries(graph, "nodes", path):
        ntype = entry.get("type") or NODE
        source.add_nodes(ntype, int(_needed(entry, "num", "nodes", path)), "metadata.yaml")
    for entry in _entries(graph, "edges", path):
        relation = _relation(entry.get("type"))
        num_src, num_dst = (source.node_count(t) for t in (relation[0], relation[2]))
        rows = files.open(entry, "edges")
        if entry.get("format") == "csv":
            source.graphs[relation] = edge_pairs(rows, num_src=num_src, num_dst=num_dst)
        else:
            if rows.shape[:1] != (2,):
                raise FormatError(f"{entry['path']} has shape {rows.shape}; GraphBolt's edges are (2, E)")
            source.graphs[relation] = edge_array(rows, entry["path"], num_src=num_src, num_dst=num_dst)
    taken = set()
    for entry in [*_entries(graph, "feature_data", path), *_entries(meta, "feature_data", path)]:
        name = (entry.get("domain"), entry.get("type"), entry.get("name"))
        if name in taken:  # GraphBolt wants those of the sampler listed twice
            continue
        taken.add(name)
        _add_features(entry, files, source)
    for number, task in enumerate(_entries(meta, "tasks", path)):
        if number:
            source.notes.append(f"left out task {task.get('name', number)!r}: only the first is kept")
        else:
            _Task(task, files, source).read()
    return source


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ImportError(f"{path} needs PyYAML: pip install PyYAML") from None
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not valid YAML: {error}") from None
    return _dict(meta, "the file", path)


class _Files:
    """Opens the files that entries name; those outside the dataset are refused."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self._scratch = root, scratch

    def open(self, entry: dict[str, Any], part: str) -> Rows:
        file = self.root / str(_needed(entry, "path", part, self.root))
        if not file.resolve().is_relative_to(self.root.resolve()):
            raise FormatError(f"metadata.yaml names {file}, which lies outside the dataset")
        if not file.is_file():
            raise FormatError(f"metadata.yaml names {file}, which is missing")
        kind = _needed(entry, "format", part, self.root)
        rows: Rows | None = None
        if kind == "numpy":
            rows = open_npy(file).rows
        elif kind == "csv":
            rows = read_text(file, self._scratch, torch.int64)
        elif kind == "torch" and isinstance(values := load_torch(file), torch.Tensor):
            rows = mapped_rows(values, file)
        if rows is None or not rows.shape:
            raise FormatError(f"{file} holds no array of numbers, as format {kind!r} should")
        return rows


def _add_features(entry: dict[str, Any], files: _Files, source: Source) -> None:
    domain, name = entry.get("domain"), entry.get("name")
    if domain not in ("node", "edge") or not name:
        source.notes.append(f"left out feature {name!r} of domain {domain!r}")
        return
    rows = files.open(entry, "feature_data")
    if domain == "node":
        ntype = entry.get("type") or NODE
        source.add_nodes(ntype, rows.shape[0], str(entry["path"]))
        source.tables.append(TableSource("node", ntype, name, rows))
    else:
        source.tables.append(TableSource("edge", _relation(entry.get("type")), name, rows))


class _Task:
    """Labels and splits of a task of node classification: seeds and their labels, per set and type."""

    def __init__(self, task: dict[str, Any], files: _Files, source: Source) -> None:
        self._task, self._files, self._source = task, files, source
        self._labels: dict[str, torch.Tensor] = {}

    def read(self) -> None:
        for role, split in _SETS.items():
            for part in _entries(self._task, role, self._files.root):
                self._read_part(part, role, split)
        for ntype, labels in self._labels.items():
            self._source.labels[ntype] = TensorRows(labels)

    def _read_part(self, part: dict[str, Any], role: str, split: str) -> None:
        ntype = part.get("type") or NODE
        arrays = dict(self._arrays(part))
        seeds = arrays.get("seeds", arrays.get("seed_nodes"))
        if seeds is None or len(seeds.shape) != 1 or ":" in ntype:
            self._source.notes.append(f"left out {role} of {ntype!r}: its seeds are not nodes")
            return
        self._source.splits.setdefault(ntype, {})[split] = seeds
        labels = arrays.get("labels")
        if labels is not None:
            self._place(ntype, seeds, labels, role)

    def _arrays(self, part: dict[str, Any]) -> Iterator[tuple[str, Rows]]:
        for entry in _entries(part, "data", self._files.root):
            yield entry.get("name") or "seeds", self._files.open(entry, "tasks")

    def _place(self, ntype: str, seeds: Rows, labels: Rows, role: str) -> None:
        """Put the labels of seeds where their nodes are; 8 bytes per node, in memory."""
        if labels.shape not in (seeds.shape, (*seeds.shape, 1)):
            raise FormatError(f"labels of {role} have shape {labels.shape} for {seeds.shape[0]} seeds")
        count = self._source.node_count(ntype)
        ids = read_range(seeds, 0, seeds.shape[0]).to(torch.int64)
        values = read_range(labels, 0, labels.shape[0]).reshape(-1)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise FormatError(f"seeds of {role} go up to {int(ids.max())}; there are {count} {ntype!r} nodes")
        if ntype not in self._labels:
            missing = float("nan") if values.dtype.is_floating_point else -1
            dtype = values.dtype if values.dtype.is_floating_point else torch.int64
            self._labels[ntype] = torch.full((count,), missing, dtype=dtype)
        self._labels[ntype][ids] = values.to(self._labels[ntype].dtype)


def _relation(name: Any) -> Relation:
    if name is None:
        return RELATION
    parts = str(name).split(":")
    if len(parts) != 3:
        raise FormatError(f"edge type {name!r} of metadata.yaml must be SOURCE:RELATION:DESTINATION")
    return parts[0], parts[1], parts[2]


def _entries(part: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    found = part.get(key) or []
    if not isinstance(found, list):
        raise FormatError(f"{path / 'metadata.yaml'}: {key} must be a list")
    return [_dict(entry, key, path) for entry in found]


def _dict(part: Any, what: str, path: Path) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise FormatError(f"{path}: {what} of metadata.yaml must be a mapping, not {part!r}")
    return part


def _needed(entry: dict[str, Any], field: str, part: str, path: Path) -> Any:
    if field not in entry:
        raise FormatError(f"{path / 'metadata.yaml'}: an entry of {part} has no {field}")
    return entry[field]


_LAYOUT = """\
Needs PyYAML. graph.nodes, graph.edges (csv, or numpy of shape (2, E)), feature_data
(numpy or torch), and of the first task seeds and labels of train_set, validation_set, test_set. What
GraphBolt made of it in preprocessed/ is not needed and not read."""

READER = Reader(
    "graphbolt",
    "a GraphBolt OnDiskDataset: a directory with metadata.yaml",
    _LAYOUT,
    _recognises,
    _read,
)
