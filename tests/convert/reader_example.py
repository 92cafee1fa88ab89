"""Shared by the tests of readers: convert a source and compare the dataset with it."""

import csv
import gzip
import os
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from gids import FeatureStore
from gids.cli import main
from gids.store import verify

needs_torch_2_6 = pytest.mark.skipif(
    not hasattr(torch.serialization, "safe_globals"),
    reason="torch before 2.6 reads no NumPy arrays and classes of PyG from a file",
)


def convert(*arguments):
    """Run the command and verify the dataset, the last NAME.gids among the arguments. Returns its store."""
    words, path = _words(arguments)
    assert main(["convert", *words]) == 0
    assert list(verify(path)) == []
    return FeatureStore(path)


def refused(capsys, *arguments):
    """Run the command on a bad source. Returns its line of error. Checks that no file is left."""
    words, path = _words(arguments)
    before = sorted(path.parent.rglob("*"))
    assert main(["convert", *words]) == 2
    assert sorted(path.parent.rglob("*")) == before
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("gids convert: ")
    return error


def _words(arguments):
    words = list(map(str, arguments))
    return words, Path([word for word in words if word.endswith(".gids")][-1])


def assert_dataset(store, *, tables, edges, labels=MappingProxyType({}), splits=MappingProxyType({})):
    """The dataset has exactly these: table name -> array; relation -> (sources, destinations)."""
    assert sorted(store.tables) == sorted(tables)
    for name, expected in tables.items():
        assert_table(store, name, expected)
    assert sorted(store.relations) == sorted(edges)
    for relation, (sources, destinations) in edges.items():
        assert_graph(store, relation, sources, destinations)
    assert sorted(store.labels) == sorted(labels)
    for ntype, expected in labels.items():
        assert store.labels[ntype].dtype == torch.int64
        assert np.array_equal(store.labels[ntype], expected)
    assert sorted(store.splits) == sorted(splits)
    for ntype, expected in splits.items():
        found = {name: ids.tolist() for name, ids in store.splits[ntype].items()}
        assert found == {name: np.asarray(ids).tolist() for name, ids in expected.items()}


def assert_table(store, name, expected):
    """The table has these bits, type and shape."""
    table = store.table(name)
    found = table.read_rows(range(table.row_count)).numpy()
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()


def assert_graph(store, relation, sources, destinations):
    """The graph has these edges and their ids, stably sorted by destination and, if there are any, times."""
    graph = store.graph(relation)
    times = np.zeros(len(sources))
    stored = {"node": store.node_times(relation[0]), "edge": graph.edge_times}  # those of edges come first
    for kind, type_ in (("node", relation[0]), ("edge", relation)):
        if stored[kind] is None:
            continue
        for key in ("year", "time"):
            if (table := store.find_table(kind, type_, key)) is not None:
                rows = table.read_rows(range(table.row_count)).numpy().reshape(-1)
                times = rows if kind == "edge" else rows[np.asarray(sources)]
    order = np.lexsort([times, destinations])
    counts = np.bincount(destinations, minlength=store.num_nodes(relation[2]))
    assert np.array_equal(graph.indptr, np.concatenate([[0], np.cumsum(counts)]))
    assert np.array_equal(graph.indices, np.asarray(sources)[order])
    ids = np.arange(len(order)) if graph.edge_ids is None else graph.edge_ids
    assert np.array_equal(ids, order)


def write_table(path, **columns):
    """A table in a file of Parquet (.parquet, .pq) or of text (.csv, .tsv, .gz too). Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".parquet", ".pq"):
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table(columns), path, row_group_size=97)
        return path
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t" if ".tsv" in path.name else ",")
        writer.writerow(columns)
        writer.writerows(zip(*(np.asarray(c).tolist() for c in columns.values()), strict=True))
    return path


def truncate(path, share=0.5):
    os.truncate(path, int(path.stat().st_size * share))


def write_source(path, content):
    """A file or a directory. content: columns (of .csv, .parquet), an array of .npy, text, bytes, a function
    that writes the path, or the contents of a directory by name; None: nothing is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict) and path.suffix in (".csv", ".parquet"):
        write_table(path, **content)
    elif isinstance(content, dict):
        path.mkdir(exist_ok=True)
        for name, part in content.items():
            write_source(path / name, part)
    elif isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif callable(content):
        content(path)
    elif content is not None:
        np.save(path, content)
    return path
