"""restripe: moves the pages of a dataset to other directories, by copying.

It makes a dataset of the same arrays and of new shards, and publishes it in place of the old one, as
`gids convert --overwrite` does.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gids.store.files import Locator, open_dataset, shard_files
from gids.store.geometry import div_ceil
from gids.store.manifest import TableEntry
from gids.store.names import shard_paths
from gids.store.rows import PageReader
from gids.write.files import check_space, link_file
from gids.write.page_sink import PageSink
from gids.write.publish import changing, dataset_path, stripe_directories
from gids.write.workplace import Workplace, finish_published

_BLOCK_BYTES = 8 << 20
_SYNC_BYTES = 256 << 20


def restripe(
    path: str | os.PathLike[str],
    stripe: Sequence[str | os.PathLike[str]],
    *,
    allow_dirs: Sequence[str | os.PathLike[str]] = (),
    workers: int = 2,
    on_total: Callable[[int], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Move one shard of every table to each directory of stripe; none: back into the dataset, as one shard.

    allow_dirs: directories outside the dataset that may contain its shards now. workers: number of threads.
    Checks the checksum of every page. Does nothing if the shards are already there. A store that is
    open keeps what it has read, as with any dataset that is replaced. on_total(bytes), on_bytes(n): progress,
    from any thread.

    Raises ValueError for a repeated directory, FileNotFoundError, FileExistsError while another process
    converts to path, FormatError if the dataset is damaged, StorageError if a disk is full or a page is
    damaged. The dataset is unchanged then.
    """
    root, directories = dataset_path(path), [d.resolve() for d in stripe_directories(stripe)]
    for directory in directories:
        if directories.count(directory) > 1:
            raise ValueError(f"stripe directory {directory} is given twice: give each directory once")
    finish_published(root, {})  # of a killed writer: what it left is removed even if there is nothing to move
    with changing(root, "restriping"):
        locate, manifest = open_dataset(root, [*allow_dirs, *directories])
        if all(_is_striped_over(t, directories) for t in manifest.tables):
            return
        workplace = Workplace(root, directories, None, overwrite=True)
        try:
            tables = [
                dataclasses.replace(
                    t, shards=shard_paths(Path(t.checksums.path).parent.name, workplace.folders, 1)
                )
                for t in manifest.tables
            ]
            needed = (
                (target, table.geometry.shard_bytes(shard))
                for table in tables
                for shard, target in enumerate(directories or [root.parent])
            )
            on_total(check_space(needed))
            copied = [table.checksums for table in tables]
            for entry in manifest.arrays():
                if entry not in copied:
                    link_file(root / entry.path, workplace.root / entry.path)
            with ThreadPoolExecutor(workers, "gids-restripe") as pool:
                for old, new in zip(manifest.tables, tables, strict=True):
                    _copy_pages(old, locate, new, workplace.root, pool, on_bytes)
            workplace.publish({"": dataclasses.replace(manifest, tables=tuple(tables))}, is_locked=True)
        finally:
            workplace.close(discard=True)


def _is_striped_over(table: TableEntry, directories: Sequence[Path]) -> bool:
    if not directories:
        return len(table.shards) == 1 and not Path(table.shards[0]).is_absolute()
    return [Path(s).parents[2] for s in table.shards if Path(s).is_absolute()] == list(directories)


def _copy_pages(
    old: TableEntry,
    locate: Locator,
    new: TableEntry,
    root: Path,
    pool: ThreadPoolExecutor,
    on_bytes: Callable[[int], None],
) -> None:
    layout, sums = old.geometry, locate.map(old.checksums)
    step = max(1, _BLOCK_BYTES // layout.page_bytes) * layout.rows_per_page
    with (
        PageReader(layout, shard_files(old, locate), sums, old.name) as reader,
        PageSink(root, new, direct=False, sync_bytes=_SYNC_BYTES) as sink,
    ):

        def copy(start: int) -> None:
            rows = reader.rows(start, step)
            sink.write(start, rows)
            on_bytes(div_ceil(len(rows), layout.rows_per_page) * layout.page_bytes)

        list(pool.map(copy, range(0, layout.row_count, step)))
        sink.sync()
