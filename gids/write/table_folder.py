"""The folder of a table that is being written. Removes the folders of killed writers. Called by TableWriter.

A new table gets a folder with a unique name, `tables/TABLE.XXXXXXXX` (and one with this name in every stripe
directory), which no manifest names until it is published. Its writer locks it (`flock`). A folder without a
lock that no manifest names was left by a killed writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from gids.errors import FormatError
from gids.store.files import Locator, read_manifest
from gids.store.manifest import Manifest, TableEntry
from gids.write.files import sync_directory
from gids.write.publish import is_open_at

_TABLES = "tables"
_OURS = re.compile(r"[\w-]+\.(bin|npy)")


class TableFolder:
    """A new folder, locked until close(). The caller holds only_writer.

    stem: the beginning of its name. Shards are as many as in the first table of the dataset, and in the same
    directories. Removes the folders of killed writers. Raises FormatError for a directory that is
    not allowed, OSError.

    Attributes: name; shards, checksums (paths as in a manifest); directories (of all files).
    """

    def __init__(self, root: Path, manifest: Manifest, locate: Locator, stem: str) -> None:
        like = manifest.tables[0].shards if manifest.tables else ()
        for shard in like:
            locate.shard(shard)
        outside = [Path(s).parent.parent for s in like if os.path.isabs(s)]
        _remove_leftovers(root, manifest, outside)
        self._root = root
        self.name = f"{stem}.{secrets.token_hex(4)}"
        main = root / _TABLES / self.name
        main.mkdir(parents=True)
        for parent in (main.parent, root):  # leftovers are found by this folder
            sync_directory(parent)
        self._fd = os.open(main, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.directories = [main, *dict.fromkeys(parent / self.name for parent in outside)]
        self.checksums = f"{_TABLES}/{self.name}/checksum.bin"
        folders = [str(p / self.name) for p in outside] or [f"{_TABLES}/{self.name}"] * max(1, len(like))
        self.shards = tuple(f"{folder}/shard-{i:02d}.bin" for i, folder in enumerate(folders))

    @property
    def is_in_dataset(self) -> bool:
        """Whether the folder is still in the dataset; False if the whole dataset was replaced."""
        return is_open_at(self._fd, self.directories[0])

    def remove(self) -> None:
        """Remove the files, unless the manifest names them."""
        with contextlib.suppress(FormatError, OSError):  # the dataset is gone
            if self.name in _named(read_manifest(self._root)):
                return
        _remove_folders(*self.directories)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._fd)


def remove_replaced(entry: TableEntry, locate: Locator, manifest: Manifest) -> None:
    """Remove the files of a table that this manifest no longer names. Ignores errors."""
    with contextlib.suppress(FormatError, OSError):
        main = locate.array(entry.checksums).path.parent
        outside = {locate.shard(shard).path.parent for shard in entry.shards} - {main}
        if not {folder.name for folder in (main, *outside)} & _named(manifest):
            _remove_folders(main, *sorted(outside))


def _named(manifest: Manifest) -> set[str]:
    """The names of the table folders in a manifest."""
    return {Path(p).parent.name for t in manifest.tables for p in (t.checksums.path, *t.shards)}


def _remove_leftovers(root: Path, manifest: Manifest, outside: Sequence[Path]) -> None:
    if not (root / _TABLES).is_dir():
        return
    named = _named(manifest)
    for folder in sorted((root / _TABLES).iterdir()):
        if folder.name in named or folder.is_symlink() or not folder.is_dir():
            continue
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_folders(folder, *(parent / folder.name for parent in outside))
        except BlockingIOError:
            pass  # another writer uses it
        finally:
            os.close(fd)


def _remove_folders(main: Path, *outside: Path) -> None:
    """Remove the folders of a table, last the one in the dataset, by which leftovers are found."""
    for folder in outside:
        _remove_folder(folder)
        with contextlib.suppress(OSError):
            sync_directory(folder.parent)
    _remove_folder(main)


def _remove_folder(folder: Path) -> None:
    """Remove the files of a table, and the folder if it is then empty."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if _OURS.fullmatch(file.name):
                file.unlink()
        folder.rmdir()
