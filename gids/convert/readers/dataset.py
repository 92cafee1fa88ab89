"""Reads a gids dataset, to write another one with other stripes, order, types or pages."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import torch

from gids.convert.source import (
    Choices,
    InEdges,
    Reader,
    Source,
    StoredGraph,
    StoredTable,
    TableSource,
    source_files,
)
from gids.errors import StorageError
from gids.store.feature_store import FeatureStore
from gids.store.files import Locator, array_rows, read_manifest
from gids.store.ids import ID_ROLES
from gids.store.manifest import NodesEntry, RelationEntry, TableEntry
from gids.store.names import HEAT_ROLES, SPLITS
from gids.store.part import part_paths, refuse_part
from gids.store.rows import ArrayRows, GeneratedRows, Rows, blocks, check_ids, file_crc32c
from gids.store.table import Table
from gids.write.workplace import is_dataset

_BLOCK_BYTES = 8 << 20


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    store = FeatureStore(path, allow_dirs=choices.allow_dirs)
    refuse_part(store, "gids convert", "convert the whole dataset, then partition it")
    manifest = store.manifest
    for array in manifest.arrays():
        file = store.locate.array(array)
        if file_crc32c(file) != array.crc32c:
            raise StorageError(errno.EBADMSG, "the checksum of this file is wrong: restore it", file)
    stored = StoredGraph()
    source = Source(skip=choices.skip, stored=stored)
    for nodes in manifest.nodes:
        _read_nodes(nodes, store.locate, source, stored)
    for number, relation in enumerate(manifest.relations):
        if relation.arrays:
            _read_edges(relation, store.locate, source, stored, scratch / f"times-{number}")
    for entry in manifest.tables:
        if not source.skips(entry.name) and not source.skips(entry.key):
            source.tables.append(_table(store, entry))
    return source


def _read_nodes(nodes: NodesEntry, locate: Locator, source: Source, stored: StoredGraph) -> None:
    source.add_nodes(nodes.type, nodes.count, "the dataset")
    arrays = {
        role: array_rows(locate.array(entry), entry)
        for role, entry in nodes.arrays.items()
        if role != HEAT_ROLES["out-degree"]  # which the writer counts
    }
    if "label" in arrays:
        source.labels[nodes.type] = arrays["label"]
    for split in SPLITS:
        if f"{split}_idx" in arrays:
            source.add_split(nodes.type, split, arrays[f"{split}_idx"])
    if "time" in arrays:
        source.node_times[nodes.type] = arrays["time"]
    if "id" in arrays:
        source.ids[nodes.type] = {role: arrays[role] for role in ID_ROLES if role in arrays}
    for method, role in HEAT_ROLES.items():
        if role in arrays:
            stored.heat.setdefault(nodes.type, {})[method] = arrays[role]


def _read_edges(
    entry: RelationEntry, locate: Locator, source: Source, stored: StoredGraph, scratch: Path
) -> None:
    relation = entry.type
    arrays = {role: array_rows(locate.array(array), array) for role, array in entry.arrays.items()}
    ids = arrays.get("edge_ids")
    source.graphs[relation] = InEdges(arrays["indptr"], arrays["indices"], ids)
    stored.index_dtypes[relation] = entry.arrays["indices"].dtype
    if entry.sorted_by is None:
        stored.unsorted.add(relation)
    if "time" in arrays:
        times = arrays["time"]
        source.edge_times[relation] = times if ids is None else _by_id(times, ids, scratch)


def _by_id(times: Rows, ids: Rows, scratch: Path) -> Rows:
    """Times of edges in the order of their ids, in a scratch file. times, ids: in the order of the graph."""
    count = times.shape[0]
    with open(scratch, "wb") as file:  # a map on a full disk ends the process
        os.posix_fallocate(file.fileno(), 0, 8 * max(1, count))
    by_id = np.memmap(scratch, np.int64, "r+", shape=(max(1, count),))[:count]
    pieces = zip(blocks(ids, _BLOCK_BYTES), blocks(times, _BLOCK_BYTES), strict=True)
    for (first, block), (_, values) in pieces:
        by_id[check_ids(block.to(torch.int64).numpy(), count, "edge_ids", first)] = values.numpy()
    return ArrayRows(by_id)


def _table(store: FeatureStore, entry: TableEntry) -> TableSource:
    """A table. Rows with a scale are its float32 values, which run.py quantizes again.

    With a scale that gids wrote, int8 of these has the same values, and the same bytes unless all of them are
    0: then the scale becomes 0. A scale is the largest magnitude divided by 127, and 127 times a scale is a
    magnitude with that scale. Other scales, such as those below 2^-126, are refused if a value would change.
    """
    table = store.tables[entry.name]
    if table.order is not None:
        _check_pages(table)

    def fill(start: int, out: torch.Tensor) -> None:
        if table.order is not None:
            out.copy_(table.decode(table.read_stored(np.arange(start, start + len(out)))))
            return
        with table.open_pages(check_crc=True) as reader:
            out.copy_(table.decode(reader.rows(start, len(out))))

    return TableSource(
        table.type,
        table.key,
        GeneratedRows((table.row_count, *table.shape), table.dtype, fill),
        StoredTable(table.stored_dtype, table.scale, table.row_bytes, table.page_bytes, table.order),
        table.columns or (),
    )


def _check_pages(table: Table) -> None:
    """Raise StorageError for a damaged page: rows in another order are gathered without checksums."""
    step = max(1, _BLOCK_BYTES // table.page_bytes)
    with table.open_pages(check_crc=True) as reader:
        for first in range(0, table.page_count, step):
            reader.pages(first, step)


def _files(path: Path) -> list[Path]:
    """The files of a dataset, with shards outside its directory."""
    shards = [path / shard for table in read_manifest(path).tables for shard in table.shards]
    return sorted({*source_files(path), *shards})


_LAYOUT = """\
A dataset of gids, with everything in it. Values, row order, types and page sizes stay as they are, but for
those that --dtype, --scale, --order, --page-bytes and --index-dtype name. Compares the files with their
checksums. If the dataset is striped, allow its directories with --allow-dir. Not for a part of a
partitioned dataset."""

READER = Reader(
    "gids",
    "another gids dataset, to change how it is stored",
    _LAYOUT,
    lambda path: is_dataset(path) or bool(part_paths(path)),
    _read,
    takes=("--allow-dir", "--skip"),
    files=_files,
)
