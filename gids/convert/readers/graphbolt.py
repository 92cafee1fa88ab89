"""Reads GraphBolt's OnDiskDataset: the directory with metadata.yaml, not the preprocessed one.

The yaml file lists every file, in the schema of dgl.graphbolt.OnDiskDataset.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gids.convert.array_files import open_npy
from gids.convert.damage import parsing, shown
from gids.convert.edges import edge_pairs, edge_rows
from gids.convert.readers.reader import Choices, Reader
from gids.convert.source import Source, split_relation, whole_number
from gids.convert.source_file import read_file
from gids.convert.text_table import read_text
from gids.convert.torch_file import load_torch, mapped_rows
from gids.errors import FormatError
from gids.store.array_checks import as_int64, check_ids
from gids.store.names import NODE, RELATION, Relation, check_name
from gids.store.rows import GeneratedRows, Rows, read_range

_MAX_YAML_BYTES = 256 << 10  # about a thousand entries, which PyYAML reads in seconds
_MAX_PATH_CHARS = 4096
_SETS = {"train_set": "train", "validation_set": "val", "test_set": "test"}


def _recognises(path: Path) -> bool:
    return (path / "metadata.yaml").is_file()


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    meta = _load_yaml(path / "metadata.yaml")
    source = Source()
    files = _Files(path, scratch)
    if "graph_topology" in meta and "graph" not in meta:
        raise FormatError(
            f"{path} is preprocessed by GraphBolt, and only its library can unpickle that graph; "
            "convert the directory above, which has the metadata.yaml that you wrote"
        )
    graph = _dict(meta.get("graph") or {}, "graph", path)
    for entry in _entries(graph, "nodes", path):
        ntype = _node_type(entry)
        count = whole_number(_needed(entry, "num", "nodes", path), f"num of {ntype!r} in metadata.yaml")
        source.add_nodes(ntype, count, "metadata.yaml")
    for entry in _entries(graph, "edges", path):
        relation = _relation(entry.get("type"))
        if relation in source.graphs:
            raise FormatError(f"{path / 'metadata.yaml'} lists the edges {shown(relation)} twice")
        ends, rows = source.ends(relation), files.open(entry, "edges")
        is_csv = entry.get("format") == "csv"
        source.graphs[relation] = (
            edge_pairs(rows, **ends) if is_csv else edge_rows(rows, entry["path"], **ends)
        )
    taken = set()
    for entry in [*_entries(graph, "feature_data", path), *_entries(meta, "feature_data", path)]:
        name = tuple(_text(entry, field) for field in ("domain", "type", "name"))
        if name in taken:  # GraphBolt lists the features of the sampler twice
            continue
        taken.add(name)
        _add_features(entry, files, source)
    for number, task in enumerate(_entries(meta, "tasks", path)):
        if number:
            source.notes.append(
                f"left out task {shown(task.get('name', number))}: only the first task is converted"
            )
        else:
            _Task(task, files, source).read()
    return source


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ImportError(f"{path} needs PyYAML: pip install PyYAML") from None

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined, misc]
        """Refuses merge keys, which can make a huge mapping from a few lines."""

        def flatten_mapping(self, node: Any) -> None:
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
                raise FormatError(f"{path} has a merge key (<<): write out its content")

    with parsing(path, "is not valid YAML"):
        text = read_file(path, _MAX_YAML_BYTES, "metadata.yaml").decode()
        meta = yaml.load(text, Loader)
    return _dict(meta, "the file", path)


class _Files:
    """Opens the files of entries. Refuses files outside the dataset."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self._scratch = root, scratch

    def open(self, entry: dict[str, Any], part: str) -> Rows:
        named = _needed(entry, "path", part, self.root)
        if not isinstance(named, str) or not named or "\0" in named or len(named) > _MAX_PATH_CHARS:
            raise FormatError(
                f"{self.root / 'metadata.yaml'}: the path of an entry of {part} is {shown(named)}; "
                "it must be the path of a file"
            )
        file = self.root / named
        if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(self.root)):
            raise FormatError(f"metadata.yaml lists {file}, which is outside the dataset")
        if not file.exists():
            raise FormatError(f"metadata.yaml lists {file}, which does not exist")
        kind = _needed(entry, "format", part, self.root)
        rows: Rows | None = None
        if kind == "numpy":
            rows = open_npy(file).rows
        elif kind == "csv":
            rows = read_text(file, self._scratch, torch.int64)
        elif kind == "torch" and isinstance(values := load_torch(file), torch.Tensor):
            rows = mapped_rows(values, file)
        if rows is None or not rows.shape:
            raise FormatError(f"{file} must hold an array of numbers in format {shown(kind)}")
        return rows


def _add_features(entry: dict[str, Any], files: _Files, source: Source) -> None:
    domain, name = _text(entry, "domain"), _text(entry, "name")
    if domain not in ("node", "edge") or not name:
        source.notes.append(f"left out feature {shown(name)}: its domain is {shown(domain)}")
        return
    key = check_name(name, "the name of a feature in metadata.yaml")
    rows = files.open(entry, "feature_data")
    if domain == "node":
        source.add_node_table(_node_type(entry), key, rows, str(entry["path"]))
    else:
        source.add_edge_table(_relation(entry.get("type")), key, rows)


class _Task:
    """Labels and splits of a node classification task: seeds and their labels, per set and node type."""

    def __init__(self, task: dict[str, Any], files: _Files, source: Source) -> None:
        self._task, self._files, self._source = task, files, source
        self._labels: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # type -> ids, labels

    def read(self) -> None:
        for role, split in _SETS.items():
            for part in _entries(self._task, role, self._files.root):
                self._read_part(part, role, split)
        for ntype, parts in self._labels.items():
            self._source.labels[ntype] = _placed(parts, self._source.node_count(ntype))

    def _read_part(self, part: dict[str, Any], role: str, split: str) -> None:
        ntype = _node_type(part)
        arrays = dict(self._arrays(part))
        seeds = arrays.get("seeds", arrays.get("seed_nodes"))
        if seeds is None or len(seeds.shape) != 1 or ":" in ntype:
            self._source.notes.append(f"left out {role} of {ntype!r}: its seeds are not nodes")
            return
        self._source.add_split(ntype, split, seeds)
        labels = arrays.get("labels")
        if labels is not None:
            self._add_labels(ntype, seeds, labels, role)

    def _arrays(self, part: dict[str, Any]) -> Iterator[tuple[str, Rows]]:
        for entry in _entries(part, "data", self._files.root):
            yield _text(entry, "name") or "seeds", self._files.open(entry, "tasks")

    def _add_labels(self, ntype: str, seeds: Rows, labels: Rows, role: str) -> None:
        """Read the labels of seeds into memory, 16 bytes per seed."""
        if labels.shape not in (seeds.shape, (*seeds.shape, 1)):
            raise FormatError(f"labels of {role} have shape {labels.shape}; there are {seeds.shape[0]} seeds")
        if seeds.dtype.is_floating_point:
            raise FormatError(f"seeds of {role} are {seeds.dtype}; they must be whole numbers")
        count = self._source.node_count(ntype)
        ids = as_int64(read_range(seeds, 0, seeds.shape[0]), f"seeds of {role}", 0)
        values = read_range(labels, 0, labels.shape[0]).reshape(-1)
        check_ids(ids.numpy(), count, f"seeds of {role}", 0)
        self._labels.setdefault(ntype, []).append((ids, values))


def _placed(parts: list[tuple[torch.Tensor, torch.Tensor]], count: int) -> Rows:
    """The labels of `count` nodes: of the last seed with a node's id; -1 or NaN for a node without a seed."""
    is_float = parts[0][1].dtype.is_floating_point
    dtype = parts[0][1].dtype if is_float else torch.int64
    ids, order = torch.sort(torch.cat([ids for ids, _ in parts]), stable=True)
    values = torch.cat(
        [values.to(dtype) if is_float else as_int64(values, "a label", 0) for _, values in parts]
    )[order]
    missing = float("nan") if is_float else -1

    def fill(start: int, out: torch.Tensor) -> None:
        bounds = torch.tensor([start, start + len(out)])
        first, last = torch.searchsorted(ids, bounds).tolist()
        here, labels = ids[first:last], values[first:last]
        is_last = torch.ones(len(here), dtype=torch.bool)
        is_last[:-1] = here[1:] != here[:-1]
        out.fill_(missing)
        out[here[is_last] - start] = labels[is_last]

    return GeneratedRows((count,), dtype, fill)


def _node_type(entry: dict[str, Any]) -> str:
    return check_name(_text(entry, "type") or NODE, "a node type of metadata.yaml")


def _text(entry: dict[str, Any], field: str) -> str | None:
    value = entry.get(field)
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{field} of an entry of metadata.yaml is {shown(value)}; it must be text")
    return value


def _relation(name: Any) -> Relation:
    if name is None:
        return RELATION
    return split_relation(str(name), ":", f"edge type {shown(name)} of metadata.yaml")


def _entries(part: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    found = part.get(key) or []
    if not isinstance(found, list):
        raise FormatError(f"{path / 'metadata.yaml'}: {key} must be a list")
    return [_dict(entry, key, path) for entry in found]


def _dict(part: Any, what: str, path: Path) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise FormatError(f"{path}: {what} of metadata.yaml must be a mapping, not {shown(part)}")
    return part


def _needed(entry: dict[str, Any], field: str, part: str, path: Path) -> Any:
    if field not in entry:
        raise FormatError(f"{path / 'metadata.yaml'}: an entry of {part} lacks {field}")
    return entry[field]


_LAYOUT = """\
Needs PyYAML. Reads graph.nodes, graph.edges (csv, or numpy of shape (2, E)), feature_data (numpy or
torch), and the seeds and labels of the first task (train_set, validation_set, test_set). Does not read
GraphBolt's preprocessed/."""

READER = Reader(
    "graphbolt",
    "a GraphBolt OnDiskDataset: a directory with metadata.yaml",
    _LAYOUT,
    _recognises,
    _read,
)
