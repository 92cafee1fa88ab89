"""restripe: moves the pages of a dataset to other directories, by copying. Called by `gids restripe`.

Only the shards move. First the folders of the old and the new shards are listed in the dataset. The new
shards are written beside the old ones and synced; then a manifest that names them replaces the old one. Then
the listed folders that the manifest does not use are removed, also after an error and when the next restripe
begins. After a kill at any time, the dataset is complete, with the old shards or the new ones.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from gids.errors import FormatError
from gids.store.files import Locator, faults, map_array, read_manifest, shard_files
from gids.store.geometry import MAX_SHARDS
from gids.store.manifest import Manifest, TableEntry, dump_manifest
from gids.store.read_lock import without_readers
from gids.store.scan import PageReader
from gids.write.files import sync_tree
from gids.write.page_sink import PageSink
from gids.write.publish import (
    make_shard_folder,
    only_writer,
    remove_leftovers,
    replace_manifest,
    shard_folder,
    shard_folders_of,
    unchanged_on_error,
    write_leftovers,
)
from gids.write.space import check_space

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
    Checks the checksum of every page. Does nothing if the shards are already there. on_total(bytes),
    on_bytes(n): progress, from any thread.

    Raises ValueError for a repeated directory, FileNotFoundError, PermissionError, FormatError if the dataset
    is damaged or open elsewhere, StorageError if a disk is full or a page is damaged. The dataset is
    unchanged then.
    """
    root = Path(os.path.abspath(path))
    directories = _checked_directories(stripe)
    with only_writer(root):
        locate = Locator(root, [*allow_dirs, *directories])
        manifest = locate.read_manifest()
        _remove_rest(root, manifest)  # left by a killed restripe
        for fault in faults(manifest, locate):
            raise FormatError(fault)
        if all(_is_striped_over(t, directories) for t in manifest.tables):
            return
        lock = locate.array(manifest.tables[0].checksums) if manifest.tables else None
        with without_readers(lock):
            _move(root, manifest, locate, directories, workers, on_total, on_bytes)


def _checked_directories(stripe: Sequence[str | os.PathLike[str]]) -> list[Path]:
    directories = [Path(d).resolve() for d in stripe]
    if len(directories) > MAX_SHARDS:
        raise ValueError(f"stripe has {len(directories)} directories; at most {MAX_SHARDS} are possible")
    for directory in directories:
        if directories.count(directory) > 1:
            raise ValueError(f"stripe directory {directory} is given twice: give each directory once")
        if not directory.is_dir():
            raise FileNotFoundError(f"stripe directory {directory} does not exist")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"stripe directory {directory} is not writable: change its owner or mode")
    return directories


def _is_striped_over(table: TableEntry, directories: Sequence[Path]) -> bool:
    if not directories:
        return len(table.shards) == 1 and not Path(table.shards[0]).is_absolute()
    return [Path(s).parents[2] for s in table.shards if Path(s).is_absolute()] == list(directories)


def _move(
    root: Path,
    manifest: Manifest,
    locate: Locator,
    directories: Sequence[Path],
    workers: int,
    on_total: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> None:
    id_ = secrets.token_hex(4)
    folders = [shard_folder(d, root, id_) for d in directories]
    tables = [dataclasses.replace(t, shards=_new_shards(t, folders, id_)) for t in manifest.tables]
    data = dump_manifest(dataclasses.replace(manifest, tables=tuple(tables)))  # also checks the paths
    sizes = [(t.geometry, s) for t in tables for s in range(len(t.shards))]
    on_total(sum(layout.shard_bytes(shard) for layout, shard in sizes))
    targets = directories or [root]
    check_space(((targets[shard], layout.shard_bytes(shard)) for layout, shard in sizes), [])
    try:
        with unchanged_on_error(root, "restriping"):
            write_leftovers(root, [*folders, *sorted(shard_folders_of(root) or ())])
            for folder in folders:
                make_shard_folder(folder, root)
            with ThreadPoolExecutor(workers, "gids-restripe") as pool:
                for old, table in zip(manifest.tables, tables, strict=True):
                    _copy(root, old, table, locate, pool, on_bytes)
            for folder in {(root / shard).parent.parent for table in tables for shard in table.shards}:
                sync_tree(folder)
            replace_manifest(root, data)
    finally:
        _remove_rest(root, read_manifest(root))


def _new_shards(table: TableEntry, folders: Sequence[Path], id_: str) -> tuple[str, ...]:
    table_folder = PurePosixPath(table.checksums.path).parent
    if folders:
        return tuple(
            str(folder / table_folder.name / f"shard-{i:02d}.bin") for i, folder in enumerate(folders)
        )
    # Not the name of an existing shard.
    path = str(table_folder / "shard-00.bin")
    return (str(table_folder / f"shard-00-{id_}.bin") if path in table.shards else path,)


def _copy(
    root: Path,
    old: TableEntry,
    new: TableEntry,
    locate: Locator,
    pool: ThreadPoolExecutor,
    on_bytes: Callable[[int], None],
) -> None:
    layout = old.geometry
    sums = map_array(locate.array(old.checksums), old.checksums)
    step = max(1, _BLOCK_BYTES // layout.page_bytes)
    pages_per_sync = step * max(1, _SYNC_BYTES // (step * layout.page_bytes))
    targets = [root / s for s in new.shards]
    with (
        PageReader(layout, shard_files(old, locate), sums, old.name) as reader,
        PageSink(new.geometry, targets, None, direct=False, flags=os.O_EXCL) as sink,
    ):

        def copy(first: int) -> None:
            pages = reader.pages(first, step)
            sink.store(first, pages)
            on_bytes(pages.nbytes)

        for start in range(0, layout.page_count, pages_per_sync):
            for _ in pool.map(copy, range(start, min(start + pages_per_sync, layout.page_count), step)):
                pass
            sink.sync()


def _remove_rest(root: Path, manifest: Manifest) -> None:
    """Remove the shards that the manifest does not name. The caller holds only_writer."""
    named = {root / s for t in manifest.tables for s in t.shards}
    for folder in {(root / t.checksums.path).parent for t in manifest.tables}:
        for file in folder.glob("shard-*.bin"):
            if file not in named:
                file.unlink()
    remove_leftovers(root)
