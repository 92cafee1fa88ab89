"""verify: reads every byte of a dataset and reports faults. Called by `gids verify`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from gids import _core
from gids.errors import FormatError, StorageError
from gids.store.feature_store import Graph, first_out_of_order
from gids.store.files import Locator, array_bytes, array_rows, faults, shard_files
from gids.store.ids import checked_keys
from gids.store.manifest import MANIFEST, ArrayEntry, NodesEntry, Part, RelationEntry, TableEntry
from gids.store.names import HEAT_ROLES, SPLITS
from gids.store.part import directory_faults, edge_faults, owner_faults, part_paths
from gids.store.rows import (
    FileRows,
    PageReader,
    Rows,
    blocks,
    checked_ids,
    checked_indptr,
    checked_order,
    file_crc32c,
    in_order,
)
from gids.stored_file import StoredFile

_BLOCK_BYTES = 8 << 20
_BOOLS = "a bool must be 0 or 1; other bytes are read as 1"
_BLOCKS_AT_ONCE = 256
_MOST_LINES = 100  # for pages of one table


def verify(
    path: str | os.PathLike[str],
    *,
    allow_dirs: Sequence[str | os.PathLike[str]] = (),
    workers: int = 2,
    on_total: Callable[[int], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Iterator[str]:
    """Yield one line per fault of the dataset at path. No line means that it is exactly as written.

    path may be a directory of parts: then checks each part, and that together they are one dataset.

    First checks the checksum of the manifest and the size and header of every file, and stops if one is
    wrong. Then checks the checksum of every file and page (with padding), that indptr rises from 0 to the
    number of edges, that numbers of nodes and edges are in range, that edges are in the order of their times,
    that the ids of nodes are sorted by key, that heat is finite and that bool is 0 or 1. Reads everything
    once (the graph twice, and with times three times), in bounded memory, and leaves nothing in the page
    cache. Prints up to 100 faulty pages per table and the number of others. on_total(bytes), on_bytes(n):
    progress.
    """
    root = Path(os.path.abspath(path))
    is_whole = (root / MANIFEST).exists() or not part_paths(root)
    faults_of = _dataset_faults if is_whole else _parts_faults
    yield from faults_of(root, allow_dirs, workers, on_total, on_bytes)


def _dataset_faults(
    root: Path,
    allow_dirs: Sequence[str | os.PathLike[str]],
    workers: int,
    on_total: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> Iterator[str]:
    """See verify."""
    try:
        locate = Locator(root, allow_dirs)
        manifest = locate.read_manifest()
    except (FormatError, OSError) as error:
        yield str(error)
        return
    broken = list(faults(manifest, locate))
    yield from broken
    if broken:
        return  # truncated or missing files cannot be read
    pages = sum(t.geometry.page_count * t.page_bytes for t in manifest.tables)
    on_total(pages + sum(map(array_bytes, manifest.arrays())))
    for entry in manifest.arrays():
        array = locate.array(entry)
        crc = file_crc32c(array)
        if crc != entry.crc32c:
            sums = f"CRC32C is {crc:08x}, in the manifest {entry.crc32c:08x}"
            yield f"{array}: {sums}; the file was changed or damaged"
        on_bytes(array_bytes(entry))
    for nodes in manifest.nodes:
        yield from _node_faults(nodes, manifest.part, locate)
    counts = {n.type: n.count for n in manifest.nodes}
    nodes_of = {n.type: n for n in manifest.nodes}
    for relation in manifest.relations:
        times = nodes_of[relation.type[0]].arrays.get("time")
        wrong = list(_graph_faults(relation, counts, times, locate))
        yield from wrong
        if manifest.part is not None and not wrong:
            yield from edge_faults(relation, nodes_of[relation.type[2]], manifest.part, locate)
    for table in manifest.tables:
        if table.order is not None:
            yield from _raised(checked_order, *_rows(table.order, locate))
    with ThreadPoolExecutor(workers, "gids-verify") as pool:
        for table in manifest.tables:
            columns = table.scale.columns if table.scale is not None else None
            if columns is not None:
                file, scales = _rows(columns, locate)
                flat = scales.reshaped((math.prod(columns.shape),))
                yield from _raised(_checked, file, flat, "scale")
            yield from _table_faults(table, locate, pool, on_bytes)


def _parts_faults(
    root: Path,
    allow_dirs: Sequence[str | os.PathLike[str]],
    workers: int,
    on_total: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> Iterator[str]:
    """See _dataset_faults. root: a directory of parts."""
    paths, total = part_paths(root), 0

    def add_total(size_bytes: int) -> None:
        nonlocal total
        total += size_bytes
        on_total(total)

    def faults_of(path: Path) -> Iterator[str]:
        checked = verify(path, allow_dirs=allow_dirs, workers=workers, on_total=add_total, on_bytes=on_bytes)
        yield from (f"{path.name}: {fault}" for fault in checked)

    yield from directory_faults(paths)
    for path in paths:
        yield from faults_of(path)


def _node_faults(nodes: NodesEntry, part: Part | None, locate: Locator) -> Iterator[str]:
    if part is not None:
        yield from owner_faults(nodes, part, locate)
    for role, entry in nodes.arrays.items():
        path = locate.array(entry)
        if role.removesuffix("_idx") in SPLITS:
            yield from _raised(checked_ids, *_rows(entry, locate), nodes.count, role)
        elif role in HEAT_ROLES.values() and entry.dtype == "float32":
            yield from _raised(_checked, *_rows(entry, locate), "heat")
        elif role == "id_offset":
            yield from _raised(checked_indptr, *_rows(entry, locate), nodes.arrays["id"].shape[0])
        elif role == "id_key":
            yield from _raised(checked_keys, *_rows(entry, locate))
        elif role == "id_node":
            yield from _raised(checked_order, *_rows(entry, locate))
        elif role == "label" and entry.dtype == "bool":
            flat = array_rows(path, entry, torch.uint8).reshaped((math.prod(entry.shape),))
            yield from _raised(_checked, path, flat, "byte")


def _checked(rows: Rows, what: str, block_bytes: int) -> Iterator[object]:
    """Raise FormatError for the first element that is wrong for a scale, heat or (uint8) a bool."""
    is_bool = rows.dtype == torch.uint8
    must = _BOOLS if is_bool else "it must be finite and 0 or more"
    for start, block in blocks(rows, block_bytes):
        values = block.numpy()
        wrong = values > 1 if is_bool else ~(np.isfinite(values) & (values >= 0))
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            raise FormatError(f"{what}[{start + first}] is {values[first]}; {must}")
        yield block


def _graph_faults(
    relation: RelationEntry, counts: Mapping[str, int], times: ArrayEntry | None, locate: Locator
) -> Iterator[str]:
    """times: of the source type's nodes."""
    if not relation.arrays:
        return
    arrays = {role: _rows(entry, locate) for role, entry in relation.arrays.items()}
    edges = relation.count if relation.held is None else relation.held
    faults = list(_raised(checked_indptr, *arrays["indptr"], edges))
    faults += _raised(checked_ids, *arrays["indices"], counts[relation.type[0]], "indices")
    yield from faults
    if "edge_ids" in arrays:
        yield from _raised(checked_ids, *arrays["edge_ids"], relation.count, "edge_ids")
    if relation.sorted_by is None or faults:
        return
    maps = {role: locate.map(entry) for role, entry in relation.arrays.items()}
    src, _, dst = relation.type
    graph = Graph(
        relation.type,
        counts[src],
        counts[dst],
        maps["indptr"],
        maps["indices"],
        None,
        maps.get("time"),
        None if times is None else locate.map(times),
    )
    if (position := first_out_of_order(graph, relation.sorted_by)) is not None:
        path = locate.array(relation.arrays["time" if relation.sorted_by == "edges" else "indices"])
        yield (
            f"{path}: the edge at position {position} is earlier than the one before it; convert the source "
            "again"
        )


def _rows(entry: ArrayEntry, locate: Locator) -> tuple[StoredFile, FileRows]:
    return locate.array(entry), locate.rows(entry)


def _raised(check: Callable[..., Iterator[object]], path: StoredFile, *arguments: object) -> Iterator[str]:
    try:
        for _ in check(*arguments, _BLOCK_BYTES):
            pass
    except (FormatError, StorageError) as error:
        yield f"{path}: {error}"


def _table_faults(
    table: TableEntry, locate: Locator, pool: ThreadPoolExecutor, on_bytes: Callable[[int], None]
) -> Iterator[str]:
    """Yield one line per wrong page, and the number of those that are not listed."""
    layout, wrong_pages = table.geometry, 0
    paths = shard_files(table, locate)
    sums = locate.map(table.checksums)
    step = max(1, _BLOCK_BYTES // table.page_bytes)
    with PageReader(layout, paths) as reader:

        def check(first: int) -> list[str]:
            count = min(step, layout.page_count - first)
            on_bytes(count * table.page_bytes)
            try:
                pages = reader.pages(first, count)
            except StorageError as error:
                return [str(error)]
            faulty = {"fails its CRC32C check": _core.crc32c(pages) != sums[first : first + count]}
            if table.dtype == "bool":
                faulty[f"has bytes other than 0 and 1; {_BOOLS}"] = pages.max(1) > 1
            return [
                _page_fault(table, first + page, paths, fault)
                for fault, wrong in faulty.items()
                for page in np.flatnonzero(wrong).tolist()
            ]

        for lines in in_order(pool, check, range(0, layout.page_count, step), _BLOCKS_AT_ONCE):
            yield from lines[: max(0, _MOST_LINES - wrong_pages)]
            wrong_pages += len(lines)
    if wrong_pages > _MOST_LINES:
        yield f"{wrong_pages - _MOST_LINES} more pages of {table.name!r} are wrong"


def _page_fault(table: TableEntry, page: int, paths: Sequence[StoredFile], fault: str) -> str:
    layout = table.geometry
    shard, offset = layout.page_location(page)
    first = page * layout.rows_per_page
    last = min(first + layout.rows_per_page, table.row_count) - 1
    what = "row" if table.order is None else "position"
    rows = f"{what} {first}" if first == last else f"{what}s {first} to {last}"
    return f"{paths[shard]} at byte {offset}: page {page} of {table.name!r} ({rows}) {fault}"
