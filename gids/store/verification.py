"""verify: reads every byte of a dataset and reports faults. Called by `gids verify`."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from gids import _core
from gids.errors import FormatError, StorageError
from gids.store.array_checks import checked_ids, checked_indptr, checked_order, file_crc32c
from gids.store.files import (
    Locator,
    array_bytes,
    array_rows,
    faults,
    load_scales,
    map_array,
    read_manifest,
    shard_files,
)
from gids.store.manifest import ArrayEntry, Manifest, NodesEntry, RelationEntry, TableEntry
from gids.store.names import HEAT_ROLES, SPLITS
from gids.store.rows import FileRows, Rows, blocks, read_exactly

_BLOCK_BYTES = 8 << 20
_BOOLS = "a bool must be 0 or 1; other bytes are read as 1"
_BLOCKS_AT_ONCE = 256
_SAMPLED_PAGES = 64
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

    First checks the checksum of the manifest and the size and header of every file, and stops if one is
    wrong. Then checks the checksum of every file and page (with padding), that indptr rises from 0 to the
    number of edges, that ids are in range, that heat is finite and that bool is 0 or 1. Reads everything once
    (the graph twice), in bounded memory, and leaves nothing in the page cache. Stops early if most of a
    sample of 64 pages of a large table are wrong. Prints up to 100 faulty pages per table and the number of
    others. on_total(bytes), on_bytes(n): progress.
    """
    root = Path(os.path.abspath(path))
    try:
        manifest = read_manifest(root)
        locate = Locator(root, allow_dirs)
    except (FormatError, OSError) as error:
        yield str(error)
        return
    broken = list(faults(manifest, locate))
    yield from broken
    if broken:
        return  # truncated or missing files cannot be read
    broken = [fault for table in manifest.tables for fault in _sampled_faults(table, locate)]
    yield from broken
    if broken:
        return
    on_total(_dataset_bytes(manifest))
    for entry in manifest.arrays():
        yield from _array_faults(locate.array(entry), entry)
        on_bytes(locate.array(entry).stat().st_size)
    for nodes in manifest.nodes:
        yield from _node_faults(nodes, locate)
    counts = {n.type: n.count for n in manifest.nodes}
    for relation in manifest.relations:
        yield from _graph_faults(relation, counts, locate)
    for table in manifest.tables:
        if table.order is not None:
            yield from _raised(checked_order, *_rows(table.order, locate))
    with ThreadPoolExecutor(workers, "gids-verify") as pool:
        for table in manifest.tables:
            yield from _scale_faults(table, locate)
            yield from _table_faults(table, locate, pool, on_bytes)


def _dataset_bytes(manifest: Manifest) -> int:
    pages = sum(t.geometry.page_count * t.page_bytes for t in manifest.tables)
    return pages + sum(array_bytes(a) for a in manifest.arrays())


def _array_faults(path: Path, entry: ArrayEntry) -> Iterator[str]:
    found = file_crc32c(path)
    if found != entry.crc32c:
        sums = f"CRC32C is {found:08x}, in the manifest {entry.crc32c:08x}"
        yield f"{path}: {sums}; the file was changed or damaged"


def _node_faults(nodes: NodesEntry, locate: Locator) -> Iterator[str]:
    for split in SPLITS:
        if f"{split}_idx" in nodes.arrays:
            yield from _raised(
                checked_ids, *_rows(nodes.arrays[f"{split}_idx"], locate), nodes.count, f"{split}_idx"
            )
    for role in HEAT_ROLES.values():
        if role in nodes.arrays and nodes.arrays[role].dtype == "float32":
            yield from _raised(_checked_heat, *_rows(nodes.arrays[role], locate))
    label = nodes.arrays.get("label")
    if label is not None and label.dtype == "bool":
        path = locate.array(label)
        flat = array_rows(path, label, torch.uint8).reshaped((math.prod(label.shape),))
        yield from _raised(_checked_bools, path, flat)


def _checked_heat(rows: Rows, block_bytes: int) -> Iterator[object]:
    for start, block in blocks(rows, block_bytes):
        values = block.numpy()
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(wrong):
            raise FormatError(
                f"[{start + wrong[0]}] is {values[wrong[0]]}; heat must be finite and 0 or more"
            )
        yield block


def _checked_bools(rows: Rows, block_bytes: int) -> Iterator[object]:
    for start, block in blocks(rows, block_bytes):
        wrong = np.flatnonzero(block.numpy() > 1)
        if len(wrong):
            raise FormatError(f"byte {start + wrong[0]} of a bool array is {int(block[wrong[0]])}; {_BOOLS}")
        yield block


def _graph_faults(relation: RelationEntry, counts: Mapping[str, int], locate: Locator) -> Iterator[str]:
    if not relation.arrays:
        return
    arrays = {role: _rows(entry, locate) for role, entry in relation.arrays.items()}
    yield from _raised(checked_indptr, *arrays["indptr"], relation.count)
    yield from _raised(checked_ids, *arrays["indices"], counts[relation.type[0]], "indices")
    if "edge_ids" in arrays:
        yield from _raised(checked_ids, *arrays["edge_ids"], relation.count, "edge_ids")


def _rows(entry: ArrayEntry, locate: Locator) -> tuple[Path, FileRows]:
    path = locate.array(entry)
    return path, array_rows(path, entry)


def _raised(check: Callable[..., Iterator[object]], path: Path, *arguments: object) -> Iterator[str]:
    try:
        for _ in check(*arguments, _BLOCK_BYTES):
            pass
    except (FormatError, StorageError) as error:
        yield f"{path}: {error}"


def _scale_faults(table: TableEntry, locate: Locator) -> Iterator[str]:
    columns = table.scale.columns if table.scale is not None else None
    if columns is not None:
        try:
            load_scales(locate.array(columns), columns)
        except FormatError as error:
            yield str(error)


def _sampled_faults(table: TableEntry, locate: Locator) -> Iterator[str]:
    """Yield one line if most of a sample of a large table's pages are wrong."""
    layout, wrong = table.geometry, 0
    if layout.page_count < 16 * _SAMPLED_PAGES:
        return
    sums = map_array(locate.array(table.checksums), table.checksums)
    page = np.empty((1, table.page_bytes), np.uint8)
    with contextlib.ExitStack() as stack:
        paths = shard_files(table, locate)
        files = [stack.enter_context(open(path, "rb", buffering=0)) for path in paths]
        for number in np.linspace(0, layout.page_count - 1, _SAMPLED_PAGES).astype(np.int64).tolist():
            shard, offset = layout.page_location(number)
            try:
                read_exactly(files[shard].fileno(), page.reshape(-1), offset, paths[shard])
            except StorageError:
                return  # the full pass reports the position
            wrong += int(_core.crc32c(page)[0] != sums[number])
    if wrong > _SAMPLED_PAGES // 2:
        yield (
            f"{table.name}: {wrong} of {_SAMPLED_PAGES} pages, sampled from the whole table, fail their "
            "CRC32C check. These are not the shards that were written; nothing else was checked. Restore the "
            "dataset, or convert the source again"
        )


def _table_faults(
    table: TableEntry, locate: Locator, pool: ThreadPoolExecutor, on_bytes: Callable[[int], None]
) -> Iterator[str]:
    layout, wrong_pages = table.geometry, 0
    for shard in range(layout.shard_count):
        path = locate.shard(table.shards[shard])
        try:
            for found in _wrong_pages(table, shard, locate, pool, on_bytes):
                shown = found[: max(0, _MOST_LINES - wrong_pages)]
                yield from (
                    _page_fault(table, n, path, layout.page_location(n)[1], fault) for n, fault in shown
                )
                wrong_pages += len(found)
        except StorageError as error:
            yield str(error)
    if wrong_pages > _MOST_LINES:
        yield f"{wrong_pages - _MOST_LINES} more pages of {table.name!r} are wrong"


def _wrong_pages(
    table: TableEntry,
    shard: int,
    locate: Locator,
    pool: ThreadPoolExecutor,
    on_bytes: Callable[[int], None],
) -> Iterator[list[tuple[int, str]]]:
    """Yield (page, fault) of the wrong pages of a shard, one block at a time. Raises StorageError."""
    layout, path = table.geometry, locate.shard(table.shards[shard])
    step = max(1, _BLOCK_BYTES // table.page_bytes)
    expected = array_rows(locate.array(table.checksums), table.checksums, torch.int32)
    with open(path, "rb", buffering=0) as file:

        def check(first: int) -> list[tuple[int, str]]:
            count = min(step, layout.shard_page_count(shard) - first)
            pages = np.empty((count, table.page_bytes), np.uint8)
            offset = first * table.page_bytes
            read_exactly(file.fileno(), pages.reshape(-1), offset, path)
            os.posix_fadvise(file.fileno(), offset, pages.nbytes, os.POSIX_FADV_DONTNEED)
            # Page i of the shard is page i * S + shard of the table.
            start = first * layout.shard_count + shard
            sums = torch.empty((count - 1) * layout.shard_count + 1, dtype=torch.int32)
            expected.read_into(start, sums)
            wrong = np.flatnonzero(_core.crc32c(pages) != sums.numpy().view(np.uint32)[:: layout.shard_count])
            on_bytes(pages.nbytes)
            faults = {"fails its CRC32C check": wrong}
            if table.dtype == "bool":
                faults[f"has bytes other than 0 and 1; {_BOOLS}"] = np.flatnonzero(pages.max(1) > 1)
            return [
                (start + page * layout.shard_count, fault)
                for fault, found in faults.items()
                for page in found.tolist()
            ]

        firsts = range(0, layout.shard_page_count(shard), step)
        for begin in range(0, len(firsts), _BLOCKS_AT_ONCE):
            yield from pool.map(check, firsts[begin : begin + _BLOCKS_AT_ONCE])


def _page_fault(table: TableEntry, page: int, path: Path, offset: int, fault: str) -> str:
    first = page * table.geometry.rows_per_page
    last = min(first + table.geometry.rows_per_page, table.row_count) - 1
    what = "row" if table.order is None else "position"
    rows = f"{what} {first}" if first == last else f"{what}s {first} to {last}"
    return f"{path} at byte {offset}: page {page} of {table.name!r} ({rows}) {fault}"
