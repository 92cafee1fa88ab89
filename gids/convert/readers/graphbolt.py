"""Reads GraphBolt's OnDiskDataset: the directory with metadata.yaml, not the preprocessed one.

The yaml file lists every file, in the schema of dgl.graphbolt.OnDiskDataset.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gids.convert.array_files import array_of, open_npy
from gids.convert.edges import edge_pairs, edge_rows
from gids.convert.source import Choices, Reader, Source, split_relation
from gids.convert.source_files import import_library, reading, shown
from gids.convert.stream_rows import BLOCK_BYTES
from gids.convert.text_table import read_matrix, read_pairs
from gids.convert.torch_file import load_torch
from gids.errors import FormatError
from gids.store.names import NODE, RELATION, Relation, check_name, describe_type
from gids.store.rows import GeneratedRows, Rows, as_int64, checked_ids, read_range
from gids.write.narrow import cast_exactly

Entry = dict[str, Any]
OpenArray = Callable[[str, Entry], Rows]
_SETS = {"train_set": "train", "validation_set": "val", "test_set": "test"}


def _recognises(path: Path) -> bool:
    return (path / "metadata.yaml").is_file()


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    file, source = path / "metadata.yaml", Source(skip=choices.skip)
    yaml = import_library(file, "yaml")
    with reading(file):
        _read_all(yaml.safe_load(file.read_text("utf-8")), path, partial(_open, path, scratch), source)
    return source


def _read_all(meta: Entry, path: Path, open_array: OpenArray, source: Source) -> None:
    if "graph_topology" in meta and "graph" not in meta:
        raise FormatError(
            f"{path} is preprocessed by GraphBolt, and only its library can unpickle that graph; "
            "convert the directory above, which has the metadata.yaml that you wrote"
        )
    graph = _value(meta, "graph", {})
    for entry in _entries(graph, "nodes"):
        ntype = _node_type(entry)
        source.add_nodes(ntype, entry.get("num"), f"num of {ntype!r} in metadata.yaml")
    for entry in _entries(graph, "edges"):
        relation = _relation(entry)
        if relation in source.graphs:
            raise FormatError(f"metadata.yaml lists the edges {shown(relation)} twice")
        ends, rows = source.ends(relation), open_array("edges", entry)
        make = edge_pairs if entry.get("format") == "csv" else edge_rows
        source.graphs[relation] = make(rows, entry["path"], **ends)
    tasks = {str(_value(task, "name", n)): task for n, task in enumerate(_entries(meta, "tasks"))}
    features = [*_entries(graph, "feature_data"), *_entries(meta, "feature_data")]
    sets = [part for task in tasks.values() for role in _SETS for part in _entries(task, role)]
    _check_types([*features, *sets], [*source.nodes, *source.graphs])
    taken = set()
    for entry in features:
        feature = tuple(_value(entry, field) for field in ("domain", "type", "name"))
        if feature not in taken:  # GraphBolt lists the features of the sampler twice
            _add_features(entry, open_array, source)
        taken.add(feature)
    first, *others = [name for name in tasks if not source.skips(name)] or [""]
    for name in others:
        source.leave_out(f"task {name!r}", f"a dataset has one task, here {first!r}", name)
    if first:
        _read_task(first, tasks[first], open_array, source)


def _open(root: Path, scratch: Path, part: str, entry: Entry) -> Rows:
    """The array of an entry of `part`."""
    file, kind = root / entry["path"], entry["format"]
    if ".." in Path(entry["path"]).parts or not file.is_relative_to(root):
        raise FormatError(f"metadata.yaml lists {file}, which is outside its directory: move it there")
    if not file.is_file():
        raise FormatError(f"metadata.yaml lists {file}, which does not exist")
    rows: Rows | None = None
    if kind == "numpy":
        rows = open_npy(file).rows
    elif kind == "csv":
        rows = read_pairs(file, scratch) if part == "edges" else read_matrix(file, scratch)
    elif kind == "torch" and isinstance(values := load_torch(file), torch.Tensor):
        rows = array_of(values).rows
    if rows is None or not rows.shape:
        raise FormatError(f"{file} must hold an array of numbers in format {shown(kind)}")
    return rows


def _add_features(entry: Entry, open_array: OpenArray, source: Source) -> None:
    domain, name = _value(entry, "domain"), str(_value(entry, "name", "(unnamed)"))
    if source.skips(name):
        return
    if domain not in ("node", "edge"):
        source.leave_out(f"feature {name!r}", f"its domain is {shown(domain)}, not node or edge", name)
    elif domain == "node":
        rows = open_array("feature_data", entry)
        source.add_node_table(_node_type(entry), name, rows, str(entry["path"]))
    else:
        source.add_edge_table(_relation(entry), name, open_array("feature_data", entry))


def _read_task(name: str, task: Entry, open_array: OpenArray, source: Source) -> None:
    """Labels and splits of a node classification task: seeds and their labels, per set and node type."""
    labels: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for role, split in _SETS.items():
        for part in _entries(task, role):
            ntype = _node_type(part)
            arrays: dict[str, Rows] = {}
            for entry in [] if ":" in ntype else _entries(part, "data"):  # seeds of a relation
                key = _value(entry, "name", "seeds")
                if key in arrays:
                    raise FormatError(f"metadata.yaml: {role} of {shown(ntype)} has two arrays {shown(key)}")
                arrays[key] = open_array("tasks", entry)
            seeds = arrays.get("seeds", arrays.get("seed_nodes"))
            if seeds is None or len(seeds.shape) != 1:
                why = f"its seeds are not nodes; load {role} from its files, as seeds of a loader"
                source.leave_out(f"task {name!r}", why, name)
                continue
            if split in source.splits.get(ntype, {}):
                raise FormatError(f"metadata.yaml lists the {role} of {shown(ntype)} twice: join the files")
            for key in sorted(arrays.keys() - {"seeds", "seed_nodes", "labels"}):
                why = "only seeds and labels are read: call it so, or take it out of metadata.yaml"
                source.leave_out(f"{key!r} of task {name!r}", why, name)
            source.add_split(ntype, split, seeds)
            if "labels" in arrays:
                read = _read_labels(seeds, arrays["labels"], role, source.node_count(ntype))
                labels.setdefault(ntype, []).append(read)
    for ntype, parts in labels.items():
        source.labels[ntype] = _placed(parts, source.node_count(ntype))


def _read_labels(seeds: Rows, labels: Rows, role: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and labels of seeds, 16 bytes per seed in memory."""
    if labels.shape[:1] != seeds.shape:
        raise FormatError(f"labels of {role} have shape {labels.shape}; there are {seeds.shape[0]} seeds")
    pieces = checked_ids(seeds, count, f"seeds of {role}", BLOCK_BYTES)
    ids = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *pieces]))
    values = read_range(labels, 0, labels.shape[0])
    return ids, values if values.dtype.is_floating_point else as_int64(values, "a label", 0)


def _placed(parts: list[tuple[torch.Tensor, torch.Tensor]], count: int) -> Rows:
    """The labels of `count` nodes: of the last seed with a node's id; -1 or NaN for a node without a seed."""
    ids, order = torch.sort(torch.cat([ids for ids, _ in parts]), stable=True)
    is_last = torch.ones(len(ids), dtype=torch.bool)
    is_last[:-1] = ids[1:] != ids[:-1]
    labels = [values for _, values in parts]
    if len({values.dtype for values in labels}) > 1:  # float32 does not hold all whole numbers
        wide = [torch.empty(values.shape, dtype=torch.float64) for values in labels]
        for values, out in zip(labels, wide, strict=True):
            cast_exactly(values, out)
        labels = wide
    ids, values = ids[is_last], torch.cat(labels)[order[is_last]]
    missing = float("nan") if values.dtype.is_floating_point else -1

    def fill(start: int, out: torch.Tensor) -> None:
        first, last = torch.searchsorted(ids, torch.tensor([start, start + len(out)])).tolist()
        out.fill_(missing)
        out[ids[first:last] - start] = values[first:last]

    return GeneratedRows((count, *values.shape[1:]), values.dtype, fill)


def _check_types(entries: list[Entry], known: list[Any]) -> None:
    """Raise FormatError for an entry of a type that the graph does not have. known: its types."""
    for entry in entries:
        is_edge = entry["domain"] == "edge" if "domain" in entry else ":" in _node_type(entry)
        type_: Any = _relation(entry) if is_edge else _node_type(entry)
        types = [other for other in known if isinstance(other, type(type_))]
        if types and type_ not in types:
            raise FormatError(
                f"metadata.yaml: {shown(entry)} is of type {describe_type(type_)}, but the graph has "
                f"{', '.join(map(describe_type, types))}"
            )


def _node_type(entry: Entry) -> str:
    return check_name(_value(entry, "type", NODE), "a node type of metadata.yaml")


def _relation(entry: Entry) -> Relation:
    name = _value(entry, "type", ":".join(RELATION))
    return split_relation(name, ":", f"edge type {shown(name)} of metadata.yaml")


def _entries(part: Entry, key: str) -> list[Entry]:
    entries: list[Entry] = _value(part, key, [])
    return entries


def _value(entry: Entry, name: str, default: Any = "") -> Any:
    """The value of a field, or the default if it is missing or empty."""
    value = entry.get(name)
    return default if value is None or value == "" else value


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
    takes=("--skip",),
    aside=("*",),  # metadata.yaml lists the files
)
